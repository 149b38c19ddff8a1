"""Canaries: small cases that run first in every run and say what state the machine was in (design 6.10).

They are rows of suite ``canary``, never results: they do not count for exit codes, progress or gates.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from kvbench.contract import axis
from kvbench.contract.axis import Profile
from kvbench.contract.bench import Bench, bench
from kvbench.contract.case import Case
from kvbench.measure import Measure

SUITE = "canary"
READ_BYTES = 256 << 20  # 4 x the largest LLC slice a guest usually sees; the row says in_llc where that is not enough
CHASE_BYTES = 64 << 20
_ONE = axis.threads(smoke=["1"], quick=["1"], full=["1"])
_ONE_ALL = axis.threads(smoke=["1", "all"], quick=["1", "all"], full=["1", "all"])
_SECONDS: Mapping[Profile, float] = {"smoke": 0.2, "quick": 0.9, "full": 2.0}


@bench(version=1, metric="loop_time", unit="s", better="lower", threads=_ONE)
def cpu_loop(case: Case, measure: Measure) -> None:
    """A chain of dependent integer operations: the core's clock, and nothing else."""
    from kvbench.kernels.fixed import IntegerChain

    work = IntegerChain(measure.team(case.threads))
    measure(work.run, ops=work.operations, verify=work.verify, kernel=work.kernel, gate="cpu")


@bench(version=1, metric="fma_rate", unit="FLOP/s", better="higher", threads=_ONE)
def fma(case: Case, measure: Measure) -> None:
    """Independent fused multiply-add chains: the vector units."""
    from kvbench.kernels.fixed import FmaChains

    work = FmaChains(measure.team(case.threads))
    measure(work.run, ops=work.flops, verify=work.verify, kernel=work.kernel, gate="cpu")


@bench(version=1, metric="bandwidth", unit="B/s", better="higher", threads=_ONE_ALL)
def memory_read(case: Case, measure: Measure) -> None:
    """A sequential read of host memory far larger than the caches."""
    from kvbench.kernels.stream import Stream

    team = measure.team(case.threads)
    buffer = measure.sources(1, READ_BYTES, "thp")[0]
    measure.working_set(READ_BYTES)
    work = Stream("read", [buffer.address], READ_BYTES, team)
    measure(work.run, link=work.link_bytes, verify=work.verify, kernel=work.kernel)


@bench(version=1, metric="latency", unit="s", better="lower", threads=_ONE)
def memory_latency(case: Case, measure: Measure) -> None:
    """A random pointer chase through host memory."""
    from kvbench.kernels.chase import Chase

    team = measure.team(case.threads)
    buffer = measure.target(CHASE_BYTES, "thp")
    work = Chase(buffer.address, CHASE_BYTES, team, seed=measure.context.seed)
    measure.working_set(CHASE_BYTES)
    work.run(work.nodes)  # which lines a cache holds is then the same in every run
    measure(work.run, verify=work.verify, kernel=work.kernel)


@functools.cache
def benches() -> Mapping[str, Bench]:
    """Return the canary benches by name."""
    return {b.name: b.in_suite(SUITE, __file__) for b in (cpu_loop, fma, memory_read, memory_latency)}


def expected_seconds(profile: Profile) -> float:
    """Return about how long the canaries of one run take."""
    return _SECONDS[profile] * sum(len(list(b.cases(profile))) for b in benches().values())
