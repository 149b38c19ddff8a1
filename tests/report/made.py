"""Measurements made for report pages: many cases of every shape a page has a place for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvbench.analysis.compare import Side, compare
from kvbench.contract.result import Bytes, Ceiling, Result
from kvbench.report.html import Contents, Report, make_report
from tests.analysis.sides import Run
from tests.store.factories import digest_of, make_run

MACHINE: dict[str, dict[str, Any]] = {
    "key": {"cpu_vendor": "amd", "sockets": 1, "numa_nodes": 1, "cores": 2, "gpus": []},
    "facts": {"cpu_name": "a CPU", "memory_bytes": 2**35, "llc_bytes": 2**25, "gpus": [],
              "nodes": [{"id": 0, "cpus": 2, "memory_bytes": 2**35}]},
}  # fmt: skip


RATES = {"read": 1.0, "write": 0.7, "copy": 0.5, "triad": 0.6}


def case(
    suite: str, bench: str, axes: dict[str, Any], value: float | None, *, metric: str = "bandwidth", unit: str = "B/s",
    **changes: Any,
) -> Result:  # fmt: skip
    """Return a row as the sampler leaves it, with an interval of 2 % and a measured ceiling where it is a rate."""
    if value is not None:
        changes.setdefault("low", value * 0.98)
        changes.setdefault("high", value * 1.02)
        if unit == "B/s":
            changes.setdefault("ceilings", (Ceiling("read stream", value * 1.1, "measured", "interleaved"),))
            changes.setdefault("fraction", 1 / 1.1)
            size = axes.get("bytes", 2**28)
            counted = size if isinstance(size, int) else 2**28
            changes.setdefault("bytes", Bytes(unique=counted, link=counted))
            changes.setdefault("rate_of", "link")
            changes.setdefault("seconds", counted / value)
    values: dict[str, Any] = {
        "suite": suite, "bench": bench, "bench_version": 1, "axes": axes, "metric": metric, "unit": unit,
        "better": "lower" if unit == "s" else "higher", "digest": digest_of(suite, bench, 1, axes), "status": "ok",
        "value": value, "n": 6, "kept": 6, "kernel": "a kernel",
    }  # fmt: skip
    return Result(**(values | changes))


def many(factor: float = 1.0) -> list[Result]:
    """Return rows of 500 cases: curves, dots, other bases, hostile words, and rows of every status."""
    rows = [
        case("ladder", "host_bandwidth", {"op": op, "threads": threads, "bytes": 4096 << i},
             factor * RATES[op] * 1e12 * (threads / (20 + 1e-4 * (4096 << i) ** 0.75) + 0.01))
        for op in ("read", "write", "copy", "triad") for threads in (1, 2, 4) for i in range(16)
    ]  # fmt: skip
    rows += [
        case("strata", "page_law", {"op": op, "fragment": 1024 << i, "order": order},
             factor * RATES[op] * (1024 << i) / (2e-6 + (1024 << i) / 2e10))
        for op in ("read", "copy") for order in ("random", "sorted") for i in range(12)
    ]  # fmt: skip
    rows += [
        case("neo", f"layer_{i}", {"batch": batch, "heads": heads}, 1e-3 * batch * heads / factor, metric="time",
             unit="s")
        for i in range(12) for batch in (1, 2, 4, 8) for heads in (8, 16, 32)
    ]  # fmt: skip
    rows += [
        case("ellm", "modelled", {"n": i}, 10.0 + i, metric="share", unit="1", basis="modelled") for i in range(24)
    ]
    rows += [
        case("routes", "odd", {"n": i, "kind": status}, None if status in ("skipped", "failed") else 1e9 + i,
             status=status, reason=f"{status} on purpose")
        for i in range(10) for status in ("tainted", "skipped", "failed", "invalid")
    ]  # fmt: skip
    rows += [
        case("<b>s</b>", "</script><script>x()</script>", {"n": i, "op": "\"'><img src=x>"}, 1e9) for i in range(3)
    ]
    left = 500 - len({row.digest for row in rows})
    assert left > 0
    return rows + [case("routes", "dots", {"kind": f"k{i}"}, factor * 1e9 * (1 + i / 7)) for i in range(left)]


@lru_cache(maxsize=1)
def big() -> Report:
    """Return the report of 500 cases on two sides of five runs; says how long it took."""
    sides = (side("one", [many() for _ in range(5)]), side("two", [many(0.9) for _ in range(5)]))
    began = time.perf_counter()
    made = make_report(Contents(sides, "2025-03-01T00:00:00+00:00", compare(sides)))
    size = len(made.html.encode())
    print(f"500 cases, 2 sides of 5 runs: {size / 1e6:.2f} MB in {time.perf_counter() - began:.1f} s")
    return made


def side(name: str, runs: Sequence[Sequence[Result]], **info: Any) -> Side:
    """Return a side on the made machine."""
    values: dict[str, Any] = {"machine": MACHINE, "env": {"kernel": "6.1"}, "status": "ok"}
    return Side(name, tuple(Run(make_run(**(values | info)), tuple(rows)) for rows in runs))
