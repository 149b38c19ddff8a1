"""K projection fused with Q K^T (DirectKV D7): new keys cross once, against project, store, read back, score."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvbench.contract.axis import Value

HEAD_DIM = 128


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch file of a case."""
    size = (int(axes["tokens"]) + int(axes["tile"])) * int(axes["kv_heads"]) * HEAD_DIM * 4
    return max(1 << 16, size) if axes["pair"] == "dram:file" else 0


@bench(
    version=1, metric="pass_time", unit="s", better="lower", limit=180.0, disk=scratch_bytes,
    extra_metrics=["separate_time", "gain", "predicted_gain", "near_buffer", "link_ratio"],
    seconds={"smoke": 1.5, "quick": 4.0, "full": 40.0},
    pair=axis.choice("dram:file", "dram:dram", "dram@0:dram@1", "hbm:pinned", smoke=["dram:file", "hbm:pinned"],
                     quick=["dram:file", "hbm:pinned"]),
    tokens=axis.integer(smoke=["512"], quick=["1", "1024"], full=["1", "256", "1024", "4096"], high=1 << 16),
    width=axis.integer(smoke=["512"], quick=["1024"], full=["4096"], high=1 << 16),
    kv_heads=axis.integer(smoke=["4"], quick=["8"], full=["8"], high=128),
    group=axis.integer(smoke=["1"], quick=["1"], full=["1", "4"], high=16),
    tile=axis.integer(smoke=["128"], quick=["256"], full=["128", "256"], high=1 << 14),
)  # fmt: skip
def fused_projection(case: Case, measure: Measure) -> None:
    """Seconds of K = X W and Q K^T of `tokens` new tokens, fused: keys are scored where they are made and stored once.

    In turns with it separate_time: project all, store all, read all back, score all. gain: separate over fused;
    predicted_gain: 1 + 2 K bytes / link rate / fused seconds, the rate of each way from the stages of the same run.
    `tokens=1` is a decode step's new token; `tile` tokens are projected at a time. link_ratio: bytes stored and read
    by the fused form over the algebra with padding. On the host float32 with one computing thread, on a GPU bf16.
    """
    if case.pair == "hbm:pinned":
        on_gpu(case, measure)
        return
    from statistics import median

    from kvbench.kernels.blas import one_thread
    from kvbench.memory.tiers import parse_pair, require_tier
    from kvbench.systems.directkv.fused import METHODS, Fused, FusedPlan, predicted_gain
    from kvbench.systems.directkv.host_attention_far import NearMemory, near_cpus, open_far
    from kvbench.timing.clock import now_ns
    from kvbench.timing.gpu_rows import add_series

    tiers, context = parse_pair(case.pair), measure.context
    for tier in (tiers.near, tiers.far):
        require_tier(tier)
    plan = FusedPlan(case.tokens, case.width, case.kv_heads, case.group, HEAD_DIM, case.tile, context.seed)
    measure.note("blas", measure.enter(one_thread()))
    cpus = near_cpus(tiers.near, context.topology)
    if tiers.far.name == "dram" and len(cpus) < 2:
        measure.skip("one core computes and one copies: there is a single one")
    far = open_far(
        tiers.far, plan.nbytes, measure.enter, lambda n: measure.target(n, "thp", node=tiers.far.node).address,
        context.scratch, context.seed,
    )  # fmt: skip
    works = {
        method: Fused(method, plan, far, NearMemory(measure.enter, node=tiers.near.node), measure.enter, cpus[1:])
        for method in METHODS
    }
    # The threads above have every CPU; the one that computes is pinned from here on.
    team = measure.team_on(cpus[:1])
    measure.threads([*team.tids, *(tid for work in works.values() for tid in work.tids)])
    if 1 + far.readers > len(context.topology.affinity):
        measure.crowded()
    for flag in far.flags:
        measure.flag(flag)
    stages: list[dict[str, float]] = []
    separate: list[float] = []

    class Marks:
        """Stages of one pass on the host's clock."""

        def __init__(self) -> None:
            self.seconds: dict[str, float] = {}
            self._last = now_ns()

        def mark(self, name: str) -> None:
            now = now_ns()
            self.seconds[name], self._last = (now - self._last) * 1e-9, now

    def once() -> float:
        begin = now_ns()
        works["fused"].run(1)
        own = (now_ns() - begin) * 1e-9
        marks = Marks()
        works["separate"].run(1, marks)
        stages.append(marks.seconds)
        separate.append(sum(marks.seconds.values()))
        return own

    def verify() -> None:
        for work in works.values():
            work.verify()

    own = works["fused"]
    row = measure(
        lambda reps: sum(once() for _ in range(reps)), verify=verify, kernel=own.kernel, unique=plan.k_bytes,
        demand=plan.k_bytes, link=own.link, transport="staged",
    )  # fmt: skip
    measure.note("compute_threads", 1)
    measure.note("far", "same node" if case.pair == "dram:dram" else str(tiers.far))
    measure.note("link_source", "the calls of storer and readers")
    if row.value is None:
        return
    kept = stages[-max(1, row.n) :]
    add_series(
        measure, "separate_time", separate[-max(1, row.n) :], unit="s", better="lower", kernel=works["separate"].kernel,
        status=row.status, reason=row.reason,
    )  # fmt: skip
    middle = {name: median(one[name] for one in kept) for name in kept[0]}
    size = plan.link_bytes("fused")
    rates = size / middle["stored"], size / middle["read"]
    gain = median(separate[-max(1, row.n) :]) / row.value
    told = predicted_gain(plan, row.value, *rates)
    measure.extra(
        "gain", gain, unit="1", better="higher", n=row.n, status=row.status, reason=row.reason, kernel=own.kernel
    )
    measure.extra(
        "predicted_gain", told, unit="1", better="higher", n=row.n, basis="modelled", status=row.status,
        reason=row.reason, kernel="1 + K / B_store / T_fused + K / B_read / T_fused, rates of the same run",
    )  # fmt: skip
    measure.extra(
        "near_buffer", own.resident, unit="B", better="lower", n=row.n, kernel=own.kernel,
        status=row.status if own.resident is not None else "skipped", detail={"asked": own.buffer},
        reason=row.reason if own.resident is not None else "the kernel does not tell which pages are resident",
    )  # fmt: skip
    measure.extra(
        "link_ratio", (own.link() or 0) / size, unit="1", better="lower", n=row.n, status=row.status,
        reason=row.reason, kernel="the calls of storer and readers",
    )  # fmt: skip
    core = middle["projected"] + middle["scored"]
    exposed = sum(middle.values()) / max(core, middle["stored"])
    measure.note("predicted_gain_exposed", exposed)  # where the store is longer than the work that should hide it
    for name, seconds in middle.items():
        measure.note(f"T_{name}", seconds)
    measure.note("near_buffer_separate", works["separate"].buffer)
    measure.note("link_separate", works["separate"].link())
    measure.note("link_separate_algebra", plan.link_bytes("separate"))
    measure.note("store_rate", rates[0])
    measure.note("read_rate", rates[1])


