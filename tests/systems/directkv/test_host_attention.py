"""Decode attention over far KV on the host: the same numbers in every way, bytes counted, faults noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvbench.attention.shapes import Shape
from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.kernels.team import Team
from kvbench.machine.topology import topology
from kvbench.memory.tiers import parse_tier
from kvbench.systems.directkv.host_attention import METHODS, open_decode
from kvbench.systems.directkv.host_attention_far import UNIT, Flow, NearMemory, Pipe, near_cpus, open_far
from kvbench.systems.directkv.host_attention_plan import DecodePlan, fill_far, part_pages_for
from tests.systems.directkv.attention_rig import Failing, Held, Stale, aligned, far_of

SHAPE = Shape("bf16", 8, 2, 64, 16)  # a page of 4 KiB
RAGGED = DecodePlan(SHAPE, (70, 1, 33), 3, 2, seed=4)


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(topology().measuring_cpus(1)) as made:
        yield made


@pytest.mark.parametrize("tier", ["dram", "file"])
@pytest.mark.parametrize("method", METHODS)
def test_every_way_is_the_models_attention(team: Team, tmp_path: Path, tier: str, method: str) -> None:
    with ExitStack() as stack:
        far = far_of(tier, RAGGED.nbytes, stack, tmp_path)
        fill_far(RAGGED, far)
        near = NearMemory(stack.enter_context)
        work = open_decode(method, RAGGED, far, team, near, stack.enter_context)
        with pytest.raises(VerifyError, match="nothing was run"):
            work.verify()
        work.run(2)
        work.verify()
        assert [out.shape for out in work.out] == [(3, 8, 64)] * 3
        assert near.held == work.buffer
        assert near.resident is None or near.resident >= work.buffer
        part = 2 * RAGGED.half
        rings = {"in_place": 0, "near": RAGGED.nbytes, "swap": 2 * RAGGED.layer_bytes, "stream": 8 * part}
        assert work.buffer == rings[method]
        if method in ("stream", "swap"):
            assert work.tally.reads == RAGGED.nbytes
        if tier == "dram":
            assert work.link() == {"in_place": RAGGED.kv_bytes, "near": 0}.get(method, RAGGED.nbytes)


def test_ways_agree_but_for_weights_rounded_to_bfloat16(team: Team) -> None:
    with ExitStack() as stack:
        far = Held(RAGGED.nbytes)
        fill_far(RAGGED, far)
        found = []
        for method in METHODS:
            work = open_decode(method, RAGGED, far, team, NearMemory(stack.enter_context), stack.enter_context)
            work.run(1)
            found.append(np.stack(work.out))
        for other in found[1:]:
            assert np.linalg.norm(other - found[0]) <= 4e-3 * np.linalg.norm(found[0])


def test_the_plan_names_every_block_once_and_pads_to_whole_parts() -> None:
    assert RAGGED.parts == (3, 1, 2)
    assert RAGGED.layer_bytes == 6 * 2 * 2 * SHAPE.page_bytes
    assert RAGGED.kv_bytes == 104 * SHAPE.token_bytes * 3
    blocks = []
    for row, parts in zip(RAGGED.table(0), RAGGED.parts, strict=True):
        blocks += row[: 2 * parts].tolist()
    assert len(set(blocks)) == 12
    assert all(block % 4 < 2 for block in blocks)  # the other half of a part holds its values
    assert RAGGED.table(0).tobytes() != RAGGED.table(1).tobytes()


def test_parts_are_whole_units_and_no_larger_than_the_sequence() -> None:
    assert part_pages_for(SHAPE, 16) == 1
    assert part_pages_for(SHAPE, 1 << 20) * 2 * SHAPE.page_bytes == 1 << 20
    small = Shape("bf16", 1, 1, 64, 8)  # pages of 1 KiB: four make a unit
    assert part_pages_for(small, 8) == 4


@pytest.mark.parametrize("method", ["stream", "swap"])
def test_a_part_that_is_not_what_far_memory_holds_is_noticed(team: Team, method: str) -> None:
    plan = DecodePlan(SHAPE, (64,), 2, 1)
    with ExitStack() as stack:
        far = Stale(plan.nbytes)
        fill_far(plan, far)
        work = open_decode(method, plan, far, team, NearMemory(stack.enter_context), stack.enter_context)
        work.run(1)
        work.verify()
        far.wrong_from = plan.layer_bytes
        work.run(1)
        with pytest.raises(VerifyError, match="attention is wrong"):
            work.verify()


def test_an_error_of_a_reader_reaches_the_caller_and_the_next_pass_works(team: Team) -> None:
    plan = DecodePlan(SHAPE, (64,), 2, 1)
    with ExitStack() as stack:
        far = Failing(plan.nbytes, 1 << 30)
        fill_far(plan, far)
        work = open_decode("stream", plan, far, team, NearMemory(stack.enter_context), stack.enter_context)
        far.at = 3
        with pytest.raises(Unavailable, match="the device failed"):
            work.run(1)
        far.at = 1 << 30
        work.run(1)
        work.verify()


def test_parts_come_in_order_whatever_the_readers() -> None:
    far, seen = Held(8 * UNIT), []
    for i in range(8):
        far.write(i * UNIT, np.full(UNIT, i, np.uint8))
    slots = [aligned(UNIT) for _ in range(4)]
    order = [3, 1, 7, 0, 0, 6, 2, 5, 4]

    def consume(flow: Flow) -> None:
        for _ in order:
            seen.append(int(flow.slots[flow.take()][-1]))
            flow.give()

    for readers in (1, 2, 4):
        seen.clear()
        with Pipe(far, slots, readers) as pipe:
            pipe.run([(i * UNIT, UNIT) for i in order], consume)
        assert seen == order


def test_a_consumer_that_fails_leaves_the_pipe_usable() -> None:
    far = Held(8 * UNIT)
    with Pipe(far, [aligned(UNIT) for _ in range(2)], 2) as pipe:

        def broken(flow: Flow) -> None:
            flow.take()
            raise ValueError("stop")

        parts = [(i * UNIT, UNIT) for i in range(8)]
        with pytest.raises(ValueError, match="stop"):
            pipe.run(parts, broken)
        taken: list[int] = []

        def whole(flow: Flow) -> None:
            for _ in parts:
                taken.append(flow.take())
                flow.give()

        pipe.run(parts, whole)
        assert taken == [0, 1] * 4


def test_user_mistakes_are_said_before_memory_is_touched(team: Team) -> None:
    for lengths, layers in (((0,), 1), ((), 1), ((5,), 0)):
        with pytest.raises(UsageError, match="decode over nothing"):
            DecodePlan(SHAPE, lengths, layers, 1)
    with pytest.raises(UsageError, match="a part of far KV"):
        DecodePlan(Shape("bf16", 1, 1, 64, 8), (5,), 1, 1)  # 1 KiB of keys
    with ExitStack() as stack:
        far = Held(RAGGED.nbytes)
        with pytest.raises(UsageError, match="unknown method"):
            open_decode("twice", RAGGED, far, team, NearMemory(stack.enter_context), stack.enter_context)
        small = NearMemory(stack.enter_context, budget=RAGGED.layer_bytes)
        with pytest.raises(UsageError, match="near budget does not hold"):
            open_decode("swap", RAGGED, far, team, small, stack.enter_context)
        assert small.held == 0
        with pytest.raises(UsageError, match="slots do not divide"):
            Pipe(far, [aligned(UNIT)], 2)
        with pytest.raises(UsageError, match="not a far tier"):
            open_far(parse_tier("hbm"), 4096, stack.enter_context, lambda n: 0, None, 1)
        with pytest.raises(Unavailable, match="does not have the tier"):
            open_far(parse_tier("dram@99"), 4096, stack.enter_context, lambda n: 0, None, 1)


def test_the_cpus_are_those_of_the_near_node() -> None:
    found = topology()
    assert near_cpus(parse_tier("dram"), found) == found.measuring_cpus("all")
    nodes = [node for node in found.nodes if node.cpus]
    if nodes:
        assert set(near_cpus(parse_tier(f"dram@{nodes[0].id}"), found)) <= set(nodes[0].cpus)
    with pytest.raises(Unavailable, match="no CPU of the near node"):
        near_cpus(parse_tier("dram@99"), found)
