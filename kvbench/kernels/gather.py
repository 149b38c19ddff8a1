"""Fragments of a big buffer in a random order: the measured ceiling of every paged reader and mover.

Hardware prefetchers do not follow a jump from one small fragment to the next (4 KiB fragments read at half the speed
with them alone), so the ceiling is the best of several software prefetches: at a distance in bytes ahead in the stream
of fragments, into L1 or L2. (Non-temporal prefetch never won on Zen 4 and is left out: each one is compiled.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.kernels import libc
from kvbench.kernels.gather_passes import MEMCPY, NT, PLAIN, READ, copy_fragments, read_fragments
from kvbench.kernels.intrinsics import barrier, sum_store
from kvbench.kernels.jit import kernel, numba
from kvbench.kernels.raw import bytes_at
from kvbench.kernels.sync import OUTPUT, enter, leave, share_start
from kvbench.kernels.team import Kernel, Team

OPS = ("read", "copy")
uint64 = numba.uint64
Index = np.ndarray[Any, np.dtype[np.int64]]
_KINDS = {"read": READ, "plain": PLAIN, "nt": NT, "memcpy": MEMCPY}
_LOCALITY = {"l1": 1, "l2": 2}


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to gather: ``kind`` read | plain | nt | memcpy (the stores); prefetch ``distance`` bytes ahead.

    ``locality``: 0 no prefetch, 1 into L1, 2 into L2.
    """

    name: str
    kind: int
    locality: int
    distance: int


_ALL = {
    "read": ("read none", "read l1+1024", "read l1+4096", "read l2+4096", "read l2+16384"),
    "copy": (
        *("plain none", "plain l2+4096", "memcpy none"),
        *("nt none", "nt l1+1024", "nt l1+4096", "nt l2+4096", "nt l2+16384"),
    ),
}


def parse(name: str) -> Variant:
    """Return the variant called ``name``. Raises UsageError for an unknown one."""
    if not any(name in names for names in _ALL.values()):
        raise UsageError("unknown gather variant", where="variant", got=name, expected="a name of variants()")
    kind, _, prefetch = name.partition(" ")
    locality, _, distance = prefetch.partition("+")
    return Variant(name, _KINDS[kind], _LOCALITY.get(locality, 0), int(distance or 0))


def variants(op: str, fragment: int) -> tuple[str, ...]:
    """Return the names whose best is the ceiling of ``op`` (read | copy) at ``fragment`` bytes.

    Raises UsageError for another op or a fragment that is not a multiple of 64.
    """
    if op not in OPS:
        raise UsageError("unknown gather operation", where="op", got=op, expected="read or copy")
    _check_fragment(fragment)
    return _ALL[op]


def _check_fragment(fragment: int) -> None:
    if fragment < 64 or fragment % 64:
        raise UsageError("fragment", where="kernels.gather", got=fragment, expected="a multiple of 64 bytes")


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def gather_kernel(
    ctl: int, member: int, members: int, kind: int, dst: int, src: int, index: int, count: int, fragment: int,
    locality: int, distance: int, reps: int, memcpy: int,
) -> int:  # fmt: skip
    """Gather this member's part of the index ``reps`` times; a read leaves its two checksums in the output line."""
    lo = share_start(count, member, members)
    hi = share_start(count, member + 1, members)
    total = uint64(0)
    mixed = uint64(0)
    start = enter(ctl, member, members)
    if start < 0:
        return -1
    for _ in range(reps):
        if kind == READ:
            plain, weighted = read_fragments(src, index, lo, hi, fragment, locality, distance)
            total += plain
            mixed += weighted
        else:
            copy_fragments(kind, dst, src, index, lo, hi, fragment, locality, distance, memcpy)
        barrier()
    elapsed = leave(ctl, member, members, start)
    sum_store(ctl + OUTPUT + 64 * member, total)
    sum_store(ctl + OUTPUT + 64 * member + 8, mixed)
    return elapsed


