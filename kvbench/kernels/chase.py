"""Latency: a random pointer chase, alone or while other members load the memory it runs through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.kernels.intrinsics import (
    atomic_load,
    atomic_store,
    barrier,
    opaque,
    pause,
    sum_store,
    word_load,
    word_store,
)
from kvbench.kernels.jit import kernel, numba
from kvbench.kernels.passes import read_pass
from kvbench.kernels.raw import bytes_at
from kvbench.kernels.sync import ABORT, OUTPUT, RELEASED, clock_ns, enter, share_bytes, wait_for
from kvbench.kernels.team import Kernel, Team

NODE = 64  # bytes; one node a cache line, wherever lines are at most this long
CHECKPOINTS = 4096
LANES = 16  # walks of the check that run side by side; each is latency bound on its own
STOP = 2
uint64 = numba.uint64
Addresses = np.ndarray[Any, np.dtype[np.int64]]


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def chase_kernel(
    ctl: int, member: int, members: int, position: int, hops: int, load: int, nbytes: int, block: int, delay: int
) -> int:
    """Member 0 follows ``hops`` pointers; the others stream reads over their shares of ``nbytes`` at ``load``.

    The window opens once every loader has finished a block. Output lines: member 0 leaves its last position and the
    bytes loaded inside the window, the others the bytes and checksum of all they read. A loader begins at the offset
    into its share that stands in word 2 of its line, and leaves there where the next run goes on.
    """
    out = ctl + OUTPUT + 64 * member
    if enter(ctl, member, members) < 0:
        return -1
    if member == 0:
        for other in range(1, members):
            if not wait_for(ctl, OUTPUT + 64 * other, 1):
                return -1
        before = 0
        for other in range(1, members):
            before += atomic_load(ctl + OUTPUT + 64 * other)
        p = position
        start = clock_ns(ctl)
        for _ in range(hops // 8):
            p = word_load(word_load(word_load(word_load(p))))
            p = word_load(word_load(word_load(word_load(p))))
        for _ in range(hops % 8):
            p = word_load(p)
        p = opaque(p)  # the clock may not be read before the last pointer has arrived
        elapsed = clock_ns(ctl) - start
        after = 0
        for other in range(1, members):
            after += atomic_load(ctl + OUTPUT + 64 * other)
        atomic_store(ctl + RELEASED, STOP)
        word_store(out, p)
        word_store(out + 8, after - before)
        return elapsed
    lo = share_bytes(nbytes, member - 1, members - 1)
    hi = share_bytes(nbytes, member, members - 1)
    at = lo + word_load(out + 16)
    done = 0
    total = uint64(0)
    while atomic_load(ctl + RELEASED) < STOP and atomic_load(ctl + ABORT) == 0:
        size = min(block, hi - at)
        total += read_pass(load + at, size)
        done += size
        atomic_store(out, done)
        at += size
        if at >= hi:
            at = lo
        for _ in range(delay):
            pause()
    sum_store(out + 8, total)
    word_store(out + 16, at - lo)
    return 0


@kernel("int64(int64, int64, int64, int64, int64, int64, int64)")
def tour_kernel(starts: int, count: int, stride: int, last: int, base: int, end: int, lanes: int) -> int:
    """Walk all segments of the tour, ``LANES`` at a time; return how many hops were right before the first fault.

    Segment k begins at the k-th of ``count`` addresses at ``starts`` and takes ``stride`` hops (the final one
    ``last``) to the next segment's start. Meeting the tour's own start earlier is a fault: the cycle would be shorter.
    """
    first = word_load(starts)
    good = 0
    group = 0
    while group < count:
        width = min(LANES, count - group)
        for lane in range(width):
            word_store(lanes + 8 * lane, word_load(starts + 8 * (group + lane)))
        for hop in range(stride):
            for lane in range(width):
                final = group + lane == count - 1
                if final and hop >= last:
                    continue
                p = word_load(lanes + 8 * lane)
                if p < base or p >= end or (p - base) % NODE != 0:
                    return good
                p = word_load(p)
                if p == first and not (final and hop == last - 1):
                    return good
                word_store(lanes + 8 * lane, p)
                good += 1
        for lane in range(width):
            if word_load(lanes + 8 * lane) != word_load(starts + 8 * ((group + lane + 1) % count)):
                return good - 1
        group += LANES
    barrier()
    return good


@kernel("int64(int64, int64)")
def walk_kernel(position: int, hops: int) -> int:
    """Return where ``hops`` pointers from ``position`` lead."""
    p = position
    for _ in range(hops):
        p = word_load(p)
    return p


class Chase:
    """A single random cycle through every 64-byte line of ``nbytes`` at ``address``, followed by member 0 of ``team``.

    The cycle is uniform among all single cycles (what Sattolo's algorithm draws): the lines in a random order, each
    pointing to the next. Each run goes on where the last one stopped; starting over would find its nodes in the caches.
    Latency is seconds / hops. Raises UsageError for fewer than two nodes or an address that is not a multiple of 8, or
    a team of more than one.
    """

    kernel = "numba pointer chase, 64-byte nodes"

    def __init__(self, address: int, nbytes: int, team: Team, *, seed: int = 0) -> None:
        if nbytes < 2 * NODE or address % 8:
            raise UsageError(
                "a chase needs two 64-byte nodes at an aligned address", where="kernels.chase", got=(nbytes, address)
            )
        self.address, self.nbytes, self.team = address, nbytes, team
        self.code: Kernel = chase_kernel  # scripts/crosscheck puts its C here
        self.nodes = nbytes // NODE
        self._checkpoints, self._stride = _build(address, self.nodes, seed)
        self._position = int(self._checkpoints[0])
        self._hops = 0

    def run(self, hops: int) -> float:
        """Follow ``hops`` pointers; return seconds. Raises UsageError below one, or for a team of more than one."""
        if len(self.team) != 1:
            raise UsageError("an unloaded chase needs a team of one", where="kernels.chase", got=len(self.team))
        return self.follow(self.team, hops, 0, 0, 64, 0)

    def follow(
        self, team: Team, hops: int, load: int, nbytes: int, block: int, delay: int, offsets: Addresses | None = None
    ) -> float:
        """Run the chase on member 0 of ``team`` with the others loading (see :class:`LoadedChase`); return seconds.

        ``offsets``, int64, shape (loaders,): where each loader begins in its share; holds where it stopped afterwards.
        """
        if hops < 1:
            raise UsageError("a run needs at least one hop", where="kernels.chase", got=hops)
        team.outputs[:] = 0
        if offsets is not None:
            team.outputs[1:, 2] = offsets
        seconds = team.run(self.code, self._position, hops, load, nbytes, block, delay)
        if offsets is not None:
            offsets[:] = team.outputs[1:, 2]
        self._position = int(team.outputs[0, 0])
        self._hops += hops
        return seconds

    def verify(self) -> None:
        """Tour the whole cycle once and check that the runs stopped where their hops lead. Raises VerifyError.

        First return to the start after exactly ``nodes`` hops means that every node was visited exactly once.
        """
        if self._hops == 0:
            raise VerifyError("nothing was run", where=self.kernel)
        count, end = len(self._checkpoints), self.address + self.nodes * NODE
        last = self.nodes - self._stride * (count - 1)
        lanes = np.zeros(LANES, np.int64)
        starts = self._checkpoints.ctypes.data
        good = tour_kernel(starts, count, self._stride, last, self.address, end, lanes.ctypes.data)
        if good != self.nodes:
            raise VerifyError("the chase is not one cycle through all nodes", where=self.kernel, got=f"{good} hops")
        segment, rest = divmod(self._hops % self.nodes, self._stride)
        expected = walk_kernel(int(self._checkpoints[segment]), rest)
        if self._position != expected:
            raise VerifyError("the chase stopped at another node than its hops lead to", where=self.kernel)


def _build(address: int, nodes: int, seed: int) -> tuple[Addresses, int]:
    """Write the cycle; return the addresses of every ``stride``-th node on it, and ``stride``."""
    kind = np.uint32 if nodes < 2**32 else np.uint64
    order = np.random.default_rng(seed).permutation(np.arange(nodes, dtype=kind))
    slots = bytes_at(address, nodes * NODE).view(np.int64)[:: NODE // 8]
    piece = 1 << 18  # indices of a piece stay in L2; whole-array temporaries would cost four times the order itself
    for start in range(0, nodes, piece):
        here = order[start : start + piece]
        there = order[start + 1 : start + piece + 1]
        if len(there) < len(here):
            there = np.append(there, order[0])
        slots[here] = there.astype(np.int64) * NODE + address
    stride = -(-nodes // CHECKPOINTS)
    return order[::stride].astype(np.int64) * NODE + address, stride


@dataclass(frozen=True, slots=True)
class LoadedSample:
    """``hops`` dependent loads took ``seconds`` while the other members read ``load_bytes`` in the same window.

    ``load_bytes`` is a count of whole blocks: exact to one block a loader.
    """

    seconds: float
    hops: int
    load_bytes: int

    @property
    def latency(self) -> float:
        """Seconds a hop."""
        return self.seconds / self.hops

    @property
    def load_rate(self) -> float:
        """Bytes a second read by the loaders."""
        return self.load_bytes / self.seconds


class LoadedChase:
    """``chase`` on member 0 of ``team`` while the other members read ``nbytes`` at ``load``, each its own share.

    ``block`` bytes (a multiple of 64) are read between two pauses of ``delay`` spin-loop hints; the hint's length is
    the CPU's own, so a load is known by the bytes it achieved, never by its delay. Each loader goes on where its last
    run stopped: windows are short, and starting over would load the same few megabytes from a cache.

    Raises Unavailable for a team of one and UsageError for a share below 64 bytes, a block that is not a multiple of
    64 or a negative delay.
    """

    kernel = "numba pointer chase, loaded by streaming reads"

    def __init__(self, chase: Chase, load: int, nbytes: int, team: Team, *, block: int = 16384, delay: int = 0) -> None:
        loaders = len(team) - 1
        if loaders < 1:
            raise Unavailable("loaded latency needs a second CPU", where="kernels.chase", got=len(team))
        usable = nbytes // 64 * 64
        if block < 64 or block % 64 or usable // loaders < 64 or delay < 0:
            raise UsageError(
                "cannot load with this block", where="kernels.chase", got=(block, nbytes, delay),
                expected="a block of a multiple of 64 bytes, 64 bytes a loader, a delay of 0 or more",
            )  # fmt: skip
        self.chase, self.load, self.nbytes, self.team = chase, load, usable, team
        self.block, self.delay = block, delay
        self._offsets = np.zeros(loaders, np.int64)
        self._loads: list[tuple[int, int, int]] = []  # first offset, bytes and checksum of each loader in the last run

    def sample(self, hops: int) -> LoadedSample:
        """Follow ``hops`` pointers under load."""
        begun = self._offsets.tolist()
        seconds = self.chase.follow(self.team, hops, self.load, self.nbytes, self.block, self.delay, self._offsets)
        rows = self.team.outputs[1:]
        self._loads = [(at, int(row[0]), int(row[1]) % 2**64) for at, row in zip(begun, rows, strict=True)]
        return LoadedSample(seconds, hops, int(self.team.outputs[0, 1]))

    def run(self, hops: int) -> float:
        """Follow ``hops`` pointers under load; return seconds."""
        return self.sample(hops).seconds

    def verify(self) -> None:
        """Check the cycle and that the loaders read in the last run what they counted. Raises VerifyError."""
        if not self._loads:
            raise VerifyError("nothing was run", where=self.kernel)
        loaders = len(self.team) - 1
        lines = self.nbytes // 64
        for member, (begun, done, checksum) in enumerate(self._loads, 1):
            lo, hi = (lines * m // loaders * 64 for m in (member - 1, member))
            words = np.roll(bytes_at(self.load + lo, hi - lo).view(np.uint64), -begun // 8)
            rounds, rest = divmod(done, hi - lo)
            want = rounds * int(words.sum(dtype=np.uint64)) + int(words[: rest // 8].sum(dtype=np.uint64))
            if done == 0 or checksum != want % 2**64:
                raise VerifyError("a loader did not read the bytes it counted", where=f"member {member}", got=rest)
        self.chase.verify()
