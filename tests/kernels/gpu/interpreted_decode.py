"""Run the decode kernels on CPU tensors under TRITON_INTERPRET=1: a process of its own, as a stray store ends it.

Prints one JSON document: {case: null or what was wrong}. What must come out is the model's float64 attention over keys
and values gathered token by token, from the same rounded numbers.
"""

from __future__ import annotations

import json
import math
import mmap
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvbench.attention.oracles import tolerance
from kvbench.attention.shapes import from_bf16, to_bf16
from kvbench.kernels.gpu import decode
from kvbench.kernels.gpu.decode_kernels import merge_kernel, reference_merge, reference_parts, split_kernel, tile_of
from kvbench.model.paged import attend, merge
from kvbench.model.paged import make_batch as drawn

GUARD = 64  # float32 canaries behind every output
CANARY = 1.5e37
LOG2E = 1.4426950408889634
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def rounded(values: Any, dtype: str) -> tuple[torch.Tensor, Any]:
    """Return ``values`` in ``dtype`` as a tensor, and what they then are as float32."""
    if dtype == "bf16":
        bits = to_bf16(values)
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), from_bf16(bits)
    array = np.asarray(values).astype({"fp32": np.float32, "fp16": np.float16}[dtype])
    return torch.from_numpy(array), array.astype(np.float32)


