"""The bytes of a product whose B lies far: what crosses the link, measured, against the algebra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvbench.contract.axis import Value

PASSES = 3
SIZE = 1 << 40


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether there is such a case: staging is swap's."""
    return axes["method"] == "swap" or axes["staging"] == 100


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch file of a case; products too large to run write none."""
    n = int(axes["n"])
    stored = 4 * n * (int(axes["k"]) or n)
    return 0 if axes["device"] == "gpu" or n >= 1 << 31 else stored + stored // 4


@bench(
    version=1, metric="link_bytes", unit="B", better="lower", where=exists, disk=scratch_bytes, limit=300.0,
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
    from kvbench.systems.directkv.host_plan import plan, require_runnable
    from kvbench.systems.directkv.host_rig import BLOCK, open_rig
    from kvbench.systems.directkv.shapes import Gemm, staged_columns
    from kvbench.systems.directkv.traffic import traffic as bytes_of

    if case.device == "gpu":
        from kvbench.timing.gpu_session import open_driver

        open_driver()
        measure.skip("link bytes of a GPU are rows of the gemm bench, by the counter named there")
    gemm = Gemm(case.m or case.n, case.n, case.k or case.n, case.tile, case.tile, case.tile, block=BLOCK)
    context = measure.context
    try:
        require_runnable(gemm)
    except Unavailable as error:
        columns = staged_columns(gemm, case.staging, double=False) if case.method == "swap" else None
        moved = bytes_of(gemm, case.method, buffered=case.method != "swap", columns=columns)
        measure.note("not_run", str(error))
        measure.model(float(moved.link), source="traffic algebra, DirectKV section 4")
        basis, passes = "modelled", 0
    else:
        chosen = plan(gemm, case.method, staging=case.staging)
        work = open_rig(measure, gemm, "dram:file", context.topology, context.scratch, context.seed).of(chosen)
        moved, store = chosen.traffic, work.store
        assert store is not None
        work.run()
        store.forget()  # pages of code that were read for the first pass
        seconds = work.run(PASSES) / PASSES
        work.verify()
        if store.link is None:
            measure.skip(f"link bytes are not measured here: {store.link_reason}; asked for {work.asked_bytes} bytes")
        measure.note("asked_bytes", work.asked_bytes)
        measure.note("file_system", store.system)
        measure.counted(
            float(store.link), n=PASSES, source="read_bytes of the process around each product", kernel=work.kernel,
            seconds=seconds,
        )  # fmt: skip
        measure.extra("link_ratio", store.link / moved.link, unit="1", better="lower", n=PASSES)
        basis, passes = "modelled", PASSES
    for metric, value in (
        ("unique_bytes", moved.unique), ("demand_bytes", moved.demand), ("near_bytes", moved.near)
    ):  # fmt: skip
        measure.extra(metric, float(value), unit="B", better="lower", basis=basis, n=passes)  # type: ignore[arg-type]
