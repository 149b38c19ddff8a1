"""What disturbed a GPU in a window of time: throttling, clocks, the PCIe link, replays; and the link under load.

The host's side of the same question is :mod:`kvbench.machine.state`. Readings are of NVML: each is optional, and a
question a board refuses for good is asked once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.machine import nvml
from kvbench.machine.nvml import Asker

# nvmlClocksEventReasons of nvml.h
REASONS = {
    0x001: "idle", 0x002: "application_clocks", 0x004: "power_cap", 0x008: "hw_slowdown", 0x010: "sync_boost",
    0x020: "sw_thermal", 0x040: "hw_thermal", 0x080: "hw_power_brake", 0x100: "display_clocks",
}  # fmt: skip
SLOWDOWN = 0x008 | 0x020 | 0x040 | 0x080  # heat and power failing: never how a healthy board runs
POWER_CAP = 0x004
# Field ids that count ns of slowdown since the driver came up: between two readings nothing escapes them.
# NVML_FI_DEV_PERF_POLICY_THERMAL, then SW_THERM_SLOWDOWN, HW_THERM_SLOWDOWN, HW_POWER_BRAKE_SLOWDOWN (driver 570)
_SLOWDOWN_COUNTERS: list[int | tuple[int, int]] = [75, 269, 270, 271]
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_SENSOR_GPU = 0  # NVML_TEMPERATURE_GPU
CLOCK_CHANGE = 0.05  # as on the host: trap T13 asks for 3 % between first and last samples, one reading jitters
WATCH_SECONDS = 0.05  # between two looks at the link: a look is a driver call, and runs beside the measurement
FIRST_LOOK_SECONDS = 0.005  # a link needs some ms to leave its idle state


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One board at one moment; None where it does not tell. ``reasons`` is NVML's bit mask of what holds clocks down.

    ``slowdown_ns`` counts time slowed by heat or a power brake; ``replays`` PCIe packets sent again; ``lost``: the
    board answers no more.
    """

    at: float
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    reasons: int | None = None
    slowdown_ns: tuple[int | float | None, ...] = ()
    temperature_c: int | None = None
    power_w: float | None = None
    gen: int | None = None
    width: int | None = None
    replays: int | None = None
    lost: bool = False

    @property
    def reason_words(self) -> tuple[str, ...]:
        """The reasons by name; bits nvml.h does not name yet as ``bit:0x200``."""
        mask = self.reasons or 0
        named = [word for bit, word in REASONS.items() if mask & bit]
        left = mask & ~sum(REASONS)
        return (*named, *([f"bit:{left:#x}"] if left else []))


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """What a board can do at best, against which a reading is a downshift; None: unknown, so nothing is marked."""

    gen: int | None = None
    width: int | None = None
    c2c: bool = False


@dataclass(frozen=True, slots=True)
class GpuDelta:
    """What happened to one board between two readings. ``marks`` disturb a sample; ``notes`` describe how it ran.

    A power cap that holds all the time is how this board runs: a note. One that came or went is a mark.
    """

    wall: float
    marks: tuple[str, ...]
    notes: tuple[str, ...]


