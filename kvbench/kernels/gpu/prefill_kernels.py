"""Prefill attention and the fused K projection among the GPU kernels: what each form is compiled for, its oracle."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from kvbench.errors import UsageError
from kvbench.kernels.gpu.catalogue import FOLDER, Argument, Demand, GpuKernel
from kvbench.kernels.gpu.decode_kernels import BYTES

SOURCE, FUSED_SOURCE = FOLDER / "prefill.py", FOLDER / "fused.py"
THREADS = 128
ROWS, TOKENS, DEEP = 64, 64, 32  # of queries, of KV, and of the width a projection takes at once
HEAD_DIMS = (64, 128)
TENSOR_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "gfx942")  # sm_75 multiplies no bf16
NVIDIA_ARCHS = TENSOR_ARCHS[:-1]  # on gfx942 a tile of keys leaves the product in rows of 8 bytes

Order = Literal["q_outer", "kv_outer"]
ORDERS: tuple[Order, ...] = ("q_outer", "kv_outer")
Part = Literal["fused", "project", "score"]
PARTS: tuple[Part, ...] = ("fused", "project", "score")
Array = np.ndarray[Any, Any]


def _checked(where: str, dtype: str, group: int, head_dim: int) -> None:
    if dtype not in BYTES:
        raise UsageError("unknown dtype", where=where, got=dtype, expected=" ".join(BYTES))
    if not 1 <= group <= 64:
        raise UsageError("query heads a KV head", where=where, got=group, expected="1..64")
    if head_dim not in HEAD_DIMS:
        raise UsageError("head_dim", where=where, got=head_dim, expected=", ".join(map(str, HEAD_DIMS)))


def _tile(where: str, name: str, value: int) -> None:
    if value not in (16, 32, 64, 128):
        raise UsageError("not a tile", where=f"{where}.{name}", got=value, expected="16, 32, 64 or 128")


def shared_bytes(rows: int, tokens: int, head_dim: int, dtype: str) -> int:
    """Return the least shared memory of a block: a tile of queries, one of keys and one of values."""
    return (rows + 2 * tokens) * head_dim * BYTES[dtype]


def prefill_kernel(
    order: str, dtype: str, group: int, head_dim: int, *, causal: bool = False, rows: int = ROWS, tokens: int = TOKENS,
    upcast: bool = False,
) -> GpuKernel:  # fmt: skip
    """Return ``prefill`` with queries (``q_outer``) or KV (``kv_outer``) outside, tiles of ``rows`` x ``tokens``.

    ``upcast``: multiply in float32 whatever the dtype, for the interpreter alone. Raises UsageError for another order,
    dtype, group, head_dim or tile.
    """
    where = "prefill"
    if order not in ORDERS:
        raise UsageError("unknown order", where=where, got=order, expected=" or ".join(ORDERS))
    _checked(where, dtype, group, head_dim)
    _tile(where, "rows", rows)
    _tile(where, "tokens", tokens)
    pointers = [
        Argument("out", "pointer", "float32 [kv_heads x group, queries, dim]", 16),
        Argument("top_at", "pointer", "float32 [kv_heads x group, queries]", 16),
        Argument("total_at", "pointer", "float32 [kv_heads x group, queries]", 16),
        Argument("q", "pointer", f"{dtype} [kv_heads x group, queries, dim]", 16),
        Argument("k", "pointer", f"{dtype} [kv_heads, keys, dim], near or the alias of far memory", 16),
        Argument("v", "pointer", f"{dtype} [kv_heads, keys, dim], near or the alias of far memory", 16),
    ]
    numbers = [
        Argument("scale", "f64", "of a score, times log2(e)"),
        Argument("queries", "i32", "rows of a query head"),
        Argument("keys", "i32", "tokens of a KV head"),
    ]
    tile = "" if (rows, tokens) == (ROWS, TOKENS) else f"_{rows}x{tokens}"
    name = (
        f"prefill_{order}_{dtype}_g{group}_d{head_dim}{'_causal' if causal else ''}{tile}{'_upcast' if upcast else ''}"
    )
    return GpuKernel(
        name, "triton", SOURCE, "prefill", THREADS,
        f"prefill attention, {dtype}, {group} query heads a KV head, head_dim {head_dim}, {order}",
        (*pointers, *numbers), Demand(loads=True, math="ffma" if dtype == "fp32" else "tensor"), reference_prefill,
        ("*fp32", "*fp32", "*fp32", *[f"*{dtype}"] * 3, "fp64", "i32", "i32"),
        (
            ("GROUP", group), ("ROWS", rows), ("TOKENS", tokens), ("DIM", head_dim), ("COLS", head_dim),
            ("KV_OUTER", int(order == "kv_outer")), ("CAUSAL", int(causal)), ("UPCAST", int(upcast)), ("STAGES", 2),
        ),
        archs=() if dtype == "fp32" else TENSOR_ARCHS,
    )  # fmt: skip


def fused_kernel(
    part: str, dtype: str, group: int, head_dim: int, *, rows: int = ROWS, tokens: int = TOKENS, upcast: bool = False
) -> GpuKernel:
    """Return ``project_score``: both halves (``fused``), or one alone as separate kernels do it.

    Raises UsageError like :func:`prefill_kernel`.
    """
    where = "project_score"
    if part not in PARTS:
        raise UsageError("unknown part", where=where, got=part, expected=", ".join(PARTS))
    _checked(where, dtype, group, head_dim)
    _tile(where, "rows", rows)
    _tile(where, "tokens", tokens)
    pointers = [
        Argument("k_far", "pointer", f"{dtype} [heads, tokens, dim], the alias of far memory", 16),
        Argument("scores", "pointer", "float32 [heads x group, queries, tokens]", 16),
        Argument("x", "pointer", f"{dtype} [tokens, width]", 16),
        Argument("w", "pointer", f"{dtype} [heads, width, dim]", 16),
        Argument("q", "pointer", f"{dtype} [heads x group, queries, dim]", 16),
    ]
    numbers = [
        Argument("scale", "f64", "of a score"),
        Argument("tokens", "i32", "new tokens"),
        Argument("width", "i32", "values of a token"),
        Argument("queries", "i32", "rows of a query head"),
        Argument("heads", "i32", "KV heads"),
    ]
    return GpuKernel(
        f"project_{part}_{dtype}_g{group}_d{head_dim}{'_upcast' if upcast else ''}", "triton", FUSED_SOURCE,
        "project_score", THREADS,
        f"K projection and Q K^T, {part}, {dtype}, {group} query heads a KV head, head_dim {head_dim}",
        (*pointers, *numbers),
        Demand(loads=True, stores=part != "score", math="ffma" if dtype == "fp32" else "tensor"), reference_fused,
        (*[f"*{dtype}"], "*fp32", *[f"*{dtype}"] * 3, "fp64", *["i32"] * 4),
        (
            ("GROUP", group), ("ROWS", rows), ("TOKENS", tokens), ("DIM", head_dim), ("DEEP", DEEP),
            ("PROJECT", int(part != "score")), ("SCORE", int(part != "project")), ("UPCAST", int(upcast)),
            ("STAGES", 2),
        ),
        archs=() if dtype == "fp32" else NVIDIA_ARCHS if part != "score" else TENSOR_ARCHS,
    )  # fmt: skip


def reference_prefill(q: Array, k: Array, v: Array, scale: float, causal: bool = False) -> Array:
    """Return what ``prefill`` leaves in ``out``, in float64.

    ``q`` [kv_heads, group, queries, dim], ``k`` and ``v`` [kv_heads, keys, dim] as numbers; ``scale`` multiplies scores
    and includes log2(e), as the kernel's.
    """
    queries, keys = q.shape[2], k.shape[1]
    scores = np.einsum("hgqd,hkd->hgqk", q.astype(np.float64), k.astype(np.float64)) * (scale * math.log(2.0))
    if causal:
        scores[..., np.arange(keys) > keys - queries + np.arange(queries)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    return np.asarray(np.einsum("hgqk,hkd->hgqd", weights / weights.sum(axis=3, keepdims=True), v.astype(np.float64)))


def reference_fused(x: Array, w: Array, q: Array, scale: float, rounded: Any = None) -> tuple[Array, Array]:
    """Return what ``project_score`` leaves in ``k_far`` and ``scores``, in float64.

    ``x`` [tokens, width], ``w`` [heads, width, dim], ``q`` [heads, group, queries, dim] as numbers; ``rounded`` rounds
    keys to the dtype they are stored in.
    """
    keys = np.einsum("tw,hwd->htd", x.astype(np.float64), w.astype(np.float64))
    kept = keys if rounded is None else np.asarray(rounded(keys), np.float64)
    return keys, np.einsum("hgqd,htd->hgqt", q.astype(np.float64), kept) * scale


GATED = (
    prefill_kernel("q_outer", "bf16", 4, 128),
    prefill_kernel("kv_outer", "bf16", 4, 128),
    prefill_kernel("kv_outer", "bf16", 1, 64, causal=True),
    prefill_kernel("q_outer", "fp16", 8, 64, causal=True),
    fused_kernel("fused", "bf16", 1, 128),
    fused_kernel("project", "bf16", 1, 128),
    fused_kernel("score", "bf16", 4, 128),
)
