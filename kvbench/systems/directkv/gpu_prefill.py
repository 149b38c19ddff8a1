"""Prefill attention on a GPU over KV in page-locked host memory, in both loop orders, swapped, or near.

Layers of dense keys and values, [kv_heads, keys, dim] each, bf16. In both orders the kernel reads far memory by its
alias; ``swap`` copies a layer ahead into two near slots and reads those with queries outside. DirectKV, OSDI 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from kvbench.attention.shapes import from_bf16, to_bf16
from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.kernels.gpu.prefill_kernels import prefill_kernel, shared_bytes
from kvbench.memory.cuda.buffers import GpuBuffer, hbm, pinned
from kvbench.memory.cuda.device import Launch, Stream
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.model.paged import attend
from kvbench.systems.directkv.attention_traffic import Attention, AttentionTraffic, kv_outer, q_outer, resident, staged
from kvbench.systems.directkv.gpu_attention import LayerSwap, far_pointer

Enter = Callable[[AbstractContextManager[Any]], Any]
ORDERS = ("kv_outer", "q_outer", "swap", "near")
TILES = (16, 32, 64, 128)
LOG2E = 1.4426950408889634
ERROR = 1e-2  # of a row, norm against float64 over the same bf16 numbers: weights are rounded to bf16
CHECKS, CHECK_ROWS = 4, 4
UNWRITTEN = 0xFF


def check_tiles(shape: Attention, shared_limit: int) -> None:
    """Raise Unavailable for tiles there is no kernel for, or that on-chip memory does not hold: how much, what fits."""
    need = shared_bytes(shape.block_q, shape.block_kv, shape.head_dim, "bf16")
    fits = [t for t in TILES if shared_bytes(t, t, shape.head_dim, "bf16") <= shared_limit]
    if shape.block_q in TILES and shape.block_kv in TILES and need <= shared_limit:
        return
    raise Unavailable(
        "tiles there is no kernel for on this GPU", where="prefill.block_q, block_kv",
        got=f"{shape.block_q} x {shape.block_kv}: {need} B of shared memory",
        expected=f"each one of {', '.join(map(str, TILES))}, at most {shared_limit} B",
        mend=f"{fits[-1]} x {fits[-1]} fits" if fits else "no tile fits",
    )  # fmt: skip


class GpuPrefill:
    """``order`` over ``layers`` layers of ``shape``. ``submit`` queues a pass, ``spoil`` makes outputs wrong, ``check``
    proves them; ``unique``, ``demand`` and ``near_traffic`` bytes of a pass by the algebra, ``buffer`` GPU memory.

    Raises UsageError for another order or element size, Unavailable for tiles without a kernel or too little memory.
    """

    def __init__(
        self, order: str, service: Service, kernels: Kernels, enter: Enter, shape: Attention, layers: int, seed: int
    ) -> None:
        if order not in ORDERS or shape.item != 2 or layers < 1:
            raise UsageError("not a prefill on a GPU", where="prefill", got=f"{order}, items of {shape.item} B",
                             expected=f"{', '.join(ORDERS)}; 2 B")  # fmt: skip
        check_tiles(shape, service.device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"))
        self.order, self.shape, self.layers, self._service = order, shape, layers, service
        heads = shape.batch * shape.kv_heads
        self._half = heads * shape.keys * shape.head_dim * 2
        make = hbm if order == "near" else partial(pinned, pages="thp")
        self.far: GpuBuffer = enter(make(service, 2 * layers * self._half, seed=seed))
        self._address = self.far.copy_address if order in ("near", "swap") else far_pointer(self.far)
        rng = np.random.default_rng(seed)
        self._kv = [to_bf16(rng.standard_normal((2, heads, shape.keys, shape.head_dim))) for _ in range(layers)]
        for layer, kv in enumerate(self._kv):
            service.write(self._home(layer), np.ascontiguousarray(kv))
        rows = heads * shape.group * shape.queries
        self._q = to_bf16(rng.standard_normal((heads, shape.group, shape.queries, shape.head_dim)))
        queries: GpuBuffer = enter(hbm(service, -(-self._q.nbytes // 16) * 16, seed=seed + 1))
        service.write(queries.copy_address, self._q)
        self._row_bytes = 4 * rows * (shape.head_dim + 2)
        self._out: GpuBuffer = enter(hbm(service, layers * self._row_bytes, seed=seed + 2))
        slots = None
        self.buffer = self.far.nbytes if order == "near" else 0
        if order == "swap":
            near: GpuBuffer = enter(hbm(service, 4 * self._half, seed=seed + 3))
            slots, self.buffer = (near.copy_address, near.copy_address + 2 * self._half), near.nbytes
        form = prefill_kernel(
            "kv_outer" if order == "kv_outer" else "q_outer", "bf16", shape.group, shape.head_dim, causal=shape.causal,
            rows=shape.block_q, tokens=shape.block_kv,
        )  # fmt: skip
        self.work_items = heads if order == "kv_outer" else heads * shape.group * shape.q_tiles
        self._launches: list[Launch] = []
        for layer in range(layers):
            k = self._home(layer) if slots is None else slots[layer % 2]
            out = self._out.copy_address + layer * self._row_bytes
            top = out + 4 * rows * shape.head_dim
            self._launches.append(kernels.portable(
                form, self.work_items, out, top, top + 4 * rows, queries.copy_address, k, k + self._half,
                LOG2E / math.sqrt(shape.head_dim), shape.queries, shape.keys,
            ))  # fmt: skip
        self.kernel = f"{form.name} {form.digest()}, {order}"
        self.operations, self.streams = layers, tuple[Stream, ...]()
        self.submit: Callable[[Stream], None] = self._plain
        if slots is not None:
            work = [partial(_launch, launch) for launch in self._launches]
            sources = [self._home(layer) for layer in range(layers)]
            swap = LayerSwap(service.device, sources, slots, 2 * self._half, work, layers, enter)
            self.submit, self.operations, self.streams = swap.submit, swap.operations, (swap.side,)
        found = algebra(order, shape)
        self.unique, self.demand, self.near_traffic = (
            layers * n for n in (found.unique, found.demand, found.near)
        )  # fmt: skip
        self.spoil()

    def _home(self, layer: int) -> int:
        return self.far.copy_address + 2 * layer * self._half

    def _plain(self, stream: Stream) -> None:
        for launch in self._launches:
            stream.launch(launch)

    def spoil(self) -> None:
        """Fill outputs and statistics with NaN."""
        stream = self._service.stream
        stream.set_bytes(self._out.copy_address, UNWRITTEN, self._out.nbytes)
        stream.synchronize()

    def outputs(self, layer: int) -> Any:
        """Return what the latest pass left of a layer: float32 [kv_heads, group, queries, dim]."""
        size = self._q.size * 4
        found = self._service.read(self._out.copy_address + layer * self._row_bytes, size)
        return found.view(np.float32).reshape(self._q.shape)

    def check(self) -> None:
        """Raise VerifyError unless every output is a number and some rows are those of float64."""
        shape = self.shape
        rng = np.random.default_rng(self.layers)
        for layer in range(self.layers):
            out = self.outputs(layer)
            if not np.isfinite(out).all():
                raise VerifyError("an output was not written or is not finite", where=f"{self.kernel}, layer {layer}")
            for _ in range(CHECKS):
                h, g = int(rng.integers(len(out))), int(rng.integers(shape.group))
                k, v = (from_bf16(side[h]) for side in self._kv[layer])
                for row in {0, shape.queries - 1, *rng.integers(0, shape.queries, CHECK_ROWS).tolist()}:
                    n = shape.keys - shape.queries + row + 1 if shape.causal else shape.keys
                    q = from_bf16(self._q[h, g, row : row + 1])
                    want, _ = attend(q, k[:n], v[:n], 1.0 / math.sqrt(shape.head_dim))
                    error = float(np.linalg.norm(out[h, g, row] - want[0]) / np.linalg.norm(want[0]))
                    if not error <= ERROR:
                        raise VerifyError(
                            "attention is wrong", where=f"{self.kernel}, layer {layer}, head {h}, query {row}",
                            got=f"error {error:.2g}", expected=f"at most {ERROR:g}",
                        )  # fmt: skip


def algebra(order: str, shape: Attention) -> AttentionTraffic:
    """Return the bytes of a layer; tiles of KV stay on chip, and the first update of KV outside reads no zeros."""
    if order == "q_outer":
        return q_outer(shape)
    if order == "kv_outer":
        return kv_outer(shape, stat_bytes=16, initialised=False)
    return staged(shape) if order == "swap" else resident(shape)


def _launch(launch: Launch, stream: Stream) -> None:
    stream.launch(launch)
