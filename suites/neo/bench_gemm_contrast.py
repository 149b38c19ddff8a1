"""NEO's premise (N2): in matrix products cores are far behind a GPU, in decode attention only by memory bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

if TYPE_CHECKING:
    from kvbench.contract.result import Result
    from kvbench.kernels.gemm import CoreGemm
    from kvbench.timing.sampler import Run
    from kvbench.timing.samples import Samples

LEAST_BYTES = 256 << 20
BATCH, CONTEXT, PAGE = 4, 16384, 16  # of the attention beside it; KV heads and head_dim are those of the model


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether there is such a case: the GPU's product is in bf16, and takes no threads of the host."""
    return axes["device"] == "cpu" or (axes["dtype"] == "bf16" and axes["threads"] == "all")


@bench(
    version=1, metric="flops", unit="FLOP/s", better="higher", where=exists, limit=180.0,
    extra_metrics=["attention_bandwidth", "read_bandwidth", "balance", "gemm_ratio", "bandwidth_ratio"],
    seconds={"smoke": 3.0, "quick": 6.0, "full": 50.0},
    device=axis.choice("cpu", "gpu"),
    dtype=axis.choice("fp32", "bf16", smoke=["bf16"], quick=["bf16"]),
    model=axis.choice("llama-3-8b", "opt-13b", "qwen2.5-14b", smoke=["llama-3-8b"], quick=["llama-3-8b"]),
    tokens=axis.integer(smoke=["64"], quick=["64"], full=["1", "16", "64", "512", "4096"], low=1, high=1 << 17),
    threads=axis.threads(smoke=["all"], quick=["all"], full=["1", "all"]),
)  # fmt: skip
def gemm_contrast(case: Case, measure: Measure) -> None:
    """FLOP/s of tokens x hidden x ffn beside decode attention's bandwidth over 268 MB and more of KV in bf16.

    attention_bandwidth: unique KV bytes, 4 sequences of 16k tokens, page 16; read_bandwidth: a sequential read of the
    same memory; balance: FLOP/s over read_bandwidth, the FLOP a byte that attention needs to be bound by arithmetic
    (it has one a query head of a KV head, in 16 bit). On a GPU the cores are measured in the same case: gemm_ratio and
    bandwidth_ratio say how many times as fast the GPU is at either.
    """
    if case.device == "gpu":
        on_gpu(case, measure)
        return
    cores = Cores(case, measure)
    row = measure(as_run(cores.gemm.run), ops=cores.gemm.flops, verify=cores.gemm.verify, kernel=cores.gemm.kernel)
    measure.note("weight_bytes", cores.gemm.weight_bytes)
    if row.value is None or row.seconds is None:
        return
    measure.note("weight_rate", cores.gemm.weight_bytes / row.seconds)
    memory = cores.memory()
    bandwidths(measure, memory)
    balance(measure, row, memory, case.dtype)


@dataclass(frozen=True, slots=True)
class Memory:
    """Decode attention and a plain read of the same memory, sampled in turns; ``kernel`` and bytes a pass of each."""

    attention: Samples
    read: Samples
    kernel: str
    kv_bytes: int
    read_bytes: int
    intensity: float  # FLOP a byte of KV


class Cores:
    """The host's side: a product by all its threads, and attention by a team of as many."""

    def __init__(self, case: Case, measure: Measure) -> None:
        from kvbench.attention import oracles
        from kvbench.model.layers import shape

        self.measure, of = measure, shape(case.model)
        self.model, threads = of, case.threads
        self.gemm: CoreGemm
        if case.dtype == "bf16":
            from kvbench.kernels.gemm import TorchGemm

            oracles.warm_threads(threads)
            self.gemm = TorchGemm(case.tokens, of.hidden, of.ffn, measure.context.seed)
        else:
            from kvbench.kernels.blas import blas_threads
            from kvbench.kernels.gemm import BlasGemm

            library = measure.enter(blas_threads(threads))
            self.gemm = BlasGemm(case.tokens, of.hidden, of.ffn, measure.context.seed, library)
        unpinned(oracles.thread_ids())
        self.gemm.run(1)
        self.team = measure.team(threads)
        measure.threads(oracles.thread_ids())

    def memory(self) -> Memory:
        """Sample attention and a read of its memory in turns."""
        from kvbench.attention.cpu_work import DecodeWork, layers_for, nbytes_for
        from kvbench.attention.shapes import Shape
        from kvbench.kernels.stream import Stream
        from kvbench.timing.sampler import sample_turns

        measure, of = self.measure, self.model
        shape = Shape("bf16", of.heads, of.kv_heads, of.head_dim, PAGE)
        lengths = [CONTEXT] * BATCH
        layers = layers_for(shape, lengths, max(LEAST_BYTES, 4 * measure.context.llc))
        address = measure.target(nbytes_for(shape, lengths, layers), "thp").address
        work = DecodeWork(shape, lengths, layers, self.team, address, seed=measure.context.seed)
        measure.working_set(work.nbytes)
        stream = Stream("read", [address], work.nbytes, self.team)
        attention, read = sample_turns(
            [work.run, stream.run], measure.context.budget, tids=self.team.tids, seed=measure.context.seed
        )
        for run, check in ((work.run, work.verify), (stream.run, stream.verify)):
            run(1)  # the other ran last over the same threads
            check()
        return Memory(attention, read, work.kernel, work.kv_bytes, stream.link_bytes, work.flops / work.kv_bytes)


def unpinned(tids: list[int]) -> None:
    """Let the threads of a library run on every CPU this process has: they inherit those of whoever loaded it."""
    import contextlib
    import os

    everywhere = os.sched_getaffinity(0)
    for tid in tids:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(tid, everywhere)


