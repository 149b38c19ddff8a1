"""The directkv figures: what they are made of, and what they say when something is missing. No ratio is asserted."""

from __future__ import annotations

import os

import pytest

from kvbench.errors import Unavailable
from kvbench.machine.probe import Fact
from kvbench.systems.directkv import host_store
from kvbench.systems.directkv.host_rig import Sample
from scripts.figures import directkv

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="products and loads need a CPU each")


def test_bytes_and_errors_of_every_method() -> None:
    link, error = directkv.crossed(160, 5, "64")
    assert (link.low, link.high) == (0.99, 1.01)
    assert link.value == 1.0
    assert link.verdict == "met"
    assert link.detail["naive_bytes"] == 3 * int(link.detail["cpu_aware_bytes"] or 0)
    assert error.value is not None
    assert 0.0 < error.value < 1.0
    assert set(error.detail) == {"resident", "swap", "naive", "cpu_aware", "cpu_aware_pipelined"}


def test_without_a_counter_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_store, "probe_counter", lambda file: Fact(False, "read_bytes grew by 0"))
    (figure,) = directkv.crossed(160, 1, "64")
    assert (figure.value, figure.verdict) == (None, "missed")
    assert "grew by 0" in figure.note


def test_time_and_buffer_against_swap() -> None:
    time, buffer = directkv.against_swap(2, 512)
    assert (time.high, buffer.high) == (1.10, 0.10)
    assert time.value is not None
    assert time.value > 0.0
    assert buffer.value == 384 / 512
    assert buffer.verdict == "missed"  # at n = 512 a panel is most of B


def test_prediction_is_over_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directkv, "take", lambda work: Sample(3.0, 2.0, 0.5, 1.5))
    naive, aware = directkv.predicted(160, "64", 3)
    for figure in (naive, aware):
        assert figure.value == 1.5
        assert figure.verdict in ("missed", "disturbed")
        assert figure.detail["samples"] == 3


@pytest.mark.parametrize(("cost", "value"), [(1.0, 1.0), (1.04, 1.0), (1.5, 0.0)])
def test_agreement_lists_its_misses(cost: float, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directkv, "decided", lambda m, n, tile, rounds: ("swap", "naive", cost))
    figure = directkv.agreement(1, (512, 1024), (0, 64, 600), ("128",))
    assert figure.value == value
    assert len(figure.detail) == 5  # more rows than n are no point
    assert ("n 1024 m 600 tile 128: swap for naive" in figure.note) is (value == 0.0)
    assert "0 the very same" in figure.note


def test_a_point_is_decided_by_medians() -> None:
    chosen, best, cost = directkv.decided(64, 160, "64", 2)
    names = {"swap", "swap_double", "naive", "cpu_aware", "cpu_aware_pipelined"}
    assert {chosen, best} <= names
    assert cost >= 1.0
    assert (cost == 1.0) is (chosen == best)


def test_what_cannot_run_is_a_missed_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Unavailable("not enough free space for a scratch file")

    monkeypatch.setattr(directkv, "open_rig", refuse)
    made = [*directkv.crossed(160), *directkv.against_swap(1), *directkv.predicted(160, "64", 1), directkv.agreement(1)]
    assert len(made) == 6
    assert {figure.verdict for figure in made} == {"missed"}
    assert all("free space" in figure.note for figure in made)
