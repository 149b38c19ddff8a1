"""``replay``: a trace through scheduling policies, on the costs of a machine that need not be this one."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.options import Db, Json
from kvbench.cli.output import emit, emit_json, say
from kvbench.errors import EXIT_OK, UsageError, printable

if TYPE_CHECKING:
    from kvbench.contract.axis import Profile
    from kvbench.contract.bench import Bench
    from kvbench.contract.case import Case
    from kvbench.contract.discover import Suites
    from kvbench.contract.result import PlannedCase
    from kvbench.replay.job import Job
    from kvbench.runner import Plan
    from kvbench.store import Sink, Store

SWEEP = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # times the workload's own rate
FIRST_REQUESTS = 1000  # of a preset whose dataset is larger
MOST_RATES = 100
PROFILE: Profile = "quick"  # a replay has no profile: this is what its run row says


def register(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    app.command("replay")(replay)


def replay(
    trace: Annotated[
        str | None, typer.Argument(metavar="TRACE|PRESET", help="A trace file, or a preset as loogle:distance=max.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", metavar="P", help="Policy to replay; repeatable, or all.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", metavar="M", help="t4 a10g a100 h100 h200 gh200, or this. [h200]")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Model served. [llama-3-8b]")] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="R[,R]", help="Requests a second; default: the workload's own.")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="A quarter to 16 times the workload's own rate.")] = False,
    requests: Annotated[int | None, typer.Option("--requests", metavar="N", help="How many; default: all.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of a preset. [0]")] = None,
    in_flight: Annotated[
        int | None, typer.Option("--in-flight", metavar="N", help="Requests inside at once; default: no limit.")
    ] = None,
    slo_ttft: Annotated[
        float | None, typer.Option("--slo-ttft", metavar="S", help="Objective: seconds to the first token.")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option("--slo-tpot", metavar="S", help="Objective: seconds a further token.")
    ] = None,
    chunked: Annotated[
        bool | None, typer.Option("--chunked/--no-chunked", help="Chunked prefill, for policies that have the choice.")
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", metavar="[P.]NAME=VALUE", help="Parameter of the policies, or of P; repeatable."),
    ] = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also each policy with one of its switches turned, in turn.")
    ] = False,
    form: Annotated[
        str | None, typer.Option("--format", metavar="F", help="Format of the trace file; default: by its first line.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="What is odd in a trace file is an error.")] = False,
    sorted_copy: Annotated[
        Path | None,
        typer.Option("--sorted-copy", metavar="OUT", help="Write the trace sorted by time, or the preset, and end."),
    ] = None,
    db: Db = None,
    no_db: Annotated[bool, typer.Option("--no-db", help="Store nothing in a database.")] = False,
    label: Annotated[str | None, typer.Option("--label", help="Name of the group, usable as selector.")] = None,
    resume: Annotated[str | None, typer.Option("--resume", metavar="RUN", help="Finish an interrupted run.")] = None,
    json: Json = False,
) -> None:
    """Replay a trace through scheduling policies in simulated time: throughput, latencies, hits, stalls, link bytes.

    Nothing is measured: every row has the basis simulated. Exit code as of `run`.
    """
    if sorted_copy is not None:
        others = {
            "--policy": policy, "--machine": machine, "--model": model, "--sweep": sweep or None,
            "--in-flight": in_flight, "--slo-ttft": slo_ttft, "--slo-tpot": slo_tpot, "--chunked": chunked,
            "--param": param, "--ablate": ablate or None, "--strict": strict or None, "--db": db,
            "--no-db": no_db or None, "--label": label, "--resume": resume, "--json": json or None,
        }  # fmt: skip
        for name, value in others.items():
            if value is not None:
                raise UsageError("nothing is replayed", where=f"--sorted-copy with {name}", mend="leave it out")
        raise typer.Exit(_sorted_copy(trace, sorted_copy, form, requests, rate, seed))
    from kvbench import runner
    from kvbench.cli.commands_run import open_sink, resumed
    from kvbench.cli.progress import Progress
    from kvbench.cli.replay_machine import machine_axis
    from kvbench.cli.replay_run import ReplayRunner
    from kvbench.contract.discover import load_suites
    from kvbench.report.replay_rows import document, replays

    given = (policy, machine, model, rate, requests, seed, in_flight, slo_ttft, slo_tpot, chunked, param, label)
    if resume and (no_db or sweep or ablate or any(each is not None for each in given)):
        raise UsageError("a resumed run keeps its plan", where="--resume", mend="give the trace and --db, nothing else")
    if label is not None:
        from kvbench.store import check_label

        check_label(label)
    if seed is not None and trace is not None and is_file(trace):
        raise UsageError(
            "a file is replayed as it is", where="--seed", got=seed, mend="a seed is a preset's: leave it out"
        )
    workload, rates = _workload(trace, form, strict=strict, needed=not resume)
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        store: Store | None = None
        if resume:
            suites = load_suites()
            store = open_sink(db, stack, sinks)
            planned, done, seconds = resumed(store, resume, suites)
            _check_resumed(planned[0].plan, workload, db)
            store.reopen_run(planned[0])
        else:
            chosen = policies(policy)
            machine_name = machine_axis(machine or "h200", db)
            texts = {name: list(_variants(name, chosen, param or [], chunked, ablate=ablate)) for name in chosen}
            if ablate and all(len(found) == 1 for found in texts.values()):
                raise UsageError("no policy has a switch to turn", where="--ablate", got=" ".join(chosen))
            jobs = [
                _job(workload, name, text, machine_name, model or "llama-3-8b", each, requests, seed or 0, in_flight,
                     slo_ttft, slo_tpot, strictly="all" not in (policy or ()))
                for each in _rates(rate, rates, sweep=sweep) for name in chosen for text in texts[name]
            ]  # fmt: skip
            suites = load_suites()
            plan = _plan(suites, jobs)
            done = {}
            if not no_db:
                store = open_sink(db, stack, sinks)
            planned, seconds = runner.new_runs(plan, 1, label, seed=seed or 0), plan.seconds
        outcome = ReplayRunner(sinks, Progress(kept=not no_db), suites).execute(planned, seconds, done)
        order = {each.digest: i for i, each in enumerate(planned[0].plan)}
        found = sorted(replays(outcome.rows), key=lambda each: order[each.first.digest])
        if json:
            emit_json(document(outcome.runs, found))
        else:
            from kvbench.report.replay_text import replay_text

            emit(replay_text(outcome.runs, found))
        if store is not None:
            uuid = planned[0].uuid[:8]
            say(f"stored in {store.describe()}; kvbench show {uuid} shows the rows, kvbench report {uuid} the curves")
            if outcome.signal is not None:
                say(f"kvbench replay{f' {printable(trace, 80)}' if trace else ''} --resume {uuid} goes on")
    raise typer.Exit(outcome.exit_code)


def policies(words: Sequence[str] | None) -> list[str]:
    """Return the policies ``words`` name, ``all`` for every one, in that order; UsageError for one that is unknown."""
    from kvbench.replay.policies import POLICIES, entry

    if not words:
        raise UsageError("a policy is needed", where="--policy", expected=f"one of {' '.join(POLICIES)}, or all")
    found: dict[str, None] = {}
    for word in (part.strip() for text in words for part in text.split(",")):
        if word == "all":
            found |= dict.fromkeys(POLICIES)
        else:
            entry(word)
            found[word] = None
    return list(found)


def _workload(trace: str | None, form: str | None, *, strict: bool, needed: bool) -> tuple[str | None, float | None]:
    """Return the name of the workload and its own rate, reading a trace file once; what is odd in it is said."""
    from kvbench.replay.generate.presets import PRESETS, preset

    if trace is None and needed:
        raise UsageError("a trace is needed", where="kvbench replay", expected=f"a file, or {' '.join(PRESETS)}")
    if trace is None or not is_file(trace):
        _only_of_files(trace, form, strict=strict)
    if trace is None:
        return None, None
    if is_file(trace):
        from kvbench.replay.job import know_trace
        from kvbench.replay.traces.trace import describe, open_trace

        found = open_trace(Path(trace), form, strict=strict)
        say(f"kvbench: {describe(found)}")
        for notice in found.notices:
            say(f"kvbench: {notice}")
        return know_trace(found), found.facts.rate
    chosen = preset(trace)
    return chosen.text, chosen.preset.rate


def _only_of_files(trace: str | None, form: str | None, *, strict: bool) -> None:
    """Raise UsageError for an option that says how a trace file is read where there is none."""
    if form is not None:
        raise UsageError("only a file has a format", where="--format", got=trace, expected="a trace file")
    if strict:
        raise UsageError("only a file can be odd", where="--strict", got=trace, expected="a trace file")


def is_file(trace: str) -> bool:
    """Return whether ``trace`` is meant as a file: it is there, or reads like a path and is no preset."""
    from kvbench.replay.generate.presets import PRESETS

    with contextlib.suppress(OSError, ValueError):
        if trace and trace not in PRESETS and Path(trace).exists():
            return True
    return trace.partition(":")[0] not in PRESETS and ("/" in trace or trace.endswith((".jsonl", ".csv", ".gz")))


def _rates(text: str | None, own: float | None, *, sweep: bool) -> list[int]:
    """Return rates in requests per 1000 s; 0 stands for the workload's own. UsageError for what is no rate."""
    if sweep:
        if text is not None:
            raise UsageError("one of them", where="--rate with --sweep", got=text, mend="--rate takes a list of rates")
        if own is None:
            raise UsageError("all requests come at once: there is no rate to vary", where="--sweep")
        return list(dict.fromkeys(max(1, round(1000 * own * factor)) for factor in SWEEP))
    if text is None:
        return [0]
    found = []
    for word in text.split(","):
        try:
            rate = float(word)
        except ValueError:
            rate = math.nan
        if not 0.001 <= rate <= 1e6:
            raise UsageError("not a rate", where="--rate", got=word, expected="requests a second, 0.001 to 1000000")
        found.append(round(1000 * rate))
    if len(found) > MOST_RATES:
        raise UsageError("too many rates", where="--rate", got=len(found), expected=f"at most {MOST_RATES}")
    return list(dict.fromkeys(found))


