"""One iteration: a schedule carried out by one thread that submits to the near side and does the CPU's attention."""

from __future__ import annotations

from typing import Protocol

from kvbench.systems.neo.schedule import Schedule, Stage, Timeline, timeline


class Recorder(Protocol):
    """Takes note of stages; whoever owns the clock gives one."""

    def mark(self, name: str) -> None: ...


class Near(Protocol):
    """The near side: :class:`kvbench.systems.neo.near.PacedNear`, or a GPU."""

    def begin(self, schedule: Schedule) -> None: ...
    def submit(self, stage: Stage) -> None: ...
    def arrived(self, name: str) -> None: ...
    def finished(self, stage: Stage) -> None: ...
    def finish(self) -> None: ...
    def abort(self) -> None: ...
    def spans(self) -> dict[str, tuple[float, float]]: ...


class Far(Protocol):
    """The CPU's attention over the KV in host memory."""

    def attend(self, batch: int, layer: int) -> None: ...


def run_pass(schedule: Schedule, near: Near, far: Far, recorder: Recorder) -> None:
    """Carry out ``schedule``. Marks ``begin pass``, ``begin ca0[0]``, ``end ca0[0]``, ..., ``end pass``.

    Raises what either side raises; the pass is given up then.
    """
    recorder.mark("begin pass")
    near.begin(schedule)
    try:
        for stage in schedule.stages:
            if stage.lane != "cpu":
                near.submit(stage)
                continue
            for name in stage.after:
                near.arrived(name)
            recorder.mark(f"begin {stage.name}")
            far.attend(stage.batch, stage.layer)
            recorder.mark(f"end {stage.name}")
            near.finished(stage)
        near.finish()
    except BaseException:
        near.abort()
        raise
    recorder.mark("end pass")


def observed(near: Near, marks: list[tuple[str, float]]) -> Timeline:
    """Return what the latest pass amounts to; ``marks``: its marks with seconds on the host's clock."""
    at = dict(marks)
    start = at["begin pass"]
    spans = near.spans()
    for name, when in marks:
        if name.startswith("begin ca"):
            stage = name.removeprefix("begin ")
            spans[stage] = (when - start, at[f"end {stage}"] - start)
    found = timeline(spans)
    return Timeline(at["end pass"] - start, found.busy, found.spans)
