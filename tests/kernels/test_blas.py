"""A matrix product of one thread: the right product, by one thread only, and BLAS is given back as it was."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import UsageError, VerifyError
from kvbench.kernels import blas
from kvbench.kernels.blas import Sgemm, one_thread


def threads() -> dict[str, int]:
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
    found = {path: blas._functions(path) for path in mapped}
    return {path: functions[1]() for path, functions in found.items() if functions is not None}


def test_the_product_is_right_and_a_wrong_one_is_noticed() -> None:
    with one_thread() as library:
        assert "openblas" in library
        work = Sgemm(96, 3, library)
        work.run()
        assert np.allclose(work._c, work._a.astype(np.float64) @ work._b, atol=1e-4)
        work.verify()
        work._sgemm = lambda *args, c, **more: c
        with pytest.raises(VerifyError, match="wrong"):
            work.verify()
        assert work.flops == 2.0 * 96**3


def test_threads_of_blas_are_one_inside_the_block_and_as_before_after_it() -> None:
    with one_thread():
        before = threads()
        assert before
        assert set(before.values()) == {1}
    path = next(iter(before))
    functions = blas._functions(path)
    assert functions is not None
    own = functions[1]()
    functions[0](2)
    try:
        with one_thread():
            assert threads()[path] == 1
        assert threads()[path] == 2
    finally:
        functions[0](own)


def test_no_matrix_and_no_library() -> None:
    with pytest.raises(UsageError):
        Sgemm(0, 1, "")
    assert blas._functions(ctypes.util.find_library("c") or "libc.so.6") is None
