"""Near memory by method: the paper's column, the plans' own slots, and what the page tables hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.directkv import host_plan
from kvbench.systems.directkv.host_plan import plan
from kvbench.systems.directkv.ledger import Held, near_memory
from kvbench.systems.directkv.shapes import METHODS, Gemm, Method, staged_columns

CASE = Gemm.square(10240, 128)
MIB = 1 << 20


def test_the_memory_column_of_the_paper() -> None:
    """A, B and buffer, C not counted: 800, 600 and 400 MiB (section 2.3)."""
    assert near_memory(CASE, "resident").total == 800 * MIB
    assert near_memory(CASE, "swap", staging=50).total == 600 * MIB
    assert near_memory(CASE, "cpu_aware", on_chip=True).total == 400 * MIB
    assert near_memory(CASE, "cpu_aware", depth=2).buffer == 2 * 64 * 1024


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Gemm, st.integers(1, 300), st.integers(1, 300), st.integers(1, 300), st.integers(4, 64), st.integers(4, 64),
        st.integers(4, 64), block=st.sampled_from([512, 4096]),
    ),
    st.sampled_from(METHODS), st.integers(1, 100), st.booleans(), st.integers(1, 4),
)  # fmt: skip
def test_a_plan_allocates_what_the_ledger_says(
    gemm: Gemm, method: Method, staging: int, double: bool, depth: int
) -> None:
    try:
        made = plan(gemm, method, staging=staging, double=double, depth=depth)
    except UsageError:
        with pytest.raises(UsageError, match="smaller than a tile column"):
            staged_columns(gemm, staging, double=double)
        return
    told = near_memory(gemm, method, staging=staging, double=double, depth=depth).buffer
    assert made.near_buffer <= told
    if method == "swap":
        assert made.near_buffer * 100 <= staging * made.store  # padding on both sides
        assert sum(piece.n1 - piece.n0 for piece in made.pieces[: 1 + double]) * 100 <= staging * gemm.n
        if gemm.k * gemm.tile_n * gemm.item % gemm.block == 0:
            assert made.near_buffer == told
    elif method != "resident":
        assert made.near_buffer == told


def test_a_plan_that_stages_all_of_b_does_not_meet_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_plan, "staged_columns", lambda gemm, percent, double: gemm.columns)
    made = plan(Gemm.square(1024, 128, block=4096), "swap", staging=50)
    assert made.near_buffer == 2 * near_memory(made.gemm, "swap", staging=50).buffer


@pytest.mark.parametrize(
    ("n", "tile", "staging", "double", "least"),
    [(129, 128, 50, False, "100 %"), (160, 64, 25, False, "40 %"), (1000, 128, 25, True, "26 %")],
)
def test_a_share_is_of_the_bytes_and_not_of_the_tiles(
    n: int, tile: int, staging: int, double: bool, least: str
) -> None:
    gemm = Gemm.square(n, tile, block=4096)
    with pytest.raises(UsageError, match=f"smaller than a tile column.*at least {least}"):
        plan(gemm, "swap", staging=staging, double=double)
    works = int(least.split()[0])
    plan(gemm, "swap", staging=works, double=double)
    with pytest.raises(UsageError, match="smaller than a tile column"):
        plan(gemm, "swap", staging=works - 1, double=double)
    with pytest.raises(UsageError, match="smaller than a tile column"):
        near_memory(gemm, "swap", staging=staging, double=double)


def test_shares_and_ratios() -> None:
    panel = Gemm(4096, 4096, 4096, 384, 4096, 384, block=4096)
    whole = Gemm(4096, 4096, 4096, 128, 128, 128, block=4096)
    assert near_memory(panel, "cpu_aware").share(near_memory(whole, "swap")) == pytest.approx(0.09375)
    with pytest.raises(UsageError, match="no buffer"):
        near_memory(whole, "swap").share(near_memory(whole, "cpu_aware", on_chip=True))
    with pytest.raises(UsageError, match="not a depth"):
        near_memory(whole, "cpu_aware", depth=0)
    assert Held(100, 104).ratio == 1.04
    assert Held(100, None).ratio is None
