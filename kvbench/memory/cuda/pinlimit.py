"""How much host memory this machine pins: found by a child that pins more and more, so that only the child can die.

``python -m kvbench.memory.cuda.pinlimit`` is that child. It keeps what it has pinned, says so after every step, and
ends at the first refusal of the smallest step, at the ceiling, or by the kernel's hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kvbench import children
from kvbench.errors import KvbenchError, Unavailable, printable
from kvbench.memory.cuda.buffers import REGISTER
from kvbench.memory.cuda.device import Device
from kvbench.memory.cuda.driver import LIBRARY, CudaError, Driver
from kvbench.memory.host import host_buffer
from kvbench.memory.limits import available_memory

Ended = Literal["ceiling", "refused", "memory", "killed", "timeout", "failed"]
CEILING_SHARE = 0.8  # of the memory available: the rest of the machine has to live beside the probe
FIRST = 64 << 20


@dataclass(frozen=True, slots=True)
class PinnedLimit:
    """``nbytes`` were pinned at once; None when nothing was. ``ended``: why not more; only ``refused`` is a limit of
    the driver, found to within the first step, the others say "at least". ``reason`` is for the user."""

    nbytes: int | None
    ended: Ended
    reason: str


def pinned_limit(
    ordinal: int = 0, *, library: str | Path = LIBRARY, ceiling: int | None = None, first: int = FIRST,
    timeout_s: float = 60.0,
) -> PinnedLimit:  # fmt: skip
    """Pin ``first`` bytes in a child process, then ever larger steps up to ``ceiling`` bytes; never raises for what
    the child meets. ``ceiling`` defaults to 80 % of the memory available."""
    if ceiling is None:
        room = available_memory().value
        if room is None:
            return PinnedLimit(None, "failed", "how much memory is free is unknown")
        ceiling = int(CEILING_SHARE * room.nbytes)
    command = children.python(__name__, str(library), str(ordinal), str(ceiling), str(first))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        output, errors, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output = (
            (late.stdout or b"").decode("utf-8", "replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        )
        return _outcome(output, "timeout", f"stopped after {timeout_s:g} s")
    if code < 0:
        return _outcome(output, "killed", f"the probe was ended by signal {-code}, as when memory runs out")
    last = errors.strip().splitlines()[-1:] or [f"exit code {code}"]
    return _outcome(output, "failed", printable(last[0]))


def _outcome(output: str, ended: Ended, reason: str) -> PinnedLimit:
    """Read the child's lines; what it said of its end wins over what was seen from outside."""
    pinned: int | None = None
    for line in output.splitlines():
        try:
            message = json.loads(line)
        except ValueError:
            continue  # a line cut short by the end of the process
        pinned = message.get("pinned", pinned)
        if message.get("ended") in get_args(Ended):
            ended, reason = message["ended"], message["reason"]
    return PinnedLimit(pinned, ended, reason)


def _grow(device: Device, ceiling: int, first: int) -> tuple[Ended, str]:
    total, step, growing = 0, first, True
    with ExitStack() as stack:
        while total < ceiling:
            nbytes = min(step, ceiling - total)
            try:
                with ExitStack() as attempt:
                    buffer = attempt.enter_context(host_buffer(nbytes, kind=None))
                    device.call("cuMemHostRegister", buffer.address, nbytes, REGISTER)
                    attempt.callback(device.release, "cuMemHostUnregister", buffer.address)
                    stack.push(attempt.pop_all())
            except (CudaError, Unavailable) as error:
                if device.driver.poisoned is not None:
                    raise
                if nbytes <= first:
                    return ("refused" if isinstance(error, CudaError) else "memory"), str(error)
                growing, step = False, max(first, nbytes // 2)
                continue
            total += nbytes
            print(json.dumps({"pinned": total}), flush=True)
            step = 2 * step if growing else step
    return "ceiling", f"the probe does not go beyond {ceiling} bytes"


def main(argv: list[str]) -> int:
    """Be the child: LIBRARY ORDINAL CEILING FIRST."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.memory.cuda.pinlimit")
    parser.add_argument("library")
    for name in ("ordinal", "ceiling", "first"):
        parser.add_argument(name, type=int)
    asked = parser.parse_args(argv)
    try:  # should memory run out after all, this process is the one to go
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    except OSError as error:
        print(f"oom_score_adj: {error.strerror}", file=sys.stderr)
    try:
        with Device(Driver(asked.library), asked.ordinal) as device:
            ended, reason = _grow(device, asked.ceiling, asked.first)
    except KvbenchError as error:
        ended, reason = "failed", str(error)
    print(json.dumps({"ended": ended, "reason": reason}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
