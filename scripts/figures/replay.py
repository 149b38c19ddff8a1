"""``replay``: how fast and in how much memory traces are replayed, and whether every Python gives the same digest.

Each figure is taken in a child of its own, so that its memory is its own and nothing is left from the one before.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvbench.errors import printable
from kvbench.locks import acquire, machine_resources

from .processes import Neighbours, run
from .record import Figure, judge, lost

ROOT = Path(__file__).resolve().parents[2]
GROUP = "replay"
RATE, GIB = 2000.0, 1 << 30
SPEED_REQUESTS, MEMORY_REQUESTS, DIGEST_REQUESTS = 100_000, 1_000_000, 2000
MINORS = (11, 12, 13)

# Prints one JSON object. CPU seconds of this one process: others on the machine then count for less. The peak is VmHWM
# of /proc: ru_maxrss of a child begins with what its parent had, 1.1 GiB below a long test run.
CHILD = """
import json, re, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from kvbench.replay.costs import costs
from kvbench.replay.engine import replay
from kvbench.replay.generate.presets import preset as workload
from kvbench.replay.machine import preset
from kvbench.replay.policies import make
what, name, count, rate = sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
on = costs(preset("h200"), "llama-3-8b")
trace = workload(name).requests(count, rate, 0)
if what == "speed":
    trace = list(trace)
policy = make(sys.argv[6], on)
wall, cpu = time.perf_counter(), time.process_time()
outcome = replay(trace, policy, on)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
blocks = sum(len(r.hash_ids or ()) for r in trace) if what == "speed" else 0
found = outcome.summary()
peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
print(json.dumps({
    "finished": found.finished, "wall": wall, "cpu": cpu, "digest": outcome.digest, "blocks": blocks,
    "peak": peak, "hit_rate": found.hit_rate,
    "python": sys.version.split()[0],
}))
"""


def figures() -> Iterator[Figure]:
    """Yield every figure of the group; the machine's lock is held."""
    with acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)):
        yield speed()
        yield memory()
        yield digests()


def child(what: str, workload: str, count: int, rate: float, policy: str, limit: float) -> dict[str, float] | str:
    """Replay in a child; return what it printed, or why it printed nothing."""
    words = [sys.executable, "-c", CHILD, str(ROOT), what, workload, str(count), str(rate), policy]
    try:
        done = run(words, limit)
    except subprocess.TimeoutExpired:
        return f"did not end within {limit:.0f} s"
    if done.code != 0:
        return f"exit code {done.code}: {printable(done.last_words)}"
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def speed(count: int = SPEED_REQUESTS, limit: float = 600.0) -> Figure:
    """Return simulated requests per second of one core: Strata's policy on prefix-heavy requests."""
    name = "requests/s, strata, prefix-heavy"
    others = Neighbours()
    # documents whose questions come close together: most of a prompt is found, near or far
    found = child("speed", "loogle:distance=min", count, 8.0, "strata", limit)
    if isinstance(found, str):
        return lost(GROUP, name, "count", None, found, low=RATE)
    if found["finished"] != count:
        return lost(GROUP, name, "count", None, f"{found['finished']} of {count} requests finished", low=RATE)
    value = count / found["cpu"]
    note = (
        f"{count} requests of {found['blocks'] / count:.0f} blocks in {found['cpu']:.1f} s of one core, "
        f"{found['wall']:.1f} s wall, hit rate {found['hit_rate']:.2f}"
    )
    verdict = judge(value, RATE, None, disturbed=others.disturbing())
    return Figure(GROUP, name, "count", value, RATE, None, verdict, _join(note, others.note()))


def memory(count: int = MEMORY_REQUESTS, limit: float = 1800.0) -> Figure:
    """Return the peak resident memory of a child that generates and replays ``count`` requests, streamed."""
    name, unit = f"memory of {count} requests, streamed", "share"
    found = child("stream", "osc", count, 20.0, "recompute", limit)
    if isinstance(found, str):
        return lost(GROUP, name, unit, 1.0, found)
    if found["finished"] != count:
        return lost(GROUP, name, unit, 1.0, f"{found['finished']} of {count} requests finished")
    value = found["peak"] / GIB
    note = f"of 1 GiB: peak {found['peak'] / 2**20:.0f} MiB of the child, in {found['wall']:.0f} s"
    return Figure(GROUP, name, unit, value, None, 1.0, judge(value, None, 1.0, disturbed=False), note)


def digests(count: int = DIGEST_REQUESTS, minors: tuple[int, ...] = MINORS) -> Figure:
    """Return in how many other Pythons (3.x, x of ``minors``) the digests of all policies are those of this one."""
    name = "same digest in other Pythons"
    told: dict[str, str] = {}
    missing = []
    for minor in minors:
        if minor == sys.version_info[1]:
            continue
        why = "not found"
        for program in _pythons(minor):
            digest = _digest(program, count)
            if not digest.startswith("!"):
                told[f"3.{minor}"] = digest
                break
            why = digest[1:]
        else:
            missing.append(f"3.{minor}: {why}")
    absent = "; ".join(missing)
    if not told:
        return Figure(GROUP, name, "count", None, 1, None, "no target", f"not run: {absent}")
    own = _digest(sys.executable, count)
    same = sum(1 for digest in told.values() if digest == own)
    verdict = judge(same, len(told), len(told), disturbed=False)
    against = f"{' and '.join(told)} against 3.{sys.version_info[1]}, {count} requests, all policies"
    return Figure(GROUP, name, "count", same, len(told), len(told), verdict, _join(against, absent), of=len(told))


def _pythons(minor: int) -> Iterator[str]:
    """Yield programs that may be Python 3.``minor``: on the path, and beside this interpreter's own installation."""
    found = shutil.which(f"python3.{minor}")
    if found is not None:
        yield found
    yield from (str(path) for path in sorted(Path(sys.base_prefix).parent.glob(f"3.{minor}*/bin/python3.{minor}")))


DIGEST = """
import hashlib, random, sys
sys.path.insert(0, sys.argv[1])
from kvbench.replay.costs import costs
from kvbench.replay.engine import replay
from kvbench.replay.machine import preset
from kvbench.replay.policies import POLICIES, make
from kvbench.replay.request import Request, blocks_of
on, whole = costs(preset("h200"), "llama-3-8b"), hashlib.sha256()
source, now, trace = random.Random(1), 0.0, []
for i in range(int(sys.argv[2])):
    now += source.expovariate(4.0)
    doc = source.randrange(40)
    tokens = 4000 + 500 * doc + source.randrange(20, 400)
    shared, every = (4000 + 500 * doc) // 512, blocks_of(tokens, 512)
    ids = tuple(doc * 100 + k for k in range(shared)) + tuple(10**6 + i * 100 + k for k in range(every - shared))
    trace.append(Request(i, round(now, 6), tokens, source.randrange(1, 60), block_tokens=512, hash_ids=ids))
for name in POLICIES:
    whole.update(replay(trace, make(name, on), on).digest.encode())
print(whole.hexdigest())
"""


def _digest(program: str, count: int) -> str:
    """Return the digest over all policies in another interpreter; a text that begins with ! says why there is none."""
    try:
        done = run([program, "-c", DIGEST, str(ROOT), str(count)], 600.0)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"!{printable(str(error), 120)}"
    return done.stdout.strip() if done.code == 0 else f"!{printable(done.last_words, 120)}"


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
