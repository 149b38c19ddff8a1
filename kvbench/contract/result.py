"""The row a case leaves behind. Every producer and consumer (worker, store, bundles, JSON, tables) uses this record."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

Status = Literal["ok", "suspect", "invalid", "tainted", "skipped", "failed"]
Basis = Literal["measured", "modelled", "emulated", "simulated"]
Better = Literal["higher", "lower"]
Stop = Literal["converged", "stabilised_noisy", "timeout", "no_samples"]
RunStatus = Literal["running", "ok", "partial", "interrupted", "failed"]
Scalar = str | int | float | bool | None

STATUSES: tuple[str, ...] = get_args(Status)
BASES: tuple[str, ...] = get_args(Basis)
RUN_STATUSES: tuple[str, ...] = get_args(RunStatus)
HAS_VALUE: frozenset[str] = frozenset({"ok", "suspect", "tainted", "invalid"})


@dataclass(frozen=True, slots=True)
class Ceiling:
    """An upper bound a row is held against. ``value`` has the row's unit; ``source`` says where it comes from."""

    name: str
    value: float | None
    kind: Literal["physical", "measured"]
    source: str


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one operation: needed once, crossed the link, asked for by the cores, touched in the near tier."""

    unique: int | None = None
    link: int | None = None
    demand: int | None = None
    near: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One metric of one case in one run (design 9). Numbers are SI; a row without one has None.

    ``axes`` identify the case, ``resolved`` holds the numbers behind words such as ``all``; ``seconds`` is the median
    time of one operation; ``rate_of`` says which bytes a rate counts; ``detail`` holds scalars the bench defines.
    ``samples`` (seconds of one operation each, float64, at most 1,000 kept) are stored aside and never in JSON output.
    """

    suite: str
    bench: str
    bench_version: int
    axes: dict[str, Scalar]
    metric: str
    unit: str
    better: Better
    digest: str
    status: Status
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    kept: int = 0
    reason: str = ""
    stop: Stop | None = None
    basis: Basis = "measured"
    kernel: str | None = None
    transport: str | None = None
    resolved: dict[str, Scalar] = field(default_factory=dict)
    ceilings: tuple[Ceiling, ...] = ()
    fraction: float | None = None
    bytes: Bytes = field(default_factory=Bytes)
    rate_of: str | None = None
    seconds: float | None = None
    flags: tuple[str, ...] = ()
    detail: dict[str, Scalar] = field(default_factory=dict)
    samples: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r}, expected one of {STATUSES}")
        if self.basis not in BASES:
            raise ValueError(f"basis {self.basis!r}, expected one of {BASES}")
        if (self.status in ("skipped", "failed")) and self.value is not None:
            raise ValueError(f"a {self.status} row of {self.suite}/{self.bench} carries the value {self.value}")
        for name in ("value", "low", "high", "fraction", "seconds"):
            number = getattr(self, name)
            self._finite(name, number)
        for name, number in [*self.detail.items(), *self.resolved.items()]:
            self._finite(name, number)
        for ceiling in self.ceilings:
            self._finite(ceiling.name, ceiling.value)
        for sample in self.samples:
            self._finite("a sample", sample)

    def _finite(self, name: str, number: object) -> None:
        # NaN compares false, so it is caught by the same comparison
        if isinstance(number, float) and not abs(number) < float("inf"):
            raise ValueError(f"{name} of {self.suite}/{self.bench} is {number}: no value is None, never NaN or inf")

    @property
    def is_canary(self) -> bool:
        return self.suite == "canary"

    def with_(self, **changes: Any) -> Result:
        """Return a copy with ``changes`` applied."""
        return replace(self, **changes)

    def to_json(self, run: str) -> dict[str, Any]:
        """Return the row of ``kvbench.results/1`` for run uuid ``run`` (samples and digest stay inside)."""
        row = asdict(self)
        row.pop("samples")
        row.pop("digest")
        return {"run": run, **{key: row[key] for key in JSON_KEYS}}

    def to_wire(self) -> dict[str, Any]:
        """Return everything, samples included, as JSON-ready data: pipe between worker and parent, and bundles."""
        return asdict(self)

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> Result:
        """Rebuild a row from :meth:`to_wire` data. Raises KeyError, TypeError or ValueError on malformed data."""
        fields = dict(data)
        fields["ceilings"] = tuple(Ceiling(**c) for c in fields.get("ceilings", ()))
        fields["bytes"] = Bytes(**fields.get("bytes", {}))
        fields["flags"] = tuple(fields.get("flags", ()))
        fields["samples"] = tuple(float(s) for s in fields.get("samples", ()))
        return cls(**fields)


JSON_KEYS = (
    "suite", "bench", "bench_version", "axes", "resolved", "metric", "unit", "better", "value", "low", "high", "n",
    "kept", "status", "reason", "stop", "basis", "kernel", "transport", "ceilings", "fraction", "bytes", "rate_of",
    "seconds", "flags", "detail",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """A case as the run row's plan keeps it: enough to resume without asking the suites again."""

    digest: str
    suite: str
    bench: str
    bench_version: int
    axes: dict[str, str | int]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run: a pass over its plan by fresh worker processes. Times are UTC ISO 8601 with microseconds.

    ``machine`` and ``env`` are the fingerprint's two fact dictionaries; ``hw_class`` and ``env_digest`` their keys.
    ``boot_id``, ``pid`` and ``pid_start`` identify the parent process on ``host`` so that a dead run can be told.
    """

    uuid: str
    group: str
    label: str | None
    started_at: str
    hw_class: str
    env_digest: str
    machine: dict[str, Any]
    env: dict[str, Any]
    git: str | None
    profile: str
    seed: int
    plan: tuple[PlannedCase, ...]
    host: str
    boot_id: str
    pid: int
    pid_start: str
    kvbench_version: str
    status: RunStatus = "running"
    resumed: bool = False
    flags: tuple[str, ...] = ()
    finished_at: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the run object of ``kvbench.results/1``."""
        return {
            "uuid": self.uuid, "group": self.group, "label": self.label, "started_at": self.started_at,
            "hw_class": self.hw_class, "env": self.env_digest, "git": self.git, "profile": self.profile,
            "status": self.status, "resumed": self.resumed,
        }  # fmt: skip

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> RunInfo:
        fields = dict(data)
        fields["plan"] = tuple(PlannedCase(**p) for p in fields["plan"])
        fields["flags"] = tuple(fields.get("flags", ()))
        return cls(**fields)
