"""Requests one after the other: by hand, and the same with trees that trust hash ids to name whole prefixes."""

from __future__ import annotations

import pytest

from kvbench.replay.generate.presets import preset
from kvbench.replay.request import Request
from kvbench.replay.visits import Visits, visit_all
from kvbench.systems.strata.tiers import TieredCache, unit_of
from kvbench.systems.strata.writes import Writes


def test_visits_by_hand() -> None:
    trace = [
        Request(0, 0.0, 20, 5, 1, None, 8, (1, 2, 3)),  # 2 whole pages, 4 + 4 tokens of KV behind them
        Request(1, 1.0, 20, 1, 2, None, 8, (1, 2, 4)),
        Request(2, 2.0, 30, 1, 1, 0, 8, (1, 2, 5, 6)),  # the first one's third page is prompt and output
        Request(3, 3.0, 10, 1),
    ]
    found = visit_all(trace, TieredCache(1000, 0, 8, named=True), 8)
    # behind the keys: 8, 4, 6 and 10 tokens, in pages of 8
    assert found == Visits(requests=4, with_hit=2, prompt=80, near=40, far=0, asked=40, padding=12)
    assert found.hit_rate == 0.5
    assert visit_all([], TieredCache(8, 0, 8), 8).hit_rate is None


@pytest.mark.parametrize("name", ["sharegpt:block=1", "loogle", "reviewmt:block=16", "agentic"])
@pytest.mark.parametrize("page", [1, 64])
def test_trusting_the_ids_changes_nothing(name: str, page: int) -> None:
    trace = list(preset(name).requests(120, seed=2))
    unit = unit_of(page, trace[0].block_tokens or page)
    caches = [TieredCache(120_000, 240_000, unit, Writes("write_through"), named=named) for named in (False, True)]
    found = [visit_all(trace, cache, page) for cache in caches]
    assert found[0] == found[1]
    assert found[0].near > 0
    assert caches[0].moved == caches[1].moved
    for cache in caches:
        cache.tree.check()
