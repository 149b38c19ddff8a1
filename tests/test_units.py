"""Sizes are exact both ways; what a careful person could read in two ways is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.units import (
    GB,
    MAX_BYTES,
    GiB,
    KiB,
    MiB,
    compact_bytes,
    format_bytes,
    format_duration,
    format_interval,
    format_value,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("4KiB", 4096), ("256MiB", 2**28), ("1GiB", 2**30), ("2TiB", 2**41), ("1kB", 1000), ("1MB", 10**6),
     ("1GB", 10**9), ("1PiB", 2**50), ("1.5KiB", 1536), (" 64 KiB ", 65536), ("0.001kB", 1), ("4096B", 4096)],
)  # fmt: skip
def test_sizes_that_parse(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["64kb", "64KB", "64k", "-1", "+1", "0", "0B", "1e30", "1e3", "1.0001KiB", "0.5", "2PiB", "1125899906842625", "",
     " ", "KiB", "1 2", "5 furlongs", "nan", "inf", "0x10", "1_000", "\u0664", "1MiB\n2", "9" * 50,
     "9" * 5000, "1,5MiB"],
)  # fmt: skip
def test_sizes_that_do_not(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text, "-a bytes")
    message = str(caught.value)
    assert message.startswith("-a bytes: ")
    assert "\n" not in message
    assert caught.value.exit_code == 2


def test_an_ambiguous_unit_names_both_readings() -> None:
    with pytest.raises(UsageError, match="write 64KiB or 64kB"):
        parse_bytes("64kb")
    with pytest.raises(UsageError, match="write 1MiB or 1MB"):
        parse_bytes("1mb")


@settings(max_examples=50, deadline=None)
@given(st.integers(1, MAX_BYTES))
def test_compact_reads_back_exactly(n: int) -> None:
    text = compact_bytes(n)
    assert parse_bytes(text) == n
    assert " " not in text


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 9999), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_whole_binary_sizes_stay_whole(count: int, unit: str) -> None:
    n = count * {"KiB": KiB, "MiB": MiB, "GiB": GiB}[unit]
    if n:
        assert parse_bytes(compact_bytes(n)) == n
        assert "." not in compact_bytes(n)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, MAX_BYTES))
def test_display_is_within_half_a_unit_of_the_fourth_digit(n: int) -> None:
    number, unit = format_bytes(n).split()
    scale = parse_bytes(f"1{unit}")
    assert abs(float(number) * scale - n) <= 0.0005001 * n


def test_bytes_for_reading() -> None:
    assert format_bytes(256 * MiB) == "256 MiB"
    assert format_bytes(GB) == "1 GB"
    assert format_bytes(0) == "0 B"
    assert format_bytes(1048575) == "1.000 MiB"
    with pytest.raises(ValueError, match="negative"):
        format_bytes(-1)
    with pytest.raises(ValueError, match="negative"):
        compact_bytes(-1)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(12.34e9, "B/s", "12.3 GB/s"), (97.12e-9, "s", "97.1 ns"), (117e9, "FLOP/s", "117 GFLOP/s"), (1.234, "1", "1.23"),
     (999.6e-9, "s", "1.00 us"), (0, "B/s", "0 B/s"), (-3.2e9, "B/s", "-3.20 GB/s"), (0.97, "1", "0.970"),
     (2**28, "B", "256 MiB"), (1234.4, "s", "1234 s"), (3.5, "W", "3.50 W"), (12.5, "token/s", "12.5 token/s"),
     (1e-9, "1", "1.00e-09")],
)  # fmt: skip
def test_values(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-12, 1e15), st.sampled_from(["B/s", "s", "FLOP/s", "1", "token/s"]))
def test_values_show_at_least_three_digits_and_lose_at_most_half_a_percent(value: float, unit: str) -> None:
    text = format_value(value, unit)
    match = re.fullmatch(r"([0-9.e+-]+)(?: ([munpkMGTP]?)(\S+))?", text)
    assert match
    scale = {"p": 1e-12, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    shown = float(match[1])
    if unit in ("B/s", "s", "FLOP/s"):
        assert match[3] == unit
        shown *= scale.get(match[2] or "", 1.0)
    assert abs(shown - value) <= 0.0051 * value
    assert sum(c.isdigit() for c in match[1].split("e")[0].lstrip("0.")) >= 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_value_is_never_printed_as_a_number(value: float) -> None:
    with pytest.raises(ValueError, match="not a number that can be shown"):
        format_value(value, "B/s")


def test_intervals() -> None:
    assert format_interval(12.2e9, 12.3e9, 12.4e9, "B/s") == "12.3 GB/s ±0.8 %"
    assert format_interval(9e9, 10e9, 10.1e9, "B/s") == "10.0 GB/s ±10 %"  # the wider side
    assert format_interval(1, 1, 1, "s") == "1.00 s ±<0.1 %"  # equal samples are no certainty: the clock has a grain
    assert format_interval(None, 1.5, None, "s") == "1.50 s"
    assert format_interval(0, 1, 3, "s") == "1.00 s (0 s to 3.00 s)"
    assert format_interval(0, 0, 3, "B/s") == "0 B/s (0 B/s to 3.00 B/s)"
    with pytest.raises(ValueError, match="does not hold its value"):
        format_interval(2, 1, 3, "s")


def test_durations() -> None:
    shown = [format_duration(s) for s in (0.35, 12, 59.96, 185, 3599.7, 3725)]
    assert shown == ["350 ms", "12.0 s", "1 min 00 s", "3 min 05 s", "1 h 00 min", "1 h 02 min"]
    with pytest.raises(ValueError, match="finite"):
        format_duration(-1)
