"""NEO's cost tables, cell by cell: what its scheduler interpolates in, and what a replay reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value
from kvbench.contract.result import Basis

if TYPE_CHECKING:
    from kvbench.model.layers import LayerShape
    from kvbench.systems.neo.near import PacedNear
    from kvbench.systems.neo.schedule import Batch

PAGE, LAYERS = 16, 4
LEAST_BYTES = 128 << 20  # of KV behind a cell of cdec, at least: more than caches hold
MOST_TOKENS = {"linr": 8192, "pref": 8192}
LEAST_TOKENS = {"pref": 64, "gdec": 1024, "cdec": 1024}


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether the table has this cell: cdec is the CPU's and has requests, lnch has one cell."""
    table, tokens, requests = str(axes["table"]), int(axes["tokens"]), int(axes["requests"])
    if (table == "cdec") != (axes["near"] == "cpu") or (table == "lnch" and tokens != 16):
        return False
    if not LEAST_TOKENS.get(table, 1) <= tokens <= MOST_TOKENS.get(table, 1 << 30):
        return False
    return requests <= tokens if table == "cdec" else requests == 1


def basis_of(axes: Mapping[str, Value]) -> Basis:
    """Return the basis of a cell: of a GPU that is not here it is a formula, the hand-over to it is emulated."""
    if axes["near"] in ("cpu", "gpu"):
        return "measured"
    return "emulated" if axes["table"] == "lnch" else "modelled"


@bench(
    version=1, metric="stage_time", unit="s", better="lower", where=exists, basis=basis_of, limit=120.0,
    seconds={"smoke": 0.2, "quick": 0.5, "full": 4.0},
    table=axis.choice("linr", "pref", "gdec", "cdec", "lnch"),
    near=axis.choice("cpu", "T4", "A10G", "H100", "gpu", smoke=["cpu", "T4"], quick=["cpu", "T4", "A10G"]),
    tokens=axis.integer(
        smoke=["16", "1024", "4096"], quick=["16", "256", "1024", "4096", "16384", "65536"], full="1..262144",
        high=1 << 22,
    ),
    requests=axis.integer(smoke=["1"], quick=["1", "16"], full="1..256", high=4096),
    model=axis.choice("llama-3-8b", "qwen2.5-14b", "opt-13b", smoke=["llama-3-8b"], quick=["llama-3-8b"]),
    threads=axis.threads(smoke=["all"], quick=["all"], full=["all"]),
)  # fmt: skip
def cost_tables(case: Case, measure: Measure) -> None:
    """Seconds a layer of one stage: linr(S), pref(S), gdec(N) on the near side, cdec(S, N) on the CPU, lnch.

    `tokens` is S of linr and pref (tokens of the iteration, of one prompt) and N of gdec and cdec (tokens of KV);
    `requests` the S of cdec, equal lengths. near=gpu are real layers; for a GPU that is not here a roofline at its
    published rates (modelled). cdec is measured on KV out of the caches; lnch is what the submitting thread takes per
    CPU stage. kvbench.systems.neo.costs.tables_from_rows rebuilds the tables from a run's rows.
    """
    from kvbench.model.layers import shape

    of = shape(case.model)
    if case.table == "cdec":
        on_cpu(case, measure, of)
    else:
        on_near(case, measure, of)


def on_cpu(case: Case, measure: Measure, of: LayerShape) -> None:
    """Measure a cell of cdec: one decode step a layer, layers in turn."""
    from kvbench.attention.cpu_work import DecodeWork, layers_for, nbytes_for
    from kvbench.attention.shapes import Shape
    from kvbench.systems.neo.lengths import lengths

    kv = Shape("bf16", of.heads, of.kv_heads, of.head_dim, PAGE)
    team, seed = measure.team(case.threads), measure.context.seed
    sequences = lengths("equal", case.requests, case.tokens, seed)
    layers = layers_for(kv, sequences, max(LEAST_BYTES, 4 * measure.context.llc))
    buffer = measure.target(nbytes_for(kv, sequences, layers), "thp")
    work = DecodeWork(kv, sequences, layers, team, buffer.address, seed=seed)
    measure.working_set(work.nbytes)
    measure.note("layers", layers)
    row = measure(
        work.run, ops=float(layers), link=work.kv_bytes, unique=work.kv_bytes, verify=work.verify, kernel=work.kernel
    )
    if row.value is not None:
        measure.note("kv_bandwidth", work.kv_bytes / layers / row.value)


