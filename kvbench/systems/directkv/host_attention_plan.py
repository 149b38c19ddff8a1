"""The plan of a decode step over far KV: where the pages of each layer and sequence lie, and how they are filled."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbench.attention.cpu_work import fill_numbers
from kvbench.attention.shapes import Array, Shape
from kvbench.errors import UsageError
from kvbench.systems.directkv.host_attention_far import UNIT, Bytes, Far

PART_BYTES = 1 << 20  # of keys and values read in one go
Table = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Where the KV of ``layers`` layers of a batch of ``lengths`` lies in far memory.

    A layer is its parts in a random order; a part is ``part_pages`` pages of one sequence, first all their keys, then
    all their values, so that one read brings whole pages and a kernel finds both by block number. The last part of a
    sequence may be partly empty: it is stored, and read, whole. Raises UsageError for lengths below 1 or no layers.
    """

    shape: Shape
    lengths: tuple[int, ...]
    layers: int
    part_pages: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or self.layers < 1:
            raise UsageError(
                "decode over nothing", where="decode.lengths", got=f"{list(self.lengths)[:8]} in {self.layers} layers",
                expected="1 token or more in each sequence, 1 layer or more",
            )  # fmt: skip
        if self.part_pages < 1 or self.half % UNIT:
            raise UsageError(
                "a part of far KV", where="decode.part_pages", got=f"{self.part_pages} x {self.shape.page_bytes} B",
                expected=f"whole {UNIT} B of keys",
            )  # fmt: skip

    @property
    def half(self) -> int:
        """Bytes of the keys, or of the values, of a part."""
        return self.part_pages * self.shape.page_bytes

    @property
    def part_tokens(self) -> int:
        return self.part_pages * self.shape.page_tokens

    @property
    def parts(self) -> tuple[int, ...]:
        """Parts of each sequence."""
        return tuple(-(-n // self.part_tokens) for n in self.lengths)

    @property
    def layer_bytes(self) -> int:
        return 2 * self.half * sum(self.parts)

    @property
    def nbytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def kv_bytes(self) -> int:
        """Keys and values of the tokens there are: unique, of one pass over all layers."""
        return sum(self.lengths) * self.shape.token_bytes * self.layers

    @property
    def flops(self) -> int:
        return 4 * sum(self.lengths) * self.layers * self.shape.q_heads * self.shape.head_dim

    def places(self, layer: int) -> npt.NDArray[np.int64]:
        """Return where in a layer each part lies, sequence after sequence, int64 [parts]."""
        return np.random.default_rng((self.seed, layer)).permutation(sum(self.parts))

    def table(self, layer: int) -> Table:
        """Return the blocks of each sequence for a cache view that begins at the layer: int32 [batch, pages].

        A part holds 2 x part_pages blocks, of which the first half are keys; the view of values begins half a part
        later, so one number finds both.
        """
        places, inside = self.places(layer), np.arange(self.part_pages, dtype=np.int64)
        table = np.zeros((len(self.lengths), max(self.parts) * self.part_pages), np.int32)
        first = 0
        for row, count in zip(table, self.parts, strict=True):
            blocks = (places[first : first + count, None] * 2 * self.part_pages + inside).reshape(-1)
            row[: blocks.size] = blocks
            first += count
        return table

    def views(self, region: Bytes) -> tuple[Array, Array]:
        """Return ``region``, whole parts, as packed keys and values: arrays that share it, block b of both a page."""
        shape = self.shape
        blocks = region.size // shape.page_bytes - self.part_pages
        k = region[: region.size - self.half].view(shape.array_dtype).reshape(shape.k_shape(blocks))
        v = region[self.half :].view(shape.array_dtype).reshape(shape.v_shape(blocks))
        return k, v


def part_pages_for(shape: Shape, tokens: int, nbytes: int = PART_BYTES) -> int:
    """Return the pages of a part of about ``nbytes``, no larger than ``tokens`` need, in whole ``UNIT``."""
    step = UNIT // math.gcd(UNIT, shape.page_bytes)
    wanted = max(1, min(nbytes // (2 * shape.page_bytes), -(-tokens // shape.page_tokens)))
    return -(-wanted // step) * step


def fill_far(plan: DecodePlan, far: Far) -> None:
    """Write the KV of every layer: numbers 0.5 <= |x| < 2."""
    buffer = _page_aligned(plan.layer_bytes)
    for layer in range(plan.layers):
        fill_numbers(buffer, plan.shape.dtype, plan.seed + layer)
        far.write(layer * plan.layer_bytes, buffer)


def _page_aligned(nbytes: int) -> Bytes:
    raw = np.empty(nbytes + UNIT, np.uint8)
    skip = -raw.ctypes.data % UNIT
    return raw[skip : skip + nbytes]
