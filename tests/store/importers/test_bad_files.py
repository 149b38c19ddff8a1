"""Files that are no whole output of their tool: one line, no traceback, and nothing of them comes in."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.store.bundle import read_bundle
from kvbench.store.importers import TOOLS, Foreign, read_foreign
from kvbench.store.importers.admission import write_bundle
from tests.store.importers.test_tools import DATA, FILES, changed, edited

JSON_TOOLS = ("nvbandwidth", "nvbench", "google-benchmark", "pytest-benchmark")
TEXTS = ("stream.txt", "mlc.txt", "mlc_options.txt")
AGAIN = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_or_line(path: Path, tool: str) -> Foreign | None:
    """Return what was read; None when it was refused, in one line."""
    try:
        foreign = read_foreign(path, tool)
    except UsageError as error:
        text = str(error)
        assert "\n" not in text
        assert text.isprintable()
        assert len(text) < 1500
        assert "nothing was imported" in text
        return None
    return foreign


def numbers(foreign: Foreign) -> set[tuple[object, ...]]:
    return {
        (row.bench, json.dumps(row.axes), row.metric, row.value, row.status) for case in foreign.cases for row in case
    }


@pytest.fixture
def place(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "nvbench.json-bin", tmp_path / "nvbench.json-bin")
    return tmp_path


@pytest.mark.parametrize("tool", JSON_TOOLS)
def test_json_cut_anywhere_is_whole_or_nothing(tool: str, place: Path) -> None:
    data = (DATA / FILES[tool]).read_bytes()
    whole = numbers(read_foreign(DATA / FILES[tool]))
    path = place / FILES[tool]

    @AGAIN
    @given(st.integers(0, len(data) - 1))
    def check(size: int) -> None:
        path.write_bytes(data[:size])
        found = read_or_line(path, tool)
        assert (found is not None) == (not data[size:].strip())
        assert found is None or numbers(found) == whole

    check()


@pytest.mark.parametrize("name", TEXTS)
def test_text_cut_at_every_byte_gives_no_other_number(name: str, tmp_path: Path) -> None:
    """A cut inside a number, a table or a full run is seen; whole outputs one after the other may be fewer."""
    data = (DATA / name).read_bytes()
    tool = name.split(".")[0].split("_")[0]
    whole = numbers(read_foreign(DATA / name))
    path = tmp_path / name
    came_in = 0
    ends = {index + off for index, byte in enumerate(data) if byte == 10 for off in (0, 1, 2)}
    sizes = sorted({*range(0, len(data), 2), *ends} - {len(data), len(data) + 1})
    for size in sizes:
        path.write_bytes(data[:size])
        found = read_or_line(path, tool)
        if found is not None:
            came_in += 1
            rows = numbers(found)
            assert rows == whole or (name == "mlc_options.txt" and rows < whole and len(rows) == 2)
    assert came_in < len(sizes) / 8


HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 70, -(1 << 63), 1e308, float("nan"), float("inf"), "", "N/A", "nan", "-inf", "1e400",
    "\x1b[31m", "[bold]x[/]", "'; DROP TABLE runs; --", "a\nb|c", "\udcff", "x" * 5000, [], {}, [[]], [None], {"": 0},
)  # fmt: skip


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(entry, (*path, key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from leaves(entry, (*path, index))


@pytest.mark.parametrize("tool", JSON_TOOLS)
def test_json_with_any_value_changed(tool: str, place: Path) -> None:
    text = (DATA / FILES[tool]).read_text()
    paths = [path for path in leaves(json.loads(text)) if path]
    path, bundle = place / FILES[tool], place / "bundle.jsonl"

    @AGAIN
    @given(st.sampled_from(paths), st.sampled_from(HOSTILE))
    def check(where: tuple[Any, ...], value: Any) -> None:
        document = json.loads(text)
        inner = document
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] = value
        path.write_text(json.dumps(document))
        found = read_or_line(path, tool)
        if found is not None:  # what comes in stands every check a bundle stands
            bundle.unlink(missing_ok=True)
            write_bundle(found, bundle)
            (run,) = read_bundle(bundle).runs
            assert run.info == found.run
            assert len(run.results) == sum(map(len, found.cases))

    check()


@pytest.mark.parametrize("name", TEXTS)
def test_text_with_any_piece_changed(name: str, tmp_path: Path) -> None:
    data = (DATA / name).read_bytes()
    tool = name.split(".")[0].split("_")[0]
    path, bundle = tmp_path / name, tmp_path / "bundle.jsonl"
    pieces = [b"", b"\n", b" ", b"-1", b"nan", b"1e999", b"\xff", b"\x00", b"\x1b[2J", b"9" * 400, b"N/A", b"0"]

    @AGAIN
    @given(st.integers(0, len(data)), st.integers(0, 40), st.sampled_from(pieces))
    def check(start: int, length: int, piece: bytes) -> None:
        path.write_bytes(data[:start] + piece + data[start + length :])
        found = read_or_line(path, tool)
        if found is not None:
            bundle.unlink(missing_ok=True)
            write_bundle(found, bundle)
            assert len(read_bundle(bundle).runs) == 1

    check()


@pytest.mark.parametrize(
    ("tool", "old", "new", "text"),
    [
        ("nvbandwidth", '"55.3145"', '"nan"', r"\[0\]\[0\] is 'nan', expected a finite number"),
        ("nvbandwidth", '"55.3145"', "NaN", "NaN is no JSON number"),
        ("nvbandwidth", '"55.3145"', "55.3145", "is 55.3145, expected a finite number"),
        ("nvbandwidth", '"55.3145"', '"-55.3"', r"sum is|expected more than 0"),
        ("nvbandwidth", '"status" : "Waived"', '"status" : "Sleeping"', "status is 'Sleeping', expected Passed"),
        ("nvbandwidth", '"name" : "host_device_latency_sm",', '"name" : "x", "name" : "y",', "the key 'name' twice"),
        ("nvbandwidth", '"host_device_latency_sm"', '"host_to_device_memcpy_ce"', "two results of"),
        ("google-benchmark", '"time_unit": "ms"', '"time_unit": "min"', "time_unit is 'min', expected s, ms, us, ns"),
        ("google-benchmark", "9.8000000000000000e+01", "-NaN", "is not JSON"),
        ("google-benchmark", "9.8000000000000000e+01", "1e999", "larger than any number"),
        ("google-benchmark", "9.8000000000000000e+01", "-1", "is -1e-09 s"),
        ("pytest-benchmark", '"median": 0.0019', '"median": Infinity', "Infinity is no JSON number"),
        ("pytest-benchmark", '"rounds": 12', '"rounds": "12"', "rounds is '12', expected a count"),
        ("pytest-benchmark", '"datetime": "2025', '"datetime": "2999', "later than this machine's clock"),
        ("nvbench", '"value": "5"', '"value": "6"', "holds 20 B, expected 6 samples of 4 B"),
        ("nvbench", '"nvbench.json-bin/0.bin"', '"../../../etc/passwd"', "is not beside the file"),
        ("nvbench", '"nvbench.json-bin/0.bin"', '"/etc/passwd"', "side file of samples is missing"),
        ("nvbench", '"major": 1', '"major": 2', "JSON version 2, expected 1"),
    ],
)
def test_what_is_wrong_is_named(tool: str, old: str, new: str, text: str, place: Path) -> None:
    with pytest.raises(UsageError, match=text):
        read_foreign(edited(place, FILES[tool], old, new), tool)


def test_unknown_fields_are_left_out_and_said(tmp_path: Path) -> None:
    def add(document: Any) -> None:
        document["nvbandwidth"]["testcases"][0]["watts\x1b[31m"] = 3

    found = read_foreign(changed(tmp_path, "nvbandwidth", add))
    assert [notice for notice in found.notices if "not known here" in notice] == [
        "left out, not known here: watts\\x1b[31m"
    ]


@pytest.mark.parametrize("tool", TOOLS)
def test_empty_foreign_and_unreadable_files(tool: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data, text in (
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        ("\ufeff".encode("utf-16"), "UTF-16"),
        (b"\xff" * 30 + b"\n", "no UTF-8"),
        (b"{}\n", "importable"),
        (b"[" * 100_000 + b"\n", "importable"),
        (b"9" * 10_000 + b"\n", "importable"),
    ):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=text):
            read_foreign(path, tool)
    with pytest.raises(UsageError, match="cannot be read"):
        read_foreign(tmp_path / "none", tool)
    with pytest.raises(UsageError, match="regular file"):
        read_foreign(tmp_path, tool)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="regular file"):
        read_foreign(tmp_path / "pipe", tool)


def test_a_file_of_100_mb_is_refused_without_being_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_bytes((DATA / "nvbandwidth.json").read_bytes())
    os.truncate(path, 100_000_000)
    tracemalloc.start()
    with pytest.raises(UsageError, match=r"larger than an importer reads, got '100 MB', expected at most 32 MiB"):
        read_foreign(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_an_unknown_tool_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--from: unknown tool, got 'iperf', expected nvbandwidth nvbench"):
        read_foreign(DATA / "stream.txt", "iperf")
    (tmp_path / "notes.txt").write_text("my notes\n")
    with pytest.raises(UsageError, match="say which with --from"):
        read_foreign(tmp_path / "notes.txt")
