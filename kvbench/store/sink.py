"""What a producer of rows needs of the place it writes to: the database and the bundle file both are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbench.contract.result import Result, RunInfo, RunStatus


class Sink(Protocol):
    """A place for runs. What a call accepted is durable when it returns; repeating a call changes nothing."""

    def check_writable(self) -> None:
        """Raise UsageError unless a write would succeed now. Called before anything is measured."""

    def begin_run(self, run: RunInfo) -> None:
        """Record ``run`` before its first case. With ``run.resumed`` a run that is already there goes on."""

    def add_results(self, run_uuid: str, results: Sequence[Result], position: int) -> None:
        """Commit all rows of one case, measured as number ``position`` of the run, together or not at all."""

    def finish_run(self, run_uuid: str, status: RunStatus, finished_at: str) -> None:
        """Record how the run ended. ``finished_at`` is UTC ISO 8601 with microseconds."""

    def close(self) -> None:
        """Release the file or connection."""
