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
    ],
)
def test_shapes_that_are_not_served(args: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text.replace(".", r"\.")):
        Shape(*args)


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


def test_unknown_ways(teams: Callable[[int], Team]) -> None:
    with pytest.raises(UsageError, match="unknown split, got 'heads'"):
        DecodeAttention(SHAPE, teams(1), split="heads")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="instruction set, got 'amx'"):
        DecodeAttention(SHAPE, teams(1), isa="amx")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="instruction set"):
        DecodeAttention(SHAPE, teams(1), isa="avx512bf16")
