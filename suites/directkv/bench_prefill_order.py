"""Prefill attention over far KV in both loop orders (DirectKV D6), against a layer-staged swap and near KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvbench.contract.axis import Value
    from kvbench.contract.result import Result
    from kvbench.memory.cuda.device import Stream
    from kvbench.systems.directkv.attention_traffic import Attention
    from kvbench.systems.directkv.prefill import Prefill
    from kvbench.systems.directkv.prefill_plan import PrefillPlan, Rates
    from kvbench.timing.gpu_session import GpuSession

HEAD_DIM, LAYERS = 128, 2
TIE = 1.05  # the predicted winner is right when it takes at most this much longer than the measured one
READS = 3  # of each order, to know its reader


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch file of a case."""
    size = 2 * LAYERS * int(axes["keys"]) * int(axes["kv_heads"]) * 2 * HEAD_DIM * 4
    return size if axes["pair"] == "dram:file" else 0


@bench(
    version=1, metric="pass_time", unit="s", better="lower", limit=300.0, disk=scratch_bytes,
    where=lambda a: a["causal"] == "no" or int(a["queries"]) <= int(a["keys"]),
    extra_metrics=["q_outer_time", "swap_time", "near_time", "near_buffer", "link_ratio"],
    seconds={"smoke": 1.5, "quick": 5.0, "full": 60.0},
    pair=axis.choice("dram:file", "dram:dram", "dram@0:dram@1", "hbm:pinned", smoke=["dram:file", "hbm:pinned"],
                     quick=["dram:file", "hbm:pinned"]),
    queries=axis.integer(smoke=["128"], quick=["64", "256"], full="64..2048", high=1 << 17),
    keys=axis.integer(smoke=["2048"], quick=["4096"], full=["16384"], high=1 << 20),
    block_q=axis.integer(smoke=["32"], quick=["64"], full=["64", "128"], high=4096),
    block_kv=axis.integer(smoke=["256"], quick=["64", "256"], full=["64", "256"], high=1 << 16),
    kv_heads=axis.integer(smoke=["1"], quick=["1"], full=["1"], high=128),
    group=axis.integer(smoke=["4"], quick=["4"], full=["4"], high=64),
    causal=axis.choice("no", "yes", smoke=["no"], quick=["no"]),
)  # fmt: skip
def prefill_order(case: Case, measure: Measure) -> None:
    """Seconds of attention of `queries` new tokens over `keys` far ones, two layers, KV outside (CPU-aware).

    In turns with it: queries outside (q_outer_time), a swap of whole layers (swap_time), all KV near (near_time). The
    detail has winner and predicted winner among the three that read far KV, from rates of the same run, and link and
    near bytes of each beside the algebra; link_ratio: link bytes of kv_outer counted over the algebra with padding.
    On the host float32 with one computing thread, on a GPU bf16.
    """
    from kvbench.systems.directkv.attention_traffic import Attention

    gpu = case.pair == "hbm:pinned"
    shape = Attention(
        1, case.queries, case.keys, case.kv_heads * case.group, case.kv_heads, HEAD_DIM, case.block_q, case.block_kv,
        2 if gpu else 4, 4, case.causal == "yes",
    )  # fmt: skip
    if gpu:
        on_gpu(measure, shape)
        return
    from kvbench.kernels.blas import one_thread
    from kvbench.memory.tiers import parse_pair, require_tier
    from kvbench.systems.directkv.host_attention_far import NearMemory, near_cpus, open_far
    from kvbench.systems.directkv.prefill import Prefill
    from kvbench.systems.directkv.prefill_plan import ORDERS as HOST_ORDERS
    from kvbench.systems.directkv.prefill_plan import PrefillPlan, fill_far

    tiers, context = parse_pair(case.pair), measure.context
    for tier in (tiers.near, tiers.far):
        require_tier(tier)
    measure.note("blas", measure.enter(one_thread()))
    plan = PrefillPlan(shape, LAYERS, context.seed)
    cpus = near_cpus(tiers.near, context.topology)
    if tiers.far.name == "dram" and len(cpus) < 2:
        measure.skip("one core computes and one copies: there is a single one")
    team = measure.team_on(cpus[:1])
    far = open_far(
        tiers.far, plan.nbytes, measure.enter, lambda n: measure.target(n, "thp", node=tiers.far.node).address,
        context.scratch, context.seed,
    )  # fmt: skip
    fill_far(plan, far)
    works: dict[str, Prefill] = {
        order: Prefill(order, plan, far, NearMemory(measure.enter, node=tiers.near.node), measure.enter, cpus[1:])
        for order in HOST_ORDERS
    }
    pipes = [work.pipe for work in works.values() if work.pipe is not None]
    measure.threads([*team.tids, *(tid for pipe in pipes for tid in pipe.tids)])
    if 1 + pipes[0].readers > len(context.topology.affinity):
        measure.crowded()
    for flag in far.flags:
        measure.flag(flag)
    taken: dict[str, list[float]] = {order: [] for order in HOST_ORDERS}

    def once() -> float:
        for order, work in works.items():
            taken[order].append(seconds_of(work.run))
        return taken["kv_outer"][-1]

    def verify() -> None:
        for work in works.values():
            work.verify()

    own, algebra = works["kv_outer"], plan.traffic("kv_outer")
    row = measure(
        lambda reps: sum(once() for _ in range(reps)), verify=verify, kernel=own.kernel, unique=LAYERS * algebra.unique,
        demand=LAYERS * algebra.demand, near=LAYERS * algebra.near, link=own.link, transport="staged",
    )  # fmt: skip
    measure.note("compute_threads", 1)
    measure.note("far", "same node" if case.pair == "dram:dram" else str(tiers.far))
    measure.note("link_source", own.tally.source)
    if row.value is None:
        return
    add_orders(measure, row, taken, {order: work.kernel for order, work in works.items()})
    seen = {order: middle(each[-row.n :]) for order, each in taken.items()}
    rates = rates_of(plan, works, seen)
    judge(measure, seen, {order: predict(plan, order, rates) for order in HOST_ORDERS})
    for order, work in works.items():
        measure.note(f"link_{order}", work.link())
        measure.note(f"link_{order}_algebra", LAYERS * plan.link_stored(order))
        measure.note(f"near_{order}", work.counted.near)
        measure.note(f"near_{order}_algebra", LAYERS * plan.traffic(order).near)
        measure.note(f"near_buffer_{order}", work.buffer)
    crossed = own.link()
    measure.extra(
        "near_buffer", own.resident, unit="B", better="lower", n=row.n, kernel=own.kernel,
        status=row.status if own.resident is not None else "skipped", detail={"asked": own.buffer},
        reason=row.reason if own.resident is not None else "the kernel does not tell which pages are resident",
    )  # fmt: skip
    measure.extra(
        "link_ratio", None if crossed is None else crossed / (LAYERS * plan.link_stored("kv_outer")), unit="1",
        better="lower", n=row.n, status=row.status if crossed is not None else "skipped",
        reason=row.reason if crossed is not None else "nobody counts link bytes here", kernel=own.tally.source,
    )  # fmt: skip


