"""The process that measures: warm, alone in its process group, gone when its parent goes.

The parent imports neither numba nor torch and survives anything a case does to this process. Cases come in on stdin,
one JSON line each; rows go back on a pipe of their own, so a stray ``print`` of a library cannot corrupt a result.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

from kvbench import canary, children
from kvbench.context import Context
from kvbench.contract.bench import Bench
from kvbench.contract.discover import Suites, load_suites
from kvbench.contract.result import Result
from kvbench.errors import KvbenchError, Unavailable, UsageError, VerifyError, printable
from kvbench.measure import Measure, SkipCase
from kvbench.store.wire import check_case

_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when ``parent`` ends; exits at once if it already did. Linux only, else stdin EOF."""
    if sys.platform == "linux":
        children.signal_with_parent(signal.SIGKILL)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def measure_case(bench: Bench, axes: dict[str, Any], context: Context) -> list[Result]:
    """Run one case and return its rows; whatever goes wrong becomes one row without a value, never an exception."""
    case = context.resolve(bench, axes)
    measure = Measure(bench, case, context)
    started = time.monotonic()
    try:
        bench.body(case, measure)
        rows = measure.rows()
        if not rows:
            rows = [measure.empty("failed", "the bench returned without measuring anything")]
        check_case(rows)
    except SkipCase as skip:
        rows = [measure.empty("skipped", str(skip))]
    except (Unavailable, UsageError) as error:  # a kernel refused these axis values, or this machine lacks something
        rows = [measure.empty("skipped", str(error))]
    except VerifyError as error:
        rows = [measure.empty("failed", f"payload check failed, so there is no number: {error}")]
    except MemoryError as error:
        rows = [measure.empty("skipped", f"out of memory: {error or 'an allocation was refused'}")]
    except KvbenchError as error:
        from kvbench.memory.cuda.driver import PoisonedDevice

        if isinstance(error, PoisonedDevice):
            context.poison()
        rows = [measure.empty("failed", str(error))]
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        traceback.print_exc()
        text = printable(f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})", 400)
        rows = [measure.empty("failed", text)]
    try:
        measure.close(failed=rows[0].status == "failed")
    except Exception as error:  # what closing reports (a device error, most often) is about work already timed
        rows = [measure.empty("failed", f"closing what the case had opened: {type(error).__name__}: {error}")]
    wall = time.monotonic() - started
    return [row.with_(detail={**row.detail, "case_wall_s": round(wall, 4)}) if i == 0 else row
            for i, row in enumerate(rows)]  # fmt: skip


def serve(commands: IO[str], replies: IO[str]) -> None:
    """Answer setup and case commands until the input ends."""
    context: Context | None = None
    suites: Suites | None = None

    me = os.getpid()

    def send(message: dict[str, Any]) -> None:
        if os.getpid() != me:
            os._exit(1)  # a bench forked and its child came back here: only this process answers
        replies.write(json.dumps(message, allow_nan=False) + "\n")
        replies.flush()

    for line in commands:
        message = json.loads(line)
        if message["kind"] == "setup":
            suites = load_suites()
            context = Context.create(profile=message["profile"], scratch=message["scratch"], seed=message["seed"])
            send({"kind": "ready", "kernels": context.kernels, "notes": list(context.notes)})
        elif message["kind"] == "case":
            if context is None or suites is None:
                raise RuntimeError("case before setup")
            if message["suite"] == canary.SUITE:
                bench = canary.benches()[message["bench"]]
            else:
                bench = suites.find(message["suite"], message["bench"])
            rows = measure_case(bench, message["axes"], context)
            rows = _end_leftovers(rows)
            spent = context.poisoned
            send({
                "kind": "rows", "digest": message["digest"], "rows": [row.to_wire() for row in rows], "spent": spent,
            })  # fmt: skip
            if spent:
                return  # a sticky device error fails every later call of this process; the parent starts a new one


def _end_leftovers(rows: list[Result]) -> list[Result]:
    """Kill the processes a case left running and say so: they would disturb every case after it.

    This process is the reaper of its descendants, so one that started a session of its own is found here too.
    """
    found = 0
    while True:
        children = _children()
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        found += len(children)
        if not children:
            break
    if not found:
        return rows
    reason = f"the case left {found} process(es) running; they were killed"
    first = rows[0].with_(
        reason="; ".join(filter(None, (rows[0].reason, reason))), flags=(*rows[0].flags, "left_running")
    )
    if first.status == "ok":
        first = first.with_(status="tainted")
    return [first, *rows[1:]]


def _children() -> list[int]:
    """Return the pids of this process's children that still run, as /proc lists them; zombies are collected."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids.update(int(word) for word in task.read_text().split())
    running = []
    for pid in pids:
        try:
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                running.append(pid)
        except ChildProcessError:
            continue
    return running


def main(argv: list[str]) -> int:
    """Entry: ``python -m kvbench.worker REPLY_FD PARENT_PID``."""
    reply_fd, parent = int(argv[0]), int(argv[1])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; a Ctrl-C must not race it
    os.dup2(2, 1)
    os.set_inheritable(reply_fd, False)  # a program a bench starts must not keep the pipe open after this process
    with os.fdopen(reply_fd, "w", encoding="utf-8") as replies, os.fdopen(0, encoding="utf-8") as commands:
        serve(commands, replies)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
