"""Fragment copies: every variant puts exactly the rows' bytes where they belong, and nothing else anywhere."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvbench.errors import UsageError
from kvbench.kernels.moves import FragmentCopy, Rows, shares, variants
from kvbench.kernels.raw import bytes_at
from kvbench.kernels.team import Team
from kvbench.memory import libc

CPU = min(os.sched_getaffinity(0))


@pytest.fixture(scope="module", params=[1, 3])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with Team([CPU] * request.param) as made:
        yield made


def memory(nbytes: int, seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).integers(0, 256, nbytes + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:nbytes]


def laid_out(sizes: list[int], unit: int, seed: int) -> tuple[np.ndarray, np.ndarray, Rows]:
    """Return source, target and rows: fragments of ``sizes`` in random places of both, gaps between them."""
    rng = np.random.default_rng(seed)
    places = []
    for _ in range(2):
        order, at, found = rng.permutation(len(sizes)), unit, np.zeros(len(sizes), np.int64)
        for i in order:
            found[i] = at
            at += -(-sizes[i] // unit) * unit + unit
        places.append((found, at))
    source, target = memory(places[0][1], seed), memory(places[1][1], seed + 1)
    columns = (places[0][0] + source.ctypes.data, places[1][0] + target.ctypes.data, np.array(sizes, np.int64))
    return source, target, np.ascontiguousarray(np.stack(columns, 1))


def wanted(source: np.ndarray, target: np.ndarray, rows: Rows) -> np.ndarray:
    made = target.copy()
    for fro, to, n in rows.tolist():
        a, b = fro - source.ctypes.data, to - target.ctypes.data
        made[b : b + n] = source[a : a + n]
    return made


SETS = {
    "pages": [4096] * 23, "one": [512], "mixed": [64, 512, 1152, 4096, 64, 20480, 576, 512], "lines": [64] * 40,
    "fewer than threads": [1024, 1024],
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_every_variant_moves_the_rows_and_nothing_else(name: str, team: Team) -> None:
    source, target, rows = laid_out(SETS[name], 64, len(name))
    right, before = wanted(source, target, rows), target.copy()
    for variant in variants(rows):
        target[:] = before
        work = FragmentCopy(variant, rows, team)
        assert work.run(2) > 0
        assert np.array_equal(target, right), variant
        assert work.link_bytes == sum(SETS[name])


def test_uneven_fragments_have_only_memcpy(team: Team) -> None:
    source, target, rows = laid_out([656, 41, 4096, 1], 1, 9)
    right = wanted(source, target, rows)
    assert variants(rows) == ("memcpy none",)
    FragmentCopy("memcpy none", rows, team).run()
    assert np.array_equal(target, right)
    with pytest.raises(UsageError, match="not whole cache lines"):
        FragmentCopy("nt none", rows, team)


def test_offsets_beyond_four_gibibytes(team: Team) -> None:
    """Untouched pages of a mapping cost nothing: 6 GiB of addresses, a few pages of memory."""
    nbytes = 6 << 30
    sparse = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | libc.MAP_NORESERVE)
    try:
        view = np.frombuffer(sparse, np.uint8)
        base = view.ctypes.data
        offsets = np.array([0, (2 << 30) - 4096, 2 << 30, (4 << 30) + 8192, nbytes - 4096], np.int64)
        payload = np.random.default_rng(3).integers(1, 256, (len(offsets), 4096), np.uint8)
        target = memory(4096 * len(offsets), 4)
        for row, at in zip(payload, offsets.tolist(), strict=True):
            view[at : at + 4096] = row
        columns = (base + offsets, target.ctypes.data + 4096 * np.arange(len(offsets)), np.full(len(offsets), 4096))
        rows = np.ascontiguousarray(np.stack(columns, 1).astype(np.int64))
        for variant in ("nt l2+4096", "memcpy none"):
            target[:] = 0
            FragmentCopy(variant, rows, team).run()
            assert np.array_equal(target.reshape(-1, 4096), payload)
        del view
    finally:
        sparse.close()


def test_shares_split_bytes_and_not_counts() -> None:
    sizes = np.array([100, 100, 100, 300, 600], np.int64)
    assert shares(sizes, 2).tolist() == [0, 4, 5]
    assert shares(np.full(7, 64, np.int64), 3).tolist() == [0, 2, 5, 7]
    assert shares(np.array([64], np.int64), 4)[[0, -1]].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (np.zeros((0, 3), np.int64), "nothing to copy"),
        (np.array([[64, 128, 0]]), "nothing to copy"),
        (np.zeros((2, 2), np.int64), "not rows of fragments"),
        (np.array([[64, 128, 64]], np.int32), "not rows of fragments"),
        (np.zeros((4, 6), np.int64)[:, ::2], "not rows of fragments"),
    ],
)
def test_bad_rows_are_refused(rows: Rows, words: str, team: Team) -> None:
    with pytest.raises(UsageError, match=words):
        FragmentCopy("memcpy none", rows, team)


def test_bad_parts_and_variants_are_refused(team: Team) -> None:
    _, _, rows = laid_out([64, 64], 64, 1)
    with pytest.raises(UsageError, match="not parts"):
        FragmentCopy("memcpy none", rows, team, np.array([0] * len(team) + [1], np.int64))
    with pytest.raises(UsageError, match="not a way to copy"):
        FragmentCopy("read none", rows, team)
    with pytest.raises(UsageError, match="at least one pass"):
        FragmentCopy("memcpy none", rows, team).run(0)


def test_the_source_of_an_address_is_only_read(team: Team) -> None:
    source, _, rows = laid_out([512] * 8, 64, 5)
    before = bytes_at(source.ctypes.data, source.size).copy()
    for variant in variants(rows):
        FragmentCopy(variant, rows, team).run()
    assert np.array_equal(source, before)
