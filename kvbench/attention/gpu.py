"""Paged decode attention on a GPU, with PyTorch and a plain read of the same bytes beside it.

The cache is that of engines: [block, kv_head, token, dim], keys and values apart, block tables int32. One launch a
layer attends to the parts of each sequence (:mod:`kvbench.kernels.gpu.decode`), a second merges them where there are
several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvbench.attention.oracles import tolerance
from kvbench.attention.shapes import Array, Shape
from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.gpu.decode_kernels import merge_kernel, split_kernel, tile_of
from kvbench.memory.cuda.buffers import GpuBuffer, hbm
from kvbench.memory.cuda.device import Launch, Stream
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.memory.host import preflight
from kvbench.model.paged import Order, attend, check_batch, make_batch

if TYPE_CHECKING:
    import torch

Enter = Callable[[AbstractContextManager[Any]], Any]
FORMS = ("kvbench", "torch_sdpa")
ITEMS_PER_SM = 8  # programs a multiprocessor gets: more than it holds at once, so that none waits for the last
LEAST_CHUNK = 128  # tokens of a part; below, writing and merging parts shows
MOST_LAYERS = 64  # two launches each, and 500 operations may wait behind the clock's blocker
CHUNK = 64 << 20  # bytes of the cache made on the host at a time
CHECKS = 6  # query groups a verification recomputes in float64
LSE_OFF = 2e-5  # one token more or less of 16,384 changes it by 6e-5
LOG2E = 1.4426950408889634
UNWRITTEN = 0xFF  # a byte of NaN, in any of the dtypes


class Decode(Protocol):
    """A decode step over all layers: queued by ``submit``, made wrong by ``spoil``, proved by ``check``.

    ``kv_bytes`` (unique) and ``flops`` are of one pass over all ``layers``; ``work_items`` programs of one layer.
    """

    kernel: str
    operations: int
    layers: int
    kv_bytes: int
    flops: int
    work_items: int

    def submit(self, stream: Stream) -> None: ...
    def spoil(self) -> None: ...
    def check(self) -> None: ...
    def reader(self) -> CacheReader: ...


def cut(lengths: Sequence[int], kv_heads: int, tile: int, sms: int) -> tuple[int, int]:
    """Return (splits, tokens of a part): as many parts as keep ``sms`` multiprocessors busy, whatever the batch.

    Parts are whole tiles, all of one size, so that long and short sequences make equal pieces of work; a sequence has
    as many as it needs and leaves the others empty.
    """
    total = sum(lengths) * kv_heads
    even = -(-total // max(1, ITEMS_PER_SM * sms))
    chunk = -(-max(LEAST_CHUNK, even) // tile) * tile
    return max(1, -(-max(lengths) // chunk)), chunk


class Cache:
    """``layers`` layers of keys and values, 0.5 <= |x| < 2, and a batch with a table for each, in GPU memory or in what
    ``make`` makes.

    A layer is its blocks of keys, then its blocks of values. ``total`` is the sum of its 64-bit words modulo 2^64.
    Raises UsageError for a batch without a token, Unavailable without room.
    """

    def __init__(
        self, service: Service, enter: Enter, shape: Shape, lengths: Sequence[int], least_bytes: int, order: Order,
        seed: int, make: Callable[..., GpuBuffer] = hbm,
    ) -> None:  # fmt: skip
        if sum(lengths) < 1:
            raise UsageError("a batch without a token", where="attention.gpu", got=list(lengths)[:8])
        self.service, self.shape, self.lengths = service, shape, list(lengths)
        self.blocks = sum(-(-n // shape.page_tokens) for n in lengths)
        self.half = self.blocks * shape.page_bytes
        self.layers = max(1, min(MOST_LAYERS, -(-least_bytes // (2 * self.half))))
        self.nbytes = 2 * self.layers * self.half
        self.batches = [
            make_batch(lengths, shape.page_tokens, self.blocks, order, seed + layer) for layer in range(self.layers)
        ]
        for drawn in self.batches:
            check_batch(drawn.table, drawn.lengths, shape.page_tokens, self.blocks)
        rng = np.random.default_rng(seed)
        wanted = (len(lengths), shape.q_heads, shape.head_dim)
        self.queries = [shape.array(rng.standard_normal(wanted)) for _ in range(self.layers)]
        self.buffer: GpuBuffer = enter(make(service, self.nbytes, seed=seed))
        self.address = self.buffer.copy_address
        self.total = self._fill(seed)

    def _fill(self, seed: int) -> int:
        from kvbench.attention.cpu_work import fill_numbers

        preflight(2 * min(CHUNK, self.nbytes))
        host, total = np.empty(min(CHUNK, self.nbytes), np.uint8), 0
        for number, start in enumerate(range(0, self.nbytes, CHUNK)):
            part = host[: min(CHUNK, self.nbytes - start)]
            fill_numbers(part, self.shape.dtype, seed + number)
            self.service.write(self.address + start, part)
            total += int(part.view("<u8").sum(dtype=np.uint64))
        return total & ((1 << 64) - 1)

    def keys(self, layer: int) -> int:
        """Return the device address at which a step reads a layer's keys; its values are ``half`` bytes behind."""
        return self.home(layer)

    def home(self, layer: int) -> int:
        """Return the device address at which a layer's keys are kept."""
        return int(self.address + 2 * layer * self.half)

    def floats(self, layer: int, b: int, h: int) -> tuple[Any, Any]:
        """Return keys and values of one sequence and KV head, float32 [tokens, dim], as the device holds them."""
        shape, drawn = self.shape, self.batches[layer]
        rows = shape.page_tokens * shape.head_dim
        size = rows * shape.array_dtype.itemsize
        used = drawn.table[b, : int(drawn.pages[b])].tolist()
        found = []
        for base in (self.home(layer), self.home(layer) + self.half):
            pages = [self.service.read(base + n * shape.page_bytes + h * size, size) for n in used]
            raw = np.concatenate(pages) if pages else np.zeros(0, np.uint8)
            values = shape.floats(raw.view(shape.array_dtype)).reshape(-1, shape.head_dim)
            found.append(values[: int(drawn.lengths[b])])
        return found[0], found[1]

    def check(self, layer: int, b: int, h: int, out: Any, lse: Any | None, times: float, where: str) -> None:
        """Raise VerifyError unless ``out`` [group, dim] (and ``lse`` [group]) is attention in float64.

        ``times``: how many times the dtype's tolerance is allowed.
        """
        shape = self.shape
        heads = slice(h * shape.group, (h + 1) * shape.group)
        k, v = self.floats(layer, b, h)
        want, log = attend(shape.floats(self.queries[layer])[b, heads], k, v, 1.0 / math.sqrt(shape.head_dim))
        if not len(k):
            if out.any() or not (lse is None or np.isneginf(lse).all()):
                raise VerifyError("an output without tokens", where=where, got=out.ravel()[:4].tolist())
            return
        error = float((np.linalg.norm(out - want, axis=1) / np.linalg.norm(want, axis=1)).max())
        off = 0.0 if lse is None else float(np.abs(lse - log).max())
        most = times * tolerance(shape.dtype, float(np.abs(log).max()), shape.head_dim)
        if not error <= most or not off <= LSE_OFF:
            raise VerifyError(
                "attention is wrong", where=f"{where}, layer {layer}, sequence {b}, KV head {h}",
                got=f"error {error:.2g}, log-sum-exp off by {off:.2g}", expected=f"at most {most:.2g} and {LSE_OFF:g}",
            )  # fmt: skip

    def places(self) -> list[tuple[int, int, int]]:
        """Return the (layer, sequence, KV head) a verification looks at: first and last of each, and between."""
        batch, heads = len(self.lengths), self.shape.kv_heads
        return [
            (self._spread(i, self.layers), self._spread(i, batch), self._spread(CHECKS - 1 - i, heads))
            for i in range(CHECKS)
        ]  # fmt: skip

    @staticmethod
    def _spread(i: int, count: int) -> int:
        return i * (count - 1) // (CHECKS - 1)


