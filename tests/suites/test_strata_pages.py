"""page_transfer, layout_change and page_law as the worker runs them: host memory, a file, the fake driver."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from functools import cache

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.bench import Bench
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.errors import Unavailable
from kvbench.measure import Measure
from kvbench.memory import file
from kvbench.memory.cuda import portable
from kvbench.model.geometry import LAYOUTS, geometry
from kvbench.runner import make_plan
from kvbench.systems.strata import ends, transfer
from kvbench.transport.host_open import OF_FILE
from kvbench.worker import measure_case
from tests.suites.gpu_rig import Rig, rig
from tests.transport.paged_rig import tell

KiB = 1 << 10
SHAPE = geometry("Llama-3.1-8B")


@cache
def find(name: str) -> Bench:
    return load_suites().find("strata", name)


def case(context: Context, name: str, **axes: Value) -> dict[str, Result]:
    """Run one case at its first smoke values but for ``axes``; every row that must have a value has one."""
    bench = find(name)
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()} | {"threads": 1}
    values |= {axis: value for axis, value in axes.items() if axis in bench.axes}
    assert bench.where is None or bench.where(values), f"no such case: {values}"
    rows = measure_case(bench, values, context)
    assert rows[0].status in HAS_VALUE - {"invalid"} or rows[0].status == "skipped", rows[0].reason
    return {row.metric: row for row in rows}


@pytest.mark.parametrize("direction", ["fetch", "evict"])
@pytest.mark.parametrize(
    ("layout", "fragment"), [("layer_first", 4 * KiB), ("page_first", 2 * KiB), ("page_head", 256)]
)
def test_pages_of_host_memory(context: Context, layout: str, fragment: int, direction: str) -> None:
    rows = case(context, "page_transfer", layout=layout, direction=direction, page_tokens=2, bytes=1 << 20)
    row = rows["bandwidth"]
    assert row.bytes.unique == row.bytes.link == 1 << 20
    assert (row.detail["fragment_bytes"], row.detail["pages"], row.transport) == (fragment, 4, "cpu")
    assert row.detail["fragments"] == (1 << 20) // fragment
    assert row.ceilings[0].name.startswith("plain gather copy of the same fragments")
    assert row.ceilings[0].kind == "measured"
    assert row.fraction is not None
    assert row.detail["completion_s"] == row.seconds
    assert "in_llc" in row.flags
    assert "moves" in (row.kernel or "") or "memcpy" in (row.kernel or "")


@pytest.mark.parametrize("transport", OF_FILE)
def test_pages_of_a_file(context: Context, transport: str) -> None:
    rows = case(context, "page_transfer", pair="dram:file", transport=transport, page_tokens=4, bytes=1 << 20)
    row = rows["bandwidth"]
    assert row.transport == transport
    counted = row.detail.get("link_counted")
    assert counted is None or int(counted) >= 1 << 20  # what storage delivered; less would be the page cache
    assert ("link_unmeasured" in row.flags) == ("link_counted" in row.detail and counted is None)
    assert row.rate_of == "unique"
    assert row.bytes.unique == 1 << 20
    assert "in order" in row.ceilings[0].name
    assert row.detail["file_system"]


def test_what_a_file_cannot_take_in_a_sample_is_skipped_with_the_reason(context: Context) -> None:
    rows = case(context, "page_transfer", pair="dram:file", layout="page_head")
    assert rows["bandwidth"].status == "skipped"
    assert "16384 fragments" in rows["bandwidth"].reason


def test_a_row_says_how_many_bytes_it_moves(context: Context) -> None:
    for name in ("page_transfer", "layout_change"):
        row = case(context, name, page_tokens=16, bytes=512 * KiB)["bandwidth"]  # a page of 2 MiB
        assert row.detail["pass_bytes"] == row.bytes.unique == 2 << 20
        assert "larger_pass" in row.flags
        few = case(context, name, page_tokens=1, bytes=512 * KiB)["bandwidth"]
        assert few.detail["pass_bytes"] == few.bytes.unique == 512 * KiB
        assert "larger_pass" not in few.flags


@pytest.mark.parametrize("name", ["page_transfer", "layout_change", "page_law"])
def test_a_page_far_larger_than_the_bytes_asked_is_skipped_untouched(
    context: Context, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Measure, "sources", lambda *_, **__: pytest.fail("memory was touched"))
    large: dict[str, Value] = {} if name == "page_law" else {"page_tokens": 1 << 16}
    row = case(context, name, model="DeepSeek-V3", bytes=64 * KiB, **large)["bandwidth"]
    assert (row.status, row.value) == ("skipped", None)
    assert "at most 4 x the 64 KiB asked" in row.reason


@pytest.mark.parametrize("name", ["page_transfer", "layout_change", "page_law"])
def test_pools_that_memory_does_not_hold_are_skipped_untouched(
    context: Context, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Measure, "sources", lambda *_, **__: pytest.fail("memory was touched"))

    def no_room(nbytes: int) -> int:
        raise Unavailable(f"asked for {nbytes} bytes")

    monkeypatch.setattr(ends, "preflight", no_room)
    reason = case(context, name, bytes=64 << 20)["bandwidth"].reason
    pools = 3 * (64 << 20)  # a far pool of twice the pass, and a near one
    assert int(reason.split()[2]) + context.arena.nbytes >= pools


def test_a_change_into_too_many_fragments_is_counted_and_not_built(context: Context) -> None:
    tracemalloc.start()
    try:
        row = case(context, "layout_change", page_tokens=1 << 16, target="page_head")["bandwidth"]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert row.status == "skipped"
    assert "33554432 fragments" in row.reason


@pytest.mark.usefixtures("short_sweep")
@pytest.mark.parametrize(
    ("name", "transport"),
    [("page_transfer", "cpu"), ("page_transfer", "direct"), ("page_law", "cpu"), ("page_law", "direct")],
)
def test_a_file_in_memory_is_no_file(
    context: Context, name: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "file_system", lambda _: file.FileSystem("tmpfs", "tmpfs", "0:1"))
    for row in case(context, name, pair="dram:file", transport=transport, bytes=1 << 20, page_tokens=8).values():
        assert "file_in_memory" in row.flags


@pytest.mark.usefixtures("short_sweep")
def test_a_mapped_file_is_cold_at_every_page_size(context: Context) -> None:
    """Each size once had a mapping of its own: pages of one survived the drops of the others."""
    rows = case(context, "page_law", pair="dram:file", transport="direct", bytes=1 << 20)
    row = rows["bandwidth"]
    assert row.value is not None, row.reason
    assert "link_below_unique" not in row.flags
    counted = row.detail["link_counted"]
    assert counted is None or int(counted) >= (row.bytes.unique or 0)
    law = rows["per_fragment"].detail
    assert law["holds"] is ("no_law" not in row.flags)


def test_without_a_second_node_the_pair_is_skipped(context: Context) -> None:
    if len(context.topology.nodes) > 1:
        pytest.skip("this machine has a second node")
    rows = case(context, "page_transfer", pair="dram@0:dram@1")
    assert (rows["bandwidth"].status, rows["bandwidth"].value) == ("skipped", None)
    assert "node 1" in rows["bandwidth"].reason


def test_transports_belong_to_pairs() -> None:
    where = find("page_transfer").where
    assert where is not None
    assert not where({"pair": "dram:dram", "transport": "direct", "threads": "all"})
    assert not where({"pair": "hbm:pinned", "transport": "cpu", "threads": "all"})
    assert not where({"pair": "hbm:pinned", "transport": "ce", "threads": 1})


def test_the_scratch_file_of_a_sweep_holds_its_largest_page() -> None:
    bench = find("page_law")
    assert bench.disk is not None
    axes: dict[str, Value] = {"pair": "dram:file", "model": SHAPE.name, "sweep": "coarse", "bytes": 16 << 20}
    assert bench.disk(axes) >= 2 * SHAPE.page_bytes(512)
    assert bench.disk({**axes, "bytes": 64 * KiB}) == 0  # skipped: a page is too large
    assert bench.disk({**axes, "pair": "dram:dram"}) == 0


def test_large_pools_are_part_of_the_estimate() -> None:
    def seconds(**axes: str) -> float:
        given = {"pair": "dram:dram", "transport": "cpu"} | axes
        return make_plan(load_suites(), ["strata/page_transfer"], given, "smoke").seconds

    assert seconds(bytes="8GiB") > seconds(bytes="128MiB") + 10.0


def test_the_scratch_file_is_announced_before_the_run() -> None:
    bench = find("page_transfer")
    assert bench.disk is not None
    axes: dict[str, Value] = {"pair": "dram:file", "model": SHAPE.name, "page_tokens": 32, "layout": "layer_first",
                              "bytes": 1 << 30}  # fmt: skip
    pages = transfer.CAPS["file"][0] // SHAPE.fragments_per_page("layer_first", 32)
    assert bench.disk(axes) >= 2 * pages * SHAPE.page_bytes(32)
    assert bench.disk({**axes, "layout": "page_head"}) == 0
    assert bench.disk({**axes, "pair": "dram:dram"}) == 0


@pytest.mark.parametrize("target", LAYOUTS)
def test_a_layout_change(context: Context, target: str) -> None:
    row = case(context, "layout_change", source="page_first", target=target, page_tokens=2, bytes=512 * KiB)[
        "bandwidth"
    ]
    expected = {"page_head": 256, "page_first": 2 * 64 * KiB}.get(target, 2 * KiB)
    assert row.detail["fragment_bytes"] == expected
    assert row.bytes.link == 512 * KiB
    assert row.ceilings[0].kind == "measured"


@pytest.fixture
def short_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of 512 tokens are 64 MiB each."""
    monkeypatch.setitem(find("page_law").body.__globals__["SWEEPS"], "coarse", (1, 2, 4, 8))


