"""Real layers on a CPU in all four orders: the same hidden states, whatever is cut, queued or moved."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvbench.attention.shapes import Shape
from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.team import Team
from kvbench.memory.host import host_buffer
from kvbench.model.layers import Layer, LayerShape
from kvbench.systems.neo import near_torch as nt
from kvbench.systems.neo.far import FarSide, far_bytes
from kvbench.systems.neo.pipeline import run_pass
from kvbench.systems.neo.schedule import Batch, Schedule, asymmetric, serial, simple, symmetric
from tests.systems.neo.rigs import Clocked

torch = pytest.importorskip("torch")

OF = LayerShape("test", 128, 2, 4, 2, 64, 192, True, "rms", 64, "none")
KV = Shape("bf16", OF.heads, OF.kv_heads, OF.head_dim, 16)
WORK, CONTEXT, LAYERS = Batch(prefill=5, gpu=3, cpu=4), 20, 2


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return nt.make_layers(OF, LAYERS, "bf16", "cpu", 1)


@pytest.fixture(scope="module")
def far() -> Iterator[FarSide]:
    nbytes = far_bytes(KV, WORK.cpu, CONTEXT, LAYERS)
    with Team([min(os.sched_getaffinity(0))]) as team, host_buffer(nbytes, "4k", kind=None) as buffer:
        yield FarSide(KV, WORK.cpu, CONTEXT, LAYERS, team, buffer.address, staged=False)


def outputs(order: Schedule, layers: list[Layer], far: FarSide) -> list[object]:
    far.arrange(order.batches)
    far.spoil()
    near = nt.TorchNear(layers, order.batches, CONTEXT, far, dtype="bf16", device="cpu", seed=2)
    run_pass(order, near, far, Clocked())
    return list(near.outputs())


@pytest.mark.parametrize("order", [symmetric(LAYERS, WORK), asymmetric(LAYERS, WORK, 1), asymmetric(LAYERS, WORK, 4)])
def test_every_order_leaves_the_same_hidden_states(order: Schedule, layers: list[Layer], far: FarSide) -> None:
    want = outputs(simple(LAYERS, WORK), layers, far)
    assert [tuple(x.shape) for x in want] == [(5, 128), (3, 128), (4, 128)]  # type: ignore[attr-defined]
    nt.agree(outputs(order, layers, far), want)  # type: ignore[arg-type]
    nt.agree(outputs(serial(LAYERS, order.batches), layers, far), want)  # type: ignore[arg-type]


def test_attention_that_did_not_run_is_found(layers: list[Layer], far: FarSide) -> None:
    class Asleep:
        def attend(self, batch: int, layer: int) -> None:
            pass

    order = simple(LAYERS, WORK)
    want = outputs(order, layers, far)
    far.spoil()
    near = nt.TorchNear(layers, order.batches, CONTEXT, far, dtype="bf16", device="cpu", seed=2)
    run_pass(order, near, Asleep(), Clocked())
    with pytest.raises(VerifyError, match="CPU decodes"):
        nt.agree(near.outputs(), want)  # type: ignore[arg-type]


def test_batches_of_another_schedule_are_refused(layers: list[Layer], far: FarSide) -> None:
    order = simple(LAYERS, WORK)
    far.arrange(order.batches)
    near = nt.TorchNear(layers, order.batches, CONTEXT, far, dtype="bf16", device="cpu")
    with pytest.raises(UsageError, match="other batches"):
        near.begin(symmetric(LAYERS, WORK))
    with pytest.raises(UsageError, match="other batches"):
        nt.TorchNear(layers, [Batch(gpu=1)], CONTEXT, far, dtype="bf16", device="cpu")
