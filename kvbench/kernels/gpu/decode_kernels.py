"""Decode attention among the GPU kernels: what each form is compiled for, its arguments, and its oracle in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvbench.errors import UsageError
from kvbench.kernels.gpu.catalogue import FOLDER, KIB, Argument, Demand, GpuKernel

SOURCE = FOLDER / "decode.py"
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}  # of an element, by Triton's names
THREADS = 128
TENSOR_ROWS = 16  # of queries: what a matrix instruction takes; float32 has none and pads to a power of two
STAGE_BYTES = 16 * KIB  # of keys and values in one stage of a block's pipeline
MERGE_STEP = 16  # parts of a head under way at once
LEAST_TILE = 16

Array = np.ndarray[Any, Any]


def tile_of(dtype: str, head_dim: int) -> int:
    """Return the tokens of one step: 16 KiB of keys and values, a power of two, at least 16."""
    wide = 2 * BYTES[dtype] * _power(head_dim)
    return max(LEAST_TILE, STAGE_BYTES // wide)


def _power(number: int) -> int:
    """Return the smallest power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def stages_of(dtype: str, group: int, head_dim: int) -> int:
    """Return the depth of the pipeline that leaves a block below 48 KiB of shared memory.

    Five stages are one of table entries, two tiles of keys and values under way, and the one in use (Triton 3.9).
    """
    if tile_of(dtype, head_dim) * 2 * BYTES[dtype] * _power(head_dim) <= STAGE_BYTES:
        return 5
    return 2 if group <= 8 else 1


