"""The strata_host figures: what they are made of, and what they say when a run gives nothing. No ratio is asserted."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from kvbench.kernels.team import Team
from scripts.figures import strata_host
from scripts.figures.processes import Done

CPU = min(os.sched_getaffinity(0))


def test_a_layout_change_and_its_copy_are_both_checked() -> None:
    with Team([CPU]) as team:
        figure = strata_host.changed(("page_first", "layer_first"), team, 3, 4 << 20)
    assert figure.low == 0.90
    assert (figure.value is None) == (figure.verdict == "disturbed" and "too few" in figure.note)
    if figure.value is not None:
        assert figure.value > 0
        assert figure.detail["fragment_bytes"] == 2048
        assert figure.detail["pairs"]


def test_a_wrong_copy_gives_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.errors import VerifyError
    from kvbench.kernels.moves import FragmentCopy

    monkeypatch.setattr(FragmentCopy, "run", lambda self, reps=1: 1e-3)  # fast, and moves nothing
    with Team([CPU]) as team, pytest.raises(VerifyError, match="did not arrive"):
        strata_host.changed(("page_first", "layer_first"), team, 3, 4 << 20)


def test_the_submit_loop_costs_what_it_costs() -> None:
    with Team([CPU]) as team:
        figure = strata_host.call_cost(team, calls=5000, rounds=3)
    assert figure.high == 20e-9
    assert figure.value is not None
    assert figure.value >= 0
    assert "3 x 5000" in figure.note


def document(residual: float | None, step: str | None) -> str:
    detail = {"law": "additive", "points": 10, "step": step}
    rows = [
        {"metric": "residual", "value": residual, "reason": "too short", "detail": {}},
        {"metric": "per_fragment", "value": None, "reason": "", "detail": detail},
        {"metric": "asymptote", "value": 3e9, "reason": "", "detail": {}},
    ]
    return json.dumps({"results": rows})


@pytest.mark.parametrize(
    ("text", "code", "value", "verdicts", "note"),
    [
        (document(0.04, None), 0, 0.04, {"met"}, "B 3.00 GB/s"),
        (document(0.30, None), 0, 0.30, {"missed", "disturbed"}, "c unknown"),
        (document(0.30, "rate x4 between 1 and 2 B"), 0, 0.30, {"met", "disturbed"}, "step: rate x4"),
        (document(None, None), 0, None, {"missed", "disturbed"}, "too short"),
        ("", 3, None, {"missed", "disturbed"}, "exit code 3"),
        ('{"results": []}', 0, None, {"missed", "disturbed"}, "no law"),
    ],
)
def test_the_law_of_a_file_is_read_from_the_bench(
    text: str, code: int, value: float | None, verdicts: set[str], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strata_host, "run", lambda words, limit: Done(1.0, code, text, ""))
    figure = strata_host.file_law()
    assert figure.value == value
    assert figure.verdict in verdicts
    assert note in figure.note


def test_a_run_that_does_not_end_is_a_missed_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(words: Any, limit: float) -> Done:
        raise subprocess.TimeoutExpired(words, limit)

    monkeypatch.setattr(strata_host, "run", hang)
    figure = strata_host.file_law()
    assert (figure.value, figure.verdict) == (None, "missed")
    assert "did not end" in figure.note
