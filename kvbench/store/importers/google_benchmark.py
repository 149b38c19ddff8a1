"""``--benchmark_format=json`` of google/benchmark: a line a repetition, aggregates between them, counters inline.

Follows json_reporter.cc and docs/user_guide.md of google/benchmark (json_schema_version 1). What bites: times are in
``time_unit``; each is a mean over ``iterations``; ``real_time`` is the manual time where the name says so; aggregates
repeat what the repetitions say; an error or a skip leaves a zero time behind.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from kvbench.contract.result import Scalar, Status
from kvbench.store.importers.fields import Fields, short
from kvbench.store.importers.found import Figure, Found, FoundCase, axis_name, axis_value, measured, no_value
from kvbench.store.importers.source import Malformed, Source, json_of

TOOL = "google-benchmark"
MARK = re.compile(r'"(?:library_build_type|mhz_per_cpu)"\s*:')
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_CLOCKS = ("real_time", "manual_time", "process_time")
_OPTIONS = ("iterations", "repeats", "min_time", "min_warmup_time")
_ARGUMENT = re.compile(r"-?[0-9]{1,18}")
_MEDIAN = {"statistic": "median of repetitions"}
_KNOWN = {
    "name", "family_index", "per_family_instance_index", "run_name", "run_type", "repetitions", "repetition_index",
    "threads", "aggregate_name", "aggregate_unit", "error_occurred", "error_message", "skipped", "skip_message",
    "iterations", "real_time", "cpu_time", "time_unit", "bytes_per_second", "items_per_second", "label", "big_o",
    "cpu_coefficient", "real_coefficient", "rms", "allocs_per_iter", "max_bytes_used", "total_allocated_bytes",
    "net_heap_growth",
}  # fmt: skip


def parse(source: Source) -> Found:
    """Return the figures of the file. Raises Malformed."""
    root = Fields(json_of(source))
    context = root.child("context")
    groups: dict[str, list[Fields]] = {}
    counters: set[str] = set()
    for entry in root.children("benchmarks"):
        name = entry.word("run_name") if entry.has("run_name") else entry.word("name")
        groups.setdefault(name, []).append(entry)
        counters |= set(entry.others(_KNOWN))
    if not groups:
        raise Malformed("the file holds no benchmark of google-benchmark")
    debug = context.raw("library_build_type") == "debug"
    cases = [_case(name, entries, debug) for name, entries in groups.items()]
    notices = [f"counters without a known unit left out: {', '.join(sorted(counters)[:6])}"] if counters else []
    keys = ("host_name", "num_cpus", "caches")
    named = all(context.has(key) for key in keys[:2]) and bool(context.word("host_name"))
    settings = ("cpu_scaling_enabled", "aslr_enabled", "library_version", "library_build_type", "executable", "date")
    return Found(
        TOOL, context.word("library_version") if context.has("library_version") else None,
        tuple(case for case in cases if case is not None), _time(context),
        {key: context.raw(key) for key in keys} if named else None,
        {key: context.raw(key) for key in settings if context.has(key)}, tuple(notices),
    )  # fmt: skip


def _time(context: Fields) -> str | None:
    """Return when it was measured, None for a date without a time zone: it is the clock of a machine unknown here."""
    if not isinstance(context.raw("date"), str):
        return None
    try:
        found = datetime.fromisoformat(context.word("date"))
        return found.astimezone(UTC).isoformat(timespec="microseconds") if found.tzinfo else None
    except (ValueError, OverflowError):
        return None


def _case(name: str, entries: Sequence[Fields], debug: bool) -> FoundCase | None:
    test, axes, manual = _settings(name)
    real = "manual_time" if manual else "real_time"
    repeated = [entry for entry in entries if not entry.has("run_type") or entry.word("run_type") == "iteration"]
    repeated = [entry for entry in repeated if not entry.has("big_o") and not entry.has("rms")]
    for entry in repeated:
        failed = entry.flag("error_occurred")
        if failed or entry.flag("skipped"):
            field = "error_message" if failed else "skip_message"
            said = entry.word(field) if entry.has(field) else "no reason given"
            status: Status = "failed" if failed else "skipped"
            return FoundCase(test, axes, (no_value(real, "s", "lower", status, f"google-benchmark says: {said}"),))
    if repeated:
        figures = _of_repetitions(repeated, real)
    else:
        found = _of_aggregates(entries, real)
        if found is None:
            return None
        figures = found
    return FoundCase(test, axes, tuple(_suspect(figure, debug) for figure in figures))


def _suspect(figure: Figure, debug: bool) -> Figure:
    if not debug or figure.value is None:
        return figure
    return replace(figure, status="suspect", reason="the benchmark library was a debug build")


def _settings(name: str) -> tuple[str, dict[str, str | int], bool]:
    """Return test, arguments and options of ``BM_X/64/rows:8/real_time/threads:2``, and whether it timed itself."""
    head, *rest = name.split("/")
    axes: dict[str, str | int] = {}
    clock, given = [], 0
    for part in rest:
        key, colon, value = part.partition(":")
        if part in _CLOCKS:
            clock.append(part)
        elif _ARGUMENT.fullmatch(part):
            axes[f"arg{given}"] = int(part)
            given += 1
        elif colon and key and value:
            label = key if key == "threads" or key in _OPTIONS else axis_name(key)
            if label in axes:
                raise Malformed(f"the name {short(name)} has {short(label)} twice")
            axes[label] = int(value) if _ARGUMENT.fullmatch(value) else axis_value(value)
            given += key not in (*_OPTIONS, "threads")
        else:
            head += f"/{part}"
    if clock:
        axes["clock"] = "+".join(clock)
    if not head.strip():
        raise Malformed(f"a benchmark has the name {short(name)}")
    return head, axes, "manual_time" in clock


def _seconds(entry: Fields, field: str) -> float:
    unit = entry.word("time_unit") if entry.has("time_unit") else "ns"
    if unit not in _PER_SECOND:
        raise Malformed(f"{entry.at('time_unit')} is {short(unit)}, expected {', '.join(_PER_SECOND)}")
    value = entry.number(field) / _PER_SECOND[unit]
    if value < 0:
        raise Malformed(f"{entry.at(field)} is {value:g} s, expected more than 0")
    return value


def _of_repetitions(entries: Sequence[Fields], real: str) -> list[Figure]:
    figures = []
    for metric, field in ((real, "real_time"), ("cpu_time", "cpu_time")):
        times = [_seconds(entry, field) for entry in entries]
        value = statistics.median(times)
        told: dict[str, Scalar] = {
            "statistic": "median of repetitions",
            "iterations": max(_iterations(entry) for entry in entries),
        }
        figure = Figure(
            metric, "s", "lower", value, len(times), seconds=value or None, samples=times if value else (),
            flags=("mean_of_iterations",), detail=told,
        )  # fmt: skip
        figures.append(measured(figure, entries[0].at(field)))
    for metric, field, unit in (("bandwidth", "bytes_per_second", "B/s"), ("item_rate", "items_per_second", "1/s")):
        rates = [entry.number(field) for entry in entries if entry.has(field)]
        if rates and len(rates) == len(entries):
            rate = Figure(metric, unit, "higher", statistics.median(rates), len(rates), detail=_MEDIAN)
            figures.append(measured(rate, entries[0].at(field)))
    return figures


def _iterations(entry: Fields) -> int:
    return entry.count("iterations") if entry.has("iterations") else 0


def _of_aggregates(entries: Sequence[Fields], real: str) -> list[Figure] | None:
    """Return what a file of aggregates alone says: its median, else its mean under another metric."""
    by_name = {entry.word("aggregate_name"): entry for entry in entries if entry.has("aggregate_name")}
    for statistic, suffix in (("median", ""), ("mean", "_mean")):
        entry = by_name.get(statistic)
        if entry is None:
            continue
        # `iterations` of an aggregate counts repetitions
        n = entry.count("repetitions") if entry.has("repetitions") else _iterations(entry)
        figures = []
        for metric, field in ((real, "real_time"), ("cpu_time", "cpu_time")):
            value = _seconds(entry, field)
            seconds = value or None if statistic == "median" else None
            told = {"statistic": f"{statistic} of repetitions"}
            figure = Figure(f"{metric}{suffix}", "s", "lower", value, n or None, seconds=seconds, detail=told)
            figures.append(measured(figure, entry.at(field)))
        return figures
    return None
