"""Decode attention on cores: right for every shape it serves, at every border, whatever the unused slots hold."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.attention.cpu import DecodeAttention, Isa, Split, host_isas
from kvbench.attention.shapes import Shape
from kvbench.kernels.raw import bytes_at
from kvbench.kernels.team import Team
from kvbench.memory import libc
from kvbench.memory.region import Region
from kvbench.model.paged import merge
from tests.attention.caches import Cache

Teams = Callable[[int], Team]
BORDERS = (1, 15, 16, 17, 33)


def small(dtype: str, page: int = 16) -> Shape:
    return Shape(dtype, 8, 2, 64, page)  # type: ignore[arg-type]


# Every dtype on the best instructions of this machine, and all of them on those of any machine.
KINDS: list[tuple[str, Isa]] = [
    ("fp32", "auto"), ("fp16", "auto"), ("bf16", "auto"), ("fp32", "portable"), ("fp16", "portable"),
    ("bf16", "portable"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "isa"), KINDS)
@pytest.mark.parametrize("page", [16, 64])
def test_lengths_at_the_borders(dtype: str, isa: Isa, page: int, teams: Teams) -> None:
    Cache(small(dtype, page), (*BORDERS, 0, 100)).check(DecodeAttention(small(dtype, page), teams(1), isa=isa))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_long_sequences_keep_their_digits(dtype: str, teams: Teams) -> None:
    Cache(small(dtype), (4095, 4096, 4097)).check(DecodeAttention(small(dtype), teams(2)))


@pytest.mark.parametrize(
    ("dtype", "group", "kv_heads", "head_dim", "page", "isa"),
    [
        ("bf16", 1, 3, 80, 8, "auto"),
        ("bf16", 16, 1, 128, 256, "auto"),
        ("bf16", 7, 2, 96, 24, "portable"),
        ("fp16", 5, 1, 256, 32, "auto"),
        ("fp16", 16, 2, 80, 8, "portable"),
        ("fp32", 3, 2, 96, 48, "auto"),
        ("fp32", 12, 1, 256, 16, "portable"),
        ("fp32", 1, 2, 256, 168, "auto"),
    ],
)
def test_shapes(dtype: str, group: int, kv_heads: int, head_dim: int, page: int, isa: Isa, teams: Teams) -> None:
    shape = Shape(dtype, group * kv_heads, kv_heads, head_dim, page)  # type: ignore[arg-type]
    Cache(shape, (1, page - 1, page + 1, 3 * page, 300), seed=group).check(DecodeAttention(shape, teams(3), isa=isa))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=6), members=st.integers(1, 6),
    page=st.sampled_from([16, 64]), split=st.sampled_from(["pages", "sequences"]), seed=st.integers(0, 1 << 16),
)  # fmt: skip
def test_any_batch_on_any_team(
    lengths: list[int], members: int, page: int, split: Split, seed: int, teams: Teams
) -> None:  # fmt: skip
    shape = small("fp32", page)
    Cache(shape, lengths, seed).check(DecodeAttention(shape, teams(members), split=split))


def test_one_sequence_is_split_among_all_members(teams: Teams) -> None:
    shape = small("fp32")
    cache = Cache(shape, (700,))
    attention = DecodeAttention(shape, teams(5))
    step = attention.prepare(
        cache.q, *shape.pack(cache.k, cache.v), cache.batch.table, cache.batch.lengths
    )  # fmt: skip
    assert step.work_items == 44
    cache.check(attention)
    by_sequence = DecodeAttention(shape, teams(5), split="sequences")
    one = by_sequence.prepare(cache.q, *shape.pack(cache.k, cache.v), cache.batch.table, cache.batch.lengths)
    assert one.work_items == 1
    cache.check(by_sequence)


def test_more_threads_than_items(teams: Teams) -> None:
    Cache(small("bf16"), (3,)).check(DecodeAttention(small("bf16"), teams(6)))
    Cache(small("bf16"), (17, 0)).check(DecodeAttention(small("bf16"), teams(6)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_log_sum_exp_may_be_zero(dtype: str, teams: Teams) -> None:
    """Zero is a value like any other: no code may take it for "nothing here" (trap T50)."""
    shape = Shape(dtype, 1, 1, 64, 8)  # type: ignore[arg-type]
    cache = Cache(shape, (9,))
    root = math.sqrt(64.0)
    scores = np.full((2, 8), -1e4)
    scores[0, 0], scores[1, 0] = 0.0, -3.0
    plain = np.zeros(shape.plain_shape(len(cache.k)))
    for page, row in zip(cache.batch.table[0, :2], scores, strict=True):
        plain[page, 0, :, 0] = row * root
    cache.k, cache.q = shape.array(plain), shape.array(np.eye(1, 64)[None])
    first = DecodeAttention(shape, teams(1))
    alone = first.decode(
        cache.q, *shape.pack(cache.k, cache.v), cache.batch.table[:, :1].copy(), np.array([8], np.int32)
    )
    assert alone[1][0, 0] == 0.0
    assert np.allclose(alone[0][0, 0], cache.tokens(0, 0)[1][0], rtol=4e-3)
    for members in (1, 2):  # two members: parts of 0 and -3 are merged
        _, lse = cache.decode(DecodeAttention(shape, teams(members)))
        assert lse[0, 0] == pytest.approx(math.log(1.0 + math.exp(-3.0)), abs=2e-6)
    assert merge(np.ones((2, 1, 4)), np.array([[0.0], [-3.0]]))[1][0] == pytest.approx(math.log1p(math.exp(-3.0)))


@pytest.mark.parametrize(("dtype", "isa"), KINDS[:3])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_of_ten_thousand(dtype: str, isa: Isa, sign: float, teams: Teams) -> None:
    shape = small(dtype)
    cache = Cache(shape, (40, 700))
    scale = math.sqrt(1e4 * math.sqrt(64.0) / 64.0)
    plain = shape.floats(cache.k)
    cache.k = shape.array(plain * np.float32(0.01) + np.float32(sign * scale))
    cache.q = shape.array(np.full(cache.q.shape, scale))
    assert 9.5e3 < sign * cache.answer()[1].max() < 1.05e4
    cache.check(DecodeAttention(shape, teams(2), isa=isa))


@pytest.mark.parametrize(("dtype", "isa"), KINDS)
@pytest.mark.parametrize("members", [1, 3])
def test_a_head_whose_scores_are_all_beyond_float32_is_no_empty_sequence(
    dtype: str, isa: Isa, members: int, teams: Teams
) -> None:
    shape = small(dtype)
    cache = Cache(shape, (700, 30, 0))
    plain = shape.floats(cache.k)
    plain[cache.batch.table[0], 0] = -1.0  # all scores of KV head 0 are -64 x scale, of head 1 as they were
    cache.k, q = shape.array(plain), cache.q.copy()
    k, v = shape.pack(cache.k, cache.v)
    q[:, :4] = shape.array(np.float32(1.0))
    for scale, lost in ((0.125, False), (1e37, True)):
        out, lse = DecodeAttention(shape, teams(members), isa=isa).decode(
            q, k, v, cache.batch.table, cache.batch.lengths, scale=scale
        )
        assert np.isnan(out[0, :4]).all() == np.isnan(lse[0, :4]).all() == lost
        assert (out[2] == 0.0).all()
        assert (lse[2] == -np.inf).all()
        if not lost:
            assert lse[0, :4] == pytest.approx(math.log(700) - 8.0, abs=1e-5)
            assert np.isfinite(out).all()


@pytest.mark.parametrize(("dtype", "tiny"), [("fp32", 1e-40), ("fp16", 1e-6), ("bf16", 1e-40)])
@pytest.mark.parametrize("isa", ["auto", "portable"])
def test_subnormal_values(dtype: str, tiny: float, isa: Isa, teams: Teams) -> None:
    """What they cost is measured by scripts/figures; the bf16 dot product counts them as 0, and says so."""
    shape = small(dtype)
    cache = Cache(shape, (50,))
    cache.v = shape.array(shape.floats(cache.v) * np.float32(tiny))
    attention = DecodeAttention(shape, teams(1), isa=isa)
    if attention.isa == "avx512bf16":
        out, _ = cache.decode(attention)
        assert (out == 0.0).all()
    else:
        cache.check(attention, most=4e-3)


@pytest.mark.parametrize(("dtype", "isa"), KINDS)
def test_nan_in_a_used_slot_is_not_hidden(dtype: str, isa: Isa, teams: Teams) -> None:
    for half in ("k", "v"):
        cache = Cache(small(dtype), (40, 40))
        block = cache.batch.table[1, 1]
        getattr(cache, half)[block, 0, 3, 5] = cache.shape.array(np.nan)
        out, lse = cache.decode(DecodeAttention(small(dtype), teams(2), isa=isa))
        assert np.isnan(out[1, :4]).any(axis=1).all()
        assert np.isnan(lse[1, :4]).all() == (half == "k")
        assert np.isfinite(out[0]).all()
        assert np.isfinite(out[1, 4:]).all()


def test_a_new_token_is_appended_by_the_call(teams: Teams) -> None:
    for dtype in ("fp32", "bf16"):
        for page, lengths in ((16, (1, 16, 17, 40)), (64, (1, 63, 65, 130))):
            shape = small(dtype, page)
            cache = Cache(shape, lengths)
            k, v = shape.pack(cache.k, cache.v)
            full = (k.copy(), v.copy())
            at = [(int(r[(n - 1) // page]), (n - 1) % page) for r, n in zip(cache.batch.table, lengths, strict=True)]
            new = [np.stack([half[block, :, slot] for block, slot in at]) for half in (cache.k, cache.v)]
            poisoned = [half.copy() for half in (cache.k, cache.v)]
            for half in poisoned:
                for block, slot in at:
                    half[block, :, slot] = shape.array(np.nan)
            k, v = shape.pack(*poisoned)
            attention = DecodeAttention(shape, teams(3))
            table, counts = cache.batch.table, cache.batch.lengths
            out, lse = attention.decode(cache.q, k, v, table, counts, k_new=new[0], v_new=new[1])
            assert np.array_equal(k.view(np.uint8), full[0].view(np.uint8))
            assert np.array_equal(v.view(np.uint8), full[1].view(np.uint8))
            again, log = cache.decode(attention)
            assert np.array_equal(out, again)
            assert np.array_equal(lse, log)


def test_the_table_is_read_to_its_last_entry_and_no_further(teams: Teams) -> None:
    shape = small("bf16")
    cache = Cache(shape, (64, 48, 64))
    region = Region(1)
    nbytes = cache.batch.table.nbytes
    table = bytes_at(region.address + region.mapped - nbytes, nbytes).view(np.int32).reshape(cache.batch.table.shape)
    table[:] = cache.batch.table
    packed = shape.pack(cache.k, cache.v)
    halves = [Region(half.nbytes) for half in packed]  # behind the caches lies nothing either
    k, v = (
        bytes_at(r.address + r.mapped - half.nbytes, half.nbytes).view(half.dtype).reshape(half.shape)
        for r, half in zip(halves, packed, strict=True)
    )
    k[:], v[:] = packed
    out, _ = DecodeAttention(shape, teams(2)).decode(cache.q, k, v, table, cache.batch.lengths)
    want, _ = cache.answer()
    assert (np.linalg.norm(out - want, axis=2) / np.linalg.norm(want, axis=2)).max() < 4e-3


def test_caches_beyond_two_billion_elements(teams: Teams) -> None:
    shape = Shape("bf16", 4, 1, 64, 16)
    cache = Cache(shape, (40,))
    blocks = (1 << 31) // (16 * 64) + 5
    k, v = shape.pack(cache.k, cache.v)
    flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
    nbytes = blocks * shape.page_bytes
    large, starts = [], []
    for half in (k, v):
        starts.append(libc.mmap(0, nbytes, libc.PROT_READ | libc.PROT_WRITE, flags))
        libc.madvise(starts[-1], nbytes, libc.MADV_NOHUGEPAGE)
        large.append(bytes_at(starts[-1], nbytes).view(np.uint16).reshape(blocks, *half.shape[1:]))
        large[-1][-len(half) :] = half
    table = (cache.batch.table + (blocks - len(k))).astype(np.int32)
    out, _ = DecodeAttention(shape, teams(1)).decode(cache.q, large[0], large[1], table, cache.batch.lengths)
    want, _ = cache.answer()
    assert large[0].size > 1 << 31
    assert (np.linalg.norm(out - want, axis=2) / np.linalg.norm(want, axis=2)).max() < 4e-3
    large.clear()
    for start in starts:
        libc.munmap(start, nbytes)


def test_steps_run_again_on_what_the_arrays_hold_then(teams: Teams) -> None:
    shape = small("fp32")
    cache = Cache(shape, (30, 5))
    k, v = shape.pack(cache.k, cache.v)
    step = DecodeAttention(shape, teams(2)).prepare(cache.q, k, v, cache.batch.table, cache.batch.lengths)
    assert step.run() > 0
    first = step.out.copy()
    v *= np.float32(2.0)
    step.run()
    assert np.allclose(step.out, 2.0 * first, rtol=1e-6)
    assert step.kv_bytes == 35 * shape.token_bytes
    assert step.flops == 4 * 35 * 8 * 64


def test_the_best_instructions_are_chosen(teams: Teams) -> None:
    assert host_isas()[-1] == "portable"
    assert DecodeAttention(small("bf16"), teams(1)).isa == host_isas()[0]
    assert DecodeAttention(small("fp32"), teams(1)).isa != "avx512bf16"
