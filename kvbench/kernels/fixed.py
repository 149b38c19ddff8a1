"""Fixed loops that touch no memory: how fast this core runs, beside what it reports (canaries).

``IntegerChain`` is one dependent chain, so its time is cycles; ``FmaChains`` keeps the FMA units full.
"""

from __future__ import annotations

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.intrinsics import line_fma32, line_splat32, line_store, sum_store
from kvbench.kernels.jit import kernel, numba
from kvbench.kernels.sync import OUTPUT, enter, leave
from kvbench.kernels.team import Team

STEPS = 1000  # of a repetition: about 1 us
MULTIPLIER, INCREMENT, FIRST = 6364136223846793005, 1442695040888963407, 0x9E3779B97F4A7C15
CHAINS = 6  # of sixteen floats: 6 zmm, 12 ymm or 24 q registers, within what each kind of CPU has
LANES = 16
FACTOR, ADDEND = 0.5, 1.0  # both steps of a * 0.5 + 1 are exact or round once: plain numpy gives the FMA's bits
uint64 = numba.uint64


@kernel("int64(int64, int64, int64, int64, uint64, uint64)")
def integer_kernel(ctl: int, member: int, members: int, steps: int, multiplier: int, first: int) -> int:
    """Leave the state of a linear congruential generator after ``steps`` steps in the output line."""
    x = first
    start = enter(ctl, member, members)
    if start < 0:
        return -1
    for _ in range(steps):
        x = x * multiplier + uint64(INCREMENT)
    sum_store(ctl + OUTPUT + 64 * member, x)
    return leave(ctl, member, members, start)


@kernel("int64(int64, int64, int64, int64, float32, float32, int64)")
def fma_kernel(ctl: int, member: int, members: int, steps: int, factor: float, addend: float, results: int) -> int:
    """Run ``CHAINS`` independent chains; leave chain k of this member as 16 floats at ``results``, line by line."""
    m = line_splat32(factor)
    n = line_splat32(addend)
    a = line_splat32(numba.float32(0.0))
    b = line_splat32(numba.float32(1.0))
    c = line_splat32(numba.float32(3.0))
    d = line_splat32(numba.float32(4.0))
    e = line_splat32(numba.float32(5.0))
    f = line_splat32(numba.float32(6.0))
    start = enter(ctl, member, members)
    if start < 0:
        return -1
    for _ in range(steps):
        a = line_fma32(a, m, n)
        b = line_fma32(b, m, n)
        c = line_fma32(c, m, n)
        d = line_fma32(d, m, n)
        e = line_fma32(e, m, n)
        f = line_fma32(f, m, n)
    out = results + member * CHAINS * 64
    line_store(out, a)
    line_store(out + 64, b)
    line_store(out + 128, c)
    line_store(out + 192, d)
    line_store(out + 256, e)
    line_store(out + 320, f)
    return leave(ctl, member, members, start)


class IntegerChain:
    """A chain of 64-bit multiply-adds on every member of ``team``: 4 cycles a step on most CPUs."""

    kernel = "numba dependent multiply-add, int64"

    def __init__(self, team: Team) -> None:
        self.team = team
        self.operations = STEPS  # steps a repetition and member
        self._steps = 0
        self._states: list[int] = []

    def run(self, reps: int = 1) -> float:
        """Do ``reps`` repetitions of 1,000 steps; return seconds. Raises UsageError below one."""
        self._steps = _steps(reps)
        self.team.outputs[:] = 0
        seconds = self.team.run(integer_kernel, self._steps, np.uint64(MULTIPLIER), np.uint64(FIRST))
        self._states = [int(v) for v in self.team.outputs[:, 0].view(np.uint64)]
        return seconds

    def verify(self) -> None:
        """Compare with the closed form of the generator. Raises VerifyError."""
        want = jump(FIRST, self._steps)
        for member, got in enumerate(self._states):
            if got != want:
                raise VerifyError("the integer chain is wrong", where=f"member {member}", got=got)
        if not self._states:
            raise VerifyError("nothing was run", where=self.kernel)


class FmaChains:
    """Independent single-precision FMA chains on every member of ``team``; ``flops`` counts 2 an FMA, all members."""

    kernel = f"numba {CHAINS} FMA chains, 16 x float32"

    def __init__(self, team: Team) -> None:
        self.team = team
        self.flops = STEPS * CHAINS * LANES * 2 * len(team)  # of a repetition
        self._results = np.zeros((len(team), CHAINS, LANES), np.float32)
        self._steps = 0

    def run(self, reps: int = 1) -> float:
        """Do ``reps`` repetitions of 1,000 steps; return seconds. Raises UsageError below one."""
        self._steps = _steps(reps)
        self._results[:] = -1.0
        return self.team.run(
            fma_kernel, self._steps, np.float32(FACTOR), np.float32(ADDEND), int(self._results.ctypes.data)
        )

    def verify(self) -> None:
        """Compare with numpy in float32, bit for bit. Raises VerifyError."""
        want = np.array([0, 1, 3, 4, 5, 6], np.float32)
        for _ in range(min(self._steps, 100)):  # 2 is reached, and stays, within 30 steps
            want = want * np.float32(FACTOR) + np.float32(ADDEND)
        if self._steps == 0 or not bool((self._results == want[None, :, None]).all()):
            raise VerifyError("the FMA chains are wrong", where=self.kernel)


def _steps(reps: int) -> int:
    if reps < 1:
        raise UsageError("a run needs at least one repetition", where="kernels.fixed", got=reps)
    return reps * STEPS


def jump(state: int, steps: int) -> int:
    """Return the generator's state after ``steps`` steps, by squaring the affine map (Brown 1994), modulo 2^64."""
    a, c, multiplier, increment = 1, 0, MULTIPLIER, INCREMENT
    while steps:
        if steps & 1:
            a, c = a * multiplier % 2**64, (c * multiplier + increment) % 2**64
        increment = increment * (multiplier + 1) % 2**64
        multiplier = multiplier * multiplier % 2**64
        steps >>= 1
    return (a * state + c) % 2**64
