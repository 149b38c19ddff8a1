"""Plans a run, drives one worker through it, and commits each case before the next starts (design 5)."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import kvbench
from kvbench import canary
from kvbench.contract.axis import PROFILES, Profile, Value
from kvbench.contract.bench import Bench
from kvbench.contract.case import Case
from kvbench.contract.discover import Suites
from kvbench.contract.result import HAS_VALUE, PlannedCase, Result, RunInfo, RunStatus
from kvbench.errors import EXIT_NO_DATA, EXIT_OK, KvbenchError, NoData, UsageError
from kvbench.store.consistent import standing
from kvbench.store.sink import Sink
from kvbench.units import format_bytes
from kvbench.worker_handle import Stopped, WorkerHandle, WorkerLost

if TYPE_CHECKING:
    from kvbench.machine.nvml_devices import Visit

DEFAULT_SECONDS: Mapping[Profile, float] = {"smoke": 0.5, "quick": 2.0, "full": 8.0}  # one case, for the estimate only
START_LIMIT_S = 300.0  # includes compiling every kernel of a first run on a slow box
COMPILE_ALLOWANCE_S = 60.0  # a bench's first case in a worker may compile its kernels, outside the timed region


class Ui(Protocol):
    """What the user sees while it runs; must never raise because an output was closed."""

    def note(self, line: str) -> None: ...
    def begin(self, run: RunInfo, number: int, runs: int, seconds: float, done: int) -> None: ...
    def case(self, done: int, total: int, text: str, seconds_left: float) -> None: ...
    def stored(self, done: int, total: int, text: str, row: Result) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases to measure, with what they are expected to cost."""

    pairs: tuple[tuple[Bench, Case], ...]
    profile: Profile
    seconds: float
    disk: int


@dataclass(slots=True)
class Outcome:
    """What a command measured: its runs, their rows (canaries apart) and the signal that ended it, if any."""

    runs: list[RunInfo] = field(default_factory=list)
    rows: list[tuple[str, Result]] = field(default_factory=list)
    canaries: list[tuple[str, Result]] = field(default_factory=list)
    signal: int | None = None
    cut: float = 0.0  # seconds of the case that the signal ended, which has no row

    @property
    def exit_code(self) -> int:
        """0 if at least one case has a value and none failed or is invalid, else 3; 128 + signal when stopped."""
        if self.signal is not None:
            return 128 + self.signal
        statuses = [row.status for _, row in self.rows]
        good = any(status in HAS_VALUE and status != "invalid" for status in statuses)
        return EXIT_OK if good and not {"failed", "invalid"} & set(statuses) else EXIT_NO_DATA


def make_plan(
    suites: Suites, selects: Sequence[str], overrides: Mapping[str, str], profile: Profile, gpus: Sequence[Visit] = ()
) -> Plan:
    """Return the cases ``selects`` and ``-a`` overrides name; raises UsageError or, for an empty grid, NoData.

    ``gpus``: a bench with an axis ``device`` that no override names visits each of them, and on each the nodes it
    lists if the bench has an axis ``node``. Without any its grid is that of one GPU: it says what is not there.
    """
    benches = suites.select(selects)
    pairs: list[tuple[Bench, Case]] = []
    for member in benches:
        for name in overrides:
            if name not in member.axes:
                raise UsageError(
                    "unknown axis", where=f"{member.suite}/{member.name}", got=name,
                    expected="one of " + " ".join(member.axes), mend="-a needs an axis that every selected bench has",
                )  # fmt: skip
        values: dict[str, tuple[Value, ...]] = {
            name: member.axes[name].parse_list(text, f"-a {name}") for name, text in overrides.items()
        }
        for place in _places(member, profile, values, gpus):
            pairs.extend((member, case) for case in member.cases(profile, values | place))
    if not pairs:
        raise NoData(
            "the selection holds no case", where=" ".join(selects) or "all suites",
            mend="kvbench list shows what can be combined",
        )  # fmt: skip
    seconds = sum(member.seconds.get(profile, DEFAULT_SECONDS[profile]) for member, _ in pairs)
    seconds += sum(member.setup(case.axes) for member, case in pairs if member.setup)
    seconds += canary.expected_seconds(profile)
    disk = max((member.disk(case.axes) for member, case in pairs if member.disk), default=0)
    return Plan(tuple(pairs), profile, seconds, disk)


def _places(
    member: Bench, profile: Profile, given: Mapping[str, tuple[Value, ...]], gpus: Sequence[Visit]
) -> Iterator[dict[str, tuple[Value, ...]]]:
    """Yield the values of ``device`` and ``node`` at each GPU the bench visits; nothing of them where it has no say."""
    device, node = member.axes.get("device"), member.axes.get("node")
    if device is None or "device" in given or device.values(profile) != (0,) or not gpus:
        yield {}
        return
    for visit in gpus:
        place: dict[str, tuple[Value, ...]] = {"device": (visit.device,)}
        if node is not None and "node" not in given and node.values(profile) == ("near",):
            place["node"] = tuple(word for word in visit.nodes if word in node.legal)
        if visit.device <= device.high:
            yield place


