"""How often B crosses the link (D2): measured, by the algebra, and after a cache between the cores and the far tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.systems.directkv.demands import demands

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvbench.contract.axis import Value
    from kvbench.systems.directkv.host_needs import Needs
    from kvbench.systems.directkv.shapes import Gemm

LIMIT, PASSES_LEAST = 300.0, 5  # warm-up, three passes, proof
CACHE_TILES = 1 << 19  # steps of the tile walk


def needs(axes: Mapping[str, Value]) -> Needs:
    """Return what a host case needs."""
    from kvbench.systems.directkv.host_needs import BLOCK, Needs, Want
    from kvbench.systems.directkv.shapes import Gemm

    problem = Gemm.square(int(axes["n"]), int(axes["tile"]), block=BLOCK)
    return Needs(problem, (Want(axes["method"]),), LIMIT, PASSES_LEAST)  # type: ignore[arg-type]


def walks(gemm: Gemm) -> bool:
    """Return whether the cache walk goes over that many tiles."""
    return gemm.rows * gemm.columns * gemm.steps <= CACHE_TILES


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch file of a case as it is stored; what cannot run writes none."""
    if axes["device"] == "gpu":
        return 0
    needed = needs(axes)
    return needed.scratch if walks(needed.gemm) else 0


_, setup_seconds = demands(needs)


@bench(
    version=1, metric="amplification", unit="1", better="lower", disk=scratch_bytes, setup=setup_seconds,
    limit=LIMIT,
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
    from kvbench.systems.directkv.host_rig import open_rig
    from kvbench.systems.directkv.host_rows import counted

    if case.device == "gpu":
        from kvbench.timing.gpu_session import open_driver

        open_driver()
        measure.skip("the gemm bench measures a GPU's link bytes; raster varies the order there")
    needed = needs(case.axes)
    gemm = needed.gemm
    if not walks(gemm):
        measure.skip(f"{gemm.rows} x {gemm.columns} x {gemm.steps} tiles are too many to walk, choose larger ones")
    needed.require()
    chosen, context = plan(gemm, case.method), measure.context
    work = open_rig(measure, gemm, "dram:file", context.topology, context.scratch, context.seed).of(chosen)
    measure.note("link_bytes", counted(measure, work, over=gemm.b_bytes))
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
