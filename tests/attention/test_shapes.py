"""bfloat16 bits, packed layouts and their inverse."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.attention.shapes import Shape, from_bf16, to_bf16
from kvbench.errors import UsageError


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan() -> None:
    values = np.array([1.0, -2.5, 1.00390625, 1.01171875, 3.3895314e38, np.inf, -np.inf, np.nan], np.float32)
    back = from_bf16(to_bf16(values))
    assert back[:4].tolist() == [1.0, -2.5, 1.0, 1.015625]
    assert back[5:7].tolist() == [np.inf, -np.inf]
    assert np.isnan(back[7])
    random = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    assert np.abs(from_bf16(to_bf16(random)) / random - 1.0).max() <= 2.0**-8


def test_bfloat16_agrees_with_pytorch() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(1).standard_normal(4096).astype(np.float32) * np.float32(1e3)
    want = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bf16(values), want)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("page", [8, 24, 64])
def test_pack_and_unpack_are_inverse_and_mean_what_they_say(dtype: str, page: int) -> None:
    shape = Shape(dtype, 6, 3, 80, page)  # type: ignore[arg-type]
    rng = np.random.default_rng(page)
    k, v = (shape.array(rng.standard_normal(shape.plain_shape(4))) for _ in range(2))
    packed_k, packed_v = shape.pack(k, v)
    assert packed_k.shape == shape.k_shape(4)
    assert packed_v.shape == shape.v_shape(4)
    assert packed_k.nbytes == 4 * shape.page_bytes
    for block, head, token, dim in rng.integers(0, (4, 3, page, 80), (50, 4)).tolist():
        at = (block, head, token // shape.lanes, dim // shape.pair, token % shape.lanes, dim % shape.pair)
        assert packed_k[at] == k[block, head, token, dim]
        assert packed_v[block, head, token // shape.pair, dim, token % shape.pair] == v[block, head, token, dim]
    for plain, again in zip((k, v), shape.unpack(packed_k, packed_v), strict=True):
        assert np.array_equal(plain, again)
    part = shape.unpack(packed_k[1:2, 2:], packed_v[1:2, 2:])
    assert np.array_equal(part[1], v[1:2, 2:])


def test_wrong_layouts() -> None:
    shape = Shape("bf16", 6, 3, 80, 16)
    plain = np.zeros(shape.plain_shape(2), np.uint16)
    with pytest.raises(UsageError, match=r"pack\.v: plain cache"):
        shape.pack(plain, plain[:, :, :8])
    with pytest.raises(UsageError, match=r"pack\.k: plain cache, got 'float32"):
        shape.pack(plain.astype(np.float32), plain)
    _, v = shape.pack(plain, plain)
    with pytest.raises(UsageError, match=r"unpack\.k: packed cache"):
        shape.unpack(v, v)


def test_keys_and_values_of_different_sizes() -> None:
    shape = Shape("bf16", 6, 3, 80, 16)
    plain = np.zeros(shape.plain_shape(2), np.uint16)
    with pytest.raises(UsageError, match="pack: keys and values differ in blocks or heads, got '2 x 3 and 1 x 3'"):
        shape.pack(plain, plain[:1])
    k, v = shape.pack(plain, plain)
    with pytest.raises(UsageError, match="unpack: keys and values differ in blocks or heads, got '1 x 3 and 2 x 3'"):
        shape.unpack(k[:1], v)
    with pytest.raises(UsageError, match="unpack: keys and values differ in blocks or heads, got '2 x 3 and 2 x 1'"):
        shape.unpack(k, v[:, 2:])
    with pytest.raises(UsageError, match=r"pack\.k: not a numpy array, got 'list', expected uint16"):
        shape.pack(plain.tolist(), plain)
    with pytest.raises(UsageError, match=r"unpack\.v: not a numpy array, got 'NoneType'"):
        shape.unpack(k, None)  # type: ignore[arg-type]
