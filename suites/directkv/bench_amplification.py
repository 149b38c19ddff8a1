"""How often B crosses the link (D2): measured, by the algebra, and after a cache between the cores and the far tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvbench.contract.axis import Value

PASSES = 3
CACHE_TILES = 1 << 19  # steps of the tile walk


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch file of a case."""
    return 0 if axes["device"] == "gpu" else 5 * int(axes["n"]) ** 2


@bench(
    version=1, metric="amplification", unit="1", better="lower", disk=scratch_bytes, limit=300.0,
    extra_metrics=["predicted_amplification", "cached_amplification", "cache_hits"],
    seconds={"smoke": 0.3, "quick": 0.8, "full": 10.0},
    device=axis.choice("cpu", "gpu"),
    n=axis.integer(smoke=["1024"], quick=["1000", "2048"], full=["1000", "2048", "4096"], high=1 << 20),
    tile=axis.integer(smoke=["128"], quick=["128", "256"], full=["64", "128", "256"], high=1 << 16),
    method=axis.choice("naive", "cpu_aware", smoke=["naive"]),
    order=axis.choice("m_fastest", "n_fastest", "swizzle", smoke=["n_fastest"], quick=["n_fastest"]),
    cache=axis.bytes(smoke=["512KiB"], quick=["2MiB"], full=["2MiB", "50MiB"], low="1KiB", high="1TiB"),
    workers=axis.integer(smoke=["132"], quick=["132"], full=["1", "132"], high=1 << 16),
)  # fmt: skip
def amplification(case: Case, measure: Measure) -> None:
    """Link bytes over unique bytes of a product that reads B in place: naive grows with n / tile, CPU-aware is 1.

    Measured on a host by the kernel's counter: O_DIRECT has no cache in between, so it meets predicted_amplification.
    cached_amplification and cache_hits (of B) are modelled: the same tile walk by `workers` blocks in rasterisation
    `order` through a cache of `cache` bytes, as a GPU's L2 lies between its cores and the link.
    """
    from kvbench.systems.directkv.cache import cpu_aware_through, naive_through
    from kvbench.systems.directkv.host_plan import plan
    from kvbench.systems.directkv.host_rig import BLOCK, open_rig
    from kvbench.systems.directkv.shapes import Gemm

    if case.device == "gpu":
        from kvbench.timing.gpu_session import open_driver

        open_driver()
        measure.skip("the gemm bench measures a GPU's link bytes; raster varies the order there")
    gemm = Gemm.square(case.n, case.tile, block=BLOCK)
    if gemm.rows * gemm.columns * gemm.steps > CACHE_TILES:
        measure.skip(f"{gemm.rows} x {gemm.columns} x {gemm.steps} tiles are too many to walk, choose larger ones")
    chosen, context = plan(gemm, case.method), measure.context
    work = open_rig(measure, gemm, "dram:file", context.topology, context.scratch, context.seed).of(chosen)
    store = work.store
    assert store is not None
    work.run()
    store.forget()  # pages of code that were read for the first pass
    seconds = work.run(PASSES) / PASSES
    work.verify()
    if store.link is None:
        measure.skip(f"link bytes are not measured here: {store.link_reason}")
    measure.note("link_bytes", store.link)
    measure.note("file_system", store.system)
    measure.counted(
        store.link / gemm.b_bytes, n=PASSES, source="read_bytes of the process around each product",
        kernel=work.kernel, seconds=seconds,
    )  # fmt: skip
    found = (
        naive_through(gemm, case.cache, order=case.order, workers=case.workers)
        if case.method == "naive"
        else cpu_aware_through(gemm, case.cache)
    )
    for metric, value, source in (
        ("predicted_amplification", chosen.traffic.amplification, "traffic algebra, DirectKV section 4"),
        ("cached_amplification", found.link / gemm.b_bytes, "tile walk through an LRU cache"),
        ("cache_hits", found.hits, "tile walk through an LRU cache"),
    ):
        measure.extra(metric, value, unit="1", better="lower", basis="modelled", kernel=source)