def _variants(
    name: str, chosen: Sequence[str], words: Sequence[str], chunked: bool | None, *, ablate: bool
) -> Iterator[str]:  # fmt: skip
    """Yield the parameter texts policy ``name`` is replayed with: as asked, then each switch turned, in turn."""
    from dataclasses import fields

    from kvbench.replay.job import params_of, params_text, toggles
    from kvbench.replay.policies import params_class

    mine: list[str] = []
    for word in words:
        owner, dot, rest = word.partition(".")
        if dot and "=" not in owner:
            if owner not in chosen:
                raise UsageError("parameter of another policy", where="--param", got=word, expected=" ".join(chosen))
            if owner == name:
                mine.append(rest)
        else:
            mine.append(word)
    if chunked is not None:
        if "chunked" not in {field.name for field in fields(params_class(name))}:
            raise UsageError("the policy has no such choice", where="--chunked", got=name, mend="leave it out")
        mine.append(f"chunked={chunked}")
    twice = [a for a, b in itertools.combinations([each.partition("=")[0] for each in mine], 2) if a == b]
    if twice:
        raise UsageError("parameter given twice", where=f"policy {name}", got=twice[0])
    whole = params_text(name, mine)
    found = {whole: None}
    if ablate:
        plain = params_of(name, whole)
        kept = [each for each in mine if each.partition("=")[0] not in toggles(name)]
        now = {each: getattr(plain, each) for each in toggles(name)}
        for switch in now:
            turned = [f"{each}={value is not (each == switch)}" for each, value in now.items()]
            try:
                found[params_text(name, [*kept, *turned])] = None
            except UsageError as error:
                say(f"kvbench: {name} cannot have {switch}={not now[switch]} alone: {error}")
    yield from found


