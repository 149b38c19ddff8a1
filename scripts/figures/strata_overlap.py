"""``overlap``: the stall of layer-wise loading predicted from rates measured in the same moments, against measured."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import median

from kvbench.locks import acquire, machine_resources
from kvbench.memory.host import host_buffer
from kvbench.model.geometry import geometry
from kvbench.model.layout import Pool
from kvbench.systems.strata.overlap import HostOverlap
from kvbench.systems.strata.overlap_probe import Taken, take, typical
from kvbench.transport.gpu_pieces import scattered

from .record import Figure, Scalar, judge, lost

GROUP = "strata-overlap"
RATIOS = (1, 4, 8, 16, 32, 64, 128, 256, 1024)
LOW, HIGH = 0.9, 1.1
MODEL, TOKENS, PAGE = "Llama-3.1-8B", 1024, 32
TOKEN_FLOPS = 425_984.0  # of a layer: a 1024th of the model's 436 MFLOP, as suites/strata/bench_layer_overlap.py has it
ROUNDS = 12
DELAY_SHARE = 0.01  # of a sample that its threads may have waited for a CPU
LEAST = 5


def figures(rounds: int = ROUNDS, ratios: Sequence[int] = RATIOS, tokens: int = TOKENS) -> Iterator[Figure]:
    """Yield a figure a load:new ratio: predicted over measured stall, medians over at least ``rounds`` quiet samples.

    Ratios are taken in turns, so that all of them and the rates behind each come from the same moments.
    """
    names = [f"stall predicted / measured, host, {ratio}:1" for ratio in ratios]
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        for name in names:
            yield lost(GROUP, name, "ratio", HIGH, "one CPU: the two sides need one each", low=LOW)
        return
    with acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)):
        quiet = sampled(rounds, ratios, tokens, cpus[:2])
    for name, taken in zip(names, quiet, strict=True):
        yield figure(name, taken)


def sampled(rounds: int, ratios: Sequence[int], tokens: int, cpus: Sequence[int]) -> list[list[Taken]]:
    """Return the undisturbed samples of each ratio; ends at ``rounds`` of each, or after three times as many turns."""
    from kvbench.kernels.team import Team
    from scripts.figures.ratios import delayed_ns

    pool = Pool.of_tokens(geometry(MODEL), "layer_first", PAGE, tokens)
    quiet: list[list[Taken]] = [[] for _ in ratios]
    with ExitStack() as stack:
        team = stack.enter_context(Team(cpus))
        far = stack.enter_context(host_buffer(pool.nbytes, "thp", seed=3))
        near = stack.enter_context(host_buffer(pool.nbytes, "thp", kind=None))
        work = HostOverlap(team, far.address, near.address, pool, scattered(pool.pages, 3))
        work.run()
        for turn in range(3 * rounds):
            for place in range(len(ratios)) if turn % 2 else reversed(range(len(ratios))):
                work.arithmetic(tokens // ratios[place] * TOKEN_FLOPS)
                before, began = delayed_ns(team), time.perf_counter_ns()
                found = take(work)
                if delayed_ns(team) - before <= DELAY_SHARE * (time.perf_counter_ns() - began):
                    quiet[place].append(found)
            if min(map(len, quiet)) >= rounds:
                break
        work.verify()
    return quiet


def figure(name: str, taken: Sequence[Taken]) -> Figure:
    """Return the figure of one ratio; disturbed below ``LEAST`` samples."""
    if len(taken) < LEAST:
        verdict = judge(None, LOW, HIGH, disturbed=True)
        return Figure(GROUP, name, "ratio", None, LOW, HIGH, verdict, f"{len(taken)} undisturbed samples")
    rates = typical(list(taken))
    predicted, measured = (median(side) for side in zip(*((t.forecast.stall, t.stall) for t in taken), strict=True))
    share = median(t.stall / t.total for t in taken)
    note = (
        f"stall {measured * 1e3:.3g} ms ({share:.1%} of the pass), predicted {predicted * 1e3:.3g} ms; "
        f"load {rates.load * 1e6:.0f} us x {rates.load_slowdown:.2f}, compute {rates.compute * 1e6:.0f} us x "
        f"{rates.compute_slowdown:.2f} beside each other; {len(taken)} samples"
    )
    detail: dict[str, Scalar] = {
        "predicted": predicted, "measured": measured, "stall_share": share, "load": rates.load,
        "compute": rates.compute, "load_slowdown": rates.load_slowdown, "compute_slowdown": rates.compute_slowdown,
        "samples": len(taken), "total_ratio": median(t.forecast.total / t.total for t in taken),
    }  # fmt: skip
    value = predicted / measured
    return Figure(GROUP, name, "ratio", value, LOW, HIGH, judge(value, LOW, HIGH, disturbed=False), note, detail=detail)
