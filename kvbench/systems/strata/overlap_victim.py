"""What a copy is measured beside on the GPU: a matrix product in bfloat16; a reader is memory.cuda.movers' own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvbench.errors import VerifyError
from kvbench.memory.cuda.buffers import hbm
from kvbench.memory.cuda.device import Stream
from kvbench.memory.cuda.service import Service
from kvbench.systems.strata.overlap_queue import Enter

if TYPE_CHECKING:
    from kvbench.kernels.gpu.cublas import Cublas

M, N, K = 4096, 4096, 14336  # the down projection of Llama-3.1-8B over 4096 tokens
PLACES = 64
CHUNK_ROWS = 512


class Victim(Protocol):
    """Work to be slowed down, verified: ``check`` raises VerifyError unless the last submission did it."""

    kernel: str

    def submit(self, stream: Stream) -> None: ...
    def spoil(self) -> None: ...
    def check(self) -> None: ...


class Gemm:
    """C [m, n] = A [m, k] B [k, n] in bfloat16, column-major, by cuBLAS; random values in [-1, 1)."""

    def __init__(
        self, cublas: Cublas, service: Service, enter: Enter, seed: int, shape: tuple[int, int, int] = (M, N, K)
    ) -> None:
        self._cublas, self._service, self._shape = cublas, service, shape
        m, n, k = shape
        self.flops = 2.0 * m * n * k
        self.kernel = f"cublasGemmEx bf16 {m} x {n} x {k}"
        self._rng = np.random.default_rng(seed)
        self._a, self._b, self._c = (enter(hbm(service, 2 * size, seed=seed)) for size in (m * k, k * n, m * n))
        self._values = [self._fill(self._a, m * k), self._fill(self._b, k * n)]
        self.spoil()

    def _fill(self, buffer: Any, count: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
        floats = self._rng.uniform(-1.0, 1.0, count).astype(np.float32)
        bits = (floats.view(np.uint32) >> 16).astype(np.uint16)
        self._service.write(buffer.copy_address, bits)
        return bits

    def submit(self, stream: Stream) -> None:
        """Queue one product."""
        assert stream.handle is not None
        addresses = [buffer.copy_address for buffer in (self._a, self._b, self._c)]
        self._cublas.gemm(stream.handle, *self._shape, *addresses)
        stream.count(1)

    def spoil(self) -> None:
        """Make the result wrong: every element is not a number."""
        stream = self._service.stream
        stream.set_bytes(self._c.copy_address, 0xFF, self._c.nbytes)
        stream.synchronize()

    def check(self) -> None:
        """Compare places of the result with float64. Raises VerifyError."""
        m, n, k = self._shape
        i, j = self._rng.integers(0, m, PLACES), self._rng.integers(0, n, PLACES)
        a, b = (_floats(bits) for bits in (self._values[0].reshape(k, m)[:, i], self._values[1].reshape(n, k)[j]))
        wanted = np.einsum("kp,pk->p", a, b)
        size = np.einsum("kp,pk->p", np.abs(a), np.abs(b))
        got = np.array([
            _floats(self._service.read(self._c.copy_address + 2 * (col * m + row), 2).view(np.uint16))[0]
            for row, col in zip(i.tolist(), j.tolist(), strict=True)
        ])  # fmt: skip
        # bfloat16 rounds the result to 2^-8; float32 sums in any order stay far below that of the terms' size
        off = np.abs(got - wanted) - (np.abs(wanted) * 2.0**-8 + size * 2.0**-16)
        if not bool((off <= 0.0).all()):
            raise VerifyError("the product is wrong", where=self.kernel, got=f"{got[off.argmax()]:.4g}",
                              expected=f"{wanted[off.argmax()]:.4g}")  # fmt: skip


def _floats(bits: np.ndarray[Any, np.dtype[np.uint16]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
