"""Run the prefill and projection kernels on CPU tensors under TRITON_INTERPRET=1, in a process of its own.

Prints one JSON document: {case: null or what was wrong}. What must come out is float64 attention, or float64 products,
of the same rounded numbers.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np
import torch

from kvbench.kernels.gpu import fused, prefill
from kvbench.kernels.gpu.prefill_kernels import fused_kernel, prefill_kernel, reference_fused, reference_prefill
from tests.kernels.gpu.interpreted_decode import CANARY, GUARD, guarded, rounded

LOG2E = 1.4426950408889634
ERROR = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 8e-3}


def off(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def attention(
    order: str, dtype: str, kv_heads: int, group: int, dim: int, queries: int, keys: int, *, causal: bool = False,
    rows: int = 16, tokens: int = 16, factor: float = 1.0, lost: int = 0,
) -> str | None:  # fmt: skip
    """Attend and compare; ``factor`` on the scale and ``lost`` keys make it wrong."""
    rng = np.random.default_rng(queries + keys)
    q, qf = rounded(rng.standard_normal((kv_heads, group, queries, dim)), dtype)
    k, kf = rounded(rng.standard_normal((kv_heads, keys, dim)), dtype)
    v, vf = rounded(rng.standard_normal((kv_heads, keys, dim)), dtype)
    if lost:
        k, v = (x[:, : keys - lost].contiguous() for x in (k, v))
    kernel = prefill_kernel(
        order, dtype, group, dim, causal=causal, rows=rows, tokens=tokens, upcast=dtype == "bf16"
    )  # fmt: skip
    count = kv_heads * group * queries
    out, top, total = guarded(count * dim), guarded(count), guarded(count)
    grid = kv_heads if order == "kv_outer" else kv_heads * group * -(-queries // rows)
    scale = 1.0 / math.sqrt(dim)
    constants: dict[str, Any] = dict(kernel.constants)
    prefill.prefill[(grid,)](
        out, top, total, q, k, v, scale * LOG2E * factor, queries, keys - lost, **constants
    )  # fmt: skip
    if not all(bool((x[-GUARD:] == CANARY).all()) for x in (out, top, total)):
        return "a canary died"
    want = reference_prefill(qf, kf, vf, scale * LOG2E, causal)
    error = off(out[:-GUARD].reshape(kv_heads, group, queries, dim).numpy(), want)
    return None if error <= ERROR[dtype] else f"error {error:.2g}"


def projection(
    dtype: str, heads: int, group: int, tokens: int, width: int, queries: int, *, split: bool = False,
    forget: bool = False,
) -> str | None:  # fmt: skip
    """Project and score in one launch, or in two with the keys between them; ``forget`` spoils the keys there."""
    dim = 64
    rng = np.random.default_rng(tokens + width)
    x, xf = rounded(rng.standard_normal((tokens, width)), dtype)
    w, wf = rounded(rng.standard_normal((heads, width, dim)) / math.sqrt(width), dtype)
    q, qf = rounded(rng.standard_normal((heads, group, queries, dim)), dtype)
    keys = torch.full((heads * tokens * dim + GUARD,), 7.0, dtype=x.dtype)
    scores = guarded(heads * group * queries * tokens)
    for part in ("project", "score") if split else ("fused",):
        kernel = fused_kernel(part, dtype, group, dim, rows=16, tokens=16, upcast=dtype == "bf16")
        constants: dict[str, Any] = dict(kernel.constants)
        if part == "score" and forget:
            keys[: tokens * dim] = 0.0
        fused.project_score[(heads * -(-tokens // 16),)](
            keys, scores, x, w, q, 0.125, tokens, width, queries, heads, **constants
        )
    if not bool((keys[-GUARD:] == 7.0).all()) or not bool((scores[-GUARD:] == CANARY).all()):
        return "a canary died"
    want, found = reference_fused(xf, wf, qf, 0.125, lambda keys: rounded(keys, dtype)[1])
    error = off(keys[:-GUARD].float().reshape(heads, tokens, dim).numpy(), want)
    if not error <= ERROR[dtype]:
        return f"keys: error {error:.2g}"
    error = off(scores[:-GUARD].reshape(heads, group, queries, tokens).numpy(), found)
    return None if error <= ERROR[dtype] else f"scores: error {error:.2g}"


def main() -> int:
    """Run every case and print the document."""
    said: dict[str, str | None] = {}
    for order in ("q_outer", "kv_outer"):
        for dtype in ("fp32", "fp16", "bf16"):
            said[f"{order} {dtype}"] = attention(order, dtype, 2, 2, 64, 17, 33)
        said[f"{order} one key"] = attention(order, "fp32", 1, 1, 64, 5, 1)
        said[f"{order} one query"] = attention(order, "fp32", 2, 4, 64, 1, 20)
        said[f"{order} whole tiles"] = attention(order, "fp32", 1, 1, 128, 32, 32)
        said[f"{order} causal"] = attention(order, "fp32", 1, 3, 64, 18, 18, causal=True)
        said[f"{order} causal after a prefix"] = attention(order, "bf16", 1, 2, 64, 18, 50, causal=True)
        said[f"{order} unlike tiles"] = attention(order, "fp32", 1, 1, 64, 40, 70, causal=True, rows=32, tokens=16)
    for split in (False, True):
        name = "separate" if split else "fused"
        for dtype in ("fp32", "fp16", "bf16"):
            said[f"{name} {dtype}"] = projection(dtype, 2, 2, 17, 40, 17, split=split)
        said[f"{name} one token"] = projection("fp32", 2, 1, 1, 48, 1, split=split)
        said[f"{name} width 1"] = projection("fp32", 1, 4, 17, 1, 3, split=split)
    said["a wrong scale"] = attention("kv_outer", "fp32", 1, 1, 64, 5, 30, factor=1.01)
    said["a lost key"] = attention("q_outer", "fp32", 1, 1, 64, 5, 30, lost=1)
    said["keys forgotten between"] = projection("fp32", 1, 1, 17, 32, 3, split=True, forget=True)
    json.dump(said, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
