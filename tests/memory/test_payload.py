"""The payload is reproducible, incompressible and without repeated pages; its checksum sees what moved."""

from __future__ import annotations

import lzma
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.memory import payload

BLOCK = payload.BLOCK_BYTES


@given(
    nbytes=st.integers(0, 3 * BLOCK // 2), cut=st.integers(0, 3 * BLOCK // 16), start=st.integers(0, BLOCK // 4),
    kind=st.sampled_from(payload.KINDS),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_pieces_give_the_bytes_of_the_whole(nbytes: int, cut: int, start: int, kind: payload.Kind) -> None:
    whole = payload.expected(nbytes, 5, kind, 8 * start)
    pieces = np.empty(nbytes, np.uint8)
    cut = min(8 * cut, nbytes // 8 * 8)
    payload.fill(pieces[:cut], 5, kind, 8 * start)
    payload.fill(pieces[cut:], 5, kind, 8 * start + cut)
    assert np.array_equal(whole, pieces)


def test_seeds_differ_and_repeat() -> None:
    one, two = payload.expected(BLOCK, 1), payload.expected(BLOCK, 2)
    assert np.array_equal(one, payload.expected(BLOCK, 1))
    assert np.count_nonzero(one == two) < 2 * BLOCK / 256


def test_no_page_repeats_and_nothing_compresses() -> None:
    data = payload.expected(5 * BLOCK // 2, 3)
    pages = data.reshape(-1, 4096)
    assert len(np.unique(pages, axis=0)) == len(pages)
    assert len(zlib.compress(data.tobytes(), 1)) > data.size
    # A dictionary wider than the 1 MiB base block would find it again if blocks were repeats of each other.
    finder = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 22}]
    assert len(lzma.compress(data.tobytes(), lzma.FORMAT_RAW, filters=finder)) > 0.999 * data.size


def test_float_payload_is_normal_numbers_in_one_to_two() -> None:
    values = payload.expected(2 * BLOCK, 4, "float64").view(np.float64)
    assert values.min() >= 1.0
    assert values.max() < 2.0
    assert len(np.unique(values)) == values.size
    assert abs(values.mean() - 1.5) < 0.005


@pytest.mark.parametrize("offset", [-8, 4, 1])
def test_an_offset_between_words_is_refused(offset: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        payload.fill(np.empty(8, np.uint8), offset=offset)


def test_unknown_kind_and_strided_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="zeros"):
        payload.fill(np.empty(8, np.uint8), kind="zeros")  # type: ignore[arg-type]
    for function in (payload.fill, payload.checksum, payload.poison):
        with pytest.raises(ValueError, match="contiguous"):
            function(np.empty(64, np.uint8)[::2])


@pytest.mark.parametrize(("a", "b"), [(0, 4096), (4096, BLOCK), (0, BLOCK), (BLOCK + 8192, 2 * BLOCK + 8192)])
def test_checksum_sees_two_swapped_pages(a: int, b: int) -> None:
    data = payload.expected(3 * BLOCK, 6)
    before = payload.checksum(data)
    data[a : a + 4096], data[b : b + 4096] = data[b : b + 4096].copy(), data[a : a + 4096].copy()
    assert payload.checksum(data) != before


def test_checksum_sees_swapped_blocks_and_flipped_top_bits() -> None:
    data = payload.expected(2 * BLOCK, 6)
    before = payload.checksum(data)
    assert payload.checksum(np.concatenate([data[BLOCK:], data[:BLOCK]])) != before
    data[[7, 15]] ^= 0x80  # the signs of two doubles: plain odd weights would let them cancel
    assert payload.checksum(data) != before


@given(nbytes=st.integers(1, 5000), data=st.data())
@settings(max_examples=60, deadline=None)
def test_checksum_sees_any_single_byte_and_any_dropped_tail(nbytes: int, data: st.DataObject) -> None:
    content = payload.expected(nbytes, 8)
    before = payload.checksum(content)
    at, change = data.draw(st.integers(0, nbytes - 1)), data.draw(st.integers(1, 255))
    content[at] ^= change
    assert payload.checksum(content) != before
    content[at] ^= change
    assert payload.checksum(content) == before
    assert payload.checksum(content[:-1]) != before


def test_checksum_does_not_depend_on_the_view() -> None:
    data = payload.expected(BLOCK + 24, 9)
    assert payload.checksum(data) == payload.checksum(data.view(np.float64)) == payload.checksum(data.reshape(-1, 8))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_poison_is_nan_in_every_float(dtype: type[np.floating]) -> None:
    array = np.ones((3, 5), dtype)
    payload.poison(array)
    assert np.isnan(array).all()
