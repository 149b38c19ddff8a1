"""Checks of claims in a store, and the rows they read: the newest of this hardware, few of each."""

from __future__ import annotations

from pathlib import Path

from kvbench.store import open_store
from kvbench.store.checks import NEWEST, ClaimCheck
from kvbench.store.engine import Store
from tests.store.factories import at, make_row, make_run


def check(verdict: str = "REPRODUCED", hw_class: str = "cpu-a", claim: str = "neo-x", at_: str = "") -> ClaimCheck:
    return ClaimCheck(claim, at_, "g", verdict, "measured", 1.0, None, None, "1", {"hw_class": hw_class, "x": "\x00☃"})


def add(store: Store, number: int, value: float, **info: object) -> str:
    run = make_run(started_at=at(number), uuid=f"{number:08x}-0000-4000-8000-000000000000", **info)
    store.begin_run(run)
    store.add_results(run.uuid, [make_row(0, value=value, low=None, high=None)], 0)
    return run.uuid


def test_the_same_outcome_is_stored_once_for_each_hardware(tmp_path: Path) -> None:
    with open_store(tmp_path / "k.db") as store:
        assert store.add_claim_checks([]) == 0
        assert store.add_claim_checks([check(), check(claim="neo-y")]) == 2
        assert store.add_claim_checks([check()]) == 0
        assert store.add_claim_checks([check(hw_class="cpu-b")]) == 1
        assert store.add_claim_checks([check("NOT REPRODUCED")]) == 1
        assert store.add_claim_checks([check()]) == 1  # it changed back
        found = store.claim_checks("neo-x")
        assert len(store.claim_checks()) == 5
    assert [each.verdict for each in found if each.detail["hw_class"] == "cpu-a"] == [
        "REPRODUCED", "NOT REPRODUCED", "REPRODUCED"
    ]  # fmt: skip
    assert found[0].detail["x"] == "\\x00☃"
    assert found[0].checked_at > "2025"


def test_the_newest_rows_of_a_case_on_one_hardware(tmp_path: Path) -> None:
    digest = make_row(0).digest
    with open_store(tmp_path / "k.db") as store:
        add(store, 999, 9.0, hw_class="cpu-b")
        for number in range(NEWEST + 3):
            add(store, number, float(number + 1))
        found = store.rows_of_cases([digest, "0" * 64], "cpu-a")
        assert store.rows_of_cases([], "cpu-a") == []
        assert store.rows_of_cases(["0" * 64], "cpu-a") == []
        (other,) = store.rows_of_cases([digest], "cpu-b")
    assert [run.results[0].value for run in found] == [float(number + 1) for number in range(3, NEWEST + 3)]
    assert (other.info.hw_class, other.results[0].digest) == ("cpu-b", digest)
