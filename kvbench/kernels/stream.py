"""Sequential operations on whole buffers: read, write, copy_plain, memcpy, nt_copy, triad (STREAM byte counting)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.kernels import libc, passes
from kvbench.kernels.intrinsics import barrier, call_memcpy, sum_store
from kvbench.kernels.jit import kernel, numba
from kvbench.kernels.passes import copy_nt_pass, copy_pass, read_pass, triad_pass, write_pass
from kvbench.kernels.raw import bytes_at, chunks, first_difference, words_sum
from kvbench.kernels.sync import OUTPUT, enter, leave, share_bytes
from kvbench.kernels.team import Kernel, Team

OPS = ("read", "write", "copy_plain", "memcpy", "nt_copy", "triad")
ARRAYS = {"read": 1, "write": 1, "copy_plain": 2, "memcpy": 2, "nt_copy": 2, "triad": 3}
READ, WRITE, COPY_PLAIN, MEMCPY, NT_COPY, TRIAD = range(6)
uint64 = numba.uint64


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, uint64, int64)")
def stream_kernel(
    ctl: int,
    member: int,
    members: int,
    op: int,
    a: int,
    b: int,
    c: int,
    nbytes: int,
    reps: int,
    first: int,
    memcpy: int,
) -> int:
    """Do ``reps`` passes over this member's share and leave its read checksum in its output line."""
    lo = share_bytes(nbytes, member, members)
    size = share_bytes(nbytes, member + 1, members) - lo
    total = uint64(0)
    start = enter(ctl, member, members)
    if start < 0:
        return -1
    for rep in range(reps):
        if op == READ:
            total += read_pass(a + lo, size)
        elif op == WRITE:
            write_pass(a + lo, size, first + uint64(rep) + uint64(lo // 8) * uint64(passes.STEP))
        elif op == COPY_PLAIN:
            copy_pass(a + lo, b + lo, size)
        elif op == MEMCPY:
            call_memcpy(memcpy, a + lo, b + lo, size)
        elif op == NT_COPY:
            copy_nt_pass(a + lo, b + lo, size)
        else:
            triad_pass(a + lo, b + lo, c + lo, size, float(1 << (rep & 7)))
        barrier()
    elapsed = leave(ctl, member, members, start)
    sum_store(ctl + OUTPUT + 64 * member, total)
    return elapsed


class Stream:
    """``op`` over ``nbytes`` at the addresses in ``buffers``, split over ``team`` in whole 64-byte lines.

    ``buffers``: read ``(src,)``, write ``(dst,)``, copies ``(dst, src)``, triad ``(a, b, c)`` with a = b + s * c on
    float64. Every array has ``nbytes`` bytes; the caller owns, fills (random; float64 in [1, 2) for triad) and keeps
    them. Destinations are overwritten here so that nothing of an earlier buffer can pass the check.

    ``link_bytes`` counts one pass the STREAM way: read and write 1x, copies 2x, triad 3x ``nbytes``, no write-allocate.
    Raises UsageError for an unknown op, a wrong number of buffers, overlapping buffers, no bytes, or a triad whose size
    is not a multiple of 8.
    """

    def __init__(self, op: str, buffers: Sequence[int], nbytes: int, team: Team) -> None:
        if op not in OPS:
            raise UsageError("unknown stream operation", where="op", got=op, expected=", ".join(OPS))
        if len(buffers) != ARRAYS[op]:
            raise UsageError(f"{op} needs {ARRAYS[op]} buffers", where="kernels.stream", got=len(buffers))
        if nbytes <= 0 or (op == "triad" and nbytes % 8):
            raise UsageError(
                f"cannot {op} this many bytes", where="kernels.stream", got=nbytes, expected="float64 items"
            )
        ordered = sorted(buffers)
        if any(b - a < nbytes for a, b in pairwise(ordered)):
            raise UsageError("buffers overlap", where="kernels.stream", got=[hex(b) for b in buffers])
        self.op, self.nbytes, self.team = op, nbytes, team
        self.buffers = tuple(int(b) for b in buffers)
        self.link_bytes = ARRAYS[op] * nbytes
        self.kernel = f"numba {op} 64-byte lines" if op != "memcpy" else "libc memcpy"
        self.code: Kernel = stream_kernel  # scripts/crosscheck puts its C here
        self._slots = (*self.buffers, 0, 0)[:3]
        self._rng = np.random.default_rng(0x5EED)
        self._reps = 0
        self._first = 0
        self._sums: list[int] = []
        if op != "read":
            for piece in chunks(nbytes):
                bytes_at(self.buffers[0], nbytes)[piece] = 0xA5
        self._edges = self._probe_offsets()

    def _probe_offsets(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return byte offsets spoilt before every run: both ends and the middle of every member's share."""
        n = len(self.team)
        edges = [self.nbytes // 64 * member // n * 64 for member in range(n)] + [self.nbytes]
        marks = {at for lo, hi in pairwise(edges) for at in (lo, (lo + hi) // 2, hi - 1)}
        return np.array(sorted(at for at in marks if 0 <= at < self.nbytes), np.int64)

    def _spoil(self) -> None:
        """Make the destination wrong at the probe offsets, whatever stands there.

        Turning the bytes over would not do: after two runs of a kernel that stopped working they would be right again.
        """
        target = bytes_at(self.buffers[0], self.nbytes)
        if len(self.buffers) == 2:
            target[self._edges] = ~bytes_at(self.buffers[1], self.nbytes)[self._edges]
        else:
            target[self._edges] = 0xFF  # no float64 in [2, 2^9) ends in it, and every pattern of a write is another

    def run(self, reps: int = 1) -> float:
        """Do ``reps`` passes inside one kernel call; return the seconds of all of them. Raises UsageError below one."""
        if reps < 1:
            raise UsageError("a run needs at least one pass", where="kernels.stream", got=reps)
        if self.op != "read":
            self._spoil()
        self._reps, self._first = reps, int(self._rng.integers(0, 2**64, dtype=np.uint64))
        self.team.outputs[:] = 0
        op, memcpy = OPS.index(self.op), libc.address_of("memcpy")
        seconds = self.team.run(self.code, op, *self._slots, self.nbytes, reps, np.uint64(self._first), memcpy)
        self._sums = [int(v) for v in self.team.outputs[:, 0].view(np.uint64)]
        return seconds

    def verify(self) -> None:
        """Check what the last run left, to the last byte, with numpy. Raises VerifyError when it is not right.

        The spoilt bytes of :meth:`run` make sure that the last run wrote every share; a read's checksum covers every
        pass of the last run. Call it before anything else writes the destination.
        """
        if self._reps == 0:
            raise VerifyError("nothing was run", where=self.kernel)
        bad = self._wrong_read() if self.op == "read" else self._wrong_write()
        if bad is not None:
            raise VerifyError(f"the payload of {self.op} is wrong", where=f"{self.nbytes} bytes", got=bad)

    def _wrong_read(self) -> str | None:
        data = bytes_at(self.buffers[0], self.nbytes)
        whole = self.nbytes // 64 * 64
        want = sum(words_sum(data[:whole][piece]) for piece in chunks(whole))
        want += int(data[whole:].sum(dtype=np.uint64))
        if want % 2**64 == 0:
            return "sum zero: a read of this cannot be told from no read"
        got = sum(self._sums) % 2**64
        want = want * self._reps % 2**64
        return None if got == want else f"checksum {got:#x}, not {want:#x}"

    def _wrong_write(self) -> str | None:
        data = bytes_at(self.buffers[0], self.nbytes)
        for piece in chunks(self.nbytes):
            want = self._expected(piece)
            at = first_difference(data[piece], want)
            if at is not None:
                return f"byte {piece.start + at} is {data[piece][at]:#04x}, not {want[at]:#04x}"
        return None

    def _expected(self, piece: slice) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return what the destination must hold in ``piece``, which starts at a multiple of 8 MiB."""
        size = piece.stop - piece.start
        if self.op == "write":
            words = np.arange(piece.start // 8, piece.start // 8 + (size + 7) // 8, dtype=np.uint64)
            words = words * np.uint64(passes.STEP) + np.uint64((self._first + self._reps - 1) % 2**64)
            return words.view(np.uint8)[:size]
        if self.op == "triad":
            b, c = (bytes_at(address + piece.start, size).view(np.float64) for address in self.buffers[1:])
            return (b + float(1 << ((self._reps - 1) & 7)) * c).view(np.uint8)  # a power of two: exact, like the FMA
        return bytes_at(self.buffers[1] + piece.start, size)