def guarded(count: int) -> torch.Tensor:
    return torch.full((count + GUARD,), CANARY, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Shape:
    dtype: str = "fp32"
    group: int = 4
    kv_heads: int = 2
    dim: int = 64
    page: int = 16


def run_split(
    of: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: Any, lengths: Any, scale: float, splits: int,
    chunk: int, block16: int | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Launch ``decode_split``; return parts and log-sum-exps. Raises ValueError when a canary died."""
    kernel = split_kernel(of.dtype, of.group, of.dim, of.page, upcast=of.dtype == "bf16")
    batch = len(lengths)
    rows = batch * of.kv_heads * splits * of.group
    part, logs = guarded(rows * of.dim), guarded(rows)
    if block16 is None:
        block16 = of.kv_heads * of.page * of.dim * q.element_size() // 16
    constants: dict[str, Any] = dict(kernel.constants)
    decode.decode_split[(batch * of.kv_heads * splits,)](
        part, logs, q, k, v, torch.from_numpy(table), torch.from_numpy(lengths), scale * LOG2E, of.kv_heads, splits,
        chunk, table.shape[1], block16, **constants,
    )  # fmt: skip
    if not (bool((part[-GUARD:] == CANARY).all()) and bool((logs[-GUARD:] == CANARY).all())):
        raise ValueError("a canary died")
    heads = (batch, of.kv_heads, splits, of.group)
    return part[:-GUARD].reshape(*heads, of.dim), logs[:-GUARD].reshape(heads)


def run_merge(of: Shape, part: torch.Tensor, logs: torch.Tensor) -> tuple[Any, Any]:
    """Launch ``decode_merge``; return out and lse as arrays [batch, q_heads, ...]."""
    batch, kv_heads, splits, group = logs.shape
    rows = batch * kv_heads * group
    out, lse = guarded(rows * of.dim), guarded(rows)
    constants: dict[str, Any] = dict(merge_kernel(group, of.dim).constants)
    decode.decode_merge[(rows,)](out, lse, part.contiguous(), logs.contiguous(), splits, **constants)
    if not (bool((out[-GUARD:] == CANARY).all()) and bool((lse[-GUARD:] == CANARY).all())):
        raise ValueError("a canary died")
    heads = (batch, kv_heads * group)
    return out[:-GUARD].reshape(*heads, of.dim).numpy(), lse[:-GUARD].reshape(heads).numpy()


def error_of(got: Any, want: Any) -> float:
    """Return the largest norm(got - want) / norm(want) of a query head."""
    return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())


def whole(
    of: Shape, lengths: list[int], splits: int, *, spread: float = 1.0, poison: bool = True, exact_table: bool = False,
    factor: float = 1.0, more: int = 0,
) -> str | None:  # fmt: skip
    """Split and merge against the model; return what is wrong. Slots beyond the lengths hold NaN.

    ``factor`` on the scale and ``more`` tokens than there are make it wrong.
    """
    rng = np.random.default_rng(len(lengths) + splits)
    counts = np.array(lengths, np.int32)
    blocks = int((-(-counts // of.page)).sum()) + 2
    made = drawn(counts, of.page, blocks, "shuffled", 3)
    table = made.table
    if not exact_table:
        table = np.concatenate([table, np.full((len(table), 3), 1 << 30, np.int32)], axis=1)
    heads = (blocks, of.kv_heads, of.page, of.dim)
    q, qf = rounded(spread * rng.standard_normal((len(lengths), of.kv_heads, of.group, of.dim)), of.dtype)
    k, kf = rounded(rng.standard_normal(heads), of.dtype)
    v, vf = rounded(rng.standard_normal(heads), of.dtype)
    if poison:
        used = np.zeros((blocks, of.page), bool)
        for row, count in zip(made.table, lengths, strict=True):
            tokens = np.arange(count)
            used[row[tokens // of.page], tokens % of.page] = True
        for x in (k, v):
            x[torch.from_numpy(~used)[:, None, :].expand(-1, of.kv_heads, -1)] = math.nan
    scale = 1.0 / math.sqrt(of.dim)
    tile = tile_of(of.dtype, of.dim)
    chunk = -(-max(max(lengths), 1) // splits // tile) * tile or tile
    while chunk * splits < max(lengths):
        chunk += tile
    part, logs = run_split(of, q, k, v, np.ascontiguousarray(table), counts + np.int32(more), scale * factor, splits,
                           chunk)  # fmt: skip
    out, lse = run_merge(of, part, logs)
    for b, count in enumerate(lengths):
        tokens = np.arange(count)
        places = made.table[b, tokens // of.page], tokens % of.page
        for h in range(of.kv_heads):
            own = slice(h * of.group, (h + 1) * of.group)
            keys, values = (x[places[0], h, places[1]] for x in (kf, vf))
            want, log = attend(qf[b, h], keys, values, scale)
            if not count:
                if out[b, own].any() or not (lse[b, own] == -np.inf).all():
                    return f"sequence {b} has no tokens, but an output"
                continue
            off = float(np.abs(lse[b, own] - log).max())
            most = tolerance(of.dtype, float(np.abs(log).max()))
            error = error_of(out[b, own], want)
            if not error <= most or not off <= 1e-5 * max(1.0, float(np.abs(log).max())):
                return f"sequence {b}, head {h}: error {error:.2g} of {most:.2g}, log-sum-exp off by {off:.2g}"
    parts, numbers = reference_parts(qf, np.nan_to_num(kf), np.nan_to_num(vf), made.table, counts, scale * LOG2E,
                                     splits, chunk)  # fmt: skip
    same, again = reference_merge(parts, numbers)
    if not np.allclose(same.reshape(out.shape), out, atol=2e-2) or not np.allclose(again.reshape(lse.shape), lse,
                                                                                  atol=2e-2, rtol=1e-5):  # fmt: skip
        return "the catalogue's reference says something else"
    return None


def merged(logs: list[float], poisoned: bool = False) -> str | None:
    """Merge parts of given log-sum-exps; those of -inf hold NaN."""
    of = Shape(group=2, kv_heads=1, dim=80)
    rng = np.random.default_rng(len(logs))
    parts = rng.standard_normal((1, 1, len(logs), 2, 80)).astype(np.float32)
    numbers = np.broadcast_to(np.array(logs, np.float32)[None, None, :, None], (1, 1, len(logs), 2)).copy()
    if poisoned:
        parts[numbers == -np.inf] = np.nan
    out, lse = run_merge(of, torch.from_numpy(parts), torch.from_numpy(numbers))
    want, log = merge(np.moveaxis(parts[0, 0], 1, 1), numbers[0, 0])
    if np.isneginf(log).all():
        return None if not out.any() and np.isneginf(lse).all() else "nothing merged into something"
    close = np.allclose(out[0], want, atol=1e-6) and np.allclose(lse[0], log, atol=1e-6)
    return None if close else f"{lse[0].tolist()} for {log.tolist()}"


def far(page: int) -> str | None:
    """A block beyond 2^31 elements of a sparse mapping; tiles inside a page and tiles over pages address it apart."""
    of = Shape("fp16", 1, 1, 64, page)
    stride = 1 << 20  # bytes from block to block: 8192 of them are 8 GiB, 2^32 elements
    number = (1 << 13) - 1
    memory = mmap.mmap(-1, stride * (number + 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    huge = np.frombuffer(memory, np.float16)
    at = number * stride // 2
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((16, 64)).astype(np.float16)
    huge[at : at + keys.size] = keys.ravel()
    q, qf = rounded(rng.standard_normal((1, 1, 1, 64)), "fp16")
    start = torch.from_numpy(huge[:8])  # only the address counts
    table, lengths = np.array([[number]], np.int32), np.array([16], np.int32)
    part, logs = run_split(of, q, start, start, table, lengths, 0.125, 1, 64, stride // 16)
    want, log = attend(qf[0, 0], keys, keys, 0.125)
    error = error_of(part[0, 0, 0].numpy(), want)
    return None if error < 2e-3 and abs(float(logs[0, 0, 0, 0]) - float(log[0])) < 1e-4 else f"error {error:.2g}"


def zero_lse() -> str | None:
    """One token whose score is 0 has a log-sum-exp of exactly 0, and beside a part of -3 it still counts."""
    of = Shape(group=1, kv_heads=1, dim=64)
    q, k = torch.zeros(1, 1, 1, 64), torch.ones(1, 1, 16, 64)
    v = torch.full((1, 1, 16, 64), 3.0)
    part, logs = run_split(of, q, k, v, np.zeros((1, 1), np.int32), np.array([1], np.int32), 1.0, 2, 32)
    out, lse = run_merge(of, part, logs)
    if float(logs[0, 0, 0, 0]) != 0.0 or float(lse[0, 0]) != 0.0 or not (out == 3.0).all():
        return f"{logs.tolist()} {lse.tolist()}"
    return None


def stray() -> str | None:
    """A program too many: the canaries must die of it, or the guards of the other cases prove nothing."""
    of = Shape(group=1, kv_heads=1, dim=64)
    kernel: dict[str, Any] = dict(merge_kernel(1, 64).constants)
    out, lse = guarded(64), guarded(1)
    decode.decode_merge[(2,)](out, lse, torch.zeros(2, 64), torch.zeros(2), 1, **kernel)
    return "a canary died" if float(lse[1]) != CANARY and of.dim == 64 else None


def main() -> int:
    """Run every case and print the document."""
    said: dict[str, str | None] = {}
    ragged = [1, 15, 16, 17, 33, 0, 100]
    for dtype in ("fp32", "fp16", "bf16"):
        said[f"ragged {dtype}"] = whole(Shape(dtype), ragged, 3)
    for group, dim, page in ((1, 80, 8), (3, 96, 24), (8, 128, 32), (16, 256, 64)):
        said[f"group {group}, dim {dim}, page {page}"] = whole(Shape("fp16", group, 1, dim, page), [70, 40], 2)
    said["fp32 of 256"] = whole(Shape("fp32", 5, 1, 256, 16), [33, 7], 2)
    said["a page of 256, bf16"] = whole(Shape("bf16", 4, 1, 128, 256), [257, 31], 1)
    for count in (4095, 4096, 4097):
        said[f"length {count}"] = whole(Shape("fp32", 1, 1, 64, 256), [count], 5)
    said["an exact table"] = whole(Shape("fp32"), [32, 16], 2, exact_table=True)
    said["scores of 1e4"] = whole(Shape("fp32", 2, 1), [50], 2, spread=4000.0)
    said["more splits than tiles"] = whole(Shape("fp32", 2, 1), [20, 3], 8)
    said["LSE 0"] = zero_lse()
    said["merge of 0 and -3"] = merged([0.0, -3.0])
    said["merge with empty parts"] = merged([-math.inf, 2.0, -math.inf, -1e4, 1e4], poisoned=True)
    said["merge of nothing"] = merged([-math.inf] * 3, poisoned=True)
    said["merge of many"] = merged([float(n % 7) for n in range(37)])
    said["far, tiles over pages"], said["far, tiles in a page"] = far(16), far(64)
    said["a wrong scale"] = whole(Shape("fp32", 2, 1), [50], 2, factor=1.001)
    said["a token too many"] = whole(Shape("fp32", 2, 1), [50], 2, more=1, poison=False)
    said["stray"] = stray()
    json.dump(said, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
