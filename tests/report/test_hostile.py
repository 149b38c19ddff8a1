"""Words of an imported run and its rows never drive the terminal."""

from __future__ import annotations

import dataclasses
import io
import sys
from typing import Any

import pytest

from kvbench.contract.result import Bytes, Ceiling, PlannedCase, Result, RunInfo
from kvbench.report.summary import run_summary

ESC = "\x1b]0;owned\x07\x1b[2J\u202e\r\n\x9b31m"


def hostile(record: Any, **fixed: Any) -> Any:
    """Return ``record`` with ESC put into every string in it, keys included, but the fields ``fixed``."""

    def spoil(value: Any) -> Any:
        if isinstance(value, str):
            return value + ESC
        if isinstance(value, dict):
            return {key + ESC: spoil(entry) for key, entry in value.items()}
        if isinstance(value, tuple):
            return tuple(spoil(entry) for entry in value)
        if isinstance(value, Ceiling):
            return dataclasses.replace(value, name=spoil(value.name), source=spoil(value.source))
        return value

    fields = {field.name: spoil(getattr(record, field.name)) for field in dataclasses.fields(record)}
    return dataclasses.replace(record, **(fields | fixed))


def rows() -> list[Result]:
    plain = Result(
        "s", "b", 1, {"op": "read"}, "bandwidth", "B/s", "higher", "d", "ok", value=1e9, low=0.9e9, high=1.1e9,
        reason="r", kernel="k", transport="t", resolved={"op": "x"}, ceilings=(Ceiling("c", 2e9, "measured", "src"),),
        fraction=0.5, bytes=Bytes(link=4096), flags=("in_llc", "odd"), detail={"d": "e"},
    )  # fmt: skip
    made = hostile(plain, status="ok", basis="measured", better="higher", rate_of="link")
    # the axis a chart is drawn over keeps its name; its words and the other axes do not
    return [
        made.with_(axes={**made.axes, "bytes": n}, bytes=Bytes(link=n), seconds=n / 1e9, value=1e9 + n, high=2e9)
        for n in (4096, 8192, 16384, 32768, 65536)
    ]


def run() -> RunInfo:
    plain = RunInfo(
        "u" * 36, "g" * 36, "label", "2025-03-01T00:00:00", "cpu", "env", {}, {}, "git-dirty", "smoke", 1,
        (PlannedCase("d", "s", "b", 1, {}),), "host", "boot", 1, "1", "0.1", resumed=True,
    )  # fmt: skip
    short = {"uuid": ESC + "u", "group": ESC + "g", "started_at": ESC + "2025"}  # printed cut off: put it in front
    made: RunInfo = hostile(plain, plan=(), machine={}, env={}, status="ok", **short)
    return made


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_control_character_reaches_the_terminal(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    (one, *_), info = rows(), run()
    disturbed = one.with_(suite="canary", status="tainted")
    text = run_summary(
        [info], [(info.uuid, row) for row in rows()], [(info.uuid, disturbed)], charts=True, show_canaries=True
    )
    bad = {c for c in text if not c.isprintable()} - {"\n"}
    assert not bad
    assert "\\x1b]0;owned" in text  # they are shown, as what they are
    for line in ("profile smoke\\x1b", "hardware cpu\\x1b", "environment env\\x1b", "code git", "x odd\\x1b"):
        assert line in text
    assert "canaries not ok: b\\x1b" in text
    assert any("(from 0)" in line and "\\x1b" in line for line in text.splitlines())  # the chart's title
    assert not [line for line in text.splitlines() if line.startswith("\\x9b")]  # a newline in a word begins no line
