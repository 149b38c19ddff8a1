"""What each kernel says of itself agrees with its source, and wrong arguments are refused before a launch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import UsageError
from kvbench.kernels.gpu import reference
from kvbench.kernels.gpu.arch import arch
from kvbench.kernels.gpu.catalogue import KERNELS, fragment_tile, fragments_kernel, kernel


@pytest.mark.parametrize("name", list(KERNELS))
def test_entry_block_and_arguments_are_those_of_the_source(name: str) -> None:
    k = KERNELS[name]
    if k.form == "cuda":
        found = re.search(rf"\b{k.entry}\(([^)]*)\)", k.text())
        declared = re.search(rf"KERNEL\((\d+)\) {k.entry}\(", k.text())
        assert k.entry == "kvbench_empty" or (declared and int(declared[1]) == k.block)
    else:
        found = re.search(rf"def {k.entry}\(([^)]*)\):", k.text())
        assert len(k.types) == len(k.arguments)
        assert {f"{n}" for n, _ in k.constants} == set(re.findall(r"(\w+): tl\.constexpr", found[1] if found else ""))
    assert found
    names = [part.split(":")[0].split()[-1].strip("*") for part in found[1].split(",") if part.strip()]
    plain = [n for n in names if n not in dict(k.constants) and n != "void"]
    assert plain == [a.name for a in k.arguments]


def test_every_kernel_has_an_oracle_but_the_one_that_does_nothing() -> None:
    assert [k.name for k in KERNELS.values() if k.reference is None] == ["empty"]


def test_the_digest_follows_source_and_constants(tmp_path: Path) -> None:
    copy = kernel("copy")
    edited = tmp_path / "movers.cu"
    edited.write_text(copy.text() + "\n")
    assert len({copy.digest(), kernel("read").digest(), replace(copy, source=edited).digest()}) == 3
    assert fragments_kernel(4096, True).digest() != fragments_kernel(4096, False).digest()
    assert fragments_kernel(4096, True).digest() == kernel("fragments_kv_4k_i64").digest()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((4096, 8192), r"copy: wrong number of arguments, got 2, expected \(dst, src, nbytes\)"),
        ((0, 8192, 16), "copy dst: not an address it can use, got '0x0'"),
        ((4096, 8200, 16), "copy src: not an address it can use, got '0x2008', expected a multiple of 16, not 0"),
        ((4096, 8192, -1), "copy nbytes: out of range, got -1, expected u64"),
    ],
)
def test_arguments_that_would_fault_are_refused(values: tuple[int, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kernel("copy").check(*values)
    kernel("copy").check(4096, 8192, 2**40)


def test_a_tile_holds_64_kib_whatever_the_fragment() -> None:
    for both, tensors in ((True, 2), (False, 1)):
        for size in (16, 64, 80, 4096, 65536, 1 << 20, 3 << 20):
            rows, words = fragment_tile(size, both)
            assert 4 * rows * words * tensors == 64 << 10
            assert rows & (rows - 1) == 0
            assert words & (words - 1) == 0
            assert rows == 1 or words * 4 < 2 * size  # less than half of a tile is masked off
    for size in (0, -16, 8, 24):
        with pytest.raises(UsageError, match="not a fragment size"):
            fragment_tile(size, True)


def test_unknown_names_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="unknown GPU kernel, got 'cpoy'"):
        kernel("cpoy")
    with pytest.raises(UsageError, match="unknown architecture, got 'sm_91'"):
        arch("sm_91")


def test_references_on_small_numbers() -> None:
    assert reference.read(np.array([1, 0, 0, 0, 0, 0, 0, 0, 2, 1], np.uint8)) == 1 + 2 + 256
    assert reference.write(10, 5, 3).tolist() == [5, 0, 0, 0, 0, 0, 0, 0, 8, 0]
    assert reference.write(16, 2**64 - 1, 1).view(np.uint64).tolist() == [2**64 - 1, 0]
    dst, src = np.zeros((3, 2), np.int32), np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    copied = reference.copy_fragments(dst, src, np.array([2, -1, 0]), np.array([0, 1, -1]), 1)
    assert copied.tolist() == [[0, 0], [0, 0], [1, 0]]
    assert reference.read_sum(np.array([2**31 - 1, 1], np.int32)) == 2**31
