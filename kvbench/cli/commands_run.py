"""``list`` and ``run``: what can be measured, and measuring it."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.options import Db, Json, Selects
from kvbench.cli.output import emit, emit_json, fitted, say
from kvbench.contract.axis import PROFILES
from kvbench.errors import UsageError
from kvbench.units import format_bytes

if TYPE_CHECKING:
    from kvbench.contract.discover import Suites
    from kvbench.contract.result import Result, RunInfo
    from kvbench.machine.nvml_devices import Visit
    from kvbench.runner import Outcome
    from kvbench.store import Sink, Store

LIST_SCHEMA = "kvbench.list/1"
MAX_RUNS = 1000


def register(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    app.command("list")(list_benches)
    app.command("run")(run)


def list_benches(select: Selects = None, json: Json = False) -> None:
    """Show suites, benches, their axes and how many cases each profile has."""
    suites = _suites()
    benches = suites.select(select or [])
    if json:
        emit_json({
            "schema": LIST_SCHEMA,
            "benches": [
                {
                    "suite": b.suite, "bench": b.name, "version": b.version, "metric": b.metric, "unit": b.unit,
                    "better": b.better, "extra_metrics": list(b.extra_metrics), "doc": b.doc,
                    "axes": {
                        name: {
                            "kind": axis.kind, "legal": axis.describe(),
                            **{profile: [axis.format(v) for v in axis.values(profile)] for profile in PROFILES},
                        } for name, axis in b.axes.items()
                    },
                    "cases": {profile: sum(1 for _ in b.cases(profile)) for profile in PROFILES},
                } for b in benches
            ],
            "problems": list(suites.problems),
        })  # fmt: skip
        return
    lines = []
    for b in benches:
        counts = ", ".join(f"{profile} {sum(1 for _ in b.cases(profile))}" for profile in PROFILES)
        head = f"{b.suite}/{b.name}  {b.metric} in {b.unit} ({b.better} is better)  cases: {counts}"
        lines += fitted(head, "    ") + fitted(f"    {b.doc.splitlines()[0]}")
        for name, axis in b.axes.items():
            lines += fitted(f"    -a {name}={axis.describe()}", "      ")
    emit("\n".join(lines) if lines else "no suites found")


def run(
    select: Selects = None,
    axis: Annotated[
        list[str] | None,
        typer.Option("-a", "--axis", metavar="AXIS=V1,V2", help="Replace the profile's values of an axis; repeatable."),
    ] = None,
    profile: Annotated[
        str, typer.Option("--profile", metavar="smoke|quick|full", help="How long to measure.")
    ] = "quick",
    runs: Annotated[int, typer.Option("--runs", help="Fresh runs: the unit of inference between runs.")] = 1,
    db: Db = None,
    no_db: Annotated[bool, typer.Option("--no-db", help="Store nothing in a database.")] = False,
    bundle: Annotated[Path | None, typer.Option("--bundle", metavar="FILE", help="Also write a bundle file.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="Name of the group, usable as selector.")] = None,
    resume: Annotated[str | None, typer.Option("--resume", metavar="RUN", help="Finish an interrupted run.")] = None,
    scratch: Annotated[str | None, typer.Option("--scratch", metavar="DIR", help="Directory for file tiers.")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="ID[,ID]", help="GPUs to measure: index, MIG index 0:1, UUID prefix or all (default)."
        ),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Fail instead of waiting for another run here.")] = False,
    json: Json = False,
) -> None:
    """Measure the selected benches on this machine and store every case as it is done."""
    from kvbench import runner
    from kvbench.cli.progress import Progress

    chosen = next((p for p in PROFILES if p == profile), None)
    if chosen is None:
        raise UsageError("unknown profile", where="--profile", got=profile, expected=" ".join(PROFILES))
    if not 1 <= runs <= MAX_RUNS:
        raise UsageError("out of range", where="--runs", got=runs, expected=f"1..{MAX_RUNS}")
    if label is not None:
        from kvbench.store import check_label

        check_label(label)
    if no_db and resume:
        raise UsageError("nothing to resume from", where="--resume with --no-db", mend="leave one of them out")
    if scratch is not None and not (scratch and Path(scratch).is_dir()):
        raise UsageError("not a directory", where="--scratch", got=scratch, mend="make it first, or leave it out")
    overrides = parse_overrides(axis or [])
    suites = _suites()
    ui = Progress(kept=not no_db or bundle is not None)
    with contextlib.ExitStack() as stack:
        locks, gpus = _devices(device, stack, ui.note)
        sinks: list[Sink] = []
        store: Store | None = None
        done: dict[str, list[Result]] = {}
        if resume:
            if select or overrides or bundle or label or runs != 1:
                raise UsageError("a resumed run keeps its plan", where="--resume", mend="give no other selection")
            store = open_sink(db, stack, sinks)
            planned, done, seconds = resumed(store, resume, suites)
            _check_measurable(planned[0])
        else:
            plan = runner.make_plan(suites, select or [], overrides, chosen, gpus)
            if plan.disk:
                from kvbench.memory.file import scratch_dir

                where = scratch_dir(scratch)
                runner.check_disk(plan, where)
                ui.note(f"scratch files of up to {format_bytes(plan.disk)} in {where}")
            if not no_db:
                store = open_sink(db, stack, sinks)
            if bundle is not None:
                from kvbench.store.bundle import BundleWriter

                writer = stack.enter_context(BundleWriter(bundle))
                writer.check_writable()
                sinks.append(writer)
            planned, seconds = runner.new_runs(plan, runs, label), plan.seconds
        _lock(stack, locks, wait=not no_wait, notify=ui.note)
        if resume and store is not None:
            planned, done, seconds = resumed(
                store, resume, suites
            )  # another may have finished it while this one waited
            store.reopen_run(planned[0])
        outcome = runner.Runner(sinks, ui, suites, None if scratch is None else Path(scratch)).execute(
            planned, seconds, done
        )
        _print(outcome, json=json)
        if store is not None:
            say(f"stored in {store.describe()}; kvbench show {planned[0].uuid[:8]} shows it again")
    raise typer.Exit(outcome.exit_code)


def parse_overrides(texts: Sequence[str]) -> dict[str, str]:
    """Return ``{axis: "V1,V2"}`` of ``AXIS=V1,V2`` words; raises UsageError on anything else or a repeated axis."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name.strip() or not values.strip():
            raise UsageError("not an axis choice", where="-a", got=text, expected="AXIS=VALUE[,VALUE]...")
        if name.strip() in found:
            raise UsageError("axis given twice", where="-a", got=name.strip(), mend="put all its values in one -a")
        found[name.strip()] = values
    return found


