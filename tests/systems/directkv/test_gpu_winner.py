"""Which method should win on a GPU: seconds from bytes, by rates that make each part the longest in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.errors import UsageError
from kvbench.systems.directkv.gpu_gemm import Asked
from kvbench.systems.directkv.gpu_winner import BoardRates, contenders, forecast
from tests.systems.directkv.gemm_rig import bed

ASKED = Asked(192, 192, 64, "naive", tile=64, depth=3)
FAST = 1e30  # of a part that should not count


def test_the_contenders_and_what_they_should_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with bed(monkeypatch) as b:
        works = contenders(b.service, b.stack.enter_context, ASKED, 5)
        assert list(works) == ["swap", "swap_double", "naive", "cpu_aware", "cpu_aware_pipelined"]
        assert {name: work.asked.depth for name, work in works.items()} == {
            "swap": 3, "swap_double": 3, "naive": 3, "cpu_aware": 1, "cpu_aware_pipelined": 2,
        }  # fmt: skip
        matrix = 4 * 192 * 64
        link = BoardRates(direct=matrix, engine=2 * matrix, near=FAST, flops=FAST)
        crossed = {name: work.traffic.link / matrix for name, work in works.items()}
        assert crossed["naive"] == 3.0  # rows of tiles
        for name in ("naive", "cpu_aware_pipelined"):
            told = forecast(works[name], link)
            assert told.seconds == told.link == pytest.approx(crossed[name])
        assert forecast(works["swap"], link).seconds == pytest.approx(0.5)
        compute = BoardRates(FAST, FAST, FAST, 2.0 * 192 * 192 * 64)
        assert {round(forecast(work, compute).seconds, 9) for work in works.values()} == {1.0}
        near = BoardRates(FAST, FAST, works["cpu_aware"].traffic.near, FAST)
        assert forecast(works["cpu_aware"], near).seconds == pytest.approx(1.0)
        assert forecast(works["swap"], near).seconds == pytest.approx(works["swap"].traffic.near / near.near)


def test_one_buffer_takes_turns_and_two_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    with bed(monkeypatch) as b:
        works = contenders(b.service, b.stack.enter_context, ASKED, 5)
        matrix = 4 * 192 * 64
        even = BoardRates(matrix, matrix, FAST, 2.0 * 192 * 192 * 64)  # a second each
        assert forecast(works["swap"], even).seconds == pytest.approx(2.0)
        widths = [slab.width / 192 for slab in works["swap_double"].operands.slabs]
        assert len(widths) > 1
        assert 1.0 < forecast(works["swap_double"], even).seconds < 2.0
        aware, ahead = works["cpu_aware"], works["cpu_aware_pipelined"]
        link = aware.traffic.link / matrix
        assert forecast(ahead, even).seconds == pytest.approx(max(link, 1.0))
        assert forecast(aware, even).seconds == pytest.approx(max(link, 1.0 + link / aware.grid))


def test_one_column_of_tiles_has_no_double_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    with bed(monkeypatch) as b:
        works = contenders(b.service, b.stack.enter_context, replace(ASKED, n=64), 5)
        assert list(works) == ["swap", "naive", "cpu_aware", "cpu_aware_pipelined"]


@pytest.mark.parametrize("place", ["direct", "engine", "near", "flops"])
def test_a_rate_of_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    with bed(monkeypatch) as b:
        works = contenders(b.service, b.stack.enter_context, ASKED, 5)
        rates = replace(BoardRates(1.0, 1.0, 1.0, 1.0), **{place: 0.0})
        with pytest.raises(UsageError, match="not a rate"):
            forecast(works["swap" if place == "engine" else "naive"], rates)
