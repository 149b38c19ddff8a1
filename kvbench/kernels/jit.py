"""The one place where numba is imported: cache directory first, compilations counted, the same options everywhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from kvbench.kernels import cache, compile_count

CACHE = cache.prepare()

numba: Any = import_module("numba")  # only now: the cache directory is read when numba is imported

compile_count.watch()

F = TypeVar("F", bound=Callable[..., Any])


def kernel(signature: str) -> Callable[[F], F]:
    """Compile at import for ``signature`` (or load from the cache), without the GIL: never inside a timed region."""

    def decorate(function: F) -> F:
        compiled: F = numba.njit(signature, nogil=True, cache=True, error_model="numpy")(function)
        return compiled

    return decorate


def part(function: F) -> F:
    """Compile a piece that only kernels call, for the types they call it with."""
    compiled: F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return compiled


def inlined(function: F) -> F:
    """Like :func:`part`, and LLVM always inlines it: constants among its arguments then decide its branches."""
    compiled: F = numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)
    return compiled


def assembly(function: Callable[..., Any], signature: str) -> str:
    """Compile a kernel or part once more, outside the cache, and return its assembly (cached code cannot show it)."""
    fresh = numba.njit(signature, nogil=True, error_model="numpy")(function.py_func)  # type: ignore[attr-defined]
    return "\n".join(fresh.inspect_asm().values())
