"""Where a KV page's bytes lie in a pool of each layout, and the fragments a set of pages falls into when it moves.

Layouts as in SGLang's host pools (shape per plane; K and V are separate buffers, here one after the other):

| layout | order, outermost first |
|---|---|
| layer_first | layer, page, token, head |
| page_first | page, token, layer, head |
| page_first_direct | page, layer, token, head |
| page_head | page, head, token, layer |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvbench.errors import Unavailable, UsageError
from kvbench.model.geometry import KVGeometry, check_layout

Offsets = np.ndarray[Any, np.dtype[np.int64]]
OFFSET_LIMIT = 1 << 62  # what an int64 offset still holds with room for sums
MOST_FRAGMENTS = 1 << 24  # of one set: its tables take 24 bytes a fragment, making them several times that
# Dimensions of a plane, outermost first; every layout ends with the bytes of a head.
ORDERS: dict[str, tuple[str, ...]] = {
    "layer_first": ("layer", "page", "token", "head"),
    "page_first": ("page", "token", "layer", "head"),
    "page_first_direct": ("page", "layer", "token", "head"),
    "page_head": ("page", "head", "token", "layer"),
}


@dataclass(frozen=True, slots=True)
class Pool:
    """``pages`` pages of ``page_tokens`` tokens in ``layout``; its bytes are those of the pages, nothing between.

    Raises UsageError for an unknown layout, counts below 1, or a pool beyond 2^62 bytes.
    """

    geometry: KVGeometry
    layout: str
    page_tokens: int
    pages: int

    def __post_init__(self) -> None:
        check_layout(self.layout)
        if self.pages < 1:
            raise UsageError("a pool holds at least one page", where="pages", got=self.pages)
        if self.nbytes > OFFSET_LIMIT:
            raise UsageError("the pool is too large for its offsets", where="pool", got=f"{self.nbytes} bytes")

    @classmethod
    def of_tokens(cls, geometry: KVGeometry, layout: str, page_tokens: int, tokens: int) -> Pool:
        """Return the pool of ``tokens`` tokens. UsageError unless they are whole pages: no pool ends inside a page."""
        geometry.page_bytes(page_tokens)
        if tokens < page_tokens or tokens % page_tokens:
            raise UsageError(
                "the page does not divide the pool", where="tokens", got=f"{tokens} tokens of pages of {page_tokens}",
                expected="a pool of whole pages", mend=f"use {-(-max(tokens, 1) // page_tokens) * page_tokens} tokens",
            )  # fmt: skip
        return cls(geometry, layout, page_tokens, tokens // page_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.pages * self.geometry.page_bytes(self.page_tokens)

    def extents(self) -> dict[str, int]:
        """Return how many planes, layers, pages, tokens a page and heads the pool has."""
        shape = self.geometry
        return {
            "plane": shape.planes, "layer": shape.layers, "page": self.pages, "token": self.page_tokens,
            "head": shape.kv_heads,
        }  # fmt: skip

    def strides(self) -> dict[str, int]:
        """Return the bytes from one plane, layer, page, token or head to the next."""
        extents, step, found = self.extents(), self.geometry.head_bytes, {}
        for name in reversed(("plane", *ORDERS[self.layout])):
            found[name] = step
            step *= extents[name]
        return found

    def offset(self, page: int, layer: int, plane: int, head: int, token: int) -> int:
        """Return the byte offset of one head's row. UsageError for an index outside the pool."""
        at = {"page": page, "layer": layer, "plane": plane, "head": head, "token": token}
        strides, extents = self.strides(), self.extents()
        for name, index in at.items():
            if not 0 <= index < extents[name]:
                raise UsageError(
                    f"{name} index outside the pool", where=f"{self.layout} pool", got=index,
                    expected=f"0 to {extents[name] - 1}",
                )  # fmt: skip
        return sum(strides[name] * index for name, index in at.items())

    def require(self, nbytes: int, where: str) -> None:
        """Raise UsageError unless a buffer of ``nbytes`` holds the pool; ``where`` names the buffer."""
        if nbytes < self.nbytes:
            raise UsageError(
                "the buffer is smaller than the geometry", where=where, got=f"{nbytes} bytes",
                expected=f"{self.nbytes}: {self.pages} pages of {self.page_tokens} tokens of {self.geometry.name}",
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moves:
    """Fragments to copy, in order: ``bytes[i]`` from ``src_offset[i]`` to ``dst_offset[i]``, int64 of shape (n,).

    No two targets overlap. ``pages`` were moved, ``skipped`` entries had a negative index. n is 0 when all were.
    """

    src_offset: Offsets
    dst_offset: Offsets
    bytes: Offsets
    pages: int
    skipped: int

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def total(self) -> int:
        """Bytes moved."""
        return int(self.bytes.sum())

    @property
    def fragment(self) -> int | None:
        """Bytes of every fragment, None where they differ or there is none."""
        same = len(self.bytes) > 0 and bool((self.bytes == self.bytes[0]).all())
        return int(self.bytes[0]) if same else None

    def reversed(self) -> Moves:
        """Return the way back: every fragment from its target to its source. UsageError if a source is named twice."""
        order = np.argsort(self.src_offset, kind="stable")
        starts = self.src_offset[order]
        if len(order) > 1 and (starts[:-1] + self.bytes[order][:-1] > starts[1:]).any():
            raise UsageError("a source page is named twice: the way back would write it twice", where="moves")
        return Moves(self.dst_offset, self.src_offset, self.bytes, self.pages, self.skipped)


def moves(
    src_pool: Pool, dst_pool: Pool, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike, *,
    layers: range | None = None, follow: Literal["source", "target"] = "target",
) -> Moves:  # fmt: skip
    """Return the fragments that bring page ``src_pages[i]`` of one pool to page ``dst_pages[i]`` of the other.

    Indices are integers of shape (n,); where either is negative the entry is skipped. ``layers``: only these
    (a range with step 1; default all). Fragments that follow each other on both sides are merged. Order: pages as
    given, inside a page by the addresses of the side ``follow`` names; where whole pages of a layer can merge, layer
    by layer.

    Raises UsageError for pools of different geometry or page size, indices that are not whole numbers, of different
    length or outside their pool, and a target page named twice; Unavailable, before any is made, for more than
    ``MOST_FRAGMENTS`` fragments.
    """
    _same_pages(src_pool, dst_pool)
    chosen = _layers(src_pool.geometry, layers)
    each = page_fragments(src_pool, dst_pool, chosen)
    check_fragments(each * np.size(src_pages), f"{np.size(src_pages)} pages of {src_pool.page_tokens} tokens")
    source, target, skipped = _indices(src_pool, dst_pool, src_pages, dst_pages)
    src, dst, extents = src_pool.strides(), dst_pool.strides(), dst_pool.extents()
    extents["layer"] = len(chosen)
    run, rest = _inner_run(src, dst, extents, src_pool.geometry.head_bytes)
    rest.sort(key=(src if follow == "source" else dst).__getitem__, reverse=True)
    from_inner, to_inner = (
        _steps([(extents[name], step[name]) for name in rest]) + chosen.start * step["layer"] for step in (src, dst)
    )
    pages_merge = src["page"] == run and dst["page"] == run
    froms, tos = (
        _spread(index * step["page"], offsets, pages_merge)
        for index, step, offsets in ((source, src, from_inner), (target, dst, to_inner))
    )
    return _merged(froms, tos, run, len(source), skipped)


def page_fragments(src_pool: Pool, dst_pool: Pool, layers: range | None = None) -> int:
    """Return how many fragments one page falls into between the pools, from their geometry alone.

    Neighbouring pages that merge are not counted here. Raises UsageError for pools and layers :func:`moves` refuses.
    """
    _same_pages(src_pool, dst_pool)
    extents = dst_pool.extents() | {"layer": len(_layers(src_pool.geometry, layers))}
    _, rest = _inner_run(src_pool.strides(), dst_pool.strides(), extents, src_pool.geometry.head_bytes)
    return math.prod(extents[name] for name in rest)


def check_fragments(count: int, where: str) -> None:
    """Raise Unavailable for more than ``MOST_FRAGMENTS`` fragments in one set."""
    if count > MOST_FRAGMENTS:
        raise Unavailable(
            "too many fragments for one set", where=where, got=f"{count} fragments",
            expected=f"at most {MOST_FRAGMENTS}", mend="choose fewer bytes, smaller pages, or larger fragments",
        )  # fmt: skip


def _steps(walk: list[tuple[int, int]]) -> Offsets:
    """Return the offsets of all indices of ``walk``'s (extent, stride) pairs, outermost first."""
    found = np.zeros(1, np.int64)
    for extent, stride in walk:
        found = (found[:, None] + np.arange(extent, dtype=np.int64) * stride).ravel()
    return found


def _same_pages(src_pool: Pool, dst_pool: Pool) -> None:
    if src_pool.geometry != dst_pool.geometry:
        raise UsageError(
            "pools of different geometry", where="moves", got=dst_pool.geometry.name, expected=src_pool.geometry.name
        )
    if src_pool.page_tokens != dst_pool.page_tokens:
        raise UsageError(
            "pools of different page size", where="moves", got=f"{dst_pool.page_tokens} tokens",
            expected=f"{src_pool.page_tokens}", mend="give both pools the smaller page",
        )  # fmt: skip


def _indices(
    src_pool: Pool, dst_pool: Pool, src_pages: npt.ArrayLike, dst_pages: npt.ArrayLike
) -> tuple[Offsets, Offsets, int]:
    """Return the entries to move as int64, checked, and how many were skipped."""
    given = {"src_pages": np.asarray(src_pages), "dst_pages": np.asarray(dst_pages)}
    for name, index in given.items():
        if index.size == 0 and index.ndim == 1:
            continue
        if index.ndim != 1 or index.dtype.kind not in "iu":
            raise UsageError(
                "not page indices", where=name, got=f"{index.dtype} {index.shape}", expected="whole numbers in one row"
            )
    source, target = (index.astype(np.int64) for index in given.values())
    if len(source) != len(target):
        raise UsageError(
            "source and target indices differ in number", where="moves", got=len(target), expected=str(len(source))
        )
    keep = (source >= 0) & (target >= 0)
    for name, index, pool in (("src_pages", source, src_pool), ("dst_pages", target, dst_pool)):
        bad = np.flatnonzero(keep & (index >= pool.pages))
        if len(bad):
            raise UsageError(
                "page index out of range", where=f"{name}[{bad[0]}]", got=int(index[bad[0]]),
                expected=f"0 to {pool.pages - 1}, or a negative number to skip the entry",
            )  # fmt: skip
    places = np.flatnonzero(keep)
    order = np.argsort(target[places], kind="stable")
    ordered = target[places][order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        a, b = places[order[twice[0]]], places[order[twice[0] + 1]]
        raise UsageError(
            "duplicated destination page", where=f"dst_pages[{a}] and dst_pages[{b}]", got=int(target[a]),
            expected="each target page once: two copies into one page leave either of them",
        )  # fmt: skip
    return source[places], target[places], len(source) - len(places)


def _layers(shape: KVGeometry, layers: range | None) -> range:
    if layers is None:
        return range(shape.layers)
    if layers.step != 1 or not len(layers) or layers.start < 0 or layers.stop > shape.layers:
        raise UsageError(
            "no such layers", where="layers", got=str(layers), expected=f"part of range(0, {shape.layers})"
        )
    return layers


def _inner_run(src: dict[str, int], dst: dict[str, int], extents: dict[str, int], row: int) -> tuple[int, list[str]]:
    """Return the bytes contiguous on both sides inside a page, and the dimensions left to walk over."""
    run, rest = row, [name for name in ("head", "token", "layer", "plane") if extents[name] > 1]
    while True:
        name = next((name for name in rest if src[name] == run and dst[name] == run), None)
        if name is None:
            return run, rest
        run *= extents[name]
        rest.remove(name)


def _spread(pages: Offsets, inner: Offsets, pages_innermost: bool) -> Offsets:
    grid = inner[:, None] + pages[None, :] if pages_innermost else pages[:, None] + inner[None, :]
    return grid.ravel()


def _merged(froms: Offsets, tos: Offsets, run: int, pages: int, skipped: int) -> Moves:
    """Join fragments that follow the one before them on both sides."""
    if not len(froms):
        empty = np.zeros(0, np.int64)
        return Moves(empty, empty.copy(), empty.copy(), pages, skipped)
    joins = (froms[1:] == froms[:-1] + run) & (tos[1:] == tos[:-1] + run)
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    counts = np.diff(np.append(starts, len(froms)))
    return Moves(froms[starts], tos[starts], counts * run, pages, skipped)
