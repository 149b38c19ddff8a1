"""``stream``, ``chase``, ``gather``: kvbench's host kernels against C of the same instruction kind, interleaved.

One process, one set of buffers, one team of pinned threads and one clock serve both, and the same check of the payload
follows both. A ratio is the median over pairs of C's seconds / ours: 1.00 is equal, below 1 means that ours is slower.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvbench.errors import KvbenchError
from kvbench.kernels import chase, gather, passes, stream
from kvbench.kernels.jit import assembly
from kvbench.kernels.raw import bytes_at
from kvbench.kernels.team import Team
from kvbench.locks import acquire, machine_resources
from kvbench.timing.summary import median_ranks
from kvbench.units import format_value

from .record import Figure, Scalar, judge

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"stream": (0.97, 1.03), "chase": (0.95, 1.05), "gather": (0.95, 1.05)}
FRAGMENTS = (4096, 32768, 65536)
FLAGS = [
    "-O3",
    "-march=native",
    "-fno-tree-loop-distribute-patterns",
    "-falign-loops=64",
    "-pthread",
    "-shared",
    "-fPIC",
]
HUGE = 2 << 20
TRIAL = 10
CLOSE = 0.15  # of a side's best; a variant further behind after the trial rounds is not the fastest
PRECISION = 0.01  # of a ratio; the narrowest target is 0.03 wide on each side


@dataclass(frozen=True, slots=True)
class Options:
    """``pages`` of 4k and thp, ``threads`` of 1 and all, undisturbed ``pairs`` a figure, bytes of one array."""

    pages: tuple[str, ...]
    threads: tuple[str, ...]
    pairs: int
    nbytes: int


def figures(groups: Sequence[str], options: Options) -> Iterator[Figure]:
    """Yield the ratios of ``groups``; the machine's lock is held. Raises KvbenchError without a C compiler."""
    cpus = sorted(os.sched_getaffinity(0))
    teams = {"1": cpus[:1], "all": cpus}
    with (
        acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)),
        tempfile.TemporaryDirectory(prefix="kvbench-crosscheck-") as folder,
    ):
        library = build(Path(folder))
        assert_copy_is_a_loop()
        for pages in options.pages:
            memory = Memory(options.nbytes, pages)
            for chosen in dict.fromkeys(tuple(teams[t]) for t in options.threads):
                with Team(chosen) as team:
                    if not team.pinned:
                        print(f"not pinned: {team.pin_reason}", file=sys.stderr)
                    for group in groups:
                        yield from CHECKS[group](library, memory, options, team, pages)


def build(folder: Path) -> ctypes.CDLL:
    """Compile scripts/crosscheck.c, make sure its copy loop is one, and load it."""
    library = compiled(folder, ROOT / "scripts" / "crosscheck.c", FLAGS)
    assert_copy_is_a_loop(library)
    return ctypes.CDLL(str(library))


def compiled(folder: Path, source: Path, flags: Sequence[str]) -> Path:
    """Return the shared library made of ``source`` in ``folder``. Raises KvbenchError without a compiler or with one
    that refuses it."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise KvbenchError(
            "no C compiler, nothing to compare with", where="crosscheck", got="neither cc nor gcc",
            mend="install gcc, or set CC",
        )  # fmt: skip
    library = folder / f"{source.stem}.so"
    made = subprocess.run([compiler, *flags, "-o", str(library), str(source)], capture_output=True, text=True)
    if made.returncode:
        raise KvbenchError("the C did not compile", where=compiler, got=(made.stderr.splitlines() or ["no message"])[0])
    return library


def assert_copy_is_a_loop(library: Path | None = None) -> None:
    """Raise KvbenchError when copy_plain calls memcpy: that of ``library`` (read by objdump) or numba's own."""
    if library is None:
        code, name, where = assembly(passes.copy_pass, "void(int64, int64, int64)"), "copy_pass", "numba"
    elif shutil.which("objdump"):
        command = ["objdump", "-d", "--disassemble=c_copy_plain", str(library)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        name, where = "<c_copy_plain>:", "C"
    else:
        print("C: copy_plain not checked for a call of memcpy, objdump is not installed", file=sys.stderr)
        return
    if name not in code or "memcpy" in code or "memmove" in code:
        raise KvbenchError("copy_plain is not a loop of its own", where=where, got="a call of memcpy")
    print(f"{where}: no call of memcpy in copy_plain", file=sys.stderr)


def entry(library: ctypes.CDLL, name: str, kinds: str) -> Callable[..., int]:
    """Return C's ``name`` taking int64 (i) and uint64 (u) as the numba kernel of the same place does."""
    function = getattr(library, name)
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.c_uint64 if k == "u" else ctypes.c_int64 for k in kinds]
    return lambda *args: int(function(*map(int, args)))


