"""Layer-wise overlap on the host: a loader thread brings in layer l + 1 while another thread computes on layer l.

Strata, OSDI 2026, section 4 (layer-wise loading, as SGLang's HiCache does it with events): each layer is handed over by
its own flag in memory, and nobody ever waits for the whole transfer. What runs is :mod:`kvbench.kernels.layers`; this
is the schedule, the buffers it works on, and the proof that no layer was read before it arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.model.layout import Pool

if TYPE_CHECKING:
    from kvbench.kernels.team import Team

Words = np.ndarray[Any, np.dtype[np.int64]]
VARIANT = "nt l2+4096"  # of kernels.gather: the fastest gather copy of large fragments on most machines
MOST_BESIDE = 1 << 14  # layers of the faster side in a run of both beside each other
EDGE = 64  # bytes at both ends of every fragment that are made wrong before a pass


class Recorder(Protocol):
    """What a suite hands in to time stages; a mechanism only says where they end."""

    def mark(self, name: str) -> None:
        """Note that the stage ``name`` ended now."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who waits for what: ``waits[l]`` is the layer that must be loaded before layer l is computed, ``holds[l]`` the
    one that must be computed before layer l is loaded (needed where the near pool holds few layers); -1: nothing.
    """

    waits: tuple[int, ...]
    holds: tuple[int, ...]

    @classmethod
    def layerwise(cls, layers: int) -> Schedule:
        """Return the overlapped schedule: every layer is computed as soon as it is there."""
        return cls(tuple(range(layers)), (-1,) * layers)

    @classmethod
    def serial(cls, layers: int) -> Schedule:
        """Return the schedule without overlap: nothing is computed before everything is there."""
        return cls((layers - 1,) * layers, (-1,) * layers)


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What one run left: ``seconds`` from release to the last arrival, and begin and end of every layer on each side
    in nanoseconds of one clock, int64 [loads, 2] and [computes, 2]."""

    seconds: float
    load: Words
    compute: Words

    @property
    def busy(self) -> float:
        """Seconds the computing side computed."""
        return float((self.compute[:, 1] - self.compute[:, 0]).sum()) * 1e-9

    @property
    def total(self) -> float:
        """Seconds from the begin of the first load (or computation) to the end of the last computation."""
        begin = min(int(side[0, 0]) for side in (self.load, self.compute) if len(side))
        return float(self.compute[-1, 1] - begin) * 1e-9

    @property
    def stall(self) -> float:
        """Seconds the computing side waited."""
        return self.total - self.busy

    @property
    def per_load(self) -> float:
        """Mean seconds of a load."""
        return fmean(self.loads)

    @property
    def per_compute(self) -> float:
        """Mean seconds of a computation."""
        return fmean(self.computes)

    @property
    def loads(self) -> tuple[float, ...]:
        """Seconds of each load, begin to end."""
        return _lengths(self.load)

    @property
    def computes(self) -> tuple[float, ...]:
        """Seconds of each computation, begin to end."""
        return _lengths(self.compute)

    def beside(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Return the seconds of the loads and of the computations that lie wholly in the time both sides were busy.

        None when either side has no such layer: then nothing was measured beside the other.
        """
        if not len(self.load) or not len(self.compute):
            return None
        begin = max(int(self.load[0, 0]), int(self.compute[0, 0]))
        end = min(int(self.load[-1, 1]), int(self.compute[-1, 1]))
        load, compute = (
            _lengths(side[(side[:, 0] >= begin) & (side[:, 1] <= end)]) for side in (self.load, self.compute)
        )
        return (load, compute) if load and compute else None


def _lengths(side: Words) -> tuple[float, ...]:
    return tuple(((side[:, 1] - side[:, 0]) * 1e-9).tolist())


class HostOverlap:
    """Passes over the layers of ``pool`` (layer_first) at address ``far`` into ``near``, which has as many bytes.

    ``team`` has two members: the first computes, the second loads. ``order`` is a permutation of the pool's pages,
    int64 [pages]: the slots they lie in. In ``near`` a layer is contiguous: all pages of its keys in order, then those
    of its values. ``steps``: FMA steps a layer (``kernels.layers.STEP_FLOPS`` operations each); 0 only reads.

    ``layer_bytes`` are those of a layer, ``link_bytes`` those of a pass. Raises UsageError for another layout, a team
    of another size, an order that is no permutation, overlapping or unaligned buffers, or steps that cannot be counted.
    """

    def __init__(self, team: Team, far: int, near: int, pool: Pool, order: Words, *, variant: str = VARIANT) -> None:
        from kvbench.kernels import layers as code
        from kvbench.kernels.gather import parse

        shape = pool.geometry
        self.pool, self.layers, self.team = pool, shape.layers, team
        self.layer_bytes = pool.nbytes // shape.layers
        self.link_bytes = pool.nbytes
        self.fragment = shape.fragment_bytes("layer_first", pool.page_tokens)
        self._check(far, near, order, code.CHUNK)
        self.near, self.far = near, far
        self.kernel = f"numba layers, load {variant}"
        self._code, self.steps = code, 0
        self._count = shape.planes * pool.pages  # fragments of a layer
        planes = np.arange(shape.planes, dtype=np.int64)
        layers = np.arange(shape.layers, dtype=np.int64)
        first = (planes[None, :] * shape.layers + layers[:, None]) * pool.pages
        self._index = np.ascontiguousarray((first[:, :, None] + order).reshape(-1))
        self._variant = parse(variant)
        self._arrays()
        self._wanted = self._sums()
        rows = self._rows(far)
        self._edges = tuple(~rows[self._index, part] for part in (slice(0, EDGE), slice(-EDGE, None)))
        self._near_rows = self._rows(near)
        self._near_rows[:] = 0xA5

    def _check(self, far: int, near: int, order: Words, chunk: int) -> None:
        pool = self.pool
        if pool.layout != "layer_first":
            raise UsageError("the far pool", where="overlap", got=pool.layout, expected="layer_first")
        if len(self.team) != 2:
            raise UsageError("the team", where="overlap", got=f"{len(self.team)} threads", expected="2")
        if self.fragment % 64 or self.layer_bytes % chunk:
            raise UsageError(
                "the page", where="overlap", got=f"fragments of {self.fragment} B in layers of {self.layer_bytes} B",
                expected=f"whole 64-byte lines and layers of whole {chunk} B",
            )  # fmt: skip
        fine = order.dtype == np.int64 and order.shape == (pool.pages,)
        if not fine or not np.array_equal(np.sort(order), np.arange(pool.pages)):
            raise UsageError(
                "the order is no permutation", where="overlap", got=f"{order.dtype} {order.shape}",
                expected=f"each page 0 to {pool.pages - 1} once, int64",
            )  # fmt: skip
        if far % 8 or near % 64 or (near < far + pool.nbytes and far < near + pool.nbytes):
            raise UsageError(
                "buffers", where="overlap", got=f"far {far:#x}, near {near:#x}", expected="aligned to 8 and 64, apart"
            )

    def _arrays(self) -> None:
        """Make what both threads share, flags and plan on cache lines of their own."""
        layers, line = self.layers, self._code.LINE // 8
        lines = 2 * layers + layers * self._code.RESULT_LINES + self._code.SPEC_LINES
        words = (lines + -(-self._code.PLAN_WORDS // line)) * line
        memory = np.zeros(words + line, np.int64)
        memory = memory[-memory.ctypes.data % self._code.LINE // 8 :][:words]
        ends = np.cumsum([2 * layers * line, layers * self._code.RESULT_LINES * line, self._code.SPEC_LINES * line])
        flags, results, specs, self._plan = np.split(memory, ends)
        self._flags = flags.reshape(2 * layers, line)
        self._results = results.reshape(layers, self._code.RESULT_LINES, line)
        self._specs = specs.reshape(self._code.SPEC_LINES, line)
        self._number = 0

    def _rows(self, address: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        from kvbench.kernels.raw import bytes_at

        return bytes_at(address, self.pool.nbytes).reshape(-1, self.fragment)

    def _sums(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return the sum of the words of every layer, modulo 2^64."""
        words = self._rows(self.far).view(np.uint64)
        parts = self._index.reshape(self.layers, self._count)
        wanted = np.array([words[part].sum(dtype=np.uint64) for part in parts], np.uint64)
        if not wanted.all():
            raise VerifyError("a layer whose sum is zero: a read of it cannot be told from no read", where="overlap")
        return wanted

    def arithmetic(self, flops: float) -> float:
        """Let the computation on a layer take ``flops`` operations, in whole steps; return what they are in fact.

        Raises UsageError for a number that is negative or too large to be counted.
        """
        steps = round(flops / self._code.STEP_FLOPS)
        if not 0 <= steps <= self._code.MOST_STEPS:
            raise UsageError(
                "operations of a layer", where="overlap", got=flops,
                expected=f"0 to {self._code.MOST_STEPS * self._code.STEP_FLOPS}",
            )  # fmt: skip
        self.steps = steps
        return float(steps * self._code.STEP_FLOPS)

    # -- passes --------------------------------------------------------------------------------------------------

    def run(self, schedule: Schedule | None = None, recorder: Recorder | None = None) -> Pass:
        """Load and compute every layer by ``schedule`` (default: layer-wise), the target spoilt before.

        Raises VerifyError when a layer was read before it had arrived, or the arithmetic was not done.
        """
        chosen = Schedule.layerwise(self.layers) if schedule is None else schedule
        self.spoil()
        if recorder is not None:
            recorder.mark("spoilt")
        found = self._pass(chosen, (self.layers, 0, self.layers), (self.layers, 0, self.layers))
        if recorder is not None:
            recorder.mark("computed")
        self.check()
        return found

    def load_alone(self) -> Pass:
        """Load every layer while the other thread waits. Raises VerifyError when a fragment did not arrive."""
        self.spoil()
        found = self._pass(self._free(), (self.layers, 0, self.layers), (0, 0, 1))
        for part, edge in zip((slice(0, EDGE), slice(-EDGE, None)), self._edges, strict=True):
            if not np.array_equal(self._near_rows[:, part], ~edge):
                raise VerifyError("a fragment was not loaded", where=self.kernel)
        return found

    def compute_alone(self, computes: int | None = None) -> Pass:
        """Compute on the first ``computes`` layers (default all), which must be there, while nothing is loaded."""
        count = self.layers if computes is None else computes
        found = self._pass(self._free(), (0, 0, 1), (count, 0, self.layers))
        self._check_work(range(min(count, self.layers)))
        return found

    def beside(self, loads: int, computes: int) -> Pass:
        """Let both sides work at once without waiting for each other: the loader on the second half of the layers,
        over and over, the computation on the first. Each does its number of layers, and goes on until the other has.

        The target must be loaded. Raises UsageError below two layers or one of each.
        """
        half = self.layers // 2
        if half < 1 or loads < 1 or computes < 1:
            raise UsageError("nothing to do beside each other", where="overlap", got=(self.layers, loads, computes))
        found = self._pass(self._free(), (loads, half, self.layers - half), (computes, 0, half), MOST_BESIDE)
        self._check_work(range(min(len(found.compute), half)))
        return found

    def _free(self) -> Schedule:
        return Schedule((-1,) * self.layers, (-1,) * self.layers)

    def _pass(
        self, schedule: Schedule, load: tuple[int, int, int], compute: tuple[int, int, int], most: int = 0
    ) -> Pass:
        """Run ``(count, first, span)`` layers of each side; with ``most``, up to that many while the other is busy."""
        from kvbench.kernels import libc

        waits, holds = (np.array(side, np.int64) for side in (schedule.waits, schedule.holds))
        for name, side in (("waits", waits), ("holds", holds)):
            if side.shape != (self.layers,) or side.min() < -1 or side.max() >= self.layers:
                raise UsageError(f"schedule.{name}", where="overlap", got=side.tolist(), expected="a layer or -1 each")
        stamps = [np.zeros((max(1, side[0], most), 2), np.int64) for side in (load, compute)]
        self._number += 1
        self._results[:] = 0
        self._specs[:] = 0
        variant, address = self._variant, libc.address_of("memcpy")
        at = [int(array.ctypes.data) for array in (self._flags, waits, holds, *stamps, self._results, self._specs)]
        flags, wait_at, hold_at, load_at, compute_at, results, specs = at
        fields = (
            *load, *compute, self.layers, self._count, self.fragment, self.layer_bytes, self.near, self.far,
            int(self._index.ctypes.data), variant.kind, variant.locality, variant.distance, address, self._number,
            flags, wait_at, hold_at, load_at, compute_at, results, self.steps, specs, most, most,
        )  # fmt: skip
        self._plan[: len(fields)] = fields
        seconds = self.team.run(self._code.layers_kernel, int(self._plan.ctypes.data), 1.0)
        computed, loaded = (int(line[0]) for line in self._specs[2:])
        return Pass(seconds, stamps[0][:loaded], stamps[1][:computed])

    # -- proof ---------------------------------------------------------------------------------------------------

    def spoil(self) -> None:
        """Make both ends of every fragment in the target wrong, so that reading one too early changes a sum."""
        self._near_rows[:, :EDGE], self._near_rows[:, -EDGE:] = self._edges

    def poison(self) -> None:
        """Make the whole target wrong."""
        self._near_rows[:] = ~self._rows(self.far)[self._index]

    def check(self) -> None:
        """Raise VerifyError unless the last pass computed on every layer after it had arrived, and on its bytes."""
        early = np.flatnonzero(self._results[:, 0, 1] != self._number)
        if len(early):
            raise VerifyError(
                "a layer was read before it had arrived", where=f"overlap layer {early[0]}",
                got=f"its flag said pass {self._results[early[0], 0, 1]}", expected=f"pass {self._number}",
            )  # fmt: skip
        self._check_work(range(self.layers))

    def _check_work(self, layers: range) -> None:
        chains = self._results[:, 1:].view(np.float32)
        wanted = (np.arange(self._code.CHAINS, dtype=np.float32) + np.float32(self.steps))[:, None]
        for layer in layers:
            found = int(self._results[layer, 0, 0].view(np.uint64))
            if found != int(self._wanted[layer]):
                raise VerifyError(
                    "the computation read other bytes than the layer's", where=f"overlap layer {layer}",
                    got=f"sum {found:#x}", expected=f"{int(self._wanted[layer]):#x}",
                )  # fmt: skip
            if not bool((chains[layer] == wanted).all()):
                raise VerifyError(
                    "the arithmetic was not done", where=f"overlap layer {layer}", got=float(chains[layer, 0, 0]),
                    expected=f"{self.steps} steps",
                )  # fmt: skip

    def verify(self) -> None:
        """Poison the whole target, run once and compare it to the last byte. Raises VerifyError."""
        self.poison()
        self._pass(
            Schedule.layerwise(self.layers), (self.layers, 0, self.layers), (self.layers, 0, self.layers)
        )  # fmt: skip
        self.check()
        bad = np.flatnonzero((self._near_rows != self._rows(self.far)[self._index]).any(axis=1))
        if len(bad):
            raise VerifyError("a fragment was not loaded", where=self.kernel, got=f"fragment {bad[0]} of the order")
