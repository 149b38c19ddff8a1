"""The bytes of a product whose B lies far: what crosses the link, measured, against the algebra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.systems.directkv.demands import demands

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvbench.contract.axis import Value
    from kvbench.systems.directkv.host_needs import Needs

LIMIT, PASSES_LEAST = 300.0, 5  # warm-up, three passes, proof
SIZE = 1 << 40


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether there is such a case: staging is swap's."""
    return axes["method"] == "swap" or axes["staging"] == 100


def needs(axes: Mapping[str, Value]) -> Needs:
    """Return what a host case needs."""
    from kvbench.systems.directkv.host_needs import BLOCK, Needs, Want
    from kvbench.systems.directkv.shapes import Gemm

    n, tile = int(axes["n"]), int(axes["tile"])
    problem = Gemm(int(axes["m"]) or n, n, int(axes["k"]) or n, tile, tile, tile, block=BLOCK)
    want = Want(axes["method"], int(axes["staging"]))  # type: ignore[arg-type]
    return Needs(problem, (want,), LIMIT, PASSES_LEAST)


scratch_bytes, setup_seconds = demands(needs)


@bench(
    version=1, metric="link_bytes", unit="B", better="lower", where=exists, disk=scratch_bytes, setup=setup_seconds,
    limit=LIMIT,
    extra_metrics=["link_ratio", "unique_bytes", "demand_bytes", "near_bytes"],
    seconds={"smoke": 0.2, "quick": 0.5, "full": 8.0},
    device=axis.choice("cpu", "gpu"),
    n=axis.integer(
        smoke=["1000"], quick=["1000", "1024", "2048"], full=["1000", "1024", "2048", "4096"], high=SIZE
    ),
    m=axis.integer(smoke=["0"], quick=["0"], full=["0", "1", "300"], low=0, high=SIZE),
    k=axis.integer(smoke=["0"], quick=["0"], full=["0", "1", "300"], low=0, high=SIZE),
    tile=axis.integer(smoke=["128"], quick=["128"], full=["64", "128", "256"], high=1 << 16),
    method=axis.choice("swap", "naive", "cpu_aware", "cpu_aware_pipelined"),
    staging=axis.integer(smoke=["100"], quick=["50", "100"], full=["25", "50", "100"], high=100),
)  # fmt: skip
def traffic(case: Case, measure: Measure) -> None:
    """Bytes that cross the link in one product, by the kernel's counter, and over those of the algebra.

    link_ratio: measured over predicted, padding of the stored tiles included; unique_bytes: B once; demand_bytes: what
    the cores or the copy ask for; near_bytes: all bytes touched in near memory by the tiles' algebra. A product too
    large to run keeps the algebra's bytes as a modelled row. m and k of 0 are n. On a GPU the gemm rows hold the bytes.
    """
    from kvbench.errors import Unavailable
    from kvbench.systems.directkv.host_plan import plan
    from kvbench.systems.directkv.host_rig import open_rig
    from kvbench.systems.directkv.host_rows import PASSES, counted
    from kvbench.systems.directkv.shapes import staged_columns
    from kvbench.systems.directkv.traffic import traffic as bytes_of

    if case.device == "gpu":
        from kvbench.timing.gpu_session import open_driver

        open_driver()
        measure.skip("link bytes of a GPU are rows of the gemm bench, by the counter named there")
    context, needed = measure.context, needs(case.axes)
    gemm = needed.gemm
    try:
        needed.require()
    except Unavailable as error:
        columns = staged_columns(gemm, case.staging, double=False) if case.method == "swap" else None
        moved = bytes_of(gemm, case.method, buffered=case.method != "swap", columns=columns)
        measure.note("not_run", str(error))
        measure.model(float(moved.link), source="traffic algebra, DirectKV section 4")
        passes = 0
    else:
        chosen = plan(gemm, case.method, staging=case.staging)
        work = open_rig(measure, gemm, "dram:file", context.topology, context.scratch, context.seed).of(chosen)
        moved = chosen.traffic
        link = counted(measure, work)
        measure.extra("link_ratio", link / moved.link, unit="1", better="lower", n=PASSES)
        passes = PASSES
    for metric, value in (
        ("unique_bytes", moved.unique), ("demand_bytes", moved.demand), ("near_bytes", moved.near)
    ):  # fmt: skip
        measure.extra(metric, float(value), unit="B", better="lower", basis="modelled", n=passes)
