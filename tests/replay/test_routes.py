"""The workload of the map, the model of the routes against simulations, and the order of policies."""

from __future__ import annotations

import pytest

from kvbench.errors import UsageError
from kvbench.replay.costs import Costs
from kvbench.replay.engine import replay
from kvbench.replay.machine import preset
from kvbench.replay.policies import POLICIES, make, parse_params
from kvbench.replay.routes import ROUTE_OF, SIMPLEST, Cell, estimate, ranking, words


def costs(cell: Cell) -> Costs:
    return cell.costs(preset("h200"), "llama-3-8b")


def span(cell: Cell, name: str) -> float:
    on = costs(cell)
    found = replay(cell.trace(), make(name, on, parse_params(name, words(name, cell))), on, audit="every").summary()
    assert found.finished == cell.requests
    return found.span


def test_the_workload_asks_every_document_again_after_all_others() -> None:
    cell = Cell(50e9, 1024, documents=4, questions=3)
    trace = list(cell.trace())
    assert len(trace) == cell.requests == 12
    assert {request.arrival for request in trace} == {0.0}
    ids = [request.hash_ids or () for request in trace]
    assert [found[:4] for found in ids[:4]] == [found[:4] for found in ids[4:8]]
    assert len({found[0] for found in ids}) == 4
    assert len({found[-1] for found in ids}) == 12  # each question is one of its own
    on = costs(cell)
    assert on.near_tokens == 4 * (1024 + 64 + 64)
    assert on.far_tokens == 12 * (1024 + 64 + 64)


@pytest.mark.parametrize(
    ("name", "link", "within"),
    [("recompute", 12e9, 0.05), ("lru", 12e9, 0.1), ("lru", 450e9, 0.1), ("directkv", 12e9, 0.05),
     ("directkv", 450e9, 0.15)],
)  # fmt: skip
def test_policies_that_keep_the_order_come_out_as_the_model_says(name: str, link: float, within: float) -> None:
    cell = Cell(link, 4096, output=32)
    told = estimate(costs(cell), cell).seconds[ROUTE_OF[name]]
    assert span(cell, name) == pytest.approx(told, rel=within)


GRID = [
    Cell(link * 1e9, context, output, fits, questions, 30 // questions)
    for link, context, output, fits, questions in [
        (100, 32_768, 64, 4, 3), (12, 8192, 1, 4, 3), (12, 8192, 64, 4, 1), (450, 2048, 64, 2, 3),
        (450, 8192, 64, 4, 3), (100, 2048, 512, 4, 10), (12, 2048, 1, 16, 10), (450, 4096, 256, 16, 3),
    ]
]  # fmt: skip


@pytest.mark.parametrize("cell", GRID, ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_is_faster_than_the_model_of_its_route(name: str, cell: Cell) -> None:
    """Strata rearranges requests and shares contexts: its bound is that of any order."""
    on = costs(cell)
    policy = make(name, on, parse_params(name, words(name, cell)))
    found = replay(cell.trace(), policy, on).summary()
    assert found.finished == cell.requests
    told = estimate(on, cell)
    least = told.shared if name == "strata" else told.seconds[ROUTE_OF[name]]
    assert found.span >= least / 1.02


def test_the_bound_is_near_what_is_reached() -> None:
    """A bound of nothing would hold too."""
    for cell, name, most in ((GRID[0], "directkv", 1.15), (GRID[0], "lru", 1.1), (GRID[2], "recompute", 1.05)):
        assert span(cell, name) <= most * estimate(costs(cell), cell).seconds[ROUTE_OF[name]], name


def test_the_model_in_limits() -> None:
    slow, fast = (estimate(costs(Cell(link, 8192)), Cell(link, 8192)) for link in (1e8, 450e9))
    assert slow.winner == "recompute"
    assert fast.winner == "load"
    assert slow.load_from == fast.load_from  # a property of the context, not of the link
    assert slow.load_from is not None
    assert 1e8 < slow.load_from < 450e9
    assert fast.seconds["in_place"] < slow.seconds["in_place"]
    assert fast.seconds["recompute"] == slow.seconds["recompute"]
    once = Cell(450e9, 8192, questions=1, documents=30)
    found = estimate(costs(once), once).seconds
    assert found["load"] == pytest.approx(found["recompute"])  # nothing is asked again


def test_the_boundary_of_loading_is_where_both_routes_take_as_long() -> None:
    link = estimate(costs(Cell(50e9, 8192)), Cell(50e9, 8192)).load_from
    assert link is not None
    at = Cell(link, 8192)
    found = estimate(costs(at), at).seconds
    assert found["load"] == pytest.approx(found["recompute"], rel=1e-6)


def test_what_wins_by_less_than_a_percent_over_something_simpler_does_not_win() -> None:
    assert set(SIMPLEST) == set(POLICIES)
    assert ranking({"strata": 100.0, "recompute": 99.5, "lru": 50.0, "neo": 70.0}) == [
        "recompute", "strata", "neo", "lru",
    ]  # fmt: skip
    assert ranking({"strata": 100.0, "recompute": 98.9})[0] == "strata"


@pytest.mark.parametrize("changes", [{"context": 100}, {"link": 0.0}, {"fits": 0}])
def test_places_that_are_none(changes: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="not a place of the map"):
        Cell(**{"link": 1e9, "context": 1024, **changes})  # type: ignore[arg-type]