class Memory:
    """Three arrays of ``nbytes`` on ``pages`` (4k or thp), filled with random doubles in [1, 2)."""

    def __init__(self, nbytes: int, pages: str, arrays: int = 3) -> None:
        stride = -(-nbytes // HUGE) * HUGE
        self._map = mmap.mmap(-1, stride * arrays + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE if pages == "thp" else mmap.MADV_NOHUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        first = -(-start // HUGE) * HUGE
        self.arrays = [first + stride * k for k in range(arrays)]
        rng = np.random.default_rng(7)
        for address in self.arrays:
            doubles = bytes_at(address, nbytes).view(np.float64)
            rng.random(out=doubles)
            doubles += 1.0
        huge = sum(huge_bytes(first, first + stride * arrays)) / (stride * arrays)
        # below a tenth or above nine tenths it is what it says; between, the label would lie
        if (huge > 0.1) if pages == "4k" else (huge < 0.9):
            print(f"{pages}: {huge:.0%} of the memory is on huge pages", file=sys.stderr)


def huge_bytes(start: int, end: int) -> Iterator[int]:
    """Yield the AnonHugePages of every mapping that overlaps [start, end)."""
    inside = False
    for text in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = text.split()
        if "-" in key and not key.endswith(":"):
            lo, hi = (int(edge, 16) for edge in key.split("-"))
            inside = lo < end and start < hi
        elif inside and key == "AnonHugePages:":
            yield int(rest[0]) * 1024


Timed = Callable[[], float]
Variants = dict[str, Timed]
Samples = dict[str, list[float | None]]  # seconds, None where the run was disturbed


@dataclass(frozen=True, slots=True)
class Found:
    """Median seconds of both sides, the median of c / ours with its 95 % half-width, and the pairs behind them."""

    ours: float
    c: float
    ratio: float
    pairs: int
    half_width: float
    best: tuple[str, str]


def delayed_ns(team: Team) -> int:
    """Return the nanoseconds the team's threads have waited for a CPU so far (0 where the kernel does not say)."""
    total = 0
    for tid in team.tids:
        try:
            total += int(Path(f"/proc/self/task/{tid}/schedstat").read_text().split()[1])
        except (OSError, IndexError):
            return 0
    return total


def undisturbed(team: Team, run: Timed) -> tuple[float, bool]:
    """Run once; return the seconds and whether the team's threads waited for a CPU at most 1 % of them."""
    before = delayed_ns(team)
    seconds = run()
    return seconds, (delayed_ns(team) - before) * 1e-9 <= 0.01 * seconds


def compare(ours: Variants, c: Variants, team: Team, pairs: int) -> Found | None:
    """Return how the fastest variant of ours compares with the fastest of C's over ``pairs`` undisturbed pairs or more.

    Every round takes each variant of both sides once, in an order that alternates, so that the choice of the fastest
    and the ratio come from the same moments of the machine. After ``TRIAL`` rounds only variants within ``CLOSE`` of
    their side's best go on. It ends when ``pairs`` rounds found both fastest undisturbed and the median of the ratio is
    known to ``PRECISION``, at the latest after six times as many rounds. None when fewer than a quarter of ``pairs``
    (three at least) came out undisturbed: a run in which a thread waited for a CPU measured somebody else's program.
    """
    sides = (ours, c)
    left = [list(side) for side in sides]
    taken: tuple[Samples, Samples] = ({name: [] for name in ours}, {name: [] for name in c})
    for side in sides:
        for run in side.values():
            run()
    found: Found | None = None
    for k in range(1, 6 * pairs + 1):
        jobs = [(side, name) for name in ours for side in (0, 1) if name in left[side]]
        for side, name in jobs if k % 2 else reversed(jobs):
            seconds, calm = undisturbed(team, sides[side][name])
            taken[side][name].append(seconds if calm else None)
        if k == TRIAL:
            left = [close(samples) for samples in taken]
        if k % 10 == 0 or k == 6 * pairs:
            found = settle(taken, left)
            if found is not None and found.pairs >= pairs and found.half_width <= PRECISION:
                break
    return found if found is not None and found.pairs >= max(3, pairs // 4) else None


def typical(samples: Sequence[float | None]) -> float:
    """Return the median of the undisturbed runs, infinite below three."""
    calm = [seconds for seconds in samples if seconds is not None]
    return median(calm) if len(calm) >= 3 else math.inf


def close(samples: Samples) -> list[str]:
    """Return the variants that may still be the fastest of their side."""
    limit = (1.0 + CLOSE) * min(map(typical, samples.values()))
    return [name for name in samples if typical(samples[name]) <= limit or math.isinf(limit)]


def settle(taken: tuple[Samples, Samples], left: Sequence[Sequence[str]]) -> Found | None:
    """Return what the rounds so far say about the fastest of each side; None without a round both were undisturbed."""
    best = [min(names, key=lambda name: typical(samples[name])) for names, samples in zip(left, taken, strict=True)]
    rounds = zip(taken[0][best[0]], taken[1][best[1]], strict=True)
    rows = [(a, b, b / a) for a, b in rounds if a is not None and b is not None]
    if not rows:
        return None
    a, b, ratio = (median(column) for column in zip(*rows, strict=True))
    return Found(a, b, ratio, len(rows), half_width([row[2] for row in rows]), (best[0], best[1]))


def half_width(ratios: list[float]) -> float:
    """Return the wider side of the 95 % order-statistic interval of the median; infinite below six values."""
    ranks = median_ranks(len(ratios))
    if ranks is None:
        return math.inf
    ordered, middle = sorted(ratios), median(ratios)
    return max(middle - ordered[ranks[0]], ordered[ranks[1]] - middle)


def checked(group: str, op: str, pages: str, team: Team, found: Found | None, amount: int) -> Figure:
    """Return the figure for what :func:`compare` found; ``amount`` is the bytes or hops of one run."""
    low, high = TARGETS[group]
    name = f"{op}, {pages}, {len(team)} thread{'s' if len(team) > 1 else ''}"
    if found is None:
        verdict = judge(None, low, high, disturbed=True)
        return Figure(group, name, "ratio", None, low, high, verdict, "too few undisturbed pairs")
    unit = "s" if group == "chase" else "B/s"
    ours, c = (s / amount if group == "chase" else amount / s for s in (found.ours, found.c))
    variants = f" ({found.best[0]} / {found.best[1]})" if group == "gather" else ""
    spread = "" if math.isinf(found.half_width) else f"±{found.half_width:.3f}, "
    note = f"{spread}ours {format_value(ours, unit)}, C {format_value(c, unit)}, {found.pairs} pairs{variants}"
    detail: dict[str, Scalar] = {
        "op": op, "pages": pages, "threads": len(team), "unit": unit, "ours": ours, "c": c, "pairs": found.pairs,
        "half_width": None if math.isinf(found.half_width) else found.half_width,
        "ours_variant": found.best[0], "c_variant": found.best[1],
    }  # fmt: skip
    verdict = judge(found.ratio, low, high, disturbed=False)
    return Figure(group, name, "ratio", found.ratio, low, high, verdict, note, detail=detail)


def swapped(work: Any, code: Callable[..., int], *args: int) -> Timed:
    def run() -> float:
        work.code = code
        return float(work.run(*args))

    return run


def check_stream(library: ctypes.CDLL, memory: Memory, options: Options, team: Team, pages: str) -> Iterator[Figure]:
    code = entry(library, "c_stream", "iiiiiiiiiui")
    for op in stream.OPS:
        work = stream.Stream(op, memory.arrays[: stream.ARRAYS[op]], options.nbytes, team)
        ours, c = swapped(work, work.code, 1), swapped(work, code, 1)
        found = compare({op: ours}, {op: c}, team, options.pairs)
        for run in (ours, c):
            run()
            work.verify()
        if op != "read":  # give the next operation random bytes again, not the pattern written here
            bytes_at(memory.arrays[0], options.nbytes)[:] = bytes_at(memory.arrays[-1], options.nbytes)
        yield checked("stream", op, pages, team, found, work.link_bytes)


def check_chase(library: ctypes.CDLL, memory: Memory, options: Options, team: Team, pages: str) -> Iterator[Figure]:
    if len(team) != 1:
        return
    code = entry(library, "c_chase", "iiiiiiiii")
    hops = 20_000
    # one object for both: each goes on where the other stopped, so neither finds its nodes in the caches
    work = chase.Chase(memory.arrays[0], options.nbytes, team, seed=3)
    ours, c = swapped(work, work.code, hops), swapped(work, code, hops)
    found = compare({"chase": ours}, {"chase": c}, team, options.pairs)
    work.verify()
    yield checked("chase", "latency", pages, team, found, hops)


def check_gather(library: ctypes.CDLL, memory: Memory, options: Options, team: Team, pages: str) -> Iterator[Figure]:
    code = entry(library, "c_gather", "iiiiiiiiiiiii")
    for op in gather.OPS:
        for fragment in FRAGMENTS:
            order = np.random.default_rng(fragment).permutation(options.nbytes // fragment).astype(np.int64)
            target = memory.arrays[1] if op == "copy" else None
            works = {
                name: gather.Gather(name, memory.arrays[0], options.nbytes, fragment, order, team, dst=target)
                for name in gather.variants(op, fragment)
            }
            ours = {name: swapped(work, gather.gather_kernel, 1) for name, work in works.items()}
            c = {name: swapped(work, code, 1) for name, work in works.items()}
            found = compare(ours, c, team, options.pairs)
            for side in (ours, c):
                for name, run in side.items():
                    run()
                    works[name].verify()
            size = order.size * fragment
            yield checked("gather", f"{op} {fragment // 1024} KiB", pages, team, found, size)


CHECKS = {"stream": check_stream, "chase": check_chase, "gather": check_gather}
