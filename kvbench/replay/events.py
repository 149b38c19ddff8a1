"""The event log: a line an event, hashed as it is written, so that two replays can be compared by one digest.

Lines hold simulated times, request numbers and counts; no wall time, path or name of a machine. Floats are written by
``repr``, the shortest text that reads back as the same number, alike in every Python since 3.1.
"""

from __future__ import annotations

import hashlib

BATCH = 4096  # lines hashed at once


class EventLog:
    """Collects lines. ``keep``: hold on to the text too (for tests and small replays); else only the digest is kept."""

    __slots__ = ("_hash", "_pending", "count", "kept")

    def __init__(self, *, keep: bool = False) -> None:
        self._hash = hashlib.sha256()
        self._pending: list[str] = []
        self.kept: list[str] | None = [] if keep else None
        self.count = 0

    def add(self, line: str) -> None:
        """Add an event; ``line`` has no newline."""
        self._pending.append(line)
        if len(self._pending) >= BATCH:
            self._flush()

    def digest(self) -> str:
        """Return the sha256 of all lines so far, in hex."""
        self._flush()
        return self._hash.hexdigest()

    def _flush(self) -> None:
        if not self._pending:
            return
        self._hash.update(("\n".join(self._pending) + "\n").encode("ascii", "backslashreplace"))
        self.count += len(self._pending)
        if self.kept is not None:
            self.kept += self._pending
        self._pending = []
