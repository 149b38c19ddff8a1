"""``directkv-gpu``: errors of the products' arithmetic, what their machine code passes, and on a GPU two ratios.

Without a GPU the arithmetic is that of the interpreter (tf32 and bf16 inputs, products in float32) and of ``gemm.cu``
as C; it says that the kernels add up the right things, not how a matrix instruction rounds.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvbench.errors import Unavailable
from kvbench.kernels.gpu import build, gates
from kvbench.kernels.gpu.arch import ARCHS, arch
from kvbench.kernels.gpu.gemm_kernels import GATED, ORDERS, Array, error_bound, reference

from .record import Figure, Scalar, judge, lost

GROUP = "directkv-gpu"
ROOT = Path(__file__).resolve().parents[2]
N = 256  # four tiles of 64 a side, four steps of K
NVIDIA = tuple(name for name, target in ARCHS.items() if target.backend == "cuda")
GPU_TARGETS: tuple[
    tuple[str, dict[str, str | int], float | None, float], ...
] = (  # name, axes of the gemm bench, low, high of seconds over those of its ceiling
    ("resident simt over cuBLAS float32, time", {"method": "resident", "n": 8192}, None, 1.25),
    ("naive n = 10240 over its link bytes at the SM-read rate, time", {"method": "naive", "n": 10240}, 0.8, 1.2),
)


def figures(archs: tuple[str, ...] = NVIDIA) -> Iterator[Figure]:
    """Yield the figures; ``archs``: those the gates compile every form for."""
    yield from errors()
    yield gated(archs)
    yield from on_gpu()


def errors() -> Iterator[Figure]:
    """Yield the Frobenius norm of C - ref over that of ref, of each arithmetic and loop order."""
    found: dict[str, float | str] = {}
    for source in (on_host, interpreted):
        try:
            found |= source()
        except (Unavailable, OSError, subprocess.SubprocessError) as error:
            found |= dict.fromkeys(names(source is on_host), str(error))
    for name, value in found.items():
        compute = name.split()[0]
        high = error_bound(compute, N)
        title = f"error of {name}, n = {N}"
        if isinstance(value, str):
            yield lost(GROUP, title, "ratio", high, value)
        else:
            detail: dict[str, Scalar] = {"bound": high}
            note = f"{value:.2e}, at most {high:.2e}; arithmetic without a GPU"
            yield Figure(GROUP, title, "ratio", value, None, high, judge(value, None, high, disturbed=False), note,
                         detail=detail)  # fmt: skip


def names(host: bool) -> list[str]:
    return [f"{c} {o}" for c in (("simt",) if host else ("tf32", "bf16")) for o in ORDERS]


def on_host() -> dict[str, float | str]:
    """Return the errors of ``gemm.cu`` run thread after thread on the host."""
    with tempfile.TemporaryDirectory(prefix="kvbench-gemm-") as name:
        made, tests = Path(name) / "gemm.so", ROOT / "tests" / "kernels" / "gpu"
        folders = [f"-I{tests}", f"-I{ROOT / 'kvbench/kernels/gpu'}"]
        command = ["gcc", "-std=c11", "-O2", "-w", "-shared", "-fPIC", *folders,
                   str(tests / "gemm_on_host.c"), "-o", str(made)]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        library = ctypes.CDLL(str(made))
    library.gemm.restype = ctypes.c_longlong
    rng = np.random.default_rng(5)
    a, b, c = (aligned(rng.standard_normal((N, N), np.float32)) for _ in range(3))
    want, found = reference(a, b), {}
    for order in ORDERS:
        c[:] = np.nan
        pitch = [ctypes.c_uint64(N)] * 3
        vectors = library.gemm(
            f"kvbench_gemm_{order}_64_d1".encode(), 3, *(ctypes.c_void_p(x.ctypes.data) for x in (c, a, b)), N, N, N,
            *pitch, 1, 0, None, 0, 0,
        )  # fmt: skip
        if vectors < 0:
            raise Unavailable("gemm.cu has no such form on the host", where="gemm", got=order)
        found[f"simt {order}"] = error_of(c, want)
    return dict(found)


def aligned(values: Array) -> Array:
    memory = np.empty(values.size + 4, np.float32)
    start = -memory.ctypes.data % 16 // 4
    memory[start : start + values.size] = values.reshape(-1)
    return memory[start : start + values.size].reshape(values.shape)


def error_of(found: Array, want: Array) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - want) / np.linalg.norm(want))


def interpreted() -> dict[str, float | str]:
    """Return the errors of the Triton forms under its interpreter, in a child that it patches for good."""
    why = build.missing_triton()
    if why:
        raise Unavailable(why)
    done = subprocess.run(
        [sys.executable, "-m", "scripts.figures.directkv_gpu"], cwd=ROOT, capture_output=True, text=True, check=True,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    return dict(json.loads(done.stdout))


def main() -> int:
    """Print the errors of the Triton forms as JSON; runs in the child of :func:`interpreted`."""
    import torch

    from kvbench.kernels.gpu import gemm
    from kvbench.kernels.gpu.gemm_kernels import tensor_kernel

    torch.manual_seed(5)
    left, right = torch.randn(N, N), torch.randn(N, N)
    found = {}
    for compute, dtype, per in (("tf32", torch.float32, 4), ("bf16", torch.bfloat16, 8)):
        a, b = left.to(dtype), right.to(dtype)  # b by columns
        want = reference(a.float().numpy(), b.float().numpy().T)
        for order in ORDERS:
            form = tensor_kernel(compute, order, 64, 1, upcast=compute == "bf16")  # type: ignore[arg-type]
            c = torch.full((N, N), float("nan"))
            entry = gemm.gemm_naive if order == "naive" else gemm.gemm_aware
            entry[(3,)](c, a, b, N, N, N, N // per, N // per, N // 4, 1, 0, **dict(form.constants))
            found[f"{compute} {order}"] = error_of(c.numpy(), want)
    print(json.dumps(found))
    return 0


def gated(archs: tuple[str, ...]) -> Figure:
    """Return how many forms of the product pass their gates, of all compiled for ``archs``."""
    title = "forms that pass the compile gates"
    why = build.missing_nvrtc() or build.missing_triton()
    if why:
        return lost(GROUP, title, "count", None, why, low=1.0)
    rows = gates.table(GATED, [arch(name) for name in archs])
    passed = sum(row.status == "pass" for row in rows)
    bad = [f"{row.kernel} {row.arch}: {row.reason}" for row in rows if row.status != "pass"]
    note = (
        "; ".join(bad)[:300] or f"mma, wgmma, tcgen05 or FFMA as claimed, no spills, every load 128 bits ({len(archs)})"
    )
    low = float(len(rows))
    return Figure(GROUP, title, "count", float(passed), low, low, judge(float(passed), low, low, disturbed=False), note,
                  of=len(rows))  # fmt: skip


def on_gpu() -> Iterator[Figure]:
    """Yield what only a GPU tells; without one a line without a target says so."""
    from kvbench.timing.gpu_session import open_driver

    try:
        open_driver()
    except Unavailable as error:
        for name, _, low, high in GPU_TARGETS:
            yield Figure(GROUP, name, "ratio", None, low, high, "no target", str(error))
        return
    for name, axes, low, high in GPU_TARGETS:
        yield one_case(name, axes, low, high)


def one_case(name: str, axes: dict[str, str | int], low: float | None, high: float | None) -> Figure:
    """Return the seconds of a case of the gemm bench over those of its first ceiling."""
    chosen = {"device": "gpu", "pair": "hbm:pinned", "compute": "simt", "tile": "128", "staging": 100} | axes
    words = [word for axis, value in chosen.items() for word in ("-a", f"{axis}={value}")]
    command = [
        sys.executable,
        "-m",
        "kvbench",
        "run",
        "directkv/gemm",
        *words,
        "--profile",
        "quick",
        "--no-db",
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    try:
        row = json.loads(done.stdout)["results"][0]
    except (ValueError, KeyError, IndexError):
        return lost(GROUP, name, "ratio", high, (done.stderr.strip().splitlines() or ["no document"])[-1], low=low)
    fraction = row["fraction"]
    if row["value"] is None or not fraction:
        return lost(GROUP, name, "ratio", high, row["reason"] or "no ceiling to hold it against", low=low)
    ratio = 1.0 / float(fraction)
    detail: dict[str, Scalar] = {"seconds": row["value"], "status": row["status"]}
    disturbed = row["status"] != "ok"
    return Figure(GROUP, name, "ratio", ratio, low, high, judge(ratio, low, high, disturbed=disturbed), row["kernel"],
                  detail=detail)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
