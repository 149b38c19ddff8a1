"""The traces figures: what they count, and what they say when a child gives nothing. No rate is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.replay.traces.trace import open_trace
from scripts.figures import traces
from scripts.figures.processes import Done


def test_a_child_that_streams_is_counted_and_its_memory_is_its_own() -> None:
    memory, rate = traces.streamed("loogle", 50, "made")
    assert (memory.unit, memory.verdict) == ("B", "met")
    assert memory.value is not None
    assert 1 << 20 < memory.value < 1 << 30
    assert rate.value is not None
    assert rate.value > 0
    assert rate.verdict == "no target"


@pytest.mark.parametrize("output", ["49 1.0 1000\n", "", "what is this\n"])
def test_a_child_that_streams_fewer_has_no_figure(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "run", lambda words, limit: Done(1.0, 0, output, ""))
    (figure,) = traces.streamed("loogle", 50, "made")
    assert (figure.value, figure.verdict) == (None, "missed")


def test_the_file_it_writes_is_a_trace(tmp_path: Path) -> None:
    traces.write_burstgpt(tmp_path / "t.csv", 400)
    found = open_trace(tmp_path / "t.csv", strict=True)
    assert (found.format.name, found.facts.requests, found.facts.failed) == ("burstgpt", 400, 0)
