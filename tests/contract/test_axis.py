"""Axes: typing, ranges, words, and messages that name the nearest legal value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.contract import axis
from kvbench.errors import UsageError

OP = axis.choice("read", "write", "memcpy")
BYTES = axis.bytes(smoke=["4KiB"], quick=["4KiB", "1MiB"], full="4KiB..64KiB", low="4KiB", high="1GiB")
THREADS = axis.threads()


def test_profiles_hold_typed_values() -> None:
    assert BYTES.values("quick") == (4096, 1 << 20)
    assert BYTES.values("full") == (4096, 8192, 16384, 32768, 65536)
    assert THREADS.values("full") == (1, 2, 4, 8, 16, 32, 64, 128, "all")
    assert OP.values("smoke") == ("read", "write", "memcpy")


@pytest.mark.parametrize(
    ("chosen", "text", "message"),
    [
        (OP, "memcopy", "did you mean 'memcpy'"),
        (OP, "", "unknown value"),
        (BYTES, "64kb", "64KiB"),
        (BYTES, "-1", "got '-1'"),
        (BYTES, "0", "got '0'"),
        (BYTES, "1e30", "got '1e30'"),
        (BYTES, "2KiB", "4KiB..1GiB"),
        (BYTES, "2GiB", "4KiB..1GiB"),
        (BYTES, "0xllc", "0xllc"),
        (THREADS, "every", "'all'"),
        (THREADS, "0", "1..4096"),
        (THREADS, "1.5", "whole number"),
        (THREADS, "٣", "whole number"),
        (OP, "x" * 65, "at most 64 characters"),
    ],
)
def test_a_bad_value_is_one_line_that_says_what_was_expected(chosen: axis.Axis, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        chosen.parse(text, "-a x")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_words_stay_words_and_lists_keep_their_order_without_repeats() -> None:
    assert THREADS.parse_list("all,2,1,2", "-a threads") == ("all", 2, 1)
    assert BYTES.parse_list("4xllc,1MiB,4KiB..16KiB", "-a bytes") == ("4xllc", 1 << 20, 4096, 8192, 16384)


@pytest.mark.parametrize("text", ["4KiB..", "..4KiB", "1MiB..4KiB", "4xllc..8xllc", "4KiB,,8KiB", ","])
def test_a_broken_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        BYTES.parse_list(text, "-a bytes")


@given(st.integers(min_value=4096, max_value=1 << 30))
def test_every_size_reads_back_as_it_was_printed(number: int) -> None:
    assert BYTES.parse(BYTES.format(number), "x") == number


def test_a_declaration_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="not one of"):
        axis.choice("a", "b", smoke=["c"])
