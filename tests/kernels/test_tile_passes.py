"""Loads beside products: both in order, failures named, and nothing left undone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import Unavailable, UsageError
from kvbench.kernels.blas import one_thread
from kvbench.kernels.io_calls import call_row
from kvbench.kernels.team import Team
from kvbench.kernels.tile_passes import Products, TilePass

SIZE, COUNT = 8, 12


@pytest.fixture
def team() -> Iterator[Team]:
    cpus = sorted(os.sched_getaffinity(0))
    with one_thread(), Team([cpus[0], cpus[-1]]) as made:
        yield made


class Bed:
    """COUNT matrices in a file, each to be read into a slot and multiplied by the identity into its own C."""

    def __init__(self, folder: Path, depth: int, short: int | None = None) -> None:
        rng = np.random.default_rng(1)
        self.b = rng.random((COUNT, SIZE, SIZE), np.float32)
        path = folder / "tiles"
        path.write_bytes(self.b.tobytes()[: None if short is None else short])
        self.fd = os.open(path, os.O_RDONLY)
        self.slots = np.full((depth, SIZE, SIZE), np.nan, np.float32)
        self.c = np.full((COUNT, SIZE, SIZE), np.nan, np.float32)
        self.one = np.eye(SIZE, dtype=np.float32)
        each = 4 * SIZE * SIZE
        self.loads = np.array(
            [
                call_row("pread", self.fd, self.slots[i % depth].ctypes.data, each, i * each, returns=each)
                for i in range(COUNT)
            ],
            np.int64,
        )
        self.products = Products(COUNT)
        for i in range(COUNT):
            self.products.add(
                i + 1, i + 1, (SIZE, SIZE, SIZE), (int(self.one.ctypes.data), SIZE),
                (int(self.slots[i % depth].ctypes.data), SIZE), (int(self.c[i].ctypes.data), SIZE), first=True,
            )  # fmt: skip

    def close(self) -> None:
        os.close(self.fd)


@pytest.mark.parametrize("depth", [1, 2, 3, COUNT])
def test_every_tile_reaches_its_product(depth: int, team: Team, tmp_path: Path) -> None:
    bed = Bed(tmp_path, depth)
    work = TilePass(bed.loads, bed.products, depth, team)
    for _ in range(20):
        bed.c[:], bed.slots[:] = np.nan, np.nan
        assert work.run() > 0.0
        assert (bed.c == bed.b).all()
    bed.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_either_side_alone(depth: int, team: Team, tmp_path: Path) -> None:
    bed = Bed(tmp_path, depth)
    work = TilePass(bed.loads, bed.products, depth, team)
    work.run(5, 0, apart=True)
    assert (bed.slots[4 % depth] == bed.b[4]).all()
    assert np.isnan(bed.c).all()
    work.run(0, 2, apart=True)
    assert (bed.c[0] == bed.slots[0]).all()
    assert np.isnan(bed.c[2:]).all()
    bed.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_file_that_ends_early_is_named(depth: int, team: Team, tmp_path: Path) -> None:
    bed = Bed(tmp_path, depth, short=5 * 4 * SIZE * SIZE + 100)
    work = TilePass(bed.loads, bed.products, depth, team)
    with pytest.raises(Unavailable, match=rf"load 5 of {COUNT}.*100 of 256 bytes"):
        work.run()
    bed.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_call_is_named(depth: int, team: Team, tmp_path: Path) -> None:
    bed = Bed(tmp_path, depth)
    bed.loads[3, 1] = 987_654  # no such descriptor
    work = TilePass(bed.loads, bed.products, depth, team)
    with pytest.raises(Unavailable, match=r"load 3 of 12.*errno 9"):
        work.run()
    bed.close()


def test_bad_arguments_are_refused(team: Team) -> None:
    empty = np.zeros((0, 6), np.int64)
    with pytest.raises(UsageError, match="not loads"):
        TilePass(np.zeros((1, 5), np.int64), Products(1), 1, team)
    with pytest.raises(UsageError, match="not loads"):
        TilePass(empty, Products(1), 0, team)
    with Team([sorted(os.sched_getaffinity(0))[0]]) as alone, pytest.raises(UsageError, match="two threads"):
        TilePass(empty, Products(1), 2, alone)
