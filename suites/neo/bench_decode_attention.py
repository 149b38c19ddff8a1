"""Decode attention over a paged KV cache, on cores and on a GPU: NEO's claim that memory bandwidth bounds it (N1).

Llama-3-8B has 8 KV heads of 128 and 4 query heads each; the group axis takes in 7B (1) and 70B (8). Then what decides
it on cores: how the work is cut (N3), the size of a page (N4), the threads (N10).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from kvbench.attention.cpu_work import DecodeWork
    from kvbench.attention.oracles import DenseDecode
    from kvbench.contract.result import Result

LEAST_BYTES = 256 << 20
# The first two hold the same bytes; the third is one long request among short ones.
MIXES = {"single": [65536], "uniform": [8192] * 8, "skewed": [16384] + [256] * 15}
TORCH = ("torch_sdpa", "torch_view", "torch_matmul")


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", extra_metrics=["flops"], limit=120.0,
    seconds={"smoke": 1.5, "quick": 7.0, "full": 50.0},
    where=lambda a: (
        (a["impl"] != "numpy" or (a["threads"] == 1 and a["device"] == "cpu"))
        and (a["device"] == "cpu" or (a["impl"] in ("kvbench", "torch_sdpa") and a["threads"] == "all"))
    ),
    device=axis.choice("cpu", "gpu"),
    impl=axis.choice(
        "kvbench", "numpy", *TORCH, smoke=["kvbench", "torch_matmul"], quick=["kvbench", "torch_view", "torch_matmul"],
    ),
    dtype=axis.choice("fp32", "fp16", "bf16", smoke=["bf16"], quick=["bf16"]),
    group=axis.integer(smoke=["4"], quick=["4"], full=["1", "4", "8"], low=1, high=16),
    kv_heads=axis.integer(smoke=["8"], quick=["8"], full=["8"], low=1, high=128),
    head_dim=axis.integer(smoke=["128"], quick=["128"], full=["128"], low=64, high=256),
    batch=axis.integer(smoke=["4"], quick=["4"], full=["1", "16"], low=1, high=4096),
    context=axis.integer(smoke=["16384"], quick=["16384"], full=["1024", "16384"], low=1, high=1 << 20),
    page_tokens=axis.integer(smoke=["16"], quick=["16"], full=["16"], low=8, high=256),
    threads=axis.threads(full=["1", "all"]),
    order=axis.choice("shuffled", "sorted", smoke=["shuffled"], quick=["shuffled"], full=["shuffled"]),
)  # fmt: skip
def decode_attention(case: Case, measure: Measure) -> None:
    """Unique KV bytes per second of one decode step a layer, enough layers in turn to be out of the caches.

    Ceilings, interleaved on the same memory and threads: a gather read of whole pages in the tables' order, then a
    sequential read. The forms other than kvbench read dense keys and values, which is their best case.
    """
    from kvbench.attention import oracles
    from kvbench.attention.cpu_work import DecodeWork, layers_for, nbytes_for
    from kvbench.attention.shapes import Shape

    shape = Shape(case.dtype, case.group * case.kv_heads, case.kv_heads, case.head_dim, case.page_tokens)
    if case.device == "gpu":
        return on_gpu(case, measure)
    lengths = [case.context] * case.batch
    dense = case.impl != "kvbench"
    if dense and case.context % case.page_tokens:
        measure.skip(f"{case.impl} reads dense layers: context {case.context} must be a multiple of {case.page_tokens}")
    if case.impl in TORCH:
        oracles.warm_threads(case.threads)
    team = measure.team(case.threads)
    layers = layers_for(shape, lengths, max(LEAST_BYTES, 4 * measure.context.llc))
    buffer = measure.target(nbytes_for(shape, lengths, layers), "thp")
    paged = DecodeWork(shape, lengths, layers, team, buffer.address, order=case.order, seed=measure.context.seed)
    work = paged.dense(case.impl, case.threads) if dense else paged
    if case.impl in TORCH:
        measure.threads(oracles.thread_ids())
    beside_ceilings(measure, work, paged)
    return None


def beside_ceilings(measure: Measure, work: DecodeWork | DenseDecode, paged: DecodeWork) -> None:
    """Time ``work`` in turns with a gather of ``paged``'s pages and a sequential read of the same memory."""
    from kvbench.measure import Reference

    measure.working_set(paged.nbytes)
    measure.note("layers", paged.layers)
    gathers = paged.gathers()
    best = measure.best({name: gather.run for name, gather in gathers.items()}, rounds=1)
    measure.note("gather_variant", best)
    row = measure.pair(
        work.run, [Reference(*ceiling) for ceiling in paged.ceilings(gathers[best])], unique=work.kv_bytes,
        rate_of="unique", verify=work.verify, kernel=work.kernel, transport="direct",
        ceilings=measure.dram_ceilings(paged.nbytes),
    )  # fmt: skip
    if row.value is None or row.seconds is None:
        return
    detail = paged.detail(row.value, row.ceilings[0].value, row.ceilings[1].value)
    if work is not paged:
        detail = {"read_fraction": detail["read_fraction"], "bound": None, "bound_reason": "known of kvbench only"}
    for name, value in detail.items():
        measure.note(name, value)
    add_flops(measure, work.flops, row)


