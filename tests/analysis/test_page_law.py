"""The law of a page sweep on curves whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.analysis.page_law import breaks, page_law

ITEM = 2048
PAGES = [1 << k for k in range(10)]
SIZES = [ITEM * page for page in PAGES]
C, B = 3.3e-6, 20e9  # n_half 66 KB: inside the sweep


def additive(noise: float, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return [(C + size / B) * float(np.exp(noise * rng.standard_normal())) for size in SIZES]


@pytest.mark.parametrize("seed", range(5))
def test_an_additive_sweep_gives_back_its_law(seed: int) -> None:
    law = page_law(PAGES, SIZES, additive(0.03, seed))
    assert (law.law, law.holds, law.steps) == ("additive", True, ())
    assert law.c == pytest.approx(C, rel=0.1)
    assert law.bandwidth == pytest.approx(B, rel=0.15)
    assert law.n_half is not None
    assert law.fragment_90 == pytest.approx(9 * law.n_half)
    assert law.page_90 is not None
    assert law.fragment_90 is not None
    assert (law.page_90 - 1) * ITEM < law.fragment_90 <= law.page_90 * ITEM + 1


def test_an_overlapped_sweep_follows_the_other_law() -> None:
    law = page_law(PAGES, SIZES, [max(C, size / B) for size in SIZES])
    assert (law.law, law.winner, law.holds) == ("max", "max", True)
    assert law.fragment_90 == pytest.approx(0.9 * C * B)
    assert law.page_90 == 30  # 59.4 KB
    assert law.measured_page_90 == 32


def test_the_measured_page_is_the_one_from_which_on_every_page_is_fast() -> None:
    times = [max(C, size / B) for size in SIZES]
    times[6] *= 1.2  # 128 KiB falls back below 90 %
    assert page_law(PAGES, SIZES, times).measured_page_90 == 128


def test_a_cliff_is_named_and_not_smoothed_into_a_law() -> None:
    """The shape seen with batched copies: one rate up to 24 KiB, a several times higher one from 28 KiB on."""
    sizes = [4096.0 * k for k in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)]
    times = [size / (5.5e9 if size <= 24 * 1024 else 38e9) for size in sizes]
    law = page_law([int(size) // 2048 for size in sizes], sizes, times)
    assert [(step.below, step.above) for step in law.steps] == [(24576, 28672)]
    assert law.steps[0].ratio == pytest.approx(38 / 5.5)
    assert not law.holds  # the sweep is explained by a step, and not by a law
    assert "between 24576 and 28672 B" in law.step_text
    assert law.residual is not None
    assert law.residual > 0.15


def test_a_law_far_off_does_not_hold_whatever_steps_there_are() -> None:
    """Rates as mapped files showed them while earlier passes left pages in memory."""
    pages, rates = [1, 4, 16, 64, 512], [5.6e9, 9.05e9, 3.94e9, 14.1e9, 1.03e9]
    sizes = [float(ITEM * page) for page in pages]
    law = page_law(pages, sizes, [size / rate for size, rate in zip(sizes, rates, strict=True)])
    assert law.residual is not None
    assert law.residual > 0.5
    assert law.steps
    assert not law.holds
    assert law.reason


def test_a_fall_of_the_rate_is_a_step_once_the_next_size_confirms_it() -> None:
    times = additive(0.0, 0)
    slow = [t * (3 if size > 65536 else 1) for t, size in zip(times, SIZES, strict=True)]
    assert [(s.below, s.above) for s in breaks(np.array(SIZES, float), np.array(slow))] == [(65536, 131072)]
    spike = list(times)
    spike[5] *= 3
    assert breaks(np.array(SIZES, float), np.array(spike)) == ()


def test_a_shape_without_law_or_step_does_not_hold() -> None:
    times = [1e-6 * size**0.5 * (1.6 if k % 2 else 1.0) for k, size in enumerate(SIZES)]
    law = page_law(PAGES, SIZES, times)
    assert not law.holds
    assert law.reason


def test_a_sweep_that_never_streams_has_no_bandwidth() -> None:
    law = page_law(PAGES, SIZES, [C + size / 1e15 for size in SIZES])
    assert law.bandwidth is None
    assert law.page_90 is None
    assert "beta is not identifiable" in law.reason


def test_three_pages_make_no_law() -> None:
    law = page_law(PAGES[:3], SIZES[:3], additive(0.0, 0)[:3])
    assert (law.c, law.residual, law.holds) == (None, None, False)
    assert "needs 4" in law.reason


def test_what_is_no_sweep_is_refused() -> None:
    with pytest.raises(ValueError, match="9 pages and 10"):
        page_law(PAGES[:-1], SIZES, additive(0.0, 0))
    with pytest.raises(ValueError, match="positive and finite"):
        page_law(PAGES, SIZES, [0.0] * len(SIZES))
