"""K projection and Q K^T on a GPU with the keys in page-locked host memory: one kernel, or two with a round trip.

``fused``: the keys of a tile are scored where they are made and stored once, by the alias of far memory. ``separate``:
one launch stores them there, the next reads them back. DirectKV, OSDI 2026, section 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from kvbench.attention.shapes import from_bf16, to_bf16
from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.gpu.prefill_kernels import TOKENS, fused_kernel
from kvbench.memory.cuda.buffers import GpuBuffer, hbm, pinned
from kvbench.memory.cuda.device import Stream
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.systems.directkv.gpu_attention import far_pointer

Enter = Callable[[AbstractContextManager[Any]], Any]
METHODS = ("fused", "separate")
KEY_ERROR, SCORE_ERROR = 4e-3, 6e-3  # norm against float64: keys are rounded to bf16, and scored so
CHECK_ROWS = 16
UNWRITTEN = 0xFF


class GpuFused:
    """``method`` for ``tokens`` new tokens of ``width`` values, ``kv_heads`` heads of ``head_dim``, as many queries.

    ``unique`` and ``demand``: far bytes of a pass; ``buffer``: GPU memory held for keys, none. Raises UsageError for
    another method or sizes below 1.
    """

    def __init__(
        self, method: str, service: Service, kernels: Kernels, enter: Enter, tokens: int, width: int, kv_heads: int,
        group: int, head_dim: int, seed: int,
    ) -> None:  # fmt: skip
        if method not in METHODS or min(tokens, width, kv_heads, group) < 1:
            raise UsageError("a projection of nothing", where="fused", got=f"{method}, {tokens} x {width}",
                             expected=f"{' or '.join(METHODS)}, sizes of 1 or more")  # fmt: skip
        self.method, self._service = method, service
        rng = np.random.default_rng(seed)
        self._x = to_bf16(rng.standard_normal((tokens, width)))
        self._w = to_bf16(rng.standard_normal((kv_heads, width, head_dim)) / math.sqrt(width))
        self._q = to_bf16(rng.standard_normal((kv_heads, group, tokens, head_dim)))
        self._scale = 1.0 / math.sqrt(head_dim)
        self.unique = kv_heads * tokens * head_dim * 2
        self.demand = self.unique if method == "fused" else 2 * self.unique
        self.buffer = 0
        self.far: GpuBuffer = enter(pinned(service, -(-self.unique // 16) * 16, pages="4k", seed=seed))
        self._scores: GpuBuffer = enter(hbm(service, 4 * kv_heads * group * tokens * tokens, seed=seed + 1))
        inputs = []
        for array in (self._x, self._w, self._q):
            buffer: GpuBuffer = enter(hbm(service, -(-array.nbytes // 16) * 16, seed=seed + 2))
            service.write(buffer.copy_address, np.ascontiguousarray(array))
            inputs.append(buffer.copy_address)
        parts = ("fused",) if method == "fused" else ("project", "score")
        forms = [fused_kernel(part, "bf16", group, head_dim) for part in parts]
        self.work_items = kv_heads * -(-tokens // TOKENS)
        self._launches = [
            kernels.portable(
                form,
                self.work_items,
                far_pointer(self.far),
                self._scores.copy_address,
                *inputs,
                self._scale,
                tokens,
                width,
                tokens,
                kv_heads,
            )
            for form in forms
        ]
        self.operations, self.streams = len(self._launches), tuple[Stream, ...]()
        self.kernel = " + ".join(f"{form.name} {form.digest()}" for form in forms)
        self.spoil()

    def submit(self, stream: Stream) -> None:
        """Queue one pass."""
        for launch in self._launches:
            stream.launch(launch)

    def spoil(self) -> None:
        """Fill far keys and scores with NaN."""
        stream = self._service.stream
        for buffer in (self.far, self._scores):
            stream.set_bytes(buffer.copy_address, UNWRITTEN, buffer.nbytes)
        stream.synchronize()

    def check(self) -> None:
        """Raise VerifyError unless stored keys and scores are those of float64, on some rows of each head."""
        heads, group, tokens, dim = self._q.shape
        kept = self._service.read(self.far.copy_address, self.unique).view(np.uint16).reshape(heads, tokens, dim)
        found = self._service.read(self._scores.copy_address, self._scores.nbytes).view(np.float32)
        scores = found.reshape(heads, group, tokens, tokens)
        if not np.isfinite(scores).all():
            raise VerifyError("a score was not written or is not finite", where=self.kernel)
        rng = np.random.default_rng(tokens)
        rows = np.unique([0, tokens - 1, *rng.integers(0, tokens, CHECK_ROWS)])
        x, w = (from_bf16(array).astype(np.float64) for array in (self._x[rows], self._w))
        for h in range(heads):
            keys = from_bf16(kept[h][rows]).astype(np.float64)
            self._close(f"the keys of head {h}", keys, x @ w[h], KEY_ERROR)
            for g in {0, group - 1}:
                want = from_bf16(self._q[h, g][rows]).astype(np.float64) @ keys.T * self._scale
                self._close(f"the scores of head {h}", scores[h, g][np.ix_(rows, rows)], want, SCORE_ERROR)

    def _close(self, what: str, got: Any, want: Any, most: float) -> None:
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        if not error <= most:
            raise VerifyError(f"{what} are wrong", where=self.kernel, got=f"error {error:.2g}",
                              expected=f"at most {most:.2g}")  # fmt: skip
