"""``nvbench --json`` and ``--jsonbin``: states with summaries by tag; raw samples in side files of float32.

Follows json_printer.cu, measure_cold.cu, measure_hot.cu and measure_cpu_only.cxx of NVIDIA/nvbench (JSON file version
1). What bites: numbers stand as strings; ``axis_values`` is null without axes; median tags are in newer versions only,
so a mean is another metric here and never passes for a median; rates are worked out of the mean; a skipped state keeps
the summaries it had; side files are named relative to the JSON file, in older versions to where the program ran.
"""

from __future__ import annotations

import array
import math
import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvbench.contract.result import Better
from kvbench.errors import UsageError
from kvbench.store.importers.fields import Fields, short, written_number, written_whole
from kvbench.store.importers.found import Figure, Found, FoundCase, axis_name, axis_value, measured, no_value
from kvbench.store.importers.source import Malformed, Source, json_of, read_bytes

TOOL = "nvbench"
MARK = re.compile(r'"(?:sm_version|cold_max_warmup_walltime|type_config_index)"\s*:|"nvbench"\s*:\s*\{')
JSON_VERSION = 1
MAX_SIDE_BYTES = 16 << 20
MAX_SIDE_TOTAL = 256 << 20
SAMPLES_TAG = "nv/json/bin:nv/cold/sample_times"


class Tag(NamedTuple):
    """A summary that comes in: its metric and the summary that counts its samples."""

    tag: str
    metric: str
    unit: str
    better: Better
    counted_by: str
    statistic: str


_COLD, _BATCH, _CPU = "nv/cold/sample_size", "nv/batch/sample_size", "nv/cpu_only/sample_size"
MEDIAN = Tag("nv/cold/time/gpu/median", "cold_gpu_time", "s", "lower", _COLD, "median")
TAGS = (
    MEDIAN,
    Tag("nv/cold/time/gpu/mean", "cold_gpu_time_mean", "s", "lower", _COLD, "mean"),
    Tag("nv/cpu_only/time/cpu/median", "cpu_only_time", "s", "lower", _CPU, "median"),
    Tag("nv/cpu_only/time/cpu/mean", "cpu_only_time_mean", "s", "lower", _CPU, "mean"),
    Tag("nv/batch/time/gpu/mean", "batch_gpu_time_mean", "s", "lower", _BATCH, "mean"),
    Tag("nv/cold/time/cpu/median", "cold_cpu_time", "s", "lower", _COLD, "median"),
    Tag("nv/cold/time/cpu/mean", "cold_cpu_time_mean", "s", "lower", _COLD, "mean"),
    Tag("nv/cold/bw/global/bytes_per_second", "cold_bandwidth", "B/s", "higher", _COLD, "of the mean time"),
    Tag("nv/cold/bw/item_rate", "cold_item_rate", "1/s", "higher", _COLD, "of the mean time"),
    Tag("nv/cpu_only/bw/global/bytes_per_second", "cpu_only_bandwidth", "B/s", "higher", _CPU, "of the mean time"),
    Tag("nv/cpu_only/bw/item_rate", "cpu_only_item_rate", "1/s", "higher", _CPU, "of the mean time"),
)


def parse(source: Source) -> Found:
    """Return the figures of the file and of its side files. Raises Malformed, UsageError for a side file."""
    root = Fields(json_of(source))
    version, notices = _version(root)
    benchmarks = root.children("benchmarks")
    if not benchmarks:
        raise Malformed("the file holds no benchmark of nvbench")
    sides = SideFiles(source.path)
    cases: list[FoundCase] = []
    ignored = 0
    for benchmark in benchmarks:
        name = benchmark.word("name")
        if not name.strip():
            raise Malformed(f"{benchmark.at('name')} is blank")
        for state in benchmark.children("states"):
            case, left = _state(name, state, sides)
            cases.append(case)
            ignored += left
    if ignored:
        notices.append(f"{ignored} summaries of other tags left out")
    devices = [
        {key: device.raw(key) for key in ("id", "name", "number_of_sms", "global_memory_size", "ecc_state")}
        for device in root.children("devices")
    ]
    return Found(TOOL, version, tuple(cases), env={"devices": devices}, notices=tuple(notices))


def _version(root: Fields) -> tuple[str | None, list[str]]:
    if not root.has("meta"):
        return None, []
    versions = root.child("meta").child("version")
    if versions.has("json"):
        major = versions.child("json").count("major")
        if major > JSON_VERSION:
            raise Malformed(f"the file is of JSON version {major}, expected {JSON_VERSION}")
    nvbench = versions.child("nvbench") if versions.has("nvbench") else None
    return (nvbench.word("string") if nvbench is not None and nvbench.has("string") else None), []


