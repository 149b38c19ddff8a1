"""Recorders and CPU sides for tests of the pipeline."""

from __future__ import annotations

import time


class Clocked:
    """A recorder on the host's clock."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def mark(self, name: str) -> None:
        self.seen.append((name, time.perf_counter()))


class Idle:
    """A CPU side that takes ``seconds`` a stage and does nothing."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.calls: list[tuple[int, int]] = []

    def attend(self, batch: int, layer: int) -> None:
        self.calls.append((batch, layer))
        if self.seconds:
            time.sleep(self.seconds)
