"""The matrix product servers run, by cuBLAS through its C interface: C = A B, bfloat16 with float32 sums or float32."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError, Unavailable

NAMES = ("libcublas.so.13", "libcublas.so.12")
# library_types.h and cublas_api.h, the same numbers in CUDA 11 to 13
R_32F, R_16BF, COMPUTE_32F, OP_N, DEFAULT_ALGORITHM = 0, 14, 68, 0, -1
_P, _I = ctypes.c_void_p, ctypes.c_int
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (ctypes.POINTER(_P),),
    "cublasDestroy_v2": (_P,),
    "cublasSetStream_v2": (_P, _P),
    # handle, two operations, m, n, k, alpha, A type lda, B type ldb, beta, C type ldc, compute type, algorithm
    "cublasGemmEx": (_P, _I, _I, _I, _I, _I, _P, _P, _I, _I, _P, _I, _I, _P, _P, _I, _I, _I, _I),
}


def libraries() -> list[str]:
    """Return where cuBLAS may be: the nvidia wheels a GPU build of torch brings, then what the loader finds."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = [str(path) for name in NAMES for wheel in wheels for path in sorted(wheel.glob(f"*/lib/{name}"))]
    return [*found, *NAMES]


class Cublas:
    """A handle of cuBLAS in the calling thread's context. Raises Unavailable, with why, where no library loads."""

    def __init__(self, paths: list[str] | None = None) -> None:
        reasons: list[str] = []
        self._library: ctypes.CDLL | None = None
        for path in libraries() if paths is None else paths:
            try:
                self._library = ctypes.CDLL(path)
                break
            except OSError as error:
                reasons.append(str(error))
        if self._library is None:
            raise Unavailable(
                "no cuBLAS here", where="gemm", got=reasons[-1] if reasons else "no library to try",
                mend="install a GPU build of torch (extra gpu-cu13 or gpu-cu12), which brings it",
            )  # fmt: skip
        for name, arguments in SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = _I, list(arguments)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        handle = _P()
        self._call("cublasCreate_v2", ctypes.byref(handle))
        self._handle: ctypes.c_void_p | None = handle

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise KvbenchError("cuBLAS refused a call", where=name, got=f"status {status}")

    def gemm(self, stream: ctypes.c_void_p, m: int, n: int, k: int, a: int, b: int, c: int) -> None:
        """Queue C [m, n] = A [m, k] B [k, n] on ``stream``: column-major bfloat16 at device addresses."""
        self._call("cublasSetStream_v2", self._handle, stream)
        self._call(
            "cublasGemmEx", self._handle, OP_N, OP_N, m, n, k, ctypes.byref(self._one), a, R_16BF, m, b, R_16BF, k,
            ctypes.byref(self._zero), c, R_16BF, m, COMPUTE_32F, DEFAULT_ALGORITHM,
        )  # fmt: skip

    def gemm32(
        self, stream: ctypes.c_void_p, shape: tuple[int, int, int], a: tuple[int, int], b: tuple[int, int],
        c: tuple[int, int],
    ) -> None:  # fmt: skip
        """Queue C [m, n] = A [m, k] B [k, n] of ``shape`` (m, n, k) in float32: column-major matrices at (device
        address, leading dimension). No TF32: that takes a math mode nobody sets here."""
        m, n, k = shape
        self._call("cublasSetStream_v2", self._handle, stream)
        self._call(
            "cublasGemmEx", self._handle, OP_N, OP_N, m, n, k, ctypes.byref(self._one), a[0], R_32F, a[1], b[0], R_32F,
            b[1], ctypes.byref(self._zero), c[0], R_32F, c[1], COMPUTE_32F, DEFAULT_ALGORITHM,
        )  # fmt: skip

    def close(self) -> None:
        """Give the handle back. Closing twice is fine."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._call("cublasDestroy_v2", handle)

    def __enter__(self) -> Cublas:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
