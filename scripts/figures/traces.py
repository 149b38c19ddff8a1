"""``traces``: how fast traces are read and made, and that a million requests need no more memory than a few."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired

from kvbench.errors import printable
from kvbench.locks import acquire, machine_resources
from kvbench.replay.generate.presets import preset
from kvbench.replay.traces.write import write_requests

from .processes import Neighbours, run
from .record import Figure, judge, lost

GROUP = "traces"
MOST_BYTES = float(1 << 30)
REQUESTS = 1_000_000
PREFIXED = 100_000  # about 40 blocks a request: 40 MB of JSON
LIMIT_S = 600.0
# The peak is the child's own: VmHWM of /proc, since ru_maxrss of a child begins with what its parent had.
PROGRAM = """
import re, sys, time
from pathlib import Path
from kvbench.replay.generate.presets import preset
from kvbench.replay.traces.trace import open_trace
what, number = sys.argv[1], int(sys.argv[2])
began = time.perf_counter()
found = open_trace(Path(what)).requests() if "/" in what else preset(what).requests(number, 100.0)
requests = sum(1 for _ in found)
seconds = time.perf_counter() - began
peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(requests, seconds, peak)
"""


def figures(requests: int = REQUESTS, prefixed: int = PREFIXED) -> Iterator[Figure]:
    """Yield every figure of the group; the machine's lock is held."""
    told = partial(print, file=sys.stderr)
    with acquire(machine_resources(), notify=told), tempfile.TemporaryDirectory(prefix="kvbench-traces-") as folder:
        plain, blocks = Path(folder) / "plain.csv", Path(folder) / "blocks.jsonl"
        write_burstgpt(plain, requests)
        write_requests(blocks, preset("loogle").requests(prefixed, 5.0))
        yield from streamed(str(plain), requests, "BurstGPT rows read twice")
        yield from streamed(str(blocks), prefixed, "requests of 43 blocks read twice")
        yield from streamed("loogle", requests, "requests made, documents")
        yield from streamed("sharegpt", requests, "requests made, conversations")


def write_burstgpt(path: Path, rows: int) -> None:
    """Write ``rows`` rows as BurstGPT has them, without a failed one."""
    with path.open("w", encoding="utf-8") as file:
        file.write("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type,Session ID\n")
        for i in range(rows):
            new, out = 100 + i % 900, 1 + i % 300
            file.write(f"{i * 0.5},GPT-4,{new},{out},{new + out},API log,{i % 50_000}\n")


def streamed(what: str, number: int, name: str) -> Iterator[Figure]:
    """Yield the peak memory of a process that only streams ``number`` requests, and how many a second that was."""
    others = Neighbours()
    peak_name = f"{number:,} {name}: peak memory"
    try:
        done = run([sys.executable, "-c", PROGRAM, what, str(number)], limit=LIMIT_S)
        found, seconds, peak = (float(word) for word in done.stdout.split())
    except (OSError, TimeoutExpired, ValueError) as error:
        yield lost(GROUP, peak_name, "B", MOST_BYTES, f"no result: {printable(str(error))}")
        return
    if done.code != 0 or int(found) != number:
        yield lost(GROUP, peak_name, "B", MOST_BYTES, f"{found:.0f} of {number} requests, exit code {done.code}")
        return
    yield Figure(
        GROUP, peak_name, "B", peak, None, MOST_BYTES, judge(peak, None, MOST_BYTES, disturbed=False), "of the process"
    )
    rate = found / seconds
    yield Figure(
        GROUP, f"{name}, a second", "req/s", rate, None, None, "no target", others.note(), detail={"requests": number}
    )
