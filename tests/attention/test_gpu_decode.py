"""Decode attention on the fake driver: buffers, tables, launches and the check, with the kernels' references on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvbench.attention import gpu
from kvbench.attention.gpu import Cache, CacheReader, TorchDecode, TritonDecode, cut, open_decode
from kvbench.attention.shapes import Shape
from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.transport import paged_torch
from tests.attention.decode_rig import Decoder, decoder
from tests.needs import missing_module, require
from tests.suites.gpu_rig import IMAGE, device

SHAPE = Shape("bf16", 8, 2, 64, 16)
LENGTHS = [40, 0, 300, 17]


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened fake device."""

    service: Service
    kernels: Kernels
    stack: ExitStack
    ran: Decoder

    def cache(self, shape: Shape = SHAPE, lengths: list[int] = LENGTHS, least: int = 1) -> Cache:
        """Return a cache of two layers, or of as many as hold ``least`` bytes."""
        return Cache(self.service, self.stack.enter_context, shape, lengths, least, "shuffled", 5)

    def work(self, cache: Cache, splits: int | None = None) -> TritonDecode:
        """Return our kernels over ``cache``."""
        return TritonDecode(cache, self.kernels, self.stack.enter_context, splits)

    def make(self, work: Any) -> None:
        """One pass, waited for."""
        work.submit(self.service.stream)
        self.service.stream.synchronize()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    with device() as (fake, service), ExitStack() as stack:
        kernels = Kernels(service.device, lambda source, arch: IMAGE, stack)
        yield Opened(service, kernels, stack, decoder(monkeypatch, fake))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("splits", [None, 1, 5])
def test_a_step_is_the_models_attention(opened: Opened, dtype: str, splits: int | None) -> None:
    shape = Shape(dtype, 8, 2, 64, 16)  # type: ignore[arg-type]
    cache = opened.cache(shape, least=3 * sum(-(-n // 16) for n in LENGTHS) * shape.page_bytes)
    work = opened.work(cache, splits)
    assert work.layers == 2
    assert work.operations == (2 if work.splits == 1 else 4)
    assert work.kv_bytes == 2 * sum(LENGTHS) * 2 * 2 * 64 * shape.array_dtype.itemsize
    assert work.flops == 2 * 4 * sum(LENGTHS) * 8 * 64
    assert work.work_items == 2 * sum(-(-n // work.chunk) for n in LENGTHS)
    opened.make(work)
    work.check()
    for layer in range(2):
        out, lse = work.outputs(layer)
        assert not out[1].any()
        assert np.isneginf(lse[1]).all()
        assert np.isfinite(lse[[0, 2, 3]]).all()


def test_a_pass_that_does_nothing_or_loses_a_token_is_noticed(opened: Opened) -> None:
    work = opened.work(opened.cache(lengths=[4096, 100]))
    with pytest.raises(VerifyError, match="not written"):
        work.check()
    opened.make(work)
    work.check()
    work.spoil()
    with pytest.raises(VerifyError, match="not written"):
        work.check()
    opened.ran.lost = 1  # 1 of 4096: the output hardly moves, the log-sum-exp does
    opened.make(work)
    with pytest.raises(VerifyError, match="attention is wrong"):
        work.check()


def test_layers_differ_in_tables_and_content(opened: Opened) -> None:
    cache = opened.cache(lengths=[64] * 3, least=1 << 18)
    assert cache.layers > 2
    tables = {batch.table.tobytes() for batch in cache.batches}
    assert len(tables) == cache.layers
    ends = {opened.service.read(cache.keys(layer), 64).tobytes() for layer in range(cache.layers)}
    assert len(ends) == cache.layers
    k, v = cache.floats(cache.layers - 1, 2, 1)
    assert k.shape == v.shape == (64, 64)
    for x in (k, v):
        assert 0.5 <= float(np.abs(x).min()) <= float(np.abs(x).max()) < 2.0
    assert not np.array_equal(k, v)


def test_the_ceiling_reads_every_word_of_the_cache(opened: Opened) -> None:
    work = opened.work(opened.cache())
    reader = work.reader()
    assert isinstance(reader, CacheReader)
    assert reader.nbytes == work.cache.nbytes
    with pytest.raises(VerifyError, match="not every word"):
        reader.check()
    opened.make(reader)
    reader.check()
    opened.ran.fake.missing(8)  # type: ignore[attr-defined]
    opened.make(reader)
    with pytest.raises(VerifyError, match="not every word"):
        reader.check()


def test_parts_are_equal_and_enough_for_the_device() -> None:
    one = cut([65536], 8, 32, 132)
    eight = cut([8192] * 8, 8, 32, 132)
    assert one[1] == eight[1]
    assert one[0] == 8 * eight[0]
    assert one[0] * 8 >= 132 * gpu.ITEMS_PER_SM // 2
    assert cut([1], 1, 32, 132) == (1, gpu.LEAST_CHUNK)
    for lengths, tile in (([4097, 3], 64), ([100_000, 1, 1], 16)):
        splits, chunk = cut(lengths, 4, tile, 2)
        assert chunk % tile == 0
        assert splits * chunk >= max(lengths) > (splits - 1) * chunk


@pytest.mark.parametrize(
    ("impl", "lengths", "words"),
    [
        ("flash", [4], "unknown form on a GPU, got 'flash'"),
        ("kvbench", [0, 0], "a batch without a token"),
        ("kvbench", [-1, 5], "lengths"),
        ("torch_sdpa", [16, 32], "ragged lengths"),
        ("torch_sdpa", [20], "ragged lengths"),
    ],
)
def test_mistakes_are_one_line(opened: Opened, impl: str, lengths: list[int], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        open_decode(impl, opened.service, opened.kernels, opened.stack.enter_context, SHAPE, lengths, least_bytes=1)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="splits"):
        opened.work(opened.cache(), 0)


def test_torch_without_a_gpu_is_unavailable(opened: Opened) -> None:
    torch_or_skip()
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    with pytest.raises(Unavailable, match="torch sees no GPU"):
        open_decode(
            "torch_sdpa", opened.service, opened.kernels, opened.stack.enter_context, SHAPE, [32], least_bytes=1
        )


def torch_or_skip() -> None:
    require("torch", missing_module("torch"))


def test_torch_reads_the_same_bytes_as_dense_keys_and_values(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_or_skip()
    import torch

    def tensor(self: TorchDecode, address: int, nbytes: int) -> torch.Tensor:
        return torch.from_numpy(opened.service.read(address, nbytes))

    monkeypatch.setattr(paged_torch, "require_torch", lambda: None)
    monkeypatch.setattr(gpu, "_gpu", lambda ordinal: torch.device("cpu"))
    monkeypatch.setattr(TorchDecode, "_tensor", tensor)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle: handle)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    cache = opened.cache(lengths=[64, 64])
    work = TorchDecode(cache, opened.kernels, opened.stack.enter_context)
    with pytest.raises(VerifyError, match="nothing was run"):
        work.check()
    opened.make(work)
    work.check()
    assert work.kv_bytes == 2 * 64 * SHAPE.token_bytes * cache.layers
    work._out[0] = work._out[0] * 1.1
    with pytest.raises(VerifyError, match="attention is wrong"):
        work.check()
