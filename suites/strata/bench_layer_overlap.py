"""Layer-wise loading beside the computation (Strata S6): what stalls, what was predicted, from which ratio on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvbench.contract.axis import Value
    from kvbench.contract.result import Basis, Better, Result
    from kvbench.model.layout import Pool
    from kvbench.systems.strata.overlap import Words
    from kvbench.systems.strata.overlap_model import Rates
    from kvbench.systems.strata.overlap_probe import Overlapped, Taken

MODEL = "Llama-3.1-8B"
# Operations of one new token in one layer: 2 x (q and o 4096 x 4096, k and v 4096 x 1024, three of 4096 x 14336).
LAYER_FLOPS = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
# A CPU core has a thousandth of an accelerator's arithmetic but a sixth of its link, so on the host a new token takes a
# thousandth of the operations: the balance of the two sides is then where the paper has it.
SHARE = {"host": 1024, "gpu": 1}
LEAST_EXPOSED = 1.05  # from here on a pass counts as stalled beyond its first load
SWEEPS = {"coarse": tuple(1 << k for k in range(2, 9)), "fine": tuple(1 << k for k in range(11))}
RATES = "two rates alone and beside each other, same run; exact recurrence over the layers"
FORM = axis.choice("host", "gpu")
PAGE = axis.integer(smoke=["32"], quick=["32"], full=["1", "32"], high=512)
TOKENS = axis.integer(smoke=["1024"], quick=["1024"], full=["8192"], low=64, high=1 << 20)
TRANSPORT = axis.choice("cpu", "ce", "batch", "sm", quick=["cpu", "ce", "sm"], smoke=["cpu", "ce"])


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether the transport belongs to the form."""
    return (axes["form"] == "host") == (axes["transport"] == "cpu")


def setup_seconds(axes: Mapping[str, Value]) -> float:
    """Return what making and checking large pools takes beyond the ``seconds`` of the bench."""
    from kvbench.model.geometry import geometry
    from kvbench.systems.strata.transfer import setup_seconds

    return setup_seconds(int(axes["tokens"]) * geometry(MODEL).token_bytes())


