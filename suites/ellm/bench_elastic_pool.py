"""One elastic pool against two static ones under the same requests (eLLM, sections 1 and 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from kvbench.contract.result import Better

TOKENS = 1 << 19  # of KV cache in all memory: 64 GiB of Llama-3-8B
REQUESTS = 6000  # more than are admitted: the queue never runs dry


@bench(
    version=1, metric="admitted_ratio", unit="1", better="higher", basis="simulated", limit=180.0,
    extra_metrics=[
        "batch_ratio", "batch_elastic", "batch_isolated", "stalls_elastic", "stalls_isolated", "maps_elastic",
        "maps_isolated", "chunks_borrowed", "bytes_copied", "play_time",
    ],
    seconds={"smoke": 1.2, "quick": 2.0, "full": 6.0},
    driver=axis.choice("host", "cuda"),
    context=axis.integer(
        smoke=["2048", "131072"], quick="2048..131072", full=["2048", "8192", "32768", "65536", "131072", "262144"],
        low=2048, high=1 << 19,
    ),
    chunks=axis.integer(smoke=["1024"], quick=["2048"], full=["4096"], low=256, high=1 << 15),
    steps=axis.integer(smoke=["150"], quick=["300"], full=["1000"], high=1 << 20),
)  # fmt: skip
def elastic_pool(case: Case, measure: Measure) -> None:
    """Requests admitted by an elastic pool over those by two static pools, by the longest context they must hold.

    Static pools set the activations of one prompt of that length aside. Requests are ShareGPT-like (at most 2048
    tokens), all waiting from the start; steps are decode steps, with prefills before each as memory allows. Lengths and
    steps are played, so the ratio is simulated. Every chunk is really mapped: a small one for one in proportion.
    """
    from kvbench.systems.ellm.drivers import open_driver
    from kvbench.systems.ellm.isolated import Memory, play, requests
    from kvbench.timing.clock import now_ns

    gpu = None
    size = 4096
    if case.driver == "cuda":
        from kvbench.memory.vmm.cuda import CudaVmm
        from kvbench.timing.gpu_rows import on_gpu
        from kvbench.timing.gpu_session import GpuSession

        gpu = measure.enter(GpuSession(0))
        on_gpu(measure, gpu, link=False)
        size = CudaVmm(gpu.device).granularity()
    memory = Memory(size, case.chunks, TOKENS // case.chunks)
    vmm, touch = open_driver(measure.enter, case.chunks * size, size, None if gpu is None else gpu.service)
    stream = requests(REQUESTS, measure.context.seed)
    began = now_ns()
    elastic, isolated = (
        play(vmm, memory, case.context, stream, case.steps, elastic=each, touch=touch) for each in (True, False)
    )
    seconds = (now_ns() - began) * 1e-9
    measure.simulated(
        elastic.admitted / isolated.admitted, source="isolated.play",
        detail={
            "admitted_elastic": elastic.admitted, "admitted_isolated": isolated.admitted,
            "finished_elastic": elastic.finished, "finished_isolated": isolated.finished,
            "preempted_elastic": elastic.preempted, "preempted_isolated": isolated.preempted,
            "chunk_bytes": size, "tokens_per_chunk": memory.tokens_per_chunk, "requests": REQUESTS,
        },
    )  # fmt: skip
    counted: list[tuple[str, float, Better]] = [
        ("batch_ratio", elastic.largest_batch / isolated.largest_batch, "higher"),
        ("batch_elastic", elastic.largest_batch, "higher"),
        ("batch_isolated", isolated.largest_batch, "higher"),
        ("stalls_elastic", elastic.stalls, "lower"),
        ("stalls_isolated", isolated.stalls, "lower"),
        ("maps_elastic", elastic.maps_per_1000, "lower"),
        ("maps_isolated", isolated.maps_per_1000, "lower"),
        ("chunks_borrowed", elastic.borrowed, "lower"),
    ]
    for metric, value, better in counted:
        measure.extra(metric, float(value), unit="1", better=better, n=1, basis="simulated")
    measure.extra("bytes_copied", float(elastic.moved_bytes + isolated.moved_bytes), unit="B", better="lower", n=1)
    measure.extra("play_time", seconds, unit="s", better="lower", n=1)
