"""What the lines of one run in a file must agree on: its cases are those planned, one a place, in its own time."""

from __future__ import annotations

from datetime import datetime

from kvbench.contract.result import Result, RunInfo
from kvbench.store.wire import check_not_future, check_order


class Course:
    """A run as its lines tell it so far. ``started`` is its beginning, ``latest`` the latest time so far.

    A run without a plan may hold any case, a canary needs none. A run that was still going when its header was written
    is open to the end.
    """

    def __init__(self, run: RunInfo) -> None:
        self.latest = run.started_at
        self.started = run.started_at
        self._finished = None if run.status == "running" else run.finished_at
        self._plan = {case.digest for case in run.plan}
        self._at_place: dict[int, str] = {}
        self._place_of: dict[str, int] = {}

    def case(self, row: Result, position: int, at: str) -> None:
        """Take in the line of a case by its first row. Raises ValueError when it does not fit the run.

        ``at`` is UTC in ISO 8601.
        """
        name = f"{row.suite}/{row.bench} {row.digest[:12]}"
        if self._plan and not row.is_canary and row.digest not in self._plan:
            raise ValueError(f"the case {name} is not in the run's plan of {len(self._plan)} cases")
        there = self._at_place.get(position, row.digest)
        if there != row.digest:
            raise ValueError(f"the case {name} is at position {position}, where {there[:12]} is already")
        before = self._place_of.get(row.digest, position)
        if before != position:
            raise ValueError(f"the case {name} is at position {position}, and at {before} before")
        check_order(self.started, at, "at")
        check_not_future(at, "at")
        if self._finished is not None and _later(at, self._finished):
            raise ValueError(f"at is {at}, after the run's end at {self._finished}")
        self._at_place[position] = row.digest
        self._place_of[row.digest] = position
        if _later(at, self.latest):
            self.latest = at

    def end(self, finished_at: str) -> None:
        """Take in the end of the run. Raises ValueError for a time before its beginning, its last case, or ahead."""
        check_order(self.started, finished_at, "finished_at")
        check_not_future(finished_at, "finished_at")
        if _later(self.latest, finished_at):
            raise ValueError(f"finished_at is {finished_at}, before the run's last case at {self.latest}")


def later_of(one: str, other: str) -> str:
    """Return the later of two UTC times in ISO 8601."""
    return one if _later(one, other) else other


def _later(one: str, other: str) -> bool:
    return datetime.fromisoformat(one) > datetime.fromisoformat(other)
