"""Writes runs as tables for other programs and people: CSV, the JSON of ``show``, Parquet, Markdown, OpenMetrics."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvbench.contract.document import results_document
from kvbench.contract.result import Result, RunInfo
from kvbench.errors import MissingExtra, UsageError
from kvbench.store.markdown import write_markdown
from kvbench.store.newfile import new_file
from kvbench.store.openmetrics import write_openmetrics

if TYPE_CHECKING:
    from kvbench.store.engine import Store
    from kvbench.store.query import LoadedRun

FORMATS = ("bundle", "csv", "json", "parquet", "markdown", "openmetrics")
_SUFFIXES = {
    ".jsonl": "bundle", ".bundle": "bundle", ".csv": "csv", ".json": "json", ".parquet": "parquet",
    ".md": "markdown", ".prom": "openmetrics",
}  # fmt: skip

_RUN_COLUMNS = ("run", "group", "label", "started_at", "host", "hw_class", "env", "git", "profile", "run_status")
_ROW_COLUMNS = (
    "suite", "bench", "bench_version", "digest", "metric", "unit", "better", "value", "low", "high", "n", "kept",
    "status", "reason", "stop", "basis", "kernel", "transport", "fraction", "rate_of", "seconds",
)  # fmt: skip
_BYTES = ("unique", "link", "demand", "near")
_CEILING = ("name", "value", "kind", "source")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: the format, how many runs, how many rows of results (canaries included)."""

    format: str
    runs: int
    rows: int


def export(store: Store, selector: str, path: str | Path, form: str | None = None, *, force: bool = False) -> Exported:
    """Write the runs ``selector`` names to ``path`` as one of ``FORMATS`` (None: by the suffix of ``path``).

    The file appears whole or not at all. Raises UsageError for the selector, the format, or a file that is there
    already (unless ``force`` and it is a regular file), MissingExtra for parquet without pyarrow, StoreError when the
    disk does not take it.
    """
    form = form if form is not None else _SUFFIXES.get(Path(path).suffix.lower(), "")
    if form == "bundle":
        from kvbench.store.transfer import export_bundle

        runs, rows = export_bundle(store, selector, path, force=force)
        return Exported(form, runs, rows)
    writers: dict[str, Callable[[Sequence[LoadedRun], Path], None]] = {
        "csv": _to_csv, "json": _to_json, "parquet": _to_parquet, "markdown": _to_markdown,
        "openmetrics": _to_openmetrics,
    }  # fmt: skip
    if form not in writers:
        raise UsageError(
            "unknown format", where="--format", got=form or Path(path).name, expected=" ".join(FORMATS),
            mend="give --format, or a name ending in .jsonl, .json, .csv, .parquet, .md or .prom",
        )  # fmt: skip
    loaded = store.load(selector)
    with new_file(path, force=force) as temporary:
        writers[form](loaded, temporary)
    return Exported(form, len(loaded), sum(len(run.results) for run in loaded))


def table(loaded: Sequence[LoadedRun]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return column names and rows, a row per case and metric; axes, resolved and detail are columns of their own.

    Columns a row has no value for are absent from its dict. ``ceiling.*`` is the one ``fraction`` is against.
    """
    rows = [_flat(run.info, result) for run in loaded for result in run.results]
    fixed = [
        *_RUN_COLUMNS,
        *_ROW_COLUMNS,
        *(f"bytes.{b}" for b in _BYTES),
        *(f"ceiling.{c}" for c in _CEILING),
        "flags",
    ]
    known = set(fixed)
    extra = sorted({name for row in rows for name in row if name not in known})
    return [*fixed, *extra], rows


def _flat(info: RunInfo, row: Result) -> dict[str, Any]:
    flat: dict[str, Any] = {
        "run": info.uuid, "group": info.group, "label": info.label, "started_at": info.started_at,
        "host": info.host, "hw_class": info.hw_class, "env": info.env_digest, "git": info.git,
        "profile": info.profile, "run_status": info.status, "flags": " ".join(row.flags),
    }  # fmt: skip
    flat |= {name: getattr(row, name) for name in _ROW_COLUMNS}
    flat |= {f"bytes.{name}": getattr(row.bytes, name) for name in _BYTES}
    if row.ceilings:
        flat |= {f"ceiling.{name}": getattr(row.ceilings[0], name) for name in _CEILING}
    for prefix, values in (("axis", row.axes), ("resolved", row.resolved), ("detail", row.detail)):
        flat |= {f"{prefix}.{name}": value for name, value in values.items()}
    return flat


def write_csv(loaded: Sequence[LoadedRun], stream: TextIO) -> None:
    """Write the table as RFC 4180 (CRLF, header line). No value is an empty field.

    Text that a spreadsheet would run as a formula (first character = + - @, tab or return) gets a leading apostrophe;
    numbers do not.
    """
    columns, rows = table(loaded)
    writer = csv.writer(stream, lineterminator="\r\n")
    writer.writerow([_cell(name) for name in columns])
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in columns])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # a file is UTF-8: lone surrogates (names of files that are not) become visible escapes
        text = value.encode("utf-8", "backslashreplace").decode("utf-8")
        return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
    return repr(value)  # repr of a float is exact


def _document(loaded: Sequence[LoadedRun]) -> dict[str, Any]:
    rows = [(run.info.uuid, row) for run in loaded for row in run.results]
    canaries = [pair for pair in rows if pair[1].is_canary]
    return results_document([run.info for run in loaded], [pair for pair in rows if not pair[1].is_canary], canaries)


def _to_csv(loaded: Sequence[LoadedRun], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        write_csv(loaded, stream)


def _to_markdown(loaded: Sequence[LoadedRun], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        write_markdown(loaded, stream)


def _to_openmetrics(loaded: Sequence[LoadedRun], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        write_openmetrics(loaded, stream)


def _to_json(loaded: Sequence[LoadedRun], path: Path) -> None:
    with path.open("w", encoding="utf-8") as stream:
        json.dump(_document(loaded), stream, allow_nan=False, indent=1)
        stream.write("\n")


def _to_parquet(loaded: Sequence[LoadedRun], path: Path) -> None:
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", "export --format parquet") from None
    columns, rows = table(loaded)
    fixed = {name for name in columns if not name.startswith(("axis.", "resolved.", "detail."))}
    arrays = {}
    for name in columns:
        values = [row.get(name) for row in rows]
        # our own columns have one type whatever is in them: files of many exports are read as one table
        kind = _arrow_type(name) if name in fixed else _common_type(values)
        if kind == "float64":
            values = [None if value is None else float(value) for value in values]
        elif kind == "string":
            values = [None if value is None else _word(value) for value in values]
        arrays[_word(name)] = arrow.array(values, type=arrow.type_for_alias(kind))
    parquet.write_table(arrow.table(arrays), path, compression="zstd")


def _arrow_type(column: str) -> str:
    if column in ("value", "low", "high", "fraction", "seconds", "ceiling.value"):
        return "float64"
    return "int64" if column in ("bench_version", "n", "kept") or column.startswith("bytes.") else "string"


def _common_type(values: Sequence[Any]) -> str:
    """Return the type that holds all of ``values`` exactly: text where an axis is a word here and a number there."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) == 1:
        return {bool: "bool", int: "int64", float: "float64"}.get(kinds.pop(), "string")
    if kinds == {int, float} and all(
        value is None or int(float(value)) == value for value in values if type(value) is int
    ):
        return "float64"
    return "string"


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else _cell(value)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
