"""T16, T19, T23, T25, T53, T57: does the clock tell the time of the work, all of it, and nothing else?"""

from __future__ import annotations

import queue
import resource
import threading
import time
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np

from kvbench.contract.case import Case
from kvbench.contract.result import Ceiling
from kvbench.machine.obstacles import Obstacle, clocksource
from kvbench.machine.probe import ROOT, read_text
from kvbench.timing import clock
from kvbench.timing.budget import BUDGETS
from kvbench.timing.sampler import sample, sample_pair
from kvbench.timing.traps.bed import Bed, PathBroken, brief
from kvbench.timing.traps.record import Finding, Number, check, unknown
from kvbench.units import KiB, MiB, format_value

if TYPE_CHECKING:
    from kvbench.measure import Measure

GRAIN_MULTIPLE = 20  # traps.md T16
SCALES_LEAST = 2.0  # of 4: a submit alone gives 1, caches only raise it
FIRST_LIMIT = 3.0  # traps.md T23
CHURN_LIMIT = 64 * KiB  # far above the interpreter's own objects, far below any buffer
READ_COST_LIMIT = 200e-9  # of a clock read from Python; the read itself is 20 to 50 ns where no system call is made
RATE_LIMIT = 1e-3  # NTP may slew the monotonic clock by 500 ppm
BIAS_LIMIT = 0.02  # the gate's margin
FLOOR_LIMIT = 0.05
LOOKS = 2  # one may meet a neighbour; a fault of the path is there in every one


def clock_grain(pairs: int = 1000) -> Finding:
    """T16: the window of one sample of the shortest work there is, against what an empty pair of reads takes."""
    from kvbench.kernels.stream import Stream

    threshold = f"at least {GRAIN_MULTIPLE} x"
    empty = np.empty(pairs)
    for i in range(pairs):
        before = clock.now_ns()
        empty[i] = clock.now_ns() - before
    grain = float(np.quantile(empty, 0.95)) * 1e-9
    bed = Bed()
    with bed.team() as team, bed.buffer(4 * KiB) as buffer:
        taken = sample(Stream("read", [buffer.address], 4 * KiB, team).run, BUDGETS["smoke"], tids=team.tids)
    if taken.summary is None:
        raise PathBroken(taken.reason, where="sample")
    window = taken.summary.median * taken.reps
    return check(
        window >= GRAIN_MULTIPLE * grain, Number("one sample of a 4 KiB read", window, "s"),
        Number("an empty pair of clock reads (p95)", grain, "s"), threshold,
        f"a sample is {window / grain:.1f} x what reading the clock twice takes", f"{taken.reps} passes a sample",
    )  # fmt: skip


def submit_only(nbytes: int = 16 * MiB) -> Finding:
    """T19: time of four times the bytes over time of the bytes; and a submit without its work against a ceiling."""
    from kvbench.kernels.stream import Stream

    threshold = f"at least {SCALES_LEAST:g}; a submit alone is invalid"
    bed = Bed()
    with bed.team() as team, bed.buffer(4 * nbytes) as buffer:
        whole, part = (Stream("read", [buffer.address], size, team) for size in (4 * nbytes, nbytes))
        pair = sample_pair(
            whole.run, part.run, brief(BUDGETS["smoke"], samples=5, block_seconds=100e-6), tids=team.tids
        )
    if pair.ratio is None or pair.b.summary is None:
        raise PathBroken(pair.b.reason or "no pair of samples", where="sample_pair")
    rate = nbytes / pair.b.summary.median
    found = Number("time of 4 x the bytes / time of the bytes", pair.ratio.value, "1")
    expected = Number("bytes / bytes", 4.0, "1")
    if pair.ratio.value < SCALES_LEAST:
        return check(False, found, expected, threshold, "the time does not grow with the work: it is not waited for")
    status, value = _submitted(bed, nbytes, 2.0 * rate)
    note = f"a submit of {nbytes} bytes without waiting: {format_value(value, 'B/s')}, status {status}"
    if status != "invalid":
        return check(
            False, Number("rate of a submit alone", value, "B/s"), Number("physical ceiling given", 2.0 * rate, "B/s"),
            threshold, f"a rate above its physical ceiling got the status {status}", note,
        )  # fmt: skip
    return check(True, found, expected, threshold, "", note)


