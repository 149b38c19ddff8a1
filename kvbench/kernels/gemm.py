"""The matrix product of a layer on cores, tokens x hidden x ffn: in float32 by BLAS, in bfloat16 by PyTorch."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kvbench.errors import MissingExtra, UsageError, VerifyError

PLACES = 64  # of the product that are computed again in float64


class CoreGemm(Protocol):
    """``run(reps)`` products of ``flops`` operations each; the weights have ``weight_bytes``."""

    kernel: str
    flops: float
    weight_bytes: int

    def run(self, reps: int) -> None: ...
    def verify(self) -> None: ...


def _values(rng: np.random.Generator, *shape: int) -> Any:
    """Return float32 in [-1, 1)."""
    made = rng.random(shape, np.float32)
    made *= 2.0
    made -= 1.0
    return made


def _sizes(tokens: int, hidden: int, ffn: int) -> None:
    if min(tokens, hidden, ffn) < 1:
        raise UsageError("a matrix without elements", where="gemm", got=(tokens, hidden, ffn))


def _compare(kernel: str, x: Any, w: Any, got: Any, relative: float, share: float) -> None:
    """Raise VerifyError unless ``got`` is the sum over axis 1 of ``x`` and ``w``, [places, hidden], in float64.

    ``relative``: rounding of the result; ``share``: of the sum of the terms' sizes, for sums in float32.
    """
    left, right = x.astype(np.float64), w.astype(np.float64)
    wanted, size = (left * right).sum(axis=1), np.abs(left * right).sum(axis=1)
    off = np.abs(got - wanted) - (np.abs(wanted) * relative + size * share)
    if not bool((off <= 0.0).all()):
        worst = int(off.argmax())
        raise VerifyError(
            "the product is wrong", where=kernel, got=f"{got[worst]:.6g}", expected=f"{wanted[worst]:.6g}"
        )


class BlasGemm:
    """In float32 by scipy's BLAS, to be run inside :func:`blas.blas_threads`; ``library`` is what that yielded.

    Column-major: the transposed product, so that nothing is copied. Raises UsageError for an empty matrix.
    """

    def __init__(self, tokens: int, hidden: int, ffn: int, seed: int, library: str) -> None:
        _sizes(tokens, hidden, ffn)
        from scipy.linalg.blas import sgemm

        rng = np.random.default_rng(seed)
        self.flops, self.weight_bytes = 2.0 * tokens * hidden * ffn, 4 * hidden * ffn
        self._w, self._x = _values(rng, hidden, ffn).T, _values(rng, tokens, hidden).T
        self._c: Any = np.full((ffn, tokens), np.nan, np.float32, order="F")
        self._sgemm, self._rng = sgemm, rng
        self.kernel = f"sgemm {tokens} x {hidden} x {ffn}, {library}"

    def run(self, reps: int = 1) -> None:
        """Multiply ``reps`` times."""
        for _ in range(reps):
            made = self._sgemm(1.0, self._w, self._x, beta=0.0, c=self._c, overwrite_c=1)
            if not np.shares_memory(made, self._c):
                raise VerifyError("BLAS copied the result", where=self.kernel)

    def verify(self) -> None:
        """Spoil the result, multiply again and compare places of it with float64. Raises VerifyError."""
        self._c[:] = np.nan
        self.run()
        i, j = (self._rng.integers(0, n, PLACES) for n in self._c.shape)
        _compare(self.kernel, self._x[:, j].T, self._w[i], self._c[i, j], 2.0**-23, 2.0**-21)


class TorchGemm:
    """In bfloat16 by PyTorch on cores, as many threads as it was told. Raises UsageError, MissingExtra."""

    def __init__(self, tokens: int, hidden: int, ffn: int, seed: int) -> None:
        _sizes(tokens, hidden, ffn)
        try:
            import torch
        except ModuleNotFoundError:
            raise MissingExtra("torch", "torch", "a product in bfloat16 on cores") from None
        rng = np.random.default_rng(seed)
        self.flops, self.weight_bytes = 2.0 * tokens * hidden * ffn, 2 * hidden * ffn
        self._x, self._w = (
            torch.from_numpy(_values(rng, *shape)).to(torch.bfloat16) for shape in ((tokens, hidden), (hidden, ffn))
        )
        self._c = torch.empty((tokens, ffn), dtype=torch.bfloat16)
        self._mm, self._rng = torch.mm, rng
        self.kernel = f"torch {torch.__version__} mm bf16 {tokens} x {hidden} x {ffn}"

    def run(self, reps: int = 1) -> None:
        """Multiply ``reps`` times."""
        for _ in range(reps):
            self._mm(self._x, self._w, out=self._c)

    def verify(self) -> None:
        """Spoil the result, multiply again and compare places of it with float64. Raises VerifyError."""
        self._c.fill_(float("nan"))
        self.run()
        i, j = (self._rng.integers(0, n, PLACES) for n in self._c.shape)
        x, w, c = self._x[i].float().numpy(), self._w[:, j].T.float().numpy(), self._c[i, j].float().numpy()
        _compare(self.kernel, x, w, c, 2.0**-8, 2.0**-16)
