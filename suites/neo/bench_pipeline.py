"""NEO's pipeline over a stack of layers: what overlaps, what stalls, which share of the decodes to offload (N6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

if TYPE_CHECKING:
    from kvbench.contract.result import Basis, Result
    from kvbench.systems.neo.rig import Rig, Taken
    from kvbench.systems.neo.schedule import Lane

PAGE, KV_ELEMENT = 16, 2  # tokens a page; bytes of an element of KV
PIPELINED = ("symmetric", "asymmetric")
SERIALISED = 0.5  # of the overlap a schedule should have: below it the two sides did not run beside each other (T63)
SWEEPS = {"coarse": (0, 25, 50, 100), "fine": (0, 6, 12, 25, 38, 50, 75, 100)}
FORMULA = "exact recurrence over the stages' seconds alone, same samples"
NEAR = axis.choice("T4", "A10G", "H100", "gpu", smoke=["T4"], quick=["T4", "A10G"])
MODEL = axis.choice("llama-3-8b", "qwen2.5-14b", "opt-13b", smoke=["llama-3-8b"], quick=["llama-3-8b"])
SCALE = axis.choice("full", "small", smoke=["full"], quick=["full"], full=["full"])
REQUESTS = axis.integer(smoke=["16"], quick=["16"], full=["16"], high=4096)
PROMPT = axis.integer(smoke=["512"], quick=["512"], full=["0", "512"], low=0, high=1 << 16)
LAYERS = axis.integer(smoke=["4"], quick=["4"], full=["8"], high=256)


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether there is such a case: gpu_only needs decodes near, the other modes decodes on the CPU."""
    return int(axes["offload"]) < 100 if axes["mode"] == "gpu_only" else int(axes["offload"]) > 0


def basis_of(axes: Mapping[str, Value]) -> Basis:
    """Return the basis of rows in which the near side has a part."""
    return "measured" if axes["near"] == "gpu" else "emulated"


@bench(
    version=1, metric="iteration_time", unit="s", better="lower", where=exists, basis=basis_of, limit=180.0,
    seconds={"smoke": 1.0, "quick": 1.8, "full": 20.0},
    extra_metrics=[
        "decode_rate", "predicted_time", "near_idle", "cpu_idle", "slack_long", "slack_short", "hidden_tokens",
    ],
    mode=axis.choice("gpu_only", "simple", "symmetric", "asymmetric", smoke=["gpu_only", "simple", "asymmetric"]),
    near=NEAR,
    offload=axis.integer(smoke=["50"], quick=["50"], full=["12", "25", "50", "75", "100"], low=0, high=100),
    context=axis.integer(smoke=["1024"], quick=["2048"], full=["512", "2048", "8192"], high=1 << 20),
    model=MODEL, scale=SCALE, requests=REQUESTS, prompt=PROMPT, layers=LAYERS,
)  # fmt: skip
def pipeline(case: Case, measure: Measure) -> None:
    """One iteration of decodes, part of them attended to by the CPU, beside a prompt's prefill, in one of four orders.

    `offload` percent of the decodes have their KV in host memory. CPU attention is real, on all CPUs but one; the near
    side is real layers (near=gpu) or a thread held to a GPU's published rates (emulated). Rows: the iteration; decodes
    a second; the iteration predicted from its stages alone; the share of it each side waits; the slack of both hide
    inequalities, T_l0 - T_ca1 (long) and T_l1 + T_ga0 - T_ca0 (short), as a share of the longer side; KV tokens of a
    layer the CPU reads within T_l0. gpu_only does the decodes whose KV is near, the others wait. Every output is
    compared with that of a pass without overlap.
    """
    from kvbench.systems.neo.hide import plan
    from kvbench.systems.neo.schedule import Batch

    cpu = round(case.requests * case.offload / 100)
    if case.mode == "gpu_only" and cpu == case.requests:
        measure.skip(f"{case.offload} % of {case.requests} decodes leave none near")
    if case.mode != "gpu_only" and not cpu:
        measure.skip(f"{case.offload} % of {case.requests} decodes are none")
    measure.note("offloaded", cpu)
    batch = Batch(case.prompt, case.requests - cpu, cpu)
    rig = open_rig(case, measure, cpu if case.mode != "gpu_only" else 0)
    rig.use(plan(case.mode, case.layers, batch, rig.cost))
    rig.prepare()
    row = measure(rig.run, verify=rig.verify, kernel=rig.kernel, basis=basis_of(case.axes))
    report(case, measure, rig, row)


