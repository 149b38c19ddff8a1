"""T13, T14, T21, T22, T58: what time, throttling, a lazy candidate, a tool or the order of things does to samples."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.contract.case import Case
from kvbench.errors import KvbenchError
from kvbench.machine.probe import ROOT, read_fields
from kvbench.timing.budget import BUDGETS
from kvbench.timing.sampler import sample, sample_pair
from kvbench.timing.samples import Samples
from kvbench.timing.traps.bed import Bed, PathBroken, brief
from kvbench.timing.traps.record import Finding, Number, check, unknown
from kvbench.units import MiB

if TYPE_CHECKING:
    from kvbench.measure import Measure
    from kvbench.memory.payload import Kind

DRIFT = 0.03  # traps.md T13
END = 0.1  # the share of samples compared at either end
LOOKS = 3
ORDER_BIAS = 0.01
LAZY = ("read", "write", "copy_plain", "memcpy", "triad")
# Variables by which a profiler, tracer or debugger gets into a process, or makes every launch wait.
TOOL_VARIABLES = (
    "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "CUDA_PROFILE", "COMPUTE_PROFILE", "CUDA_LAUNCH_BLOCKING",
    "NSYS_PROFILING_SESSION_ID", "NV_NSIGHT_INJECTION_PORT_BASE", "ROCP_TOOL_LIB", "HSA_TOOLS_LIB", "LD_PRELOAD",
    "LD_AUDIT",
)  # fmt: skip


def told(seconds: Callable[[int], float]) -> Callable[[int], float]:
    """Return a run whose k-th call lasts, and says it lasted, ``seconds(k)`` a pass: windows known to the digit."""
    calls = [0]

    def run(reps: int) -> float:
        window = seconds(calls[0]) * reps
        calls[0] += 1
        end = time.perf_counter() + window
        while time.perf_counter() < end:
            pass
        return window

    return run


def _ends(taken: Samples) -> tuple[float, float]:
    """Return the medians of the first and the last tenth of the samples, in seconds."""
    count = max(1, int(END * len(taken.seconds)))
    return float(np.median(taken.seconds[:count])), float(np.median(taken.seconds[-count:]))


def drift(samples: int = 60) -> Finding:
    """T13: the last tenth of samples of an integer chain over the first; is a drift made on purpose told?"""
    from kvbench.kernels.fixed import IntegerChain

    threshold = f"within {DRIFT:.0%}, or flagged drifting; a drift made on purpose is flagged"
    limits = brief(BUDGETS["smoke"], samples=samples, block_seconds=1e-3)
    growing = sample(told(lambda call: 200e-6 * (1.0 + 0.004 * call)), limits, gate=None)
    first, last = _ends(growing)
    if "drifting" not in growing.flags:
        return check(
            False, Number("last tenth / first tenth, slowed on purpose", last / first, "1"), Number("steady", 1.0, "1"),
            threshold, "samples that grow all the time carry no flag",
        )  # fmt: skip
    bed = Bed()
    with bed.team() as team:
        for _ in range(LOOKS):  # other work on a shared machine comes and goes, a clock that ramps does so every time
            taken = sample(IntegerChain(team).run, limits, tids=team.tids)
            if taken.summary is None:
                raise PathBroken(taken.reason, where="sample")
            first, last = _ends(taken)
            quiet = abs(last / first - 1.0) <= DRIFT
            if quiet:
                break
    return judge_drift(first, last, flagged="drifting" in taken.flags, tainted=taken.tainted)


def judge_drift(first: float, last: float, *, flagged: bool, tainted: bool) -> Finding:
    """Judge two medians in seconds, of the samples at the beginning and at the end."""
    threshold = f"within {DRIFT:.0%}, or flagged drifting; a drift made on purpose is flagged"
    found, expected = Number("last tenth of the samples", last, "s"), Number("first tenth", first, "s")
    ratio = last / first
    note = f"ratio {ratio:.4f}{', flagged drifting' if flagged else ''}"
    if abs(ratio - 1.0) > DRIFT and not flagged:
        if tainted:
            return unknown("the ends differ, but other work disturbed them", threshold, found, expected).note(note)
        # the flag compares halves: a ramp over before a tenth has passed is gone from the median, not from the ends
        reason = f"the ends differ by {ratio - 1.0:+.1%} and no flag says so: other work, or clocks that still move"
        return unknown(reason, threshold, found, expected).note(note)
    return check(True, found, expected, threshold, "", note)


def nothing_left() -> Finding:
    """T14: runs in which every sample was throttled, or none could be used, that are told from a good one."""
    threshold = "both: marked samples taint the row, and no sample leaves no number"
    bed = Bed(brief(BUDGETS["smoke"], samples=6, block_seconds=1e-3))

    def throttled_all_the_time(case: Case, measure: Measure) -> None:
        measure.on_device(lambda: ("throttled",))
        measure(told(lambda call: 200e-6), link=1, gate=None)

    row = bed.measured(throttled_all_the_time)
    marked = row.status == "tainted" and "throttled" in row.flags
    empty, why = _told_of_a_stopped_clock(bed)
    reasons = [] if marked else [f"samples throttled throughout leave the status {row.status}"]
    reasons += [] if empty else ["a run without one usable sample is not told"]
    return check(
        marked and empty, Number("runs told from a good one", marked + empty, "rows"),
        Number("disturbed runs", 2, "rows"), threshold, "; ".join(reasons),
        f"throttled: {row.status}; unusable windows: {why}",
    )  # fmt: skip


def _told_of_a_stopped_clock(bed: Bed) -> tuple[bool, str]:
    """Return whether windows that come back as 0 s once warm-up is over are refused, and in which words."""
    try:
        stopped = sample(told(lambda call: 0.0 if call else 2e-3), bed.context.budget, gate=None)
    except KvbenchError as error:
        return True, error.what
    return stopped.summary is None and stopped.stop == "no_samples", stopped.reason


def lazy_candidate(nbytes: int = MiB) -> Finding:
    """T21: candidates that do one line of the work and return; each must end without a number."""
    from kvbench.kernels.stream import Stream, stream_kernel

    def one_line(ctl: int, member: int, members: int, op: int, a: int, b: int, c: int, size: int, *rest: Any) -> Any:
        return stream_kernel(ctl, member, members, op, a, b, c, 64, *rest)

    bed = Bed()
    refused: list[str] = []
    passed: list[str] = []
    for op in LAZY:

        def candidate(case: Case, measure: Measure, op: str = op) -> None:
            count = {"read": 1, "write": 1, "triad": 3}.get(op, 2)
            kind: Kind = "float64" if op == "triad" else "bits"
            buffers = [measure.target(nbytes, "4k")] if op != "read" else []
            buffers += measure.sources(count - len(buffers), nbytes, "4k", kind=kind) if count > len(buffers) else []
            work = Stream(op, [buffer.address for buffer in buffers], nbytes, measure.team(1))
            work.run()  # what an honest pass left is still there when the lazy one returns
            work.code = one_line
            measure(work.run, link=work.link_bytes, verify=work.verify)

        try:
            bed.measured(candidate)
            passed.append(op)
        except PathBroken as error:
            (refused if "payload check failed" in str(error) else passed).append(op)
    return check(
        not passed, Number("candidates without a number", len(refused), "rows"),
        Number("lazy candidates", len(LAZY), "rows"), "all of them",
        f"work that was not done has a number: {', '.join(passed)}",
    )  # fmt: skip


def attached_tools(environ: Mapping[str, str], status: Mapping[str, str], traced: bool) -> tuple[str, ...]:
    """Return the tools that slow this process down, by what gave them away."""
    found = [name for name in TOOL_VARIABLES if environ.get(name, "").strip() not in ("", "0")]
    if status.get("TracerPid", "0").strip() not in ("", "0"):
        found.append("a debugger (TracerPid)")
    if traced:
        found.append("a Python tracer or profiler")
    return tuple(found)


def tools() -> Finding:
    """T22: profilers, tracers and debuggers in this process: its workers inherit them."""
    traced = sys.gettrace() is not None or sys.getprofile() is not None
    return judge_tools(attached_tools(os.environ, read_fields(ROOT, "/proc/self/status"), traced))


def judge_tools(found: tuple[str, ...]) -> Finding:
    """Judge what :func:`attached_tools` found."""
    return check(
        not found, Number("tools attached", len(found), "tools"), Number("allowed", 0, "tools"), "none",
        f"attached: {', '.join(found)}: each call they watch takes some 10 us longer",
        mend=f"unset {' '.join(name for name in found if name.isupper())}" if any(map(str.isupper, found)) else "",
    )  # fmt: skip


def turns(samples: int = 40) -> Finding:
    """T58: how often the first of two pieces of work is measured first; and what is left of a drift between them."""
    threshold = f"half of the rounds, and a steady drift leaves less than {ORDER_BIAS:.0%}"
    limits = brief(BUDGETS["smoke"], samples=samples, block_seconds=100e-6)
    calls: list[str] = []
    drifting = told(lambda call: 100e-6 * (1.0 + 0.05 * call))

    def side(name: str) -> Callable[[int], float]:
        def run(reps: int) -> float:
            calls.append(name)
            return drifting(reps)

        return run

    pair = sample_pair(side("A"), side("B"), limits, gate=None)
    count = min(pair.a.taken, pair.b.taken)
    rounds = np.array(calls[-2 * count :]).reshape(count, 2)
    if pair.ratio is None or not all(set(each) == {"A", "B"} for each in rounds.tolist()):
        raise PathBroken("the two pieces of work were not taken in turns", where="sample_pair")
    return judge_turns(int(np.count_nonzero(rounds[:, 0] == "A")), count, pair.ratio.value, threshold)


def judge_turns(first: int, rounds: int, ratio: float, threshold: str) -> Finding:
    """Judge in how many of ``rounds`` A came first, and the ratio of equal work under a drift."""
    good = abs(first - rounds / 2) <= 1 and abs(ratio - 1.0) <= ORDER_BIAS
    reason = f"A came first in {first} of {rounds} rounds: what grows with time is taken for a difference"
    if abs(first - rounds / 2) <= 1:
        reason = f"equal work under a drift comes out as {ratio:.4f} x itself"
    return check(
        good, Number("share of rounds with A first", first / rounds, "1"), Number("A B B A", 0.5, "1"), threshold,
        reason, f"equal work under a drift of 5 % a call: ratio {ratio:.4f}",
    )  # fmt: skip
