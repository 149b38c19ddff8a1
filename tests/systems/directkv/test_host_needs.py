"""What a case needs before it writes: stored bytes of the plan, loads its time allows, no space for a model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import Unavailable, UsageError
from kvbench.systems.directkv.host_needs import Needs, Want, contenders, tiled
from kvbench.systems.directkv.host_plan import plan
from kvbench.systems.directkv.shapes import METHODS, Gemm, Method

GEMMS = st.builds(
    Gemm, st.integers(1, 90), st.integers(1, 90), st.integers(1, 90), st.integers(1, 40), st.integers(1, 40),
    st.integers(1, 40), block=st.sampled_from([512, 4096]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(GEMMS, st.sampled_from(METHODS), st.integers(1, 100), st.booleans())
def test_needs_are_those_of_the_plan(gemm: Gemm, method: Method, staging: int, double: bool) -> None:
    want = Want(method, staging, double)
    needed = Needs(gemm, (want, want), 1e9, 1)
    try:
        made = plan(gemm, method, staging=staging, double=double)
    except UsageError:
        assert needed.scratch == needed.setup == 0
        with pytest.raises(UsageError, match="smaller than a tile column"):
            needed.require()
        return
    needed.require()
    assert needed.scratch == 2 * made.store
    assert needed.loads(want) == len(made.loads)
    assert Needs(gemm, (want,), 1e9, 1, file=False).scratch == 0


def test_more_loads_than_the_time_allows_are_refused() -> None:
    tiny = Gemm(1, 2048, 2048, 4, 4, 4, block=4096)
    needed = Needs(tiny, (Want("cpu_aware_pipelined"),) * 2, 300.0, 10)
    with pytest.raises(Unavailable, match=r"too many loads a pass.*524288 of up to 4096 bytes.*300 s.*larger tiles"):
        needed.require()
    assert not needed.runs
    assert needed.scratch == needed.setup == 0
    assert Needs(tiny, (Want("cpu_aware_pipelined"),) * 2, 3000.0, 10).runs
    # what is allowed is planned with the time it takes: a gibibyte in tiny tiles is no matter of a second
    once = Needs(tiny, (Want("cpu_aware"),), 300.0, 5)
    assert once.scratch == 1 << 30
    assert 10.0 < once.setup < 150.0


def test_products_that_cannot_run_need_no_space() -> None:
    for gemm in (Gemm(2**33, 8, 8, 8, 8, 8), Gemm(8, 8, 2**40, 8, 8, 8), Gemm.square(10240, 64)):
        assert Needs(gemm, (Want("naive"),), 300.0, 5).scratch == 0


def test_contenders_store_b_each_in_its_way() -> None:
    gemm = tiled(160, 160, 160, "64")
    wants = contenders(gemm)
    assert [(want.method, want.double) for want in wants[:2]] == [("swap", False), ("swap", True)]
    assert Needs(gemm, wants, 1800.0, 7).scratch == sum(
        plan(gemm, want.method, staging=want.staging, double=want.double).store for want in wants
    )
    assert all(not want.double for want in contenders(tiled(100, 100, 100, "64")))