class GpuProbe:
    """Boards kept open for reading. ``indices`` (default: all) are NVML's. Use as a context manager or close it.

    ``reason`` says why there is nothing to read; then every snapshot is empty. Never raises.
    """

    def __init__(
        self, indices: Collection[int] | None = None, module: Any = None, loads: Callable[[], bool] | None = None
    ) -> None:
        self._nvml = nvml.start(module, loads)
        self.reason = self._nvml.reason
        self.indices: tuple[int, ...] = ()
        self.limits: tuple[GpuLimits, ...] = ()
        self._boards: list[tuple[Asker, Any]] = []
        if self._nvml.module is None:
            return
        count = Asker(self._nvml.module).integer("nvmlDeviceGetCount") or 0
        for index in range(count):
            if indices is not None and index not in indices:
                continue
            ask = Asker(self._nvml.module)
            handle = ask("nvmlDeviceGetHandleByIndex", index)
            self.indices += (index,)
            self._boards.append((ask, handle))
            self.limits += (_limits(ask, handle),)
        if not self._boards:
            self.reason = "the driver lists no such GPU"

    def __enter__(self) -> GpuProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._boards.clear()
        nvml.stop(self._nvml)
        self._nvml = nvml.Nvml(None, reason="closed")

    def snapshot(self) -> tuple[GpuReading, ...]:
        """Return one reading a board, in the order of ``indices``. Some ten driver calls each, no waiting."""
        return tuple(_reading(ask, handle) for ask, handle in self._boards)

    def links(self) -> tuple[tuple[int | None, int | None], ...]:
        """Return (generation, width) of each board's link now; the cheapest look, for use beside a measurement."""
        return tuple(_link(ask, handle) for ask, handle in self._boards)

    def processes(self) -> tuple[int | None, ...]:
        """Return how many processes compute on each board; desktop programs that only draw are not among them."""
        found = [None if h is None else ask("nvmlDeviceGetComputeRunningProcesses", h) for ask, h in self._boards]
        return tuple(len(each) if isinstance(each, list | tuple) else None for each in found)


