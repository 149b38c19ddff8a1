"""Graph replays on the fake device: other blocks at every replay, by update, by recording again, by a table."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.memory.cuda.driver import CudaError
from kvbench.systems.directkv.gpu_replay import MODES, CopyGraph, Replay
from tests.systems.directkv.gemm_rig import Bed, bed

BLOCKS, NBYTES, POOL = 7, 4096, 20


def made(b: Bed, mode: str, blocks: int = BLOCKS) -> Replay:
    return Replay(b.service, b.stack.enter_context, mode, blocks, NBYTES, POOL, 3)  # type: ignore[arg-type]


def step(b: Bed, work: Replay) -> None:
    work.change(work.draw())
    work.submit(b.stream)
    b.stream.synchronize()


@pytest.mark.parametrize("mode", MODES)
def test_every_replay_fetches_the_blocks_of_that_step(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with bed(monkeypatch) as b:
        work = made(b, mode)
        seen = set()
        for _ in range(5):
            work.spoil()
            before = b.stream.queued
            step(b, work)
            assert b.stream.queued - before == work.operations
            work.check()
            seen.add(tuple(work.ids))
        assert len(seen) == 5
        assert work.link_bytes == BLOCKS * NBYTES
    assert b.fake.live() == {}


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_of_the_last_step_is_noticed(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with bed(monkeypatch) as b:
        work = made(b, mode)
        step(b, work)
        work.ids = np.roll(work.ids, 1)  # what was asked for now, while the graph still has the last addresses
        work.submit(b.stream)
        b.stream.synchronize()
        with pytest.raises(VerifyError, match=rf"graph_replay {mode}.*7 of 7 blocks, slot 0 first"):
            work.check()


def test_what_the_host_does_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update is a call a node, a new record two more than that and what gives the old one back, a table none."""
    counts = {}
    for mode in MODES:
        with bed(monkeypatch) as b:
            work = made(b, mode)
            b.fake.forget()
            work.change(work.draw())
            counts[mode] = b.fake.names()
    assert counts["update"] == ["cuGraphExecMemcpyNodeSetParams"] * BLOCKS
    assert counts["rerecord"] == [
        "cuGraphExecDestroy", "cuGraphDestroy", "cuGraphCreate", *["cuGraphAddMemcpyNode"] * BLOCKS,
        "cuGraphInstantiateWithFlags",
    ]  # fmt: skip
    assert counts["kernel"] == []


@pytest.mark.parametrize(("mode", "call"), [
    ("update", "cuGraphExecMemcpyNodeSetParams"), ("rerecord", "cuGraphAddMemcpyNode"),
    ("rerecord", "cuGraphInstantiateWithFlags"), ("kernel", "cuGraphLaunch"), ("update", "cuGraphLaunch"),
])  # fmt: skip
def test_a_refused_call_is_an_error_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, mode: str, call: str
) -> None:
    with bed(monkeypatch) as b:
        work = made(b, mode)
        b.fake.fail(1, 1, call=call)
        with pytest.raises(CudaError, match=call):
            step(b, work)
    assert b.fake.live() == {}


def test_a_kernel_that_leaves_a_block_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with bed(monkeypatch) as b:
        work = made(b, "kernel")
        work.spoil()
        b.fake._c.fragments_lost(ctypes.c_uint64(1))
        step(b, work)
        b.fake._c.fragments_lost(ctypes.c_uint64(0))
        with pytest.raises(VerifyError, match="1 of 7 blocks, slot 6 first"):
            work.check()


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with bed(monkeypatch) as b:
        with pytest.raises(UsageError, match="unknown way to replay"):
            made(b, "telepathy")
        with pytest.raises(UsageError, match="not blocks of a pool"):
            made(b, "update", POOL + 1)
        with pytest.raises(UsageError, match="a graph of nothing"):
            CopyGraph(b.service.device, 0, 16)
        with pytest.raises(UsageError, match="never recorded"):
            CopyGraph(b.service.device, 1, 16).submit(b.stream)
    with bed(monkeypatch, driver_version=11080) as b, pytest.raises(Unavailable, match="CUDA 12"):
        made(b, "kernel")
