"""Prefill attention on cores over KV that lies far, in both loop orders, against a swap and against near KV.

DirectKV, OSDI 2026, algorithms 2 and 3. ``q_outer``: a tile of queries streams all KV, again for each tile and each
query head. ``kv_outer`` (CPU-aware): a tile of KV is read once and meets every tile of queries, whose running output,
maximum and sum live in near memory. ``swap``: a layer is staged whole, the next one while this one is worked on, and
attended to by ``q_outer`` from near memory. ``near``: the same with all KV near. Products by BLAS, softmax by numpy, in
float32; one thread computes, the readers of a :class:`Pipe` are further ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.model.paged import attend
from kvbench.systems.directkv.host_attention_far import Bytes, Far, Flow, NearMemory, Pipe
from kvbench.systems.directkv.prefill_plan import ITEM, STAT_BYTES, Floats, PrefillPlan, check_tile

RING = 8  # tiles of KV under way
CHECKS, CHECK_ROWS = 4, 8  # query heads, and rows of each, a verification recomputes in float64
ERROR = 4e-6  # of a row, norm against float64: products and sums are float32


@dataclass(slots=True)
class Counted:
    """Near bytes touched by the passes so far, as the algebra names them."""

    q_read: int = 0
    kv_write: int = 0
    kv_read: int = 0
    o_read: int = 0
    o_write: int = 0
    stats: int = 0

    @property
    def near(self) -> int:
        return self.q_read + self.kv_write + self.kv_read + self.o_read + self.o_write + self.stats


class Prefill:
    """``order`` over ``far``, which holds ``plan``. ``out`` float32 [layers, batch, q_heads, queries, head_dim].

    ``run(reps)`` does passes over all layers, without a clock; ``counted`` is what the latest pass touched near,
    ``tally`` what crossed, ``buffer`` the near bytes it holds beside queries and outputs, and ``resident`` those by
    the kernel's page tables (None: it does not tell). Raises UsageError for another order and for tiles that the
    near budget does not hold (how much they need, and what fits).
    """

    def __init__(
        self, order: str, plan: PrefillPlan, far: Far, near: NearMemory, enter: Any, cpus: Sequence[int] = ()
    ) -> None:
        plan.traffic(order)
        self.order, self.plan, self.far = order, plan, far
        shape, held = plan.shape, near.held
        self.kernel = f"BLAS tiles {shape.block_q} x {shape.block_kv}, {order}"
        readers = far.readers
        ring = -(-RING // readers) * readers
        if near.budget is not None and order in ("q_outer", "kv_outer"):
            check_tile(plan, ring, near.budget - near.held)
        rng = np.random.default_rng((plan.seed, 7))
        self.q = rng.standard_normal(
            (plan.layers, shape.batch, shape.q_heads, shape.queries, shape.head_dim), np.float32
        ) * np.float32(1.0 / math.sqrt(shape.head_dim))
        self._whole: Bytes | None = None
        tiles = plan.layer_bytes // plan.heads
        if order == "near":
            self._whole = near.take(plan.nbytes, "near KV")
            for layer in range(plan.layers):
                at = slice(layer * plan.layer_bytes, (layer + 1) * plan.layer_bytes)
                far.read(at.start, self._whole[at])
            slots: list[Bytes] = []
        elif order == "swap":
            memory = near.take(2 * plan.layer_bytes, "the two layers of swap")
            self._halves = memory[: plan.layer_bytes], memory[plan.layer_bytes :]
            slots = [half[h * tiles + at : h * tiles + at + size] for half in self._halves
                     for h in range(plan.heads) for at, size in plan.tiles_of(0)]  # fmt: skip
        else:
            memory = near.take(ring * plan.slot_bytes, "the ring of KV tiles")
            slots = [memory[i * plan.slot_bytes : (i + 1) * plan.slot_bytes] for i in range(ring)]
        state = near.take(2 * self.q[0, ..., 0].nbytes, "maxima and sums").view(np.float32)
        self._top, self._total = state.reshape(2, *self.q.shape[1:4])
        self.buffer, self.resident = near.held - held, near.resident
        self.out = near.take(self.q.nbytes, "outputs").view(np.float32).reshape(self.q.shape)
        self.pipe: Pipe | None = None
        if slots:
            self.pipe = enter(Pipe(far, slots, math.gcd(readers, len(slots)), cpus, cached=order != "swap"))
        self.parts = list(self._parts())
        self.tally = far.tally()
        self.counted = Counted()
        self._scores = np.empty((shape.block_q, shape.block_kv), np.float32)
        self._added = np.empty((shape.block_q, shape.head_dim), np.float32)
        self._ran = False

    def _parts(self) -> Iterator[tuple[int, int]]:
        plan, shape = self.plan, self.plan.shape
        if self.order == "near":
            return
        for layer in range(plan.layers):
            base = layer * plan.layer_bytes
            for head in range(plan.heads):
                tiles = [(base + at, size) for at, size in plan.tiles_of(head)]
                if self.order == "q_outer":
                    for _ in range(shape.group):
                        for i in range(shape.q_tiles):
                            yield from tiles[: plan.seen(i)]
                else:
                    yield from tiles

    # -- passes --------------------------------------------------------------------------------------------------

    def run(self, reps: int = 1) -> None:
        """Do ``reps`` passes over all layers."""
        for _ in range(reps):
            self.out.fill(np.nan)
            self.counted = Counted()
            self.tally.begin()
            if self.pipe is None:
                self._from_near()
            else:
                self.pipe.run(self.parts, self._consume)
            self.tally.end()
            self._ran = True

    def read(self, reps: int = 1) -> None:
        """Do the reads of ``reps`` passes and nothing else: what this reader can deliver. UsageError for ``near``."""
        if self.pipe is None:
            raise UsageError("nothing is read", where=f"prefill {self.order}")

        def pass_by(flow: Flow) -> None:
            for _ in self.parts:
                flow.take()
                flow.give()

        for _ in range(reps):
            self.pipe.run(self.parts, pass_by)

    def link(self) -> int | None:
        """Return the bytes a pass brought from far memory; ``near``: none."""
        return 0 if self.pipe is None else self.tally.link

    def _consume(self, flow: Flow) -> None:
        plan = self.plan
        for layer in range(plan.layers):
            if self.order == "swap":
                for _ in range(plan.heads * plan.shape.kv_tiles):
                    flow.take()
                self.counted.kv_write += plan.shape.kv_bytes
                self._layer(layer, self._halves[layer % 2])
                for _ in range(plan.heads * plan.shape.kv_tiles):
                    flow.give()
                continue
            for b in range(plan.shape.batch):
                for h in range(plan.shape.kv_heads):
                    (self._q_outer if self.order == "q_outer" else self._kv_outer)(flow, layer, b, h)

    def core(self, reps: int = 1) -> None:
        """Do ``reps`` passes of ``near`` in which every tile of KV is the head's first: the arithmetic, tiles hot.

        What it leaves is no attention. Raises UsageError for another order.
        """
        if self._whole is None:
            raise UsageError("only with KV near", where=f"prefill {self.order}")
        self._ran, counted = False, self.counted
        self.counted = Counted()
        for _ in range(reps):
            self._from_near(hot=True)
        self.counted = counted

    def _from_near(self, hot: bool = False) -> None:
        assert self._whole is not None
        size = self.plan.layer_bytes
        for layer in range(self.plan.layers):
            self._layer(layer, self._whole[layer * size : (layer + 1) * size], hot)

    def _layer(self, layer: int, memory: Bytes, hot: bool = False) -> None:
        """Attend to a layer that lies in near memory, queries outside."""
        plan, shape = self.plan, self.plan.shape
        for head in range(plan.heads):
            b, h = divmod(head, shape.kv_heads)
            tiles = [plan.views(memory[at : at + size], j) for j, (at, size) in enumerate(plan.tiles_of(head))]
            if hot:
                tiles = [(tiles[0][0][: len(k)], tiles[0][1][: len(k)]) for k, _ in tiles]
            for g in range(h * shape.group, (h + 1) * shape.group):
                for i in range(shape.q_tiles):
                    rows = self._begin(layer, b, g, i)
                    for j in range(plan.seen(i)):
                        self._update(layer, b, g, i, j, *tiles[j])
                    self._finish(layer, b, g, rows)

    def _q_outer(self, flow: Flow, layer: int, b: int, h: int) -> None:
        plan, shape = self.plan, self.plan.shape
        for g in range(h * shape.group, (h + 1) * shape.group):
            for i in range(shape.q_tiles):
                rows = self._begin(layer, b, g, i)
                for j in range(plan.seen(i)):
                    self._update(layer, b, g, i, j, *plan.views(flow.slots[flow.take()], j))
                    self.counted.kv_write += plan.tokens(j) * shape.token_bytes
                    flow.give()
                self._finish(layer, b, g, rows)

    def _kv_outer(self, flow: Flow, layer: int, b: int, h: int) -> None:
        plan, shape, counted = self.plan, self.plan.shape, self.counted
        heads = range(h * shape.group, (h + 1) * shape.group)
        for g in heads:
            self._begin_all(layer, b, g)
        row = shape.head_dim * ITEM
        for j in range(shape.kv_tiles):
            k, v = plan.views(flow.slots[flow.take()], j)
            counted.kv_write += plan.tokens(j) * shape.token_bytes
            for g in heads:
                for i in range(shape.q_tiles):
                    if plan.seen(i) <= j:
                        continue
                    rows = plan.rows(i)
                    count = rows.stop - rows.start
                    self._update(layer, b, g, i, j, k, v)
                    counted.q_read += count * row
                    counted.o_read += count * row
                    counted.o_write += count * row
                    counted.stats += count * STAT_BYTES
            flow.give()
        for g in heads:
            self.out[layer, b, g] /= self._total[b, g, :, None]

    def _begin(self, layer: int, b: int, g: int, tile: int) -> slice:
        rows = self.plan.rows(tile)
        self.out[layer, b, g, rows] = 0.0
        self._top[b, g, rows], self._total[b, g, rows] = -np.inf, 0.0
        self.counted.q_read += (rows.stop - rows.start) * self.plan.shape.head_dim * ITEM
        return rows

    def _begin_all(self, layer: int, b: int, g: int) -> None:
        self.out[layer, b, g] = 0.0
        self._top[b, g], self._total[b, g] = -np.inf, 0.0

    def _finish(self, layer: int, b: int, g: int, rows: slice) -> None:
        self.out[layer, b, g, rows] /= self._total[b, g, rows, None]
        self.counted.o_write += (rows.stop - rows.start) * self.plan.shape.head_dim * ITEM

    def _update(self, layer: int, b: int, g: int, i: int, j: int, k: Floats, v: Floats) -> None:
        """Let one tile of queries meet one tile of KV (online softmax)."""
        plan, shape = self.plan, self.plan.shape
        rows = plan.rows(i)
        acc, top, total = self.out[layer, b, g, rows], self._top[b, g, rows], self._total[b, g, rows]
        scores, added = self._scores[: len(acc), : len(k)], self._added[: len(acc)]
        np.matmul(self.q[layer, b, g, rows], k.T, out=scores)
        if shape.causal:
            before = shape.keys - shape.queries
            last = before + rows.start - j * shape.block_kv  # the last key of the tile its first query sees
            if last + 1 < len(k):
                scores[np.arange(len(k)) > last + np.arange(len(acc))[:, None]] = -np.inf
        above = np.maximum(top, scores.max(axis=1))
        scores -= above[:, None]
        np.exp(scores, out=scores)
        shrink = np.exp(top - above)
        total *= shrink
        total += scores.sum(axis=1)
        acc *= shrink[:, None]
        np.matmul(scores, v, out=added)
        acc += added
        top[:] = above
        self.counted.kv_read += len(k) * shape.token_bytes

    # -- proof ---------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Recompute rows of some query heads in float64 from far memory as it is. Raises VerifyError."""
        if not self._ran or not bool(np.isfinite(self.out).all()):
            raise VerifyError("an output was not written or is not finite", where=self.kernel)
        plan, shape = self.plan, self.plan.shape
        rng = np.random.default_rng(plan.seed + 1)
        for check in range(CHECKS):
            layer, b = check % plan.layers, check % shape.batch
            g = int(rng.integers(shape.q_heads))
            rows = np.unique([0, shape.queries - 1, *rng.integers(0, shape.queries, CHECK_ROWS)])
            k, v = self._kv(layer, b * shape.kv_heads + g // shape.group)
            for row in rows.tolist():
                n = shape.keys - shape.queries + row + 1 if shape.causal else shape.keys
                want, _ = attend(self.q[layer, b, g, row : row + 1], k[:n], v[:n], 1.0)
                error = float(np.linalg.norm(self.out[layer, b, g, row] - want[0]) / np.linalg.norm(want[0]))
                if not error <= ERROR:
                    raise VerifyError(
                        "attention is wrong", where=f"{self.kernel}, layer {layer}, head {g}, query {row}",
                        got=f"error {error:.2g}", expected=f"at most {ERROR:g}",
                    )  # fmt: skip

    def _kv(self, layer: int, head: int) -> tuple[Floats, Floats]:
        plan = self.plan
        tiles = [plan.views(self.far.peek(layer * plan.layer_bytes + at, size), j)
                 for j, (at, size) in enumerate(plan.tiles_of(head))]  # fmt: skip
        return np.concatenate([k for k, _ in tiles]), np.concatenate([v for _, v in tiles])
