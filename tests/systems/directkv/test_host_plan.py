"""Plans: every element of B stored once and multiplied by every row once, and the sizes that are refused."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import Unavailable, UsageError
from kvbench.systems.directkv.host_plan import Plan, plan, require_near
from kvbench.systems.directkv.shapes import METHODS, Gemm, Method

GEMMS = st.builds(
    Gemm, st.integers(1, 30), st.integers(1, 30), st.integers(1, 30), st.integers(1, 12), st.integers(1, 12),
    st.integers(1, 12), block=st.sampled_from([4, 64, 512]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(GEMMS, st.sampled_from(METHODS))
def test_a_plan_multiplies_everything_once(gemm: Gemm, method: Method) -> None:
    made = plan(gemm, method)
    done = np.zeros((gemm.m, gemm.n, gemm.k), np.int8)
    begun = np.zeros((gemm.m, gemm.n), bool)
    for index, product in enumerate(made.products):
        piece = made.piece_of(product)
        rows, columns = slice(product.m0, product.m1), slice(piece.n0, piece.n1)
        assert not begun[rows, columns].any() if product.first else begun[rows, columns].all()
        begun[rows, columns] = True
        done[rows, columns, piece.k0 : piece.k1] += 1
        assert product.load is None or product.load == index
    assert (done == 1).all()
    assert sum(made.pieces[piece].stored for piece in made.loads) == made.traffic.link


@settings(max_examples=60, deadline=None)
@given(GEMMS, st.sampled_from(METHODS[1:]))
def test_pieces_lie_behind_each_other_on_blocks(gemm: Gemm, method: Method) -> None:
    made, at = plan(gemm, method), 0
    seen = np.zeros((gemm.k, gemm.n), np.int8)
    for piece in made.pieces:
        assert piece.offset == at
        assert piece.stored % gemm.block == 0
        assert 0 <= piece.stored - 4 * piece.elements < gemm.block
        seen[piece.k0 : piece.k1, piece.n0 : piece.n1] += 1
        at += piece.stored
    assert (seen == 1).all()
    assert made.store == at
    assert made.slot == max(piece.stored for piece in made.pieces)


def depth_of(made: Plan) -> int:
    return made.depth


def test_slots_by_method() -> None:
    gemm = Gemm.square(64, 16)
    assert depth_of(plan(gemm, "naive")) == depth_of(plan(gemm, "cpu_aware")) == 1
    assert depth_of(plan(gemm, "cpu_aware_pipelined")) == 2
    assert depth_of(plan(gemm, "cpu_aware_pipelined", depth=4)) == 4
    assert [depth_of(plan(gemm, "swap", double=double)) for double in (False, True)] == [1, 2]
    assert len(plan(gemm, "swap", staging=25).loads) == 4
    assert len(plan(gemm, "swap", double=True).loads) == 2


def test_sizes_beyond_32_bits_are_refused_with_sizes() -> None:
    for shape in ((2**31, 8, 8), (8, 2**31, 8), (8, 8, 2**40)):
        with pytest.raises(Unavailable, match=rf"32-bit.*{shape[0]} x {shape[1]} x {shape[2]}, \d+ bytes"):
            plan(Gemm(*shape, 128, 128, 128), "naive")


def test_too_many_tiles_are_refused() -> None:
    with pytest.raises(Unavailable, match=r"too many tiles.*160 x 160 x 160 = 4096000.*larger tiles"):
        plan(Gemm.square(10240, 64), "naive")


def test_tiles_beyond_the_near_buffer_say_what_fits() -> None:
    made = plan(Gemm.square(1024, 256, block=4096), "cpu_aware_pipelined")
    require_near(made, 2 * 256 * 1024)
    with pytest.raises(UsageError, match=r"2 x 262144 bytes.*at most 100000 bytes.*tiles of 96 x 96"):
        require_near(made, 100_000)
    with pytest.raises(UsageError, match="larger near buffer"):
        require_near(made, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(Gemm, st.integers(1, 300), st.integers(1, 300), st.integers(1, 300), st.integers(4, 256),
              st.integers(4, 256), st.integers(4, 256), block=st.sampled_from([4, 4096])),
    st.sampled_from(METHODS), st.booleans(), st.integers(1, 1 << 20),
)  # fmt: skip
def test_what_is_said_to_fit_fits(gemm: Gemm, method: Method, double: bool, budget: int) -> None:
    try:
        made = plan(gemm, method, double=double)
    except UsageError:
        return
    if made.near_buffer <= budget:
        require_near(made, budget)
        return
    with pytest.raises(UsageError, match="do not fit") as caught:
        require_near(made, budget)
    if tiles := re.search(r"tiles of (\d+) x", str(caught.value)):
        size = int(tiles[1])
        other = plan(replace(gemm, tile_m=size, tile_n=size, tile_k=size), method)
    elif share := re.search(r"stage less: (\d+) %", str(caught.value)):
        other = plan(gemm, method, staging=int(share[1]), double=double)
    else:
        assert re.search(r"needs \d+ bytes|larger near buffer", str(caught.value))
        return
    require_near(other, budget)


def test_other_types_and_words_are_refused() -> None:
    with pytest.raises(UsageError, match="float32"):
        plan(Gemm.square(64, 16, item=2), "naive")
    with pytest.raises(UsageError, match="unknown method"):
        plan(Gemm.square(64, 16), "magic")  # type: ignore[arg-type]
