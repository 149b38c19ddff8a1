"""The machine ``this``: numbers from rows measured here, and a preset's where there are none.

Takes rows (the ``kvbench.results/1`` document) and never opens a store. Each number says ``measured`` with run and
date, or which preset it fell back to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Any

from kvbench.errors import NoData
from kvbench.replay.contention import NO_SOURCE, Contention
from kvbench.replay.costs import Costs
from kvbench.replay.machine import NUMBERS, THIS, Machine, Number, preset
from kvbench.replay.models import model
from kvbench.systems.neo.costs import Tables, tables_from_rows

Row = Mapping[str, Any]
BIG = 64 << 20  # bytes a bandwidth has to be taken over; smaller ones are of caches or of fixed costs
FALLBACK = "h200"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where a number is measured: ``bench``, ``metric``, the ``axes`` its rows have; ``largest``: of these, the rows at
    the largest value of that axis."""

    bench: str
    metric: str
    axes: Mapping[str, Any]
    largest: str = "bytes"


def _link(direction: str, transport: str, metric: str = "bandwidth") -> Wanted:
    axes = {"pair": "hbm:pinned", "direction": direction, "transport": transport, "pieces": 1}
    return Wanted("ladder/link", metric, axes)


def _law(transport: str) -> Wanted:
    axes = {"pair": "hbm:pinned", "direction": "fetch", "transport": transport}
    return Wanted("strata/page_law", "per_fragment", axes)


def _call(op: str) -> Wanted:
    # scattered: one call a chunk; contiguous ones are unmapped and made accessible by one call for all
    axes = {"driver": "cuda", "op": op, "chunk_bytes": 2 << 20, "order": "scattered", "threads": 1}
    return Wanted("ellm/vmm_calls", "call_time", axes, "count")


WANTED: Mapping[str, Wanted] = MappingProxyType(
    {
        "host_bandwidth": Wanted(
            "ladder/host_bandwidth", "bandwidth", {"op": "read", "threads": "all", "pages": "thp"}
        ),
        "hbm": Wanted("ladder/device_bandwidth", "bandwidth", {"op": "read", "cache": "cold"}),
        "flops": Wanted("neo/gemm_contrast", "flops", {"device": "gpu", "dtype": "bf16"}, "tokens"),
        "link_in": _link("fetch", "ce"),
        "link_out": _link("evict", "ce"),
        "sm_copy": _link("fetch", "sm"),
        "direct_read": _link("fetch", "direct"),
        "both_in": _link("both", "ce", "fetch_bandwidth"),
        "both_out": _link("both", "ce", "evict_bandwidth"),
        "ce_call": _law("ce"),
        "batch_call": _law("batch"),
        "attention": Wanted(
            "neo/decode_attention",
            "bandwidth",
            {"device": "cpu", "impl": "kvbench", "dtype": "bf16", "group": 4},
            "threads",
        ),
        "map": _call("map"),
        "set_access": _call("set_access"),
        "unmap": _call("unmap"),
        "compute_link": Wanted(
            "strata/interference", "victim_slowdown", {"form": "gpu", "victim": "gemm", "transport": "sm"}, "quota"
        ),
        "hbm_link": Wanted(
            "strata/interference", "victim_slowdown", {"form": "gpu", "victim": "reader", "transport": "sm"}, "quota"
        ),
        "cpu_link": Wanted("neo/beside_copies", "slowdown", {"copies": "h2d_d2h"}, "threads"),
    }
)
SERVED_BY_BLOCKS = 2  # blocks of the copy kernel whose interference counts: the quota Strata loads with


@dataclass(frozen=True, slots=True)
class Here:
    """``machine`` with what was found, the ``contention`` found, and ``rows`` of cost tables."""

    machine: Machine
    contention: Contention
    rows: tuple[Row, ...]

    def costs(self, model_name: str) -> Costs:
        """Return the costs of a model here: from NEO's tables where rows of this very model hold all of them."""
        shape, tables = model(model_name), self._tables(model_name)
        made = Costs(self.machine, shape, contention=self.contention, tables=tables)
        if tables is None:
            made.notes["no cost tables of this model measured here: rooflines"] = None
        return made

    def _tables(self, model_name: str) -> Tables | None:
        try:
            return tables_from_rows(self.rows, near="gpu", model=model_name)
        except NoData:
            return None

    def measured(self) -> tuple[str, ...]:
        """Return the names of the numbers that were measured here."""
        return tuple(name for name in NUMBERS if self.machine.numbers[name].source.startswith("run "))


