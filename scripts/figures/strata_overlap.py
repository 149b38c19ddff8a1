"""``overlap``: the stall of layer-wise loading predicted from rates measured in the same moments, against measured."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from kvbench.locks import acquire, machine_resources
from kvbench.memory.host import host_buffer
from kvbench.model.geometry import geometry
from kvbench.model.layout import Pool
from kvbench.systems.strata.overlap import HostOverlap
from kvbench.systems.strata.overlap_model import Rates, shared
from kvbench.systems.strata.overlap_probe import Taken, take, typical
from kvbench.transport.gpu_pieces import scattered

from .record import Figure, Scalar, judge, lost

GROUP = "strata-overlap"
RATIOS = (1, 4, 8, 16, 32, 64, 128, 256, 1024)
LOW, HIGH = 0.9, 1.1
MODEL, TOKENS, PAGE = "Llama-3.1-8B", 1024, 32
TOKEN_FLOPS = 425_984.0  # of a layer: a 1024th of the model's 436 MFLOP, as suites/strata/bench_layer_overlap.py has it
ROUNDS = 24
KNOWN = 3.0  # per cent: how well the rates of a shared memory bus are known from one moment to the next
MOST_SENSITIVE = 10.0 / KNOWN  # per cent of the stall a per cent of a rate: beyond, 10 % cannot be told
DELAY_SHARE = 0.01  # of a sample that its threads may have waited for a CPU
LEAST = 5


def figures(rounds: int = ROUNDS, ratios: Sequence[int] = RATIOS, tokens: int = TOKENS) -> Iterator[Figure]:
    """Yield pass time and stall of each load:new ratio, predicted over measured, over ``rounds`` quiet samples.

    Interquartile means: near the balance of both sides a pass either stalls at nearly every layer or at none, and a
    median jumps between the two; a mean follows the one sample in which another guest held the bus. Ratios are taken
    in turns, so that all of them and the rates behind each come from the same moments.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        for ratio in ratios:
            for what in ("pass time", "stall"):
                yield lost(GROUP, name(what, ratio), "ratio", HIGH, "one CPU: the two sides need one each", low=LOW)
        return
    with acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)):
        quiet = sampled(rounds, ratios, tokens, cpus[:2])
    for ratio, taken in zip(ratios, quiet, strict=True):
        yield from figures_of(ratio, taken)


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


def figures_of(ratio: int, taken: Sequence[Taken]) -> Iterator[Figure]:
    """Yield the pass time and the stall of one ratio, predicted over measured; disturbed below ``LEAST`` samples."""
    names = [name(what, ratio) for what in ("pass time", "stall")]
    if len(taken) < LEAST:
        verdict = judge(None, LOW, HIGH, disturbed=True)
        for title in names:
            yield Figure(GROUP, title, "ratio", None, LOW, HIGH, verdict, f"{len(taken)} undisturbed samples")
        return
    rates = typical(list(taken))
    total, stall = (middle([getattr(t.forecast, part) for t in taken]) for part in ("total", "stall"))
    taken_total, taken_stall = (middle([getattr(t, part) for t in taken]) for part in ("total", "stall"))
    swing = sensitivity(rates, stall)
    detail: dict[str, Scalar] = {
        "predicted": stall, "measured": taken_stall, "stall_share": taken_stall / taken_total, "load": rates.load,
        "compute": rates.compute, "load_slowdown": rates.load_slowdown, "compute_slowdown": rates.compute_slowdown,
        "samples": len(taken), "sensitivity": swing,
    }  # fmt: skip
    note = f"{taken_total * 1e3:.4g} ms, predicted {total * 1e3:.4g} ms; {len(taken)} samples"
    value = total / taken_total
    verdict = judge(value, LOW, HIGH, disturbed=False)
    yield Figure(GROUP, names[0], "ratio", value, LOW, HIGH, verdict, note, detail=detail)
    note = (
        f"stall {taken_stall * 1e3:.3g} ms ({taken_stall / taken_total:.1%} of the pass), predicted "
        f"{stall * 1e3:.3g} ms; load {rates.load * 1e6:.0f} us x {rates.load_slowdown:.2f}, compute "
        f"{rates.compute * 1e6:.0f} us x {rates.compute_slowdown:.2f} beside each other"
    )
    low, high = (LOW, HIGH) if swing <= MOST_SENSITIVE else (None, None)
    note += f"; a rate 1 % off moves it by {swing:.1f} %"
    if low is None:
        note += ": the pass time is judged instead"
    value = stall / taken_stall
    verdict = judge(value, low, high, disturbed=False)
    yield Figure(GROUP, names[1], "ratio", value, low, high, verdict, note, detail=detail)


def middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half of ``values``."""
    from scipy.stats import trim_mean

    return float(trim_mean(values, 0.25))


def name(what: str, ratio: int) -> str:
    return f"{what} predicted / measured, host, {ratio}:1"


def sensitivity(rates: Rates, stall: float) -> float:
    """Return by how many per cent of ``stall`` the stall moves when loads take 1 % longer.

    About 1 where only the first load is exposed and where loading takes far longer. Where the two sides balance the
    stall is the difference of two nearly equal sums over all layers, each known to no better than ``KNOWN``: that
    difference tests the bus, not the law.
    """
    layers = geometry(MODEL).layers
    longer = Rates(rates.load * 1.01, rates.compute, rates.load_beside * 1.01, rates.compute_beside)
    shorter = Rates(rates.load * 0.99, rates.compute, rates.load_beside * 0.99, rates.compute_beside)
    return (
        max(abs(shared(moved, layers).stall - shared(rates, layers).stall) for moved in (longer, shorter)) / stall * 100
    )
