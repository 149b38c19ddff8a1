"""Near memory by method: the paper's column, the plans' own slots, and what the page tables hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UsageError
from kvbench.systems.directkv.host_plan import plan
from kvbench.systems.directkv.ledger import Held, near_memory
from kvbench.systems.directkv.shapes import METHODS, Gemm, Method

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
        Gemm, st.integers(1, 300), st.integers(1, 300), st.integers(1, 300), st.integers(1, 64), st.integers(1, 64),
        st.integers(1, 64), block=st.sampled_from([512, 4096]),
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
            near_memory(gemm, method, staging=staging, double=double)
        return
    assert near_memory(gemm, method, staging=staging, double=double, depth=depth).buffer == made.near_buffer


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