def here(rows: Iterable[Row], runs: Mapping[str, str], *, fallback: str = FALLBACK) -> Here:
    """Return this machine from its ``rows``; ``runs``: when each run (its uuid) began; a missing number is that of the
    preset ``fallback``.

    Only rows that are ``ok`` and ``measured`` count; of several runs the median, under the newest one's name. Raises
    NoData where not one number was measured here, UsageError for an unknown preset.
    """
    base = preset(fallback)
    kept = [row for row in rows if row["status"] == "ok" and row["value"] is not None]
    found = {name: told for name, told in ((n, _find(kept, w, runs)) for n, w in WANTED.items()) if told is not None}
    numbers = {
        name: Number(number.value, number.kind, f"preset {fallback}, not measured here: {number.source}")
        for name, number in base.numbers.items()
    }
    numbers.update({name: _number(*told) for name, told in found.items() if name in NUMBERS})
    # a measured rate is what is reached: no further share of it
    for share, rate in (("hbm_share", "hbm"), ("flops_share", "flops"), ("attention_share", "flops")):
        if rate in found:
            numbers[share] = _number(1.0, f"{found[rate][1]}: the rate is what was reached")
    if "attention" in found and "host_bandwidth" in found:
        reached = found["attention"][0] / found["host_bandwidth"][0]
        numbers["cpu_share"] = _number(min(1.0, reached), f"{found['attention'][1]}: over the read bandwidth")
    if "map" in found and "set_access" in found:
        numbers["map_chunk"] = _number(found["map"][0] + found["set_access"][0], found["map"][1])
    if "unmap" in found:
        numbers["unmap_chunk"] = _number(*found["unmap"])
    if {"both_in", "both_out", "link_in", "link_out"} <= set(found):
        slower = [found[f"link_{way}"][0] / found[f"both_{way}"][0] for way in ("in", "out")]
        numbers["link_duplex"] = _number(max(1.0, sum(slower) / 2), found["both_in"][1])
    machine = Machine(THIS, f"this machine, else {base.title}", numbers)
    made = Here(machine, _contention(found, machine), tuple(kept))
    if not made.measured():
        raise NoData(
            "nothing that costs are made of was measured on this machine", where=f"machine {THIS}",
            expected="ok rows of " + ", ".join(sorted({wanted.bench for wanted in WANTED.values()})),
            mend="kvbench run ladder, then strata, neo and ellm; or name a preset",
        )  # fmt: skip
    return made


def _number(value: float, source: str) -> Number:
    return Number(value, "measured", source)


def _contention(found: Mapping[str, tuple[float, str]], machine: Machine) -> Contention:
    """Return the factors: 1 plus the slowdown found, 1 where none was."""
    factors, sources = {}, {"link_duplex": machine.numbers["link_duplex"].source}
    for name in ("compute_link", "hbm_link", "cpu_link"):
        slowdown, source = found.get(name, (0.0, NO_SOURCE))
        factors[name], sources[name] = 1.0 + max(0.0, slowdown), source
    return Contention(link_duplex=machine["link_duplex"], sources=sources, **factors)


def _find(rows: Iterable[Row], wanted: Wanted, runs: Mapping[str, str]) -> tuple[float, str] | None:
    """Return the median value of the rows wanted and where they come from; None where there are none."""
    suite, bench = wanted.bench.split("/")
    fitting = [
        row for row in rows
        if row["suite"] == suite and row["bench"] == bench and row["metric"] == wanted.metric
        and row["basis"] == "measured" and _fits(row, wanted)
    ]  # fmt: skip
    if not fitting:
        return None
    ranks = [_rank(row["axes"].get(wanted.largest)) for row in fitting]
    chosen = [row for row, rank in zip(fitting, ranks, strict=True) if rank == max(ranks)]
    newest = max(chosen, key=lambda row: (runs.get(str(row["run"]), ""), str(row["run"])))
    run = str(newest["run"])
    when = runs.get(run, "")[:10] or "date unknown"
    return median(float(row["value"]) for row in chosen), f"run {run[:8]}, {when}, {wanted.bench} {wanted.metric}"


def _fits(row: Row, wanted: Wanted) -> bool:
    axes = row["axes"]
    if any(str(axes.get(name)) != str(value) for name, value in wanted.axes.items()):
        return False
    if {"in_llc", "in_l2"} & set(row["flags"]):
        return False
    if wanted.largest == "quota" and int(axes["quota"]) != SERVED_BY_BLOCKS:
        return False
    return not (wanted.metric == "bandwidth" and "bytes" in axes and int(axes["bytes"]) < BIG)


def _rank(value: object) -> float:
    """Order axis values: numbers by size, the word ``all`` above them."""
    return float("inf") if value == "all" else float(value) if isinstance(value, int | float) else 0.0
