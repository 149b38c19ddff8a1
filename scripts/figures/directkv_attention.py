"""``directkv-attention``: attention over far KV on this host: decode in place, prefill bytes and winners, fused keys.

Ratios are of seconds in turns, medians over rounds; every side is checked against float64.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from kvbench.attention.shapes import Shape
from kvbench.errors import KvbenchError
from kvbench.kernels.blas import one_thread
from kvbench.kernels.team import Team
from kvbench.locks import acquire, machine_resources
from kvbench.machine.topology import measuring_cpus
from kvbench.memory.host import host_buffer
from kvbench.memory.tiers import parse_tier
from kvbench.systems.directkv import fused, prefill_plan
from kvbench.systems.directkv.attention_traffic import Attention
from kvbench.systems.directkv.host_attention import WholeDecode, open_decode
from kvbench.systems.directkv.host_attention_far import Far, NearMemory, open_far
from kvbench.systems.directkv.host_attention_plan import DecodePlan, fill_far, part_pages_for
from kvbench.systems.directkv.prefill import Prefill

from .processes import Neighbours
from .record import Figure, Scalar, judge, lost

GROUP = "directkv-attention"
SEED, ROUNDS = 5, 15
DECODE = Shape("bf16", 32, 8, 128, 16)
CONTEXT = 16384
MEMORY_BYTES, FILE_LAYERS = 256 << 20, 2
LEAST_CEILING, SWAP_HIGH, RING_HIGH = 0.85, 1.10, 0.10
LINK_LOW, LINK_HIGH = 0.99, 1.01
GAIN_LOW, GAIN_HIGH = 0.8, 1.2
AGREE_LOW, TIE = 0.9, 0.05
LAYERS = 2
BYTES_SHAPES = {"1 query": (1, 4096, 64, 256), "ragged": (500, 4001, 64, 256), "512 queries": (512, 4096, 64, 256)}
SWEEP_ROUNDS = 5
SWEEP = [(q, bq, bkv) for q in (64, 256, 1024) for bq in (32, 128) for bkv in (64, 256) if bq <= q]
TOKENS = (512, 1024, 2048)


def figures(rounds: int = ROUNDS) -> Iterator[Figure]:
    """Yield every figure of the group; the machine's lock is held meanwhile."""
    with acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)):
        yield from against_gather(rounds)
        yield from against_swap(rounds)
        for name in BYTES_SHAPES:
            yield from prefill_bytes(name)
        yield winners(min(rounds, SWEEP_ROUNDS))
        for tokens in TOKENS:
            yield fused_gain(tokens, rounds)


def far_of(tier: str, nbytes: int, stack: ExitStack) -> Far:
    """Return far memory that goes with ``stack``."""

    def memory(size: int) -> int:
        return stack.enter_context(host_buffer(size, "thp", kind=None)).address

    return open_far(parse_tier(tier), nbytes, stack.enter_context, memory, None, SEED)


def seconds_of(run: Callable[[int], float | None]) -> float:
    """Return the seconds of one pass: its own window, else the call's."""
    begin = time.perf_counter()
    own = run(1)
    return time.perf_counter() - begin if own is None else own


def in_turns(runs: Sequence[Callable[[int], float | None]], rounds: int) -> list[list[float]]:
    """Return the seconds of each run in ``rounds`` rounds, every second one in reverse, after one that is dropped."""
    found: list[list[float]] = []
    for turn in range(rounds + 1):
        order = list(range(len(runs)))
        taken = {i: seconds_of(runs[i]) for i in (order if turn % 2 else reversed(order))}
        if turn:
            found.append([taken[i] for i in order])
    return found


