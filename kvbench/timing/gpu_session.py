"""What one case needs of a GPU: driver, device, service kernels, clock and the board's state, given back with the case.

Nothing is compiled and no context is made before the driver has said that there is a GPU: on a machine without one a
case costs the attempt to load a library.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kvbench.contract.result import Ceiling, Scalar
from kvbench.errors import KvbenchError, Unavailable
from kvbench.kernels.cuda.build import SERVICE, compile_source
from kvbench.machine.gpu import Gpu, read_gpus
from kvbench.machine.nvml import uuid_hash
from kvbench.machine.nvml_devices import read_devices
from kvbench.machine.nvml_state import GpuProbe, LinkUnderLoad, LinkWatch, marker
from kvbench.machine.physical import PCIE_GENERATIONS, pcie_bytes_per_s
from kvbench.memory.cuda.device import Device, Launch, allocate
from kvbench.memory.cuda.driver import LIBRARY, Driver
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import THREADS, Service
from kvbench.timing.events import FLUSH_MULTIPLE, EventClock
from kvbench.timing.sampler import Run

T = TypeVar("T")
L2_MULTIPLE = 4  # a working set below this many L2 is partly served by it (trap T10)


@functools.cache
def _process_driver() -> Driver:
    return Driver()


_kept: dict[tuple[int, int], Device] = {}


def open_driver() -> Driver:
    """Return this process's driver. Raises Unavailable, in few words, where there is none or it shows no GPU."""
    try:
        return _process_driver()
    except Unavailable as error:
        if isinstance(error.__cause__, OSError):
            raise Unavailable(f"no GPU here: {LIBRARY} does not load") from error
        raise


def keep_context(driver: Driver, ordinal: int) -> None:
    """Hold a context for the life of this process: made anew it would cost every case some tenths of a second."""
    if (id(driver), ordinal) not in _kept:
        _kept[id(driver), ordinal] = Device(driver, ordinal)


@functools.lru_cache(maxsize=16)
def image_of(source: Path, arch: tuple[int, int]) -> bytes:
    """Return the machine code of a CUDA C++ file for compute capability ``arch``; errors as compile_source."""
    return compile_source(source.read_text(encoding="utf-8"), f"sm_{arch[0]}{arch[1]}", source.name).image


