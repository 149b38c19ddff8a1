"""One thread's matrix product through the BLAS of scipy: the arithmetic-bound neighbour of a copy."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.errors import Unavailable, UsageError, VerifyError

PLACES = 64  # of the product that are computed again in float64
PREFIXES = ("openblas_{}", "scipy_openblas_{}", "openblas_{}64_", "scipy_openblas_{}64_")
ALONE_SHARE = 0.05  # of the time of a call that other threads may take: the interpreter's own


def one_thread() -> AbstractContextManager[str]:
    """Let BLAS use only the thread that calls it until the end of the block; otherwise like :func:`blas_threads`."""
    return blas_threads(1)


@contextmanager
def blas_threads(count: int) -> Iterator[str]:
    """Let BLAS use ``count`` threads, the calling one included, until the end of the block; yields the library's name.

    Raises Unavailable where scipy's BLAS is none that can be told (its threads would run on CPUs that are measured) or
    does not take as many.
    """
    import scipy.linalg.blas  # noqa: F401 - loads the library that is looked for

    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
    found = [(path, *functions) for path in sorted(mapped) if (functions := _functions(path)) is not None]
    own = [path for path, _, _ in found if "scipy" in Path(path).parts[-2]] or [path for path, _, _ in found]
    if not own:
        raise Unavailable(
            "the BLAS of scipy cannot be told its threads", where="sgemm", got="no OpenBLAS in this process",
            expected="OpenBLAS", mend="install scipy from its wheel",
        )  # fmt: skip
    before = [(setter, getter()) for _, setter, getter in found]
    try:
        for (setter, _), (path, _, getter) in zip(before, found, strict=True):
            setter(count)
            if path in own and getter() != count:
                raise Unavailable(
                    "BLAS takes another number of threads", where=Path(path).name, got=getter(), expected=str(count)
                )
        yield Path(own[0]).name
    finally:
        for setter, threads in before:
            setter(threads)


def _functions(path: str) -> tuple[Callable[[int], object], Callable[[], int]] | None:
    """Return what sets and reads the number of threads of the library at ``path``."""
    library = ctypes.CDLL(path)
    for prefix in PREFIXES:
        setter, getter = (getattr(library, prefix.format(f"{verb}_num_threads"), None) for verb in ("set", "get"))
        if setter is not None and getter is not None:
            return setter, getter
    return None


class Sgemm:
    """C = A B in float32, n x n each, to be run inside :func:`one_thread`; ``flops`` of one product.

    ``library`` is what :func:`one_thread` yielded. Raises UsageError for an empty matrix.
    """

    def __init__(self, n: int, seed: int, library: str) -> None:
        if n < 1:
            raise UsageError("a matrix without elements", where="sgemm", got=n)
        from scipy.linalg.blas import sgemm

        rng = np.random.default_rng(seed)
        self.n, self.flops, self.nbytes = n, 2.0 * n**3, 3 * 4 * n * n
        self._a, self._b = (
            np.asfortranarray(rng.uniform(-1.0, 1.0, (n, n)).astype(np.float32)) for _ in range(2)
        )  # fmt: skip
        self._c: Any = np.zeros((n, n), np.float32, order="F")
        self._sgemm, self._rng, self._runs = sgemm, rng, 0
        self.kernel = f"sgemm {n} x {n} x {n}, 1 thread, {library}"

    def run(self) -> None:
        """Multiply once."""
        made = self._sgemm(1.0, self._a, self._b, beta=0.0, c=self._c, overwrite_c=1)
        if made is not self._c and not np.shares_memory(made, self._c):
            raise VerifyError("BLAS copied the result", where=self.kernel)
        self._runs += 1

    def verify(self) -> None:
        """Spoil the result, multiply again and compare places of it with float64. Raises VerifyError.

        Also when threads other than this one took part.
        """
        self._c[:] = np.nan
        process, own = time.process_time(), time.thread_time()
        self.run()
        own = time.thread_time() - own
        others = time.process_time() - process - own
        if self.n >= 512 and others > ALONE_SHARE * own:
            raise VerifyError("BLAS used other threads", where=self.kernel, got=f"{others:.3g} s beside {own:.3g} s")
        i, j = (self._rng.integers(0, self.n, PLACES) for _ in range(2))
        wanted = np.einsum("pk,kp->p", self._a[i].astype(np.float64), self._b[:, j].astype(np.float64))
        worst = float(np.abs(self._c[i, j] - wanted).max())
        # The rounding of a float32 sum of n terms below 1 grows with its length at most (Higham, ch. 3).
        if not worst <= self.n * 2.0**-23:
            raise VerifyError("the product is wrong", where=self.kernel, got=f"off by {worst:.3g}")