def on_near(case: Case, measure: Measure, of: LayerShape) -> None:
    """Add a cell of the near side's tables: a roofline for a named GPU, real layers for ``gpu``."""
    from kvbench.systems.neo.near import RATES, stage_seconds
    from kvbench.systems.neo.schedule import Batch

    context = case.tokens if case.table == "gdec" else 1
    batch = Batch(gpu=1) if case.table == "gdec" else Batch(prefill=case.tokens)
    timed = ("pr", "po") if case.table == "linr" else ("ga",)
    if case.table == "lnch":
        launch(case, measure)
    elif case.near == "gpu":
        real(case, measure, of, batch, context, timed)
    else:
        rates = RATES[case.near]
        seconds = sum(stage_seconds(kind, batch, of, context, rates) for kind in timed)
        measure.model(seconds, source="max(bytes / bandwidth, operations / FLOP rate)", detail={"rates": rates.source})


def launch(case: Case, measure: Measure) -> None:
    """Measure lnch: a pass over layers with a CPU stage each, in which no stage takes any time."""
    from kvbench.systems.neo.near import PacedNear
    from kvbench.systems.neo.pipeline import run_pass
    from kvbench.systems.neo.schedule import Batch, simple
    from kvbench.timing.clock import now_ns

    if case.near == "gpu":
        measure.skip("what submitting to a real GPU takes is part of neo/pipeline and not measured apart from it")
    cpus = measure.context.topology.measuring_cpus("all")
    if len(cpus) < 2:
        measure.skip("the thread that submits and the one that stands for the GPU need a core each, there is one")
    team = measure.team_on(cpus[:1])
    nothing = dict.fromkeys(("pr0", "po0", "qkv0", "o0"), 0.0)
    near: PacedNear = measure.enter(PacedNear(nothing, lambda stage: None, cpus[-1]))
    measure.threads([*team.tids, near.tid])
    order = simple(LAYERS, Batch(cpu=1))

    def run(reps: int) -> float:
        seconds = 0.0
        for _ in range(reps):
            stamps = Stamps(now_ns)
            run_pass(order, near, Nobody(), stamps)
            seconds += (stamps.at["end pass"] - stamps.at["begin pass"]) * 1e-9
        return seconds

    measure.note("layers", LAYERS)
    measure(run, ops=float(LAYERS), kernel="python thread, six hand-overs a layer", basis="emulated")


class Stamps:
    """Marks by name, nanoseconds."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.at: dict[str, int] = {}
        self._clock = clock

    def mark(self, name: str) -> None:
        self.at[name] = self._clock()


class Nobody:
    """A far side without work."""

    def attend(self, batch: int, layer: int) -> None:
        """Do nothing."""


def real(
    case: Case, measure: Measure, of: LayerShape, batch: Batch, context: int, timed: tuple[str, ...]
) -> None:  # fmt: skip
    """Measure a cell on GPU 0: the spans of its stages, by events, over layers queued at once."""
    from kvbench.model.layers import load_torch
    from kvbench.timing.gpu_session import open_driver

    open_driver()  # before torch is loaded: without a GPU a case costs next to nothing
    if not load_torch("real layers").cuda.is_available():
        measure.skip("this build of torch has no CUDA; install the extra gpu-cu12 or gpu-cu13")
    from kvbench.systems.neo.near_torch import TorchNear, make_layers
    from kvbench.systems.neo.pipeline import run_pass
    from kvbench.systems.neo.schedule import gpu_only
    from kvbench.timing.clock import now_ns

    seed, order = measure.context.seed, gpu_only(LAYERS, batch)
    measure.on_device()
    layers = make_layers(of, LAYERS, "bf16", "cuda:0", seed)
    near = TorchNear(layers, [batch], context, None, dtype="bf16", device="cuda:0", seed=seed)

    def run(reps: int) -> float:
        seconds = 0.0
        for _ in range(reps):
            run_pass(order, near, Nobody(), Stamps(now_ns))
            seconds += sum(end - begin for name, (begin, end) in near.spans().items() if name[:2] in timed)
        return seconds

    measure.note("layers", LAYERS)
    measure(run, ops=float(LAYERS), kernel="torch layer")
