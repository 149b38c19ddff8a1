"""Run the Triton products on CPU tensors under TRITON_INTERPRET=1: a process of its own, as a stray store ends it.

Prints one JSON document: {case: null or what was wrong}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch

from kvbench.kernels.gpu import gemm
from kvbench.kernels.gpu.gemm_kernels import Compute, Order, error_bound, reference, tensor_kernel

GUARD = 64
# one element, K = 1, off every tile, tall, wide, exact, more than one step
SIZES = ((1, 1, 1), (130, 70, 1), (65, 63, 17), (150, 3, 129), (3, 150, 66), (64, 64, 64), (129, 66, 130))


def made(rows: int, columns: int, per16: int, dtype: torch.dtype, seed: int, pad: float) -> torch.Tensor:
    wide = -(-columns // per16) * per16
    torch.manual_seed(seed)
    out = torch.full((rows, wide), pad, dtype=dtype)
    out[:, :columns] = torch.randn(rows, columns).to(dtype)
    return out


def product(
    compute: Compute, order: Order, m: int, n: int, k: int, *, programs: int = 3, split: int = 1, raster: int = 0,
    fault: str = "",
) -> str | None:  # fmt: skip
    """Return how C differs from float64 of the same rounded inputs, None within the issue's bound."""
    form = tensor_kernel(compute, order, 64, 1, upcast=compute == "bf16")
    constants: dict[str, Any] = dict(form.constants)
    dtype, per = (torch.bfloat16, 8) if compute == "bf16" else (torch.float32, 4)
    a, b = made(m, k, per, dtype, 1, 3.0), made(n, k, per, dtype, 2, 0.0)
    if fault == "padding":
        b = made(n, k, per, dtype, 2, 1.0)
    wide = -(-n // 4) * 4
    whole = torch.full((m * wide + 2 * GUARD,), 99.0)
    c = whole[GUARD : GUARD + m * wide]
    entry: Any = gemm.gemm_naive if order == "naive" else gemm.gemm_aware
    entry[(programs,)](
        c,
        a,
        b,
        m,
        n,
        k - (fault == "short"),
        a.shape[1] // per,
        b.shape[1] // per,
        wide // 4,
        split,
        raster,
        **constants,
    )
    if not (bool((whole[:GUARD] == 99.0).all()) and bool((whole[GUARD + m * wide :] == 99.0).all())):
        return "a canary died"
    want = reference(a[:, :k].float().numpy(), b[:, :k].float().numpy().T)
    found = c.reshape(m, wide)[:, :n].double().numpy()
    error = float(np.linalg.norm(found - want) / np.linalg.norm(want))
    return None if error <= error_bound(compute, k) else f"error {error:.2e}"


def main() -> int:
    """Run every case."""
    torch.set_num_threads(1)
    cases: dict[str, str | None] = {}
    for compute in ("tf32", "bf16"):
        for order in ("naive", "aware"):
            for size in SIZES:
                cases[f"{compute} {order} {size}"] = product(compute, order, *size)
    for raster in (1, 2):
        cases[f"raster {raster}"] = product("bf16", "naive", 200, 130, 40, raster=raster)
    for split in (2, 3):
        cases[f"split {split}"] = product("tf32", "aware", 190, 130, 70, split=split, programs=4)
    cases["one program"] = product("tf32", "aware", 190, 130, 70, programs=1)
    cases["more programs than tiles"] = product("tf32", "aware", 70, 30, 70, programs=9)
    cases["padding of B"] = product("tf32", "naive", 65, 63, 17, fault="padding")
    cases["a row of K too few"] = product("tf32", "aware", 65, 63, 17, fault="short")
    json.dump(cases, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
