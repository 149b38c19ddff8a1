"""K projection and Q K^T in one pass, against two with the keys' round trip to far memory between them, on cores.

DirectKV, OSDI 2026, section 4.3 and figure 7: K = X W is consumed where it is made and stored to far memory once.
``fused``: a tile of tokens is projected, met by all queries while it is hot, and handed to a storer thread.
``separate``: project all, store all, read all back, score all, as separate kernels do. Float32; products by BLAS on one
thread, storers and readers are further ones.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvbench.errors import UsageError, VerifyError
from kvbench.memory.host import preflight
from kvbench.systems.directkv.host_attention_far import UNIT, Bytes, Far, Flow, NearMemory, Pipe

Method = Literal["fused", "separate"]
METHODS: tuple[Method, ...] = ("fused", "separate")
ITEM = 4
SLOTS = 4  # tiles of keys the storer may be behind
CHECK_ROWS = 16
ERROR = 2e-6  # x sqrt(terms): of a product of float32, norm against float64
STAGES = ("projected", "stored", "read", "scored")
Floats = npt.NDArray[np.float32]


class Recorder(Protocol):
    """What a suite hands in to time stages."""

    def mark(self, name: str) -> None:
        """Note that the stage ``name`` ended now."""
        ...


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """``tokens`` new tokens of ``width`` values each become keys of ``kv_heads`` heads of ``head_dim``; as many
    queries of ``kv_heads`` x ``group`` heads meet them. ``block`` tokens a tile.

    A tile is stored as [tokens, kv_heads x head_dim], the last one compact, padded to ``UNIT``. Raises UsageError for
    sizes below 1.
    """

    tokens: int
    width: int
    kv_heads: int
    group: int
    head_dim: int = 128
    block: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "width", "kv_heads", "group", "head_dim", "block"):
            if getattr(self, name) < 1:
                raise UsageError("a projection of nothing", where=f"fused.{name}", got=getattr(self, name),
                                 expected="1 or more")  # fmt: skip

    @property
    def columns(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def tiles(self) -> int:
        return -(-self.tokens // self.block)

    def rows(self, tile: int) -> slice:
        """Return the tokens of a tile."""
        return slice(tile * self.block, min(self.tokens, (tile + 1) * self.block))

    @property
    def slot_bytes(self) -> int:
        return _stored(min(self.block, self.tokens) * self.columns * ITEM)

    def parts(self) -> list[tuple[int, int]]:
        """Return (offset, bytes) of every tile as stored."""
        sizes = [_stored((r.stop - r.start) * self.columns * ITEM) for r in map(self.rows, range(self.tiles))]
        return [(i * self.slot_bytes, size) for i, size in enumerate(sizes)]

    @property
    def nbytes(self) -> int:
        return self.tiles * self.slot_bytes

    @property
    def k_bytes(self) -> int:
        """Keys once: the unique far bytes."""
        return self.tokens * self.columns * ITEM

    def link_bytes(self, method: str) -> int:
        """Return what crosses with padding: the keys once, or out and back."""
        if method not in METHODS:
            raise UsageError("unknown method", where="fused.method", got=method, expected=", ".join(METHODS))
        return (1 if method == "fused" else 2) * sum(size for _, size in self.parts())

    @property
    def flops(self) -> int:
        return 2 * self.tokens * self.columns * (self.width + self.group * self.tokens)

    def keys(self, memory: Bytes, tile: int) -> Floats:
        """Return the keys of a tile, float32 [tokens, kv_heads x head_dim], that lie in ``memory``."""
        rows = self.rows(tile)
        count = (rows.stop - rows.start) * self.columns
        return memory[: count * ITEM].view(np.float32).reshape(-1, self.columns)


def _stored(nbytes: int) -> int:
    return -(-nbytes // UNIT) * UNIT


class Storer:
    """Threads that write tiles to far memory behind the one that makes them; ``tids`` are theirs.

    ``slot()`` waits for a free slot, ``store(slot, offset, nbytes)`` hands it over, ``drain()`` waits until all is
    written. Each raises what a write raised.
    """

    def __init__(self, far: Far, slots: Sequence[Bytes], threads: int) -> None:
        self.far, self.slots = far, list(slots)
        self._work: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._failed: BaseException | None = None  # its slot never comes back, so nobody may wait for it
        for slot in range(len(self.slots)):
            self._free.put(slot)
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()
        self.tids = [thread.native_id or 0 for thread in self._threads]

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            slot, offset, nbytes = work
            try:
                self.far.write(offset, self.slots[slot][:nbytes])
                self._free.put(slot)
            except BaseException as error:  # handed to the thread that made the tile
                self._free.put(error)

    def slot(self) -> int:
        """Return a slot that may be written to."""
        if self._failed is not None:
            raise self._failed
        found = self._free.get()
        if isinstance(found, BaseException):
            self._failed = found
            raise found
        return found

    def store(self, slot: int, offset: int, nbytes: int) -> None:
        """Write ``nbytes`` of ``slot`` to ``offset``, later."""
        self._work.put((slot, offset, nbytes))

    def drain(self) -> None:
        """Wait until every slot is free again."""
        for slot in [self.slot() for _ in self.slots]:
            self._free.put(slot)

    def close(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Storer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Fused:
    """``method`` over ``far``. ``scores`` float32 [kv_heads x group, tokens, tokens]; query head i meets KV head
    i // group. ``buffer``: near bytes of keys it holds, ``resident``
    those by the kernel's page tables, ``tally`` what crossed. Raises UsageError for another method."""

    def __init__(
        self, method: str, plan: FusedPlan, far: Far, near: NearMemory, enter: Any, cpus: Sequence[int] = ()
    ) -> None:
        plan.link_bytes(method)
        self.method, self.plan, self.far = method, plan, far
        self.kernel = f"BLAS panels of {plan.block} tokens, {method}"
        heads = plan.kv_heads * plan.group
        preflight(ITEM * heads * plan.tokens * (plan.tokens + plan.head_dim) + 2 * ITEM * plan.width * plan.columns)
        rng = np.random.default_rng(plan.seed)
        self.x = rng.standard_normal((plan.tokens, plan.width), np.float32)
        self.w = rng.standard_normal((plan.width, plan.columns), np.float32) / np.float32(plan.width**0.5)
        self.q = rng.standard_normal((heads, plan.tokens, plan.head_dim), np.float32)
        held = near.held
        count = plan.tiles if method == "separate" else min(SLOTS, plan.tiles)
        memory = near.take(count * plan.slot_bytes, "tiles of keys")
        self.buffer, self.resident = near.held - held, near.resident
        memory.fill(0)
        self._slots = [memory[i * plan.slot_bytes : (i + 1) * plan.slot_bytes] for i in range(count)]
        self._storer: Storer = enter(Storer(far, self._slots, far.readers))
        self._pipe: Pipe | None = None
        if method == "separate":
            readers = next(n for n in range(min(far.readers, count), 0, -1) if count % n == 0)
            self._pipe = enter(Pipe(far, self._slots, readers, cpus))
        self.tids = [*self._storer.tids, *(self._pipe.tids if self._pipe is not None else [])]
        self.scores = np.full((heads, plan.tokens, plan.tokens), np.nan, np.float32)
        self.tally = far.tally()
        self._spoil = False

    def run(self, reps: int = 1, recorder: Recorder | None = None) -> None:
        """Do ``reps`` passes; ``recorder`` hears the end of each stage of ``separate``, and of ``fused`` the last."""
        for _ in range(reps):
            self.tally.begin()
            if self.method == "fused":
                self._fused(recorder)
            else:
                self._separate(recorder)
            self.tally.end()

    def link(self) -> int | None:
        """Return the bytes a pass stored and read back, as its calls did: the kernel's counter sees reads alone."""
        return self.tally.reads

    def _project(self, tile: int, slot: int) -> Floats:
        keys = self.plan.keys(self._slots[slot], tile)
        np.matmul(self.x[self.plan.rows(tile)], self.w, out=keys)
        return keys

    def _score(self, tile: int, keys: Floats) -> None:
        plan, rows = self.plan, self.plan.rows(tile)
        for h in range(plan.kv_heads):
            own = keys[:, h * plan.head_dim : (h + 1) * plan.head_dim].T
            for g in range(h * plan.group, (h + 1) * plan.group):
                np.matmul(self.q[g], own, out=self.scores[g, :, rows])

    def _fused(self, recorder: Recorder | None) -> None:
        for tile, (offset, size) in enumerate(self.plan.parts()):
            slot = self._storer.slot()
            keys = self._project(tile, slot)
            # Stored while it is scored: both only read it, and only this thread asks for the slot again.
            self._storer.store(slot, offset, size)
            self._score(tile, keys)
        self._storer.drain()
        if recorder is not None:
            recorder.mark("scored")

    def _separate(self, recorder: Recorder | None) -> None:
        assert self._pipe is not None
        mark = recorder.mark if recorder is not None else _nobody
        parts = self.plan.parts()
        for tile in range(self.plan.tiles):
            self._project(tile, tile)
        mark("projected")
        for _ in parts:
            self._storer.slot()  # all of them, in any order: what is stored is named, not asked for
        for tile, (offset, size) in enumerate(parts):
            self._storer.store(tile, offset, size)
        self._storer.drain()
        if self._spoil:
            for slot in self._slots:
                slot.fill(0xFF)  # NaN: what is scored was read back
        mark("stored")
        self._pipe.run(parts, lambda flow: _take(flow, len(parts)))
        mark("read")
        for tile in range(self.plan.tiles):
            self._score(tile, self.plan.keys(self._slots[tile], tile))
        mark("scored")

    def verify(self) -> None:
        """Spoil far memory and scores, run once, and compare rows of both with float64. Raises VerifyError."""
        plan = self.plan
        poison = _aligned(plan.slot_bytes)
        poison.fill(0xFF)
        for offset, size in plan.parts():
            self.far.write(offset, poison[:size])
        self.scores.fill(np.nan)
        self._spoil = True
        self.run(1)
        self._spoil = False
        if not bool(np.isfinite(self.scores).all()):
            raise VerifyError("a score was not written or is not finite", where=self.kernel)
        rng = np.random.default_rng(plan.seed + 1)
        rows = np.unique([0, plan.tokens - 1, *rng.integers(0, plan.tokens, CHECK_ROWS)])
        keys = self.x[rows].astype(np.float64) @ self.w.astype(np.float64)
        kept = np.stack([self._stored_row(int(row)) for row in rows])
        self._close("the stored keys", kept, keys, plan.width)
        for g in {0, len(self.q) - 1, int(rng.integers(len(self.q)))}:
            h = g // plan.group
            want = self.q[g][rows].astype(np.float64) @ keys[:, h * plan.head_dim : (h + 1) * plan.head_dim].T
            self._close(f"the scores of head {g}", self.scores[g][np.ix_(rows, rows)], want, plan.width + plan.head_dim)

    def _stored_row(self, row: int) -> Floats:
        tile, inside = divmod(row, self.plan.block)
        offset, size = self.plan.parts()[tile]
        found: Floats = self.plan.keys(self.far.peek(offset, size), tile)[inside]
        return found

    def _close(self, what: str, got: npt.NDArray[Any], want: npt.NDArray[np.float64], terms: int) -> None:
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        most = ERROR * terms**0.5
        if not error <= most:
            raise VerifyError(f"{what} are wrong", where=self.kernel, got=f"error {error:.2g}",
                              expected=f"at most {most:.2g}")  # fmt: skip


def _take(flow: Flow, count: int) -> None:
    for _ in range(count):
        flow.take()


def _nobody(name: str) -> None:
    """Hear nothing."""


def _aligned(nbytes: int) -> Bytes:
    raw = np.empty(nbytes + UNIT, np.uint8)
    return raw[-raw.ctypes.data % UNIT :][:nbytes]


def predicted_gain(plan: FusedPlan, fused_seconds: float, store_rate: float, read_rate: float) -> float:
    """Return separate over fused by the papers' bytes: 1 + 2 K / B / T_fused, both ways at their own rate."""
    size = plan.link_bytes("fused")
    return 1.0 + (size / store_rate + size / read_rate) / fused_seconds
