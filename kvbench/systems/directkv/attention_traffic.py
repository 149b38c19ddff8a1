"""Bytes of attention over KV that lies far: prefill in both orders, and decode.

DirectKV, OSDI 2026, algorithms 2 and 3. Q outer (the usual kernel) reads the KV again for each tile of queries and each
query head; KV outer ("CPU-aware") reads it once and keeps the running output and its statistics in near memory. Whole
numbers throughout; sums over ragged and causal tiles are closed forms.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import UsageError
from kvbench.systems.directkv.shapes import ceil_div


@dataclass(frozen=True, slots=True)
class Attention:
    """``batch`` sequences of ``queries`` new tokens against ``keys`` tokens of KV; the queries are the last of them.

    ``block_q`` x ``block_kv`` tiles; ``item`` bytes an element of Q, K and V, ``o_item`` one of the running output.
    ``causal``: a tile of KV that begins after the last query of a tile is left out, others are read whole.
    Raises UsageError for sizes below 1, heads that do not divide, or causal queries that outnumber the keys.
    """

    batch: int
    queries: int
    keys: int
    q_heads: int
    kv_heads: int
    head_dim: int
    block_q: int
    block_kv: int
    item: int = 2
    o_item: int = 4
    causal: bool = False

    def __post_init__(self) -> None:
        for name in (
            "batch", "queries", "keys", "q_heads", "kv_heads", "head_dim", "block_q", "block_kv", "item", "o_item"
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError("attention over nothing", where=f"attention {name}", got=value, expected="1 or more")
        if self.q_heads % self.kv_heads:
            raise UsageError(
                "query heads do not divide among the KV heads", where="attention",
                got=f"{self.q_heads} and {self.kv_heads}", expected="a multiple",
            )  # fmt: skip
        if self.causal and self.queries > self.keys:
            raise UsageError(
                "more causal queries than keys", where="attention", got=f"{self.queries} and {self.keys}",
                expected="the queries are the last of the keys",
            )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def q_tiles(self) -> int:
        return ceil_div(self.queries, self.block_q)

    @property
    def kv_tiles(self) -> int:
        return ceil_div(self.keys, self.block_kv)

    @property
    def token_bytes(self) -> int:
        """K and V of one token of one KV head."""
        return 2 * self.head_dim * self.item

    @property
    def kv_bytes(self) -> int:
        """K and V once: the unique far bytes."""
        return self.batch * self.kv_heads * self.keys * self.token_bytes

    @property
    def q_bytes(self) -> int:
        return self.batch * self.q_heads * self.queries * self.head_dim * self.item

    @property
    def o_bytes(self) -> int:
        return self.batch * self.q_heads * self.queries * self.head_dim * self.o_item


@dataclass(frozen=True, slots=True)
class AttentionTraffic:
    """Bytes of one layer. ``unique`` KV needed once, ``demand`` asked for from far, ``link`` that cross without a
    cache; near memory: Q read, KV written and read where a copy is kept, running output and statistics.
    """

    unique: int
    demand: int
    link: int
    q_read: int
    kv_write: int
    kv_read: int
    o_read: int
    o_write: int
    stats: int

    @property
    def near(self) -> int:
        """All bytes touched in near memory."""
        return self.q_read + self.kv_write + self.kv_read + self.o_read + self.o_write + self.stats

    @property
    def amplification(self) -> float:
        """Link bytes over unique bytes."""
        return self.link / self.unique


def floor_sum(count: int, divisor: int, slope: int, start: int) -> int:
    """Return the sum of floor((slope x i + start) / divisor) for i below ``count``; nothing negative.

    By Euclid's descent on slope and divisor (Concrete Mathematics, 3.5): a few steps however large the numbers.
    """
    total = 0
    while count > 0:
        total += (count - 1) * count // 2 * (slope // divisor) + count * (start // divisor)
        slope, start = slope % divisor, start % divisor
        top = slope * count + start
        if top < divisor:
            break
        count, start = divmod(top, divisor)
        divisor, slope = slope, divisor
    return total


def tokens_read(shape: Attention) -> int:
    """Return the KV tokens read by all tiles of queries of one head: whole tiles, the last one ragged."""
    tiles = shape.q_tiles
    if not shape.causal:
        return tiles * shape.keys
    # Tile i ends at before + (i + 1) block_q, the last one at keys; it reads every KV tile that begins below its end.
    before, whole = shape.keys - shape.queries, (shape.kv_tiles - 1) * shape.block_kv
    # How many of the tiles before the last one end within whole KV tiles; the others reach the ragged one.
    inside = max(0, min(tiles - 1, (whole - before) // shape.block_q))
    counted = floor_sum(inside, shape.block_kv, shape.block_q, before + shape.block_q + shape.block_kv - 1)
    return counted * shape.block_kv + (tiles - inside) * shape.keys


def rows_updated(shape: Attention) -> int:
    """Return the query rows that meet a KV tile, over all tiles of one head: the updates of the running output."""
    if not shape.causal:
        return shape.queries * shape.kv_tiles
    tiles, before = shape.q_tiles, shape.keys - shape.queries
    full = floor_sum(tiles - 1, shape.block_kv, shape.block_q, before + shape.block_q + shape.block_kv - 1)
    last = shape.queries - (tiles - 1) * shape.block_q
    return full * shape.block_q + last * shape.kv_tiles


def q_outer(shape: Attention, *, packed: bool = False, buffered: bool = False) -> AttentionTraffic:
    """Return the bytes of the usual order, KV read in place; the output stays on chip until it is done.

    ``packed``: the query heads of one KV head share a tile of KV (then the amplification has no such factor).
    ``buffered``: a tile of KV passes through near memory (host forms).
    """
    heads = shape.kv_heads if packed else shape.q_heads
    demand = shape.batch * heads * tokens_read(shape) * shape.token_bytes
    return AttentionTraffic(
        unique=shape.kv_bytes, demand=demand, link=demand, q_read=shape.q_bytes,
        kv_write=demand if buffered else 0, kv_read=demand if buffered else 0, o_read=0, o_write=shape.o_bytes, stats=0,
    )  # fmt: skip


def kv_outer(
    shape: Attention, *, stat_bytes: int = 8, initialised: bool = True, buffered: bool = False
) -> AttentionTraffic:
    """Return the bytes of the CPU-aware order: KV crosses once; Q, output and statistics are read at every KV tile.

    ``stat_bytes`` of a row at every update, read and written together: 8 is one fp32 log-sum-exp (the artifact), 16 a
    maximum and a sum. ``initialised``: the first update reads the zeros the output starts with (algorithm 2); otherwise
    it reads neither them nor the statistics.
    """
    rows = shape.batch * shape.q_heads * rows_updated(shape)
    first = 0 if initialised else shape.batch * shape.q_heads * shape.queries
    return AttentionTraffic(
        unique=shape.kv_bytes, demand=shape.kv_bytes, link=shape.kv_bytes,
        q_read=rows * shape.head_dim * shape.item, kv_write=shape.kv_bytes if buffered else 0,
        kv_read=shape.batch * shape.q_heads * tokens_met(shape) * shape.token_bytes if buffered else 0,
        o_read=(rows - first) * shape.head_dim * shape.o_item, o_write=rows * shape.head_dim * shape.o_item,
        stats=rows * stat_bytes - first * (stat_bytes // 2),
    )  # fmt: skip


def tokens_met(shape: Attention) -> int:
    """Return the KV tokens read from a near buffer by the tiles of queries of one head; the same pairs in any order."""
    return tokens_read(shape)


def staged(shape: Attention, *, packed: bool = False) -> AttentionTraffic:
    """Return the bytes of a layer-staged swap: KV copied into a near buffer once, then the usual order from there."""
    inner = q_outer(shape, packed=packed)
    return AttentionTraffic(
        unique=shape.kv_bytes, demand=shape.kv_bytes, link=shape.kv_bytes, q_read=shape.q_bytes,
        kv_write=shape.kv_bytes, kv_read=inner.demand, o_read=0, o_write=shape.o_bytes, stats=0,
    )  # fmt: skip


def resident(shape: Attention, *, packed: bool = False) -> AttentionTraffic:
    """Return the bytes with KV in near memory: nothing crosses."""
    inner = q_outer(shape, packed=packed)
    return AttentionTraffic(
        unique=shape.kv_bytes, demand=0, link=0, q_read=shape.q_bytes, kv_write=0, kv_read=inner.demand, o_read=0,
        o_write=shape.o_bytes, stats=0,
    )  # fmt: skip


def decode(shape: Attention, *, packed: bool = True) -> AttentionTraffic:
    """Return the bytes of one new token a sequence, KV streamed once in place: as much as a swap moves over the link.

    The gain over :func:`staged` is only the near buffer, its write and its read. Raises UsageError unless one query.
    """
    if shape.queries != 1:
        raise UsageError("decode has one query a sequence", where="attention queries", got=shape.queries, expected="1")
    return q_outer(shape, packed=packed)
