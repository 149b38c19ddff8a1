"""Readings are tri-state: a value, or None with a reason that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.machine import probe
from tests.machine.trees import write


def test_a_missing_value_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        probe.Fact(None)


@settings(max_examples=50, deadline=None)
@given(st.frozensets(st.integers(0, 300), max_size=40))
def test_cpu_lists_read_back(numbers: frozenset[int]) -> None:
    text = probe.format_cpu_list(tuple(sorted(numbers)))
    assert probe.parse_cpu_list(text) == tuple(sorted(numbers))


@pytest.mark.parametrize("text", ["a", "3-1", "1-", "-1", "0-4294967295", "1;2", "0-99999999"])
def test_broken_cpu_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a CPU or node list"):
        probe.parse_cpu_list(text)


@pytest.mark.parametrize(("text", "size"), [("32K", 32768), ("1M", 2**20), ("512", 512)])
def test_sysfs_sizes(tmp_path: Path, text: str, size: int) -> None:
    write(tmp_path, "/size", f"{text}\n")
    assert probe.read_size(tmp_path, "/size").value == size


@pytest.mark.parametrize("text", ["0K", "", "big", "-1K", "1.5M"])
def test_a_size_that_says_nothing_is_unknown(tmp_path: Path, text: str) -> None:
    write(tmp_path, "/size", text)
    fact = probe.read_size(tmp_path, "/size")
    assert fact.value is None
    assert "/size" in fact.reason


def test_every_way_a_file_can_fail_is_a_reason(tmp_path: Path) -> None:
    write(tmp_path, "/text", "abc")
    write(tmp_path, "/bytes", b"\xff\xfe")
    (tmp_path / "folder").mkdir()
    assert probe.read_text(tmp_path, "/none").reason == "no /none"
    assert "/folder" in probe.read_text(tmp_path, "/folder").reason
    assert probe.read_int(tmp_path, "/text").reason == "/text holds 'abc', not a number"
    assert "marks no choice" in probe.read_choice(tmp_path, "/text").reason
    assert probe.read_text(tmp_path, "/bytes").value == "\ufffd\ufffd"
    assert probe.read_cpu_list(tmp_path, "/text").value is None


def test_kilobytes_are_1024() -> None:
    assert probe.kilobytes("24684084 kB") == 24684084 * 1024
    assert [probe.kilobytes(text) for text in (None, "", "1 MB", "x kB", "-1 kB")] == [None] * 5
