"""The CPU's side of an iteration: paged KV of all layers in host memory, attention over it, what crosses the link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.attention.shapes import Array, Floats, Shape
from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.raw import bytes_at
from kvbench.model.paged import make_batch
from kvbench.systems.neo.schedule import Batch, Stage

if TYPE_CHECKING:
    from kvbench.attention.cpu import Step
    from kvbench.kernels.team import Team

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a batch's tokens stand on one side of the link: q, k, v of its decodes and the attention's output."""

    q: Array
    k: Array
    v: Array
    out: Floats


def make_ends(shape: Shape, decodes: int, allocate: Allocate) -> Ends:
    """Return buffers for ``decodes`` tokens: 16-bit q, k, v and a float32 output (as NEO ships them)."""
    q = (decodes, shape.q_heads, shape.head_dim)
    kv = (decodes, shape.kv_heads, shape.head_dim)
    element = shape.array_dtype
    return Ends(allocate(q, element), allocate(kv, element), allocate(kv, element), allocate(q, np.dtype(np.float32)))


def far_bytes(shape: Shape, requests: int, context: int, layers: int) -> int:
    """Return the bytes of ``layers`` layers of KV of ``requests`` sequences of ``context`` tokens, in whole pages."""
    return 2 * layers * requests * -(-context // shape.page_tokens) * shape.page_bytes


class FarSide:
    """Paged KV of ``requests`` sequences of ``context`` tokens in ``layers`` layers at ``address``, and its attention.

    ``address`` is memory of :func:`far_bytes` or more; it is filled here. A sequence's tokens include the new one: its
    k and v are appended by the call, in the same slot every pass. :meth:`arrange` says which batch a sequence is in.
    ``allocate`` makes the host's buffers, one set a batch, reused by all layers as NEO's pinned ones are; ``staged``:
    this side also holds the near side's tokens, which has none of its own. Raises UsageError for nothing to hold.
    """

    def __init__(
        self, shape: Shape, requests: int, context: int, layers: int, team: Team, address: int, *, seed: int = 0,
        allocate: Allocate = np.empty, staged: bool = True,
    ) -> None:  # fmt: skip
        from kvbench.attention.cpu import DecodeAttention
        from kvbench.attention.cpu_work import fill_numbers

        if min(requests, context, layers) < 1:
            raise UsageError("no KV in host memory", where="far side", got=f"{requests} requests of {context} tokens")
        self.shape, self.requests, self.layers, self.context, self.seed = shape, requests, layers, context, seed
        self.attention = DecodeAttention(shape, team)
        self.nbytes = far_bytes(shape, requests, context, layers)
        self._allocate, self._staged = allocate, staged
        fill_numbers(bytes_at(address, self.nbytes), shape.dtype, seed)
        blocks = requests * -(-context // shape.page_tokens)
        half = blocks * shape.page_bytes
        self._layers = []
        for layer in range(layers):
            start = address + 2 * layer * half
            k = bytes_at(start, half).view(shape.array_dtype).reshape(shape.k_shape(blocks))
            v = bytes_at(start + half, half).view(shape.array_dtype).reshape(shape.v_shape(blocks))
            drawn = make_batch([context] * requests, shape.page_tokens, blocks, "shuffled", seed + layer)
            self._layers.append((k, v, drawn))
        self.ends: dict[int, Ends] = {}
        self.near: dict[tuple[int, int], Ends] = {}
        self.steps: dict[tuple[int, int], Step] = {}
        self._reference: dict[tuple[int, int], Floats] = {}

    def arrange(self, batches: Sequence[Batch]) -> None:
        """Give sequences to the CPU decodes of ``batches``, in their order. Raises UsageError for too many or none."""
        wanted = sum(batch.cpu for batch in batches)
        if not 1 <= wanted <= self.requests:
            raise UsageError("CPU requests", where="far side", got=wanted, expected=f"1..{self.requests}")
        decodes = {b: batch.cpu for b, batch in enumerate(batches) if batch.cpu}
        self.ends = {b: make_ends(self.shape, count, self._allocate) for b, count in decodes.items()}
        self.near, self.steps, self._reference = {}, {}, {}
        rng = np.random.default_rng(self.seed)
        for layer, (k, v, drawn) in enumerate(self._layers):
            first = 0
            for b, ends in self.ends.items():
                rows = slice(first, first + decodes[b])
                first = rows.stop
                table, lengths = np.ascontiguousarray(drawn.table[rows]), np.ascontiguousarray(drawn.lengths[rows])
                self.steps[b, layer] = self.attention.prepare(
                    ends.q, k, v, table, lengths, k_new=ends.k, v_new=ends.v, out=ends.out
                )
                if self._staged:
                    self.near[b, layer] = self._drawn(decodes[b], rng)

    def _drawn(self, decodes: int, rng: np.random.Generator) -> Ends:
        made = make_ends(self.shape, decodes, np.empty)
        for array in (made.q, made.k, made.v):
            array[...] = self.shape.array(rng.standard_normal(array.shape, np.float32))
        made.out.fill(np.nan)
        return made

    def attend(self, batch: int, layer: int) -> None:
        """Do the attention of one batch in one layer on what has arrived in ``ends``."""
        self.steps[batch, layer].run()

    def carry(self, stage: Stage) -> None:
        """Copy what ``stage`` (``qkv`` or ``o``) moves, between the near side's tokens and the host's buffers."""
        near, ends = self.near[stage.batch, stage.layer], self.ends[stage.batch]
        if stage.kind == "qkv":
            np.copyto(ends.q, near.q)
            np.copyto(ends.k, near.k)
            np.copyto(ends.v, near.v)
        else:
            np.copyto(near.out, ends.out)

    def alone(self) -> dict[int, float]:
        """Run all layers of each batch with nothing beside it; return the mean seconds of a layer, by batch."""
        spent = dict.fromkeys(self.ends, 0.0)
        for b in self.ends:
            for layer in range(self.layers):
                if self.near:
                    self.carry(Stage("qkv", b, layer))
                spent[b] += self.steps[b, layer].run()
        return {b: seconds / self.layers for b, seconds in spent.items()}

    def kv_bytes(self, batch: int) -> int:
        """Return the bytes of KV one layer of ``batch`` reads."""
        return self.steps[batch, 0].kv_bytes

    def poison(self) -> None:
        """Make everything a pass should bring wrong: a stage that runs too early leaves NaN behind."""
        if not self._reference:
            for (b, layer), near in self.near.items():
                self.carry(Stage("qkv", b, layer))
                self.steps[b, layer].run()
                self._reference[b, layer] = self.ends[b].out.copy()
                if not np.isfinite(self._reference[b, layer]).all():
                    raise VerifyError("attention is not finite", where=f"ca{b}[{layer}]")
                near.out.fill(np.nan)
        self.spoil()
        for near in self.near.values():
            near.out.fill(np.nan)

    def spoil(self) -> None:
        """Fill the host's buffers with NaN."""
        bad = self.shape.array(np.array([np.nan]))[0]
        for ends in self.ends.values():
            for array in (ends.q, ends.k, ends.v):
                array.fill(bad)
            ends.out.fill(np.nan)

    def check(self) -> None:
        """Raise VerifyError unless every output that arrived is the one attention gives when nothing overlaps."""
        for (b, layer), near in self.near.items():
            want = self._reference.get((b, layer))
            if want is None or not np.array_equal(near.out, want):
                raise VerifyError(
                    "the output that arrived is not that of its inputs", where=f"ca{b}[{layer}]",
                    got="NaN" if np.isnan(near.out).any() else "other numbers",
                    expected="those of a pass without overlap",
                )  # fmt: skip