def seconds_of(run: Callable[[int], object]) -> float:
    """Return the seconds of one pass of ``run``."""
    from kvbench.timing.clock import now_ns

    begin = now_ns()
    run(1)
    return (now_ns() - begin) * 1e-9


def middle(values: list[float]) -> float:
    """Return the median."""
    from statistics import median

    return median(values)


def rates_of(plan: PrefillPlan, works: Mapping[str, Prefill], seen: Mapping[str, float]) -> Rates:
    """Return what predictions rest on: each order's reader alone, and attention with KV hot and with KV near."""
    from kvbench.systems.directkv.prefill_plan import Rates

    readers = {
        order: plan.layers * plan.link_stored(order) / middle([seconds_of(work.read) for _ in range(READS)])
        for order, work in works.items() if work.pipe is not None
    }  # fmt: skip
    core = middle([seconds_of(works["near"].core) for _ in range(READS)])
    return Rates(core / plan.layers, seen["near"] / plan.layers, readers)


def predict(plan: PrefillPlan, order: str, rates: Rates) -> float:
    """Return the predicted seconds of a pass."""
    from kvbench.systems.directkv.prefill_plan import predicted

    return predicted(plan, order, rates)


def add_orders(measure: Measure, row: Result, taken: Mapping[str, list[float]], kernels: Mapping[str, str]) -> None:
    """Add the rows of the other orders, from inside the samples of the primary one."""
    from kvbench.timing.gpu_rows import add_series

    for order in ("q_outer", "swap", "near"):
        add_series(
            measure, f"{order}_time", taken[order][-row.n :], unit="s", better="lower", kernel=kernels[order],
            status=row.status, reason=row.reason,
        )  # fmt: skip


