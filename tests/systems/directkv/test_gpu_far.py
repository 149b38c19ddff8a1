"""Attention over far KV on the fake driver: addresses, order of copies and work, and the checks that prove them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvbench.attention.shapes import Shape
from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.memory.cuda.buffers import hbm, pinned
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.systems.directkv.attention_traffic import Attention
from kvbench.systems.directkv.gpu_attention import METHODS, LayerSwap, far_pointer, open_far_decode
from kvbench.systems.directkv.gpu_fused import GpuFused
from kvbench.systems.directkv.gpu_prefill import ORDERS, GpuPrefill, check_tiles
from tests.suites.gpu_rig import IMAGE, LadderFake, device
from tests.systems.directkv.far_rig import FarKernels, far_kernels

SHAPE = Shape("bf16", 4, 2, 64, 16)
LENGTHS = [40, 17]
PREFILL = Attention(1, 40, 70, 4, 2, 64, 32, 16)


@dataclass(frozen=True, slots=True)
class Opened:
    service: Service
    kernels: Kernels
    stack: ExitStack
    ran: FarKernels
    fake: LadderFake

    def make(self, work: Any) -> None:
        work.submit(self.service.stream)
        self.service.stream.synchronize()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    with device() as (fake, service), ExitStack() as stack:
        kernels = Kernels(service.device, lambda source, arch: IMAGE, stack)
        made = far_kernels(monkeypatch, fake)
        made.before = service.device.synchronize  # type: ignore[method-assign]
        yield Opened(service, kernels, stack, made, fake)


def decode(opened: Opened, method: str, least: int = 1 << 16) -> Any:
    return open_far_decode(
        method, opened.service, opened.kernels, opened.stack.enter_context, SHAPE, LENGTHS, least_bytes=least, seed=3
    )


@pytest.mark.parametrize("method", METHODS)
def test_decode_is_the_models_attention_wherever_kv_lies(opened: Opened, method: str) -> None:
    work = decode(opened, method)
    assert work.layers == 2
    with pytest.raises(VerifyError, match="not written"):
        work.check()
    for _ in range(2):
        work.spoil()
        opened.make(work)
        work.check()
    layer = 2 * work.cache.half
    assert work.buffer == {"in_place": 0, "swap": 2 * layer, "near": work.cache.nbytes}[method]
    assert work.demand_bytes == (0 if method == "near" else work.kv_bytes)
    assert work.cache.buffer.tier == ("hbm" if method == "near" else "pinned")
    reader = work.reader()
    opened.make(reader)
    reader.check()


def test_a_swap_that_copies_another_layer_is_noticed(opened: Opened) -> None:
    work = decode(opened, "swap", least=1 << 17)
    swap = work.submit.__self__
    swap.sources[1] = swap.sources[0]
    opened.make(work)
    with pytest.raises(VerifyError, match="attention is wrong"):
        work.check()


def test_the_order_of_a_swap_is_by_events_alone(opened: Opened) -> None:
    """Each copy waits for the work that read its slot, each piece of work for its copy; the host waits for none."""
    service, seen = opened.service, list[int]()
    source = opened.stack.enter_context(hbm(service, 4 * 64))
    near = opened.stack.enter_context(hbm(service, 2 * 64))
    slots = (near.copy_address, near.copy_address + 64)
    sources = [source.copy_address + 64 * layer for layer in range(4)]
    work = [lambda stream, layer=layer: seen.append(layer) for layer in range(4)]
    swap = LayerSwap(service.device, sources, slots, 64, work, 0, opened.stack.enter_context)
    opened.fake.forget()
    before = service.device.queued
    swap.submit(service.stream)
    assert service.device.queued - before == swap.operations
    assert seen == [0, 1, 2, 3]
    names = [call.name for call in opened.fake.trace() if call.name.startswith(("cuEvent", "cuStream", "cuMemcpy"))]
    start, layer = ["cuEventRecord", "cuStreamWaitEvent"], [
        "cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent", "cuEventRecord"
    ]  # fmt: skip
    again = ["cuStreamWaitEvent", *layer]
    assert names == [*start, *layer, *layer, *again, *again]
    waits = [call.args[:2] for call in opened.fake.trace() if call.name == "cuStreamWaitEvent"]
    records = [call.args[:2] for call in opened.fake.trace() if call.name == "cuEventRecord"]
    # records: start, then loaded and done of each layer; the third copy waits for the first work, and so on
    assert waits[3][1] == records[2][0]
    assert waits[5][1] == records[4][0]
    assert [waits[n][1] for n in (1, 2, 4, 6)] == [records[n][0] for n in (1, 3, 5, 7)]
    service.stream.synchronize()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("causal", [False, True])
def test_prefill_is_float64s_in_every_order(opened: Opened, order: str, causal: bool) -> None:
    shape = replace(PREFILL, causal=causal)
    work = GpuPrefill(order, opened.service, opened.kernels, opened.stack.enter_context, shape, 3, 5)
    with pytest.raises(VerifyError, match="not written"):
        work.check()
    opened.make(work)
    work.check()
    assert work.work_items == (2 if order == "kv_outer" else 2 * 2 * 2)
    assert work.demand == 3 * {"near": 0, "q_outer": work_demand(shape)}.get(order, shape.kv_bytes)
    opened.ran.scale = 1.5
    opened.make(work)
    with pytest.raises(VerifyError, match="attention is wrong"):
        work.check()


def work_demand(shape: Attention) -> int:
    from kvbench.systems.directkv.attention_traffic import q_outer

    return q_outer(shape).demand


@pytest.mark.parametrize("method", ["fused", "separate"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_the_projection_stores_keys_once_or_out_and_back(opened: Opened, method: str, tokens: int) -> None:
    work = GpuFused(method, opened.service, opened.kernels, opened.stack.enter_context, tokens, 48, 2, 2, 64, 9)
    with pytest.raises(VerifyError):
        work.check()
    opened.make(work)
    work.check()
    assert work.unique == 2 * tokens * 64 * 2
    assert work.demand == work.unique * (1 if method == "fused" else 2)
    assert work.operations == (1 if method == "fused" else 2)
    work.spoil()
    opened.ran.kept = False
    with np.errstate(invalid="ignore"):
        opened.make(work)
        with pytest.raises(VerifyError):
            work.check()


def test_a_host_address_that_is_not_the_alias_is_refused(opened: Opened) -> None:
    far = opened.stack.enter_context(pinned(opened.service, 4096))
    assert far_pointer(far) == far.device_address
    with pytest.raises(UsageError, match="not the device's alias"):
        far_pointer(far, (far.device_address or 0) + 64)


def test_tiles_say_how_much_they_need_and_what_fits() -> None:
    wide = replace(PREFILL, block_q=128, block_kv=128)
    with pytest.raises(Unavailable, match=r"128 x 128: 49152 B.*64 x 64 fits"):
        check_tiles(wide, 48 << 10 - 1)
    with pytest.raises(Unavailable, match="no kernel"):
        check_tiles(replace(PREFILL, block_kv=256), 227 << 10)
    check_tiles(PREFILL, 227 << 10)


def test_user_mistakes(opened: Opened) -> None:
    enter = opened.stack.enter_context
    with pytest.raises(UsageError, match="unknown method on a GPU"):
        decode(opened, "stream")
    with pytest.raises(UsageError, match="not a prefill on a GPU"):
        GpuPrefill("inside_out", opened.service, opened.kernels, enter, PREFILL, 1, 1)
    with pytest.raises(UsageError, match="a projection of nothing"):
        GpuFused("fused", opened.service, opened.kernels, enter, 0, 48, 2, 2, 64, 9)
