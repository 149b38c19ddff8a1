"""Prefill over far KV on the host: both orders, swap and near against float64, and bytes against the algebra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.blas import one_thread
from kvbench.systems.directkv.attention_traffic import Attention
from kvbench.systems.directkv.host_attention_far import NearMemory
from kvbench.systems.directkv.prefill import Prefill
from kvbench.systems.directkv.prefill_plan import ORDERS, PrefillPlan, Rates, fill_far, predicted
from tests.systems.directkv.attention_rig import Held, Stale, far_of

PLAIN = Attention(1, 96, 160, 4, 2, 64, 32, 32, item=4)
SHAPES = {
    "plain": PLAIN,
    "ragged tiles": replace(PLAIN, queries=50, keys=101),
    "one query": replace(PLAIN, queries=1),
    "one key": replace(PLAIN, queries=3, keys=1),
    "two sequences": replace(PLAIN, batch=2, queries=20),
    "no groups": replace(PLAIN, q_heads=2),
    "eight to one": replace(PLAIN, q_heads=8, kv_heads=1, queries=40),
    "causal": replace(PLAIN, queries=160, causal=True),
    "causal, ragged, after a prefix": replace(PLAIN, queries=45, keys=101, causal=True),
    "causal, unlike tiles": replace(PLAIN, queries=70, keys=77, block_q=16, block_kv=50, causal=True),
}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


def made(order: str, plan: PrefillPlan, far: object, stack: ExitStack, budget: int | None = None) -> Prefill:
    near = NearMemory(stack.enter_context, budget)
    return Prefill(order, plan, far, near, stack.enter_context)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_order_is_float64s_and_moves_what_the_algebra_says(name: str) -> None:
    plan = PrefillPlan(SHAPES[name], 2, seed=3)
    far = Held(plan.nbytes)
    fill_far(plan, far)
    outputs = []
    for order in ORDERS:
        with ExitStack() as stack:
            work = made(order, plan, far, stack)
            with pytest.raises(VerifyError, match="not written"):
                work.verify()
            work.run(2)
            work.verify()
            said, counted = plan.traffic(order), work.counted
            assert work.link() == 2 * plan.link_stored(order)
            assert (counted.q_read, counted.kv_write, counted.kv_read) == (
                2 * said.q_read, 2 * said.kv_write, 2 * said.kv_read
            )  # fmt: skip
            assert (counted.o_read, counted.o_write, counted.stats) == (
                2 * said.o_read, 2 * said.o_write, 2 * said.stats
            )  # fmt: skip
            outputs.append(work.out.copy())
    for other in outputs[1:]:
        np.testing.assert_allclose(other, outputs[0], atol=2e-5)


def test_without_padding_the_link_is_the_algebras() -> None:
    plan = PrefillPlan(PLAIN)
    for order in ORDERS:
        assert plan.link_stored(order) == plan.traffic(order).link
    assert plan.link_stored("q_outer") == 3 * 2 * plan.link_stored("kv_outer")  # tiles of queries x group
    ragged = PrefillPlan(SHAPES["ragged tiles"])
    assert ragged.link_stored("kv_outer") > ragged.traffic("kv_outer").link


@pytest.mark.parametrize("order", ["q_outer", "kv_outer", "swap"])
def test_a_far_file_delivers_what_was_asked(tmp_path: Path, order: str) -> None:
    plan = PrefillPlan(SHAPES["ragged tiles"], 2)
    with ExitStack() as stack:
        far = far_of("file", plan.nbytes, stack, tmp_path)
        fill_far(plan, far)
        work = made(order, plan, far, stack)
        work.run(2)
        work.verify()
        assert work.tally.reads == 2 * plan.link_stored(order)
        if work.tally.source == "read_bytes of the process":
            assert work.link() == pytest.approx(work.tally.reads, rel=0.05, abs=1 << 16)


@pytest.mark.parametrize("order", ["q_outer", "kv_outer", "swap"])
def test_tiles_that_are_not_what_far_memory_holds_are_noticed(order: str) -> None:
    plan = PrefillPlan(PLAIN)
    with ExitStack() as stack:
        far = Stale(plan.nbytes)
        fill_far(plan, far)
        work = made(order, plan, far, stack)
        far.wrong_from = 0
        work.run(1)
        with pytest.raises(VerifyError, match="attention is wrong"):
            work.verify()


def test_the_arithmetic_alone_is_no_result() -> None:
    plan = PrefillPlan(PLAIN)
    with ExitStack() as stack:
        far = Held(plan.nbytes)
        fill_far(plan, far)
        work = made("near", plan, far, stack)
        work.run(1)
        work.core(1)
        with pytest.raises(VerifyError):
            work.verify()
        with pytest.raises(UsageError, match="only with KV near"):
            made("kv_outer", plan, far, stack).core(1)


def test_reads_alone_are_those_of_a_pass() -> None:
    plan = PrefillPlan(PLAIN)
    with ExitStack() as stack:
        far = Held(plan.nbytes)
        work = made("q_outer", plan, far, stack)
        before = far.moved
        work.read(2)
        assert far.moved - before == 2 * plan.link_stored("q_outer")
        with pytest.raises(UsageError, match="nothing is read"):
            made("near", plan, far, stack).read(1)


def test_tiles_beyond_the_near_budget_say_how_much_and_what_fits() -> None:
    plan = PrefillPlan(replace(PLAIN, keys=4096, block_kv=1024))
    with ExitStack() as stack:
        far = Held(plan.nbytes)
        with pytest.raises(UsageError, match=r"8 tiles of 524288 B.*block_kv of at most (\d+) fits") as caught:
            made("kv_outer", plan, far, stack, budget=1 << 20)
        fits = int(str(caught.value).split("at most ")[-1].split()[0])
        fewer = PrefillPlan(replace(plan.shape, block_kv=fits))
        made("kv_outer", fewer, far, stack, budget=1 << 20)
        more = PrefillPlan(replace(plan.shape, block_kv=fits + 8))
        with pytest.raises(UsageError, match="tiles of KV larger than the near budget"):
            made("kv_outer", more, far, stack, budget=1 << 20)
        with pytest.raises(UsageError, match="a larger budget or fewer queries"):
            made("q_outer", plan, far, stack, budget=1 << 10)


@pytest.mark.parametrize("change", [{"queries": 0}, {"keys": 0}, {"q_heads": 3}, {"causal": True, "queries": 200}])
def test_degenerate_shapes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        replace(PLAIN, **change)


def test_other_orders_and_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="not a host prefill"):
        PrefillPlan(replace(PLAIN, item=2))
    with pytest.raises(UsageError, match="not a host prefill"):
        PrefillPlan(PLAIN, 0)
    with pytest.raises(UsageError, match="unknown order"), ExitStack() as stack:
        made("inside_out", PrefillPlan(PLAIN), Held(4096), stack)


def test_predictions_hide_reads_and_pay_for_what_is_not_hidden() -> None:
    plan = PrefillPlan(PLAIN, 3)
    fast = dict.fromkeys(("q_outer", "kv_outer", "swap"), 1e15)
    free = Rates(1.0, 1.0, fast)
    assert all(predicted(plan, order, free) == pytest.approx(3.0) for order in ORDERS)
    slow = {order: plan.link_stored("kv_outer") / 2.0 for order in fast}  # KV once in 2 s
    bound = Rates(1.0, 1.0, slow)
    assert predicted(plan, "q_outer", bound) == pytest.approx(3 * 12.0)
    assert predicted(plan, "kv_outer", bound) == pytest.approx(3 * 2.0)
    assert predicted(plan, "swap", bound) == pytest.approx(2.0 + 2 * 2.0 + 1.0)
    assert predicted(plan, "near", bound) == pytest.approx(3.0)
    # near memory slower than hot tiles costs each order what it touches there
    cold = Rates(1.0, 2.0, fast)
    assert predicted(plan, "near", cold) == pytest.approx(6.0)
    small = PrefillPlan(replace(PLAIN, block_kv=4), 3)
    assert predicted(small, "kv_outer", cold) > predicted(small, "swap", cold)
