"""One product's operands and threads on a host, from which every method is made; and what a sample of it tells."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from kvbench.errors import Unavailable
from kvbench.kernels.blas import one_thread
from kvbench.machine.topology import Topology
from kvbench.memory.limits import available_memory
from kvbench.systems.directkv import host_needs
from kvbench.systems.directkv.host_gemm import HostGemm, Operands
from kvbench.systems.directkv.host_needs import BLOCK, PANEL, tiled
from kvbench.systems.directkv.host_plan import Plan, plan, require_near, require_runnable
from kvbench.systems.directkv.host_store import FarStore, Keeper, tiers
from kvbench.systems.directkv.predict import pipeline
from kvbench.systems.directkv.shapes import Gemm, Method

if TYPE_CHECKING:
    from kvbench.kernels.team import Team

__all__ = (
    "BLOCK",
    "PANEL",
    "Holder",
    "Rig",
    "Sample",
    "contenders",
    "cores",
    "open_rig",
    "sides",
    "take",
    "tiled",
    "typical",
)


class Holder(Protocol):
    """Who keeps threads and resources until a case ends: a bench's ``measure``."""

    def team_on(self, cpus: Sequence[int]) -> Team:
        """Return one thread pinned to each CPU."""
        ...

    def enter(self, resource: AbstractContextManager[Any]) -> Any:
        """Keep ``resource`` open."""
        ...


def cores(topology: Topology, node: int | None, count: int = 2) -> tuple[int, ...]:
    """Return ``count`` CPUs, a core each, of ``node`` where one is named. Raises Unavailable when there are fewer."""
    allowed = None
    if node is not None:
        here = [found.cpus for found in topology.nodes if found.id == node]
        allowed = tuple(cpu for cpu in topology.affinity if here and cpu in here[0])
    found = topology.measuring_cpus("all", allowed) if allowed != () else ()
    if len(found) < count:
        raise Unavailable(
            "products and loads need a core each", where="gemm" if node is None else f"node {node}",
            got=f"{len(found)} cores", expected=f"{count}",
        )  # fmt: skip
    return tuple(found[:count])


def open_rig(holder: Holder, gemm: Gemm, pair: str, topology: Topology, scratch: Path | None, seed: int) -> Rig:
    """Return a rig kept by ``holder``, BLAS on one thread until its case ends. Raises what :class:`Rig` does."""
    require_runnable(gemm)
    near, _ = tiers(pair)
    cpus = cores(topology, near.node)
    holder.enter(one_thread())
    solo = holder.team_on(cpus[:1])
    return Rig(gemm, pair, solo, holder.team_on(cpus), holder.enter, scratch, seed)


@dataclass(frozen=True, slots=True)
class Sample:
    """One pass in seconds, and what it should have taken by rates of the same moment: a byte loaded, an operation."""

    measured: float
    predicted: float
    loads: float
    products: float

    @property
    def bound(self) -> str:
        """The longer side."""
        return "link" if self.loads > self.products else "compute"


class Rig:
    """Operands of ``gemm`` on the near tier of ``pair``; :meth:`make` lays B out in the far tier for a method.

    ``solo`` and ``team``: one and two pinned threads; a method that loads and multiplies in turns runs on one. Lives
    inside :func:`kernels.blas.one_thread`. Raises UsageError and Unavailable as the parts do, before memory is touched.
    """

    def __init__(
        self, gemm: Gemm, pair: str, solo: Team, team: Team, enter: Keeper, scratch: Path | None = None, seed: int = 1
    ) -> None:
        require_runnable(gemm)
        self.near, self.far = tiers(pair)
        self.gemm, self._teams = gemm, (solo, team)
        self._enter, self._scratch, self._seed = enter, scratch, seed
        self.operands = Operands(gemm.m, gemm.n, gemm.k, enter, self.near.node, seed)

    def make(
        self, method: Method, *, staging: int = 100, double: bool = False, depth: int | None = None,
        gemm: Gemm | None = None,
    ) -> HostGemm:  # fmt: skip
        """Return ``method`` ready to run; ``gemm`` takes other tiles of the same matrices."""
        chosen = plan(gemm or self.gemm, method, staging=staging, double=double, depth=depth)
        return self.of(chosen)

    def of(self, chosen: Plan) -> HostGemm:
        """Return ``chosen`` ready to run."""
        room = available_memory().value
        if room is not None and chosen.pieces:
            require_near(chosen, room.nbytes)
        store = None
        if chosen.pieces:
            store = FarStore(self.far, chosen.pieces, self.operands.b, self._enter, self._scratch, self._seed)
        team = self._teams[chosen.depth > 1]
        return HostGemm(chosen, self.operands, store, team, self._enter, self.near.node)


def contenders(rig: Rig) -> dict[str, HostGemm]:
    """Return :func:`host_needs.contenders` ready to run, by name."""
    return {
        want.method + "_double" * want.double: rig.make(want.method, staging=want.staging, double=want.double)
        for want in host_needs.contenders(rig.gemm)
    }


def take(work: HostGemm) -> Sample:
    """Probe both sides alone and the hand-over between them, then multiply once."""
    byte_seconds, flop_seconds = work.probe()
    loads, products = work.costs(byte_seconds, flop_seconds)
    told = pipeline(loads, products, work.plan.depth, work.handover())
    return Sample(work.run(), told, sum(loads), sum(products))


def sides(work: HostGemm, probes: int = 3) -> tuple[float, float]:
    """Return the seconds of all loads and of all products, each alone, at the median rates of some probes."""
    found = [work.probe() for _ in range(probes)]
    loads, products = work.costs(median(one[0] for one in found), median(one[1] for one in found))
    return sum(loads), sum(products)


def typical(samples: Sequence[Sample]) -> Sample:
    """Return the median of each number."""
    return Sample(
        *(median(getattr(one, name) for one in samples) for name in ("measured", "predicted", "loads", "products"))
    )