class CacheReader:
    """A plain read of a whole cache by the kernel ``read``: the measured ceiling, ``nbytes`` a pass in one launch."""

    def __init__(self, cache: Cache, kernels: Kernels, enter: Enter) -> None:
        self._cache, self.nbytes = cache, cache.nbytes
        grid = 4 * cache.service.device.facts.sms
        self._sums: GpuBuffer = enter(hbm(cache.service, 8 * grid, seed=1))
        self._launch = kernels.launch("read", grid, self._sums.copy_address, cache.address, cache.nbytes)

    def submit(self, stream: Stream) -> None:
        """Queue one pass."""
        stream.launch(self._launch)

    def check(self) -> None:
        """Raise VerifyError unless the last pass read every word."""
        parts = self._cache.service.read(self._sums.copy_address, self._sums.nbytes).view(np.uint64)
        found = int(parts.sum(dtype=np.uint64))
        if found != self._cache.total:
            raise VerifyError(
                "not every word was read", where="HBM read", got=f"{found:016x}", expected=f"{self._cache.total:016x}"
            )


class TritonDecode:
    """Our kernels over a :class:`Cache`."""

    def __init__(self, cache: Cache, kernels: Kernels, enter: Enter, splits: int | None = None) -> None:
        shape, service = cache.shape, cache.service
        self.cache, self._kernels, self._enter = cache, kernels, enter
        tile = tile_of(shape.dtype, shape.head_dim)
        self.splits, self.chunk = cut(cache.lengths, shape.kv_heads, tile, service.device.facts.sms)
        if splits is not None:
            if splits < 1:
                raise UsageError("splits", where="attention.gpu", got=splits, expected="1 or more")
            self.splits, self.chunk = splits, -(-max(1, -(-max(cache.lengths) // splits)) // tile) * tile
        batch = len(cache.lengths)
        self._rows = batch * shape.q_heads
        width = shape.head_dim + 1  # an output and its log-sum-exp
        self._out = self._floats(self._rows * width * cache.layers)
        self._part = self._floats(self._rows * width * self.splits) if self.splits > 1 else None
        self.layers = cache.layers
        tokens = sum(cache.lengths) * cache.layers
        self.kv_bytes, self.flops = tokens * shape.token_bytes, 4 * tokens * shape.q_heads * shape.head_dim
        self.work_items = shape.kv_heads * sum(-(-n // self.chunk) for n in cache.lengths)
        form = split_kernel(shape.dtype, shape.group, shape.head_dim, shape.page_tokens)
        merge = merge_kernel(shape.group, shape.head_dim)
        self.kernel = f"{form.name} {form.digest()}, {self.splits} parts of {self.chunk} tokens"
        self._launches: list[Launch] = []
        programs = batch * shape.kv_heads * self.splits
        for layer, drawn in enumerate(cache.batches):
            out, lse = self._outputs(layer)
            part, logs = (out, lse) if self._part is None else self._halves(self._part.copy_address, self.splits)
            inputs = [self._array(x) for x in (cache.queries[layer], drawn.table, drawn.lengths)]
            keys = cache.keys(layer)
            self._launches.append(kernels.portable(
                form, programs, part, logs, inputs[0], keys, keys + cache.half, inputs[1], inputs[2],
                LOG2E / math.sqrt(shape.head_dim), shape.kv_heads, self.splits, self.chunk, drawn.table.shape[1],
                shape.page_bytes // 16,
            ))  # fmt: skip
            if self._part is not None:
                self._launches.append(kernels.portable(merge, self._rows, out, lse, part, logs, self.splits))
        self.operations = len(self._launches)
        self.spoil()

    def _floats(self, count: int) -> GpuBuffer:
        made: GpuBuffer = self._enter(hbm(self.cache.service, 4 * count, seed=2))
        return made

    def _array(self, array: Array) -> int:
        buffer: GpuBuffer = self._enter(hbm(self.cache.service, -(-array.nbytes // 16) * 16, seed=3))
        self.cache.service.write(buffer.copy_address, np.ascontiguousarray(array))
        return buffer.copy_address

    def _halves(self, start: int, parts: int) -> tuple[int, int]:
        """Return where outputs and log-sum-exps of ``parts`` parts a query head begin."""
        return start, start + 4 * self._rows * parts * self.cache.shape.head_dim

    def _outputs(self, layer: int) -> tuple[int, int]:
        return self._halves(self._out.copy_address + 4 * layer * self._rows * (self.cache.shape.head_dim + 1), 1)

    def submit(self, stream: Stream) -> None:
        """Queue one pass over all layers."""
        for launch in self._launches:
            stream.launch(launch)

    def by_layer(self) -> list[Callable[[Stream], None]]:
        """Return what queues each layer alone, in order."""
        each = len(self._launches) // self.layers

        def one(layer: int, stream: Stream) -> None:
            for launch in self._launches[layer * each : (layer + 1) * each]:
                stream.launch(launch)

        return [partial(one, layer) for layer in range(self.layers)]

    def spoil(self) -> None:
        """Fill outputs and parts with NaN, so that a pass that does nothing shows."""
        stream = self.cache.service.stream
        for buffer in (self._out, self._part):
            if buffer is not None:
                stream.set_bytes(buffer.copy_address, UNWRITTEN, buffer.nbytes)
        stream.synchronize()

    def outputs(self, layer: int) -> tuple[Any, Any]:
        """Return what the latest pass left of a layer: float32 [batch, q_heads, dim] and [batch, q_heads]."""
        shape, service = self.cache.shape, self.cache.service
        heads = (len(self.cache.lengths), shape.q_heads)
        out, lse = self._outputs(layer)
        found = service.read(out, 4 * self._rows * shape.head_dim).view(np.float32)
        return found.reshape(*heads, shape.head_dim), service.read(lse, 4 * self._rows).view(np.float32).reshape(heads)

    def check(self) -> None:
        """Raise VerifyError unless every output is a number and some query groups are those of float64."""
        group = self.cache.shape.group
        for layer in range(self.layers):
            out, lse = self.outputs(layer)
            if not np.isfinite(out).all() or np.isnan(lse).any():
                raise VerifyError("an output was not written or is not finite", where=f"{self.kernel}, layer {layer}")
        for layer, b, h in self.cache.places():
            out, lse = self.outputs(layer)
            heads = slice(h * group, (h + 1) * group)
            self.cache.check(layer, b, h, out[b, heads], lse[b, heads], 1.0, self.kernel)

    def reader(self) -> CacheReader:
        """Return the plain read of the same cache."""
        return CacheReader(self.cache, self._kernels, self._enter)


class TorchDecode:
    """scaled_dot_product_attention over the same memory read as dense keys and values, its best case: no table.

    One operation a layer is counted, whatever kernels torch makes of it. Raises UsageError unless all sequences have
    one length of whole pages, Unavailable without a torch that sees the GPU.
    """

    def __init__(self, cache: Cache, kernels: Kernels, enter: Enter) -> None:
        from kvbench.transport.paged_torch import require_torch

        shape = cache.shape
        self.cache, self._kernels, self._enter = cache, kernels, enter
        if len(set(cache.lengths)) > 1 or cache.lengths[0] % shape.page_tokens:
            raise UsageError(
                "ragged lengths", where="attention.torch_sdpa", got=sorted(set(cache.lengths))[:8],
                expected="sequences of one length, whole pages",
            )  # fmt: skip
        require_torch()
        import torch

        device = cache.service.device
        self._gpu = _gpu(device.ordinal)
        self._types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        dense = (len(cache.lengths), shape.kv_heads, cache.lengths[0], shape.head_dim)
        self._layers = []
        for layer in range(cache.layers):
            keys = cache.keys(layer)
            q = torch.from_numpy(cache.queries[layer].view(np.uint8)).to(self._gpu).view(self._types[shape.dtype])
            halves = [self._tensor(at, cache.half).view(self._types[shape.dtype]).view(dense)
                      for at in (keys, keys + cache.half)]  # fmt: skip
            self._layers.append((q.view(dense[0], shape.q_heads, 1, shape.head_dim), *halves))
        self._out: list[torch.Tensor] = []
        self._streams: dict[int, Any] = {}
        self.layers = self.operations = cache.layers
        tokens = sum(cache.lengths) * cache.layers
        self.kv_bytes, self.flops = tokens * shape.token_bytes, 4 * tokens * shape.q_heads * shape.head_dim
        self.work_items = dense[0] * shape.kv_heads
        self.kernel = f"torch {torch.__version__} scaled_dot_product_attention, dense keys and values"
        device.bind()

    def _tensor(self, address: int, nbytes: int) -> torch.Tensor:
        import torch

        from kvbench.transport.paged_torch import _Memory

        return torch.as_tensor(_Memory(address, nbytes), device=self._gpu)

    def submit(self, stream: Stream) -> None:
        """Queue one pass over all layers on ``stream``."""
        import torch

        handle = 0 if stream.handle is None else stream.handle.value or 0
        known = self._streams.setdefault(handle, torch.cuda.ExternalStream(handle))  # type: ignore[no-untyped-call]
        attention = torch.nn.functional.scaled_dot_product_attention
        with torch.cuda.stream(known), torch.inference_mode():
            self._out = [attention(q, k, v, enable_gqa=True) for q, k, v in self._layers]
        self.cache.service.device.bind()
        stream.count(self.operations)

    def spoil(self) -> None:
        """Forget the outputs."""
        self._out = []

    def check(self) -> None:
        """Raise VerifyError unless some query groups are those of float64; torch rounds weights and outputs: 3 x."""
        if not self._out:
            raise VerifyError("nothing was run", where=self.kernel)
        shape = self.cache.shape
        for layer, b, h in self.cache.places():
            heads = slice(h * shape.group, (h + 1) * shape.group)
            found = self._out[layer][b, heads, 0].float().cpu().numpy()
            self._check(layer, b, h, heads, found)

    def _check(self, layer: int, b: int, h: int, heads: slice, found: Any) -> None:
        shape = self.cache.shape
        k, v = (half[b, h].float().cpu().numpy() for half in self._layers[layer][1:])
        q = shape.floats(self.cache.queries[layer])[b, heads]
        want, log = attend(q, k, v, 1.0 / math.sqrt(shape.head_dim))
        error = float((np.linalg.norm(found - want, axis=1) / np.linalg.norm(want, axis=1)).max())
        most = 3 * tolerance(shape.dtype, float(np.abs(log).max()), shape.head_dim)
        if not error <= most:
            raise VerifyError(
                "attention is wrong", where=f"{self.kernel}, layer {layer}, sequence {b}, KV head {h}",
                got=f"error {error:.2g}", expected=f"at most {most:.2g}",
            )  # fmt: skip

    def reader(self) -> CacheReader:
        """Return the plain read of the same cache."""
        return CacheReader(self.cache, self._kernels, self._enter)


def _gpu(ordinal: int) -> torch.device:
    import torch

    return torch.device("cuda", ordinal)


def open_decode(
    impl: str, service: Service, kernels: Kernels, enter: Enter, shape: Shape, lengths: Sequence[int], *,
    least_bytes: int, order: Order = "shuffled", seed: int = 0,
) -> Decode:  # fmt: skip
    """Return decode attention of ``impl`` (``kvbench`` | ``torch_sdpa``) over layers of at least ``least_bytes``.

    ``enter`` keeps its memory until the caller is done. Raises UsageError for another form or a batch without a token,
    Unavailable without memory, triton or torch, CudaError where the driver refuses.
    """
    if impl not in FORMS:
        raise UsageError("unknown form on a GPU", where="attention.impl", got=impl, expected=" or ".join(FORMS))
    cache = Cache(service, enter, shape, lengths, least_bytes, order, seed)
    return TritonDecode(cache, kernels, enter) if impl == "kvbench" else TorchDecode(cache, kernels, enter)
