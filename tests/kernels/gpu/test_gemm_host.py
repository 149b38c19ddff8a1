"""gemm.cu as C on the host: right products at every edge, each vector of B read as often as the algebra says."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.kernels.gpu import catalogue
from kvbench.kernels.gpu.gemm_kernels import RASTERS, error_bound, reference, shape_of
from kvbench.systems.directkv.shapes import Gemm, ceil_div
from kvbench.systems.directkv.traffic import column_loads, cpu_aware, naive, unit_bounds
from tests.needs import missing_gcc, require

HERE = Path(__file__).resolve().parent
NAMES = (
    "naive_64_d1", "naive_64_d3", "naive_256_d1", "aware_64_d1", "aware_64_d2", "aware_64_d4", "aware_128_d1",
    "naive_128_d3",
)  # fmt: skip
# below a tile, one element, K = 1, off every tile, tall, wide, deep
SIZES = ((1, 1, 1), (64, 64, 64), (65, 63, 17), (130, 70, 1), (200, 5, 129), (3, 150, 200), (129, 131, 257))
Words = np.ndarray[Any, np.dtype[np.uint64]]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    require("gcc", missing_gcc())
    made = tmp_path_factory.mktemp("gemm") / "gemm.so"
    flags = ["-std=c11", "-O2", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused", "-Werror", "-shared", "-fPIC"]
    command = ["gcc", *flags, "-I", str(HERE), "-I", str(catalogue.FOLDER), str(HERE / "gemm_on_host.c"), "-o",
               str(made)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(made))
    library.gemm.restype = ctypes.c_longlong
    library.runs.restype = ctypes.c_uint64
    return library


def pad(n: int) -> int:
    return ceil_div(n, 4) * 4


def aligned(rows: int, columns: int, fill: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A float32 matrix whose first element lies on 16 bytes."""
    memory = np.full(rows * columns + 4, fill, np.float32)
    start = -memory.ctypes.data % 16 // 4
    return memory[start : start + rows * columns].reshape(rows, columns)