@bench(
    version=1, metric="sweep_time", unit="s", better="lower", basis=basis_of, limit=240.0,
    seconds={"smoke": 1.5, "quick": 5.0, "full": 60.0},
    extra_metrics=["best_time", "best_offload", "predicted_offload", "gain"],
    near=NEAR,
    sweep=axis.choice("coarse", "fine", smoke=["coarse"], quick=["fine"], full=["fine"]),
    context=axis.integer(smoke=["1024"], quick=["1024"], full=["512", "2048", "8192"], high=1 << 20),
    model=MODEL, scale=SCALE, requests=REQUESTS, prompt=PROMPT, layers=LAYERS,
)  # fmt: skip
def offload_minimum(case: Case, measure: Measure) -> None:
    """The share of decodes to offload that makes an iteration of the same work shortest: the bottom of the U.

    One sample is a pass at every share of the sweep, asymmetric, 0 % being GPU-only with all KV near. best_time and
    best_offload (percent): the shortest median; predicted_offload: the same of the passes predicted from their stages;
    gain: GPU-only over the best, above 1 where offloading pays. The detail has the median of every share.
    """
    from kvbench.systems.neo.hide import plan
    from kvbench.systems.neo.schedule import Batch

    shares = {s: round(case.requests * s / 100) for s in SWEEPS[case.sweep]}
    shares = {s: n for i, (s, n) in enumerate(shares.items()) if n not in list(shares.values())[:i]}
    rig = open_rig(case, measure, case.requests)
    modes = {s: "asymmetric" if n else "gpu_only" for s, n in shares.items()}
    orders = {
        s: plan(modes[s], case.layers, Batch(case.prompt, case.requests - n, n), rig.cost) for s, n in shares.items()
    }
    taken: dict[int, list[Taken]] = {share: [] for share in shares}
    rig.use(orders[max(shares)])
    rig.prepare()

    def once() -> float:
        total = 0.0
        for share, order in orders.items():
            rig.use(order)
            rig.taken.clear()
            total += rig.run(1)
            taken[share] += rig.taken
        return total

    def verify() -> None:
        for order in orders.values():
            rig.use(order)
            rig.verify()

    row = measure(
        lambda reps: sum(once() for _ in range(reps)), verify=verify, kernel=rig.kernel, basis=basis_of(case.axes)
    )  # fmt: skip
    if row.value is None:
        return
    seen = {share: median(one.line.total for one in passes[-row.n :]) for share, passes in taken.items()}
    told = {share: median(one.told.total for one in passes[-row.n :]) for share, passes in taken.items()}
    for share in shares:
        measure.note(f"time_{share}", seen[share])
        measure.note(f"predicted_{share}", told[share])
    best, expected = (min(of, key=of.__getitem__) for of in (seen, told))
    alone = min(shares)
    add = adder(measure, row, basis_of(case.axes))
    add("best_time", seen[best], "s")
    add("best_offload", float(best), "1")
    add("predicted_offload", float(expected), "1", basis="modelled")
    add("gain", seen[alone] / seen[best], "1", better="higher")
    note_rig(measure, rig, [one for passes in taken.values() for one in passes[-row.n :]])