def bandwidths(measure: Measure, memory: Memory) -> None:
    """Add the rows of attention and of the read, the second the first's ceiling."""
    from kvbench.contract.result import Ceiling

    read = memory.read.summary
    top = None if read is None else memory.read_bytes / read.median
    ceiling = Ceiling("sequential read", top, "measured", "interleaved")
    for metric, samples, amount, kernel, tops in (
        ("attention_bandwidth", memory.attention, memory.kv_bytes, memory.kernel, [ceiling]),
        ("read_bandwidth", memory.read, memory.read_bytes, None, []),
    ):
        found = samples.summary
        if found is None:
            measure.extra(metric, None, unit="B/s", better="higher", reason=samples.reason or "no samples")
            continue
        low, high = (None if s is None else amount / s for s in (found.high, found.low))
        measure.extra(
            metric, amount / found.median, unit="B/s", better="higher", low=low, high=high, n=found.n, kernel=kernel,
            status="tainted" if samples.tainted else "ok", reason=samples.reason if samples.tainted else "",
            seconds=found.median, ceilings=tops,
        )  # fmt: skip


def balance(measure: Measure, row: Result, memory: Memory, dtype: str) -> None:
    """Add the row of FLOP/s of ``row`` over bytes/s of the read: a ratio of two medians, tainted as they are.

    Only a product in the attention's own bf16 says what bounds the attention.
    """
    read = memory.read.summary
    if read is None or row.value is None:
        measure.extra("balance", None, unit="1", better="higher", reason="no read bandwidth")
        return
    tainted = row.status == "tainted" or memory.read.tainted
    value = row.value * read.median / memory.read_bytes
    measure.extra(
        "balance", value, unit="1", better="higher", n=min(row.n, read.n), status="tainted" if tainted else "ok",
        reason=(row.reason or memory.read.reason) if tainted else "",
        detail={
            "attention_flop_per_byte": memory.intensity,
            "attention_bound": None if dtype != "bf16" else "bandwidth" if memory.intensity < value else "arithmetic",
        },
    )  # fmt: skip


def on_gpu(case: Case, measure: Measure) -> None:
    """Measure the GPU's product and attention, then those of the cores, and the two ratios."""
    from kvbench.attention.gpu import open_decode
    from kvbench.attention.shapes import Shape
    from kvbench.kernels.gpu.cublas import Cublas
    from kvbench.model.layers import shape as shape_of
    from kvbench.systems.strata.overlap_victim import Gemm
    from kvbench.timing.gpu_rows import on_gpu as describe
    from kvbench.timing.gpu_rows import proof
    from kvbench.timing.gpu_session import GpuSession
    from kvbench.timing.sampler import sample, sample_turns

    of, seed, budget = shape_of(case.model), measure.context.seed, measure.context.budget
    with GpuSession(0) as gpu:
        describe(measure, gpu, link=False)
        product = Gemm(gpu.enter(Cublas()), gpu.service, gpu.enter, seed, (of.ffn, case.tokens, of.hidden))
        multiply = gpu.clock.cold(product.submit, 1)

        row = measure(multiply, ops=product.flops, verify=proof(measure, product, multiply), kernel=product.kernel)
        if row.value is None:
            return
        shape = Shape("bf16", of.heads, of.kv_heads, of.head_dim, PAGE)
        least = max(LEAST_BYTES, 4 * gpu.device.facts.l2_bytes)
        work = open_decode(
            "kvbench", gpu.service, gpu.kernels, gpu.enter, shape, [CONTEXT] * BATCH, least_bytes=least, seed=seed
        )
        reader = work.reader()
        attend, read = gpu.clock.cold(work.submit, work.operations), gpu.clock.cold(reader.submit)
        taken, beside = sample_turns([attend, read], budget, gate=None, marker=gpu.marker(), seed=seed)
        for run, check in ((attend, work.check), (read, reader.check)):
            run(1)
            check()
        near = Memory(taken, beside, work.kernel, work.kv_bytes, reader.nbytes, work.flops / work.kv_bytes)
    bandwidths(measure, near)
    balance(measure, row, near, case.dtype)
    cores = Cores(case, measure)
    product_far = sample(as_run(cores.gemm.run), budget, seed=seed)
    cores.gemm.verify()
    far = cores.memory()
    measure.note("cpu_gemm_kernel", cores.gemm.kernel)
    measure.note("cpu_attention_kernel", far.kernel)
    ratio(measure, "gemm_ratio", row.value, product_far, cores.gemm.flops)
    attention = near.attention.summary
    ratio(
        measure, "bandwidth_ratio", None if attention is None else near.kv_bytes / attention.median, far.attention,
        far.kv_bytes, near.attention,
    )  # fmt: skip


def as_run(run: Callable[[int], None]) -> Run:
    """Return ``run`` as the sampler takes it: the clock around the call counts."""
    return lambda reps: run(reps)


def ratio(
    measure: Measure, metric: str, near: float | None, far: Samples, amount: float, beside: Samples | None = None
) -> None:
    """Add how many times the GPU's rate is that of the cores, of two medians of one case."""
    if near is None or far.summary is None:
        measure.extra(metric, None, unit="1", better="higher", reason=far.reason or "the GPU has no value")
        return
    rate = amount / far.summary.median
    tainted = far.tainted or (beside is not None and beside.tainted)
    measure.extra(
        metric, near / rate, unit="1", better="higher", n=far.summary.n, status="tainted" if tainted else "ok",
        reason=far.reason if tainted else "", detail={"cpu_rate": rate, "gpu_rate": near},
    )  # fmt: skip