def on_gpu(case: Case, measure: Measure) -> None:
    """Measure the GPU form: keys go to page-locked memory by its alias."""
    from kvbench.systems.directkv.gpu_fused import METHODS, GpuFused
    from kvbench.timing.gpu_rows import add_sampled, resolved
    from kvbench.timing.gpu_rows import on_gpu as describe_gpu
    from kvbench.timing.gpu_session import GpuSession

    with GpuSession(0) as gpu:
        describe_gpu(measure, gpu, link=True)
        works = {
            method: GpuFused(
                method,
                gpu.service,
                gpu.kernels,
                gpu.enter,
                case.tokens,
                case.width,
                case.kv_heads,
                case.group,
                HEAD_DIM,
                measure.context.seed,
            )
            for method in METHODS
        }
        runs = {method: gpu.clock.cold(work.submit, work.operations) for method, work in works.items()}

        def verify() -> None:
            why = resolved(runs["fused"])
            if why:
                measure.skip(why)
            for method, work in works.items():
                work.spoil()
                runs[method](1)
                work.check()

        own = works["fused"]
        row = measure(
            runs["fused"], verify=verify, kernel=own.kernel, unique=own.unique, demand=own.demand, transport="direct",
        )  # fmt: skip
        measure.note("link_source", "bounds: at least unique, at most demand")
        add_sampled(
            measure, gpu, "separate_time", runs["separate"], unit="s", better="lower", amount=1.0,
            events=runs["separate"], kernel=works["separate"].kernel,
        )  # fmt: skip
        if row.value is None:
            return
        measure.extra(
            "near_buffer", float(own.buffer), unit="B", better="lower", n=row.n, status=row.status, reason=row.reason,
            kernel=own.kernel,
        )  # fmt: skip
