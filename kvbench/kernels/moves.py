"""Copies of a list of fragments between any addresses, by a team: what a host transport does with one index set.

Unlike :mod:`kvbench.kernels.gather` every fragment has its own source, target and size. The ways to copy are the same
(non-temporal stores, plain ones, libc's memcpy, each with or without a prefetch cursor that runs ahead of the copy and
jumps from fragment to fragment), and so is the reason: which one wins depends on the machine and the fragment.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvbench.errors import UsageError
from kvbench.kernels import libc
from kvbench.kernels.gather import parse
from kvbench.kernels.gather import variants as gather_variants
from kvbench.kernels.gather_passes import MEMCPY, NT, PLAIN, ahead, ahead512
from kvbench.kernels.intrinsics import (
    barrier,
    call_memcpy,
    drain,
    line_load,
    line_store,
    line_store_nt,
    word_load,
)
from kvbench.kernels.jit import inlined, kernel, part
from kvbench.kernels.sync import enter, leave
from kvbench.kernels.team import Kernel, Team

ROW = 24  # bytes of a row: source address, target address, bytes
LINE = 64
Rows = np.ndarray[Any, np.dtype[np.int64]]


@inlined
def _store512(nt: int, t: int, p: int) -> None:
    a = line_load(p)
    b = line_load(p + 64)
    c = line_load(p + 128)
    d = line_load(p + 192)
    e = line_load(p + 256)
    f = line_load(p + 320)
    g = line_load(p + 384)
    h = line_load(p + 448)
    if nt:
        line_store_nt(t, a)
        line_store_nt(t + 64, b)
        line_store_nt(t + 128, c)
        line_store_nt(t + 192, d)
        line_store_nt(t + 256, e)
        line_store_nt(t + 320, f)
        line_store_nt(t + 384, g)
        line_store_nt(t + 448, h)
    else:
        line_store(t, a)
        line_store(t + 64, b)
        line_store(t + 128, c)
        line_store(t + 192, d)
        line_store(t + 256, e)
        line_store(t + 320, f)
        line_store(t + 384, g)
        line_store(t + 448, h)


@inlined
def _move(nt: int, rows: int, lo: int, hi: int, unit: int, locality: int, distance: int) -> None:
    place, left, q, q_end = lo, distance, 0, 0
    if locality != 0:
        while place < hi and left >= word_load(rows + 24 * place + 16):
            left -= word_load(rows + 24 * place + 16)
            place += 1
        if place < hi:
            q = word_load(rows + 24 * place)
            q_end = q + word_load(rows + 24 * place + 16)
            q += left // unit * unit
    for i in range(lo, hi):
        p = word_load(rows + 24 * i)
        t = word_load(rows + 24 * i + 8)
        end = p + word_load(rows + 24 * i + 16)
        while p < end:
            if unit == 512:
                if q != 0:
                    ahead512(q, locality)
                _store512(nt, t, p)
            else:
                if q != 0:
                    ahead(q, locality)
                a = line_load(p)
                if nt:
                    line_store_nt(t, a)
                else:
                    line_store(t, a)
            barrier()
            p += unit
            t += unit
            if q != 0:
                q += unit
                if q == q_end:
                    place += 1
                    q = 0
                    if place < hi:
                        q = word_load(rows + 24 * place)
                        q_end = q + word_load(rows + 24 * place + 16)


@part
def move_fragments(
    kind: int, rows: int, lo: int, hi: int, unit: int, locality: int, distance: int, memcpy: int
) -> None:
    """Copy the fragments of rows ``lo..hi``; ``unit`` (512 or 64) divides every one of them."""
    if kind == MEMCPY:
        for i in range(lo, hi):
            row = rows + 24 * i
            call_memcpy(memcpy, word_load(row + 8), word_load(row), word_load(row + 16))
    elif kind == NT:
        if locality == 1:
            _move(1, rows, lo, hi, unit, 1, distance)
        elif locality == 2:
            _move(1, rows, lo, hi, unit, 2, distance)
        else:
            _move(1, rows, lo, hi, unit, 0, distance)
        drain()
    elif locality == 2:
        _move(0, rows, lo, hi, unit, 2, distance)
    else:
        _move(0, rows, lo, hi, unit, 0, distance)


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def moves_kernel(
    ctl: int, member: int, members: int, kind: int, rows: int, bounds: int, unit: int, locality: int, distance: int,
    reps: int, memcpy: int,
) -> int:  # fmt: skip
    """Copy this member's rows, ``bounds[member]`` to ``bounds[member + 1]``, ``reps`` times."""
    lo = word_load(bounds + 8 * member)
    hi = word_load(bounds + 8 * (member + 1))
    start = enter(ctl, member, members)
    if start < 0:
        return -1
    for _ in range(reps):
        move_fragments(kind, rows, lo, hi, unit, locality, distance, memcpy)
        barrier()
    return leave(ctl, member, members, start)