class GpuSession:
    """GPU ``ordinal`` (as CUDA counts the visible ones), opened; everything it made is given back by ``with``.

    ``clock`` times on its stream; ``kernels`` launches the catalogue's; ``board`` is what NVML says of it, None with
    ``board_reason``. Raises Unavailable without driver, GPU or such a GPU, MissingExtra without NVRTC.
    """

    def __init__(self, ordinal: int = 0) -> None:
        driver = open_driver()
        count = driver.device_count()
        if ordinal >= count:
            raise Unavailable(f"no GPU {ordinal}", where="device", got=f"{count} visible to CUDA in this process")
        keep_context(driver, ordinal)
        self.driver = driver
        self._flush: Launch | None = None
        self._boards: tuple[GpuProbe, Gpu | None] | None = None
        self.board_reason = ""
        self.watch_link = False  # whether a downshift of the link disturbs the work
        with ExitStack() as stack:
            self.device = stack.enter_context(Device(driver, ordinal))
            arch = self.device.facts.arch
            self.service = stack.enter_context(Service(self.device, image_of(SERVICE, arch)))
            self.clock = stack.enter_context(EventClock(self.service))
            self._stack = stack.pop_all()
        self.kernels = Kernels(self.device, image_of, self._stack)

    def enter(self, resource: AbstractContextManager[T]) -> T:
        """Open ``resource`` until the session ends, last opened first."""
        return self._stack.enter_context(resource)

    def allocate(self, nbytes: int) -> int:
        """Return the address of device memory that goes with the session. Raises Unavailable without room."""
        return allocate(self.device, nbytes, self._stack)

    def __enter__(self) -> GpuSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give back all of it. What the driver objects to then is raised, unless something else went wrong before."""
        if error is None:
            self._stack.close()
            return
        with suppress(KvbenchError):  # the first error is the one that tells
            self._stack.close()

    # -- caches --------------------------------------------------------------------------------------------------

    def in_l2(self, working_set: int) -> bool:
        """Return whether part of ``working_set`` bytes can stay in the L2 the driver reports."""
        return working_set < L2_MULTIPLE * self.device.facts.l2_bytes

    def flushed(self, run: Run) -> Run:
        """Return ``run`` one pass at a time, each after a flush of the L2 that lies outside its window.

        Raises Unavailable where the driver reports no L2.
        """
        if self._flush is None:
            size = FLUSH_MULTIPLE * self.device.facts.l2_bytes // 8 * 8
            if not size:
                raise Unavailable("the driver reports no L2 size, so nothing can be flushed", where="GPU session")
            buffer = self.allocate(size)
            stream = self.clock.stream
            stream.set_bytes(buffer, 0, size)
            arguments = [ctypes.c_uint64(value) for value in (buffer, size // 8, 1)]
            self._flush = Launch(self.service.flush, self.service.grid(size // 8), THREADS, arguments)
        flush = self._flush

        def one() -> None:
            self.clock.stream.launch(flush)
            self.clock.stream.synchronize()

        return before_each(run, one)

    # -- the board -----------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Scalar]:
        """Return what a row says of the device: model, compute capability, SMs, L2, driver, host node."""
        found = self.device.facts
        return {
            "gpu": found.name, "sm_arch": f"{found.arch[0]}.{found.arch[1]}", "sms": found.sms,
            "l2_bytes": found.l2_bytes, "cuda": self.driver.version_text, "gpu_node": found.node.value,
            "event_quantum": self.clock.quantum.seconds,
        }  # fmt: skip

    def board(self) -> tuple[GpuProbe, Gpu | None]:
        """Return NVML's probe of the board this device is, and its record; without NVML an empty probe and None.

        Matched by UUID: CUDA's order of devices is not NVML's (fastest first by default).
        """
        if self._boards is None:
            index, record = self._find()
            probe = GpuProbe(() if index is None else (index,))
            self._stack.callback(probe.close)
            if index is None and not probe.reason:
                probe.reason = self.board_reason
            self.board_reason = self.board_reason or probe.reason
            self._boards = (probe, record)
        return self._boards

    def _find(self) -> tuple[int | None, Gpu | None]:
        raw = (ctypes.c_ubyte * 16)()
        handle = ctypes.c_int()
        self.driver.call("cuDeviceGet", ctypes.byref(handle), self.device.ordinal)
        self.driver.call("cuDeviceGetUuid", raw, handle)
        own = bytes(raw).hex()
        devices = read_devices()
        same = [d for d in devices.found if d.uuid.partition("-")[2].replace("-", "").lower() == own]
        if len(same) != 1:
            self.board_reason = devices.reason or f"{len(same)} of NVML's boards have this device's UUID"
            return None, None
        boards = [b for b in read_gpus().boards if b.uuid_hash and b.uuid_hash == uuid_hash(same[0].board_uuid)]
        return same[0].index, boards[0] if len(boards) == 1 else None

    def marker(self) -> Callable[[], Sequence[str]] | None:
        """Return what names what happened to the board since it was last asked; None where nobody can look."""
        probe, _ = self.board()
        return marker(probe, link=self.watch_link) if probe.indices else None

    def link_watch(self) -> LinkWatch:
        """Return what looks at the link while work runs (trap T46): enter it around the measurement."""
        return LinkWatch(self.board()[0])

    def link_ceiling(self, directions: int) -> Ceiling:
        """Return what the link can carry in ``directions`` (1 or 2) at once; value None, with why, where unknown."""
        probe, _ = self.board()
        if not probe.limits:
            return Ceiling("link", None, "physical", self.board_reason)
        limits = probe.limits[0]
        if limits.c2c:
            return Ceiling("nvlink-c2c", None, "physical", "NVML names no rate of this link by direction")
        if limits.gen not in PCIE_GENERATIONS or limits.width is None:
            return Ceiling("pcie", None, "physical", "NVML does not tell generation and width of the link")
        value = directions * pcie_bytes_per_s(limits.gen, limits.width)
        source = f"gen {limits.gen} x{limits.width} after line coding, {directions} direction{'s' * (directions > 1)}"
        return Ceiling("pcie", value, "physical", source)

    def memory_ceiling(self) -> Ceiling:
        """Return what the board's memory can deliver: two transfers a clock on each line of its bus."""
        _, board = self.board()
        if board is None or not board.max_memory_mhz or not board.memory_bus_bits:
            why = self.board_reason or "NVML does not tell memory clock and bus width"
            return Ceiling("hbm", None, "physical", why)
        value = 2e6 * board.max_memory_mhz * board.memory_bus_bits / 8
        return Ceiling("hbm", value, "physical", f"2 x {board.max_memory_mhz} MHz x {board.memory_bus_bits} bit (NVML)")


def before_each(run: Run, prepare: Callable[[], None]) -> Run:
    """Return ``run`` one pass at a time, each after ``prepare``; the seconds are those of the passes alone."""

    def one_by_one(reps: int) -> float:
        seconds = 0.0
        for _ in range(reps):
            prepare()
            own = run(1)
            if own is None:
                raise KvbenchError("only a run that returns its own seconds can leave out what comes before it")
            seconds += own
        return seconds

    return one_by_one


def link_notes(found: tuple[LinkUnderLoad, ...]) -> dict[str, Scalar]:
    """Return the link under load as details of a row; nothing where there is no board to look at."""
    if not found:
        return {}
    seen = found[0]
    return {"pcie_gen": seen.gen, "pcie_width": seen.width, "pcie_looks": seen.looks}