def _job(
    workload: str | None, policy: str, params: str, machine: str, model: str, rate: int, requests: int | None,
    seed: int, in_flight: int | None, slo_ttft: float | None, slo_tpot: float | None, *, strictly: bool,
) -> Job:  # fmt: skip
    """Return the job after checking it; ``strictly``: a policy that cannot be had on this machine is an error, else
    its replays are skipped."""
    from kvbench.replay.generate.presets import preset
    from kvbench.replay.job import Job, check, check_policy, trace_of
    from kvbench.replay.models import model as model_shape

    assert workload is not None
    for name, value in (("--requests", requests), ("--in-flight", in_flight)):
        if value is not None and value < 1:
            raise UsageError("out of range", where=name, got=value, expected="1 or more")
    number = requests or 0
    if not number and trace_of(workload) is None:
        number = min(preset(workload).preset.requests, FIRST_REQUESTS)
    job = Job(
        workload, policy, params, machine, model_shape(model).name, rate, number, seed, in_flight or 0,
        _micro(slo_ttft, "--slo-ttft"), _micro(slo_tpot, "--slo-tpot"),
    )  # fmt: skip
    check(job)
    if strictly:
        check_policy(job)
    return job


def _micro(value: float | None, where: str) -> int:
    if value is None:
        return 0
    if not 1e-6 <= value <= 1e4:
        raise UsageError("not an objective", where=where, got=value, expected="seconds, 0.000001 to 10000")
    return round(value * 1e6)


