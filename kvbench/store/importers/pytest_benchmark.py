"""``--benchmark-json`` and ``--benchmark-save`` of pytest-benchmark: seconds, statistics a test, samples where kept.

Follows ``Metadata.as_dict`` and ``pytest_benchmark_generate_json`` of pytest-benchmark 5.3. What bites: only seconds;
``stats.data`` is there with ``--benchmark-save-data`` or ``--benchmark-json``; parameters are JSON values; the machine
facts hold readings that move (clocks), so only stable ones name the machine; times before version 5 have no zone and
are UTC.
"""

from __future__ import annotations

import math
import re
import statistics
from datetime import UTC, datetime
from typing import Any

from kvbench.store.importers.fields import Fields, short
from kvbench.store.importers.found import Figure, Found, FoundCase, axis_name, axis_value, left_out, measured
from kvbench.store.importers.source import Malformed, Source, json_of

TOOL = "pytest-benchmark"
MARK = re.compile(r'"machine_info"\s*:')
_ROOT = {"machine_info", "commit_info", "benchmarks", "datetime", "version"}
_BENCHMARK = {"group", "name", "fullname", "params", "param", "extra_info", "options", "stats", "cprofile"}


def parse(source: Source) -> Found:
    """Return the figures of the file. Raises Malformed."""
    root = Fields(json_of(source))
    benchmarks = root.children("benchmarks")
    if not benchmarks:
        raise Malformed("the file holds no benchmark of pytest-benchmark")
    info = Fields(root.raw("machine_info") or {}, "machine_info")
    commit = Fields(root.raw("commit_info") or {}, "commit_info")
    cases = tuple(_case(benchmark) for benchmark in benchmarks)
    unknown = [*root.others(_ROOT), *(name for each in benchmarks for name in each.others(_BENCHMARK))]
    extra = sum(bool(each.raw("extra_info")) for each in benchmarks)
    notices = list(left_out(unknown)) + ([f"extra_info of {extra} tests left out: it has no units"] if extra else [])
    settings = ("system", "release", "python_version", "python_implementation")
    env: dict[str, Any] = {name: info.raw(name) for name in settings if info.has(name)}
    env |= {f"commit_{name}": commit.raw(name) for name in ("id", "branch", "dirty") if commit.has(name)}
    return Found(
        TOOL, root.word("version") if root.has("version") else None, cases, _time(root), _machine(info), env,
        tuple(notices),
    )  # fmt: skip


def _time(root: Fields) -> str | None:
    if not isinstance(root.raw("datetime"), str):
        return None
    try:
        found = datetime.fromisoformat(root.word("datetime"))
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        return found.astimezone(UTC).isoformat(timespec="microseconds")
    except (ValueError, OverflowError):
        return None


def _machine(info: Fields) -> dict[str, Any] | None:
    cpu = info.raw("cpu")
    brand = cpu.get("brand_raw", cpu.get("brand")) if isinstance(cpu, dict) else None
    if not info.has("node") or not isinstance(cpu, dict) or not brand:
        return None
    return {"node": info.raw("node"), "machine": info.raw("machine"), "cpu": brand, "cpus": cpu.get("count")}


def _case(benchmark: Fields) -> FoundCase:
    full = benchmark.word("fullname") if benchmark.has("fullname") else benchmark.word("name")
    test, bracket, ids = full.partition("[")
    if not test.strip():
        raise Malformed(f"{benchmark.path} has the name {short(full)}")
    params = benchmark.raw("params")
    axes: dict[str, str | int] = {}
    if params is None and bracket:
        axes["param"] = axis_value(ids.removesuffix("]"))
    elif params is not None:
        for name, value in Fields(params, benchmark.at("params")).pairs():
            label = axis_name(name)
            if label in axes:
                raise Malformed(f"{benchmark.at('params')} has {short(label)} twice")
            axes[label] = axis_value(value)
    stats = benchmark.child("stats")
    median, rounds = stats.number("median"), stats.count("rounds")
    if not stats.number("min") <= median <= stats.number("max"):
        raise Malformed(f"{stats.at('median')} is {median:g}, outside {stats.at('min')} to {stats.at('max')}")
    samples = _samples(stats, median, rounds)
    told: dict[str, str | int] = {"statistic": "median"}
    if stats.has("iterations"):
        told["iterations"] = stats.count("iterations")
    figure = Figure("time", "s", "lower", median, rounds or None, seconds=median or None, samples=samples, detail=told)
    return FoundCase(test, axes, (measured(figure, stats.at("median")),))


def _samples(stats: Fields, median: float, rounds: int) -> tuple[float, ...]:
    """Return the seconds of every round, none where they were not kept. Raises Malformed where they contradict it."""
    data = stats.items("data")
    if not data:
        return ()
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in data):
        raise Malformed(f"{stats.at('data')} holds what is no number")
    samples = tuple(float(value) if abs(value) < 1e300 else math.inf for value in data)
    if not all(map(math.isfinite, samples)) or min(samples) < 0:
        raise Malformed(f"{stats.at('data')} holds what is no time")
    if len(samples) != rounds:
        raise Malformed(f"{stats.at('data')} holds {len(samples)} samples, {stats.at('rounds')} is {rounds}")
    if not math.isclose(statistics.median(samples), median, rel_tol=1e-9, abs_tol=1e-15):
        raise Malformed(f"{stats.at('median')} is {median:g}, the median of its data {statistics.median(samples):g}")
    return samples
