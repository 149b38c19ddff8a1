"""The fused K projection on the host: keys stored once or out and back, the same scores, faults noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.kernels.blas import one_thread
from kvbench.systems.directkv.fused import METHODS, STAGES, Fused, FusedPlan, predicted_gain
from kvbench.systems.directkv.host_attention_far import Bytes, NearMemory
from tests.systems.directkv.attention_rig import Held, Stale, far_of

PLANS = {
    "whole tiles": FusedPlan(64, 96, 2, 2, 64, 32),
    "a ragged tile": FusedPlan(71, 33, 2, 1, 64, 16),
    "a decode step": FusedPlan(1, 128, 4, 2, 64, 256),
    "width 1": FusedPlan(9, 1, 1, 4, 64, 4),
    "more tiles than slots": FusedPlan(90, 16, 1, 1, 64, 8),
}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("tier", ["dram", "file"])
@pytest.mark.parametrize("name", list(PLANS))
def test_both_ways_store_and_score_the_same(tmp_path: Path, tier: str, name: str) -> None:
    plan, scores = PLANS[name], []
    for method in METHODS:
        with ExitStack() as stack:
            far = far_of(tier, plan.nbytes, stack, tmp_path)
            work = Fused(method, plan, far, NearMemory(stack.enter_context), stack.enter_context)
            work.run(2)
            work.verify()
            assert work.link() == plan.link_bytes(method)
            assert work.buffer == plan.slot_bytes * (plan.tiles if method == "separate" else min(4, plan.tiles))
            scores.append(work.scores)
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5, atol=1e-6)
    assert plan.link_bytes("separate") == 2 * plan.link_bytes("fused") >= 2 * plan.k_bytes


class Heard:
    def __init__(self) -> None:
        self.names: list[str] = []

    def mark(self, name: str) -> None:
        self.names.append(name)


def test_a_recorder_hears_the_stages() -> None:
    plan = PLANS["whole tiles"]
    with ExitStack() as stack:
        for method, wanted in (("separate", list(STAGES)), ("fused", ["scored"])):
            heard = Heard()
            far = Held(plan.nbytes)
            Fused(method, plan, far, NearMemory(stack.enter_context), stack.enter_context).run(1, heard)
            assert heard.names == wanted


class Forgetful(Held):
    """Far memory that keeps nothing it is told."""

    def write(self, offset: int, data: Bytes) -> None:
        self._count.add(data.size)


class Broken(Held):
    """Far memory that takes nothing."""

    def write(self, offset: int, data: Bytes) -> None:
        raise Unavailable("the device failed", where="far")


@pytest.mark.parametrize("method", METHODS)
def test_keys_that_were_not_stored_are_noticed(method: str) -> None:
    plan = PLANS["whole tiles"]
    with ExitStack() as stack:
        far = Forgetful(plan.nbytes)
        work = Fused(method, plan, far, NearMemory(stack.enter_context), stack.enter_context)
        with pytest.raises(VerifyError):
            work.verify()


def test_keys_read_back_wrong_are_noticed() -> None:
    plan = PLANS["whole tiles"]
    with ExitStack() as stack:
        far = Stale(plan.nbytes)
        work = Fused("separate", plan, far, NearMemory(stack.enter_context), stack.enter_context)
        work.verify()
        far.wrong_from = 0
        with pytest.raises(VerifyError, match="scores"):
            work.verify()


@pytest.mark.parametrize("method", METHODS)
def test_a_store_that_fails_is_raised(method: str) -> None:
    plan = PLANS["more tiles than slots"]
    with ExitStack() as stack:
        work = Fused(method, plan, Broken(plan.nbytes), NearMemory(stack.enter_context), stack.enter_context)
        for _ in range(2):  # once failed it says so again, and waits for no slot
            with pytest.raises(Unavailable, match="the device failed"):
                work.run(1)


def test_user_mistakes() -> None:
    with pytest.raises(UsageError, match="a projection of nothing"):
        FusedPlan(0, 1, 1, 1)
    with pytest.raises(UsageError, match="unknown method"), ExitStack() as stack:
        Fused("both", PLANS["width 1"], Held(4096), NearMemory(stack.enter_context), stack.enter_context)


def test_the_predicted_gain_is_the_papers_formula() -> None:
    plan = FusedPlan(256, 64, 2, 1, 64, 64)
    size = plan.link_bytes("fused")
    assert predicted_gain(plan, 2.0, size / 0.5, size / 0.5) == pytest.approx(1.5)  # 1 + 2 K / B / T
