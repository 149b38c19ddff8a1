"""The strata_radix figures on small trees: every operation has a time, and the law is judged. No time is asserted."""

from __future__ import annotations

import random

import pytest

from kvbench.errors import KvbenchError
from kvbench.systems.strata.radix import RadixTree
from scripts.figures.strata_radix import OPERATIONS, Bed, timed_trees


def test_every_operation_is_timed_and_the_growth_judged() -> None:
    found = list(timed_trees(rounds=2, requests=100, sizes=(500, 1000, 2000)))
    assert [figure.name for figure in found[:-1]] == [f"{name}, 2000 blocks" for name in OPERATIONS]
    assert all(figure.value is not None and figure.value > 0.0 and figure.high == 20e-6 for figure in found[:-1])
    growth = found[-1]
    assert (growth.unit, growth.high) == ("ratio", 1.2)
    whole = [float(growth.detail[f"seconds_{blocks}"]) for blocks in (500, 1000, 2000)]  # type: ignore[arg-type]
    told = whole[0] + 2.0 * (whole[1] - whole[0])
    assert growth.value == pytest.approx(whole[2] / max(told, whole[0]))


def test_a_tree_that_keeps_nothing_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(1000, random.Random(1))
    bed.fill()
    monkeypatch.setattr(RadixTree, "arrive_near", lambda self, leaf: (0, 0))
    with pytest.raises(KvbenchError, match="took too little in"):
        bed.round(20)
