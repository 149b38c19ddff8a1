"""The CPU's side: attention on what has arrived, the append, and the proof that nothing ran before its input."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvbench.attention.shapes import Shape
from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.team import Team
from kvbench.memory.host import host_buffer
from kvbench.model.paged import attend
from kvbench.systems.neo.far import FarSide, far_bytes
from kvbench.systems.neo.near import PacedNear
from kvbench.systems.neo.pipeline import run_pass
from kvbench.systems.neo.schedule import Batch, Stage, asymmetric, simple, symmetric
from tests.systems.neo.rigs import Clocked

KV = Shape("bf16", 8, 2, 64, 16)
REQUESTS, CONTEXT, LAYERS = 6, 33, 2
WORK = Batch(prefill=4, gpu=2, cpu=REQUESTS)


@pytest.fixture(scope="module")
def far() -> Iterator[FarSide]:
    nbytes = far_bytes(KV, REQUESTS, CONTEXT, LAYERS)
    with Team([min(os.sched_getaffinity(0))]) as team, host_buffer(nbytes, "4k", kind=None) as buffer:
        yield FarSide(KV, REQUESTS, CONTEXT, LAYERS, team, buffer.address, seed=3)


def test_bytes_are_whole_pages() -> None:
    assert far_bytes(KV, 1, 33, 1) == 3 * 16 * KV.token_bytes


def test_attention_is_that_of_the_kv_with_the_new_token_in_it(far: FarSide) -> None:
    far.arrange([Batch(cpu=2), Batch(cpu=4)])
    far.carry(Stage("qkv", 1, 1))
    far.attend(1, 1)
    k_cache, v_cache, drawn = far._layers[1]
    row, ends = 2 + 3, far.near[1, 1]  # the last request of batch 1
    used = drawn.table[row, : int(drawn.pages[row])]
    k, v = (
        KV.floats(half).swapaxes(1, 2).reshape(-1, 2, 64)[:CONTEXT] for half in KV.unpack(k_cache[used], v_cache[used])
    )
    assert np.array_equal(k[-1], KV.floats(ends.k)[3])
    assert np.array_equal(v[-1], KV.floats(ends.v)[3])
    want = np.concatenate([attend(KV.floats(ends.q)[3, 4 * h : 4 * h + 4], k[:, h], v[:, h], 0.125)[0] for h in (0, 1)])
    got = far.ends[1].out[3]
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 4e-3


@pytest.mark.parametrize("mode", ["simple", "symmetric", "asymmetric"])
def test_a_pass_brings_what_one_without_overlap_brings(far: FarSide, mode: str) -> None:
    order = (
        asymmetric(LAYERS, WORK, 2)
        if mode == "asymmetric"
        else {"simple": simple, "symmetric": symmetric}[mode](LAYERS, WORK)
    )
    far.arrange(order.batches)
    with PacedNear({f"{s.kind}{s.batch}": 5e-5 for s in order.stages if s.lane != "cpu"}, far.carry) as near:
        far.poison()
        run_pass(order, near, far, Clocked())
        far.check()


def test_attention_before_its_tokens_arrive_is_found(far: FarSide) -> None:
    far.arrange([WORK])
    far.poison()
    far.attend(0, 0)
    far.carry(Stage("o", 0, 0))
    with pytest.raises(VerifyError, match="not that of its inputs"):
        far.check()


def test_an_output_of_another_layer_is_found(far: FarSide) -> None:
    far.arrange([WORK])
    far.poison()
    for layer in (0, 1):
        far.carry(Stage("qkv", 0, layer))
        far.attend(0, layer)
        far.carry(Stage("o", 0, 0))
        far.carry(Stage("o", 0, 1))
    with pytest.raises(VerifyError, match=r"ca0\[0\].*other numbers"):
        far.check()


def test_alone_is_seconds_a_layer(far: FarSide) -> None:
    far.arrange([Batch(cpu=2), Batch(cpu=4)])
    assert set(far.alone()) == {0, 1}
    assert min(far.alone().values()) > 0.0
    assert far.kv_bytes(1) == 4 * CONTEXT * KV.token_bytes


def test_too_many_requests_are_refused(far: FarSide) -> None:
    with pytest.raises(UsageError, match=r"got 7, expected 1\.\.6"):
        far.arrange([Batch(cpu=REQUESTS + 1)])
    with pytest.raises(UsageError):
        far.arrange([Batch(gpu=2)])
    with pytest.raises(UsageError, match="no KV"):
        FarSide(KV, 0, CONTEXT, LAYERS, far.attention.team, 0)
