"""One case over time: which runs count, the changes of its level, and whether the environment changed with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from kvbench.analysis.changes import SEGMENT, changes
from kvbench.analysis.compare import CLEAN

if TYPE_CHECKING:
    from kvbench.contract.result import Better
    from kvbench.store.decisions import KnownCase, Note
    from kvbench.store.series import Point


class _Noted(Protocol):
    @property
    def run_uuid(self) -> str | None: ...
    @property
    def case_digest(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Shift:
    """The level changed at ``run``, point ``index`` of the series. ``environment``: its digest changed there too."""

    index: int
    run: str
    before: float
    after: float
    p: float
    verdict: Literal["FASTER", "SLOWER"]
    environment: bool

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass(frozen=True, slots=True)
class Trend:
    """The points of one series, oldest first; ``counted``: those the changes are sought in.

    ``reason`` says why there are no changes to report when there cannot be any.
    """

    case: KnownCase
    metric: str
    hw_class: str
    unit: str
    better: Better
    points: tuple[Point, ...]
    counted: tuple[bool, ...]
    changes: tuple[Shift, ...]
    notes: tuple[Note, ...]
    reason: str


def trend(case: KnownCase, metric: str, hw_class: str, points: Sequence[Point], notes: Sequence[Note]) -> Trend:
    """Return the trend of a series. Runs count that were not resumed, have a clean value, and the newest's unit and
    profile: a smoke run among quick ones has another spread, and is shown without being judged.

    A note that names a run and the case accepts the level from that run on: no change is reported there.
    """
    ordered = sorted(points, key=lambda point: point.started_at)  # a clock set back must not shuffle the series
    latest = next((p for p in reversed(ordered) if p.figure.value is not None), None)
    if latest is None:
        newest = ordered[-1] if ordered else None
        unit, better = (newest.figure.unit, newest.figure.better) if newest else ("", "higher")
        return Trend(
            case, metric, hw_class, unit, better, tuple(ordered), (False,) * len(ordered), (), tuple(notes), "no value"
        )
    counted = tuple(
        p.figure.status in CLEAN and p.figure.value is not None and p.figure.value > 0.0 and not p.resumed
        and p.profile == latest.profile and p.figure.unit == latest.figure.unit for p in ordered
    )  # fmt: skip
    used = [p for p, counts in zip(ordered, counted, strict=True) if counts]
    accepted = [i for i, p in enumerate(used) if any(accepts(note, case.digest, p.run) for note in notes)]
    better = latest.figure.better
    found = changes([p.figure.value for p in used if p.figure.value], accepted=accepted)
    shifts = tuple(
        Shift(
            change.index, used[change.index].run, change.before, change.after, change.p,
            "FASTER" if (change.ratio > 1.0) == (better == "higher") else "SLOWER",
            used[change.index].env_digest != used[change.index - 1].env_digest,
        ) for change in found
    )  # fmt: skip
    short = f"{len(used)} runs count; {2 * SEGMENT} are needed to tell levels apart" if len(used) < 2 * SEGMENT else ""
    return Trend(
        case, metric, hw_class, latest.figure.unit, better, tuple(ordered), counted, shifts, tuple(notes), short
    )


def accepts(note: _Noted, digest: str, run: str) -> bool:
    """Return whether ``note`` accepts the level of the case from ``run`` on."""
    return note.run_uuid == run and note.case_digest == digest
