"""The plan of a prefill on cores over far KV: where tiles lie, what each order moves, and what it should take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvbench.errors import UsageError
from kvbench.systems.directkv.attention_traffic import (
    Attention,
    AttentionTraffic,
    kv_outer,
    q_outer,
    resident,
    staged,
)
from kvbench.systems.directkv.host_attention_far import UNIT, Bytes, Far

Order = Literal["q_outer", "kv_outer", "swap", "near"]
ORDERS: tuple[Order, ...] = ("q_outer", "kv_outer", "swap", "near")
ITEM = 4  # bytes of a float32
STAT_BYTES = 16  # of a row at an update: maximum and sum, read and written
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """``layers`` layers of ``shape`` (float32), KV stored as tiles: keys then values of ``block_kv`` tokens of a head.

    The last tile of a head is compact; every tile begins at a multiple of ``UNIT`` and is read in whole ``UNIT``.
    Raises UsageError for another element size or no layers.
    """

    shape: Attention
    layers: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape.item != ITEM or self.shape.o_item != ITEM or self.layers < 1:
            raise UsageError(
                "not a host prefill", where="prefill", got=f"items of {self.shape.item} B, {self.layers} layers",
                expected=f"{ITEM} B and 1 layer or more",
            )  # fmt: skip

    @property
    def heads(self) -> int:
        """KV heads of all sequences of a layer."""
        return self.shape.batch * self.shape.kv_heads

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest tile as stored."""
        return _stored(min(self.shape.block_kv, self.shape.keys) * self.shape.token_bytes)

    @property
    def layer_bytes(self) -> int:
        return int(self.heads * sum(size for _, size in self.tiles_of(0)))

    @property
    def nbytes(self) -> int:
        return self.layers * self.layer_bytes

    def tokens(self, tile: int) -> int:
        """Return the tokens of a tile of KV."""
        return min(self.shape.block_kv, self.shape.keys - tile * self.shape.block_kv)

    def tiles_of(self, head: int) -> list[tuple[int, int]]:
        """Return (offset in the layer, bytes) of the tiles of a head."""
        sizes = [_stored(self.tokens(j) * self.shape.token_bytes) for j in range(self.shape.kv_tiles)]
        first = head * sum(sizes)
        ends = np.cumsum([0, *sizes]).tolist()
        return [(first + at, size) for at, size in zip(ends, sizes, strict=False)]

    def views(self, memory: Bytes, tile: int) -> tuple[Floats, Floats]:
        """Return keys and values, float32 [tokens, head_dim] each, of a tile that lies in ``memory``."""
        count, dim = self.tokens(tile), self.shape.head_dim
        numbers = memory[: 2 * count * dim * ITEM].view(np.float32).reshape(2, count, dim)
        return numbers[0], numbers[1]

    def rows(self, tile: int) -> slice:
        """Return the queries of a tile of queries."""
        return slice(tile * self.shape.block_q, min(self.shape.queries, (tile + 1) * self.shape.block_q))

    def seen(self, tile: int) -> int:
        """Return how many tiles of KV a tile of queries meets: those that begin before its last query ends."""
        shape = self.shape
        if not shape.causal:
            return shape.kv_tiles
        last: int = shape.keys - shape.queries + self.rows(tile).stop
        return -(-last // shape.block_kv)

    def traffic(self, order: str) -> AttentionTraffic:
        """Return the bytes of a layer by the algebra; a tile passes through near memory, as it does here."""
        if order == "q_outer":
            return q_outer(self.shape, buffered=True)
        if order == "kv_outer":
            return kv_outer(self.shape, stat_bytes=STAT_BYTES, buffered=True)
        if order not in ORDERS:
            raise UsageError("unknown order", where="prefill.order", got=order, expected=", ".join(ORDERS))
        return staged(self.shape) if order == "swap" else resident(self.shape)

    def link_stored(self, order: str) -> int:
        """Return the link bytes of a layer with the padding of compact tiles to whole ``UNIT``."""
        if order == "near":
            return 0
        if order != "q_outer":
            return self.layer_bytes
        sizes = [size for _, size in self.tiles_of(0)]
        met = sum(sum(sizes[: self.seen(i)]) for i in range(self.shape.q_tiles))
        return int(self.heads * self.shape.group * met)

    @property
    def flops(self) -> int:
        """Operations of the products of a layer, over whole tiles met."""
        shape = self.shape
        met: int = sum(
            (rows.stop - rows.start) * min(shape.keys, self.seen(i) * shape.block_kv)
            for i in range(shape.q_tiles) for rows in (self.rows(i),)
        )  # fmt: skip
        return 4 * shape.batch * shape.q_heads * shape.head_dim * met


def _stored(nbytes: int) -> int:
    return -(-nbytes // UNIT) * UNIT


def fill_far(plan: PrefillPlan, far: Far) -> None:
    """Write normal keys and uniform values of every tile, the padding zero."""
    rng = np.random.default_rng(plan.seed)
    raw = np.zeros(plan.slot_bytes + UNIT, np.uint8)
    buffer = raw[-raw.ctypes.data % UNIT :][: plan.slot_bytes]
    for layer in range(plan.layers):
        for head in range(plan.heads):
            for tile, (offset, size) in enumerate(plan.tiles_of(head)):
                buffer[:] = 0
                k, v = plan.views(buffer, tile)
                rng.standard_normal(out=k, dtype=np.float32)
                rng.random(out=v, dtype=np.float32)
                far.write(layer * plan.layer_bytes + offset, buffer[:size])


def check_tile(plan: PrefillPlan, ring: int, budget: int) -> None:
    """Raise UsageError where ``ring`` tiles of KV beside the outputs do not fit ``budget`` bytes, saying what would."""
    shape = plan.shape
    rows = shape.batch * shape.q_heads * shape.queries
    others = plan.layers * rows * shape.head_dim * ITEM + 2 * rows * ITEM
    need = ring * plan.slot_bytes
    if need + others <= budget:
        return
    room = max(0, budget - others) // ring // UNIT * UNIT // shape.token_bytes
    raise UsageError(
        "tiles of KV larger than the near budget", where="prefill.block_kv",
        got=f"{shape.block_kv} tokens: {ring} tiles of {plan.slot_bytes} B",
        expected=f"at most {max(0, budget - others)} B",
        mend=f"block_kv of at most {room} fits" if room else "a larger budget or fewer queries: outputs alone fill it",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rates:
    """What predictions rest on, measured in the same run: seconds of a layer's attention with tiles hot in the caches
    (``core_seconds``) and with all KV near, and bytes a second of each order's reader."""

    core_seconds: float
    near_seconds: float
    readers: dict[str, float]


def touched(plan: PrefillPlan, order: str) -> int:
    """Return the near bytes of a layer that no cache need hold: KV again for each tile of queries, or the running
    output, its statistics and Q again for each tile of KV."""
    own = plan.traffic(order)
    if order == "kv_outer":
        return own.kv_write + own.q_read + own.o_read + own.o_write + own.stats
    return own.kv_read


def predicted(plan: PrefillPlan, order: str, rates: Rates) -> float:
    """Return the seconds of a pass over all layers: reads of a tile, or of a layer, hidden behind the attention.

    The attention is that of hot tiles plus the bytes :func:`touched` says, at the rate by which near KV is slower than
    hot tiles. ``swap`` pays for the reads of the first layer, which nothing hides.
    """
    slower = max(0.0, rates.near_seconds - rates.core_seconds) / touched(plan, "near")
    compute = rates.core_seconds + touched(plan, order) * slower
    if order == "near":
        return plan.layers * compute
    link = plan.link_stored(order) / rates.readers[order]
    if order == "swap":
        return link + (plan.layers - 1) * max(link, compute) + compute
    return plan.layers * max(link, compute)
