"""A copy beside other work on the fake device: it is under way all the time, or the window says that it was not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import KvbenchError, Unavailable, UsageError, VerifyError
from kvbench.kernels.gpu.cublas import SIGNATURES, Cublas
from kvbench.memory.cuda.buffers import hbm, pinned
from kvbench.memory.cuda.device import Stream
from kvbench.memory.cuda.service import Service
from kvbench.systems.strata.overlap_beside import MOST_PASSES, Beside
from kvbench.systems.strata.overlap_victim import Gemm
from kvbench.transport.gpu_ce import CopyEngine
from kvbench.transport.gpu_pieces import Pieces
from tests.fake_cuda import compiler
from tests.suites.gpu_rig import BYTE_S, OPERATION_S, LadderFake, device

SIZE = 1 << 16
WORK = 8  # copies of the victim


@contextmanager
def made(victims: int = WORK) -> Iterator[tuple[Beside, Stream, LadderFake]]:
    with device() as (lib, service), ExitStack() as stack:
        near = stack.enter_context(hbm(service, 2 * SIZE, seed=1)).copy_address
        far = stack.enter_context(pinned(service, SIZE, seed=2)).copy_address
        stream = stack.enter_context(Stream(service.device))
        copy = CopyEngine(service.device, Pieces(near, far, SIZE, np.zeros(1, np.int64)))

        def victim(on: Stream) -> None:
            for _ in range(victims):
                on.copy(near + SIZE, near, SIZE)

        yield Beside(service.device, victim, [copy], stack.enter_context), stream, lib


def test_the_victim_begins_after_a_pass_of_the_copy_and_ends_before_the_last() -> None:
    each = OPERATION_S + SIZE * BYTE_S
    with made() as (work, stream, _):
        assert work.alone(stream) == pytest.approx(WORK * each, rel=0.05)
        assert work.copy_alone(stream, 5) == pytest.approx(each, rel=0.1)
        found = work.both(stream, 3 * WORK)
        assert found.covered
        assert found.work == pytest.approx(WORK * each, rel=0.05)
        assert 1 <= found.passes <= WORK + 1
        assert found.copy / found.passes == pytest.approx(each, rel=0.1)


def test_a_copy_that_ends_before_the_victim_does_not_cover_it() -> None:
    with made(victims=40) as (work, stream, _):
        assert not work.both(stream, 3).covered


def test_the_copy_is_queued_first_and_the_victim_waits_for_its_first_pass() -> None:
    with made(victims=1) as (work, stream, lib):
        work.both(stream, 3)
        lib.forget()
        work.both(stream, 3)
        calls = [call for call in lib.trace() if call.name in ("cuMemcpyAsync", "cuStreamWaitEvent", "cuEventRecord")]
        names = [call.name for call in calls]
        copies = [k for k, name in enumerate(names) if name == "cuMemcpyAsync"]
        assert len(copies) == 4
        first = calls[copies[0] + 1]
        waits = [call.args[:2] for call in calls if call.name == "cuStreamWaitEvent"]
        assert (stream.handle.value, first.args[0]) in waits
        assert names.index("cuStreamWaitEvent") < copies[0]
        assert calls.index(next(c for c in calls if c.args[:2] == (stream.handle.value, first.args[0]))) < copies[-1]


@pytest.mark.parametrize("passes", [1, MOST_PASSES + 1])
def test_too_few_and_too_many_passes_are_refused(passes: int) -> None:
    with made() as (work, stream, _), pytest.raises(UsageError, match="passes"):
        work.both(stream, passes)


# -- the product -------------------------------------------------------------------------------------------------------

FAKE_CUBLAS = """
#include <stddef.h>
int fake_status, fake_handles, fake_calls, fake_shape[3], fake_types[5];
void *fake_stream;
int cublasCreate_v2(void **h) { *h = &fake_handles; fake_handles++; return fake_status; }
int cublasDestroy_v2(void *h) { fake_handles--; return 0; }
int cublasSetStream_v2(void *h, void *s) { fake_stream = s; return fake_status; }
int cublasGemmEx(void *h, int ta, int tb, int m, int n, int k, const float *alpha, void *a, int at, int lda, void *b,
                 int bt, int ldb, const float *beta, void *c, int ct, int ldc, int compute, int algorithm) {
    fake_calls++;
    fake_shape[0] = m, fake_shape[1] = n, fake_shape[2] = k;
    fake_types[0] = at, fake_types[1] = bt, fake_types[2] = ct, fake_types[3] = compute, fake_types[4] = algorithm;
    return *alpha != 1.0f || *beta != 0.0f || ta || tb || lda != m || ldb != k || ldc != m ? 7 : fake_status;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cublas")
    (folder / "fake.c").write_text(FAKE_CUBLAS)
    path = folder / "libfakecublas.so"
    command = [compiler(), "-shared", "-fPIC", "-O1", str(folder / "fake.c"), "-o", str(path)]
    subprocess.run(command, check=True)
    return path


def test_cublas_is_called_as_its_interface_says(library: Path) -> None:
    import ctypes

    with Cublas([str(library)]) as cublas:
        cublas.gemm(ctypes.c_void_p(64), 3, 5, 7, 1000, 2000, 3000)
        inside = ctypes.CDLL(str(library))
        shape = (ctypes.c_int * 3).in_dll(inside, "fake_shape")
        types = (ctypes.c_int * 5).in_dll(inside, "fake_types")
        assert list(shape) == [3, 5, 7]
        assert list(types) == [14, 14, 14, 68, -1]
        status = ctypes.c_int.in_dll(inside, "fake_status")
        status.value = 13
        try:
            with pytest.raises(KvbenchError, match="status 13"):
                cublas.gemm(ctypes.c_void_p(64), 3, 5, 7, 1000, 2000, 3000)
        finally:
            status.value = 0
        handles = ctypes.c_int.in_dll(inside, "fake_handles")
        assert handles.value == 1
    assert handles.value == 0
    cublas.close()
    assert len(SIGNATURES["cublasGemmEx"]) == 19


def test_without_a_library_it_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"no cuBLAS here.*gpu-cu13"):
        Cublas(["/nowhere/libcublas.so.13"])


def bits(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Round to bfloat16, nearest even, as the device does."""
    raw = values.astype(np.float32).view(np.uint32).reshape(-1).astype(np.uint64)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def test_the_check_of_the_product_accepts_the_right_one_only(library: Path) -> None:
    m, n, k = 24, 16, 32
    with device() as (_, service), ExitStack() as stack:
        work = Gemm(stack.enter_context(Cublas([str(library)])), service, stack.enter_context, 3, (m, n, k))
        stream = stack.enter_context(Stream(service.device))
        work.submit(stream)  # the fake multiplies nothing
        assert stream.queued == 1
        with pytest.raises(VerifyError, match="product is wrong"):
            work.check()
        a, b = (
            (v.astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(shape)
            for v, shape in zip(work._values, ((k, m), (n, k)), strict=True)
        )
        assert np.abs(a).max() <= 1.0
        right = (b @ a).reshape(-1)  # column-major C [m, n] is row-major [n, m]
        put(service, work, right)
        work.check()
        put(service, work, right * 1.05)
        with pytest.raises(VerifyError, match="product is wrong"):
            work.check()
        work.spoil()
        with pytest.raises(VerifyError, match="product is wrong"):
            work.check()


def put(service: Service, work: Gemm, values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    service.write(work._c.copy_address, bits(values))
