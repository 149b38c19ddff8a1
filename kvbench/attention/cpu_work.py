"""A decode step over enough layers to be out of the caches, with its ceilings on the same memory, for benches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvbench.attention.cpu import DecodeAttention, Isa, Split, Step
from kvbench.attention.oracles import DenseDecode, tolerance
from kvbench.attention.shapes import Array, Shape
from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.raw import bytes_at
from kvbench.memory import payload
from kvbench.model.paged import Batch, Order, attend, make_batch, pages_of

if TYPE_CHECKING:
    from kvbench.kernels.gather import Gather
    from kvbench.kernels.team import Team

Ceiling = tuple[str, Callable[[int], float], int, Callable[[], None]]
CHECKS = 6  # query groups a verification recomputes in float64
RESIDENT_BLOCKS, RESIDENT_PAGES = 2, 512  # blocks that stay in the caches of a core, and how often they are read
# Sign, mantissa and the last bit of the exponent stay random, the rest of it is set: 0.5 <= |x| < 2 in every dtype.
_KEEP = {"fp32": 0x80FFFFFF80FFFFFF, "fp16": 0x87FF87FF87FF87FF, "bf16": 0x80FF80FF80FF80FF}
_ADD = {"fp32": 0x3F0000003F000000, "fp16": 0x3800380038003800, "bf16": 0x3F003F003F003F00}


def fill_numbers(array: npt.NDArray[Any], dtype: str, seed: int) -> None:
    """Overwrite a C-contiguous array, a multiple of 8 bytes, with random numbers of ``dtype``, 0.5 <= |x| < 2.

    Random bits would hold NaN; constants would make every weight the same (trap T59).
    """
    payload.fill(array, seed, "bits")
    words = array.reshape(-1).view(np.uint64)
    words &= np.uint64(_KEEP[dtype])
    words += np.uint64(_ADD[dtype])


def layers_for(shape: Shape, lengths: npt.ArrayLike, least_bytes: int) -> int:
    """Return how many layers of a batch of ``lengths`` hold at least ``least_bytes`` of keys and values in pages."""
    pages = int(pages_of(np.asarray(lengths, np.int64), shape.page_tokens).sum())
    return max(1, -(-least_bytes // (2 * shape.page_bytes * max(1, pages))))


class DecodeWork:
    """One decode step a layer over ``layers`` layers of KV cache at ``address``, one after the other.

    A layer is its blocks of keys, then its blocks of values, ``lengths`` paged in ``order`` with another table each.
    ``nbytes`` is what the memory must hold; it is filled here. ``kv_bytes`` (unique) and ``flops`` are of one pass over
    all layers. Raises UsageError for a batch without a token.
    """

    def __init__(
        self, shape: Shape, lengths: Sequence[int], layers: int, team: Team, address: int, *, order: Order = "shuffled",
        seed: int = 0, isa: Isa = "auto", split: Split = "pages",
    ) -> None:  # fmt: skip
        if sum(lengths) < 1 or layers < 1:
            raise UsageError("a batch without a token", where="attention.cpu_work", got=list(lengths)[:8])
        self.shape, self.team, self.address = shape, team, address
        self.attention = DecodeAttention(shape, team, isa=isa, split=split)
        self.kernel = self.attention.kernel
        self.blocks = int(pages_of(np.asarray(lengths, np.int64), shape.page_tokens).sum())
        self.layers = layers
        self.nbytes = nbytes_for(shape, lengths, layers)
        fill_numbers(bytes_at(address, self.nbytes), shape.dtype, seed)
        batch, rng = len(lengths), np.random.default_rng(seed)
        self._batches: list[Batch] = []
        self._queries: list[Array] = []
        self._caches: list[tuple[Array, Array]] = []
        self.steps: list[Step] = []
        half = self.blocks * shape.page_bytes
        for layer in range(layers):
            drawn = make_batch(lengths, shape.page_tokens, self.blocks, order, seed + layer)
            q = shape.array(rng.standard_normal((batch, shape.q_heads, shape.head_dim)))
            start = address + 2 * layer * half
            k = bytes_at(start, half).view(shape.array_dtype).reshape(shape.k_shape(self.blocks))
            v = bytes_at(start + half, half).view(shape.array_dtype).reshape(shape.v_shape(self.blocks))
            self._batches.append(drawn)
            self._queries.append(q)
            self._caches.append((k, v))
            self.steps.append(self.attention.prepare(q, k, v, drawn.table, drawn.lengths))
        self.kv_bytes = sum(step.kv_bytes for step in self.steps)
        self.flops = sum(step.flops for step in self.steps)
        self.work_items = self.steps[0].work_items
        self._ran = False

    def run(self, reps: int = 1) -> float:
        """Do ``reps`` passes over all layers; return the seconds inside the steps."""
        for step in self.steps:
            step.out.fill(np.nan)
            step.lse.fill(np.nan)
        self._ran = True
        return sum(step.run() for _ in range(reps) for step in self.steps)

    def verify(self) -> None:
        """Recompute some query groups, of every layer's and sequence's turn, in float64. Raises VerifyError."""
        if not self._ran:
            raise VerifyError("nothing was run", where=self.kernel)
        for step in self.steps:
            if not (np.isfinite(step.out).all() and not np.isnan(step.lse).any()):
                raise VerifyError("an output was not written or is not finite", where=self.kernel)
        rng = np.random.default_rng(self.blocks)
        batch = len(self._batches[0].lengths)
        for check in range(CHECKS):
            layer, b = check % len(self.steps), (check * max(1, batch // CHECKS) + check // batch) % batch
            self._check(layer, b, int(rng.integers(self.shape.kv_heads)))

    def _check(self, layer: int, b: int, h: int) -> None:
        shape, drawn, step = self.shape, self._batches[layer], self.steps[layer]
        used = drawn.table[b, : int(drawn.pages[b])]
        k, v = (shape.floats(half)[:, 0] for half in shape.unpack(*(c[used, h : h + 1] for c in self._caches[layer])))
        n, heads = int(drawn.lengths[b]), slice(h * shape.group, (h + 1) * shape.group)
        q = shape.floats(self._queries[layer])[b, heads]
        keys, values = (x.reshape(-1, shape.head_dim)[:n] for x in (k, v))
        want, lse = attend(q, keys, values, 1.0 / math.sqrt(shape.head_dim))
        got = step.out[b, heads]
        if n == 0:
            error, off = float(np.abs(got).max()), 0.0 if (step.lse[b, heads] == -np.inf).all() else math.inf
        else:
            error = float((np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max())
            off = float(np.abs(step.lse[b, heads] - lse).max())
        most = tolerance(shape.dtype, float(np.abs(lse[np.isfinite(lse)]).max()) if n else 0.0, shape.head_dim)
        if not error <= most or not off <= 1e-5:
            raise VerifyError(
                "attention is wrong", where=f"{self.kernel}, layer {layer}, sequence {b}, KV head {h}",
                got=f"error {error:.2g}, log-sum-exp off by {off:.2g}", expected=f"at most {most:.2g} and 1e-05",
            )  # fmt: skip

    def dense(self, form: str, threads: int) -> DenseDecode:
        """Return ``form`` of :mod:`kvbench.attention.oracles` over the same memory, read as dense keys and values.

        Raises UsageError unless all sequences fill their pages, and as many.
        """
        shape, lengths = self.shape, self._batches[0].lengths
        tokens = int(lengths[0])
        if int(lengths.min()) != int(lengths.max()) or tokens % shape.page_tokens:
            raise UsageError(
                "ragged lengths", where=f"attention.{form}", got=sorted(set(lengths.tolist()))[:8],
                expected="sequences of one length, whole pages",
            )  # fmt: skip
        wanted = (len(lengths), shape.kv_heads, tokens, shape.head_dim)
        layers = [(k.reshape(-1).reshape(wanted), v.reshape(-1).reshape(wanted)) for k, v in self._caches]
        return DenseDecode(form, shape, layers, self._queries, threads)

    def gathers(self) -> dict[str, Gather]:
        """Return the variants of the ceiling: a gather read of whole pages of keys and values, in the tables' order."""
        from kvbench.kernels.gather import Gather, variants

        parts = []
        for layer, drawn in enumerate(self._batches):
            places = drawn.blocks() + 2 * layer * self.blocks
            parts.append(np.stack([places, places + self.blocks], axis=1).reshape(-1))
        index = np.ascontiguousarray(np.concatenate(parts))
        fragment = self.shape.page_bytes
        return {
            name: Gather(name, self.address, self.nbytes, fragment, index, self.team)
            for name in variants("read", fragment)
        }  # fmt: skip

    def ceilings(self, gather: Gather) -> list[Ceiling]:
        """Return (name, run, bytes of a pass, verify) of the ceilings in their order: gather read, sequential read."""
        from kvbench.kernels.stream import Stream

        stream = Stream("read", [self.address], self.nbytes, self.team)
        return [
            ("gather read of whole pages", gather.run, gather.link_bytes, gather.verify),
            ("sequential read", stream.run, stream.link_bytes, stream.verify),
        ]

    def detail(self, rate: float, gather: float | None, read: float | None) -> dict[str, str | float | None]:
        """Return what a row says beside its rate (bytes of KV a second): fraction of the read, bound, capacity.

        ``bound``: ``work items < threads``, else ``compute`` where the cores fall behind the gather even with KV in
        their caches (``resident_rate``), else ``bandwidth``. ``tokens_per_ms``: KV tokens of a layer attended to in a
        millisecond; times the near side's time per layer it is what can be hidden behind it (NEO, section 3.2).
        """
        resident = self.resident_rate()
        bound = "compute" if gather is not None and resident < gather else "bandwidth"
        return {
            "read_fraction": None if not read else round(rate / read, 4),
            "resident_rate": resident,
            "bound": "work items < threads" if self.work_items < len(self.team) else bound,
            "work_items": self.work_items,
            "tokens_per_ms": round(rate / self.shape.token_bytes * 1e-3, 1),
        }

    def resident_rate(self, rounds: int = 5) -> float:
        """Return bytes of KV a second with the few blocks of one sequence in the caches: what the cores can do."""
        k, v = (cache[:RESIDENT_BLOCKS] for cache in self._caches[0])
        table = (np.arange(RESIDENT_PAGES * len(self.team), dtype=np.int32) % len(k))[None]
        lengths = np.array([table.size * self.shape.page_tokens], np.int32)
        step = self.attention.prepare(self._queries[0][:1], k, v, table, lengths)
        return step.kv_bytes / min(step.run() for _ in range(rounds))


def nbytes_for(shape: Shape, lengths: npt.ArrayLike, layers: int) -> int:
    """Return the bytes of ``layers`` layers of a batch of ``lengths``: whole pages of keys and values."""
    return 2 * layers * shape.page_bytes * int(pages_of(np.asarray(lengths, np.int64), shape.page_tokens).sum())
