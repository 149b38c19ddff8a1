"""Quantiles, objectives and the event log."""

from __future__ import annotations

import hashlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.replay.events import BATCH, EventLog
from kvbench.replay.metrics import Slo, Tally, spread
from kvbench.replay.protocol import Live
from kvbench.replay.request import Request


@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=300), st.randoms())
def test_quantiles_are_values_that_enough_do_not_exceed(values: list[float], source: object) -> None:
    found = spread(values)
    assert found.n == len(values)
    for share, quantile in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert quantile in values
        assert sum(1 for value in values if value <= quantile) >= share * len(values) - 1e-9
        assert sum(1 for value in values if value < quantile) < share * len(values) + 1e-9
    shuffled = list(values)
    source.shuffle(shuffled)  # type: ignore[attr-defined]
    assert spread(shuffled) == found  # sums too: the order does not matter


def test_nothing_has_no_quantiles() -> None:
    assert (spread([]).n, spread([]).mean, spread([]).p99) == (0, None, None)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_objectives_are_times(value: float) -> None:
    with pytest.raises(UsageError, match="slo ttft"):
        Slo(ttft=value)


def test_objectives_hold_each_for_itself_and_one_token_has_no_tpot() -> None:
    tally = Tally()
    tally.first_arrival, tally.end = 0.0, 10.0
    for number, (first, last, out) in enumerate([(1.0, 5.0, 5), (3.0, 3.4, 5), (1.0, 1.0, 1), (4.0, 4.0, 1)]):
        live = Live(Request(number, 0.0, 10, out), first_token_at=first, finished_at=last)
        tally.done(live)
    found = {slo: tally.summary(slo).within for slo in (Slo(), Slo(2.0), Slo(None, 0.5), Slo(2.0, 0.5))}
    assert list(found.values()) == [4, 2, 3, 1]
    summary = tally.summary(Slo(2.0))
    assert summary.goodput == pytest.approx(0.2)
    assert (summary.ttft.n, summary.tpot.n, summary.latency.n) == (4, 2, 4)


def test_a_digest_is_that_of_the_lines_however_many_there_are() -> None:
    lines = [f"event {i}" for i in range(2 * BATCH + 7)]
    kept, plain = EventLog(keep=True), EventLog()
    for line in lines:
        kept.add(line)
        plain.add(line)
    assert kept.digest() == plain.digest() == hashlib.sha256(("\n".join(lines) + "\n").encode()).hexdigest()
    assert (kept.kept, plain.kept, plain.count) == (lines, None, len(lines))
    assert EventLog().digest() == hashlib.sha256(b"").hexdigest()
