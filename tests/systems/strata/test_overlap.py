"""The layer-wise schedule on the host: right bytes, honest stamps, and a schedule that reads too early is caught."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.layers import MOST_STEPS, STEP_FLOPS
from kvbench.kernels.team import Team
from kvbench.memory.host import HostBuffer, host_buffer
from kvbench.model.geometry import KVGeometry
from kvbench.model.layout import Pool
from kvbench.systems.strata.overlap import HostOverlap, Pass, Schedule, Words

LAYERS = 5
SHAPE = KVGeometry("small", LAYERS, 2, 64, 2, 2, "test")
POOL = Pool(SHAPE, "layer_first", 16, 7)  # 4 KiB fragments, 56 KiB a layer: two planes of 7
ORDER = np.random.default_rng(3).permutation(POOL.pages).astype(np.int64)


@contextmanager
def made(pool: Pool = POOL, order: Words = ORDER) -> Iterator[tuple[HostOverlap, HostBuffer, HostBuffer]]:
    cpus = sorted(os.sched_getaffinity(0))
    with (
        Team([cpus[0], cpus[-1]]) as team,
        host_buffer(pool.nbytes, seed=5) as far,
        host_buffer(pool.nbytes, kind=None) as near,
    ):
        yield HostOverlap(team, far.address, near.address, pool, order), far, near


def test_a_pass_loads_and_computes_every_layer_in_order() -> None:
    with made() as (work, far, near):
        assert work.arithmetic(1000 * STEP_FLOPS + 3) == 1000 * STEP_FLOPS
        marks: list[str] = []

        class Marks:
            def mark(self, name: str) -> None:
                marks.append(name)

        found = work.run(recorder=Marks())
        assert marks == ["spoilt", "computed"]
        assert found.load.shape == found.compute.shape == (LAYERS, 2)
        for side in (found.load, found.compute):
            assert np.all(np.diff(side.reshape(-1)) >= 0)
        assert np.all(found.compute[:, 0] >= found.load[:, 1]), "a layer is computed after it is loaded"
        assert found.busy + found.stall == pytest.approx(found.total)
        assert 0.0 < found.total <= found.seconds
        source = far.array().reshape(2, LAYERS, POOL.pages, -1)
        wanted = source.transpose(1, 0, 2, 3)[:, :, ORDER]
        assert np.array_equal(near.array().reshape(wanted.shape), wanted)
        work.verify()


def test_the_serial_schedule_computes_nothing_before_the_last_layer_is_there() -> None:
    with made() as (work, _, _):
        found = work.run(Schedule.serial(LAYERS))
        assert found.compute[0, 0] >= found.load[-1, 1]


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
def test_a_removed_wait_is_caught(layer: int) -> None:
    """The loader holds the layer back until it has been computed, so without its wait it is read too early for sure."""
    fine = Schedule.layerwise(LAYERS)
    waits, holds = list(fine.waits), list(fine.holds)
    waits[layer], holds[layer] = -1, layer
    with made() as (work, _, _):
        work.run()
        with pytest.raises(VerifyError, match=rf"layer {layer}.*before it had arrived"):
            work.run(Schedule(tuple(waits), tuple(holds)))
        work.run()


def test_a_wait_for_the_wrong_layer_is_caught_by_the_payload_alone() -> None:
    """Even where the flags say yes: a flag set before the bytes are there leaves a wrong sum."""
    with made() as (work, _, near):
        work.run()
        work.spoil()
        with pytest.raises(VerifyError, match="other bytes"):
            work.compute_alone()
        work.run()
        near.array()[-1] ^= 1
        with pytest.raises(VerifyError, match="layer 4"):
            work.compute_alone()


def test_a_pool_of_few_layers_is_a_schedule_that_holds_loads_back() -> None:
    holds = tuple(max(-1, layer - 2) for layer in range(LAYERS))
    with made() as (work, _, _):
        found = work.run(replace(Schedule.layerwise(LAYERS), holds=holds))
        assert np.all(found.load[2:, 0] >= found.compute[:-2, 1])


def test_each_side_alone_and_both_beside_each_other() -> None:
    with made() as (work, _, _):
        loaded = work.load_alone()
        assert (len(loaded.load), len(loaded.compute)) == (LAYERS, 0)
        assert loaded.beside() is None
        computed = work.compute_alone(2 * LAYERS)
        assert (len(computed.load), len(computed.compute)) == (0, 2 * LAYERS)
        assert computed.total == pytest.approx(computed.busy + computed.stall)
        work.arithmetic(30_000 * STEP_FLOPS)
        both = work.beside(3, 3)
        assert len(both.compute) == 3
        assert len(both.load) > 3, "the loader goes on until the computation is done"
        assert both.load[-1, 1] >= both.compute[-1, 0]
        assert both.beside() is not None
        work.run()


def stamps(*pairs: tuple[int, int]) -> Words:
    return np.array(pairs, np.int64).reshape(-1, 2)


def test_what_the_stamps_of_a_pass_say() -> None:
    found = Pass(1.0, stamps((100, 200), (200, 400)), stamps((200, 350), (400, 500)))
    assert found.total == pytest.approx(400e-9)
    assert found.busy == pytest.approx(250e-9)
    assert found.stall == pytest.approx(150e-9)
    assert (found.per_load, found.per_compute) == pytest.approx((150e-9, 125e-9))
    beside = Pass(1.0, stamps((0, 10), (10, 40), (40, 90)), stamps((5, 25), (25, 45), (45, 65), (65, 85), (85, 105)))
    both = beside.beside()
    assert both is not None
    assert both[0] == pytest.approx((30e-9, 50e-9))
    assert both[1] == pytest.approx((20e-9,) * 4)
    assert Pass(1.0, stamps((0, 10)), stamps((20, 30))).beside() is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: made(Pool(SHAPE, "page_first", 16, 7)), "layer_first"),
        (lambda: made(order=np.zeros(7, np.int64)), "permutation"),
        (lambda: made(order=ORDER.astype(np.int32)), "permutation"),
        (lambda: made(Pool(SHAPE, "layer_first", 1, 7)), "whole"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(change: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words), change():  # type: ignore[attr-defined]
        pass


def test_bad_arguments_of_a_pass_are_refused() -> None:
    with made() as (work, far, near):
        with pytest.raises(UsageError, match="aligned"):
            HostOverlap(work.team, far.address, far.address + 64, POOL, ORDER)
        with pytest.raises(UsageError, match="operations"):
            work.arithmetic((MOST_STEPS + 1) * STEP_FLOPS)
        with pytest.raises(UsageError, match="beside"):
            work.beside(0, 1)
        with pytest.raises(UsageError, match=r"schedule\.waits"):
            work.run(Schedule((9,) * LAYERS, (-1,) * LAYERS))
        assert near.nbytes == work.link_bytes == LAYERS * work.layer_bytes


def test_arithmetic_that_is_not_done_is_noticed() -> None:
    with made() as (work, _, _):
        work.arithmetic(1000 * STEP_FLOPS)
        work.run()
        work.steps += 1
        with pytest.raises(VerifyError, match="arithmetic"):
            work.check()
