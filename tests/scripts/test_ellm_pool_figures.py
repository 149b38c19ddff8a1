"""The figures of the elastic pool, made with few repetitions: what they count is right, whatever the machine does."""

from __future__ import annotations

import pytest

from scripts.figures import ellm_pool
from scripts.figures.record import Figure

FEW = ellm_pool.Options(inflations=2, passes=4, crossings=2, operations=200, chunks=4, steps=2, curve_chunks=256)


def made(part: str) -> list[Figure]:
    found = list(getattr(ellm_pool, part)(FEW))
    assert all(figure.group == ellm_pool.GROUP and figure.value is not None for figure in found)
    return found


def test_inflation() -> None:
    copied, ratio = made("inflation")
    assert (copied.value, copied.verdict) == (0, "met")
    assert ratio.high == 1.15
    assert ratio.detail["pairs"] == 2


def test_copies_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ellm_pool, "stamp", lambda pool, slot, touch: None)
    copied, _ = made("inflation")
    assert (copied.value, copied.verdict) == (4 * ellm_pool.CHUNK, "missed")


def test_reuse() -> None:
    (ratio,) = made("reuse")
    assert ratio.value == ratio.detail["pooled"] / ratio.detail["every_time"] < 1  # type: ignore[operator]


def test_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ellm_pool, "CHUNK", 64 << 10)
    monkeypatch.setattr(ellm_pool, "MOST", 7)
    (ratio,) = made("ahead")
    assert ratio.value == ratio.detail["crossing"] / ratio.detail["plain"]  # type: ignore[operator]


def test_curve() -> None:
    found = made("curve")
    assert [figure.detail["context"] for figure in found] == [2048 << k for k in range(7)]
    assert (found[0].low, found[-1].low) == (0.99, 1.15)


def test_bookkeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ellm_pool, "_operation", lambda chunks, operations: (chunks * 1e-10, operations))
    small, large = made("bookkeeping")
    assert (small.verdict, small.high) == ("no target", None)
    assert (large.value, large.high) == (pytest.approx(1e-5), 5e-6)
    assert large.verdict in ("missed", "disturbed")


def test_operations_are_counted() -> None:
    seconds, made_here = ellm_pool._operation(500, 250)
    assert seconds > 0
    assert 150 < made_here <= 250