def aligned(rows: Rows) -> bool:
    """Return whether every target and size of ``rows`` is whole cache lines: what wide and non-temporal stores need."""
    return not bool((rows[:, 1:] % LINE).any())


def variants(rows: Rows) -> tuple[str, ...]:
    """Return the names whose best copies ``rows`` fastest: all of a gather copy, or memcpy alone for uneven rows."""
    return gather_variants("copy", LINE) if aligned(rows) else ("memcpy none",)


def shares(sizes: Rows, members: int) -> Rows:
    """Return int64 (members + 1,): where each member's fragments begin, split where the bytes are closest to even."""
    ends = np.concatenate(([0], np.cumsum(sizes)))
    goals = ends[-1] * np.arange(members + 1) // members
    cuts = np.searchsorted(ends, goals)
    before = np.maximum(cuts - 1, 0)
    chosen: Rows = np.where(goals - ends[before] < ends[cuts] - goals, before, cuts).astype(np.int64)
    return chosen


class FragmentCopy:
    """Copies fragment i of ``rows`` = (source address, target address, bytes), int64 of shape (n, 3), in order.

    ``variant`` is a name of :func:`variants`; ``bounds``, int64 (members + 1,), gives each member its part of the rows
    (default: even shares of the bytes). Rows and bounds are kept alive here. Raises UsageError for no rows, other
    arrays, sizes below 1, and a variant with wide stores where rows are not whole lines. The caller answers for the
    addresses and for targets that do not overlap.
    """

    def __init__(self, variant: str, rows: Rows, team: Team, bounds: Rows | None = None) -> None:
        if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1:] != (3,) or not rows.flags.c_contiguous:
            raise UsageError("not rows of fragments", where="kernels.moves", got=f"{rows.dtype} {rows.shape}")
        if not len(rows) or int(rows[:, 2].min()) < 1:
            raise UsageError("nothing to copy", where="kernels.moves", got=f"{len(rows)} rows", expected="bytes each")
        self.variant = parse(variant)
        if self.variant.kind not in (NT, PLAIN, MEMCPY):
            raise UsageError("not a way to copy", where="kernels.moves", got=variant)
        if self.variant.kind != MEMCPY and not aligned(rows):
            raise UsageError(
                "fragments are not whole cache lines", where="kernels.moves", got=variant, expected="memcpy none"
            )
        self.rows, self.team = rows, team
        self.bounds = shares(rows[:, 2], len(team)) if bounds is None else np.ascontiguousarray(bounds, np.int64)
        edges = self.bounds
        if len(edges) != len(team) + 1 or edges[0] != 0 or edges[-1] != len(rows) or (np.diff(edges) < 0).any():
            raise UsageError("not parts of the rows", where="kernels.moves", got=edges.tolist())
        self.unit = 512 if not bool((rows[:, 2] % 512).any()) else LINE
        self.link_bytes = int(rows[:, 2].sum())
        self.kernel = f"numba moves {variant}" if self.variant.kind != MEMCPY else "libc memcpy a fragment"
        self.code: Kernel = moves_kernel  # scripts/figures puts its C here

    def run(self, reps: int = 1) -> float:
        """Copy everything ``reps`` times in one kernel call; return the seconds of all. Raises UsageError below 1."""
        if reps < 1:
            raise UsageError("a run needs at least one pass", where="kernels.moves", got=reps)
        v = self.variant
        return self.team.run(
            self.code, v.kind, int(self.rows.ctypes.data), int(self.bounds.ctypes.data), self.unit, v.locality,
            v.distance, reps, libc.address_of("memcpy"),
        )  # fmt: skip