def _suites() -> Suites:
    from kvbench.contract.discover import load_suites

    suites = load_suites()
    for problem in suites.problems:
        say(f"kvbench: warning: {problem}")
    return suites


def open_sink(db: str | None, stack: contextlib.ExitStack, sinks: list[Sink]) -> Store:
    """Open the database for writing until ``stack`` ends, say its notices, and add it to ``sinks``."""
    from kvbench.store import open_store

    store = stack.enter_context(open_store(db))
    for notice in store.notices:
        say(f"kvbench: {notice}")
    store.check_writable()
    sinks.append(store)
    return store


def _devices(
    spec: str | None, stack: contextlib.ExitStack, notify: Callable[[str], None]
) -> tuple[tuple[str, ...] | None, tuple[Visit, ...]]:
    """Let the workers see the GPUs of ``--device`` only; return their locks and what a plan visits on them.

    The locks are None without the option: all. It comes before the fingerprint is taken: which GPUs are visible is
    part of the environment.
    """
    from kvbench.machine.nvml_devices import bus_order, choose, only, read_devices, visits
    from kvbench.machine.topology import topology

    chosen = choose(spec, read_devices())
    if spec is not None:
        stack.enter_context(only(chosen))
    elif len(chosen) > 1:
        stack.enter_context(bus_order())
    found = visits(chosen, topology()) if chosen else ()
    if len(found) < len(chosen):
        notify(f"CUDA shows one MIG instance to a process: {chosen[0].id} is measured; --device names another")
    return None if spec is None else tuple(device.lock for device in chosen), found


def _lock(
    stack: contextlib.ExitStack, gpus: tuple[str, ...] | None, *, wait: bool, notify: Callable[[str], None]
) -> None:
    from kvbench.locks import acquire, machine_resources

    stack.enter_context(acquire(machine_resources(gpus), wait=wait, notify=notify))


def resumed(store: Store, selector: str, suites: Suites) -> tuple[list[RunInfo], dict[str, list[Result]], float]:
    """Return the run ``selector`` names as this process will go on with it, its rows by digest, and the seconds left.

    Raises UsageError unless it is one interrupted run of this machine and environment.
    """
    from kvbench import runner

    found = store.resolve(selector)
    if len(found) != 1:
        raise UsageError("several runs match", where="--resume", got=selector, expected="one run UUID or its prefix")
    old = found[0]
    here = runner.here()
    runner.resume_plan(old, store.effective_status(old), suites, here)
    done: dict[str, list[Result]] = {}
    for row in store.results(old.uuid):
        done.setdefault(row.digest, []).append(row)
    resumed = replace(
        old, status="running", resumed=True, finished_at=None, host=here.host, boot_id=here.boot_id, pid=here.pid,
        pid_start=here.pid_start,
    )  # fmt: skip
    left = [suites.find(p.suite, p.bench) for p in old.plan if p.digest not in done]
    pace = runner.DEFAULT_SECONDS[next(p for p in PROFILES if p == old.profile)]
    return [resumed], done, sum(b.seconds.get(old.profile, pace) for b in left)


def _check_measurable(run: RunInfo) -> None:
    """Raise UsageError for a run whose cases name what only the command that made it knows: every case would come out
    skipped, and a finished run cannot be resumed."""
    for planned in run.plan:
        if (planned.suite, planned.bench) != ("routes", "replay"):
            continue
        workload, machine = (str(planned.axes[name]) for name in ("workload", "machine"))
        if "@" not in workload + machine:
            continue
        file, at, _ = workload.rpartition("@")
        file = "FILE" if file.endswith("…") else shlex.quote(file)  # a long name is not in the plan whole
        command = f"kvbench replay {f'{file} ' if at else ''}--resume {run.uuid[:8]}"
        raise UsageError(
            "a run of `kvbench replay`", where=f"--resume {run.uuid[:8]}", got=workload if at else machine,
            expected="cases that a measuring process can make by itself", mend=f"{command} goes on with it",
        )  # fmt: skip


def _print(outcome: Outcome, *, json: bool) -> None:
    from kvbench.contract.document import results_document

    if json:
        emit_json(results_document(outcome.runs, outcome.rows, outcome.canaries))
        return
    from kvbench.report.summary import run_summary

    emit(run_summary(outcome.runs, outcome.rows, outcome.canaries, cut=outcome.cut))
