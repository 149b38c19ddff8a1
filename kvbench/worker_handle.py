"""The parent's end of a worker: start, hand over a case, wait with a limit, kill the whole group."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbench import children
from kvbench.contract.case import Case
from kvbench.contract.result import Result
from kvbench.errors import printable

POLL_S = 0.1  # how soon a signal that only set a flag is noticed


class WorkerLost(Exception):
    """The worker crashed, broke the protocol or ran past its limit; ``str()`` is the reason for the failed row."""


class Stopped(Exception):
    """The run was asked to stop while the worker was busy."""


class WorkerHandle:
    """One worker process in its own process group. Use as context manager; leaving it kills the group."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        self._buffer = b""
        self._log_start = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker; closed in __exit__)
        self._read, write = os.pipe()
        try:
            self._process = subprocess.Popen(
                children.python("kvbench.worker", str(write), str(os.getpid())),
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._log, pass_fds=(write,), process_group=0,
            )  # fmt: skip
        except OSError:
            os.close(self._read)
            raise
        finally:
            os.close(write)
        self.kernels = ""
        self.spent = False  # it answered, and measures nothing more: a device error stays with its process
        self.notes: tuple[str, ...] = ()

    @property
    def pid(self) -> int:
        return self._process.pid

    def setup(self, *, profile: str, scratch: Path | None, seed: int, limit: float) -> None:
        """Send the run's settings and wait until the worker is ready to measure."""
        where = None if scratch is None else str(scratch)
        self._send({"kind": "setup", "profile": profile, "scratch": where, "seed": seed})
        reply = self._receive(limit, "start-up")
        if reply.get("kind") != "ready":
            raise WorkerLost(f"worker protocol broken: {printable(str(reply))}")
        self.kernels, self.notes = reply["kernels"], tuple(reply["notes"])

    def measure(self, case: Case, limit: float) -> list[Result]:
        """Return the rows of ``case``; raises WorkerLost when the worker crashed or took longer than ``limit`` s."""
        self._log_start = self._log.seek(0, os.SEEK_END)  # a death is explained by what this case wrote, not another
        self._send({
            "kind": "case", "suite": case.suite, "bench": case.bench, "axes": dict(case.axes), "digest": case.digest
        })  # fmt: skip
        reply = self._receive(limit, "the case")
        if reply.get("kind") != "rows" or reply.get("digest") != case.digest:
            raise WorkerLost(f"worker protocol broken: {printable(str(reply))}")
        self.spent = bool(reply.get("spent"))
        try:
            return [Result.from_wire(row) for row in reply["rows"]]
        except (KeyError, TypeError, ValueError) as error:
            raise WorkerLost(f"worker sent a malformed row: {printable(str(error))}") from error

    def kill(self) -> None:
        """Kill the worker's whole process group and reap it. Safe to call twice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> WorkerHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._read)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._log.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerLost(self._death()) from None

    def _receive(self, limit: float, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + limit
        while b"\n" not in self._buffer:
            if self._should_stop():
                raise Stopped
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerLost(f"{what} took longer than its limit of {limit:.0f} s; the worker was killed")
            if not select.select([self._read], [], [], min(POLL_S, left))[0]:
                if self._process.poll() is not None:  # a child it forked may still hold the pipe open
                    raise WorkerLost(self._death())
                continue
            chunk = os.read(self._read, 1 << 16)
            if not chunk:
                raise WorkerLost(self._death())
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise WorkerLost("worker protocol broken: not an object")
        return reply

    def _death(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "worker closed its result pipe without ending"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._log_start, self._log.tell() - 4096))
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f"worker ended by {how}" + (f": {printable(lines[-1].strip())}" if lines else "")
