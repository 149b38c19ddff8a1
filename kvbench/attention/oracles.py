"""What decode attention is compared with: float64 in numpy, and the three ways PyTorch users write it.

They read keys and values that lie densely, [batch, kv_heads, tokens, head_dim], which no paged cache offers: the paged
kernel is compared with the best case of the others. ``torch_sdpa`` is scaled_dot_product_attention with enable_gqa,
``torch_view`` the same with the query heads of a group as rows of one head, ``torch_matmul`` two matmuls and a softmax
on that view.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from kvbench.attention.shapes import Array, Shape
from kvbench.errors import MissingExtra, UsageError, VerifyError
from kvbench.model.paged import attend

FORMS = ("numpy", "torch_sdpa", "torch_view", "torch_matmul")
TOLERANCE = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 4e-3}
CHECKS = 4


def tolerance(dtype: str, top: float, head_dim: int = 128) -> float:
    """Return the error allowed, norm(o - ref) / norm(ref) of a query head of ``head_dim``, where scores reach ``top``.

    float32 sums of scores are off by an ulp of the score, and a weight by the same factor. Beyond a head_dim of 128 the
    ulp grows with its square root.
    """
    # The rounding errors of a dot product of d terms add up like a random walk, sqrt(d) x eps x score. Plain numpy in
    # float32 leaves 1e-6 as well where scores reach 13 (1.1e-6 at 256); up to 128 the bound is that of any shape.
    return TOLERANCE[dtype] + 2.0**-23 * abs(top) * math.sqrt(max(1.0, head_dim / 128))


def torch_module() -> Any:
    """Import PyTorch for use beside pinned threads. Raises MissingExtra without it.

    Its OpenMP threads spin after each operation by default, on the CPUs of whatever is measured next; set before it is
    loaded, they sleep.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return import_module("torch")
    except ModuleNotFoundError:
        raise MissingExtra("torch", "torch", "a PyTorch form of decode attention") from None


def warm_threads(threads: int) -> None:
    """Start PyTorch's ``threads``. Call it before the calling thread is pinned: they inherit its CPUs."""
    torch = torch_module()
    torch.set_num_threads(threads)
    ones = torch.ones(1 << 20)
    (ones + ones).sum().item()


def thread_ids() -> list[int]:
    """Return the native ids of all threads of this process, those of PyTorch among them."""
    return sorted(int(name) for name in os.listdir("/proc/self/task"))


class DenseDecode:
    """Decode attention by ``form`` (one of ``FORMS``) over layers of dense keys and values.

    ``layers``: pairs of arrays of the dtype, each [batch, kv_heads, tokens, head_dim]; ``queries`` one a layer, [batch,
    q_heads, head_dim]; ``threads`` of PyTorch. Raises UsageError for another form, MissingExtra without PyTorch.
    """

    def __init__(
        self, form: str, shape: Shape, layers: list[tuple[Array, Array]], queries: list[Array], threads: int = 1
    ) -> None:
        if form not in FORMS:
            raise UsageError("unknown form", where="attention.oracles", got=form, expected=", ".join(FORMS))
        self.form, self.shape, self.layers, self.queries = form, shape, layers, queries
        self.kernel = form
        tokens = layers[0][0].shape[0] * layers[0][0].shape[2] * len(layers)
        self.kv_bytes = tokens * shape.token_bytes
        self.flops = 4 * tokens * shape.q_heads * shape.head_dim
        self.outputs: list[Any] = []
        self._scale = 1.0 / math.sqrt(shape.head_dim)
        self._run: Callable[[], list[Any]] = self._numpy if form == "numpy" else self._torch(threads)

    def _numpy(self) -> list[Any]:
        shape, found = self.shape, []
        for (k, v), q in zip(self.layers, self.queries, strict=True):
            grouped = shape.floats(q).reshape(len(q), shape.kv_heads, shape.group, shape.head_dim)
            out = np.empty(grouped.shape)
            for b, h in np.ndindex(grouped.shape[:2]):
                out[b, h] = attend(grouped[b, h], shape.floats(k[b, h]), shape.floats(v[b, h]), self._scale)[0]
            found.append(out)
        return found

    def _torch(self, threads: int) -> Callable[[], list[Any]]:
        torch = torch_module()
        torch.set_num_threads(threads)
        shape = self.shape

        def tensor(array: Array) -> Any:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if shape.dtype == "bf16" else (
                torch.from_numpy(array)
            )  # fmt: skip

        layers = [(tensor(k), tensor(v)) for k, v in self.layers]
        grouped = (shape.kv_heads, shape.group, shape.head_dim)
        queries = [tensor(q) for q in self.queries]
        sdpa = torch.nn.functional.scaled_dot_product_attention

        def step(q: Any, k: Any, v: Any) -> Any:
            if self.form == "torch_sdpa":
                return sdpa(q[:, :, None], k, v, enable_gqa=True)[:, :, 0].reshape(len(q), *grouped)
            rows = q.view(len(q), *grouped)
            if self.form == "torch_view":
                return sdpa(rows, k, v)
            return torch.matmul(torch.softmax(torch.matmul(rows, k.transpose(2, 3)) * self._scale, dim=-1), v)

        def run() -> list[Any]:
            with torch.inference_mode():
                return [step(q, k, v).float().numpy() for q, (k, v) in zip(queries, layers, strict=True)]

        return run

    def run(self, reps: int = 1) -> None:
        """Do ``reps`` passes over all layers; the clock is the caller's."""
        for _ in range(reps):
            self.outputs = self._run()

    def verify(self) -> None:
        """Recompute some query groups in float64. PyTorch rounds weights and outputs to the dtype: 3 x the tolerance.

        Raises VerifyError.
        """
        if not self.outputs:
            raise VerifyError("nothing was run", where=self.form)
        shape, batch = self.shape, len(self.queries[0])
        for check in range(CHECKS):
            layer, b, h = check % len(self.layers), check % batch, check % shape.kv_heads
            q = shape.floats(self.queries[layer]).reshape(batch, shape.kv_heads, shape.group, shape.head_dim)[b, h]
            k, v = (shape.floats(half[b, h]) for half in self.layers[layer])
            want, lse = attend(q, k, v, self._scale)
            got = self.outputs[layer][b, h]
            error = float((np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max())
            most = 3 * tolerance(shape.dtype, float(np.abs(lse).max()), shape.head_dim)
            if not error <= most:
                raise VerifyError(
                    "attention is wrong", where=f"{self.form}, layer {layer}, sequence {b}, KV head {h}",
                    got=f"error {error:.2g}", expected=f"at most {most:.2g}",
                )  # fmt: skip
