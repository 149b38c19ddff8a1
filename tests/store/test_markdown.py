"""Markdown tables: every row one line of as many cells, and no text of a file becomes markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.contract.result import Ceiling
from kvbench.store.engine import Store
from kvbench.store.formats import export
from kvbench.store.markdown import escaped, setting
from tests.store.factories import HOSTILE, make_row, make_run

NASTY = (
    *filter(str.strip, HOSTILE), "<script>alert(1)</script>", "a|b", "`code`", "![x](http://y)", "@team #12 :tada: $x$",
    "www.example.com", "\\|", "\u202eevil", "\x9b31m",
)  # fmt: skip


def cells(line: str) -> list[str]:
    """Return the cells of a row as GitHub splits them: at bars that no backslash stands before."""
    return re.split(r"(?<!\\)(?:\\\\)*\|", line)[1:-1]


def test_a_table_of_a_run(store: Store, tmp_path: Path) -> None:
    run = make_run(label="before")
    store.begin_run(run)
    ceiling = (Ceiling("dram", 2e10, "physical", "spec"),)
    store.add_results(run.uuid, [make_row(0, value=1e10, low=9.9e9, high=1.01e10, ceilings=ceiling, fraction=0.5)], 0)
    axes = {"threads": "1", "n": 1}
    failed = make_row(1, axes=axes, status="failed", value=None, samples=(), reason="it broke")
    store.add_results(run.uuid, [failed], 1)
    written = export(store, "before", tmp_path / "x.md")
    assert (written.format, written.rows) == ("markdown", 2)
    lines = (tmp_path / "x.md").read_text().splitlines()
    assert lines[0] == f"## run {run.uuid[:8]}, before, cpu-a, smoke, running, 2025-03-01T00&#58;00&#58;00Z"
    assert lines[2] == "### ladder/host\\_bandwidth"
    assert lines[5].startswith("| --- | --- | --: | --: |") or lines[5].startswith("| ---")
    table = [line for line in lines if line.startswith("|")]
    assert {len(cells(line)) for line in table} == {7}
    assert [cell.strip() for cell in cells(table[2])] == [
        "bytes=4096 op=read", "bandwidth", "10.0 GB/s ±1.0 %", "6", "50 % of dram", "measured", "ok"
    ]  # fmt: skip
    assert 'threads="1" n=1' in table[3]
    assert "failed&#58; it broke" in table[3]


@pytest.mark.parametrize("text", NASTY)
def test_hostile_text_stays_text(text: str, store: Store, tmp_path: Path) -> None:
    run = make_run(label=f"l{text}")
    store.begin_run(run)
    store.add_results(run.uuid, [make_row(0, axes={"op": text, text: 1}, reason=text, flags=(text,))], 0)
    store.add_results(run.uuid, [make_row(0, suite=text, metric=text)], 1)
    export(store, run.uuid, tmp_path / "x.md")
    content = (tmp_path / "x.md").read_text(encoding="utf-8")
    assert all(c.isprintable() for line in content.split("\n") for c in line)
    assert {len(cells(line)) for line in content.split("\n") if line.startswith("|")} == {7}
    assert "<" not in content
    assert "@" not in content


@given(st.text(max_size=40))
def test_every_mark_is_escaped(text: str) -> None:
    safe = escaped(text)
    assert safe.isprintable()
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*_\[\]~$]", safe)
    assert not re.search(r"[<>@]|(?<!&)#|://", safe)


def test_words_and_numbers_differ() -> None:
    assert [setting(value) for value in (1, "1", "1.0", "all", "-2e5")] == ["1", '"1"', '"1.0"', "all", '"-2e5"']