def _state(name: str, state: Fields, sides: SideFiles) -> tuple[FoundCase, int]:
    axes = _axes(state)
    if state.flag("is_skipped"):
        reason = state.word("skip_reason") if state.has("skip_reason") else "no reason given"
        skipped = no_value("cold_gpu_time", "s", "lower", "skipped", f"nvbench skipped it: {reason}")
        return FoundCase(name, axes, (skipped,)), 0
    summaries: dict[str, Fields] = {}
    for summary in state.children("summaries"):
        tag = summary.word("tag")
        if tag in summaries:
            raise Malformed(f"{summary.path} is a second summary {short(tag)}")
        summaries[tag] = summary
    samples, read = sides.samples(summaries)
    figures = [_figure(tag, summaries, samples if tag is MEDIAN else ()) for tag in TAGS if tag.tag in summaries]
    if samples and MEDIAN.tag not in summaries:
        value = statistics.median(samples)
        said = {"statistic": "median of the side file"}
        worked = Figure(MEDIAN.metric, "s", "lower", value, len(samples), seconds=value, samples=samples, detail=said)
        figures.insert(0, measured(worked, read))
    if not figures:
        raise Malformed(f"{state.path} has none of the summaries that come in ({MEDIAN.tag}, ...)")
    used = {tag.tag for tag in TAGS} | {tag.counted_by for tag in TAGS} | {SAMPLES_TAG}
    return FoundCase(name, axes, tuple(figures)), len(summaries.keys() - used)


def _axes(state: Fields) -> dict[str, str | int]:
    axes: dict[str, str | int] = {}
    if state.has("device"):
        axes["device"] = state.count("device")
    for entry in state.children("axis_values"):
        name, kind = axis_name(entry.word("name")), entry.word("type")
        if name in axes:
            raise Malformed(f"{entry.path} is a second value of the axis {short(name)}")
        if kind == "int64":
            axes[name] = written_whole(entry.raw("value"), entry.at("value"))
        elif kind == "float64":
            axes[name] = axis_value(repr(written_number(entry.raw("value"), entry.at("value"))))
        else:
            axes[name] = axis_value(entry.word("value"))
    return axes


def _data(summary: Fields) -> dict[str, Fields]:
    return {entry.word("name"): entry for entry in summary.children("data")}


def _number(summary: Fields) -> float:
    entry = _data(summary).get("value")
    if entry is None:
        raise Malformed(f"{summary.path} has no value")
    return written_number(entry.raw("value"), entry.at("value"))


def _figure(tag: Tag, summaries: Mapping[str, Fields], samples: tuple[float, ...]) -> Figure:
    summary = summaries[tag.tag]
    value, count = _number(summary), None
    if tag.counted_by in summaries:
        entry = _data(summaries[tag.counted_by]).get("value")
        count = written_whole(entry.raw("value"), entry.at("value")) if entry is not None else None
    if count is not None and count < 1:
        raise Malformed(f"{summaries[tag.counted_by].path} counts {count} samples of a value")
    if samples and count is not None and count != len(samples):
        raise Malformed(f"{summaries[tag.counted_by].path} counts {count} samples, the side file holds {len(samples)}")
    median = value if tag.statistic == "median" and value > 0 else None
    said = {"statistic": tag.statistic}
    figure = Figure(tag.metric, tag.unit, tag.better, value, count, seconds=median, samples=samples, detail=said)
    return measured(figure, summary.path)


class SideFiles:
    """The sample files of one JSON file, read one at a time and never from outside its folder."""

    def __init__(self, json_file: Path) -> None:
        self._file, self._folder = json_file, json_file.parent
        self._total = 0

    def samples(self, summaries: Mapping[str, Fields]) -> tuple[tuple[float, ...], str]:
        """Return the seconds of every sample of a state and the file they are from; none where nvbench wrote none.

        Raises UsageError for a file that is missing or too large, Malformed for one that is not of this state.
        """
        summary = summaries.get(SAMPLES_TAG)
        entries = {} if summary is None else _data(summary)
        if summary is None or "filename" not in entries:
            return (), ""
        named = entries["filename"].word("value")
        if "size" not in entries:
            raise Malformed(f"{summary.path} names a side file without its size")
        size = written_whole(entries["size"].raw("value"), entries["size"].at("value"))
        path = self._find(named)
        data = read_bytes(path, MAX_SIDE_BYTES)
        self._total += len(data)
        if self._total > MAX_SIDE_TOTAL:
            raise Malformed(f"the side files hold more than {MAX_SIDE_TOTAL} B; split the file")
        if len(data) != 4 * size or not size:
            raise Malformed(f"the side file {named} holds {len(data)} B, expected {size} samples of 4 B")
        values = array.array("f")
        values.frombytes(data)
        if sys.byteorder != "little":
            values.byteswap()
        samples = tuple(values)
        if not all(map(math.isfinite, samples)) or min(samples) < 0:
            raise Malformed(f"the side file {named} holds what is no time")
        mean = summaries.get("nv/cold/time/gpu/mean")
        if mean is not None and not math.isclose(math.fsum(samples) / size, _number(mean), rel_tol=1e-4):
            raise Malformed(f"the side file {named} is of another measurement: its mean is not {mean.path}")
        return samples, named

    def _find(self, named: str) -> Path:
        parts = PurePosixPath(named.replace("\\", "/")).parts
        if not parts or ".." in parts or "\x00" in named:
            raise Malformed(f"the side file {short(named)} is not beside the file")
        # as written, relative to the JSON file; by an older nvbench relative to where it ran, or absolute
        candidates = [self._folder.joinpath(*parts)] if not named.startswith(("/", "\\")) else []
        candidates.append(self._folder.joinpath(*parts[-2:]) if parts[-2:][0] != "/" else self._folder / parts[-1])
        for path in candidates:
            try:
                if path.exists():
                    return path
            except OSError:
                continue
        raise UsageError(
            "its side file of samples is missing", where=str(self._file), got=named,
            mend="copy it beside the JSON file; nothing was imported",
        )  # fmt: skip
