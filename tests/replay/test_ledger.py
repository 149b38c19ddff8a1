"""The ledger against a dictionary of dictionaries, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.replay.ledger import ConservationError, Ledger, TierSize
from kvbench.replay.protocol import Holding

CAPACITY = {"near": 10, "far": 25}
STEP = st.tuples(
    st.sampled_from(["take", "give", "all", "move", "hand"]), st.sampled_from(list(CAPACITY)),
    st.sampled_from([1, "cache"]), st.integers(-1, 12),
)  # fmt: skip


@given(st.lists(STEP, max_size=40))
def test_the_books_agree_with_a_plain_model(steps: list[tuple[str, str, int | str, int]]) -> None:
    ledger = Ledger([TierSize("near", 10, 4), TierSize("far", 25, 4)])
    model: dict[str, dict[int | str, int]] = {"near": {}, "far": {}}
    moved = 0
    for what, tier, owner, units in steps:
        has, free = model[tier].get(owner, 0), CAPACITY[tier] - sum(model[tier].values())
        other = "far" if tier == "near" else "near"
        heir = "cache" if owner == 1 else 1
        room = CAPACITY[other] - sum(model[other].values())
        fine = {
            "take": 0 <= units <= free, "give": 0 <= units <= has, "all": True, "hand": 0 <= units <= has,
            "move": 0 <= units <= min(has, room),
        }[what]  # fmt: skip

        def do(
            what: str = what, tier: str = tier, owner: int | str = owner, units: int = units, other: str = other,
            heir: int | str = heir,
        ) -> None:  # fmt: skip
            if what == "take":
                ledger.take(tier, owner, units)
            elif what == "move":
                ledger.move(owner, tier, other, units)
            elif what == "hand":
                ledger.hand(tier, owner, heir, units)
            else:
                ledger.give(tier, owner, None if what == "all" else units)

        if not fine:
            with pytest.raises(ConservationError):
                do()
        else:
            do()
            model[tier][owner] = {"take": has + units, "all": 0}.get(what, has - units)
            if what == "move":
                model[other][owner] = model[other].get(owner, 0) + units
                moved += units if tier == "near" else 0
            if what == "hand":
                model[tier][heir] = model[tier].get(heir, 0) + units
        ledger.check()
        ledger.audit([Holding(name, held) for name, held in model.items()])
        assert {name: ledger.used(name) for name in model} == {n: sum(held.values()) for n, held in model.items()}
    assert ledger.moved_bytes("near", "far") == 4 * moved


def test_an_owner_nobody_knows_of_is_found() -> None:
    ledger = Ledger([TierSize("near", 10, 4)])
    ledger.take("near", 3, 2)
    with pytest.raises(ConservationError, match=r"near, owner 3.*got 0, expected 2 units"):
        ledger.audit([Holding("near", {})])
    with pytest.raises(ConservationError, match=r"owner 4.*got 1, expected 0 units"):
        ledger.audit([Holding("near", {3: 2, 4: 1})])
    with pytest.raises(ConservationError, match="tiers"):
        ledger.audit([])


def test_units_of_other_sizes_do_not_move() -> None:
    ledger = Ledger([TierSize("near", 10, 4), TierSize("far", 10, 8)])
    ledger.take("near", 1, 1)
    with pytest.raises(ConservationError, match="units of one size"):
        ledger.move(1, "near", "far", 1)
    assert ledger.held("near", 1) == 1


@pytest.mark.parametrize(("capacity", "unit"), [(-1, 1), (1, 0)])
def test_a_tier_of_nothing_is_none(capacity: int, unit: int) -> None:
    with pytest.raises(UsageError, match="ledger far"):
        TierSize("far", capacity, unit)