def add_flops(measure: Measure, flops: float, row: Result) -> None:
    """Add the arithmetic of a pass beside its bytes."""
    if row.seconds is None:
        return
    measure.extra(
        "flops", flops / row.seconds, unit="FLOP/s", better="higher", n=row.n, status=row.status,
        reason=row.reason, kernel=row.kernel,
    )  # fmt: skip


def on_gpu(case: Case, measure: Measure) -> None:
    """Measure the GPU form of the case, each pass from a flushed L2; its ceiling is a read of the same memory."""
    from kvbench.attention.gpu import open_decode
    from kvbench.attention.shapes import Shape
    from kvbench.measure import Reference
    from kvbench.timing.gpu_rows import on_gpu as describe
    from kvbench.timing.gpu_rows import proof
    from kvbench.timing.gpu_session import GpuSession

    shape = Shape(case.dtype, case.group * case.kv_heads, case.kv_heads, case.head_dim, case.page_tokens)
    lengths = [case.context] * case.batch
    if case.impl != "kvbench" and case.context % case.page_tokens:
        measure.skip(f"{case.impl} reads dense layers: context {case.context} must be a multiple of {case.page_tokens}")
    with GpuSession(0) as gpu:
        describe(measure, gpu, link=False)
        work = open_decode(
            case.impl, gpu.service, gpu.kernels, gpu.enter, shape, lengths,
            least_bytes=max(LEAST_BYTES, 4 * gpu.device.facts.l2_bytes), order=case.order, seed=measure.context.seed,
        )  # fmt: skip
        reader = work.reader()
        measure.note("layers", work.layers)
        measure.note("work_items", work.work_items)
        measure.note("working_set", reader.nbytes)
        run, read = gpu.clock.cold(work.submit, work.operations), gpu.clock.cold(reader.submit)

        verify = proof(measure, work, run, read)
        row = measure.pair(
            run, Reference("HBM read of the same memory", read, reader.nbytes, reader.check), near=work.kv_bytes,
            unique=work.kv_bytes, rate_of="unique", verify=verify, kernel=work.kernel, transport="direct",
            ceilings=[gpu.memory_ceiling()],
        )  # fmt: skip
    if row.value is None:
        return
    add_flops(measure, work.flops, row)
    measure.note("bound", "work items < multiprocessors" if work.work_items < gpu.device.facts.sms else None)
    measure.note("tokens_per_ms", round(row.value / shape.token_bytes * 1e-3, 1))


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", extra_metrics=["flops"], limit=120.0,
    seconds={"smoke": 1.4, "quick": 7.0, "full": 50.0},
    page_tokens=axis.integer(smoke=["16", "64"], quick=["16", "256"], full="8..256", low=8, high=256),
    order=axis.choice("shuffled", "sorted", smoke=["shuffled"], quick=["shuffled"]),
    group=axis.integer(smoke=["4"], quick=["4"], full=["1", "4", "8"], low=1, high=16),
    threads=axis.threads(smoke=["1"], quick=["1"], full=["1", "all"]),
)  # fmt: skip
def page_size(case: Case, measure: Measure) -> None:
    """Unique KV bytes per second by tokens a page; bf16, 4 sequences of 16k tokens, 8 KV heads of 128.

    The gather ceiling reads fragments of the same size in the same order, so its own column shows what memory loses to
    small pages and the fraction what the kernel loses beyond it. `sorted` tables lie in order.
    """
    from kvbench.attention.cpu_work import DecodeWork, layers_for, nbytes_for
    from kvbench.attention.shapes import Shape

    shape = Shape("bf16", 8 * case.group, 8, 128, case.page_tokens)
    lengths = [16384] * 4
    team = measure.team(case.threads)
    layers = layers_for(shape, lengths, max(LEAST_BYTES, 4 * measure.context.llc))
    buffer = measure.target(nbytes_for(shape, lengths, layers), "thp")
    seed = measure.context.seed
    work = DecodeWork(shape, lengths, layers, team, buffer.address, order=case.order, seed=seed)
    beside_ceilings(measure, work, work)


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", extra_metrics=["flops"], limit=120.0,
    seconds={"smoke": 1.4, "quick": 7.0, "full": 50.0},
    split=axis.choice("pages", "sequences", smoke=["pages"]),
    mix=axis.choice(*MIXES, smoke=["single", "uniform"], quick=["skewed"]),
    group=axis.integer(smoke=["4"], quick=["4"], full=["1", "4", "8"], low=1, high=16),
    threads=axis.threads(smoke=["all"], quick=["all"]),
)  # fmt: skip
def split_kv(case: Case, measure: Measure) -> None:
    """Unique KV bytes per second on one sequence of 64k tokens, 8 of 8k, and one of 16k among 15 of 256; bf16, page 16.

    By pages the work of any mix is equal parts, and cut sequences are merged inside the call; by sequences a thread
    waits for the longest. Ceilings as in decode_attention.
    """
    from kvbench.attention.cpu_work import DecodeWork, layers_for, nbytes_for
    from kvbench.attention.shapes import Shape

    shape = Shape("bf16", 8 * case.group, 8, 128, 16)
    lengths = MIXES[case.mix]
    team = measure.team(case.threads)
    layers = layers_for(shape, lengths, max(LEAST_BYTES, 4 * measure.context.llc))
    buffer = measure.target(nbytes_for(shape, lengths, layers), "thp")
    seed = measure.context.seed
    work = DecodeWork(shape, lengths, layers, team, buffer.address, seed=seed, split=case.split)
    beside_ceilings(measure, work, work)


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", extra_metrics=["flops"], limit=120.0,
    seconds={"smoke": 1.4, "quick": 7.0, "full": 50.0},
    threads=axis.threads(smoke=["1", "all"], quick=["1", "all"]),
    group=axis.integer(smoke=["8"], quick=["8"], full=["1", "4", "8", "16"], low=1, high=16),
    dtype=axis.choice("fp32", "fp16", "bf16", smoke=["bf16"], quick=["bf16"], full=["fp16", "bf16"]),
    pages=axis.choice("4k", "thp", smoke=["thp"], quick=["thp"], full=["4k", "thp"]),
)  # fmt: skip
def threads(case: Case, measure: Measure) -> None:
    """Unique KV bytes per second by threads; 4 sequences of 16k tokens, page 16, 8 KV heads of 128.

    One query head a KV head needs few cores to saturate memory, eight need more: `bound` and `resident_rate`, what the
    cores reach with KV in their caches, say which side of it a row is on. `pages`: of the operating system.
    """
    from kvbench.attention.cpu_work import DecodeWork, layers_for, nbytes_for
    from kvbench.attention.shapes import Shape

    shape = Shape(case.dtype, 8 * case.group, 8, 128, 16)
    lengths = [16384] * 4
    team = measure.team(case.threads)
    layers = layers_for(shape, lengths, max(LEAST_BYTES, 4 * measure.context.llc))
    buffer = measure.target(nbytes_for(shape, lengths, layers), case.pages)
    work = DecodeWork(shape, lengths, layers, team, buffer.address, seed=measure.context.seed)
    beside_ceilings(measure, work, work)
