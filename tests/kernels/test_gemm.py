"""The product of a layer on cores: right by float64, wrong ones noticed, BLAS with as many threads as asked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.blas import blas_threads
from kvbench.kernels.gemm import BlasGemm, TorchGemm
from tests.needs import missing_module, require


def blas(tokens: int, hidden: int, ffn: int) -> BlasGemm:
    with blas_threads(2) as library:
        return BlasGemm(tokens, hidden, ffn, 3, library)


def torch(tokens: int, hidden: int, ffn: int) -> TorchGemm:
    require("torch", missing_module("torch"))
    return TorchGemm(tokens, hidden, ffn, 3)


@pytest.mark.parametrize("make", [blas, torch])
def test_the_product_is_right_and_a_wrong_one_is_noticed(make: Callable[..., BlasGemm | TorchGemm]) -> None:
    work = make(5, 96, 160)
    assert work.flops == 2.0 * 5 * 96 * 160
    assert work.weight_bytes == (4 if make is blas else 2) * 96 * 160
    work.run(2)
    work.verify()
    if isinstance(work, BlasGemm):
        assert np.allclose(work._c.T, work._x.T.astype(np.float64) @ work._w.T, atol=1e-4)
        work._sgemm = lambda *args, c, **more: c
    else:
        want = work._x.float().numpy().astype(np.float64) @ work._w.float().numpy()
        assert np.allclose(work._c.float().numpy(), want, atol=0.1, rtol=2**-7)
        work._mm = lambda *args, **more: work._c
    with pytest.raises(VerifyError, match="the product is wrong"):
        work.verify()


def test_a_result_that_blas_copies_is_refused() -> None:
    work = blas(4, 8, 8)
    work._sgemm = lambda *args, c, **more: c.copy()
    with pytest.raises(VerifyError, match="copied"):
        work.run()


@pytest.mark.parametrize("make", [blas, torch])
def test_an_empty_matrix_is_a_mistake(make: Callable[..., BlasGemm | TorchGemm]) -> None:
    with pytest.raises(UsageError, match="without elements"):
        make(0, 8, 8)
