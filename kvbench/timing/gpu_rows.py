"""Rows of a GPU case beside the primary one: sampled, judged and resolved like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvbench.contract.result import Better, Bytes, Ceiling, Status
from kvbench.errors import KvbenchError
from kvbench.memory.cuda.driver import CudaError
from kvbench.timing.judge import judge
from kvbench.timing.sampler import Run, sample
from kvbench.timing.summary import summarise

if TYPE_CHECKING:
    from kvbench.measure import Measure, RateOf
    from kvbench.timing.gpu_session import GpuSession


class Resolved(Protocol):
    """A run behind the event clock that knows whether its latest window was long enough for it."""

    def require_resolved(self) -> None: ...


class Timed(Resolved, Protocol):
    """Such a run, which does its work ``reps`` times."""

    def __call__(self, reps: int, /) -> object: ...


class Proved(Protocol):
    """Work that can tell whether it was done, and be made to look as if it was not."""

    def check(self) -> object: ...
    def spoil(self) -> object: ...


def resolved(events: Resolved) -> str:
    """Return why the event clock cannot tell what ``events`` measured last, or nothing where it can."""
    try:
        events.require_resolved()
    except CudaError:
        raise
    except KvbenchError as error:
        return str(error)
    return ""


def proof(measure: Measure, work: Proved, run: Timed, *others: Resolved) -> Callable[[], None]:
    """Return the verification of a row of ``run``: the case is skipped where the event clock could not tell it, or one
    of the ``others`` beside it; else ``work`` is checked as the timed passes left it, spoilt, done once and checked
    again, as what only an earlier pass had done would be no work."""

    def verify() -> None:
        why = next(filter(None, map(resolved, (run, *others))), "")
        if why:
            measure.skip(why)
        work.check()
        work.spoil()
        run(1)
        work.check()

    return verify


def add_sampled(
    measure: Measure, gpu: GpuSession, metric: str, run: Run, *, unit: str, better: Better, amount: float,
    events: Resolved | None = None, ceilings: Sequence[Ceiling] = (), kernel: str | None = None,
    moved: Bytes | None = None, rate_of: RateOf | None = None,
) -> None:  # fmt: skip
    """Sample ``run`` in the case's budget and add the row ``metric``: ``amount`` per second, or seconds per ``amount``.

    ``events``: the clock's run behind ``run``; windows too short for it leave a row without value that says so.
    """
    found = sample(run, measure.context.budget, gate=None, marker=gpu.marker(), seed=measure.context.seed)
    why = "" if events is None else resolved(events)
    if why:
        measure.extra(metric, None, unit=unit, better=better, status="skipped", reason=why)
        return
    if found.summary is None:
        measure.extra(metric, None, unit=unit, better=better, reason=found.reason or "no samples")
        return
    add_value(
        measure, metric, (found.summary.median, found.summary.low, found.summary.high), n=found.summary.n, unit=unit,
        better=better, amount=amount, ceilings=ceilings, kernel=kernel, moved=moved, rate_of=rate_of,
        flags=found.flags, reason=found.reason if found.tainted else "",
    )  # fmt: skip


def add_series(
    measure: Measure, metric: str, seconds: Sequence[float], *, unit: str, better: Better, amount: float = 1.0,
    kernel: str | None = None, moved: Bytes | None = None, rate_of: RateOf | None = None,
    ceilings: Sequence[Ceiling] = (), status: Status = "ok", reason: str = "",
) -> None:  # fmt: skip
    """Add the row ``metric`` from seconds taken inside the samples of the primary row, whose ``status`` it shares."""
    import numpy as np

    if not seconds or min(seconds) <= 0.0:
        why = "no window was taken" if not seconds else "a window of no length"
        measure.extra(metric, None, unit=unit, better=better, status="failed", reason=why)
        return
    summary = summarise(np.asarray(seconds, np.float64))
    add_value(
        measure, metric, (summary.median, summary.low, summary.high), n=summary.n, unit=unit, better=better,
        amount=amount, ceilings=ceilings, kernel=kernel, moved=moved, rate_of=rate_of,
        flags=("tainted",) if status == "tainted" else (), reason=reason,
    )  # fmt: skip


def add_value(
    measure: Measure, metric: str, seconds: tuple[float, float | None, float | None], *, n: int, unit: str,
    better: Better, amount: float, ceilings: Sequence[Ceiling], kernel: str | None, moved: Bytes | None,
    rate_of: RateOf | None, flags: Sequence[str], reason: str,
) -> None:  # fmt: skip
    """Add the row of a median and its interval in ``seconds``; invalid above a physical ceiling (design 6.8)."""
    rate = unit.endswith("/s")
    value, low, high = (None if s is None else (amount / s if rate else s / amount) for s in seconds)
    if value is None:
        raise KvbenchError("a row needs a median", where=metric)
    if rate:
        low, high = high, low
    judged = judge(value, better, ceilings, flags=flags, reason=reason, retaken=True)
    measure.extra(
        metric, value, unit=unit, better=better, low=low, high=high, n=n, status=judged.status, reason=judged.reason,
        kernel=kernel, moved=moved, rate_of=rate_of, seconds=seconds[0] / (1.0 if rate else amount),
    )  # fmt: skip


def on_gpu(measure: Measure, gpu: GpuSession, *, link: bool) -> None:
    """Say what measures: the device's facts, and its state as marks of the samples (flag ``gpu_unwatched`` without).

    ``link``: the work moves bytes over the link, so that a downshift of it disturbs.
    """
    gpu.watch_link = link
    for name, value in gpu.facts().items():
        measure.note(name, value)
    marks = gpu.marker()
    if marks is None:
        measure.flag("gpu_unwatched")
        measure.note("gpu_state", gpu.board_reason)
    # What clocks and link did while they rose to the work is dropped: the sampler asks once after its warm-up.
    measure.on_device(marks)