def check_disk(plan: Plan, directory: Path) -> None:
    """Raise UsageError when the scratch directory cannot hold twice the plan's largest file."""
    if not plan.disk:
        return
    probe = directory
    while not probe.exists() and probe != probe.parent:
        probe = probe.parent
    free = shutil.disk_usage(probe).free
    if free < 2 * plan.disk:
        raise UsageError(
            "not enough free space for scratch files", where=str(directory), got=format_bytes(free),
            expected=f"{format_bytes(2 * plan.disk)} (twice the largest file)", mend="give --scratch DIR elsewhere",
        )  # fmt: skip


class Interrupts:
    """Turns SIGINT and SIGTERM into a flag, so a commit under way always completes; a second one raises at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __call__(self) -> bool:
        return self.received is not None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        def handler(number: int, _frame: object) -> None:
            if self.received is not None:
                raise KeyboardInterrupt
            self.received = number

        before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)


def new_runs(
    plan: Plan, count: int, label: str | None, seed: int | None = None, flags: tuple[str, ...] = ()
) -> list[RunInfo]:
    """Return ``count`` run records of one group; with more than one, each has its own shuffled, recorded order."""
    from kvbench.machine.fingerprint import fingerprint
    from kvbench.machine.identity import identity

    finger, me = fingerprint(), identity()
    group = str(uuid.uuid4())
    seed = random.SystemRandom().getrandbits(31) if seed is None else seed
    runs = []
    for number in range(count):
        order = list(
            {
                case.digest: PlannedCase(case.digest, case.suite, case.bench, case.version, dict(case.axes))
                for _, case in plan.pairs
            }.values()
        )
        if count > 1:
            random.Random(seed + number).shuffle(order)
        runs.append(
            RunInfo(
                uuid=str(uuid.uuid4()),
                group=group,
                label=label,
                started_at=now(),
                hw_class=finger.hw_class,
                env_digest=finger.env_digest,
                machine=finger.machine,
                env=finger.env,
                git=me.git,
                profile=plan.profile,
                seed=seed + number,
                plan=tuple(order),
                host=me.host,
                boot_id=me.boot_id,
                pid=me.pid,
                pid_start=me.pid_start,
                kvbench_version=kvbench.__version__,
                flags=flags,
            )
        )
    return runs


def here() -> RunInfo:
    """Return a record of a run of nothing: this machine, its environment and this process."""
    return new_runs(Plan((), "smoke", 0.0, 0), 1, None)[0]


def now() -> str:
    """Return the time as UTC ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class Runner:
    """Measures runs one after the other. ``done`` rows (by digest) of a resumed run are kept, not measured again."""

    def __init__(self, sinks: Sequence[Sink], ui: Ui, suites: Suites, scratch: Path | None = None) -> None:
        self._sinks, self._ui, self._suites, self._scratch = list(sinks), ui, suites, scratch
        self._stop = Interrupts()
        self._cut = 0.0

    def execute(
        self, runs: Sequence[RunInfo], seconds: float, done: Mapping[str, Sequence[Result]] | None = None
    ) -> Outcome:
        """Run all of ``runs``; what is measured before a signal stays stored and is in the outcome."""
        outcome = Outcome()
        with self._stop.installed():
            for number, planned in enumerate(runs, 1):
                run = planned if planned.resumed else replace(planned, started_at=now())
                if not run.resumed:
                    for sink in self._sinks:
                        sink.begin_run(run)
                rows: list[Result] = [row for kept in (done or {}).values() for row in kept]
                self._ui.begin(run, number, len(runs), seconds, len(done or {}))
                status: RunStatus = "interrupted"
                try:
                    with contextlib.suppress(Stopped):
                        self._one(run, seconds, set(done or {}), rows)
                    status = status_of((p.digest for p in run.plan), rows)
                except KvbenchError:
                    # a sink refused (disk full): what it took before is safe; say so once, not once per sink
                    self._finish(run, status, tolerate=True)
                    raise
                finally:
                    self._ui.end()
                finished = self._finish(run, status)
                skipped = {row.status for row in rows if not row.is_canary} == {"skipped"}
                if skipped and any(row.is_canary for row in rows):
                    self._ui.note(
                        "every case was skipped; canaries ran before them because only a case itself can tell that it "
                        "cannot run here"
                    )
                outcome.runs.append(replace(run, status=status, finished_at=finished))
                for row in rows:
                    (outcome.canaries if row.is_canary else outcome.rows).append((run.uuid, row))
                if self._stop():
                    break
        outcome.signal, outcome.cut = self._stop.received, self._cut
        return outcome

    def _finish(self, run: RunInfo, status: RunStatus, *, tolerate: bool = False) -> str:
        finished = max(now(), run.started_at)  # a clock that was set back meanwhile
        for sink in self._sinks:
            with contextlib.suppress(*((KvbenchError,) if tolerate else ())):
                sink.finish_run(run.uuid, status, finished)
        return finished

    def _one(self, run: RunInfo, seconds: float, done: set[str], rows: list[Result]) -> None:
        profile: Profile = next(p for p in PROFILES if p == run.profile)
        todo = [
            (member, case)
            for member in canary.benches().values()
            for case in member.cases(profile)
            if case.digest not in done
        ]
        for planned in run.plan:
            if planned.digest not in done:
                member = self._suites.find(planned.suite, planned.bench)
                todo.append((member, member.case(planned.axes)))
        total, finished = len(run.plan), len({p.digest for p in run.plan} & done)
        started, spent_cases, losses = time.monotonic(), 0, 0
        worker: WorkerHandle | None = None
        warm: set[tuple[str, str]] = set()
        with contextlib.ExitStack() as stack:
            for position, (member, case) in enumerate(todo):
                if self._stop():
                    raise Stopped
                is_canary = case.suite == canary.SUITE
                text = case.text(member.axes)
                pace = (time.monotonic() - started) / spent_cases if spent_cases > 3 else seconds / max(1, len(todo))
                self._ui.case(finished, total, text, pace * (len(todo) - position))
                handed = time.monotonic()
                try:
                    if worker is None:
                        worker = stack.enter_context(WorkerHandle(self._stop))
                        worker.setup(profile=run.profile, scratch=self._scratch, seed=run.seed, limit=START_LIMIT_S)
                        for note in worker.notes:
                            self._ui.note(note)
                        handed = time.monotonic()
                    compiling = 0.0 if (case.suite, case.bench) in warm else COMPILE_ALLOWANCE_S
                    found = worker.measure(case, member.limit + compiling)
                    warm.add((case.suite, case.bench))
                    if worker.spent:
                        losses += 1
                        stack.close()
                        worker = None
                        warm.clear()
                except Stopped:
                    self._cut = time.monotonic() - handed
                    raise
                except WorkerLost as lost:
                    losses += 1
                    found = [failed_row(member, case, str(lost), losses, time.monotonic() - handed)]
                    stack.close()  # kills what is left of the worker's group
                    worker = None
                    warm.clear()
                for sink in self._sinks:
                    sink.add_results(run.uuid, found, len(done) + position)
                rows.extend(found)
                spent_cases += 1
                if not is_canary:
                    finished += 1
                    self._ui.stored(finished, total, text, found[0])


