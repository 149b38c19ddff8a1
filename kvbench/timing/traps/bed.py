"""The measured path as traps drive it: a worker's context, whole cases through ``Measure``, and buffers of its own.

Nothing here times, counts or allocates by itself: a trap that had a private copy of the path would go on passing when
the real one breaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench, Body
from kvbench.contract.discover import load_suites
from kvbench.contract.result import Better, Result
from kvbench.errors import KvbenchError, Unavailable
from kvbench.timing.budget import FLOOR_SAMPLES, Budget

if TYPE_CHECKING:
    from kvbench.context import Context
    from kvbench.kernels.team import Team
    from kvbench.memory.host import HostBuffer
    from kvbench.memory.payload import Kind
    from kvbench.memory.region import Pages

SEED = 0x7261


class PathBroken(KvbenchError):
    """The measured path gave no number where this machine has all that is needed for one."""


class Bed:
    """One worker's context with a smoke budget: fresh buffers for every trap, none kept from the one before."""

    def __init__(self, limits: Budget | None = None) -> None:
        # The worker and its context stand above timing (design 3). A self-test runs whole cases through them, so they
        # are looked up when one runs, the way a test would; nothing in timing knows them otherwise.
        context: Context = import_module("kvbench.context").Context.create(profile="smoke", scratch=None, seed=SEED)
        self.context = context if limits is None else replace(context, budget=limits)

    def case(self, suite: str, bench: str, **axes: Value) -> Result:
        """Run one case of a real bench as a worker would; return its primary row.

        Raises Unavailable when the case was skipped and PathBroken when it failed: then there is no number to judge.
        """
        return self._row(load_suites().find(suite, bench), axes)

    def measured(
        self, body: Body, *, metric: str = "bandwidth", unit: str = "B/s", better: Better = "higher"
    ) -> Result:
        """Run ``body(case, measure)`` as a bench of its own through ``Measure``; otherwise like :meth:`case`."""
        own = Bench(body.__name__, 1, metric, unit, better, {}, body, suite="traps", doc=body.__name__, source=__file__)
        return self._row(own, {})

    def _row(self, bench: Bench, axes: Mapping[str, Value]) -> Result:
        rows: list[Result] = import_module("kvbench.worker").measure_case(bench, dict(axes), self.context)
        row = rows[0]
        if row.status == "skipped":
            raise Unavailable(row.reason, where=f"{row.suite}/{row.bench}")
        if row.value is None or row.seconds is None:
            raise PathBroken(row.reason or row.status, where=f"{row.suite}/{row.bench}")
        return row

    @contextmanager
    def team(self, threads: int | str = 1) -> Iterator[Team]:
        """Yield a team pinned where ``Measure.team`` would pin it."""
        from kvbench.kernels.team import Team

        with Team(self.context.topology.measuring_cpus("all" if threads == "all" else int(threads))) as team:
            yield team

    @contextmanager
    def buffer(self, nbytes: int, pages: Pages = "4k", *, kind: Kind | None = "bits") -> Iterator[HostBuffer]:
        """Yield a host buffer. Raises PathBroken when base pages are refused though there is room for them."""
        from kvbench.memory import host

        try:
            made = host.host_buffer(nbytes, pages, kind=kind, seed=SEED)
        except Unavailable as error:
            if pages == "4k":
                host.preflight(nbytes)  # raises Unavailable itself when memory really is short
                raise PathBroken(str(error)) from error
            raise
        try:
            yield made
        finally:
            made.close()


def brief(limits: Budget, *, samples: int, block_seconds: float, cap_seconds: float = 2.0) -> Budget:
    """Return ``limits`` cut to ``samples`` blocks of ``block_seconds``, with everything else as profiles have it."""
    count = max(FLOOR_SAMPLES, samples)
    return replace(limits, fixed_samples=count, min_samples=count, block_seconds=block_seconds, cap_seconds=cap_seconds)