class Gather:
    """Read or copy the fragments ``index`` (int64, shape (count,), units of ``fragment`` bytes) of ``src``, in order.

    ``variant`` is a name of :func:`variants`. A copy packs fragment ``index[i]`` at ``dst + i * fragment``; ``dst`` is
    a multiple of 64 and holds count * fragment bytes. Members take contiguous parts of the index.

    ``link_bytes`` counts one pass: the payload once, for a read and for a copy (a copy crosses the bus at least
    twice: multiply before comparing it with a stream copy). Raises UsageError for a bad fragment, an index that is
    empty, not contiguous int64, out of range or names a fragment twice, or buffers that are not aligned or overlap.
    """

    def __init__(
        self, variant: str, src: int, nbytes: int, fragment: int, index: Index, team: Team, *, dst: int | None = None
    ) -> None:
        self.variant = parse(variant)
        _check_fragment(fragment)
        self._check_index(index, nbytes // fragment)
        self.op = "read" if self.variant.kind == READ else "copy"
        self.link_bytes = len(index) * fragment
        if src % 8:
            raise UsageError("source address", where="kernels.gather", got=hex(src), expected="a multiple of 8")
        if self.op == "copy" and (dst is None or dst % 64 or (dst < src + nbytes and src < dst + self.link_bytes)):
            raise UsageError(
                "destination", where="kernels.gather", got=dst, expected="a multiple of 64 apart from the source"
            )
        self.src, self.dst, self.fragment, self.index, self.team = src, dst or 0, fragment, index, team
        self.nbytes = nbytes
        self.kernel = f"numba gather {variant}" if self.variant.kind != MEMCPY else "libc memcpy a fragment"
        self.code: Kernel = gather_kernel  # scripts/crosscheck puts its C here
        self._reps = 0
        self._sums: list[int] = []
        if self.op == "copy":
            bytes_at(self.dst, self.link_bytes)[:] = 0xA5

    @staticmethod
    def _check_index(index: Index, fragments: int) -> None:
        good = index.dtype == np.int64 and index.ndim == 1 and index.flags.c_contiguous and len(index) > 0
        if not good or int(index.min()) < 0 or int(index.max()) >= fragments:
            raise UsageError(
                "index", where="kernels.gather", got=f"{index.dtype} {index.shape}",
                expected=f"contiguous int64 numbers of 0 to {fragments - 1}",
            )  # fmt: skip
        seen = np.zeros(fragments, bool)
        seen[index] = True
        if int(seen.sum()) != len(index):
            raise UsageError("the index names a fragment twice", where="kernels.gather", got=f"{len(index)} entries")

    def _edges(self) -> Index:
        n, count = len(self.team), len(self.index)
        parts = [(count * m // n, count * (m + 1) // n) for m in range(n)]
        size = self.fragment
        marks = {at for lo, hi in parts if hi > lo for at in (lo * size, (lo + hi) // 2 * size, hi * size - 1)}
        return np.array(sorted(marks), np.int64)

    def _spoil(self) -> None:
        """Make the destination wrong at both ends and in the middle of every member's part, whatever stands there."""
        at = self._edges()
        wanted = bytes_at(self.src, self.nbytes)[self.index[at // self.fragment] * self.fragment + at % self.fragment]
        bytes_at(self.dst, self.link_bytes)[at] = ~wanted

    def run(self, reps: int = 1) -> float:
        """Gather everything ``reps`` times in one kernel call; return the seconds of all. Raises UsageError below 1."""
        if reps < 1:
            raise UsageError("a run needs at least one pass", where="kernels.gather", got=reps)
        if self.op == "copy":
            self._spoil()
        self._reps = reps
        self.team.outputs[:] = 0
        v = self.variant
        seconds = self.team.run(
            self.code, v.kind, self.dst, self.src, int(self.index.ctypes.data), len(self.index), self.fragment,
            v.locality, v.distance, reps, libc.address_of("memcpy"),
        )  # fmt: skip
        self._sums = self.team.outputs[:, :2].view(np.uint64).sum(axis=0, dtype=np.uint64).tolist()
        return seconds

    def verify(self) -> None:
        """Check the last run with numpy. Raises VerifyError.

        Read: the sum of all words, and the sum of each fragment's first word times its place in the order plus one, so
        that reading the right bytes in another order fails too. Copy: the destination, to the last byte.
        """
        if self._reps == 0:
            raise VerifyError("nothing was run", where=self.kernel)
        words = bytes_at(self.src, self.nbytes // self.fragment * self.fragment).view(np.uint64)
        rows = words.reshape(-1, self.fragment // 8)
        step = max(1, (8 << 20) // self.fragment)
        copied = self.op == "copy"
        out = bytes_at(self.dst, self.link_bytes).view(np.uint64).reshape(-1, rows.shape[1]) if copied else None
        total = mixed = 0
        for start in range(0, len(self.index), step):
            wanted = rows[self.index[start : start + step]]
            if out is not None:
                bad = np.flatnonzero((out[start : start + step] != wanted).any(axis=1))
                if len(bad):
                    raise VerifyError("a fragment was not copied", where=self.kernel, got=f"entry {start + bad[0]}")
                continue
            total += int(wanted.sum(dtype=np.uint64))
            places = np.arange(start + 1, start + 1 + len(wanted), dtype=np.uint64)
            mixed += int((wanted[:, 0] * places).sum(dtype=np.uint64))
        if out is None:
            if 0 in (total % 2**64, mixed % 2**64):
                raise VerifyError("sum zero: a read of this cannot be told from no read", where=self.kernel)
            want = [total * self._reps % 2**64, mixed * self._reps % 2**64]
            if self._sums != want:
                raise VerifyError("the checksum of a gather read is wrong", where=self.kernel, got=self._sums)
