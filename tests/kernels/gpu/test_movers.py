"""The index arithmetic of the CUDA C++ sources, run as C on the host: right to the last byte, whatever the grid."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbench.kernels.gpu import catalogue, reference
from tests.needs import missing_gcc, require

HERE = Path(__file__).resolve().parent
GUARD = 64
U64, POINTER, UNSIGNED = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint
# below a word, around a line, a round of the smallest grid and more, odd tails
SIZES = (0, 1, 15, 16, 17, 127, 128, 4096, 8 * 16 * 64 - 16, 8 * 16 * 64, 3 * 8 * 16 * 64 + 1000 + 13)
GRIDS = ((1, 64), (3, 32), (5, 64))


def build(folder: Path, name: str) -> ctypes.CDLL:
    require("gcc", missing_gcc())
    made = folder / f"{name}.so"
    includes = ["-I", str(HERE), "-I", str(catalogue.FOLDER)]
    flags = ["-std=c11", "-O1", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused", "-Werror", "-shared", "-fPIC"]
    command = ["gcc", *flags, *includes, str(HERE / f"{name}.c"), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(made))


@pytest.fixture(scope="module")
def movers(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("movers"), "movers_on_host")


class Array:
    """``nbytes`` random bytes, 16-byte aligned, with canaries at both ends."""

    def __init__(self, nbytes: int, seed: int) -> None:
        self.memory = np.random.default_rng(seed).integers(0, 256, nbytes + 2 * GUARD + 16, np.uint8)
        start = -self.memory.ctypes.data % 16 + GUARD
        self.data = self.memory[start : start + nbytes]
        self.before, self.after = self.memory[:start].copy(), self.memory[start + nbytes :].copy()
        self.start = start

    @property
    def address(self) -> ctypes.c_void_p:
        return POINTER(self.memory.ctypes.data + self.start)

    def whole(self) -> bool:
        end = self.start + len(self.data)
        return bool(
            np.array_equal(self.memory[: self.start], self.before) and np.array_equal(self.memory[end:], self.after)
        )


@pytest.mark.parametrize("entry", ["grid_copy", "grid_link_copy"])
@pytest.mark.parametrize("grid", GRIDS)
def test_copies_move_every_byte_and_no_other(movers: ctypes.CDLL, entry: str, grid: tuple[int, int]) -> None:
    for nbytes in SIZES:
        src, dst = Array(nbytes, 1), Array(nbytes, 2)
        expected = reference.copy(src.data)
        getattr(movers, entry)(*grid, dst.address, src.address, U64(nbytes))
        assert np.array_equal(dst.data, expected), (nbytes, grid)
        assert np.array_equal(src.data, expected)
        assert dst.whole()


@pytest.mark.parametrize("grid", GRIDS)
def test_arithmetic_leaves_how_many_steps_every_thread_did(movers: ctypes.CDLL, grid: tuple[int, int]) -> None:
    for steps in (0, 1, 7, 1000):
        out = np.full(grid[0] * grid[1] + 1, 5, np.uint64)
        movers.grid_arithmetic(*grid, POINTER(out.ctypes.data), U64(steps), ctypes.c_double(1.0))
        assert np.array_equal(out[:-1], reference.arithmetic(len(out) - 1, steps))
        assert out[-1] == 5


@pytest.mark.parametrize("entry", ["grid_read", "grid_link_read"])
@pytest.mark.parametrize("grid", GRIDS)
def test_reads_leave_the_sum_of_all_words(movers: ctypes.CDLL, entry: str, grid: tuple[int, int]) -> None:
    for nbytes in SIZES:
        src, out = Array(nbytes, 3), np.zeros(grid[0], np.uint64)
        getattr(movers, entry)(*grid, POINTER(out.ctypes.data), src.address, U64(nbytes))
        assert int(out.sum(dtype=np.uint64)) == reference.read(src.data), (nbytes, grid)


@pytest.mark.parametrize("grid", GRIDS)
def test_write_fills_every_byte_and_no_other(movers: ctypes.CDLL, grid: tuple[int, int]) -> None:
    first, step = 0xFFFF_FFFF_FFFF_FFF0, 0x9E37_79B9_7F4A_7C15
    for nbytes in SIZES:
        dst = Array(nbytes, 4)
        movers.grid_write(*grid, dst.address, U64(nbytes), U64(first), U64(step))
        assert np.array_equal(dst.data, reference.write(nbytes, first, step)), (nbytes, grid)
        assert dst.whole()


@pytest.mark.parametrize("grid", GRIDS)
def test_triad_agrees_bit_for_bit(movers: ctypes.CDLL, grid: tuple[int, int]) -> None:
    for nbytes in sorted({size // 8 * 8 for size in SIZES}):
        a, b, c = (Array(nbytes, 5 + k) for k in range(3))
        values = [x.data.view(np.float64) for x in (b, c)]
        for k, v in enumerate(values):
            v[:] = 1.0 + np.random.default_rng(k).random(len(v))
        movers.grid_triad(*grid, a.address, b.address, c.address, U64(nbytes), ctypes.c_double(4.0))
        assert np.array_equal(a.data.view(np.float64), reference.triad(values[0], values[1], 4.0)), (nbytes, grid)
        assert a.whole()


def accesses(movers: ctypes.CDLL, blocks: int, threads: int, block: int, thread: int, words: int) -> list[int]:
    log = (U64 * 256)()
    base = 1 << 40
    count = movers.copy_log(blocks, threads, block, thread, U64(base), U64(16 * words), log)
    assert count <= len(log)
    return [int(log[k]) - base for k in range(count)]


def test_a_thread_keeps_its_place_beyond_2_to_32_words(movers: ctypes.CDLL) -> None:
    blocks, threads = 1 << 21, 512
    per_round = 8 * blocks * threads  # 2^33 words: every product of the index arithmetic leaves 32 bits
    words = 2 * per_round + 5
    last = accesses(movers, blocks, threads, blocks - 1, threads - 1, words)
    tile = [8 * threads * (blocks - 1) + threads * k + threads - 1 for k in range(8)]
    assert last == [*tile, *tile, *(per_round + t for t in tile), *(per_round + t for t in tile)]
    # the five words of the rest go to the first five threads, once for the load and once for the store
    assert accesses(movers, blocks, threads, 0, 4, words)[-2:] == [2 * per_round + 4] * 2
    assert accesses(movers, blocks, threads, 0, 5, words)[-1] < 2 * per_round
    dealt = [blocks * threads * k + threads * 9 + 7 for k in range(8)]
    assert accesses(movers, blocks, threads, 9, 7, per_round - threads) == [*dealt, *dealt]


def test_small_buffers_use_every_block(movers: ctypes.CDLL) -> None:
    """64 blocks, one word a thread: a grid that hands out whole tiles would leave 56 of them idle."""
    words = 64 * 512
    assert {len(accesses(movers, 64, 512, b, 511, words)) for b in range(64)} == {2}


def test_chase_counts_warm_up_and_window(tmp_path: Path) -> None:
    library = build(tmp_path, "chase_on_host")
    nbytes, stride = 4096, 64
    buffer = np.zeros(nbytes // 8, np.uint64)
    base = int(buffer.ctypes.data)
    buffer[:] = reference.chain(base, nbytes, stride, 7)
    for warm, loads in ((0, 1), (3, 8), (64, 17), (5, 64)):
        out: Any = np.zeros(3, np.uint64)
        library.host_chase(POINTER(out.ctypes.data), U64(base), U64(warm), U64(loads))
        assert out.tolist() == [reference.chase(buffer, base, base, warm + loads), loads, 1]


def test_a_chain_is_one_cycle_over_all_nodes() -> None:
    base, nbytes, stride = 1 << 44, 8192, 128
    memory = reference.chain(base, nbytes, stride, 3)
    seen, address = [], base
    for _ in range(nbytes // stride):
        seen.append(address)
        address = reference.chase(memory, base, address, 1)
    assert address == base
    assert sorted(seen) == list(range(base, base + nbytes, stride))
    assert sorted(seen) != seen  # no prefetcher's order
