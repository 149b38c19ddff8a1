"""The product on a host: right by every method and shape, its link bytes counted, and faults in it caught."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.kernels.blas import one_thread
from kvbench.kernels.team import Team
from kvbench.machine.probe import Fact
from kvbench.machine.topology import read_topology
from kvbench.systems.directkv import host_store
from kvbench.systems.directkv.host_gemm import HostGemm
from kvbench.systems.directkv.host_plan import plan
from kvbench.systems.directkv.host_rig import BLOCK, PANEL, Rig, cores, sides, take, tiled, typical
from kvbench.systems.directkv.shapes import METHODS, Gemm, Method

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="products and loads need a CPU each")

SHAPES = [
    ("dram:dram", (1, 1, 1)), ("dram:dram", (200, 1, 64)), ("dram:dram", (65, 33, 1)), ("dram:file", (100, 140, 130)),
    ("dram:file", (1, 200, 64)),
]  # fmt: skip


@contextmanager
def rigged(gemm: Gemm, pair: str, scratch: Path) -> Iterator[Rig]:
    cpus = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        solo, team = (stack.enter_context(Team(cpus[:count])) for count in (1, 2))
        yield Rig(gemm, pair, solo, team, stack.enter_context, scratch, 3)


def made(rig: Rig, method: Method, **words: int | bool) -> HostGemm:
    return rig.make(method, **words)  # type: ignore[arg-type]


@pytest.mark.parametrize(("pair", "shape"), SHAPES)
def test_every_method_multiplies(pair: str, shape: tuple[int, int, int], tmp_path: Path) -> None:
    with rigged(Gemm(*shape, 32, 32, 32, block=BLOCK), pair, tmp_path) as rig:
        for method in METHODS:
            work = made(rig, method)
            assert work.run() > 0.0
            work.verify()
            assert work.error is not None
            assert work.error <= 1e-6 * shape[2] ** 0.5
        if rig.gemm.columns >= 4:
            for staging, double in ((25, False), (50, False), (50, True)):
                made(rig, "swap", staging=staging, double=double).verify()
        made(rig, "cpu_aware_pipelined", depth=5).verify()


def test_the_whole_product_is_the_oracles(tmp_path: Path) -> None:
    with rigged(Gemm(80, 90, 70, 32, 32, 32, block=BLOCK), "dram:dram", tmp_path) as rig:
        operands = rig.operands
        wanted = operands.a.astype(np.float64) @ operands.b.astype(np.float64)
        for method in METHODS:
            work = made(rig, method)
            work.spoil()
            work.run()
            assert np.allclose(operands.c, wanted, rtol=0, atol=70 * 2.0**-23)


def test_the_counter_meets_the_algebra(tmp_path: Path) -> None:
    with rigged(Gemm(200, 150, 260, 64, 64, 64, block=BLOCK), "dram:file", tmp_path) as rig:
        for method in METHODS[1:]:
            work = made(rig, method)
            assert work.store is not None
            assert work.asked_bytes == work.plan.traffic.link
            if work.store.counter.value is not True:
                pytest.skip(work.store.link_reason)
            assert work.store.link is None
            assert work.store.link_reason == "no pass yet"
            work.run(5)
            assert work.store.link == work.plan.traffic.link
            work.store.forget()
            assert work.store.link is None


def test_memory_has_no_counter(tmp_path: Path) -> None:
    with rigged(Gemm.square(64, 32, block=BLOCK), "dram:dram", tmp_path) as rig:
        work = made(rig, "naive")
        work.run()
        assert work.store is not None
        assert work.store.link is None
        assert "no counter" in work.store.link_reason


def test_a_counter_that_misses_reads_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_store, "probe_counter", lambda file: Fact(False, "read_bytes grew by 0"))
    with rigged(Gemm.square(64, 32, block=BLOCK), "dram:file", tmp_path) as rig:
        work = made(rig, "naive")
        work.run()
        assert work.store is not None
        assert work.store.link is None
        assert "grew by 0" in work.store.link_reason


def test_the_buffer_holds_what_the_plan_says(tmp_path: Path) -> None:
    with rigged(Gemm.square(256, 64, block=BLOCK), "dram:dram", tmp_path) as rig:
        work = made(rig, "cpu_aware_pipelined")
        assert work.plan.near_buffer == 2 * 64 * 64 * 4 == work.near_bytes
        assert made(rig, "resident").near_bytes == rig.gemm.b_bytes
    with rigged(Gemm(40, 33, 40, 32, 32, 32, block=BLOCK), "dram:dram", tmp_path) as rig:
        near = made(rig, "resident")
        assert near.near_bytes == 8192  # two pages, not the 5280 bytes of the algebra


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_wrong_byte_in_the_store_is_caught(method: Method, tmp_path: Path) -> None:
    with rigged(Gemm.square(96, 32, block=BLOCK), "dram:dram", tmp_path) as rig:
        work = made(rig, method)
        work.verify()
        assert work.store is not None
        assert work.store._memory is not None
        work.store._memory.array(np.float32)[5] += 100.0
        with pytest.raises(VerifyError, match="the product is wrong"):
            work.verify()


@pytest.mark.parametrize("fault", ["skipped", "twice", "early"])
def test_a_wrong_schedule_is_caught(fault: str, tmp_path: Path) -> None:
    with rigged(Gemm.square(128, 32, block=BLOCK), "dram:dram", tmp_path) as rig:
        work = made(rig, "cpu_aware")
        rows = work._pass.products.rows
        if fault == "skipped":
            work._pass.products.count -= 1
            work._pass.product_stamps[:] = 0
        elif fault == "twice":
            rows[1] = rows[2]
        else:  # a slot is multiplied before its load: the product of the load before it, or of nothing
            rows[:, 0] -= 1
        with pytest.raises(VerifyError, match="the product is wrong"):
            work.verify()


def test_loads_run_ahead_only_into_free_slots(tmp_path: Path) -> None:
    with rigged(Gemm.square(160, 32, block=BLOCK), "dram:dram", tmp_path) as rig:
        for depth in (1, 2, 3):
            work = made(rig, "cpu_aware_pipelined", depth=depth)
            work.run()
            loads, products = work.stamps
            count = len(work.plan.loads)
            assert (loads[:, 0] <= loads[:, 1]).all()
            assert (products[:, 0] <= products[:, 1]).all()
            assert (products[:count, 0] >= loads[:count, 1]).all()
            assert (loads[depth:, 0] >= products[: count - depth, 1]).all()
            assert (loads[1:, 0] >= loads[:-1, 1]).all()


def test_a_sample_predicts_from_its_own_moment(tmp_path: Path) -> None:
    with rigged(Gemm.square(160, 32, block=BLOCK), "dram:dram", tmp_path) as rig:
        work = made(rig, "cpu_aware")
        assert 8 <= work.probe_count <= len(work.plan.products)
        loads, products = work.costs(1e-9, 1e-12)
        assert sum(loads) == pytest.approx(work.asked_bytes * 1e-9)
        assert sum(products) == pytest.approx(rig.gemm.flops * 1e-12)
        one = take(work)
        assert one.predicted == pytest.approx(one.loads + one.products)  # one slot: in turns
        assert one.measured > 0.0
        assert one.bound in ("link", "compute")
        assert typical([one, one, one]) == one
        assert min(sides(work)) > 0.0
        near = take(made(rig, "resident"))
        assert near.loads == 0.0
        assert near.bound == "compute"


def test_the_hand_over_is_in_the_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rigged(Gemm.square(64, 8, block=BLOCK), "dram:dram", tmp_path) as rig:
        turns, ahead = made(rig, "cpu_aware"), made(rig, "cpu_aware_pipelined")
        assert turns.handover() == made(rig, "resident").handover() == 0.0
        assert 0.0 <= ahead.handover() < 1.0
        before = rig.operands.c.copy()
        ahead._between.run()
        assert np.array_equal(before, rig.operands.c, equal_nan=True)
        monkeypatch.setattr(HostGemm, "handover", lambda self: 5.0 if self.plan.depth > 1 else 0.0)
        assert take(ahead).predicted >= 5.0 * (len(ahead.plan.loads) - 1)
        assert take(turns).predicted < 5.0


def test_tiny_tiles_are_written_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    write = os.pwrite

    def counting(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        return write(fd, data, offset)

    with rigged(Gemm.square(64, 4, block=BLOCK), "dram:file", tmp_path) as rig:
        monkeypatch.setattr(host_store, "WRITE_AT_ONCE", 100 * BLOCK)
        monkeypatch.setattr(os, "pwrite", counting)
        work = made(rig, "cpu_aware")
        laid = [offset for offset in calls if offset % (100 * BLOCK) == 0]
        assert len(work.plan.pieces) == 256
        assert laid[-3:] == [0, 100 * BLOCK, 200 * BLOCK]
        assert len(calls) < 32
        work.verify()


def test_batches_are_every_piece_once_in_order() -> None:
    pieces = plan(Gemm.square(64, 16, block=BLOCK), "naive").pieces
    assert [piece for part in host_store.batches(pieces) for piece in part] == list(pieces)
    assert list(host_store.batches(())) == []


def test_a_node_by_name(tmp_path: Path) -> None:
    topology = read_topology()
    node = topology.nodes[0].id if topology.nodes else None
    if node is None:
        pytest.skip("no NUMA nodes are shown")
    with rigged(Gemm.square(96, 32, block=BLOCK), f"dram@{node}:dram@{node}", tmp_path) as rig:
        work = made(rig, "cpu_aware_pipelined")
        work.run()
        work.verify()
        assert work.store is not None
        assert f"dram@{node}" in work.store.link_reason
    assert set(cores(topology, node)) <= set(topology.nodes[0].cpus)
    with pytest.raises(Unavailable, match="core each"):
        cores(topology, 1000)


def test_panels_are_all_of_n() -> None:
    gemm = tiled(4096, 4096, 4096, PANEL)
    assert (gemm.tile_m, gemm.tile_n, gemm.tile_k) == (384, 4096, 384)
    assert len(plan(gemm, "cpu_aware").pieces) == 11


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    for pair, says in (("dram:dram@77", "no NUMA node 77"), ("hbm:pinned", "hbm|tier")):
        with pytest.raises(Unavailable, match=says), rigged(Gemm.square(64, 32, block=BLOCK), pair, tmp_path):
            pass
    with pytest.raises(Unavailable, match=r"32-bit"), rigged(Gemm(2**33, 8, 8, 8, 8, 8), "dram:dram", tmp_path):
        pass
    with pytest.raises(Unavailable, match="core each"):
        cores(read_topology(), None, 1 << 20)


def test_a_scratch_directory_in_memory_has_no_direct_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no file system in memory")
    with (
        rigged(Gemm.square(64, 32, block=BLOCK), "dram:file", folder) as rig,
        pytest.raises(Unavailable, match=r"no direct reads here.*keeps its files in memory"),
    ):
        made(rig, "naive")


def test_operands_of_another_product_are_refused(tmp_path: Path) -> None:
    with rigged(Gemm.square(64, 32, block=BLOCK), "dram:dram", tmp_path) as rig:
        work = made(rig, "naive")
        with pytest.raises(UsageError, match="another product"):
            HostGemm(plan(Gemm.square(32, 32), "naive"), rig.operands, work.store, rig._teams[0], rig._enter)
        with pytest.raises(UsageError, match="another product"):
            HostGemm(work.plan, rig.operands, None, rig._teams[0], rig._enter)