class Product:
    """One run: C, the reads of each 16 bytes of B, how many in all."""

    def __init__(
        self, host: ctypes.CDLL, name: str, m: int, n: int, k: int, *, blocks: int = 3, split: int = 1, raster: int = 0,
        eager: bool = False, fault: int = 0,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(m * 7 + n * 3 + k)
        self.a, self.b = aligned(m, pad(k), 0.0), aligned(k, pad(n), 0.0)
        self.a[:, :k] = rng.standard_normal((m, k))
        self.a[:, k:] = 7.0  # padding: any finite number
        self.b[:, :n] = rng.standard_normal((k, n))
        whole = aligned(m + 2, pad(n), 99.0)
        self.c = whole[1:-1]
        reads = np.zeros(k * pad(n) // 4, np.uint32)
        p = ctypes.c_void_p
        self.vectors: int = host.gemm(
            f"kvbench_gemm_{name}".encode(), blocks, p(self.c.ctypes.data), p(self.a.ctypes.data),
            p(self.b.ctypes.data), m, n, k, ctypes.c_uint64(pad(k)), ctypes.c_uint64(pad(n)), ctypes.c_uint64(pad(n)),
            split, raster, p(reads.ctypes.data), int(eager), fault,
        )  # fmt: skip
        self.reads = reads.reshape(k, pad(n) // 4)
        self.guards = bool((whole[0] == 99.0).all() and (whole[-1] == 99.0).all())
        want = reference(self.a[:, :k], self.b[:, :n])
        with np.errstate(invalid="ignore"):
            self.error = float(np.linalg.norm(self.c[:, :n] - want) / np.linalg.norm(want))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("eager", [False, True])
def test_products_are_right_at_every_edge_and_pipelines_wait(host: ctypes.CDLL, name: str, eager: bool) -> None:
    """Late copies find a read before its wait, early ones a copy over a stage that is still in use."""
    for m, n, k in SIZES:
        made = Product(host, name, m, n, k, eager=eager)
        assert made.error <= error_bound("simt", k), (m, n, k, made.error)
        assert made.guards
        assert made.vectors == made.reads.sum() > 0


@pytest.mark.parametrize("name", ["naive_64_d3", "aware_64_d2", "aware_64_d4"])
def test_a_wait_for_a_stage_too_few_is_noticed(host: ctypes.CDLL, name: str) -> None:
    assert not Product(host, name, 200, 70, 300, fault=1).error <= 1.0


@pytest.mark.parametrize(("m", "n", "k"), [(200, 150, 130), (64, 300, 70), (129, 65, 257), (1000, 64, 64)])
@pytest.mark.parametrize("name", ["naive_64_d1", "aware_64_d2", "aware_128_d1"])
def test_b_is_read_as_often_as_the_algebra_says(host: ctypes.CDLL, name: str, m: int, n: int, k: int) -> None:
    order, tile, _ = name.split("_")
    shape = shape_of(int(tile))
    gemm = Gemm(m, pad(n), k, shape.m, shape.n, shape.k)  # rows of B are padded to 4 elements
    for blocks in (1, 3, 7):
        made = Product(host, name, m, n, k, blocks=blocks, split=gemm.rows)
        if order == "naive":
            assert bool((made.reads == gemm.rows).all())
            assert 16 * made.vectors == naive(gemm).link
            continue
        bounds = unit_bounds(gemm, blocks)
        assert 16 * made.vectors == cpu_aware(gemm, bounds=bounds).link
        for column, loads in enumerate(column_loads(gemm, bounds)):
            first = column * shape.n // 4
            assert bool((made.reads[:, first : first + shape.n // 4] == loads).all())
        whole = Product(host, name, m, n, k, blocks=gemm.columns, split=1)  # whole columns, one a block: once
        assert bool((whole.reads == 1).all())


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 9), (9, 1), (8, 5), (17, 11), (80, 80)])
def test_each_raster_visits_every_tile_once(host: ctypes.CDLL, rows: int, columns: int) -> None:
    out = np.zeros(2, np.uint64)
    orders = {}
    for name, raster in RASTERS.items():
        seen = []
        for i in range(rows * columns):
            host.place(ctypes.c_uint64(i), ctypes.c_uint64(rows), ctypes.c_uint64(columns), raster,
                       ctypes.c_void_p(out.ctypes.data))  # fmt: skip
            seen.append((int(out[0]), int(out[1])))
        assert len(set(seen)) == rows * columns
        assert max(seen) == (rows - 1, columns - 1)
        orders[name] = seen
    assert orders["m_fastest"][: min(2, rows)] == [(i, 0) for i in range(min(2, rows))]
    assert orders["n_fastest"][: min(2, columns)] == [(0, i) for i in range(min(2, columns))]
    if rows > 8:
        assert orders["swizzle"][:9] == [*((i, 0) for i in range(8)), (0, 1) if columns > 1 else (8, 0)]


@pytest.mark.parametrize(("blocks", "rows", "columns", "split"), [
    (132, 80, 80, 80), (132, 80, 80, 1), (132, 80, 80, 4), (5, 7, 3, 2), (200, 3, 3, 3), (1, 1, 1, 1),
])  # fmt: skip
def test_runs_of_units_cover_every_tile_of_c_once(
    host: ctypes.CDLL, blocks: int, rows: int, columns: int, split: int
) -> None:
    out = np.zeros(4 * (blocks + columns) + 4, np.uint64)
    count = host.runs(*(ctypes.c_uint64(v) for v in (blocks, rows, columns, split)), ctypes.c_void_p(out.ctypes.data))
    runs = out[: 4 * count].reshape(-1, 4).astype(int)
    covered = np.zeros((rows, columns), int)
    for _, column, begin, stop in runs:
        assert begin < stop
        covered[begin:stop, column] += 1
    assert bool((covered == 1).all())
    assert count <= columns + blocks - 1
    if (blocks, rows, split) == (132, 80, 80):  # the bound of the facts: 2.64 x the unique bytes
        assert count / columns <= 2.64
