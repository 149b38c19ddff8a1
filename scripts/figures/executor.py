"""``executor``: a replay carried out on this host's pair against its simulation, end to end.

In each round the pair is measured, the trace replayed with that, and the same iterations carried out, so that both
sides of a ratio come from the same moments.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from statistics import median

from kvbench.errors import Unavailable, VerifyError, printable
from kvbench.locks import acquire, machine_resources
from kvbench.memory.host import host_buffer
from kvbench.replay.executor_trial import BLAS, Trial, real_trial

from .record import Figure, Scalar, judge, lost

GROUP = "executor"
LOW, HIGH = 0.85, 1.15
ROUNDS, LEAST = 9, 3
DELAY_SHARE = 0.02  # of a pass that its threads may have waited for a CPU
TRIALS = (real_trial(48), Trial(60), Trial(60, "all"), Trial(60, rate=60.0))


def figures(rounds: int = ROUNDS, trials: Sequence[Trial] = TRIALS) -> Iterator[Figure]:
    """Yield executed over simulated seconds of each trial: the median over ``rounds`` quiet rounds."""
    cpus = sorted(os.sched_getaffinity(0))
    for trial in trials:
        if len(cpus) < 2:
            yield lost(GROUP, name(trial), "ratio", HIGH, "one CPU: attention and copies need one each", low=LOW)
            continue
        with acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)):
            try:
                found = rounds_of(trial, rounds, cpus)
            except (Unavailable, VerifyError) as error:
                yield lost(GROUP, name(trial), "ratio", HIGH, printable(str(error)), low=LOW)
                continue
        yield figure(trial, found)


def name(trial: Trial) -> str:
    arrivals = "" if trial.rate is None else f", {trial.rate:g} requests/s"
    near = "near real" if trial.machine == BLAS else f"near paced to {trial.machine}"
    return f"executed / simulated, offload {trial.offload}, {near}{arrivals}"


def rounds_of(trial: Trial, rounds: int, cpus: Sequence[int]) -> list[tuple[float, float, float, float]]:
    """Return (executed, simulated, attention, copies) seconds of the undisturbed rounds; at most three times as many
    are tried. Every round is verified. Raises VerifyError."""
    from kvbench.attention.cpu import DecodeAttention
    from kvbench.kernels.blas import blas_threads
    from kvbench.kernels.team import Team
    from kvbench.replay.executor import Mover
    from kvbench.replay.executor_trial import open_pair
    from scripts.figures.ratios import delayed_ns

    quiet: list[tuple[float, float, float, float]] = []
    with ExitStack() as stack:
        buffer = stack.enter_context(host_buffer(trial.nbytes(), "thp", kind=None))
        if trial.machine == BLAS:
            stack.enter_context(blas_threads(1))
        team, mover = stack.enter_context(Team(cpus[:-1])), stack.enter_context(Mover(cpus[-1]))
        near = trial.near(cpus[-1])
        stack.enter_context(near or nullcontext())
        memory, attention = trial.memory(buffer.address), DecodeAttention(trial.kv_shape(), team)
        for _ in range(3 * rounds):
            executor = open_pair(trial, memory, attention, mover, near).executor
            before, began = delayed_ns(team) + delayed_ns(mover.team), time.perf_counter_ns()
            seconds = executor.run()
            delayed = delayed_ns(team) + delayed_ns(mover.team) - before
            executor.verify()
            spans = executor.spans
            if spans is not None and delayed <= DELAY_SHARE * (time.perf_counter_ns() - began):
                quiet.append((seconds, executor.simulated, spans.attention, spans.copies))
            if len(quiet) >= rounds:
                break
    return quiet


def figure(trial: Trial, quiet: Sequence[tuple[float, float, float, float]]) -> Figure:
    """Return the figure of the rounds of one trial; disturbed below ``LEAST`` of them."""
    if len(quiet) < LEAST:
        verdict = judge(None, LOW, HIGH, disturbed=True)
        return Figure(GROUP, name(trial), "ratio", None, LOW, HIGH, verdict, f"{len(quiet)} undisturbed rounds")
    ratios = sorted(executed / simulated for executed, simulated, _, _ in quiet)
    executed, simulated, attention, copies = (median(column) for column in zip(*quiet, strict=True))
    detail: dict[str, Scalar] = {
        "executed": executed, "simulated": simulated, "attention": attention, "copies": copies, "rounds": len(quiet),
        "least": ratios[0], "most": ratios[-1],
    }  # fmt: skip
    note = (
        f"{executed:.3g} s, simulated {simulated:.3g} s, CPU attention {attention:.2g} s of it; {len(quiet)} rounds, "
        f"{ratios[0]:.3f}..{ratios[-1]:.3f}"
    )
    value = median(ratios)
    return Figure(
        GROUP, name(trial), "ratio", value, LOW, HIGH, judge(value, LOW, HIGH, disturbed=False), note, detail=detail
    )
