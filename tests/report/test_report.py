"""Tables and charts: what a person reads, on any terminal, whatever a row holds."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.contract.result import Bytes, Ceiling, Result
from kvbench.report.chart import curves
from kvbench.report.summary import MEANING, footer
from kvbench.report.table import axes_text, ceiling_text, results_table

ROOT = Path(__file__).resolve().parents[2]


def row(nbytes: int | str, value: float | None, **changes: Any) -> Result:
    resolved = {"bytes": 1 << 27} if isinstance(nbytes, str) else {}
    given: dict[str, Any] = {
        "status": "ok" if value is not None else "skipped", "reason": "" if value is not None else "no such pages",
        "low": None if value is None else value * 0.99, "high": None if value is None else value * 1.01,
        "rate_of": "link", "bytes": Bytes(link=nbytes if isinstance(nbytes, int) else 1 << 27),
        "seconds": None if value is None else (nbytes if isinstance(nbytes, int) else 1 << 27) / value, **changes,
    }  # fmt: skip
    return Result(
        "ladder", "host_bandwidth", 1, {"op": "read", "bytes": nbytes, "threads": "all"}, "bandwidth", "B/s", "higher",
        f"d{nbytes}", value=value, resolved={"threads": 2, **resolved}, **given,
    )  # fmt: skip


def law(nbytes: int) -> float:
    """Bandwidth of t = 3 us + n / 50 GB/s."""
    return nbytes / (3e-6 + nbytes / 50e9)


SIZES = [4096 << (2 * i) for i in range(8)]


def test_a_table_names_the_ceiling_the_basis_and_the_number_behind_a_word() -> None:
    ceilings = (Ceiling("read stream", 2e10, "measured", "interleaved"),)
    text = results_table([row(4096, 1e10, ceilings=ceilings, fraction=0.5), row("4xllc", None)])
    assert "10.0 GB/s ±1.0 %" in text
    assert "50 % of read stream (measured)" in text
    assert "threads=all(2)" in text
    assert "bytes=4xllc(128MiB)" in text
    assert "skipped: no such pages" in text
    assert "measured" in text
    assert axes_text(row(4096, 1.0)) == "op=read bytes=4KiB threads=all(2)"
    assert ceiling_text(row(4096, 1.0)) == "-"


def test_a_bench_that_cannot_run_here_is_one_line() -> None:
    text = results_table([row(4096, None), row(8192, None)])
    assert text.strip() == "ladder/host_bandwidth: 2 cases skipped: no such pages"
    assert "2 cases" not in results_table([row(4096, None), row(8192, 1e9)])
    assert "2 cases" not in results_table([row(4096, None), row(8192, None, reason="another")])


def test_a_stream_without_unicode_gets_plain_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    rows = [row(n, law(n)) for n in SIZES]
    text = results_table(rows) + "\n".join(curves(rows))
    assert text.isascii()
    assert "+-" in text
    assert "#" in text


def test_a_curve_is_drawn_in_order_of_size_with_the_law_that_fits_it() -> None:
    (text,) = curves([row(n, law(n)) for n in reversed(SIZES)])
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if "█" in line or "▏" in line or "▎" in line] == [
        "4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB",
    ]  # fmt: skip
    bars = [line.count("█") for line in lines if "GB/s" in line and "alpha" not in line]
    assert bars == sorted(bars)
    assert bars[-1] == 40
    assert "alpha 3.00 us" in text
    assert "beta 50.0 GB/s" in text
    assert "n-half 150 kB" in text


def test_a_curve_over_fragments_fits_the_time_of_one_fragment() -> None:
    """Many fragments make one pass: the pass's bytes say nothing about the cost of a piece."""
    total = 1 << 28
    rows = [
        Result(
            "ladder", "host_gather", 1, {"fragment": n, "bytes": total}, "bandwidth", "B/s", "higher", f"d{n}", "ok",
            value=law(n), seconds=total / law(n), bytes=Bytes(link=total), rate_of="link",
        ) for n in SIZES
    ]  # fmt: skip
    (text,) = curves(rows)
    assert "alpha 3.00 us" in text
    assert "beta 50.0 GB/s" in text
    assert "bytes=256MiB" in text.splitlines()[1]


def test_a_curve_through_caches_quotes_no_alpha_and_no_beta() -> None:
    (text,) = curves([row(n, 200e9 if n < 1 << 20 else 20e9) for n in SIZES])
    assert "does not fit" in text
    assert "beta" not in text.split("does not fit")[1].split("(")[0]


def test_a_point_without_a_value_is_no_point_and_three_make_a_curve() -> None:
    assert curves([row(4096, 1e9), row(8192, 2e9), row(16384, None)]) == []
    assert len(curves([row(4096, 1e9), row(8192, 2e9), row(16384, 3e9)])) == 1
    assert curves([row(n, law(n), basis="modelled") for n in SIZES]) == []


def test_the_footer_explains_every_flag_there_is() -> None:
    text = footer([row(4096, 1e9, flags=("in_llc", "bimodal")), row(8192, None)], [])
    assert "1 ok, 1 skipped" in text
    assert f"1 x in_llc: {MEANING['in_llc']}" in text


def test_every_flag_a_row_may_carry_is_explained() -> None:
    found: dict[str, str] = {}
    for folder in ("kvbench", "suites"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for word in re.findall(r'measure\.flag\("([a-z_0-9]+)"', path.read_text(encoding="utf-8")):
                found.setdefault(word, path.name)
    assert len(found) > 10
    assert {word: name for word, name in found.items() if word not in MEANING} == {}
