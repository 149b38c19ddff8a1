"""What kernels of a team do around their work: meet, start the clock, work, meet again, stop the clock.

Control block of a team, in int64 words (one 64-byte line each, so that spinning on one disturbs no other):
0 arrived followers, 8 released, 16 finished followers, 24 abort, 32..34 addresses of clock_gettime, sched_yield, the
clock id, 40..41 a timespec, 64 + 8 * member the output line of a member. ``scripts/crosscheck.c`` uses the same layout.
"""

from __future__ import annotations

from kvbench.kernels.intrinsics import (
    atomic_add,
    atomic_load,
    atomic_store,
    barrier,
    call_clock,
    call_yield,
    pause,
    word_load,
)
from kvbench.kernels.jit import part

ARRIVED, RELEASED, FINISHED, ABORT = 0, 64, 128, 192  # byte offsets
CLOCK, YIELD, CLOCK_ID, TIMESPEC, OUTPUT = 256, 264, 272, 320, 512
SPINS = 2000  # about 50 us; then yield, for teams larger than the machine


@part
def clock_ns(ctl: int) -> int:
    """Return nanoseconds of the monotonic clock; only member 0 may call it (one timespec a team)."""
    call_clock(word_load(ctl + CLOCK), word_load(ctl + CLOCK_ID), ctl + TIMESPEC)
    barrier()
    now: int = word_load(ctl + TIMESPEC) * 1_000_000_000 + word_load(ctl + TIMESPEC + 8)
    return now


@part
def stamp(ctl: int, spec: int) -> int:
    """Return nanoseconds of the clock of the team; ``spec`` is a timespec that no other thread uses."""
    barrier()
    call_clock(word_load(ctl + CLOCK), word_load(ctl + CLOCK_ID), spec)
    barrier()
    now: int = word_load(spec) * 1_000_000_000 + word_load(spec + 8)
    return now


@part
def wait_for(ctl: int, word: int, target: int) -> bool:
    """Spin until the word at byte offset ``word`` reaches ``target``; False when the run was aborted."""
    spins = 0
    while atomic_load(ctl + word) < target:
        if atomic_load(ctl + ABORT) != 0:
            return False
        pause()
        spins += 1
        if spins > SPINS:
            call_yield(word_load(ctl + YIELD))
    return True


@part
def enter(ctl: int, member: int, members: int) -> int:
    """Meet all members; return the start time (member 0), 0 (others), or -1 when the run was aborted.

    Member 0 reads the clock once every follower spins inside its kernel, so waking threads costs no measured time.
    """
    if member == 0:
        if not wait_for(ctl, ARRIVED, members - 1):
            return -1
        start = clock_ns(ctl)
        atomic_store(ctl + RELEASED, 1)
        barrier()
        return start
    atomic_add(ctl + ARRIVED, 1)
    if not wait_for(ctl, RELEASED, 1):
        return -1
    barrier()
    return 0


@part
def leave(ctl: int, member: int, members: int, start: int) -> int:
    """Return the nanoseconds from release to the last arrival (member 0), 0 (others), -1 when aborted."""
    barrier()
    if member != 0:
        atomic_add(ctl + FINISHED, 1)
        return 0
    if not wait_for(ctl, FINISHED, members - 1):
        return -1
    return clock_ns(ctl) - start


@part
def share_start(total: int, member: int, members: int) -> int:
    """Return where ``member``'s part of ``total`` items begins; part ``members`` begins at ``total``."""
    return total * member // members


@part
def share_bytes(nbytes: int, member: int, members: int) -> int:
    """Return the byte offset where ``member``'s share begins: whole 64-byte lines, the last one takes the rest."""
    if member == members:
        return nbytes
    return nbytes // 64 * member // members * 64
