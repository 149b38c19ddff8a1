"""Runs as OpenMetrics text 1.0, for a Prometheus that watches machines. One gauge a unit, few labels, ``# EOF``.

Values are in base units (seconds, bytes per second), as OpenMetrics asks and as they are stored. A row without a value
has no sample, and neither has an ``invalid`` one: both are counted by status, so that a run that measured nothing is
seen. No sample carries a time: node_exporter's textfile collector takes none, and when a run began is a gauge.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, TextIO

from kvbench.contract.result import Result, RunInfo

if TYPE_CHECKING:
    from kvbench.store.query import LoadedRun

_FAMILIES: Mapping[str, str] = {
    "s": "seconds", "B/s": "bytes_per_second", "B": "bytes", "FLOP/s": "flops_per_second", "1": "ratio",
    "1/s": "per_second", "W": "watts", "J": "joules", "Hz": "hertz",
}  # fmt: skip
_SHOWN = frozenset({"ok", "suspect", "tainted"})
_HELP: Mapping[str, str] = {
    "kvbench_result": "What a case says of its metric within its run",
    "kvbench_run_start_timestamp": "When the run began",
    "kvbench_rows": "Rows of a run by status, with and without a value",
}


def write_openmetrics(loaded: Sequence[LoadedRun], stream: TextIO) -> None:
    """Write the runs. The label ``run`` tells them apart where there are several of them, and only there.

    ``case`` holds the axes as canonical JSON: the number 1 and the word "1" are two cases.
    """
    several = len(loaded) > 1
    samples: dict[str, list[str]] = {}
    for run in loaded:
        mine = _run_labels(run.info, several)
        for row in run.results:
            if row.value is not None and row.status in _SHOWN:
                unit = unit_name(row.unit)
                name = f"kvbench_result_{unit}"
                samples.setdefault(name, []).append(f"{name}{labels(mine | _labels(row))} {row.value!r}\n")
    for name in sorted(samples):
        _family(stream, name, "kvbench_result", name.removeprefix("kvbench_result_"))
        stream.writelines(samples[name])
    _starts(loaded, several, stream)
    _family(stream, "kvbench_rows", "kvbench_rows", "")
    for run in loaded:
        mine = _run_labels(run.info, several)
        for status, count in sorted(Counter(row.status for row in run.results).items()):
            stream.write(f"kvbench_rows{labels(mine | {'status': status})} {count}\n")
    stream.write("# EOF\n")


def _starts(loaded: Sequence[LoadedRun], several: bool, stream: TextIO) -> None:
    known = [run for run in loaded if "time_unknown" not in run.info.flags]
    if not known:
        return
    name = "kvbench_run_start_timestamp_seconds"
    _family(stream, name, "kvbench_run_start_timestamp", "seconds")
    for run in known:
        mine = _run_labels(run.info, several)
        stream.write(f"{name}{labels(mine)} {datetime.fromisoformat(run.info.started_at).timestamp()!r}\n")


def _family(stream: TextIO, name: str, what: str, unit: str) -> None:
    stream.write(f"# TYPE {name} gauge\n")
    if unit:
        stream.write(f"# UNIT {name} {unit}\n")
    stream.write(f"# HELP {name} {_HELP[what]}\n")


def _run_labels(info: RunInfo, several: bool) -> dict[str, str]:
    return {"hw_class": visible(info.hw_class)} | ({"run": info.uuid} if several else {})


def _labels(row: Result) -> dict[str, str]:
    case = json.dumps(row.axes, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return {
        "suite": visible(row.suite), "bench": visible(row.bench), "bench_version": str(row.bench_version), "case": case,
        "metric": visible(row.metric), "basis": row.basis, "status": row.status,
    }  # fmt: skip


def unit_name(unit: str) -> str:
    """Return the unit as the end of a metric's name; of one not known here what is no letter or digit is coded."""
    if unit in _FAMILIES:
        return _FAMILIES[unit]
    return "unit_" + re.sub(r"[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):x}_", unit)


def labels(values: Mapping[str, str]) -> str:
    """Return ``{name="value",...}`` with the three escapes OpenMetrics has."""
    return "{" + ",".join(f'{name}="{_quoted(text)}"' for name, text in values.items()) + "}"


def visible(text: str) -> str:
    """Return ``text`` with escapes for what does not print; backslashes double, so that no two texts become one."""
    return "".join(
        "\\\\" if c == "\\" else c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