def _submitted(bed: Bed, nbytes: int, ceiling: float) -> tuple[str, float]:
    """Return status and rate of a case that times only handing work to a thread, under a physical ceiling."""
    inbox: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def drain() -> None:
        while inbox.get() is not None:
            pass

    def submit(reps: int) -> None:
        for _ in range(reps):
            inbox.put(nbytes)

    def submit_alone(case: Case, measure: Measure) -> None:
        top = Ceiling("twice the read of this buffer", ceiling, "physical", "stands in for a specification")
        measure(submit, link=nbytes, ceilings=(top,), gate=None)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        row = bed.measured(submit_alone)
    finally:
        inbox.put(None)
        thread.join()
    return row.status, row.value or 0.0


def cold_first_sample(steady: float = 0.5e-3) -> Finding:
    """T23: the largest sample that was used, against the median, of work whose first two calls are cold."""
    cold = [40 * steady, 20 * steady]  # the warm-up call, and the first sample: a module that loads late

    def run(reps: int) -> float:
        seconds = steady * reps + (cold.pop(0) if cold else 0.0)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass
        return seconds  # its own window: what the machine adds by accident is not this trap's subject

    taken = sample(run, BUDGETS["smoke"], gate=None)
    if taken.summary is None:
        raise PathBroken(taken.reason, where="sample")
    worst = float(taken.seconds.max()) / taken.summary.median
    first = "nothing" if taken.first_call_ratio is None else f"{taken.first_call_ratio:.0f} x the median"
    return check(
        worst <= FIRST_LIMIT, Number("largest sample used", float(taken.seconds.max()), "s"),
        Number("median", taken.summary.median, "s"), f"at most {FIRST_LIMIT:g} x",
        f"a cold call {worst:.0f} x the median is among the samples",
        f"kept apart: first warm-up call {first}; flags {', '.join(taken.flags) or 'none'}",
    )  # fmt: skip


def allocations(nbytes: int = 4 * MiB) -> Finding:
    """T25: the most memory one sampled call takes, against what one call may."""
    from kvbench.kernels.stream import Stream

    taken: list[int] = []
    faults: list[int] = []
    ours = not tracemalloc.is_tracing()
    bed = Bed()
    with bed.team() as team, bed.buffer(nbytes) as target, bed.buffer(nbytes) as source:
        work = Stream("copy_plain", [target.address, source.address], nbytes, team)

        def run(reps: int) -> float:
            tracemalloc.reset_peak()
            held, faulted = tracemalloc.get_traced_memory()[0], resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            seconds = work.run(reps)
            taken.append(tracemalloc.get_traced_memory()[1] - held)
            faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faulted)
            return seconds

        if ours:
            tracemalloc.start()
        try:
            found = sample(run, BUDGETS["smoke"], tids=team.tids)
        finally:
            if ours:
                tracemalloc.stop()
        work.verify()
    most, faulted = max(taken[found.warm_calls :]), max(faults[found.warm_calls :])
    limit = CHURN_LIMIT // 4096
    reason = f"{most} bytes are allocated" if most > CHURN_LIMIT else f"{faulted} pages are faulted in"
    return check(
        most <= CHURN_LIMIT and faulted <= limit, Number("most allocated in one sampled copy", most, "B"),
        Number("allowed", CHURN_LIMIT, "B"), f"at most that, and {limit} page faults",
        f"{reason} inside a sampled call: the allocator is timed with the work",
        f"{len(taken) - found.warm_calls} samples of a {nbytes}-byte copy, at most {faulted} page faults in one",
    )  # fmt: skip


