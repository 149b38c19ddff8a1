"""The index set of a paged copy as each transport needs it: address rows, page tables and strides, a map of origins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvbench.errors import UsageError
from kvbench.model.layout import Moves, Pool
from kvbench.transport.gpu_pieces import Words

WIDTHS = (16, 8, 4, 2, 1)  # bytes of one access, widest first


@dataclass(frozen=True, slots=True)
class Fragments:
    """The fragments of ``moves`` between two addresses: what calls take that move one fragment each."""

    target: int
    source: int
    moves: Moves

    @property
    def fragment(self) -> Words:
        return self.moves.bytes

    @property
    def count(self) -> int:
        return len(self.moves)

    @property
    def nbytes(self) -> int:
        return self.moves.total

    def targets(self) -> Words:
        """Return the target addresses, int64 [count]."""
        return self.target + self.moves.dst_offset

    def sources(self) -> Words:
        """Return the source addresses, int64 [count]."""
        return self.source + self.moves.src_offset


def part(moves: Moves, start: int, stop: int) -> Moves:
    """Return fragments ``start`` to ``stop`` of ``moves``."""
    cut = slice(start, stop)
    return Moves(moves.src_offset[cut], moves.dst_offset[cut], moves.bytes[cut], moves.pages, moves.skipped)


def check_moves(moves: Moves, source_bytes: int, target_bytes: int, where: str) -> None:
    """Raise UsageError unless ``moves`` can be made between pools of these sizes.

    They must be int64 rows of one length in host memory, name at least one fragment, stay inside both pools and write
    no byte twice: two copies to one place leave either of them, and a copy that moves nothing has no rate.
    """
    arrays = {"src_offset": moves.src_offset, "dst_offset": moves.dst_offset, "bytes": moves.bytes}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype != np.int64 or array.ndim != 1:
            kind = f"{type(array).__name__} of {getattr(array, 'dtype', '?')} on {getattr(array, 'device', '?')}"
            raise UsageError("not a table in host memory", where=f"{where} {name}", got=kind,
                             expected="numpy int64 [n]", mend="bring the table to the host first")  # fmt: skip
    if len({len(array) for array in arrays.values()}) != 1:
        lengths = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise UsageError("tables of different length", where=where, got=lengths)
    if not len(moves):
        raise UsageError(
            "nothing to move", where=where, got=f"no fragment, {moves.skipped} entries with a negative index"
        )
    if int(moves.bytes.min()) < 1:
        raise UsageError("a fragment without bytes", where=f"{where} bytes[{int(moves.bytes.argmin())}]",
                         got=int(moves.bytes.min()))  # fmt: skip
    for name, size in (("src_offset", source_bytes), ("dst_offset", target_bytes)):
        bad = np.flatnonzero((arrays[name] < 0) | (arrays[name] > size - moves.bytes))
        if len(bad):
            at = int(bad[0])
            raise UsageError("fragment outside the pool", where=f"{where} {name}[{at}]",
                             got=f"{int(moves.bytes[at])} bytes at {int(arrays[name][at])}",
                             expected=f"inside the pool's {size} bytes")  # fmt: skip
    order = np.argsort(moves.dst_offset, kind="stable")
    ends = (moves.dst_offset + moves.bytes)[order]
    twice = np.flatnonzero(ends[:-1] > moves.dst_offset[order][1:])
    if len(twice):
        a, b = int(order[twice[0]]), int(order[twice[0] + 1])
        raise UsageError("duplicated destination", where=f"{where} dst_offset[{a}] and [{b}]",
                         got=f"byte {int(moves.dst_offset[b])} is written twice",
                         expected="each target once")  # fmt: skip


def granule(moves: Moves, *more: int) -> int:
    """Return the largest size all fragments and their places are multiples of, and all of ``more``."""
    found = int(np.gcd.reduce(np.concatenate([moves.bytes, moves.src_offset, moves.dst_offset])))
    return int(np.gcd.reduce([found, *more]))


def granules(moves: Moves, size: int) -> tuple[Words, Words]:
    """Return the (source, target) numbers of all granules of ``size`` bytes, int64 [total / size], in order."""
    counts = moves.bytes // size
    starts = np.cumsum(counts) - counts
    inside = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)
    return (np.repeat(moves.src_offset // size, counts) + inside, np.repeat(moves.dst_offset // size, counts) + inside)


def width_of(*sizes: int) -> int:
    """Return the widest access, in bytes, that every one of ``sizes`` is a multiple of."""
    return next(width for width in WIDTHS if all(size % width == 0 for size in sizes))


@dataclass(frozen=True, slots=True)
class Box:
    """A set of whole pages as page tables and strides.

    ``src_pages``, ``dst_pages``: int64 [pairs]. A page has, in each plane, ``shape`` = (outer, middle, inner) rows of
    ``row`` bytes, contiguous on both sides. ``src_first``, ``dst_first``: bytes from the pool's start to the first row
    of page 0 (the first layer moved). ``src_steps``, ``dst_steps``: bytes from page to page, outer to outer, middle
    to middle, inner to inner. ``src_plane``, ``dst_plane``: bytes from K to V, 0 with one plane.
    """

    src_pages: Words
    dst_pages: Words
    row: int
    shape: tuple[int, int, int]
    src_first: int
    dst_first: int
    src_steps: tuple[int, int, int, int]
    dst_steps: tuple[int, int, int, int]
    src_plane: int
    dst_plane: int
    planes: int

    @property
    def page_rows(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]

    @property
    def nbytes(self) -> int:
        return len(self.src_pages) * self.page_rows * self.row * self.planes

    def width(self) -> int:
        """Return the widest access every row, step and start allows; 16 unless a size is odd."""
        steps = (*self.src_steps, *self.dst_steps, self.src_plane, self.dst_plane)
        return width_of(self.row, self.src_first, self.dst_first, *steps)


def box(moves: Moves, src_pool: Pool, dst_pool: Pool) -> Box:
    """Return the pages ``moves`` brings from one pool to the other, and how a page lies in each.

    Raises UsageError unless ``moves`` are whole pages of these pools, all layers or the same run of layers of each.
    """
    src, dst, extents = src_pool.strides(), dst_pool.strides(), src_pool.extents()
    unit = granule(moves, src["page"], dst["page"], src["layer"], dst["layer"])
    unit = int(np.gcd(unit, src_pool.geometry.head_bytes * src_pool.geometry.kv_heads))
    sources, targets = (numbers * unit for numbers in granules(moves, unit))
    dst_pages = (targets // dst["page"]) % dst_pool.pages
    src_pages = (sources // src["page"]) % src_pool.pages
    layers = (sources // src["layer"]) % extents["layer"]
    first, count = int(layers.min()), int(layers.max() - layers.min()) + 1
    keys, seen = np.unique(src_pages * dst_pool.pages + dst_pages, return_index=True)
    keys = keys[np.argsort(seen, kind="stable")]  # in the order in which the pages were asked for
    chosen = extents | {"layer": count}
    row, rest = _row(src, dst, chosen, src_pool.geometry.head_bytes)
    rest.sort(key=dst.__getitem__, reverse=True)
    shape = [1] * (3 - len(rest)) + [chosen[name] for name in rest]
    steps = [
        (side["page"], *[0] * (3 - len(rest)), *(side[name] for name in rest)) for side in (src, dst)
    ]  # fmt: skip
    planes = extents["plane"]
    made = Box(
        keys // dst_pool.pages, keys % dst_pool.pages, row, (shape[0], shape[1], shape[2]), first * src["layer"],
        first * dst["layer"], (steps[0][0], steps[0][1], steps[0][2], steps[0][3]),
        (steps[1][0], steps[1][1], steps[1][2], steps[1][3]), src["plane"] if planes == 2 else 0,
        dst["plane"] if planes == 2 else 0, planes,
    )  # fmt: skip
    # The same bytes at the same places, or the kernel would move another set than the other transports.
    if made.nbytes != moves.total or not _same_places(sources, targets, src, dst, extents, unit):
        raise UsageError("not whole pages of the pools", where="sm",
                         got=f"{len(moves)} fragments of {moves.total} bytes",
                         expected=f"pages of {src_pool.geometry.page_bytes(src_pool.page_tokens)} bytes, or the same "
                         "layers of each")  # fmt: skip
    return made


def _row(src: dict[str, int], dst: dict[str, int], extents: dict[str, int], row: int) -> tuple[int, list[str]]:
    """Return the bytes contiguous on both sides in one plane of a page, and the dimensions left."""
    rest = [name for name in ("head", "token", "layer") if extents[name] > 1]
    while True:
        name = next((name for name in rest if src[name] == row and dst[name] == row), None)
        if name is None:
            return row, rest
        row *= extents[name]
        rest.remove(name)


def _same_places(
    sources: Words, targets: Words, src: dict[str, int], dst: dict[str, int], extents: dict[str, int], unit: int
) -> bool:
    """Return whether each unit keeps its plane, layer, token, head and place in the row."""
    for name in ("plane", "layer", "token", "head"):
        if not np.array_equal(sources // src[name] % extents[name], targets // dst[name] % extents[name]):
            return False
    row = min(src["head"], dst["head"])
    return unit >= row or bool(np.array_equal(sources % row, targets % row))
