"""Bytes that crossed a GPU's link during some work, counted by the board and not by the algebra.

Sources in order: byte counts of NVML's fields 197/198 (PCIe), its GPM metrics 20/21 (PCIe) and 100..103 (C2C, Hopper
and later) over a window of at least 0.2 s, as they are averages over what the board sampled; then a hardware-counter
profiler in a child (:mod:`kvbench.machine.link_profiler`); else bounds. A source is used after it has told a known copy
right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvbench.errors import UsageError
from kvbench.machine import nvml
from kvbench.machine.nvml import Asker

Way = Literal["fetch", "evict"]
LEAST_WINDOW_S = 0.2  # GPM and the PCIe counts are refreshed every 20 ms or more: one refresh is 10 % of this
PROBE_LOW, PROBE_HIGH = (
    0.97,
    1.12,
)  # of a known copy: headers and acknowledgements of PCIe packets count in some sources
MIB = 1 << 20
FIELDS: list[int | tuple[int, int]] = [197, 198]  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES, ..._RX_BYTES
# (from the GPU, to the GPU) of nvmlGpmMetricId_t, MiB/s; C2C data without protocol first
GPM = {"gpm c2c data": (102, 103), "gpm c2c": (100, 101), "gpm pcie": (20, 21)}


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """Bytes one pass moved over the link in one direction.

    ``value`` is None where nobody counts, then ``low`` and ``high`` bound it: unique bytes and demand. ``source`` names
    what counted (``bounds`` where nothing did), ``probe_ratio`` what it said of a known copy over what that moved,
    ``reason`` why the sources before it were not used, ``window_s`` and ``passes`` what the count was taken over.
    """

    value: float | None
    low: float
    high: float
    source: str
    probe_ratio: float | None = None
    window_s: float | None = None
    passes: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Window:
    """What one window of work moved: bytes (from the GPU, to the GPU), None with the ``reason``."""

    moved: tuple[float, float] | None
    seconds: float
    passes: int
    reason: str = ""


class LinkCounters:
    """The counters of board ``index`` (NVML's; None: not known which). Use as a context manager; opening never raises.

    ``module`` stands in for pynvml. ``reason`` says why there is nothing to ask.
    """

    def __init__(self, index: int | None, module: Any = None, loads: Callable[[], bool] | None = None) -> None:
        unknown = nvml.Nvml(None, reason="NVML's board of this device is not known")
        self._nvml = unknown if index is None else nvml.start(module, loads)
        self.reason, self._handle = self._nvml.reason, None
        self._ask = Asker(self._nvml.module)
        if self._nvml.module is not None:
            self._handle = self._ask("nvmlDeviceGetHandleByIndex", index)
            if self._handle is None:
                self.reason = "; ".join(why for _, why in self._ask.gaps) or "the driver lists no such GPU"

    def __enter__(self) -> LinkCounters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give NVML back. Closing twice is fine."""
        self._handle = None
        nvml.stop(self._nvml)
        self._nvml = nvml.Nvml(None, reason="closed")

    def sources(self) -> tuple[str, ...]:
        """Return the sources this board answers for, best first."""
        if self._handle is None:
            return ()
        found = [] if None in self._ask.fields(self._handle, FIELDS) else ["pcie byte counts"]
        support = self._ask("nvmlGpmQueryDeviceSupport", self._handle)
        if support is not None and getattr(support, "isSupportedDevice", False):
            found += list(GPM)
        c2c = self._ask.fields(self._handle, [170])[
            0
        ]  # NVML_FI_DEV_C2C_LINK_COUNT: such a board's PCIe is not the link
        return tuple(s for s in found if ("pcie" in s) != bool(c2c))

    def window(self, source: str, work: Callable[[], None], least_s: float = LEAST_WINDOW_S) -> Window:
        """Do ``work`` (one pass, waited for) for at least ``least_s`` and return what ``source`` says was moved.

        Raises UsageError for a source that is none.
        """
        if source != "pcie byte counts" and source not in GPM:
            raise UsageError("unknown source", where="link bytes", got=source,
                             expected=", ".join(("pcie byte counts", *GPM)))  # fmt: skip
        if self._handle is None:
            return Window(None, 0.0, 0, self.reason or "closed")
        return self._counted(work, least_s) if source == "pcie byte counts" else self._sampled(source, work, least_s)

    def _counted(self, work: Callable[[], None], least_s: float) -> Window:
        before = self._ask.fields(self._handle, FIELDS)
        seconds, passes = _repeat(work, least_s)
        after = self._ask.fields(self._handle, FIELDS)
        moved = [None if a is None or b is None else b - a for a, b in zip(before, after, strict=True)]
        if moved[0] is None or moved[1] is None:
            return Window(None, seconds, passes, "the board stopped telling its byte counts")
        if min(moved[0], moved[1]) < 0:
            return Window(None, seconds, passes, "the byte counts went backwards")
        return Window((float(moved[0]), float(moved[1])), seconds, passes)

    def _sampled(self, source: str, work: Callable[[], None], least_s: float) -> Window:
        module, ask = self._nvml.module, self._ask
        samples: list[Any] = []
        try:
            for _ in range(2):
                sample = ask("nvmlGpmSampleAlloc")
                if sample is None:
                    return Window(None, 0.0, 0, _why(ask, "nvmlGpmSampleAlloc"))
                samples.append(sample)
            begin = time.perf_counter()
            if ask("nvmlGpmSampleGet", self._handle, samples[0]) is None:
                return Window(None, 0.0, 0, _why(ask, "nvmlGpmSampleGet"))
            _, passes = _repeat(work, least_s)
            if ask("nvmlGpmSampleGet", self._handle, samples[1]) is None:
                return Window(None, 0.0, 0, _why(ask, "nvmlGpmSampleGet"))
            seconds = time.perf_counter() - begin  # the rates are averages from sample to sample
            asked = module.c_nvmlGpmMetricsGet_t()
            asked.version, asked.numMetrics = module.NVML_GPM_METRICS_GET_VERSION, 2
            asked.sample1, asked.sample2 = samples
            for place, metric in enumerate(GPM[source]):
                asked.metrics[place].metricId = metric
            got = ask("nvmlGpmMetricsGet", asked)
            if got is None:
                return Window(None, seconds, passes, _why(ask, "nvmlGpmMetricsGet"))
            wrong = [got.metrics[i].metricId for i in range(2) if got.metrics[i].nvmlReturn]
            if wrong:
                return Window(None, seconds, passes, f"the board has no GPM metric {wrong[0]}")
            moved = tuple(float(got.metrics[i].value) * MIB * seconds for i in range(2))
            return Window((moved[0], moved[1]), seconds, passes)
        finally:
            for sample in samples:
                ask("nvmlGpmSampleFree", sample)


def _why(ask: Asker, call: str) -> str:
    return next((f"{name}: {why}" for name, why in ask.gaps if name == call), f"{call}: no answer")


def _repeat(work: Callable[[], None], least_s: float) -> tuple[float, int]:
    begin, passes = time.perf_counter(), 0
    while True:
        work()
        passes += 1
        seconds = time.perf_counter() - begin
        if seconds >= least_s:
            return seconds, passes


def link_bytes(
    counters: LinkCounters, work: Callable[[], None], bounds: tuple[int, int], probe: Callable[[], None],
    probe_bytes: int, way: Way = "fetch", least_s: float = LEAST_WINDOW_S,
    profiled: Callable[[], tuple[float | None, str]] | None = None,
) -> LinkBytes:  # fmt: skip
    """Return the bytes one pass of ``work`` moves over the link, by the first source that tells ``probe`` right.

    ``probe`` copies ``probe_bytes`` the same ``way``; both calls return when their work is done. ``bounds``: the pass's
    (unique, demand) bytes. ``profiled`` asks a profiler in a child: (bytes of one pass, or None with why).
    Raises UsageError for bounds in the wrong order or a probe of nothing.
    """
    low, high = bounds
    if not 0 <= low <= high or probe_bytes < 1:
        raise UsageError("not bounds and a probe", where="link bytes", got=(low, high, probe_bytes),
                         expected="unique <= demand, a probe of some bytes")  # fmt: skip
    side = 1 if way == "fetch" else 0
    reasons: list[str] = []
    sources: Sequence[str] = counters.sources()
    if not sources:
        reasons.append(counters.reason or "NVML counts no bytes of this board's link")
    for source in sources:
        known = counters.window(source, probe, least_s)
        if known.moved is None:
            reasons.append(f"{source}: {known.reason}")
            continue
        ratio = known.moved[side] / (known.passes * probe_bytes)
        if not PROBE_LOW <= ratio <= PROBE_HIGH:
            reasons.append(f"{source}: {ratio:.3g} x the bytes of a known copy")
            continue
        seen = counters.window(source, work, least_s)
        if seen.moved is None:
            reasons.append(f"{source}: {seen.reason}")
            continue
        value = seen.moved[side] / seen.passes / ratio  # what it counts beside the payload is in both
        return LinkBytes(value, low, high, source, ratio, seen.seconds, seen.passes, "; ".join(reasons))
    if profiled is not None:
        counted, why = profiled()
        if counted is not None:
            return LinkBytes(counted, low, high, "profiler", None, None, 1, "; ".join(reasons))
        reasons.append(f"profiler: {why}")
    return LinkBytes(None, low, high, "bounds", reason="; ".join(reasons))