def clock_source(seconds: float = 0.04) -> Finding:
    """T53: seconds of samples by the sampler's clock against the raw hardware clock inside them; steps and cost too."""
    threshold = f"within {RATE_LIMIT:.1%}, no step back, a read below {READ_COST_LIMIT * 1e9:.0f} ns"
    obstacle = clocksource(ROOT)
    name = read_text(ROOT, "/sys/devices/system/clocksource/clocksource0/current_clocksource")
    steady, cost = clock.check_monotonic(), clock.measure_quantum().cost_ns * 1e-9
    raw: list[float] = []

    def run(reps: int) -> None:
        began = now = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        until = began + round(seconds * reps * 1e9)
        while now < until:  # not asleep: a core that wakes up takes 20 us more for the call around this
            now = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        raw.append((now - began) * 1e-9 / reps)

    taken = sample(run, BUDGETS["smoke"], gate=None)
    if taken.summary is None or len(taken.seconds) != len(raw) - taken.warm_calls:
        raise PathBroken(taken.reason or "samples do not match calls", where="sample")
    pairs = zip(taken.seconds.tolist(), raw[taken.warm_calls :], strict=True)
    # The closest sample: between reading the two a busy machine may do something else; a wrong clock is never close.
    ours, true = min(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1.0))
    wrong = []
    if steady.backward:
        wrong.append(f"the clock ran backwards {steady.backward} times, by up to {steady.worst_back_ns} ns")
    if abs(ours / true - 1.0) > RATE_LIMIT:
        wrong.append(f"the sampler's seconds are {ours / true:.4f} of true ones")
    if cost > READ_COST_LIMIT:
        wrong.append(f"reading the clock takes {cost * 1e9:.0f} ns")
    flagged = isinstance(obstacle, Obstacle)
    found, expected = Number("by the sampler", ours, "s"), Number("by CLOCK_MONOTONIC_RAW", true, "s")
    return check(
        not wrong, found, expected, threshold, "; ".join(wrong),
        f"clock source {name.value or name.reason}{': not one to trust unseen, it behaves here' if flagged else ''}",
        f"a read takes {cost * 1e9:.0f} ns, {steady.backward} of {steady.reads} ran backwards, "
        f"clocks agree to {abs(ours / true - 1.0) * 1e6:.0f} ppm",
        mend=obstacle.mend if isinstance(obstacle, Obstacle) else "",
    )  # fmt: skip


def same_twice(nbytes: int = 8 * MiB, samples: int = 40) -> Finding:
    """T57: the same work twice in turns: any difference is the noise below which nothing can be told apart."""
    from kvbench.kernels.stream import Stream

    threshold = f"within {BIAS_LIMIT:.0%}, or within its interval in one of {LOOKS} looks"
    limits = brief(BUDGETS["smoke"], samples=samples, block_seconds=2e-3, cap_seconds=0.5)
    bed = Bed()
    with bed.team() as team, bed.buffer(nbytes) as buffer:
        work = Stream("read", [buffer.address], nbytes, team)
        for _ in range(LOOKS):
            pair = sample_pair(work.run, work.run, limits, tids=team.tids)
            a, b, ratio = pair.a.summary, pair.b.summary, pair.ratio
            if ratio is None or a is None or b is None:
                raise PathBroken(pair.a.reason or pair.b.reason, where="sample_pair")
            found, expected = Number("median of A", a.median, "s"), Number("median of the same A again", b.median, "s")
            low, value, high = ratio.low, ratio.value, ratio.high
            if low is None or high is None:
                biased = False  # fewer than 6 undisturbed pairs: this look says nothing
                continue
            biased = not low <= 1.0 <= high and abs(value - 1.0) > BIAS_LIMIT
            if not biased:
                break
        work.verify()
    if low is None or high is None:
        return unknown("too few pairs were undisturbed to give an interval", threshold, found, expected)
    floor = max(abs(low - 1.0), abs(high - 1.0))
    note = (
        f"noise floor {floor:.1%} within one process: ratio {value:.4f} ({low:.4f} to {high:.4f}) of "
        f"{len(pair.ratios)} pairs; fresh processes differ more (kvbench run --runs)"
    )
    if not biased and floor > FLOOR_LIMIT:
        reason = f"the noise floor is {floor:.1%} now: a difference below it cannot be seen"
        return unknown(reason, threshold, found, expected).note(note)
    if biased and (pair.a.tainted or pair.b.tainted):
        reason = f"the same work is {value:.3f} x itself, but other work disturbed it: stop that and look again"
        return unknown(reason, threshold, found, expected).note(note)
    return check(not biased, found, expected, threshold, f"the same work is {value:.3f} x itself in every look", note)