class Marks:
    """The stages on the host's clock."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def mark(self, name: str) -> None:
        from kvbench.timing.clock import now_ns

        self.seen.append((name, now_ns() * 1e-9))


def open_rig(case: Case, measure: Measure, offloaded: int) -> Rig:
    """Return both sides for ``offloaded`` decodes on the CPU."""
    import numpy as np

    from kvbench.attention.shapes import Shape
    from kvbench.model.layers import load_torch, shape
    from kvbench.systems.neo.far import FarSide, far_bytes
    from kvbench.systems.neo.near import RATES
    from kvbench.systems.neo.rig import PacedRig, TorchRig
    from kvbench.systems.neo.schedule import Batch

    gpu = case.near == "gpu"
    if gpu:
        from kvbench.timing.gpu_session import open_driver

        open_driver()  # before torch is loaded: without a GPU a case costs next to nothing
        if not load_torch("real layers").cuda.is_available():
            measure.skip("this build of torch has no CUDA; install the extra gpu-cu12 or gpu-cu13")
    cpus = measure.context.topology.measuring_cpus("all")
    if len(cpus) < 2 and not gpu:
        measure.skip("CPU attention and the thread that stands for the GPU need a core each, there is one")
    of = shape(case.model, case.scale)
    kv = Shape("bf16", of.heads, of.kv_heads, of.head_dim, PAGE)
    team = measure.team_on(cpus if gpu else cpus[:-1])
    far, seed = None, measure.context.seed
    allocate: Callable[..., Any] = np.empty
    if gpu:
        from kvbench.systems.neo.near_torch import pinned_empty as allocate
    if offloaded:
        buffer = measure.target(far_bytes(kv, offloaded, case.context, case.layers), "thp")
        far = FarSide(
            kv, offloaded, case.context, case.layers, team, buffer.address, seed=seed, allocate=allocate,
            staged=not gpu,
        )  # fmt: skip
        measure.working_set(far.nbytes)
    measure.note("attention_threads", len(team))
    if gpu:
        batch = Batch(case.prompt, case.requests - offloaded, offloaded)
        return TorchRig(of, case.context, far, Marks, batch, case.layers, seed=seed)
    rig = PacedRig(of, case.context, far, Marks, RATES[case.near], cpus[-1])
    measure.enter(rig.paced)
    if rig.paced.pin_reason:
        measure.flag("unpinned")
        measure.note("pin_reason", rig.paced.pin_reason)
    measure.threads([*team.tids, rig.paced.tid])
    measure.note("near_rates", rig.rates.source)
    return rig


def adder(measure: Measure, row: Result, of: Basis) -> Callable[..., None]:
    """Return a function that adds a row with the status of the primary ``row``: it comes from inside its samples."""

    def add(metric: str, value: float, unit: str, better: str = "lower", basis: Basis = of, **detail: Any) -> None:
        measure.extra(
            metric, value, unit=unit, better="higher" if better == "higher" else "lower", n=row.n, basis=basis,
            status=row.status, reason=row.reason, kernel=FORMULA if basis == "modelled" else None, detail=detail,
        )  # fmt: skip

    return add


def note_rig(measure: Measure, rig: Rig, taken: Sequence[Taken]) -> None:
    """Keep what submitting takes, and how well a paced near side held its times."""
    late = sorted(one.late for one in taken)
    measure.note("launch", rig.launch)
    measure.note("late_median", late[len(late) // 2])
    measure.note("late_worst", late[-1])


def report(case: Case, measure: Measure, rig: Rig, row: Result) -> None:
    """Add the further rows of a case from the samples of its primary one."""
    from kvbench.systems.neo.hide import hidden_tokens, hiding
    from kvbench.systems.neo.rig import medians

    if row.value is None:
        return
    taken, order = rig.taken[-row.n :], rig.order
    add = adder(measure, row, basis_of(case.axes))
    told = median(one.told.total for one in taken)
    add("decode_rate", sum(b.gpu + b.cpu for b in order.batches) / row.value, "op/s", "higher")
    add("predicted_time", told, "s", basis="modelled")
    measure.note("predicted_over_measured", round(told / row.value, 4))
    idle(add, "near", taken)
    note_rig(measure, rig, taken)
    stages = medians(taken, list(dict.fromkeys(f"{stage.kind}{stage.batch}" for stage in order.stages)))
    for name, seconds in stages.items():
        measure.note(f"T_{name}", seconds)
    for b, part in enumerate(order.batches):
        measure.note(f"batch_{b}", f"{part.prefill} prompt + {part.gpu} near + {part.cpu} CPU")
        measure.note(f"T_l{b}", stages.get(f"pr{b}", 0.0) + stages.get(f"po{b}", 0.0))
    if not rig.offloads or rig.far is None:
        return
    idle(add, "cpu", taken)
    attention = sum(stages[f"ca{b}"] for b in rig.far.ends)
    slower = median(sum(one.layer(f"ca{b}") / one.alone[f"ca{b}"] for b in rig.far.ends) for one in taken)
    measure.note("ca_slowdown", round(slower / len(rig.far.ends), 4))
    rate = sum(rig.far.kv_bytes(b) for b in rig.far.ends) / attention
    measure.note("kv_bandwidth", rate)
    if case.mode in PIPELINED:
        found = hiding(stages, rig.launch)
        for metric, half in (("slack_long", found.long), ("slack_short", found.short)):
            share = half.slack / half.seconds if half.seconds else 0.0
            add(metric, share, "1", "higher", slack=half.slack, near=half.near, cpu=half.cpu, stalls=half.stalls)
        measure.note("formula_time", order.layers * found.layer_seconds)
        got, could = (median(one.overlap(of(one)) for one in taken) for of in (observed_total, told_total))
        measure.note("overlap", round(got, 4))
        measure.note("overlap_predicted", round(could, 4))
        if got < SERIALISED * could and row.status != "tainted":  # a disturbed pass says nothing about the schedule
            measure.flag("serialised")
    linear = stages.get("pr0", 0.0) + stages.get("po0", 0.0)
    if linear > 0.0:
        tokens = hidden_tokens(rate, linear, rig.of.kv_bytes(1, KV_ELEMENT))
        add("hidden_tokens", tokens, "1", "higher", near=linear, bandwidth=rate)


def idle(add: Callable[..., None], lane: Lane, taken: Sequence[Taken]) -> None:
    """Add the share of an iteration in which a side does nothing."""
    seconds = median(one.line.stall(lane) for one in taken)
    add(f"{lane}_idle", median(one.line.stall(lane) / one.line.total for one in taken), "1", seconds=seconds)


def observed_total(taken: Taken) -> float:
    return taken.line.total


def told_total(taken: Taken) -> float:
    return taken.told.total