def judge(measure: Measure, seen: Mapping[str, float], told: Mapping[str, float]) -> None:
    """Note winner and predicted winner among the orders that read far KV, and whether they agree."""
    far = [order for order in seen if order != "near"]
    winner, expected = (min(far, key=of.__getitem__) for of in (seen, told))
    measure.note("winner", winner)
    measure.note("predicted_winner", expected)
    measure.note("agrees", seen[expected] <= TIE * seen[winner])
    for order in seen:
        measure.note(f"time_{order}", seen[order])
        measure.note(f"predicted_{order}", told[order])


def on_gpu(measure: Measure, shape: Attention) -> None:
    """Measure the GPU form: KV in page-locked memory, read by its alias in both orders, swapped, or near."""
    from kvbench.systems.directkv.gpu_prefill import ORDERS, GpuPrefill
    from kvbench.timing.gpu_rows import add_sampled, resolved
    from kvbench.timing.gpu_rows import on_gpu as describe_gpu
    from kvbench.timing.gpu_session import GpuSession

    with GpuSession(0) as gpu:
        describe_gpu(measure, gpu, link=True)
        works = {
            order: GpuPrefill(order, gpu.service, gpu.kernels, gpu.enter, shape, LAYERS, measure.context.seed)
            for order in ORDERS
        }
        runs = {order: gpu.clock.cold(work.submit, work.operations, work.streams) for order, work in works.items()}

        def verify() -> None:
            why = resolved(runs["kv_outer"])
            if why:
                measure.skip(why)
            for order, work in works.items():
                work.spoil()
                runs[order](1)
                work.check()

        own = works["kv_outer"]
        measure(
            runs["kv_outer"], verify=verify, kernel=own.kernel, unique=own.unique, demand=own.demand,
            near=own.near_traffic, transport="direct",
        )  # fmt: skip
        for order in ("kv_outer", "q_outer"):
            note_link(measure, gpu, order, works[order].submit, (own.unique, works[order].demand))
        for order in ("q_outer", "swap", "near"):
            add_sampled(
                measure, gpu, f"{order}_time", runs[order], unit="s", better="lower", amount=1.0, events=runs[order],
                kernel=works[order].kernel,
            )  # fmt: skip
        for order, work in works.items():
            measure.note(f"demand_{order}", work.demand)
            measure.note(f"near_buffer_{order}", work.buffer)
            measure.note(f"work_items_{order}", work.work_items)


def note_link(
    measure: Measure, gpu: GpuSession, order: str, submit: Callable[[Stream], None], bounds: tuple[int, int]
) -> None:  # fmt: skip
    """Keep the link bytes of one pass as the board counts them, or their bounds and why nobody does."""
    from kvbench.systems.directkv.gpu_attention import link_of

    boards = gpu.board()[0].indices
    found = link_of(gpu.service, gpu.enter, gpu.clock.stream, boards[0] if boards else None, submit, bounds)
    measure.note(f"link_{order}", found.value)
    measure.note(f"link_source_{order}", found.source)
    measure.note(f"link_high_{order}", found.high)
    measure.note("link_not_by", found.reason or None)