@pytest.mark.usefixtures("short_sweep")
@pytest.mark.parametrize("pair", ["dram:dram", "dram:file"])
def test_the_law_of_pages(context: Context, pair: str) -> None:
    rows = case(context, "page_law", pair=pair, bytes=1 << 20)
    assert list(rows) == ["bandwidth", "per_fragment", "asymptote", "residual", "n_half", "page_90"]
    law = rows["per_fragment"].detail
    assert law["points"] == 4
    assert law["law"] in ("additive", "max")
    assert all(isinstance(law[f"page_{page}_Bps"], float) for page in (1, 2, 4, 8))
    assert rows["residual"].value is not None
    for row in rows.values():
        assert (row.value is not None) == (row.status in HAS_VALUE)
        assert row.value is not None or row.reason


# -- the fake driver ---------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, context: Context) -> Iterator[Rig]:
    # A batch counts as one operation a fragment: at 1 us each it would take longer than the fake really does. The one
    # launch of sm needs 1 us to be a window.
    with rig(monkeypatch, context, op_ns=1000 if "[sm-" in request.node.name else 100) as made:
        monkeypatch.setattr(portable, "image_of", lambda kernel, arch: tell(made.fake, kernel))
        yield made


@pytest.mark.parametrize("direction", ["fetch", "evict"])
@pytest.mark.parametrize("transport", ["ce", "batch", "sm", "staged"])
def test_pages_of_a_gpu(gpu: Rig, transport: str, direction: str) -> None:
    rows = case(
        gpu.context, "page_transfer", pair="hbm:pinned", transport=transport, direction=direction, page_tokens=1,
        bytes=256 * KiB, threads="all",
    )  # fmt: skip
    row = rows["bandwidth"]
    assert row.value is not None, row.reason
    assert row.bytes.link == row.bytes.unique == 256 * KiB
    assert (row.transport, row.detail["fragments"]) == (transport, 128)
    assert rows["device_only"].value is not None
    assert gpu.fake.live() == {}


@pytest.mark.usefixtures("short_sweep")
def test_the_law_of_a_gpus_pages(gpu: Rig) -> None:
    rows = case(gpu.context, "page_law", pair="hbm:pinned", transport="ce", bytes=512 * KiB, threads="all")
    assert rows["bandwidth"].value is not None, rows["bandwidth"].reason
    assert rows["per_fragment"].detail["points"] == 4
    assert gpu.fake.live() == {}
