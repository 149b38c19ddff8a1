"""Decode attention over far KV (DirectKV D5): in place, streamed through a ring, swapped a layer ahead, or near."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvbench.attention.shapes import Shape
    from kvbench.contract.axis import Value
    from kvbench.measure import Reference
    from kvbench.memory.cuda.device import Stream
    from kvbench.systems.directkv.host_attention import StreamDecode, SwapDecode, WholeDecode
    from kvbench.systems.directkv.host_attention_plan import DecodePlan
    from kvbench.timing.gpu_session import GpuSession

# Of KV a pass: a file's rate needs no more, memory must not fit the caches.
FILE_BYTES = {"smoke": 32 << 20, "quick": 64 << 20, "full": 256 << 20}
MEMORY_BYTES, GPU_BYTES = 256 << 20, 512 << 20
HEAD_DIM, PAGE = 128, 16


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether the pair has the method: a ring is the form of reading in place of what cannot be addressed."""
    return axes["method"] != "stream" or axes["pair"] == "dram:file"


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch file of a case: two layers at least, a part of a sequence stored whole."""
    if axes["pair"] != "dram:file":
        return 0
    token = 2 * int(axes["kv_heads"]) * HEAD_DIM * 2
    layer = int(axes["batch"]) * (int(axes["context"]) * token + (1 << 20))
    return max(FILE_BYTES["full"] + layer, 2 * layer)


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", extra_metrics=["near_buffer"], where=exists,
    seconds={"smoke": 0.8, "quick": 2.4, "full": 20.0}, disk=scratch_bytes, limit=180.0,
    pair=axis.choice("dram:dram", "dram@0:dram@1", "dram:file", "hbm:pinned", smoke=["dram:file", "hbm:pinned"]),
    method=axis.choice(
        "in_place", "stream", "swap", "near", smoke=["stream", "swap"], quick=["in_place", "stream", "swap"]
    ),
    kv_heads=axis.integer(smoke=["8"], quick=["8"], full=["1", "2", "4", "8"], high=128),
    group=axis.integer(smoke=["4"], quick=["4"], full=["4", "8"], high=16),
    batch=axis.integer(smoke=["1"], quick=["1"], full=["1", "16"], high=4096),
    context=axis.integer(smoke=["4096"], quick=["4096"], full="1024..65536", high=1 << 20),
)  # fmt: skip
def decode_attention(case: Case, measure: Measure) -> None:
    """Unique KV bytes per second of one decode step a layer over far KV, bf16, head_dim 128, pages of 16 tokens.

    The ceiling, in turns, is that of the same reader: a gather of the same pages where the kernel reads in place, the
    same reads by the same threads with nothing attended to where a ring or a swap brings them. near_buffer: near memory
    the method holds for KV, by the kernel's page tables. Every method needs the same far bytes; the detail names what
    counted them.
    """
    from kvbench.attention.shapes import Shape

    shape = Shape("bf16", case.group * case.kv_heads, case.kv_heads, HEAD_DIM, PAGE)
    if case.pair == "hbm:pinned":
        return on_gpu(case, measure, shape)
    return on_host(case, measure, shape)


def on_host(case: Case, measure: Measure, shape: Shape) -> None:
    """Measure the host form."""
    from kvbench.memory.tiers import parse_pair, require_tier
    from kvbench.systems.directkv.host_attention import open_decode
    from kvbench.systems.directkv.host_attention_far import NearMemory, near_cpus, open_far
    from kvbench.systems.directkv.host_attention_plan import DecodePlan, fill_far, part_pages_for
    from kvbench.systems.directkv.host_rows import unmeasured

    tiers, context = parse_pair(case.pair), measure.context
    for tier in (tiers.near, tiers.far):
        require_tier(tier)
    in_memory = tiers.far.name == "dram"
    wanted = max(MEMORY_BYTES, 4 * context.llc) if in_memory else FILE_BYTES[context.profile]
    layers = max(2, -(-wanted // (case.batch * case.context * shape.token_bytes)))
    plan = DecodePlan(
        shape, (case.context,) * case.batch, layers, part_pages_for(shape, case.context), seed=context.seed
    )
    cpus = near_cpus(tiers.near, context.topology)
    copies = case.method in ("stream", "swap") and in_memory
    if copies and len(cpus) < 2:
        measure.skip("one core attends and one copies: there is a single one")
    node = tiers.far.node
    far = open_far(
        tiers.far, plan.nbytes, measure.enter, lambda n: measure.target(n, "thp", node=node).address, context.scratch,
        context.seed,
    )  # fmt: skip
    fill_far(plan, far)
    team = measure.team_on(cpus[:-1] if copies else cpus)
    near = NearMemory(measure.enter, node=tiers.near.node)
    work = open_decode(case.method, plan, far, team, near, measure.enter, cpus[-1:] if copies else cpus)
    if in_memory:
        measure.working_set(plan.nbytes)
    work.run(1)
    link = work.link()
    for flag in far.flags:
        measure.flag(flag)
    if link is None:
        unmeasured(measure, f"no pass counted by {work.counted_by}")
    row = measure.pair(
        work.run, ceiling(measure, work), unique=plan.kv_bytes, link=link, near=work.near_traffic,
        demand=0 if case.method == "near" else plan.kv_bytes, rate_of="unique", verify=work.verify, kernel=work.kernel,
        transport="direct" if case.method in ("in_place", "near") else "staged",
        gate="delay" if in_memory else None,
    )  # fmt: skip
    describe(measure, plan, work, "same node" if case.pair == "dram:dram" else str(tiers.far))
    held = near.resident
    if row.value is not None:
        measure.extra(
            "near_buffer", held, unit="B", better="lower", n=0 if held is None else 1, kernel=work.kernel,
            status="skipped" if held is None else row.status, detail={"asked": work.buffer},
            reason="the kernel does not tell which pages are resident" if held is None else row.reason,
        )  # fmt: skip


def ceiling(measure: Measure, work: WholeDecode | StreamDecode | SwapDecode) -> Reference:
    """Return the measured ceiling of the reader of ``work``."""
    from kvbench.measure import Reference
    from kvbench.systems.directkv.host_attention import WholeDecode

    if not isinstance(work, WholeDecode):
        measure.threads([*work.team.tids, *work.pipe.tids])
        if len(work.team) + work.pipe.readers > len(measure.context.topology.affinity):
            measure.crowded()  # readers of a file wait most of the time; those that do not, wait for a CPU
        if not work.pipe.pinned:
            measure.flag("unpinned")
        return Reference("the same reads by the same readers, nothing attended to", work.read, work.plan.kv_bytes)
    gathers = work.gathers()
    runs = {name: work.cold(gather.run) for name, gather in gathers.items()}
    best = measure.best(runs, rounds=1)
    measure.note("gather_variant", best)
    return Reference(
        "gather read of whole pages", runs[best], gathers[best].link_bytes, gathers[best].verify
    )  # fmt: skip


def describe(measure: Measure, plan: DecodePlan, work: WholeDecode | StreamDecode | SwapDecode, far: str) -> None:
    """Keep what a row says beside its rate."""
    link = work.link()
    measure.note("layers", plan.layers)
    measure.note("far", far)
    measure.note("link_source", work.counted_by)
    measure.note("link_mean", link)
    measure.note("link_padding", round(plan.nbytes / plan.kv_bytes, 4))
    measure.note("work_items", sum(plan.parts) * plan.shape.kv_heads)


def on_gpu(case: Case, measure: Measure, shape: Shape) -> None:
    """Measure the GPU form: the kernel reads page-locked memory by its alias, or layers are copied ahead of it."""
    from kvbench.measure import Reference
    from kvbench.systems.directkv.gpu_attention import open_far_decode
    from kvbench.timing.gpu_rows import on_gpu as describe_gpu
    from kvbench.timing.gpu_rows import proof
    from kvbench.timing.gpu_session import GpuSession

    with GpuSession(0) as gpu:
        describe_gpu(measure, gpu, link=case.method != "near")
        work = open_far_decode(
            case.method, gpu.service, gpu.kernels, gpu.enter, shape, [case.context] * case.batch,
            least_bytes=GPU_BYTES, seed=measure.context.seed,
        )  # fmt: skip
        reader = work.reader()
        run, read = gpu.clock.cold(work.submit, work.operations, work.streams), gpu.clock.cold(reader.submit)

        name = "HBM read of the same memory" if case.method == "near" else "full-grid SM read of the same far memory"
        verify = proof(measure, work, run, read)
        row = measure.pair(
            run, Reference(name, read, reader.nbytes, reader.check), unique=work.kv_bytes, demand=work.demand_bytes,
            near=work.near_traffic, rate_of="unique", verify=verify, kernel=work.kernel, transport=work.transport,
            ceilings=[gpu.memory_ceiling() if case.method == "near" else gpu.link_ceiling(1)],
        )  # fmt: skip
        measure.note("layers", work.layers)
        measure.note("work_items", work.work_items)
        if case.method != "near":
            note_link(measure, gpu, work.submit, (work.kv_bytes, work.demand_bytes))
    if row.value is not None:
        measure.extra(
            "near_buffer", float(work.buffer), unit="B", better="lower", n=1, status=row.status, reason=row.reason,
            kernel=work.kernel,
        )  # fmt: skip


def note_link(measure: Measure, gpu: GpuSession, submit: Callable[[Stream], None], bounds: tuple[int, int]) -> None:
    """Keep the link bytes of one pass as the board counts them, or their bounds and why nobody does."""
    from kvbench.systems.directkv.gpu_attention import link_of

    boards = gpu.board()[0].indices
    found = link_of(gpu.service, gpu.enter, gpu.clock.stream, boards[0] if boards else None, submit, bounds)
    measure.note("link_counted", found.value)
    measure.note("link_source", found.source)
    measure.note("link_low", found.low)
    measure.note("link_high", found.high)
    measure.note("link_not_by", found.reason or None)