def failed_row(member: Bench, case: Case, reason: str, losses: int, seconds: float = 0.0) -> Result:
    """Return the row of a case whose worker was lost after ``seconds``; ``losses`` counts those lost by this run."""
    return Result(
        suite=case.suite, bench=case.bench, bench_version=case.version, axes=dict(case.axes), metric=member.metric,
        unit=member.unit, better=member.better, digest=case.digest, status="failed", reason=reason,
        basis=member.basis_of(case.axes), detail={"workers_lost": losses, "case_wall_s": round(seconds, 4)},
    )  # fmt: skip


def status_of(planned: Iterable[str], rows: Iterable[Result]) -> RunStatus:
    """Return how a run ended by its rows: the rule an import applies too (canaries count for nothing)."""
    own = [(row.digest, row.status) for row in rows if not row.is_canary]
    return standing("ok", list(planned), own).status


def resume_plan(run: RunInfo, status: RunStatus, suites: Suites, here: RunInfo) -> None:
    """Check that ``run`` can go on here; raises UsageError. ``here`` is a fresh record of this machine."""
    where = f"--resume {run.uuid[:8]}"
    if status in ("ok", "partial", "failed"):
        raise UsageError("that run is finished", where=where, got=status, expected="an interrupted run")
    if status == "running":
        raise UsageError("that run is still being measured", where=where, mend="wait for it or end its process")
    for name, stored, mine in (
        ("hardware", run.hw_class, here.hw_class), ("environment", run.env_digest, here.env_digest)
    ):  # fmt: skip
        if stored != mine:
            raise UsageError(
                f"that run began in another {name}", where=where, got=mine, expected=stored,
                mend="one run never mixes two; start a new run",
            )  # fmt: skip
    for planned in run.plan:
        member = suites.find(planned.suite, planned.bench)
        if member.version != planned.bench_version or member.case(planned.axes).digest != planned.digest:
            raise UsageError(
                f"{planned.suite}/{planned.bench} has changed since", where=where, got=f"version {member.version}",
                expected=f"version {planned.bench_version}", mend="start a new run",
            )  # fmt: skip
