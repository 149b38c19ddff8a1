"""Both ends of an executed replay in host memory: paged KV of all layers far, what is copied to and from it near.

Layer by layer, in this order: far keys, far values, near keys and values that are copied out (only read), near keys and
values that are brought in (only written). Copies move pages of keys and pages of values, one fragment each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.attention.shapes import Array, Floats, Shape
from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.raw import bytes_at
from kvbench.replay.executor_course import Attended, Copied

if TYPE_CHECKING:
    from kvbench.attention.cpu import DecodeAttention, Step
    from kvbench.kernels.moves import FragmentCopy
    from kvbench.kernels.team import Team

Rows = np.ndarray[Any, np.dtype[np.int64]]
NEAR_BLOCKS = 128  # of each layer: the near side's own KV is not kept, only what stands at its end of a copy
WAY = "memcpy none"  # as transport cpu copies fragments of any size


class PairMemory:
    """``layers`` layers of ``blocks`` far blocks of ``shape`` at ``address``; :meth:`needs` bytes, filled here.

    ``most``: most CPU decodes of a batch. Raises UsageError for nothing to hold.
    """

    def __init__(self, shape: Shape, layers: int, blocks: int, most: int, address: int, seed: int) -> None:
        if min(layers, blocks, most) < 1:
            raise UsageError("no KV in host memory", where="executor", got=f"{layers} layers of {blocks} blocks")
        self.shape, self.layers, self.blocks, self.address, self.seed = shape, layers, blocks, address, seed
        self.page = shape.page_bytes
        self._layer_bytes = 2 * (blocks + 2 * NEAR_BLOCKS) * self.page
        self.caches: list[tuple[Array, Array]] = []
        for layer in range(layers):
            start = self._start(layer)
            half = blocks * self.page
            k = bytes_at(start, half).view(shape.array_dtype).reshape(shape.k_shape(blocks))
            v = bytes_at(start + half, half).view(shape.array_dtype).reshape(shape.v_shape(blocks))
            self.caches.append((k, v))
        self.fill()
        rng = np.random.default_rng(seed)
        queries, heads = (most, shape.q_heads, shape.head_dim), (most, shape.kv_heads, shape.head_dim)
        # one set a batch of the iteration: near (what is shipped) and far (what attention reads and writes)
        self.near = [self._tokens(rng, queries, heads) for _ in range(2)]
        self.far = [tuple(np.zeros_like(array) for array in made) for made in self.near]
        self.outputs: list[Floats] = [np.full(queries, np.nan, np.float32) for _ in range(2)]
        self.returned: list[Floats] = [np.full(queries, np.nan, np.float32) for _ in range(2)]

    @staticmethod
    def needs(shape: Shape, layers: int, blocks: int) -> int:
        """Return the bytes of the memory."""
        return 2 * layers * (blocks + 2 * NEAR_BLOCKS) * shape.page_bytes

    def _start(self, layer: int) -> int:
        return self.address + layer * self._layer_bytes

    def _tokens(
        self, rng: np.random.Generator, queries: tuple[int, ...], heads: tuple[int, ...]
    ) -> tuple[Array, ...]:  # fmt: skip
        return tuple(self.shape.array(rng.standard_normal(size, np.float32)) for size in (queries, heads, heads))

    def fill(self) -> None:
        """Write what stands near, random numbers; far and what is brought in become NaN."""
        from kvbench.attention.cpu_work import fill_numbers

        bad = self.shape.array(np.array([np.nan]))[0]
        for layer in range(self.layers):
            fill_numbers(self.near_bytes(layer, 0), self.shape.dtype, self.seed + layer)
            for piece in (self.far_bytes(layer), self.near_bytes(layer, 1)):
                piece.view(self.shape.array_dtype).fill(bad)

    def far_bytes(self, layer: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return bytes_at(self._start(layer), 2 * self.blocks * self.page)

    def near_bytes(self, layer: int, which: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return what is copied out (0) or brought in (1), keys then values."""
        start = self._start(layer) + 2 * (self.blocks + which * NEAR_BLOCKS) * self.page
        return bytes_at(start, 2 * NEAR_BLOCKS * self.page)

    # -- copies ----------------------------------------------------------------------------------------------------

    def near_block(self, key: int, place: int) -> int:
        """Return the near block that stands for page ``place`` of request ``key``."""
        return (key * 37 + place) % NEAR_BLOCKS

    def rows(self, copies: Sequence[Copied], layer: int) -> Rows:
        """Return (source, target, bytes) of every page of keys and of values ``copies`` move in ``layer``."""
        start, page, found = self._start(layer), self.page, []
        for copied in copies:
            edge = start + 2 * (self.blocks + (0 if copied.out else NEAR_BLOCKS)) * page
            for place, block in enumerate(copied.blocks):
                near = self.near_block(copied.key, place)
                for half in range(2):
                    far_at = start + (half * self.blocks + block) * page
                    near_at = edge + (half * NEAR_BLOCKS + near) * page
                    found.append((near_at, far_at, page) if copied.out else (far_at, near_at, page))
        return np.array(found, np.int64).reshape(-1, 3)

    def shipped(self, batch: int, decodes: int) -> Rows:
        """Return the rows of q, k and v of ``decodes`` tokens on their way out, and of their outputs on the way in."""
        pairs = [*zip(self.near[batch], self.far[batch], strict=True), (self.outputs[batch], self.returned[batch])]
        found = [(s.ctypes.data, t.ctypes.data, s[:decodes].nbytes) for s, t in pairs if decodes]
        return np.array(found, np.int64).reshape(-1, 3)

    def copy(self, rows: Rows, team: Team) -> FragmentCopy | None:
        """Return the copy of ``rows`` by ``team``, None for none."""
        from kvbench.kernels.moves import FragmentCopy

        return FragmentCopy(WAY, np.ascontiguousarray(rows), team) if len(rows) else None

    # -- attention -------------------------------------------------------------------------------------------------

    def tables(self, decodes: Sequence[Attended]) -> tuple[Array, Array]:
        """Return block table and lengths of ``decodes``."""
        table = np.zeros((len(decodes), max(len(one.blocks) for one in decodes)), np.int32)
        for row, one in zip(table, decodes, strict=True):
            row[: len(one.blocks)] = one.blocks
        return table, np.array([one.tokens for one in decodes], np.int32)

    def step(self, attention: DecodeAttention, batch: int, layer: int, table: Array, lengths: Array) -> Step:
        """Return attention of a batch in one layer; it appends the new tokens itself."""
        q, k, v = (array[: len(lengths)] for array in self.far[batch])
        out = self.outputs[batch][: len(lengths)]
        return attention.prepare(q, *self.caches[layer], table, lengths, k_new=k, v_new=v, out=out)

    # -- checks ----------------------------------------------------------------------------------------------------

    def check(self, wanted: dict[int, tuple[int, int]]) -> None:
        """Raise VerifyError unless every far block holds what was copied there last.

        ``wanted``: by far block, the request and the place of the page, for blocks nothing was appended to.
        """
        page = self.page
        for layer in range(self.layers):
            far = self.far_bytes(layer).reshape(2, self.blocks, page)
            near = self.near_bytes(layer, 0).reshape(2, NEAR_BLOCKS, page)
            for block, (key, place) in wanted.items():
                if not np.array_equal(far[:, block], near[:, self.near_block(key, place)]):
                    raise VerifyError(
                        "a page did not arrive", where=f"layer {layer}, request {key}, page {place}",
                        got="other bytes", expected="those of its near end",
                    )  # fmt: skip
