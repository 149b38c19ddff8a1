"""Loops over calls of a C function, compiled: what a driver call costs, without what Python adds to each.

ctypes and the interpreter add some microseconds to a call that takes as many. The function's address travels as an
argument, as everywhere in kernels: baked in, it would break cached code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbench.errors import UsageError
from kvbench.kernels import emit
from kvbench.kernels.intrinsics import word_load
from kvbench.kernels.jit import kernel

from numba.core import types  # isort: skip  jit.py has to be first
from numba.extending import intrinsic  # isort: skip

Rows = npt.NDArray[np.int64]
_INT, _CODE = types.int64, types.int32


# Every integer and pointer argument of the ABIs of x86-64 and arm64 Linux has a register or an 8-byte slot of its own:
# a 32-bit one passed as 64 bits with zeros above arrives as itself.
def _emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return emit.call(builder, args[0], list(args[1:]), emit.I32)


_called: Callable[[Any], Any] = intrinsic  # numba itself hands in the first argument, which no type says


@_called
def _call2(typingctx: Any, f: Any, a: Any, b: Any) -> Any:
    return _CODE(*[_INT] * 3), _emit


@_called
def _call4(typingctx: Any, f: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return _CODE(*[_INT] * 5), _emit


@_called
def _call6(typingctx: Any, f: Any, a: Any, b: Any, c: Any, d: Any, e: Any, g: Any) -> Any:
    return _CODE(*[_INT] * 7), _emit


@_called
def _call8(typingctx: Any, f: Any, a: Any, b: Any, c: Any, d: Any, e: Any, g: Any, h: Any, i: Any) -> Any:
    return _CODE(*[_INT] * 9), _emit


@_called
def _call9(typingctx: Any, f: Any, a: Any, b: Any, c: Any, d: Any, e: Any, g: Any, h: Any, i: Any, j: Any) -> Any:
    return _CODE(*[_INT] * 10), _emit


@_called
def _call11(
    typingctx: Any, f: Any, a: Any, b: Any, c: Any, d: Any, e: Any, g: Any, h: Any, i: Any, j: Any, k: Any, m: Any
) -> Any:  # fmt: skip
    return _CODE(*[_INT] * 12), _emit


@kernel("int64(int64, int64, int64, int64)")
def _loop2(function: int, rows: int, count: int, step: int) -> int:
    for i in range(count):
        at = rows + i * step
        code: int = _call2(function, word_load(at), word_load(at + 8))
        if code != 0:
            return code
    return 0


@kernel("int64(int64, int64, int64, int64)")
def _loop4(function: int, rows: int, count: int, step: int) -> int:
    for i in range(count):
        at = rows + i * step
        code: int = _call4(function, word_load(at), word_load(at + 8), word_load(at + 16), word_load(at + 24))
        if code != 0:
            return code
    return 0


@kernel("int64(int64, int64, int64, int64)")
def _loop6(function: int, rows: int, count: int, step: int) -> int:
    for i in range(count):
        at = rows + i * step
        code: int = _call6(
            function, word_load(at), word_load(at + 8), word_load(at + 16), word_load(at + 24), word_load(at + 32),
            word_load(at + 40),
        )  # fmt: skip
        if code != 0:
            return code
    return 0


@kernel("int64(int64, int64, int64, int64)")
def _loop8(function: int, rows: int, count: int, step: int) -> int:
    for i in range(count):
        at = rows + i * step
        code: int = _call8(
            function, word_load(at), word_load(at + 8), word_load(at + 16), word_load(at + 24), word_load(at + 32),
            word_load(at + 40), word_load(at + 48), word_load(at + 56),
        )  # fmt: skip
        if code != 0:
            return code
    return 0


@kernel("int64(int64, int64, int64, int64)")
def _loop9(function: int, rows: int, count: int, step: int) -> int:
    for i in range(count):
        at = rows + i * step
        code: int = _call9(
            function, word_load(at), word_load(at + 8), word_load(at + 16), word_load(at + 24), word_load(at + 32),
            word_load(at + 40), word_load(at + 48), word_load(at + 56), word_load(at + 64),
        )  # fmt: skip
        if code != 0:
            return code
    return 0


@kernel("int64(int64, int64, int64, int64)")
def _loop11(function: int, rows: int, count: int, step: int) -> int:
    for i in range(count):
        at = rows + i * step
        code: int = _call11(
            function, word_load(at), word_load(at + 8), word_load(at + 16), word_load(at + 24), word_load(at + 32),
            word_load(at + 40), word_load(at + 48), word_load(at + 56), word_load(at + 64), word_load(at + 72),
            word_load(at + 80),
        )  # fmt: skip
        if code != 0:
            return code
    return 0


_LOOPS = {2: _loop2, 4: _loop4, 6: _loop6, 8: _loop8, 9: _loop9, 11: _loop11}


class CallLoop:
    """Calls the C function at ``function``, which returns an int and takes 2, 4, 6, 8, 9 or 11 integers or pointers.

    ``rows``: int64 [calls, arguments], C-contiguous and kept alive here; a caller may change its values between runs.
    Raises UsageError for another number of arguments or another array.
    """

    def __init__(self, function: int, rows: Rows) -> None:
        if rows.dtype != np.int64 or rows.ndim != 2 or not rows.flags.c_contiguous or not rows.size:
            raise UsageError("not rows of arguments", where="CallLoop", got=f"{rows.dtype} {rows.shape}")
        if rows.shape[1] not in _LOOPS:
            raise UsageError(
                "no loop for that many arguments", where="CallLoop", got=rows.shape[1], expected="2, 4, 6, 8, 9 or 11"
            )
        self.rows = rows
        self._function, self._address = function, rows.ctypes.data
        self._loop, self._step = _LOOPS[rows.shape[1]], rows.strides[0]

    def __call__(self) -> int:
        """Make one call a row, in order; return 0, or the first other code, at which it stopped."""
        return int(self._loop(self._function, self._address, len(self.rows), self._step))

    def repeat(self, times: int) -> int:
        """Make the call of the first row ``times`` times; return as a call."""
        return int(self._loop(self._function, self._address, times, 0))