def _plan(suites: Suites, jobs: Sequence[Job]) -> Plan:
    from kvbench.runner import Plan

    member: Bench = suites.find("routes", "replay")
    pairs: list[tuple[Bench, Case]] = [(member, member.case(job.axes())) for job in jobs]
    return Plan(tuple(pairs), PROFILE, 0.3 * len(pairs), 0)


def _check_resumed(plan: Sequence[PlannedCase], workload: str | None, db: str | None) -> None:
    """Raise UsageError unless the run is one of replays, its trace file is the one given, and this machine's numbers
    are still those it began with."""
    from kvbench.cli.replay_machine import this_machine

    measured = None
    for planned in plan:
        axes = planned.axes
        if (planned.suite, planned.bench) != ("routes", "replay"):
            raise UsageError("not a run of replays", where="--resume", mend="kvbench run --resume goes on with it")
        wanted, machine = str(axes["workload"]), str(axes["machine"])
        if ("@" in wanted or workload is not None) and workload != wanted:
            raise UsageError(
                "the run is of another trace", where="--resume", got=workload or "no trace file", expected=wanted,
                mend="give that file as TRACE",
            )  # fmt: skip
        if "@" in machine:
            measured = measured or this_machine(db)
            if measured != machine:
                raise UsageError(
                    "this machine's numbers have changed since", where="--resume", got=measured, expected=machine,
                    mend="start a new run",
                )  # fmt: skip


def _sorted_copy(
    trace: str | None, out: Path, form: str | None, requests: int | None, rate: str | None, seed: int | None
) -> int:  # fmt: skip
    """Write the trace file sorted by time, or a preset's requests as kvbench lines; return the exit code."""
    from kvbench.replay.generate.presets import preset
    from kvbench.replay.traces.write import sorted_copy, write_requests

    if trace is None:
        raise UsageError("a trace is needed", where="--sorted-copy", expected="a trace file, or a preset")
    if is_file(trace):
        for name, value in (("--requests", requests), ("--rate", rate), ("--seed", seed)):
            if value is not None:
                raise UsageError("a file is copied whole", where=f"--sorted-copy with {name}", mend="leave it out")
        number = sorted_copy(Path(trace), out, form)
    else:
        _only_of_files(trace, form, strict=False)
        chosen = preset(trace)
        if requests is not None and requests < 1:
            raise UsageError("out of range", where="--requests", got=requests, expected="1 or more")
        rates = _rates(rate, None, sweep=False)
        if len(rates) > 1:
            raise UsageError("one rate a file", where="--rate", got=rate)
        count = requests or min(chosen.preset.requests, FIRST_REQUESTS)
        number = write_requests(out, chosen.requests(count, rates[0] / 1e3 or None, seed or 0))
    emit(f"wrote {number} requests to {printable(str(out))}")
    return EXIT_OK