@bench(
    version=1, metric="pass_time", unit="s", better="lower", where=exists, limit=180.0, setup=setup_seconds,
    extra_metrics=["stall", "stall_share", "predicted_stall"], seconds={"smoke": 1.5, "quick": 5.0, "full": 40.0},
    form=FORM, transport=TRANSPORT,
    ratio=axis.integer(
        smoke=["16", "64"], quick=["4", "16", "64", "256"], full="1..1024", high=1 << 20
    ),
    page_tokens=PAGE, tokens=TOKENS,
)  # fmt: skip
def layer_overlap(case: Case, measure: Measure) -> None:
    """Load each layer of a KV cache while the layer before is computed; `ratio` = loaded tokens : new tokens.

    A layer's computation reads its KV once and does the arithmetic of the new tokens (host: a 1024th of it, for one
    core). Rows: the pass, the seconds and share of it the computation waits, and the stall predicted from rates
    measured in the same run: each side alone and while the other is busy all the time. Each pass is refused when a
    layer was read before it arrived. The ceiling is the longer of the two sides alone.
    """
    from kvbench.measure import Reference
    from kvbench.systems.strata.overlap_probe import take, typical

    work, tokens = open_overlap(case, measure), case.tokens // case.ratio
    if not tokens:
        measure.skip(f"{case.tokens} loaded tokens at {case.ratio} : 1 leave no new token")
    flops = work.arithmetic(tokens * LAYER_FLOPS / SHARE[case.form])
    work.run()
    taken: list[Taken] = []

    def run(reps: int) -> float:
        taken.extend(take(work) for _ in range(reps))
        return sum(sample.total for sample in taken[-reps:])

    first = take(work)
    loading = first.rates.load > first.rates.compute

    def longer(reps: int) -> float:
        sides = (work.load_alone() if loading else work.compute_alone() for _ in range(reps))
        return sum(side.seconds for side in sides)

    side = "loading" if loading else "computing"
    row = measure.pair(
        run, Reference(f"{side} alone", longer, 1.0), verify=work.verify, kernel=work.kernel, transport=case.transport,
        link=work.link_bytes, unique=work.link_bytes,
    )  # fmt: skip
    measure.note("new_tokens", tokens)
    measure.note("flops_per_layer", flops)
    if row.value is None:
        return
    used = taken[-row.n :]
    rates = typical(used)
    notes_of(measure, rates)
    stall = add(measure, row, "stall", "s", [t.stall for t in used])
    add(measure, row, "stall_share", "1", [t.stall / t.total for t in used])
    predicted = add(
        measure, row, "predicted_stall", "s", [t.forecast.stall for t in used], basis="modelled", kernel=RATES
    )
    measure.note("predicted_over_measured", None if not stall else round(predicted / stall, 4))
    measure.note("first_load", sorted(t.first for t in used)[len(used) // 2])


@bench(
    version=1, metric="sweep_time", unit="s", better="lower", where=exists, limit=300.0, setup=setup_seconds,
    extra_metrics=["onset", "predicted_onset", "balance"], seconds={"smoke": 2.5, "quick": 9.0, "full": 120.0},
    form=FORM, transport=TRANSPORT,
    sweep=axis.choice("coarse", "fine", smoke=["coarse"], quick=["fine"], full=["fine"]),
    page_tokens=PAGE, tokens=TOKENS,
)  # fmt: skip
def overlap_onset(case: Case, measure: Measure) -> None:
    """The load:new ratio r* from which loading no longer hides behind the computation, measured and predicted.

    One sample is a pass at every ratio of the sweep. onset: where a pass takes 5 % more than its computation and its
    first load, at two ratios in a row; predicted_onset: the same of the passes predicted from the rates of the same
    samples; balance: where a layer's computation takes as long as its load beside it, from the same rates.
    """
    from kvbench.analysis.fits import onset
    from kvbench.systems.strata.overlap_probe import take, typical

    work = open_overlap(case, measure)
    ratios = [ratio for ratio in SWEEPS[case.sweep] if ratio <= case.tokens]
    work.run()
    sweeps: list[list[Taken]] = []

    def once() -> float:
        sweeps.append([])
        for ratio in ratios:
            work.arithmetic(case.tokens // ratio * LAYER_FLOPS / SHARE[case.form])
            sweeps[-1].append(take(work))
        return sum(sample.total for sample in sweeps[-1])

    row = measure(
        lambda reps: sum(once() for _ in range(reps)), verify=work.verify, kernel=work.kernel,
        transport=case.transport, link=work.link_bytes * len(ratios), unique=work.link_bytes,
    )  # fmt: skip
    measure.note("ratios", "+".join(map(str, ratios)))
    if row.value is None:
        return
    used = sweeps[-row.n :]
    columns = list(zip(*used, strict=True))
    for ratio, column in zip(ratios, columns, strict=True):
        shares = sorted(t.stall / t.total for t in column)
        measure.note(f"stall_share_{ratio}", round(shares[len(shares) // 2], 4))
    for metric, values in (
        ("onset", [[t.exposed for t in sweep] for sweep in used]),
        ("predicted_onset", [[t.forecast_exposed for t in sweep] for sweep in used]),
    ):
        found = [onset(ratios, exposed, LEAST_EXPOSED, base=1.0) for exposed in values]
        known = [one.x for one in found if one is not None]
        basis: Basis = "measured" if metric == "onset" else "modelled"
        if 2 * len(known) <= len(found):
            reason = f"no stall beyond the first load up to a ratio of {ratios[-1]}"
            measure.extra(metric, None, unit="1", better="higher", status="skipped", reason=reason, basis=basis)
        else:
            add(
                measure, row, metric, "1", known, better="higher", basis=basis,
                kernel=RATES if basis == "modelled" else None,
            )  # fmt: skip
    rates = [typical(list(column)) for column in columns]
    # fits.onset finds where a curve reaches a multiple of its base: here twice one half
    even = onset(ratios, [rate.load_beside / rate.compute_beside for rate in rates], 2.0, base=0.5, confirm=1)
    measure.extra(
        "balance", None if even is None else even.x, unit="1", better="higher", basis="modelled", kernel=RATES,
        status="ok" if even is not None else "skipped", reason="" if even is not None else "loading is always shorter",
    )  # fmt: skip
    middle = min(rates, key=lambda rate: abs(rate.load_beside - rate.compute_beside))
    notes_of(measure, middle)


def open_overlap(case: Case, measure: Measure) -> Overlapped:
    """Return the case's overlap, its buffers made and its flags on the row."""
    from kvbench.model.geometry import geometry
    from kvbench.model.layout import Pool
    from kvbench.transport.gpu_pieces import scattered

    shape = geometry(MODEL)
    if case.tokens % case.page_tokens or case.tokens // case.page_tokens < 4:
        measure.skip(f"{case.tokens} tokens are not four or more whole pages of {case.page_tokens}")
    pool = Pool.of_tokens(shape, "layer_first", case.page_tokens, case.tokens)
    order = scattered(pool.pages, measure.context.seed)  # no neighbours: a page is a fragment
    measure.note("model", MODEL)
    measure.note("fragment_bytes", shape.fragment_bytes("layer_first", case.page_tokens))
    measure.note("arithmetic_share", f"1/{SHARE[case.form]}")
    if case.form == "gpu":
        return on_device(case, measure, pool, order)
    from kvbench.systems.strata.ends import require_room
    from kvbench.systems.strata.overlap import HostOverlap

    require_room(pool, pool, measure.context.arena.nbytes)
    team = measure.team(2)
    far = measure.sources(1, pool.nbytes, "thp")[0].address
    near = measure.target(pool.nbytes, "thp").address
    measure.working_set(2 * pool.nbytes)
    return HostOverlap(team, far, near, pool, order)


def on_device(case: Case, measure: Measure, pool: Pool, order: Words) -> Overlapped:
    """Return the GPU form of the case."""
    from kvbench.systems.strata.overlap_gpu import AHEAD, GpuOverlap
    from kvbench.timing.gpu_rows import on_gpu
    from kvbench.timing.gpu_session import GpuSession

    gpu = measure.enter(GpuSession())
    on_gpu(measure, gpu, link=True)
    work = GpuOverlap(
        gpu.service, gpu.kernels, gpu.enter, gpu.clock.stream, pool, order, case.transport, measure.context.seed
    )
    for flag in work.flags:
        measure.flag(flag)
    if gpu.in_l2(work.layer_bytes):
        measure.flag("in_l2")  # a layer that has just arrived is read from there, as it would be in a server
    measure.note("queued_ahead", AHEAD.get(case.transport, work.layers))
    return work


def notes_of(measure: Measure, rates: Rates) -> None:
    """Keep the rates a prediction was made from: seconds a layer alone, and how many times as long beside."""
    measure.note("load_layer", rates.load)
    measure.note("compute_layer", rates.compute)
    measure.note("load_slowdown", round(rates.load_slowdown, 4))
    measure.note("compute_slowdown", round(rates.compute_slowdown, 4))


def add(
    measure: Measure, row: Result, metric: str, unit: str, values: Sequence[float], *, better: Better = "lower",
    basis: Basis = "measured", kernel: str | None = None,
) -> float:  # fmt: skip
    """Add a row of the median of ``values`` with its interval, and return the median.

    The values come from inside the samples of the primary ``row``: what disturbed those disturbed these.
    """
    import numpy as np

    from kvbench.timing.summary import summarise

    found = summarise(np.asarray(values, np.float64))
    tainted = row.status == "tainted"
    measure.extra(
        metric, found.median, unit=unit, better=better, low=found.low, high=found.high, n=found.n, basis=basis,
        kernel=kernel, status="tainted" if tainted else "ok", reason=row.reason if tainted else "",
    )  # fmt: skip
    return found.median
