"""Runs one command of ``scripts/gpu`` inside its time, with what it prints kept, and ends it gently or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GRACE_S = 10.0  # kvbench ends the case under way, writes the end of its run and stops its worker within this
LOG_BYTES = 4 << 20  # of one command; a sanitizer can print a line per thread
TAIL_BYTES = 16 << 10  # of a command's output, for the line that says how it ended
_PR_SET_PDEATHSIG = 1

How = Literal["ended", "budget", "signal"]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: by itself with ``code``, at its time limit (``budget``) or by a signal to this script."""

    how: How
    code: int
    seconds: float
    tail: tuple[str, ...]


class Stop:
    """SIGINT, SIGTERM and SIGHUP as a flag: what was measured is put together before this script ends."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.count = 0

    def _received(self, number: int, _frame: object) -> None:
        self.signal = self.signal or number
        self.count += 1

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Listen for the length of the block."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._received) for number in numbers}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)


class Log:
    """The log file and the terminal; nothing here fails because an output is closed or full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb", buffering=0)
        self._began = time.monotonic()

    def say(self, line: str) -> None:
        """Write a line of this script's own, with the seconds since it began."""
        self.write(f"[{time.monotonic() - self._began:6.1f} s] {line}\n".encode("utf-8", "backslashreplace"))

    def write(self, data: bytes) -> None:
        """Write what a command printed, as it is."""
        with contextlib.suppress(OSError):  # a full disk must not end the measurement; the bundle reports it itself
            self._file.write(data)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.buffer.write(data)
            sys.stderr.flush()

    def close(self) -> None:
        self._file.close()


def _die_with_parent() -> None:
    """Ask for SIGTERM when this script dies, kill -9 included: a run nobody waits for must not hold the GPU."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def run(
    command: Sequence[str], *, env: Mapping[str, str], cwd: Path, seconds: float, log: Log, stop: Stop,
    grace: float = GRACE_S,
) -> Ended:  # fmt: skip
    """Run ``command`` for at most ``seconds``, then SIGTERM, and SIGKILL to its whole group ``grace`` seconds later.

    A signal this script received is passed on the same way; a second one kills at once.
    """
    began = time.monotonic()
    try:
        child = subprocess.Popen(
            list(command), env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
    except OSError as error:
        return Ended("ended", 127, 0.0, (f"{command[0]}: {error.strerror}",))
    how: How = "ended"
    told = seen = stop.count
    deadline, kill_at = began + seconds, float("inf")
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector, child.stdout as out:
        os.set_blocking(out.fileno(), False)
        selector.register(out, selectors.EVENT_READ)
        printed, open_, last, gone = 0, True, b"", 0.0
        while True:
            data: bytes | None = None
            if not open_:
                time.sleep(0.05)
            elif selector.select(0.1):
                data = out.read(1 << 16)
            if data:
                if printed <= LOG_BYTES < printed + len(data):
                    log.write(b"\n(more than the log keeps of one command; the rest is left out)\n")
                elif printed <= LOG_BYTES:
                    log.write(data)
                printed += len(data)
                last = (last + data)[-TAIL_BYTES:]
            elif data == b"":
                selector.unregister(out)
                open_ = False
            now = time.monotonic()
            if child.poll() is not None:
                gone = gone or now
                if not data or now > gone + 1.0:  # what is in the pipe is read, what children left behind print is not
                    break
            if stop.count > seen:
                # the first is passed on; whoever sends a second one does not want to wait
                kill_at = now + grace if seen == told else now
                how, seen = "signal", stop.count
                child.send_signal(stop.signal or signal.SIGTERM)
            elif now >= deadline and how == "ended":
                how, kill_at = "budget", now + grace
                child.send_signal(signal.SIGTERM)
            if now >= kill_at:
                _kill(child.pid)
    code = child.wait()
    _kill(child.pid)  # what it started and left behind
    return Ended(how, code, time.monotonic() - began, tuple(last.decode("utf-8", "replace").splitlines()))


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
