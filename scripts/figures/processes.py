"""Running kvbench as a user does, and seeing what else ran on the machine meanwhile."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.store.target import file_system_of, home

FOREIGN = 0.05  # CPUs that other programs may keep busy before a missed target is blamed on them
_TICK = os.sysconf("SC_CLK_TCK")


def command(*arguments: str) -> list[str]:
    """Return ``kvbench ARGUMENTS``: the installed script of this environment, else the module."""
    script = Path(sys.executable).with_name("kvbench")
    return [*([str(script)] if script.exists() else [sys.executable, "-m", "kvbench.cli.main"]), *arguments]


@dataclass(frozen=True, slots=True)
class Done:
    """What one command did: seconds from start to end of the process, exit code, its output."""

    seconds: float
    code: int
    stdout: str
    stderr: str

    @property
    def last_words(self) -> str:
        """The last line on stderr: why a command failed."""
        lines = self.stderr.strip().splitlines()
        return lines[-1] if lines else "no message"


def run(words: Sequence[str], limit: float, extra: Mapping[str, str] | None = None, folder: Path | None = None) -> Done:
    """Run ``words`` to its end. Raises subprocess.TimeoutExpired beyond ``limit`` seconds."""
    env = {**os.environ, **(extra or {})}
    began = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=limit, env=env, cwd=folder)
    return Done(time.perf_counter() - began, done.returncode, done.stdout, done.stderr)


class Neighbours:
    """How many CPUs other programs kept busy since this was made: all busy time less that of this process tree.

    /proc/stat counts in ticks, so windows of a second and more. Stolen time counts as others'. Children count once
    they have been waited for.
    """

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def cpus(self) -> float | None:
        """Return CPUs on average, None where the kernel does not say."""
        busy = _busy_seconds()
        wall = time.monotonic() - self._began
        if busy is None or self._busy is None or wall <= 0:
            return None
        return max(0.0, (busy - self._busy) - (_own_seconds() - self._own)) / wall

    def disturbing(self) -> bool:
        """Return whether a target missed in this window may have been missed because of others."""
        found = self.cpus()
        return found is not None and found > FOREIGN

    def note(self) -> str:
        """Return what to print about others, empty when they did not matter."""
        found = self.cpus()
        return f"others used {found:.2f} CPUs" if found is not None and found > FOREIGN else ""


def _busy_seconds() -> float | None:
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) for f in fields[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / _TICK


def _own_seconds() -> float:
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    return total


def database_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder on the file system that holds the default database, gone after the block.

    A temporary folder elsewhere may be memory, where a commit costs nothing. Raises UsageError without a home.
    """
    data = os.environ.get("XDG_DATA_HOME", "")
    place = (Path(data) if os.path.isabs(data) else home() / ".local" / "share") / "kvbench"
    while not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)) and place != place.parent:
        place = place.parent
    return tempfile.TemporaryDirectory(prefix=".kvbench-crosscheck-", dir=place)


def file_system(folder: str) -> str:
    """Return the type of the file system that holds ``folder``, ``unknown`` where it cannot be told."""
    return file_system_of(Path(folder)) or "unknown"
