"""Decode attention on cores over KV that lies far, in three ways that need the same bytes (DirectKV, OSDI 2026).

``in_place``: the kernel reads far memory itself (a file: through its mapping). ``stream``: readers bring pages into a
small ring and the kernel attends to each part as it comes, the parts merged at the end; the form of "in place" for a
file, as its near memory is the ring alone. ``swap``: layers are staged whole into two buffers, one filled while the
other is attended to. ``near``: all KV in near memory, nothing crosses. The work is split along the tokens, so that few
heads still fill the link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvbench.attention.cpu import DecodeAttention, Step
from kvbench.attention.oracles import tolerance
from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.raw import bytes_at
from kvbench.model.paged import attend, merge
from kvbench.systems.directkv.host_attention_far import Bytes, Far, FileFar, Flow, NearMemory, Pipe, Tally
from kvbench.systems.directkv.host_attention_plan import DecodePlan

if TYPE_CHECKING:
    from kvbench.kernels.gather import Gather
    from kvbench.kernels.team import Team

Method = Literal["in_place", "stream", "swap", "near"]
METHODS: tuple[Method, ...] = ("in_place", "stream", "swap", "near")
RING = 8  # parts of the ring of `stream`
CHECKS = 6  # query groups a verification recomputes in float64
LSE_OFF = 1e-5


class Decode(Protocol):
    """One way: ``run(reps)`` passes over all layers, ``verify`` recomputes some of it; bytes are those of a pass.

    ``near_traffic`` bytes of KV written to and read from near memory; ``buffer`` bytes of near memory held for KV.
    """

    kernel: str
    near_traffic: int
    buffer: int

    def run(self, reps: int = 1) -> float | None: ...
    def verify(self) -> None: ...
    def link(self) -> int | None: ...


class _Base:
    """What all ways share: queries, outputs, and the check against float64 over what far memory holds."""

    name: Method = "in_place"

    def __init__(self, plan: DecodePlan, far: Far, team: Team) -> None:
        self.plan, self.far, self.team = plan, far, team
        shape, batch = plan.shape, len(plan.lengths)
        rng = np.random.default_rng(plan.seed)
        self.attention = DecodeAttention(shape, team)
        self.kernel = f"{self.attention.kernel}, {self.name}"
        self.queries = [
            shape.array(rng.standard_normal((batch, shape.q_heads, shape.head_dim))) for _ in range(plan.layers)
        ]
        self.out: list[npt.NDArray[Any]] = []
        self.lse: list[npt.NDArray[Any]] = []
        self.near_traffic = self.buffer = 0
        self.tally: Tally = far.tally()

    def verify(self) -> None:
        """Recompute some query groups in float64 from far memory as it is. Raises VerifyError."""
        if not self.out:
            raise VerifyError("nothing was run", where=self.kernel)
        plan, batch = self.plan, len(self.plan.lengths)
        rng = np.random.default_rng(plan.seed)
        for check in range(CHECKS):
            layer, b = check % plan.layers, (check * max(1, batch // CHECKS) + check // batch) % batch
            self._check(layer, b, int(rng.integers(plan.shape.kv_heads)))

    def _check(self, layer: int, b: int, h: int) -> None:
        plan, shape = self.plan, self.plan.shape
        first = sum(plan.parts[:b])
        keys, values = [], []
        for place in plan.places(layer)[first : first + plan.parts[b]].tolist():
            raw = self.far.peek(layer * plan.layer_bytes + place * 2 * plan.half, 2 * plan.half)
            k, v = plan.views(raw)
            plain = shape.unpack(k[:, h : h + 1], v[:, h : h + 1])
            keys.append(shape.floats(plain[0]).reshape(-1, shape.head_dim))
            values.append(shape.floats(plain[1]).reshape(-1, shape.head_dim))
        n, heads = plan.lengths[b], slice(h * shape.group, (h + 1) * shape.group)
        q = shape.floats(self.queries[layer])[b, heads]
        k, v = (np.concatenate(side)[:n] for side in (keys, values))
        want, lse = attend(q, k, v, 1.0 / math.sqrt(shape.head_dim))
        got = self.out[layer][b, heads]
        error = float((np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max())
        off = float(np.abs(self.lse[layer][b, heads] - lse).max())
        most = tolerance(shape.dtype, float(np.abs(lse).max()), shape.head_dim)
        if not error <= most or not off <= LSE_OFF:
            raise VerifyError(
                "attention is wrong", where=f"{self.kernel}, layer {layer}, sequence {b}, KV head {h}",
                got=f"error {error:.2g}, log-sum-exp off by {off:.2g}", expected=f"at most {most:.2g} and {LSE_OFF:g}",
            )  # fmt: skip

    def _layer_step(self, layer: int, region: Bytes, out: Any = None, lse: Any = None) -> Step:
        k, v = self.plan.views(region)
        lengths = np.array(self.plan.lengths, np.int32)
        return self.attention.prepare(
            self.queries[layer], k, v, self.plan.table(layer), lengths, out=out, lse=lse
        )  # fmt: skip


class WholeDecode(_Base):
    """``in_place`` and ``near``: one step a layer over memory the kernel can address."""

    def __init__(self, plan: DecodePlan, far: Far, team: Team, near: NearMemory | None = None) -> None:
        self.name = "in_place" if near is None else "near"
        super().__init__(plan, far, team)
        self._crosses = near is None
        if near is None:
            self.address = far.address()
            region = bytes_at(self.address, plan.nbytes)
        else:
            region = near.take(plan.nbytes, "near KV")
            for layer in range(plan.layers):
                part = slice(layer * plan.layer_bytes, (layer + 1) * plan.layer_bytes)
                far.read(part.start, region[part])
            self.address = int(region.ctypes.data)
            self.near_traffic, self.buffer = plan.kv_bytes, plan.nbytes
        self._region = region
        self.tally = far.tally()  # after the file is mapped: its passes are cold from then on
        size = plan.layer_bytes
        self.steps = [self._layer_step(n, region[n * size : (n + 1) * size]) for n in range(plan.layers)]

    def run(self, reps: int = 1) -> float:
        """Do ``reps`` passes; return the seconds inside the steps."""
        self.out, self.lse = [s.out for s in self.steps], [s.lse for s in self.steps]
        seconds = 0.0
        for _ in range(reps):
            for step in self.steps:
                step.out.fill(np.nan)
                step.lse.fill(np.nan)
            if self._crosses:
                self.tally.begin()
            seconds += sum(step.run() for step in self.steps)
            if self._crosses:
                self.tally.end()
        return seconds

    def link(self) -> int | None:
        """Return the far bytes of a pass: what storage gave to a mapped file, else what the kernel reads; near: 0."""
        if not self._crosses:
            return 0
        return self.tally.link if isinstance(self.far, FileFar) else self.plan.kv_bytes

    @property
    def counted_by(self) -> str:
        """What the link bytes rest on."""
        return self.tally.source if isinstance(self.far, FileFar) else "the tokens the kernel is given"

    def cold(self, run: Callable[[int], float]) -> Callable[[int], float]:
        """Return ``run`` one pass at a time, each from a file that is not cached, where far memory is one."""
        if not self._crosses or not isinstance(self.far, FileFar):
            return run
        before = self.far.tally()

        def passes(reps: int) -> float:
            seconds = 0.0
            for _ in range(reps):
                before.begin()
                seconds += run(1)
            return seconds

        return passes

    def gathers(self) -> dict[str, Gather]:
        """Return the variants of the ceiling: a gather read of the same whole pages in the tables' order."""
        from kvbench.kernels.gather import Gather, variants

        plan, rows = self.plan, []
        for layer in range(plan.layers):
            table, base = plan.table(layer), layer * plan.layer_bytes // plan.shape.page_bytes
            for row, n in zip(table, plan.lengths, strict=True):
                k = row[: -(-n // plan.shape.page_tokens)].astype(np.int64) + base
                rows.append(np.stack([k, k + plan.part_pages], axis=1).reshape(-1))
        index = np.ascontiguousarray(np.concatenate(rows))
        fragment = plan.shape.page_bytes
        return {
            name: Gather(name, self.address, plan.nbytes, fragment, index, self.team)
            for name in variants("read", fragment)
        }


class _Piped(_Base):
    """``stream`` and ``swap``: readers fill near slots ahead of the steps."""

    pipe: Pipe
    _parts: list[tuple[int, int]]

    def parts(self) -> list[tuple[int, int]]:
        """Return (offset, bytes) of every part in the order the steps want them."""
        plan, size = self.plan, 2 * self.plan.half
        return [
            (layer * plan.layer_bytes + int(place) * size, size)
            for layer in range(plan.layers) for place in self._order(layer)
        ]  # fmt: skip

    def _order(self, layer: int) -> Sequence[int]:
        return [int(place) for place in self.plan.places(layer)]

    def run(self, reps: int = 1) -> None:
        """Do ``reps`` passes; the clock is the caller's, as readers and steps overlap."""
        for _ in range(reps):
            self.spoil()
            self.tally.begin()
            self.pipe.run(self._parts, self.consume)
            self.tally.end()

    def read(self, reps: int = 1) -> None:
        """Do ``reps`` passes of the same reads by the same threads with nothing attended to: this reader's ceiling."""

        def pass_by(flow: Flow) -> None:
            for _ in self._parts:
                flow.take()
                flow.give()

        for _ in range(reps):
            self.pipe.run(self._parts, pass_by)

    def link(self) -> int | None:
        """Return the bytes a pass brought from far memory."""
        return self.tally.link

    @property
    def counted_by(self) -> str:
        """What the link bytes rest on."""
        return self.tally.source

    def spoil(self) -> None:
        """Make the outputs wrong."""
        raise AssertionError("a way of its own")

    def consume(self, flow: Flow) -> None:
        """Attend to the parts as they come."""
        raise AssertionError("a way of its own")


class StreamDecode(_Piped):
    """``stream``: a ring of parts, each attended to alone; parts of a sequence are merged when its layer is done."""

    name = "stream"

    def __init__(
        self, plan: DecodePlan, far: Far, team: Team, near: NearMemory, enter: Any, cpus: Sequence[int]
    ) -> None:
        super().__init__(plan, far, team)
        size, ring = 2 * plan.half, max(RING, 2 * far.readers)
        memory = near.take(ring * size, "the ring of stream")
        self.buffer, self.near_traffic = memory.size, 2 * plan.nbytes
        slots = [memory[i * size : (i + 1) * size] for i in range(ring)]
        self.pipe = enter(Pipe(far, slots, far.readers, cpus))
        self._parts = self.parts()
        shape = plan.shape
        most, heads = max(plan.parts), (len(plan.lengths), shape.q_heads)
        self._outs = [np.zeros((most, *heads, shape.head_dim), np.float32) for _ in range(plan.layers)]
        self._logs = [np.full((most, *heads), -np.inf, np.float32) for _ in range(plan.layers)]
        caches = [plan.views(slot) for slot in slots]
        table = np.arange(plan.part_pages, dtype=np.int32)[None]
        self.steps: list[Step] = []
        for layer in range(plan.layers):
            for b, count in enumerate(plan.parts):
                for i in range(count):
                    tokens = min(plan.part_tokens, plan.lengths[b] - i * plan.part_tokens)
                    k, v = caches[len(self.steps) % ring]
                    own = slice(b, b + 1)
                    self.steps.append(self.attention.prepare(
                        self.queries[layer][own], k, v, table, np.array([tokens], np.int32),
                        out=self._outs[layer][i, own], lse=self._logs[layer][i, own],
                    ))  # fmt: skip

    def spoil(self) -> None:
        """Make the outputs wrong."""
        for step in self.steps:
            step.out.fill(np.nan)
            step.lse.fill(np.nan)
        self.out, self.lse = [], []

    def consume(self, flow: Flow) -> None:
        """Attend to each part, and merge a layer's parts."""
        steps, per_layer = iter(self.steps), sum(self.plan.parts)
        for layer in range(self.plan.layers):
            for _ in range(per_layer):
                flow.take()
                next(steps).run()
                flow.give()
            out, lse = merge(self._outs[layer], self._logs[layer])
            self.out.append(out)
            self.lse.append(lse)


class SwapDecode(_Piped):
    """``swap``: two buffers of a whole layer, one filled while the other is attended to."""

    name = "swap"

    def __init__(
        self, plan: DecodePlan, far: Far, team: Team, near: NearMemory, enter: Any, cpus: Sequence[int]
    ) -> None:
        super().__init__(plan, far, team)
        size = 2 * plan.half
        memory = near.take(2 * plan.layer_bytes, "the two layers of swap")
        self.buffer, self.near_traffic = memory.size, 2 * plan.nbytes
        slots = [memory[at : at + size] for at in range(0, memory.size, size)]
        readers = math.gcd(far.readers, len(slots))
        self.pipe = enter(Pipe(far, slots, readers, cpus, cached=False))
        self._parts = self.parts()
        halves = memory[: plan.layer_bytes], memory[plan.layer_bytes :]
        self.steps = [self._layer_step(layer, halves[layer % 2]) for layer in range(plan.layers)]

    def _order(self, layer: int) -> Sequence[int]:
        return range(sum(self.plan.parts))  # a layer lands as it lies, so the same table finds its pages

    def spoil(self) -> None:
        """Make the outputs wrong."""
        for step in self.steps:
            step.out.fill(np.nan)
            step.lse.fill(np.nan)
        self.out, self.lse = [s.out for s in self.steps], [s.lse for s in self.steps]

    def consume(self, flow: Flow) -> None:
        """Attend to each layer once all of it is there."""
        for step in self.steps:
            for _ in range(sum(self.plan.parts)):
                flow.take()
            step.run()
            for _ in range(sum(self.plan.parts)):
                flow.give()


def open_decode(
    method: str, plan: DecodePlan, far: Far, team: Team, near: NearMemory, enter: Any, cpus: Sequence[int] = ()
) -> WholeDecode | StreamDecode | SwapDecode:
    """Return decode by ``method`` over ``far``, which holds ``plan``; ``cpus`` are for its readers.

    Raises UsageError for another method or a near budget that is too small.
    """
    if method == "stream":
        return StreamDecode(plan, far, team, near, enter, cpus)
    if method == "swap":
        return SwapDecode(plan, far, team, near, enter, cpus)
    if method not in METHODS:
        raise UsageError("unknown method", where="decode.method", got=method, expected=", ".join(METHODS))
    return WholeDecode(plan, far, team, near if method == "near" else None)
