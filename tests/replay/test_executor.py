"""The executor: the course of a replay with real blocks, carried out, and checks that find what went wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvbench.attention.cpu import DecodeAttention
from kvbench.errors import KvbenchError, UsageError, VerifyError
from kvbench.kernels.blas import blas_threads
from kvbench.kernels.team import Team
from kvbench.memory.host import host_buffer
from kvbench.replay.costs import costs
from kvbench.replay.engine import replay
from kvbench.replay.executor import Executor, Mover
from kvbench.replay.executor_costs import PairCosts, measure_beside, measure_pair
from kvbench.replay.executor_course import Taker, Turn, place
from kvbench.replay.executor_pair import PairMemory
from kvbench.replay.executor_trial import BLAS, Trial, open_pair
from kvbench.replay.machine import preset
from kvbench.replay.policies import make
from kvbench.replay.policies.neo import Part
from kvbench.replay.protocol import Phase
from kvbench.replay.request import Request

# an H100's layers take microseconds at this size: tests do not wait long
SMALL = Trial(10, prompt=40, output=8, machine="h100", layers=2, far_blocks=64, near_tokens=192, rate=2000.0)


class Rig:
    """Memory, attention and a copying thread for trials of the size of ``SMALL``."""

    def __init__(self, address: int, team: Team, mover: Mover) -> None:
        self.memory: PairMemory = SMALL.memory(address)
        self.attention, self.mover = DecodeAttention(SMALL.kv_shape(), team), mover
        self.measured: PairCosts = measure_pair(self.memory, self.attention, mover)

    def executor(self, trial: Trial) -> Executor:
        _, taker = trial.simulate(trial.costs(self.measured))
        return Executor(taker.turns, self.memory, self.attention, self.mover)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    cpus = sorted(os.sched_getaffinity(0))
    with host_buffer(SMALL.nbytes(), "4k", kind=None) as buffer, Team(cpus[:1]) as team, Mover(cpus[-1]) as mover:
        yield Rig(buffer.address, team, mover)


# -- the course ----------------------------------------------------------------------------------------------------


def turn(*parts: Part, ended: tuple[int, ...] = (), dropped: tuple[int, ...] = ()) -> Turn:
    return Turn(tuple(Phase() for _ in parts), parts, 0.0, 0.0, 1.0, ended, dropped, "")


def test_kv_keeps_its_blocks_until_it_leaves() -> None:
    course = [
        turn(Part(out=((1, 20), (2, 16)))),
        turn(Part(decodes=((1, 21), (2, 17)))),
        turn(Part(decodes=((1, 33),)), ended=(2,)),
        turn(Part(into=((1, 33),))),
        turn(Part(out=((3, 16 * 5),))),
    ]
    found = place(course, 5, 16)
    (first,), (second,), (third,), (fourth,), (last,) = found
    one, two = (copied.blocks for copied in first.copies)
    assert len(one) == 2
    assert len(two) == 1
    assert not set(one) & set(two)
    assert second.decodes[0].blocks == one
    assert second.decodes[1].blocks[:1] == two
    assert third.decodes[0].blocks[:2] == one
    assert fourth.copies[0].blocks == third.decodes[0].blocks
    assert not fourth.copies[0].out
    assert sorted(last.copies[0].blocks) == [0, 1, 2, 3, 4]  # all were given back


@pytest.mark.parametrize(
    ("course", "what"),
    [
        ([turn(Part(out=((1, 81),)))], "far blocks"),
        ([turn(Part(decodes=((1, 5),)))], "nothing to read"),
        ([turn(Part(into=((1, 5),)))], "nothing to bring in"),
        ([turn(Part(out=((1, 5),))), turn(Part(decodes=((1, 6),)), dropped=(1,))], "nothing to read"),
    ],
)
def test_a_course_that_cannot_be(course: list[Turn], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        place(course, 5, 16)


def test_a_policy_that_does_not_say_what_it_moves_is_refused() -> None:
    priced = costs(preset("a10g"), "llama-3-8b")
    with pytest.raises(UsageError, match="cannot be carried out"):
        replay(iter([Request(0, 0.0, 50, 3)]), make("recompute", priced), priced, watch=Taker().take, single_steps=True)
    with pytest.raises(UsageError, match="steps"):
        replay(iter([Request(0, 0.0, 50, 30)]), make("neo", priced), priced, watch=Taker().take)


# -- carried out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", ["part", "none", "all"])
def test_every_iteration_is_carried_out_and_leaves_what_it_should(rig: Rig, offload: str) -> None:
    made = rig.executor(replace(SMALL, offload=offload))
    seconds = made.run(2)
    made.verify()
    spans = made.spans
    assert spans is not None
    assert len(spans.turns) == len(made.turns)
    assert seconds >= spans.total >= sum(spans.turns) - 1e-9
    # never faster than the near side alone, nor before the last request has arrived
    paced = sum(task.near for tasks in made.tasks for task in tasks) * 1e-9
    assert spans.total >= max(paced, max(made._gates) * 1e-9)
    assert max(made._gates) > 0
    decodes = [one for placed in made.placed for what in placed for one in what.decodes]
    assert bool(decodes) is (offload != "none")
    assert (spans.attention > 0.0) is (offload != "none")
    found = made.errors()
    assert found.whole > -1.0
    assert found.work is not None
    assert found.iteration is not None
    assert 0 < found.iterations <= len(made.turns)
    assert 0.0 <= made.paced < 1.0


def test_what_is_paced_has_no_error_of_its_own(rig: Rig) -> None:
    """Phases without copy or attention end when the simulation says: they would make any error look small."""
    made = rig.executor(SMALL)
    real = [
        any(task.copy is not None or task.step is not None for task in tasks) for tasks in made.tasks
    ]  # fmt: skip
    assert 0 < sum(real) < len(real)
    working = [task for tasks in made.tasks for task in tasks if task.copy is not None or task.step is not None]
    whole = sum(turn.end - turn.begin for turn in made.turns)
    assert made.paced == pytest.approx(1.0 - sum(task.simulated for task in working) / whole)
    charged = [sum(task.charged for task in tasks if task in working) for tasks in made.tasks]
    assert [amount > 0.0 for amount in charged] == real
    made.run()
    spans = made.spans
    assert spans is not None
    assert [took > 0.0 for took in spans.worked] == real
    assert sum(spans.worked) >= spans.attention
    made.spans = replace(spans, total=1.1 * made.simulated, worked=tuple(2.0 * amount for amount in charged))
    found = made.errors()
    assert found.iterations == sum(real)
    assert (found.whole, found.work, found.iteration) == pytest.approx((0.1, 1.0, 1.0))
    paced = rig.executor(replace(SMALL, offload="none", near_tokens=4000, rate=None))
    paced.run()
    found = paced.errors()
    assert (found.work, found.iteration, found.iterations) == (None, None, 0)
    assert paced.paced == 1.0


def test_what_is_swapped_moves_before_the_layers(rig: Rig) -> None:
    made = rig.executor(SMALL)
    swaps = [
        (number, tasks) for number, (turn, tasks) in enumerate(zip(made.turns, made.tasks, strict=True))
        if turn.parts[0].into or (turn.parts[0].out and not turn.phases[0].compute + turn.phases[0].hbm)
    ]  # fmt: skip
    assert swaps
    for number, tasks in swaps:
        layers = made.turns[number].phases[0].repeat
        assert all(task.copy is not None and not task.near and task.step is None for task in tasks[:layers])
        assert all(task.near for task in tasks[layers:])


def test_a_copy_that_is_left_out_is_found(rig: Rig) -> None:
    made = rig.executor(SMALL)
    made.run()
    made.verify()
    place_of = [
        (number, i) for number, tasks in enumerate(made.tasks) for i, task in enumerate(tasks)
        if task.copy is not None and any(copied.out for what in made.placed[number] for copied in what.copies)
    ]  # fmt: skip
    assert place_of
    number, i = place_of[0]
    broken = list(made.tasks[number])
    broken[i] = replace(broken[i], copy=None)
    made.tasks[number] = tuple(broken)
    rig.memory.fill()
    made.run()
    with pytest.raises(VerifyError):
        made.verify()


def test_a_page_that_changed_is_found(rig: Rig) -> None:
    made = rig.executor(replace(SMALL, offload="all"))
    made.run()
    block = next(iter(made._wanted()))
    rig.memory.far_bytes(1).reshape(2, SMALL.far_blocks, -1)[1, block, 7] ^= 1
    with pytest.raises(VerifyError, match="layer 1"):
        made.verify()


def test_nothing_to_carry_out(rig: Rig) -> None:
    with pytest.raises(UsageError, match="nothing to carry out"):
        Executor([], rig.memory, rig.attention, rig.mover)
    with pytest.raises(KvbenchError, match="nothing was carried out"):
        rig.executor(SMALL).errors()
    with pytest.raises(UsageError, match="not every request fits"):
        replace(SMALL, prompt=300).simulate(replace(SMALL, prompt=300).costs(rig.measured))
    with pytest.raises(UsageError):
        replace(SMALL, requests=0)


def test_the_copying_thread_hands_its_errors_on(rig: Rig) -> None:
    copy = rig.memory.copy(rig.memory.shipped(0, 1), rig.attention.team)  # a team of another thread
    assert copy is not None
    rig.mover.begin(copy)
    with pytest.raises(KvbenchError, match="thread that built it"):
        rig.mover.wait()


def test_a_real_near_side_is_measured_and_carried_out(rig: Rig) -> None:
    trial = replace(SMALL, offload="all", machine=BLAS, tokens=96)
    shape = trial.kv_shape()
    near = trial.near(sorted(os.sched_getaffinity(0))[-1])
    assert near is not None
    with (
        blas_threads(1), near, host_buffer(trial.nbytes(), "4k", kind=None) as buffer,
        Team([min(os.sched_getaffinity(0))]) as team,
    ):  # fmt: skip
        memory, attention = trial.memory(buffer.address), DecodeAttention(shape, team)
        made = open_pair(trial, memory, attention, rig.mover, near)
        beside = measure_beside(memory, attention, near)
        memory.fill()
        assert set(beside.sources) == {"near_cpu", "cpu_near"}
        assert beside.near_cpu >= 1.0
        assert beside.cpu_near >= 1.0
        priced = trial.costs(made.measured, None, beside)
        assert priced.contention is beside
        done: list[Part] = []
        inner = near._do

        def watched(part: Part, layer: int) -> None:
            done.append(part)
            inner(part, layer)

        near._do = watched  # type: ignore[method-assign]
        made.executor.run()
        near._do = inner  # type: ignore[method-assign]
        made.executor.verify()
        wanted = [task.part for tasks in made.executor.tasks for task in tasks if task.near]
        assert done == wanted
        assert sum(sum(part.prompts) for part in done) == trial.layers * sum(r.input_tokens for r in trial.trace())
        tokens = sum(sum(part.linear) for part in done)
        assert tokens == trial.layers * sum(r.input_tokens + r.output_tokens - 1 for r in trial.trace())
        assert sum(sum(part.heads) for part in done) == sum(r.output_tokens for r in trial.trace())
        for part in (Part(linear=(97,)), Part(prompts=(81,)), Part(near=1)):
            with pytest.raises(UsageError):
                near.check(part)
        near._do = lambda part, layer: None  # type: ignore[method-assign]
        with pytest.raises(VerifyError, match="near side"):
            made.executor.verify()
        near._do = inner  # type: ignore[method-assign]
        near.begin(Part(linear=(1,)), 99)
        with pytest.raises(IndexError):
            near.wait()
    with pytest.raises(UsageError, match="all with blas"):
        replace(SMALL, machine=BLAS)


# -- its costs -----------------------------------------------------------------------------------------------------


def test_the_replay_charges_what_was_measured(rig: Rig) -> None:
    measured = rig.measured
    priced = SMALL.costs(measured)
    requests, tokens = measured.cdec.requests[1], measured.cdec.tokens[3]
    assert priced.cpu_attention(requests, tokens) == measured.cdec.cells[1][3]
    assert priced.launch == measured.launch
    assert priced.evict(100, None, "ideal") == pytest.approx(100 * priced.layer_token_bytes / measured.copy)
    plain = costs(preset("h100"), "llama-3-8b")
    for n in (1, 7, 64, 300, 4096):
        assert priced.linear(n).seconds == pytest.approx(plain.linear(n).seconds, rel=0.05)
        assert priced.decode_attention(3, n).seconds == pytest.approx(plain.decode_attention(3, n).seconds, rel=0.05)
    assert priced.prefill_attention(50, 0).seconds == pytest.approx(plain.prefill_attention(50, 0).seconds, rel=0.1)
    assert priced.contention.none


def test_cells_exist_where_every_request_has_a_token(rig: Rig) -> None:
    plane = rig.measured.cdec
    for requests, row in zip(plane.requests, plane.cells, strict=True):
        for tokens, cell in zip(plane.tokens, row, strict=True):
            fits = tokens >= requests and requests * -(-(tokens // requests) // 16) <= SMALL.far_blocks
            assert (cell is not None) is fits
    assert rig.measured.copy > 0.0


def test_opening_a_pair_does_all_of_it(rig: Rig) -> None:
    made = open_pair(SMALL, rig.memory, rig.attention, rig.mover)
    assert made.outcome.tally.finished == SMALL.requests
    assert made.executor.simulated == pytest.approx(made.outcome.tally.end - made.outcome.tally.first_arrival)  # type: ignore[operator]
    assert np.isfinite(made.executor.run())
