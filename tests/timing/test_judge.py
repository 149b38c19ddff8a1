"""Judgement of a value against ceilings and a healthy machine."""

from __future__ import annotations

import pytest

from kvbench.contract.result import Ceiling
from kvbench.timing.judge import judge

PHYSICAL = Ceiling("link", 100.0, "physical", "spec")
MEASURED = Ceiling("gather read", 80.0, "measured", "interleaved")


def test_plain_value_is_ok_with_its_fraction_of_the_first() -> None:
    found = judge(40.0, "higher", [MEASURED, PHYSICAL])
    assert (found.status, found.flags, found.reason, found.fraction, found.retake) == ("ok", (), "", 0.5, False)


@pytest.mark.parametrize(("value", "status"), [(102.0, "ok"), (102.1, "invalid")])
def test_above_physical_is_invalid(value: float, status: str) -> None:
    found = judge(value, "higher", [PHYSICAL])
    assert found.status == status
    assert not found.retake
    assert ("link (spec)" in found.reason) == (status == "invalid")


def test_above_measured_is_retaken_once_then_flagged() -> None:
    first = judge(84.1, "higher", [MEASURED])
    assert first.retake
    second = judge(84.1, "higher", [MEASURED], retaken=True)
    assert (second.status, second.flags, second.retake) == ("ok", ("above_ceiling",), False)
    assert not judge(83.9, "higher", [MEASURED]).retake


def test_invalid_is_not_retaken() -> None:
    found = judge(200.0, "higher", [MEASURED, PHYSICAL])
    assert (found.status, found.retake) == ("invalid", False)


@pytest.mark.parametrize(("value", "status"), [(99.0, "ok"), (97.0, "invalid"), (300.0, "ok")])
def test_latency_inverts(value: float, status: str) -> None:
    found = judge(value, "lower", [PHYSICAL])
    assert found.status == status
    assert found.fraction == pytest.approx(100.0 / value)


def test_unknown_first_ceiling_gives_no_fraction() -> None:
    found = judge(10.0, "higher", [Ceiling("link", None, "physical", "unknown"), MEASURED])
    assert found.fraction is None
    assert judge(10.0, "higher", []).fraction is None


@pytest.mark.parametrize(
    ("value", "better", "status"),
    [(69.0, "higher", "suspect"), (71.0, "higher", "ok"), (145.0, "lower", "suspect"), (140.0, "lower", "ok")],
)
def test_far_below_healthy_is_suspect(value: float, better: str, status: str) -> None:
    found = judge(value, better, [], healthy=100.0)  # type: ignore[arg-type]
    assert found.status == status
    assert ("below_healthy" in found.flags) == (status == "suspect")


def test_reasons_are_ranked_whatever_their_order() -> None:
    found = judge(10.0, "higher", [], healthy=100.0, causes=("odd clock", "thp_off", "remote_node"))
    text = found.reason
    assert text.index("1. memory on another NUMA node") < text.index("2. 4 KiB pages") < text.index("3. odd clock")
    assert "no known cause" in judge(10.0, "higher", [], healthy=100.0).reason


def test_tainted_samples_stay_tainted_unless_impossible() -> None:
    flags = ("tainted", "steal")
    low = judge(10.0, "higher", [PHYSICAL], flags=flags, reason="2 of 6 marked", healthy=100.0)
    assert low.status == "tainted"
    assert low.flags == ("tainted", "steal", "below_healthy")
    assert low.reason.startswith("2 of 6 marked; 0.10 of")
    assert judge(110.0, "higher", [PHYSICAL], flags=flags).status == "invalid"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_no_number_is_not_judged(value: float) -> None:
    with pytest.raises(ValueError, match="cannot be judged"):
        judge(value, "higher", [PHYSICAL])
