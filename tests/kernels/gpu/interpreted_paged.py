"""Run ``copy_pages`` on CPU tensors under TRITON_INTERPRET=1: a process of its own, as a stray store ends it.

Prints one JSON document: {case: null or what was wrong}. What must come out is worked out byte by byte from the model's
own address map, not from the strides the kernel is given.
"""

from __future__ import annotations

import itertools
import json
import mmap
import sys
from typing import Any

import numpy as np
import torch

from kvbench.kernels.gpu import paged, reference
from kvbench.kernels.gpu.catalogue import pages_kernel
from kvbench.model.geometry import LAYOUTS, KVGeometry
from kvbench.model.layout import Pool, moves
from kvbench.transport.paged_set import Box, box
from kvbench.transport.paged_sm import numbers

GUARD = 256  # bytes of canaries at both ends of a pool
FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE of Linux, which mmap does not name
TORCH = {16: torch.int32, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def guarded(nbytes: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes + 2 * GUARD, np.uint8)


def run(
    made: Box, dst: Any, src: Any, tables: tuple[Any, Any], index: str, programs: int, count: int | None = None
) -> None:
    """Launch the kernel from byte arrays whose pools start behind a guard."""
    width = made.width()
    element = TORCH[width]
    kernel = pages_kernel(made.row, made.planes == 2, index, 1024, width)  # type: ignore[arg-type]
    dtype = torch.int32 if index == "i32" else torch.int64

    def at(memory: Any, offset: int) -> torch.Tensor:
        # Only the address counts, and the interpreter copies every tensor back onto itself: not 64 GiB of them.
        return torch.from_numpy(memory[GUARD + offset :][:16]).view(element)

    dst_pages, src_pages = (torch.tensor(t, dtype=dtype) for t in tables)
    values = list(numbers(made, width))
    if count is not None:
        values[0] = count
    constants: dict[str, Any] = dict(kernel.constants)
    paged.copy_pages[(programs,)](
        at(dst, made.dst_first), at(dst, made.dst_first + made.dst_plane), at(src, made.src_first),
        at(src, made.src_first + made.src_plane), dst_pages, src_pages, *values, **constants,
    )  # fmt: skip


def moved(geometry: KVGeometry, layouts: tuple[str, str], pages: int, tokens: int, index: str, programs: int,
          layers: range | None = None) -> str | None:  # fmt: skip
    """Move shuffled pages; return what differs from the address map, None when nothing does."""
    source, target = Pool(geometry, layouts[0], tokens, pages + 2), Pool(geometry, layouts[1], tokens, pages + 3)
    shuffle = np.random.default_rng(pages)
    frm, to = shuffle.permutation(source.pages)[:pages], shuffle.permutation(target.pages)[:pages]
    src, dst = guarded(source.nbytes, 1), guarded(target.nbytes, 2)
    want, kept = dst.copy(), src.copy()
    row = geometry.head_bytes
    chosen = range(geometry.layers) if layers is None else layers
    for page, (a, b) in enumerate(zip(frm.tolist(), to.tolist(), strict=True)):
        del page
        for at in itertools.product(chosen, range(geometry.planes), range(geometry.kv_heads), range(tokens)):
            here, there = GUARD + source.offset(a, *at), GUARD + target.offset(b, *at)
            want[there : there + row] = src[here : here + row]
    made = box(moves(source, target, frm, to, layers=layers), source, target)
    # Pairs to be skipped stand between the others, on either side.
    tables = [np.insert(t, [0, len(t) // 2], [n, m]) for t, (n, m) in
              ((made.dst_pages, (-1, 0)), (made.src_pages, (0, -7)))]  # fmt: skip
    run(made, dst, src, (tables[0], tables[1]), index, programs, count=len(tables[0]))
    if not np.array_equal(src, kept):
        return "the source changed"
    wrong = np.flatnonzero(dst != want)
    return None if not len(wrong) else f"{len(wrong)} of {dst.size} bytes differ, the first at {int(wrong[0]) - GUARD}"


def empty() -> str | None:
    """No pairs: nothing may change."""
    pool = Pool(KVGeometry("none", 2, 2, 8, 2, 2, ""), "layer_first", 2, 2)
    dst, src = guarded(pool.nbytes, 1), guarded(pool.nbytes, 2)
    made, before = box(moves(pool, pool, [0], [1]), pool, pool), dst.copy()
    run(made, dst, src, (np.zeros(1, np.int64), np.zeros(1, np.int64)), "i64", 3, count=0)
    return None if np.array_equal(dst, before) else "bytes changed"


def far(index: str) -> str | None:
    """Pages beyond 2^31 accesses of a sparse mapping, on the target's and then on the source's side."""
    page, pages = 1 << 18, 1 << 18  # 64 GiB of addresses, 2^32 accesses; only two pages are touched
    row = 64
    last = pages - 1
    huge = np.frombuffer(mmap.mmap(-1, page * pages + 2 * GUARD, FLAGS), np.uint8)
    near = guarded(4 * page, 5)
    for to_far in (True, False):
        steps = (page, 0, 0, row)
        one = np.array([last]), np.array([1])
        made = Box(one[1 if to_far else 0], one[0 if to_far else 1], row, (1, 1, 4), 0, 0, steps, steps, 0, 0, 1)
        dst, src = (huge, near) if to_far else (near, huge)
        at_far, at_near = GUARD + last * page, GUARD + page
        if not to_far:
            near[at_near : at_near + 4 * row] = 0
        expected = (near[at_near : at_near + 4 * row] if to_far else huge[at_far : at_far + 4 * row]).copy()
        run(made, dst, src, (made.dst_pages, made.src_pages), index, 1)
        got = huge[at_far : at_far + 4 * row] if to_far else near[at_near : at_near + 4 * row]
        if not expected.any() or not np.array_equal(got, expected):
            return f"bytes did not reach the far page, to_far={to_far}"
    wrapped = (last * page) % (1 << 35)  # where 32-bit counts of accesses would lead
    if huge[GUARD + wrapped : GUARD + wrapped + 4 * row].any():
        return "bytes where 32-bit arithmetic leads"
    return None


def agrees_with_reference() -> str | None:
    """The numpy oracle of the catalogue says the same as the kernel, one plane, in elements."""
    shape, size, dst_steps, src_steps = (2, 3, 2), 4, (64, 32, 8, 4), (80, 40, 4, 12)
    dst, src = (np.random.default_rng(s).integers(0, 1 << 30, 512, np.int32) for s in (1, 2))
    to, frm = np.array([3, -1, 0]), np.array([1, 2, 4])
    want = reference.copy_pages(dst, src, to, frm, shape, size, dst_steps, src_steps)
    got = torch.from_numpy(dst.copy())
    kernel = pages_kernel(16, False)
    constants: dict[str, Any] = dict(kernel.constants)
    paged.copy_pages[(2,)](
        got, got, torch.from_numpy(src), torch.from_numpy(src), torch.from_numpy(to), torch.from_numpy(frm), 3, 12, 1,
        6, 2, *(s // 4 for s in dst_steps), *(s // 4 for s in src_steps), **constants,
    )  # fmt: skip
    return None if np.array_equal(got.numpy(), want) and not np.array_equal(want, dst) else "differs"


def stray() -> str | None:
    """A page one too far: the canaries must die of it, or the guards of the other cases prove nothing."""
    pool = Pool(KVGeometry("stray", 1, 1, 16, 1, 1, ""), "page_first", 1, 2)
    dst, src = guarded(pool.nbytes, 1), guarded(pool.nbytes, 2)
    made, before = box(moves(pool, pool, [0], [1]), pool, pool), dst.copy()
    run(made, dst, src, (np.array([pool.pages]), np.array([0])), "i64", 1)
    return None if np.array_equal(dst[-GUARD:], before[-GUARD:]) else "a canary died"


def main() -> int:
    """Run every case and print the document."""
    said: dict[str, str | None] = {}
    index = itertools.cycle(("i32", "i64"))
    for layouts in itertools.product(LAYOUTS, LAYOUTS):
        for size in (1, 2, 4):
            shape = KVGeometry(f"{size} bytes", 3, 2, 16 // size, 2, size, "")
            which = next(index)
            said[f"{layouts[0]} to {layouts[1]}, {size}-byte elements, {which}"] = moved(
                shape, layouts, 3, 3, which, programs=2
            )
    for name, shape in {
        "one plane": KVGeometry("mla", 2, 1, 72, 1, 2, ""), "by 8": KVGeometry("by8", 2, 3, 12, 2, 2, ""),
        "by 4": KVGeometry("by4", 2, 3, 12, 2, 1, ""), "by 2": KVGeometry("by2", 2, 1, 5, 2, 2, ""),
        "by 1": KVGeometry("by1", 2, 1, 5, 2, 1, ""),
    }.items():  # fmt: skip
        for target in ("page_first", "page_head"):
            said[f"{name}, layer_first to {target}"] = moved(shape, ("layer_first", target), 5, 1, "i64", programs=3)
    said["one layer of three"] = moved(
        KVGeometry("part", 3, 2, 8, 2, 2, ""), ("page_first", "layer_first"), 1, 7, "i64", 64, range(1, 2)
    )
    said["rows longer than a tile"] = moved(
        KVGeometry("long", 1, 4, 512, 2, 4, ""), ("layer_first", "page_first_direct"), 2, 5, "i32", 1
    )
    said["many tiles"] = moved(KVGeometry("tiles", 2, 4, 512, 2, 2, ""), ("layer_first", "page_first"), 9, 5, "i64", 3)
    said["no pairs"] = empty()
    said["far i32"], said["far i64"] = far("i32"), far("i64")
    said["reference"] = agrees_with_reference()
    said["stray"] = stray()
    json.dump(said, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