def split_kernel(dtype: str, group: int, head_dim: int, page_tokens: int, *, upcast: bool = False) -> GpuKernel:
    """Return ``decode_split`` compiled for ``group`` query heads a KV head and pages of ``page_tokens``.

    ``upcast``: multiply in float32 whatever the dtype, for the interpreter alone: compiled it spills. Raises UsageError
    for a dtype, group, head or page that it cannot take.
    """
    if dtype not in BYTES:
        raise UsageError("unknown dtype", where="decode_split", got=dtype, expected=" ".join(BYTES))
    if not 1 <= group <= 16:
        raise UsageError("query heads a KV head", where="decode_split", got=group, expected="1..16")
    if head_dim * BYTES[dtype] % 16 or not 16 <= head_dim <= 256:
        raise UsageError("head_dim", where="decode_split", got=head_dim, expected="16..256, rows of whole 16 bytes")
    if not 1 <= page_tokens <= 1 << 16:
        raise UsageError("page size", where="decode_split", got=page_tokens, expected="1..65536 tokens")
    pointers = [
        Argument("part", "pointer", "float32 [batch, kv_heads, splits, group, dim]", 16),
        Argument("part_lse", "pointer", "float32 [batch, kv_heads, splits, group]", 16),
        Argument("q", "pointer", f"{dtype} [batch, kv_heads, group, dim]", 16),
        Argument("k_cache", "pointer", f"{dtype} [block, kv_heads, page, dim]", 16),
        Argument("v_cache", "pointer", f"{dtype} [block, kv_heads, page, dim]", 16),
        Argument("table", "pointer", "int32 [batch, table_row]", 16),
        Argument("lengths", "pointer", "int32 [batch]", 16),
    ]
    numbers = [
        Argument("scale", "f64", "of a score, times log2(e)"),
        Argument("kv_heads", "i32", "KV heads"),
        Argument("splits", "i32", "parts a sequence is cut into"),
        Argument("chunk", "i32", "tokens of a part, a multiple of the tile"),
        Argument("table_row", "i32", "entries of a sequence"),
        Argument("block16", "i64", "bytes from block to block / 16"),
    ]
    size = BYTES[dtype]
    rows = _power(group) if dtype == "fp32" else TENSOR_ROWS
    return GpuKernel(
        f"decode_{dtype}_g{group}_d{head_dim}_p{page_tokens}{'_upcast' if upcast else ''}",
        "triton",
        SOURCE,
        "decode_split",
        THREADS,
        f"decode attention, {dtype}, {group} query heads a KV head, head_dim {head_dim}, pages of {page_tokens}",
        (*pointers, *numbers),
        Demand(loads=True),
        reference_parts,
        ("*fp32", "*fp32", *[f"*{dtype}"] * 3, "*i32", "*i32", "fp64", *["i32"] * 4, "i64"),
        (
            ("GROUP", group), ("ROWS", rows), ("DIM", head_dim), ("COLS", _power(head_dim)),
            ("PAGE", page_tokens), ("TILE", tile_of(dtype, head_dim)), ("PER16", 16 // size), ("UPCAST", int(upcast)),
            ("STAGES", stages_of(dtype, group, head_dim)),
        ),
    )  # fmt: skip


def merge_kernel(group: int, head_dim: int) -> GpuKernel:
    """Return ``decode_merge`` compiled for ``group`` query heads a KV head of ``head_dim``."""
    return GpuKernel(
        f"decode_merge_g{group}_d{head_dim}",
        "triton",
        SOURCE,
        "decode_merge",
        THREADS,
        f"merge of the parts of decode attention, {group} query heads a KV head, head_dim {head_dim}",
        (
            Argument("out", "pointer", "float32 [batch, q_heads, dim]", 16),
            Argument("lse", "pointer", "float32 [batch, q_heads]", 16),
            Argument("part", "pointer", "float32 [batch, kv_heads, splits, group, dim]", 16),
            Argument("part_lse", "pointer", "float32 [batch, kv_heads, splits, group]", 16),
            Argument("splits", "i32", "parts a sequence is cut into"),
        ),
        Demand(),
        reference_merge,
        ("*fp32", "*fp32", "*fp32", "*fp32", "i32"),
        (("GROUP", group), ("DIM", head_dim), ("COLS", _power(head_dim)), ("STEP", MERGE_STEP)),
    )


def reference_parts(
    q: Array, k: Array, v: Array, table: Array, lengths: Array, scale: float, splits: int, chunk: int
) -> tuple[Array, Array]:
    """Return what ``decode_split`` leaves, in float64: parts and their log-sum-exps.

    ``q`` [batch, kv_heads, group, dim] and ``k``, ``v`` [block, kv_heads, page, dim] as numbers; ``scale`` multiplies
    scores and includes log2(e), as the kernel's.
    """
    batch, kv_heads, group, dim = q.shape
    page = k.shape[2]
    parts = np.zeros((batch, kv_heads, splits, group, dim))
    logs = np.full((batch, kv_heads, splits, group), -np.inf)
    for b in range(batch):
        for s in range(splits):
            tokens = np.arange(s * chunk, min((s + 1) * chunk, int(lengths[b])))
            if not len(tokens):
                continue
            blocks, slots = table[b, tokens // page], tokens % page
            keys, values = (x[blocks, :, slots].astype(np.float64) for x in (k, v))  # [tokens, kv_heads, dim]
            scores = np.einsum("hgd,thd->hgt", q[b].astype(np.float64), keys) * (scale * np.log(2.0))
            top = scores.max(axis=2, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(axis=2, keepdims=True)
            parts[b, :, s] = np.einsum("hgt,thd->hgd", weights / total, values)
            logs[b, :, s] = (top + np.log(total))[..., 0]
    return parts, logs


def reference_merge(parts: Array, logs: Array) -> tuple[Array, Array]:
    """Return what ``decode_merge`` leaves, in float64, from what :func:`reference_parts` returned: out, lse.

    ``out`` [batch, kv_heads, group, dim]. A part of log-sum-exp -inf weighs nothing, whatever it holds.
    """
    top = logs.max(axis=2, keepdims=True)
    finite = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(logs.astype(np.float64) - finite)
    total = weights.sum(axis=2)
    shares = weights / np.where(total == 0.0, 1.0, total)[:, :, None]
    held = np.where(shares[..., None] > 0.0, parts, 0.0)
    with np.errstate(divide="ignore"):
        lse = np.where(total == 0.0, -np.inf, finite[:, :, 0] + np.log(total))
    return (shares[..., None] * held).sum(axis=2), lse


GATED = (
    split_kernel("bf16", 1, 64, 8),
    split_kernel("bf16", 4, 128, 16),
    split_kernel("bf16", 16, 256, 256),
    split_kernel("fp16", 3, 96, 24),
    split_kernel("fp32", 4, 128, 16),
    split_kernel("fp32", 16, 256, 8),
    merge_kernel(4, 128),
    merge_kernel(1, 80),
)
