"""One precise error for each thing that does not fit, before memory is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvbench.attention.cpu import DecodeAttention
from kvbench.attention.shapes import Shape
from kvbench.errors import UsageError
from kvbench.kernels.team import Team
from kvbench.model.paged import attend
from tests.attention.caches import Cache

SHAPE = Shape("fp32", 8, 2, 64, 16)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("fp8", 8, 2, 64, 16), "attention.dtype: unknown dtype, got 'fp8'"),
        (("bf16", 9, 2, 64, 16), "query heads do not divide by KV heads, got '9 and 2'"),
        (("bf16", 8, 0, 64, 16), "query heads do not divide"),
        (("bf16", 34, 2, 64, 16), "too many query heads a KV head, got 17, expected 1..16"),
        (("bf16", 8, 2, 72, 16), "head_dim, got 72, expected 64, 80, 96, 128, 256"),
        (("bf16", 8, 2, 64, 12), "page size, got 12"),
        (("bf16", 8, 2, 64, 512), "page size, got 512"),
        ((["bf16"], 8, 2, 64, 16), "attention.dtype: unknown dtype"),
        (("fp32", "8", 2, 64, 16), "attention.q_heads: not a whole number, got \"str '8'\", expected an int"),
        (("fp32", 8, 2, 64, 16.0), "attention.page_tokens: not a whole number, got 'float 16.0'"),
        (("fp32", True, True, 64, 16), "attention.q_heads: not a whole number, got 'bool True'"),
        (("fp32", 8, 2, None, 16), "attention.head_dim: not a whole number, got 'NoneType None'"),
    ],
)
def test_shapes_that_are_not_served(args: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text.replace(".", r"\.")):
        Shape(*args)


def test_a_shape_of_numpy_integers_is_one_of_ints() -> None:
    shape = Shape("fp32", *(np.int8(n) for n in (8, 2, 64, 16)))  # type: ignore[arg-type]
    assert shape == SHAPE
    assert shape.page_bytes == 2 * 16 * 64 * 4  # in int8 it is 0


def change(name: str, value: Callable[[np.ndarray], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(call: dict[str, Any]) -> None:
        call[name] = value(call[name])

    return apply


def entry(value: int) -> Callable[[dict[str, Any]], None]:
    def apply(call: dict[str, Any]) -> None:
        call["table"][1, 2] = value

    return apply


BAD: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (change("q", lambda a: a.astype(np.float64)), "attention.q: wrong dtype, got 'float64', expected float32"),
    (change("q", lambda a: a[:, :4]), "attention.q: wrong shape"),
    (change("q", lambda a: np.repeat(a, 2, axis=2)[:, :, ::2]), "attention.q: not contiguous, got 'strides"),
    (change("q", lambda a: a[:2]), r"attention\.q: wrong shape, got '\(2, 8, 64\)', expected \(3, 8, 64\)"),
    (change("q", lambda a: a[0]), "attention.q: wrong shape"),
    (change("k_cache", lambda a: a.transpose(1, 0, 2, 3, 4, 5)), "attention.k_cache"),
    (change("k_cache", lambda a: a[:-1]), "attention.k_cache: caches"),
    (change("k_cache", lambda a: a.reshape(len(a), -1)), "attention.k_cache: caches"),
    (change("v_cache", lambda a: a[..., ::-1, :]), "attention.v_cache: not contiguous"),
    (change("v_cache", lambda a: a.view(np.uint32)), "attention.v_cache: wrong dtype"),
    (change("table", lambda a: a.astype(np.int64)), "attention.table: block table, got 'int64"),
    (change("table", lambda a: np.asfortranarray(a)), "attention.table: block table"),
    (change("lengths", lambda a: a[:2]), "attention.lengths"),
    (change("lengths", lambda a: a.astype(np.float32)), "attention.lengths"),
    (change("lengths", lambda a: a * np.int32(-1)), "negative length"),
    (change("lengths", lambda a: a + np.int32(30)), r"lengths\[1\]: length beyond the table, got 78, expected at most"),
    (entry(-1), r"table\[1, 2\]: block out of range, got -1"),
    (entry(99), r"table\[1, 2\]: block out of range, got 99, expected 0..8"),
    (change("out", lambda _: np.zeros((3, 8, 32), np.float32)), "attention.out: wrong shape"),
    (change("lse", lambda _: np.zeros((3, 8), np.float64)), "attention.lse: wrong dtype"),
    (change("k_new", lambda _: np.zeros((3, 2, 64), np.float32)), "k_new and v_new go together"),
    (change("scale", lambda _: float("nan")), "attention.scale"),
    (change("scale", lambda _: 1e39), r"attention\.scale: scale, got 1e\+39, expected a finite number whose product"),
    (change("scale", lambda _: -2.5e38), "attention.scale"),  # a float32, but not times log2(e)
    (change("scale", lambda _: 10**400), "attention.scale"),
    (change("scale", lambda _: "1"), "attention.scale: scale is not a number, got \"str '1'\""),
    (change("scale", lambda _: True), "attention.scale: scale is not a number"),
    *((change(name, lambda a: a.tolist()), f"attention.{name}: not a numpy array, got 'list'")
      for name in ("q", "k_cache", "v_cache", "table", "lengths", "out")),
    *((change(name, lambda _: None), f"attention.{name}: not a numpy array, got 'NoneType'")
      for name in ("q", "k_cache", "v_cache", "table", "lengths")),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "text"), BAD)
def test_bad_steps(spoil: Callable[[dict[str, Any]], None], text: str, teams: Callable[[int], Team]) -> None:
    cache = Cache(SHAPE, (20, 48, 1))
    k, v = SHAPE.pack(cache.k, cache.v)
    call: dict[str, Any] = {
        "q": cache.q, "k_cache": k, "v_cache": v, "table": cache.batch.table.copy(), "lengths": cache.batch.lengths,
        "out": np.full((3, 8, 64), 7.0, np.float32), "lse": None, "k_new": None, "v_new": None, "scale": None,
    }  # fmt: skip
    before, out = k.copy(), call["out"]
    spoil(call)
    with pytest.raises(UsageError, match=text) as caught:
        DecodeAttention(SHAPE, teams(1)).decode(**call)
    assert "\n" not in str(caught.value)
    assert (out == 7.0).all()
    assert np.array_equal(k, before, equal_nan=True)


def test_what_cannot_be_appended(teams: Callable[[int], Team]) -> None:
    cache = Cache(SHAPE, (20, 48, 16))
    k, v = SHAPE.pack(cache.k, cache.v)
    attention = DecodeAttention(SHAPE, teams(1))
    new = np.zeros((3, 2, 64), np.float32)
    table, lengths = cache.batch.table.copy(), cache.batch.lengths.copy()
    k.flags.writeable = False
    with pytest.raises(UsageError, match="k_cache: read-only"):
        attention.decode(cache.q, k, v, table, lengths, k_new=new, v_new=new)
    k.flags.writeable = True
    with pytest.raises(UsageError, match="k_new: wrong shape"):
        attention.decode(cache.q, k, v, table, lengths, k_new=new[:, :1], v_new=new)
    lengths[2] = 0
    with pytest.raises(UsageError, match=r"lengths\[2\]: lengths include the new token, got 0"):
        attention.decode(cache.q, k, v, table, lengths, k_new=new, v_new=new)
    lengths[2] = 16
    table[2, 0] = table[0, 1]
    with pytest.raises(UsageError, match="two sequences would append to one block"):
        attention.decode(cache.q, k, v, table, lengths, k_new=new, v_new=new)
    with pytest.raises(UsageError, match=r"attention\.k_new: not a numpy array, got 'list'"):
        attention.decode(cache.q, k, v, table, lengths, k_new=new.tolist(), v_new=new)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "lengths", "place"),
    [([[0, 0], [0, 1]], [5, 20], "1, 0"), ([[0, 1], [0, 0]], [20, 5], "0, 0"), ([[2, 2]], [20], "0, 0")],
)
def test_a_block_that_is_appended_to_is_read_by_nobody_else(
    rows: list[list[int]], lengths: list[int], place: str, teams: Callable[[int], Team]
) -> None:
    """Of two members one may read the block before the token is in it, the other after."""
    rng = np.random.default_rng(0)
    k, v = SHAPE.pack(*(rng.standard_normal(SHAPE.plain_shape(3)).astype(np.float32) for _ in range(2)))
    q, new = np.ones((len(rows), 8, 64), np.float32), np.ones((len(rows), 2, 64), np.float32)
    table, counts = np.array(rows, np.int32), np.array(lengths, np.int32)
    attention, before = DecodeAttention(SHAPE, teams(2)), k.copy()
    with pytest.raises(UsageError, match=rf"table\[{place}\]: a block that is appended to is an earlier page too, got"):
        attention.decode(q, k, v, table, counts, k_new=new, v_new=new)
    assert np.array_equal(k, before)
    assert np.isfinite(attention.decode(q, k, v, table, counts)[0]).all()  # read, it may be shared


def test_what_is_only_read_may_be_shared_and_unused_entries_mean_nothing(teams: Callable[[int], Team]) -> None:
    rng = np.random.default_rng(1)
    plain = [rng.standard_normal(SHAPE.plain_shape(3)).astype(np.float32) for _ in range(2)]
    q = rng.standard_normal((2, 8, 64)).astype(np.float32)
    new = [rng.standard_normal((2, 2, 64)).astype(np.float32) for _ in range(2)]
    table = np.array([[0, 1, 1], [0, 2, 1]], np.int32)
    counts = np.array([20, 25], np.int32)
    k, v = SHAPE.pack(*plain)
    out, _ = DecodeAttention(SHAPE, teams(2)).decode(q, k, v, table, counts, k_new=new[0], v_new=new[1])
    for b, (row, n) in enumerate(zip(table, counts.tolist(), strict=True)):
        for half, token in zip(plain, new, strict=True):
            half[row[1], :, n - 17] = token[b]
        for h in range(2):
            keys, values = (half[row[:2], h].reshape(-1, 64)[:n] for half in plain)
            want, _ = attend(q[b, 4 * h : 4 * h + 4], keys, values, 0.125)
            assert np.allclose(out[b, 4 * h : 4 * h + 4], want, rtol=1e-4, atol=1e-5)


def test_what_is_written_overlaps_nothing(teams: Callable[[int], Team]) -> None:
    cache = Cache(SHAPE, (20, 48, 1))
    attention = DecodeAttention(SHAPE, teams(1))
    new, both = np.zeros((3, 2, 64), np.float32), np.zeros(3 * 8 * 65, np.float32)
    pool = np.zeros(2 * 9 * 2 * 16 * 64, np.float32)
    k, v = SHAPE.pack(cache.k, cache.v)
    shared_k, shared_v = pool[: k.size].reshape(k.shape), pool[2048 : 2048 + v.size].reshape(v.shape)
    out, lse, inside = both[:1536].reshape(3, 8, 64), both[1536:].reshape(3, 8), both[1500:1524].reshape(3, 8)

    def refused(text: str, **given: Any) -> None:
        call: dict[str, Any] = {
            "q": cache.q, "k_cache": k, "v_cache": v, "table": cache.batch.table, "lengths": cache.batch.lengths
        }  # fmt: skip
        before = {name: array.copy() for name, array in (call | given).items()}
        with pytest.raises(UsageError, match=f"arrays overlap, got '{text}', expected memory of its own") as caught:
            attention.decode(**call | given)
        assert str(caught.value).count("attention.") == 1
        for name, array in (call | given).items():
            assert np.array_equal(array, before[name], equal_nan=array.dtype.kind == "f")

    refused("memory of q", out=cache.q)
    refused("memory of k_cache", out=k.reshape(-1)[5:1541].reshape(3, 8, 64))
    refused("memory of v_cache", out=v.reshape(-1)[:1536].reshape(3, 8, 64))
    refused("memory of v_cache", lse=v.reshape(-1)[:24].reshape(3, 8))
    refused("memory of lse", out=out, lse=inside)
    refused("memory of table", table=lse.reshape(-1)[:9].view(np.int32).reshape(3, 3), out=out, lse=lse)
    refused("memory of v_cache", k_cache=shared_k, v_cache=shared_v, k_new=new, v_new=new)
    refused("memory of v_new", k_new=new, v_new=out.reshape(-1)[:384].reshape(3, 2, 64), out=out)
    refused("memory of k_new", k_new=k.reshape(-1)[:384].reshape(3, 2, 64), v_new=new)
    refused("memory of q", q=v.reshape(-1)[:1536].reshape(3, 8, 64), k_new=new, v_new=new)
    attention.decode(cache.q, shared_k, shared_v, cache.batch.table, cache.batch.lengths, out=out, lse=lse)
    assert (out == 0.0).all()
    assert np.allclose(lse, np.log([20, 48, 1])[:, None], atol=2e-6)


def test_unknown_ways(teams: Callable[[int], Team]) -> None:
    with pytest.raises(UsageError, match="unknown split, got 'heads'"):
        DecodeAttention(SHAPE, teams(1), split="heads")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="instruction set, got 'amx'"):
        DecodeAttention(SHAPE, teams(1), isa="amx")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="instruction set"):
        DecodeAttention(SHAPE, teams(1), isa="avx512bf16")
