"""Progress of a run: one line rewritten in place on a terminal, one line per stored case elsewhere."""

from __future__ import annotations

import shutil
import sys
import time

from kvbench.cli.output import say
from kvbench.contract.result import Result, RunInfo
from kvbench.errors import printable
from kvbench.units import counted, format_duration


class Progress:
    """The ``Ui`` of a run on stderr. A terminal is recognised by ``sys.stderr.isatty()``: FORCE_COLOR in a CI log
    must not turn a log into a film. ``kept``: each case is committed somewhere before its line appears."""

    def __init__(self, *, kept: bool = True) -> None:
        self._word = "stored" if kept else "done"
        self._live = sys.stderr.isatty()
        self._drawn = False
        self._last = 0.0

    def note(self, line: str) -> None:
        self._clear()
        say(printable(line, 500))

    def begin(self, run: RunInfo, number: int, runs: int, seconds: float, done: int) -> None:
        which = f"run {number}/{runs} " if runs > 1 else ""
        kept = f", {counted(done, 'case')} kept from before" if done else ""
        self.note(
            f"{which}{run.uuid[:8]}: {counted(len(run.plan), 'case')}, profile {run.profile}, "
            f"about {format_duration(seconds)}{kept}"
        )

    def case(self, done: int, total: int, text: str, seconds_left: float) -> None:
        if not self._live:
            return
        line = f"[{done}/{total}] ~{format_duration(max(0.0, seconds_left))} left  {text}"
        width = shutil.get_terminal_size().columns - 1
        self._write("\r\x1b[K" + printable(line, max(20, width)))
        self._drawn = True
        self._last = time.monotonic()

    def stored(self, done: int, total: int, text: str, row: Result) -> None:
        if self._live:
            if row.status != "ok":
                self.note(f"{row.status}: {text}: {row.reason}")
            return
        suffix = "" if row.status == "ok" else f" ({row.status}: {row.reason})"
        say(printable(f"{self._word} {done}/{total} {text}{suffix}", 500))

    def end(self) -> None:
        self._clear()

    def _clear(self) -> None:
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    @staticmethod
    def _write(text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            return