def against_gather(rounds: int) -> Iterator[Figure]:
    """Yield decode that reads far memory in place against the gather ceiling, with few and many KV heads."""
    for heads in (1, 8):
        name = f"decode in place / gather of the same pages, {heads} KV head{'s' if heads > 1 else ''}"
        others = Neighbours()
        try:
            with ExitStack() as stack:
                shape = Shape("bf16", 4 * heads, heads, 128, 16)
                layers = max(2, MEMORY_BYTES // (CONTEXT * shape.token_bytes))
                plan = DecodePlan(shape, (CONTEXT,), layers, part_pages_for(shape, CONTEXT), SEED)
                far = far_of("dram", plan.nbytes, stack)
                fill_far(plan, far)
                team = stack.enter_context(Team(measuring_cpus("all")))
                work = open_decode("in_place", plan, far, team, NearMemory(stack.enter_context), stack.enter_context)
                assert isinstance(work, WholeDecode)
                gathers = work.gathers()
                best = min(gathers, key=lambda variant: min(seconds_of(gathers[variant].run) for _ in range(3)))
                pairs = in_turns([work.run, gathers[best].run], rounds)
                gathers[best].verify()
                work.verify()
        except KvbenchError as error:
            yield lost(GROUP, name, "ratio", None, str(error), low=LEAST_CEILING)
            continue
        value = median(ceiling / own for own, ceiling in pairs)
        rates = [plan.kv_bytes / median(side) / 1e9 for side in zip(*pairs, strict=True)]
        note = f"{rates[0]:.1f} of {rates[1]:.1f} GB/s ({best}); {others.note()}".rstrip("; ")
        verdict = judge(value, LEAST_CEILING, None, disturbed=others.disturbing())
        yield Figure(GROUP, name, "ratio", value, LEAST_CEILING, None, verdict, note, detail={"rounds": rounds})


def against_swap(rounds: int) -> Iterator[Figure]:
    """Yield decode streamed through a ring against a swap of whole layers and its own reader, from a file."""
    names = [f"decode streamed / swapped, dram:file, {what}" for what in ("time", "near buffer")]
    names.append("decode streamed / its reads alone, dram:file")
    others = Neighbours()
    try:
        with ExitStack() as stack:
            plan = DecodePlan(DECODE, (CONTEXT,), FILE_LAYERS, part_pages_for(DECODE, CONTEXT), SEED)
            far = far_of("file", plan.nbytes, stack)
            fill_far(plan, far)
            team = stack.enter_context(Team(measuring_cpus("all")))
            near = [NearMemory(stack.enter_context) for _ in range(2)]
            stream, swap = (
                open_decode(method, plan, far, team, own, stack.enter_context)
                for method, own in zip(("stream", "swap"), near, strict=True)
            )
            reads: Any = stream
            taken = in_turns([stream.run, swap.run, reads.read], rounds)
            for work in (stream, swap):
                work.verify()
            held = [own.resident for own in near]
    except KvbenchError as error:
        for name, high in zip(names, (SWAP_HIGH, RING_HIGH, None), strict=True):
            yield lost(GROUP, name, "ratio", high, str(error))
        return
    middle = [median(side) for side in zip(*taken, strict=True)]
    rates = ", ".join(f"{plan.kv_bytes / one / 1e9:.2f}" for one in middle)
    note = f"stream, swap, reads {rates} GB/s; {others.note()}".rstrip("; ")
    disturbed = others.disturbing()
    value = median(a / b for a, b, _ in taken)
    verdict = judge(value, None, SWAP_HIGH, disturbed=disturbed)
    yield Figure(GROUP, names[0], "ratio", value, None, SWAP_HIGH, verdict, note)
    if held[0] is None or not held[1]:
        yield lost(GROUP, names[1], "ratio", RING_HIGH, "the kernel does not tell which pages are in memory")
    else:
        value = held[0] / held[1]
        verdict = judge(value, None, RING_HIGH, disturbed=False)
        yield Figure(
            GROUP, names[1], "ratio", value, None, RING_HIGH, verdict, f"{held[0]} of {held[1]} bytes resident"
        )
    value = median(c / a for a, _, c in taken)
    verdict = judge(value, LEAST_CEILING, None, disturbed=disturbed)
    yield Figure(GROUP, names[2], "ratio", value, LEAST_CEILING, None, verdict, note)


def plan_of(queries: int, keys: int, block_q: int, block_kv: int, causal: bool = False) -> prefill_plan.PrefillPlan:
    """Return two layers of prefill, 4 query heads on one KV head of 128."""
    return prefill_plan.PrefillPlan(
        Attention(1, queries, keys, 4, 1, 128, block_q, block_kv, 4, 4, causal), LAYERS, SEED
    )


def orders_of(
    plan: prefill_plan.PrefillPlan, stack: ExitStack, cpus: Sequence[int], tier: str = "file"
) -> dict[str, Prefill]:
    """Return every order over one far region."""
    stack.enter_context(one_thread())
    far = far_of(tier, plan.nbytes, stack)
    prefill_plan.fill_far(plan, far)
    return {
        order: Prefill(order, plan, far, NearMemory(stack.enter_context), stack.enter_context, cpus[1:])
        for order in prefill_plan.ORDERS
    }


def prefill_bytes(name: str) -> Iterator[Figure]:
    """Yield measured over predicted link bytes of the order farthest off, and near bytes the same."""
    names = [f"prefill {what} bytes / algebra, {name}, every order" for what in ("link", "near")]
    try:
        with ExitStack() as stack:
            plan = plan_of(*BYTES_SHAPES[name], causal=name == "ragged")
            works = orders_of(plan, stack, measuring_cpus("all"))
            for work in works.values():
                work.run(2)
                work.verify()
            far = [order for order in works if order != "near"]
            link = {o: (works[o].link() or 0) / (LAYERS * plan.link_stored(o)) for o in far}
            near = {o: work.counted.near / (LAYERS * plan.traffic(o).near) for o, work in works.items()}
            source = works["kv_outer"].tally.source
    except KvbenchError as error:
        for each in names:
            yield lost(GROUP, each, "ratio", LINK_HIGH, str(error), low=LINK_LOW)
        return
    for each, found, said in zip(names, (link, near), (source, "the tiles touched"), strict=True):
        value = max(found.values(), key=lambda ratio: abs(ratio - 1.0))
        note = ", ".join(f"{order} {ratio:.4f}" for order, ratio in found.items()) + f", by {said}"
        verdict = judge(value, LINK_LOW, LINK_HIGH, disturbed=False)
        yield Figure(GROUP, each, "ratio", value, LINK_LOW, LINK_HIGH, verdict, note)


def winners(rounds: int, sweep: Sequence[tuple[int, int, int]] = tuple(SWEEP), keys: int = 4096) -> Figure:
    """Return the share of the sweep at which the predicted order is within 5 % of the fastest; misses are listed."""
    name = "prefill, predicted winner = measured winner"
    others, right, misses = Neighbours(), 0, list[str]()
    detail: dict[str, Scalar] = {}
    for point in sweep:
        queries, block_q, block_kv = point
        try:
            seen, told = decided(plan_of(queries, keys, block_q, block_kv), rounds)
        except KvbenchError as error:
            return lost(GROUP, name, "share", None, f"{point}: {error}", low=AGREE_LOW)
        best, chosen = (min(of, key=of.__getitem__) for of in (seen, told))
        cost = seen[chosen] / seen[best]
        right += cost <= 1.0 + TIE
        text = f"{queries} queries, tiles {block_q} x {block_kv}: {chosen} for {best} ({cost:.2f} x)"
        detail["_".join(map(str, point))] = text
        if cost > 1.0 + TIE:
            misses.append(text)
    value = right / len(sweep)
    note = f"{right} of {len(sweep)} within {TIE:.0%}; misses: {'; '.join(misses) or 'none'}; {others.note()}"
    verdict = judge(value, AGREE_LOW, None, disturbed=others.disturbing())
    return Figure(GROUP, name, "share", value, AGREE_LOW, None, verdict, note.rstrip("; "), detail=detail)


def decided(plan: prefill_plan.PrefillPlan, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return measured and predicted seconds of the orders that read far KV; rates are taken in the same rounds."""
    with ExitStack() as stack:
        cpus = measuring_cpus("all")
        works = orders_of(plan, stack, cpus)
        stack.enter_context(Team(cpus[:1]))  # the threads above have every CPU; this one is pinned from here on
        far = [order for order in works if order != "near"]
        runs = [works[o].run for o in works] + [works[o].read for o in far] + [works["near"].core]
        middle = [median(side) for side in zip(*in_turns(runs, rounds), strict=True)]
        for work in works.values():
            work.run(1)
            work.verify()
    seconds, reads, core = dict(zip(works, middle, strict=False)), middle[len(works) : -1], middle[-1]
    readers = {o: plan.layers * plan.link_stored(o) / took for o, took in zip(far, reads, strict=True)}
    rates = prefill_plan.Rates(core / plan.layers, seconds["near"] / plan.layers, readers)
    return {o: seconds[o] for o in far}, {o: prefill_plan.predicted(plan, o, rates) for o in far}


class Stages:
    """Seconds of each stage of one pass."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, name: str) -> None:
        """Note that ``name`` ended now."""
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now


def fused_gain(tokens: int, rounds: int) -> Figure:
    """Return the gain of fusing over 1 + 2 K bytes / link rate / fused seconds, rates from the stages between."""
    name = f"fused K projection, gain / prediction, {tokens} tokens"
    others = Neighbours()
    try:
        with ExitStack() as stack:
            stack.enter_context(one_thread())
            plan = fused.FusedPlan(tokens, 1024, 8, 1, 128, 256, SEED)
            far = far_of("file", plan.nbytes, stack)
            cpus = measuring_cpus("all")
            one, two = (
                fused.Fused(method, plan, far, NearMemory(stack.enter_context), stack.enter_context, cpus[1:])
                for method in fused.METHODS
            )
            stack.enter_context(Team(cpus[:1]))
            stages: list[dict[str, float]] = []

            def separate(reps: int) -> float:
                heard = Stages()
                two.run(reps, heard)
                stages.append(heard.seconds)
                return sum(heard.seconds.values())

            pairs = in_turns([one.run, separate], rounds)
            for work in (one, two):
                work.verify()
    except KvbenchError as error:
        return lost(GROUP, name, "ratio", GAIN_HIGH, str(error), low=GAIN_LOW)
    size = plan.link_bytes("fused")
    store, read = (size / median(stage[part] for stage in stages[1:]) for part in ("stored", "read"))
    taken = median(own for own, _ in pairs)
    gain = median(other / own for own, other in pairs)
    told = fused.predicted_gain(plan, taken, store, read)
    note = f"gain {gain:.3f}, predicted {told:.3f}, K {size} B, store {store / 1e9:.2f} and read {read / 1e9:.2f} GB/s"
    value = gain / told
    verdict = judge(value, GAIN_LOW, GAIN_HIGH, disturbed=others.disturbing())
    return Figure(GROUP, name, "ratio", value, GAIN_LOW, GAIN_HIGH, verdict, f"{note}; {others.note()}".rstrip("; "))