def _limits(ask: Asker, handle: Any) -> GpuLimits:
    if handle is None:
        return GpuLimits()
    c2c = ask.fields(handle, [170])[0]  # NVML_FI_DEV_C2C_LINK_COUNT
    return GpuLimits(
        ask.integer("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        ask.integer("nvmlDeviceGetMaxPcieLinkWidth", handle),
        bool(c2c),
    )


def _link(ask: Asker, handle: Any) -> tuple[int | None, int | None]:
    if handle is None:
        return None, None
    return (
        ask.integer("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        ask.integer("nvmlDeviceGetCurrPcieLinkWidth", handle),
    )


def _reading(ask: Asker, handle: Any) -> GpuReading:
    at = time.perf_counter()
    if handle is None:
        return GpuReading(at, lost=ask.lost)
    reasons = ask.integer("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:  # the name before driver 535
        reasons = ask.integer("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    power = ask.integer("nvmlDeviceGetPowerUsage", handle)
    gen, width = _link(ask, handle)
    return GpuReading(
        at=at,
        sm_mhz=ask.integer("nvmlDeviceGetClockInfo", handle, _CLOCK_SM),
        memory_mhz=ask.integer("nvmlDeviceGetClockInfo", handle, _CLOCK_MEMORY),
        reasons=reasons,
        slowdown_ns=tuple(ask.fields(handle, _SLOWDOWN_COUNTERS)),
        temperature_c=ask.integer("nvmlDeviceGetTemperature", handle, _SENSOR_GPU),
        power_w=None if power is None else power / 1000,
        gen=gen,
        width=width,
        replays=ask.integer("nvmlDeviceGetPcieReplayCounter", handle),
        lost=ask.lost,
    )


def delta(before: GpuReading, after: GpuReading, limits: GpuLimits, *, link: bool) -> GpuDelta:
    """Return what happened between two readings of one board. Raises ValueError when they are out of order.

    ``link``: the window's work moves bytes over PCIe. Only then are a downshift and replays marked: the link of a board
    that works out of its own memory idles, and an idle link drops by itself. Boards on a C2C link use no PCIe.
    """
    wall = after.at - before.at
    if wall < 0:
        raise ValueError(f"the second reading is {-wall:.6f} s older than the first")
    ends = (before.reasons, after.reasons)
    slowed = any(_grew(a, b) for a, b in zip(before.slowdown_ns, after.slowdown_ns, strict=False))
    capped = [bool(mask & POWER_CAP) for mask in ends if mask is not None]
    pcie = link and not limits.c2c
    checks = (
        ("throttled", slowed or any((mask or 0) & SLOWDOWN for mask in ends)),
        ("power_capped", any(capped) and not all(capped)),
        ("clock_moved", _moved(before.sm_mhz, after.sm_mhz) or _moved(before.memory_mhz, after.memory_mhz)),
        ("pcie_downshift", pcie and below((after.gen, after.width), limits)),
        ("pcie_replay", pcie and _grew(before.replays, after.replays)),
        ("gpu_lost", after.lost),
    )
    notes = ("power_capped",) if capped and all(capped) else ()
    return GpuDelta(wall, tuple(name for name, marked in checks if marked), notes)


def below(link: tuple[int | None, int | None], limits: GpuLimits) -> bool:
    """Return whether a link is known to be slower or narrower than the most it can be."""
    pairs = ((link[0], limits.gen), (link[1], limits.width))
    return any(now is not None and most is not None and now < most for now, most in pairs)


def _grew(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after > before


def _moved(before: int | None, after: int | None) -> bool:
    return bool(before and after) and abs((after or 0) / (before or 1) - 1) > CLOCK_CHANGE


def marker(probe: GpuProbe, *, link: bool, ignore: Collection[str] = ()) -> Callable[[], Sequence[str]]:
    """Return a function that names what happened to any board of ``probe`` since it was last asked.

    Made for the sampler's ``marker`` argument: call it at block boundaries, some ten ms apart. Make it after the
    warm-up: clocks and link of an idle board are low, and rising to the work is no disturbance.
    """
    last = list(probe.snapshot())

    def marks() -> Sequence[str]:
        now = probe.snapshot()
        found: dict[str, None] = {}
        for before, after, limits in zip(last, now, probe.limits, strict=True):
            found |= dict.fromkeys(delta(before, after, limits, link=link).marks)
        last[:] = now
        return tuple(word for word in found if word not in ignore)

    return marks


@dataclass(frozen=True, slots=True)
class LinkUnderLoad:
    """A board's link while work ran: the best state seen, the least of each after it, and from how many looks.

    ``downshift``: it never reached what it can do, or fell after it had reached its best. None of the numbers means
    anything with ``looks`` = 0; then ``reason`` says why.
    """

    index: int
    gen: int | None = None
    width: int | None = None
    least_gen: int | None = None
    least_width: int | None = None
    downshift: bool | None = None
    looks: int = 0
    reason: str = ""


class LinkWatch:
    """Looks at the links of ``probe`` from a thread of its own while the block runs: enter it when work runs.

    An idle link drops within seconds (to gen 1 as a rule) and says nothing about what a transfer gets (trap T46).
    ``results`` are there after the block.
    """

    def __init__(self, probe: GpuProbe, seconds: float = WATCH_SECONDS) -> None:
        self._probe, self._seconds = probe, seconds
        self._seen: list[tuple[tuple[int | None, int | None], ...]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="kvbench-link-watch", daemon=True)
        self.results: tuple[LinkUnderLoad, ...] = ()

    def __enter__(self) -> LinkWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.results = tuple(
            under_load(index, [looks[place] for looks in self._seen], limits)
            for place, (index, limits) in enumerate(zip(self._probe.indices, self._probe.limits, strict=True))
        )

    @property
    def looks(self) -> int:
        """How often the links were looked at so far."""
        return len(self._seen)

    def _look(self) -> None:
        wait = min(FIRST_LOOK_SECONDS, self._seconds)
        while not self._stop.wait(wait):
            self._seen.append(self._probe.links())
            wait = self._seconds


def under_load(index: int, looks: Sequence[tuple[int | None, int | None]], limits: GpuLimits) -> LinkUnderLoad:
    """Return what ``looks`` at one board's link, in the order of time, say together."""
    known = [(gen, width) for gen, width in looks if gen is not None and width is not None]
    if not known:
        why = "the board does not tell its link" if looks else "the window ended before the first look"
        return LinkUnderLoad(index, reason=why)
    gens, widths = [gen for gen, _ in known], [width for _, width in known]
    best = max(known, key=lambda pair: pair[1] << min(pair[0], 16))  # each generation doubles the rate of a lane
    first = known.index(best)
    fell = any(gen < best[0] or width < best[1] for gen, width in known[first:])
    unknown = limits.gen is None or limits.width is None
    return LinkUnderLoad(
        index, best[0], best[1], min(gens[first:]), min(widths[first:]),
        True if fell or below(best, limits) else None if unknown else False, len(known),
    )  # fmt: skip
