"""``@bench``: declares a versioned measurement with typed axes. Suite = folder, bench = function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvbench.contract.axis import Axis, Profile, Value
from kvbench.contract.case import Case, case_digest
from kvbench.contract.result import BASES, Basis, Better

if TYPE_CHECKING:
    from kvbench.measure import Measure

Body = Callable[[Case, "Measure"], None]
BasisOf = Callable[[Mapping[str, Value]], Basis]
RESERVED = frozenset({"suite", "bench", "version", "axes", "digest", "resolved", "text", "metric", "unit", "better"})


@dataclass(frozen=True, slots=True)
class Bench:
    """A declared bench. ``metric``, ``unit`` and ``better`` describe the primary metric (the first row of a case).

    ``where`` drops combinations of axis values that mean nothing; ``disk`` is the scratch bytes a case writes;
    ``seconds`` maps a profile to what one case is expected to take, for the estimate printed before a run, ``setup``
    adds what large axis values make of it, and ``limit`` is how many times longer than the profile's cap a case may run
    before its worker is killed. ``basis`` is that of the primary row, also where the case comes to no value; a function
    of the axes where it differs between cases.
    """

    name: str
    version: int
    metric: str
    unit: str
    better: Better
    axes: Mapping[str, Axis]
    body: Body
    suite: str = ""
    doc: str = ""
    where: Callable[[Mapping[str, Value]], bool] | None = None
    disk: Callable[[Mapping[str, Value]], int] | None = None
    setup: Callable[[Mapping[str, Value]], float] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    limit: float = 60.0
    extra_metrics: tuple[str, ...] = ()
    source: str = ""
    basis: Basis | BasisOf = "measured"

    def __call__(self, case: Case, measure: Measure) -> None:
        self.body(case, measure)

    def in_suite(self, suite: str, source: str) -> Bench:
        """Return this bench as member of ``suite``, loaded from file ``source``."""
        return replace(self, suite=suite, source=source)

    def basis_of(self, axes: Mapping[str, Value]) -> Basis:
        """Return the basis of the primary row of the case at ``axes``."""
        return self.basis(axes) if callable(self.basis) else self.basis

    def case(self, axes: Mapping[str, Value]) -> Case:
        """Return the case at ``axes`` (every axis given, in declaration order)."""
        ordered = {name: axes[name] for name in self.axes}
        return Case(
            self.suite, self.name, self.version, ordered,
            case_digest(self.suite, self.name, self.version, ordered, self.axes),
        )  # fmt: skip

    def cases(self, profile: Profile, override: Mapping[str, Sequence[Value]] | None = None) -> Iterator[Case]:
        """Yield the grid of ``profile``; an axis in ``override`` takes those values instead of the profile's."""
        lists = [(override or {}).get(name, axis.values(profile)) for name, axis in self.axes.items()]
        for values in itertools.product(*lists):
            axes = dict(zip(self.axes, values, strict=True))
            if self.where is None or self.where(axes):
                yield self.case(axes)


def bench(
    *, version: int, metric: str, unit: str, better: Better, where: Callable[[Mapping[str, Value]], bool] | None = None,
    disk: Callable[[Mapping[str, Value]], int] | None = None, seconds: Mapping[str, float] | None = None,
    setup: Callable[[Mapping[str, Value]], float] | None = None, limit: float = 60.0,
    extra_metrics: Sequence[str] = (), basis: Basis | BasisOf = "measured", **axes: Axis,
) -> Callable[[Body], Bench]:  # fmt: skip
    """Declare the decorated function as a bench; raises ValueError when the declaration contradicts itself."""
    if version < 1:
        raise ValueError(f"version {version}: starts at 1")
    if better not in ("higher", "lower"):
        raise ValueError(f"better={better!r}: expected 'higher' or 'lower'")
    if not callable(basis) and basis not in BASES:
        raise ValueError(f"basis={basis!r}: expected one of {BASES}")
    for name, declared in axes.items():
        if not isinstance(declared, Axis):
            raise ValueError(f"{name}={declared!r} is not an axis: build it with axis.choice, axis.bytes, ...")
        if name in RESERVED or name.startswith("_"):
            raise ValueError(f"axis name {name!r} is reserved")
        if declared.since is not None and declared.default is None:
            raise ValueError(f"axis {name!r} has since={declared.since!r} and so needs a default")

    def declare(body: Body) -> Bench:
        doc = (body.__doc__ or "").strip()
        if not doc:
            raise ValueError(f"bench {body.__name__} has no docstring: it is what `kvbench list` shows")
        return Bench(
            body.__name__, version, metric, unit, better, dict(axes), body, doc=doc, where=where, disk=disk,
            setup=setup, seconds=dict(seconds or {}), limit=limit, extra_metrics=tuple(extra_metrics), basis=basis,
        )  # fmt: skip

    return declare


def resolve_word(name: str, declared: Axis, value: Value, facts: Any) -> Value | None:
    """Return the number behind a machine-relative word (``all``, ``4xllc``), or None where ``value`` is no such word.

    ``facts`` offers ``cores`` (threads one per physical core of the affinity mask) and ``llc`` (bytes).
    """
    if declared.kind == "threads" and value == "all":
        return int(facts.cores)
    if declared.kind == "bytes" and isinstance(value, str):
        multiple = int(value.split("x", 1)[0])
        step = 2 << 20  # whole 2 MiB pages, so that the thp and 4k forms of a case hold the same bytes
        return -(-multiple * int(facts.llc) // step) * step
    return None
