"""``ellm_vmm``: mapping memory through kvbench's drivers against the same calls in C, interleaved.

The host driver does what C does and its bookkeeping besides: checks, claims, counters. On a GPU the compiled loop of
cuMemMap stands against one in C. A ratio is the median over pairs of our seconds / C's: above 1 means that ours is
slower.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvbench.errors import KvbenchError, Unavailable, VerifyError
from kvbench.kernels.call_loop import alone
from kvbench.kernels.team import Team
from kvbench.locks import acquire, machine_resources
from kvbench.memory import libc
from kvbench.memory.cuda.device import Device
from kvbench.memory.cuda.driver import Driver
from kvbench.memory.vmm.cuda import CudaVmm
from kvbench.memory.vmm.driver import rows
from kvbench.memory.vmm.host import HostVmm
from kvbench.memory.vmm.remap import Chunks
from kvbench.memory.vmm.touch import HostTouch
from kvbench.units import compact_bytes, format_value

from .ratios import Found, Timed, compare, compiled
from .record import Figure, Scalar, judge

GROUP = "ellm-vmm"
HIGH = 1.05
PAIRS = 40
CASES = ((2 << 20, 64, False), (2 << 20, 64, True), (64 << 10, 1024, False))  # chunk bytes, chunks, cold
MAPS = 64  # of 2 MiB, on a GPU
FLAGS = ["-O2", "-shared", "-fPIC"]
SOURCE = Path(__file__).with_suffix(".c")


def figures(pairs: int = PAIRS) -> Iterator[Figure]:
    """Yield the ratios; the machine's lock is held. Raises KvbenchError without a C compiler."""
    with (
        acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)),
        tempfile.TemporaryDirectory(prefix="kvbench-crosscheck-") as folder,
        Team(sorted(os.sched_getaffinity(0))[:1]) as team,
    ):
        library = build(Path(folder))
        for chunk, count, cold in CASES:
            yield host(library, team, chunk, count, cold=cold, pairs=pairs)
        yield gpu(library, team, pairs)


def build(folder: Path) -> ctypes.CDLL:
    """Compile the C beside this file and load it."""
    return ctypes.CDLL(str(compiled(folder, SOURCE, FLAGS)))


def entry(library: ctypes.CDLL, name: str, arguments: int) -> Callable[..., None]:
    """Return C's ``name``, which takes ``arguments`` int64 and returns 0; another code raises KvbenchError."""
    function = getattr(library, name)
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * arguments

    def call(*values: int) -> None:
        code = int(function(*values))
        if code:
            raise KvbenchError("a call of the C side failed", where=name, got=code)

    return call


class Plain:
    """The C side, on the driver's memfd and addresses while those are given back.

    With pages of its own the ratio would be that of two allocations: 0.77 to 1.12 from one process to the next.
    """

    def __init__(self, library: ctypes.CDLL, way: Chunks, fd: int, chunk: int, count: int, *, cold: bool) -> None:
        self._take, self._back = entry(library, "c_take", 6), entry(library, "c_back", 5)
        self._chunk, self._count, self._cold = chunk, count, int(cold)
        self._fd, self._base, self._value = fd, way.place.address, 0
        way.take()  # the file is as long as the chunks once were
        way.give_back()

    def run(self) -> float:
        """Return the seconds of mapping and touching all chunks."""
        self._value = (self._value + 1) % 256
        start = time.perf_counter()
        self._take(self._fd, self._base, self._chunk, self._count, libc.base_page_bytes(), self._value)
        seconds = time.perf_counter() - start
        self.check()
        self._back(self._fd, self._base, self._chunk, self._count, self._cold)
        return seconds

    def check(self) -> None:
        """Raise VerifyError unless the last byte touched holds what was written."""
        last = self._base + self._chunk * self._count - libc.base_page_bytes()
        if ctypes.string_at(last, 1) != bytes([self._value]):
            raise VerifyError("the C side touched nothing", where="c_take")


def host(library: ctypes.CDLL, team: Team, chunk: int, count: int, *, cold: bool, pairs: int) -> Figure:
    """Return how the host driver's way to ``count`` touched chunks compares with C's."""
    touch = HostTouch()
    with HostVmm(chunk * count, granularity=chunk) as vmm:
        way = Chunks(vmm, touch, chunk, count, cold=cold)
        c = Plain(library, way, vmm.descriptor, chunk, count, cold=cold)

        def ours() -> float:
            start = time.perf_counter()
            addresses = way.take()
            touch.first(addresses, chunk)
            seconds = time.perf_counter() - start
            way.give_back()
            return seconds

        found = compare({"calls": ours}, {"calls": c.run}, team, pairs)
        way.take()
        way.check()
        way.give_back()
        way.close()
        vmm.close()
    name = f"host map to first touch, {compact_bytes(chunk)}, {'cold' if cold else 'created'}"
    return figure(name, found, count)


def gpu(library: ctypes.CDLL, team: Team, pairs: int) -> Figure:
    """Return how the compiled loop of cuMemMap compares with one in C; without a GPU a figure that says so."""
    name = "cuMemMap in a compiled loop"
    try:
        driver = Driver()
    except Unavailable as error:
        return Figure(GROUP, name, "ratio", None, None, None, judge(None, None, None, disturbed=False), str(error))
    loop = entry(library, "c_calls", 3)
    with Device(driver) as device, CudaVmm(device) as vmm:
        size = vmm.granularity()
        place = vmm.reserve(size * MAPS)
        chunks = vmm.create_many(size, MAPS)
        handles = np.array([chunk.handle for chunk in chunks], np.int64)
        table = rows(MAPS, place.address + size * np.arange(MAPS, dtype=np.int64), size, 0, handles, 0)
        function = driver.address("cuMemMap")

        def timed(call: Callable[[], None]) -> Timed:
            def run() -> float:
                start = time.perf_counter()
                call()
                seconds = time.perf_counter() - start
                device.call("cuMemUnmap", place.address, place.nbytes)
                return seconds

            return run

        def ours() -> None:
            failure = alone(function, table, errno=False)
            if failure is not None:
                driver.check("cuMemMap", failure.code)

        found = compare(
            {"calls": timed(ours)}, {"calls": timed(lambda: loop(function, table.ctypes.data, MAPS))}, team, pairs
        )  # fmt: skip
        vmm.release_many(chunks)
        vmm.free(place)
    return figure(name, found, MAPS)


def figure(name: str, found: Found | None, count: int) -> Figure:
    """Return the figure for what :func:`compare` found of ``count`` chunks a run."""
    label = f"{name}: kvbench / C"
    if found is None:
        verdict = judge(None, None, HIGH, disturbed=True)
        return Figure(GROUP, label, "ratio", None, None, HIGH, verdict, "too few undisturbed pairs")
    value = 1.0 / found.ratio
    ours, c = found.ours / count, found.c / count
    detail: dict[str, Scalar] = {"ours": ours, "c": c, "pairs": found.pairs, "chunks": count, "unit": "s"}
    note = f"ours {format_value(ours, 's')}, C {format_value(c, 's')} a chunk, {found.pairs} pairs"
    return Figure(
        GROUP, label, "ratio", value, None, HIGH, judge(value, None, HIGH, disturbed=False), note, detail=detail
    )
