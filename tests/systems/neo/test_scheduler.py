"""NEO's six steps one by one, and what holds for every sequence of iterations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import KvbenchError, UsageError
from kvbench.systems.neo.halves import Job, SubBatch, spans
from kvbench.systems.neo.scheduler import Decision, Offload, Params, Scheduler


@dataclass(frozen=True, slots=True)
class Flat:
    """Seconds that are easy to follow: ``weights`` once and ``token`` each, prompts and KV tokens at a rate."""

    weights: float = 1.0
    token: float = 0.01
    prompt: float = 0.0
    kv_near: float = 0.0
    kv_far: float = 0.001
    launch: float = 0.0

    def linear(self, tokens: int) -> float:
        return max(self.weights, self.token * tokens)

    def prefill(self, tokens: int) -> float:
        return self.prompt * tokens

    def near(self, requests: int, tokens: int) -> float:
        return self.kv_near * tokens

    def far(self, requests: int, tokens: int) -> float:
        return self.kv_far * tokens


SMALL = Params(near_blocks=10, far_blocks=1000, page=10, requests=64, tokens=1000, floor=50)


def scheduler(params: Params = SMALL, cost: Flat | None = None) -> Scheduler:
    return Scheduler(params, cost or Flat())


def waiting(made: Scheduler, *prompts: int, output: int = 5) -> list[Job]:
    jobs = [Job(key, prompt, prompt + output - 1) for key, prompt in enumerate(prompts)]
    for job in jobs:
        made.arrive(job)
    return jobs


def placed(made: Scheduler, tier: str, *cached: int, first: int = 100) -> list[Job]:
    """Put decodes of ``cached`` tokens into ``tier``, as if they had been prefilled."""
    blocks = made.params.blocks
    jobs = [Job(first + i, n, n + 50, n, blocks(n)) for i, n in enumerate(cached)]
    if tier == "near":
        made.near += jobs
        made.near_used += sum(job.blocks for job in jobs)
    else:
        made.far += jobs
        made.far_used += sum(job.blocks for job in jobs)
    return jobs


def keys(jobs: object) -> list[int]:
    return [job.key for job in jobs]  # type: ignore[attr-defined]


def plan(made: Scheduler) -> Decision:
    decided = made.plan()
    assert decided is not None
    return decided


# -- step 2 --------------------------------------------------------------------------------------------------------


def test_the_latest_near_request_is_swapped_out_when_blocks_lack() -> None:
    made = scheduler()
    placed(made, "near", 40, 30, 30)  # each full: three more blocks are asked for, there are none
    old = placed(made, "far", 7, first=200)
    decided = plan(made)
    assert keys(decided.swapped_out) == [102]
    assert keys(made.far) == [102, *keys(old)]  # to the front
    assert not decided.swapped_in  # never both in one iteration, though the request of 7 tokens would fit
    assert (made.near_used, made.far_used) == (4 + 3 + 2, 3 + 1)


def test_cpu_requests_come_back_up_to_the_threshold() -> None:
    made = scheduler(replace(SMALL, swap_in=0.7))
    placed(made, "near", 25)
    placed(made, "far", 15, 15, 5, first=200)
    decided = plan(made)
    assert keys(decided.swapped_in) == [200, 201]  # 3 + 2 + 2 blocks of 10 are the threshold; the next does not fit
    assert keys(decided.near) == [100, 200, 201]
    made = scheduler(replace(SMALL, swap_in=0.7))
    placed(made, "far", 85, first=200)
    assert keys(plan(made).swapped_in) == [200]  # alone it may take the last blocks


def test_decodes_beyond_the_budget_of_requests_are_swapped_out() -> None:
    made = scheduler(replace(SMALL, requests=2))
    placed(made, "near", 5, 5, 5)
    decided = plan(made)
    assert keys(decided.swapped_out) == [102]
    assert keys(decided.near) == [100, 101]


# -- step 3 --------------------------------------------------------------------------------------------------------


def test_prompts_go_near_while_they_fit_and_all_behind_one_that_does_not_go_far() -> None:
    made = scheduler(replace(SMALL, floor=1000), Flat())
    waiting(made, 60, 50, 10)
    decided = plan(made)
    assert [(job.key, far) for job, far in decided.prefills] == [(0, False), (1, True), (2, True)]
    assert (made.near_used, made.far_used) == (6, 5 + 1)


def test_host_memory_keeps_room_for_all_near_blocks() -> None:
    made = scheduler(replace(SMALL, far_blocks=13, floor=1000))
    waiting(made, 90, 20, 20)  # 13 - 10 reserved: room for one of two blocks
    assert [far for _, far in plan(made).prefills] == [False, True]
    made = scheduler(replace(SMALL, far_blocks=100, floor=1000))
    waiting(made, 90, 60, 60)  # two prompts of 6 blocks do not pass through one layer of 10
    assert [far for _, far in plan(made).prefills] == [False, True]


def test_prompts_stay_inside_the_budget_of_tokens_and_requests() -> None:
    made = scheduler(replace(SMALL, tokens=50))
    waiting(made, 30, 20, 10)
    assert keys(job for job, _ in plan(made).prefills) == [0, 1]
    made = scheduler(replace(SMALL, requests=2))
    waiting(made, 3, 3, 3)
    assert keys(job for job, _ in plan(made).prefills) == [0, 1]


# -- step 4 --------------------------------------------------------------------------------------------------------


def full(made: Scheduler, *far: int) -> list[Job]:
    """Fill the near tier so that nothing comes back, and put decodes into host memory."""
    placed(made, "near", 45, 45)
    return placed(made, "far", *far, first=200)


def test_cpu_decodes_go_to_the_larger_slack_and_long_ones_wait() -> None:
    # T_l = 1 s for either batch: a batch takes 1000 KV tokens
    made = scheduler(cost=Flat(kv_far=0.001, kv_near=0.0001))
    full(made, 600, 600, 500, 300, 50)
    decided = plan(made)
    assert decided.mode == "pipelined"
    # 600 to batch 1; 600 to batch 0, which now has the larger slack; 500 fits neither, 300 fits the larger, so does 50
    assert [keys(batch) for batch in decided.far] == [[201, 203], [200, 204]]
    assert all(half.holds for half in decided.halves)
    assert keys(made.far) == [200, 201, 202, 203, 204]  # none is lost, 202 waits


def test_what_is_as_long_as_one_that_did_not_fit_is_not_tried() -> None:
    asked = []

    class Counting(Flat):
        def far(self, requests: int, tokens: int) -> float:
            asked.append((requests, tokens))
            return Flat.far(self, requests, tokens)

    made = scheduler(cost=Counting(kv_near=0.0001))
    full(made, *[1500] * 5, 200, 200, 200)
    decided = plan(made)
    assert [keys(batch) for batch in decided.far] == [[206, 207], [205]]
    assert asked.count((1, 1501)) == 1
    assert not [n for _, n in asked if n > 1501]


def test_the_launch_counts_against_the_slack() -> None:
    made = scheduler(cost=Flat(kv_near=0.0001, launch=0.5))
    full(made, 300, 100, 100, 350)
    decided = plan(made)
    assert [keys(batch) for batch in decided.far] == [[201, 202], [200]]  # without a launch there is room for 350
    assert decided.halves[0].slack == pytest.approx(1.0 - 0.301 - 0.5)


# -- steps 5 and 6 -------------------------------------------------------------------------------------------------


def test_prompts_bound_for_host_memory_leave_while_slack_and_floor_allow_it() -> None:
    made = scheduler(replace(SMALL, floor=50), Flat(weights=0.1, kv_near=0.0001))
    full(made, 300)
    waiting(made, 40, 40, 10, 20)
    decided = plan(made)
    # two decodes and 40 + 10 tokens: 300 KV tokens need 0.301 s, and 50 tokens are the floor
    assert decided.mode == "pipelined"
    assert [(job.key, far) for job, far in decided.prefills] == [(0, True), (1, True)]
    assert keys(made.waiting) == [2, 3]


def test_without_cpu_work_prompts_bound_for_host_memory_only_fill_up_to_the_floor() -> None:
    made = scheduler(cost=Flat(weights=0.1))
    full(made)
    waiting(made, 30, 30, 30)
    decided = plan(made)
    assert decided.mode == "near"
    assert keys(job for job, _ in decided.prefills) == [0, 1]  # 2 decodes + 60 tokens; with one it would be 32 < 50


def test_the_gpu_alone_runs_where_it_serves_more_requests_a_second() -> None:
    slow = Flat(weights=1.0, kv_near=0.0001)
    made = scheduler(cost=slow)
    full(made, 900)
    decided = plan(made)  # 3 requests in two passes over the weights against 2 in one
    assert decided.mode == "near"
    assert decided.far == ((), ())
    made = scheduler(cost=slow)
    full(made, *[200] * 8)
    decided = plan(made)
    assert decided.mode == "pipelined"
    gpu = sum(half.near for half in decided.halves)
    assert decided.requests / gpu > 2 / 1.01


def test_nothing_near_is_no_iteration_for_the_cpu_alone() -> None:
    made = scheduler(replace(SMALL, swap_in=0.5))
    placed(made, "far", 20, 20, 20, 20, first=200)
    decided = plan(made)
    assert decided.mode in ("near", "pipelined")
    assert keys(decided.swapped_in) == [200]


# -- baseline and strawmen -----------------------------------------------------------------------------------------


def test_gpu_only_parks_and_brings_back_before_it_takes_new_requests() -> None:
    made = scheduler(replace(SMALL, offload="none"))
    placed(made, "near", 50, 49)
    waiting(made, 10)
    first = plan(made)
    assert first.mode == "near"
    assert keys(first.swapped_out) == [101]
    made.done()
    second = plan(made)
    assert not second.prefills
    assert not second.swapped_out
    made.done({100})
    third = plan(made)
    assert keys(third.swapped_in) == [101]
    assert not third.swapped_out
    assert keys(job for job, _ in third.prefills) == [0]


def test_full_offload_takes_every_decode_and_says_when_it_is_not_hidden() -> None:
    params = replace(SMALL, offload="all", far_blocks=1000)
    made = scheduler(params)
    placed(made, "far", 800, 800, 800, first=200)
    waiting(made, 60)
    decided = plan(made)
    assert decided.mode == "exposed"
    assert [(job.key, far) for job, far in decided.prefills] == [(0, True)]
    assert sorted(keys((*decided.far[0], *decided.far[1]))) == [200, 201, 202]
    assert max(half.cpu for half in decided.halves) == pytest.approx(1.602)


def test_strawmen() -> None:
    cost = Flat(prompt=0.001)
    params = replace(SMALL, offload="all", far_blocks=1000)
    made = scheduler(replace(params, order="simple"), cost)
    placed(made, "far", 500, 700, first=200)
    waiting(made, 60)
    simple = plan(made)
    assert [(half.near, round(half.cpu, 9)) for half in simple.halves] == [(1.06, 0.0), (0.0, 1.202)]
    made = scheduler(replace(params, order="symmetric"), cost)
    placed(made, "far", 500, 700, 300, first=200)
    waiting(made, 60)
    symmetric = plan(made)
    assert keys(job for job, _ in symmetric.prefills) == [0]
    assert [keys(batch) for batch in symmetric.far] == [[201], [200, 202]]
    assert [(half.near, round(half.cpu, 9)) for half in symmetric.halves] == [(1.06, 0.0), (1.0, 0.802), (1.0, 0.701)]


def test_order_of_the_modes_for_work_the_cpu_cannot_hide() -> None:
    """Section 3.1: simple is the sum of both sides, symmetric the larger of each half."""
    params = replace(SMALL, offload="all", far_blocks=1000)
    seconds = {}
    for order in ("simple", "symmetric", "pipelined"):
        made = scheduler(replace(params, order=order))
        placed(made, "far", *[400] * 8, first=200)
        seconds[order] = plan(made).layer_seconds
    assert seconds["simple"] > seconds["symmetric"] >= seconds["pipelined"]


def test_decodes_alone_repeat_until_blocks_run_out() -> None:
    made = scheduler(replace(SMALL, offload="none"))
    jobs = placed(made, "near", 15, 25)
    waiting(made, 90)  # does not fit, and fits less with every token
    decided = plan(made)
    # 5 of 10 blocks are taken: two requests may take two more each, whatever their place in their last block
    assert decided.repeats == 2 * 10 + 1
    with pytest.raises(KvbenchError, match="steps"):
        made.done(steps=22)
    made.done(steps=21)
    assert [job.cached for job in jobs] == [36, 46]
    assert made.near_used == sum(job.blocks for job in jobs) == 4 + 5
    assert plan(made).repeats == 1  # no block for each of them any more
    part = scheduler()
    placed(part, "near", 15)
    placed(part, "far", 200, first=200)
    assert plan(part).repeats == 1  # a CPU decode may join


# -- bad input -----------------------------------------------------------------------------------------------------


def test_what_can_never_be_served_is_refused() -> None:
    made = scheduler()
    for job in (Job(1, 1001, 1001), Job(2, 90, 101)):
        with pytest.raises(UsageError, match=f"request {job.key}"):
            made.arrive(job)
    with pytest.raises(UsageError, match="there are 5"):
        scheduler(replace(SMALL, offload="all", far_blocks=5)).arrive(Job(3, 50, 60))


@pytest.mark.parametrize(
    "change",
    [
        {"near_blocks": 0}, {"far_blocks": -1}, {"page": 0}, {"swap_in": 0.0}, {"swap_in": 1.1}, {"offload": "some"},
        {"order": "simple"}, {"order": "other"}, {"offload": "all", "far_blocks": 0}, {"floor": -1},
    ],
)  # fmt: skip
def test_parameters_out_of_range(change: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(SMALL, **change)  # type: ignore[arg-type]


def test_plan_and_done_take_turns() -> None:
    made = scheduler()
    with pytest.raises(KvbenchError, match="no iteration"):
        made.done()
    assert made.plan() is None
    waiting(made, 5)
    made.plan()
    with pytest.raises(KvbenchError, match="under way"):
        made.plan()
    with pytest.raises(KvbenchError, match="without having run"):
        made.done({77})


def test_taking_a_prompt_off_leaves_exactly_what_was_before() -> None:
    batch = SubBatch(Flat(prompt=0.1))
    batch.add_prefill(Job(0, 3, 3), False)
    before = batch.attention
    batch.add_prefill(Job(1, 7, 7), True)
    batch.pop_prefill()
    assert batch.attention == before
    assert spans(batch, SubBatch(Flat()))[0].cpu == 0.0


# -- properties ----------------------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> tuple[Params, Flat, list[tuple[int, int]]]:
    offload: Offload = draw(st.sampled_from(["part", "none", "all"]))
    params = Params(
        near_blocks=draw(st.integers(4, 20)), far_blocks=draw(st.integers(4, 60)), page=draw(st.integers(1, 8)),
        requests=draw(st.integers(1, 10)), tokens=draw(st.integers(4, 60)), floor=draw(st.integers(0, 20)),
        offload=offload,
        order=draw(st.sampled_from(["pipelined", "simple", "symmetric"])) if offload == "all" else "pipelined",
    )  # fmt: skip
    cost = Flat(kv_far=draw(st.sampled_from([0.001, 0.05, 1.0])), kv_near=0.001, launch=draw(st.sampled_from([0, 0.2])))
    jobs = draw(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=25))
    return params, cost, jobs


@settings(max_examples=150, deadline=None)
@given(runs())
def test_every_request_is_served_within_the_budgets(run: tuple[Params, Flat, list[tuple[int, int]]]) -> None:
    params, cost, sizes = run
    made = Scheduler(params, cost)
    left: dict[int, int] = {}
    jobs = {}
    arriving = deque(
        (job, output)
        for key, (prompt, output) in enumerate(sizes)
        if not made.fits(job := Job(key, prompt, prompt + output - 1))
    )
    budget = sum(output for _, output in arriving) + len(arriving)
    turns = 0
    while arriving or not made.idle:
        for _ in range(2):
            if arriving:
                job, output = arriving.popleft()
                made.arrive(job)
                left[job.key], jobs[job.key] = output, job
        decided = plan(made)
        turns += 1
        budget += len(decided.dropped) * 2
        assert turns <= 4 * budget + 10, "no progress"
        decodes = [*decided.near, *decided.far[0], *decided.far[1]]
        ran = [*decodes, *(job for job, _ in decided.prefills)]
        assert ran
        assert len({job.key for job in ran}) == len(ran) <= params.requests
        tokens = len(decodes) + sum(job.prompt for job, _ in decided.prefills)
        assert tokens <= params.tokens or len(ran) == 1  # a dropped request may have outgrown an iteration
        assert not (decided.swapped_in and decided.swapped_out)
        if decided.mode == "pipelined":
            assert all(half.slack >= 0.0 for half in decided.halves)
        if params.offload == "none":
            assert not decided.far[0]
            assert not decided.far[1]
            assert not any(far for _, far in decided.prefills)
        if params.offload == "all":
            assert not decided.near
            assert all(far for _, far in decided.prefills)
        ended = set()
        for job in ran:
            left[job.key] -= 1
            if not left[job.key]:
                ended.add(job.key)
                del left[job.key]
        made.done(ended)
        held = {"near": sum(job.blocks for job in made.near), "far": sum(job.blocks for job in made.far)}
        assert held == {"near": made.near_used, "far": made.far_used}
        assert made.near_used <= params.near_room
        assert made.far_used <= params.far_blocks
        live = [*made.waiting, *made.near, *made.far]
        assert sorted(job.key for job in live) == sorted(left)
        assert all(job.blocks == params.blocks(job.cached) for job in live)
    assert not left
