"""The benches of the elastic pool, run as the worker runs them: on host memory, and on the fake GPU."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.errors import KvbenchError
from kvbench.measure import Measure
from kvbench.systems.ellm import mixed
from kvbench.systems.ellm.pool import ElasticPool
from kvbench.worker import measure_case
from tests.suites import gpu_rig

CHUNK = 4096
CASES: list[tuple[str, dict[str, Value]]] = [
    ("slot_alloc", {"mode": "every_time", "chunk_bytes": CHUNK, "sequences": 2, "steps": 20}),
    ("slot_alloc", {"mode": "pooled", "chunk_bytes": CHUNK, "sequences": 2, "steps": 20}),
    ("slot_alloc", {"mode": "premap", "chunk_bytes": CHUNK, "sequences": 2, "steps": 20}),
    ("inflate", {"chunks": 5, "unmap": "sync", "chunk_bytes": CHUNK}),
    ("inflate", {"chunks": 5, "unmap": "alias", "chunk_bytes": CHUNK}),
    ("deflate", {"chunks": 4, "deflate": "lazy", "prefill": "part", "chunk_bytes": CHUNK}),
    ("deflate", {"chunks": 4, "deflate": "eager", "prefill": "part", "chunk_bytes": CHUNK}),
    ("deflate", {"chunks": 4, "deflate": "lazy", "prefill": "all", "unmap": "alias", "chunk_bytes": CHUNK}),
    ("elastic_pool", {"context": 131072, "chunks": 256, "steps": 12}),
]
MAPS = {("lazy", "part"): 0.0, ("eager", "part"): 4.0, ("lazy", "all"): 8.0}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[gpu_rig.Rig]:
    with gpu_rig.rig(monkeypatch, gpu_rig.short_context(tmp_path), total_bytes=64 << 20, granularity=CHUNK) as rig:
        yield rig


def run(gpu: gpu_rig.Rig, name: str, driver: str, axes: dict[str, Value]) -> list[Result]:
    bench = load_suites().find("ellm", name)
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()} | {"driver": driver} | axes
    return measure_case(bench, values, gpu.context)


@pytest.mark.parametrize(
    ("name", "axes", "driver"),
    [(name, axes, "host") for name, axes in CASES] + [(*CASES[at], "cuda") for at in (2, 3, 4, 7, 8)],
)
def test_each_bench_measures_what_it_says(gpu: gpu_rig.Rig, name: str, axes: dict[str, Value], driver: str) -> None:
    rows = {row.metric: row for row in run(gpu, name, driver, axes)}
    first = next(iter(rows.values()))
    assert first.status in HAS_VALUE - {"invalid"}, first.reason
    assert all(row.value is not None for row in rows.values())
    assert gpu.fake.live() == {}
    if name == "slot_alloc":
        maps = rows["maps_per_1000"].value
        assert maps is not None
        assert maps > 2000 if axes["mode"] == "every_time" else maps < 2000, maps
    if name == "inflate":
        assert (first.detail["maps"], rows["bytes_copied"].value) == (5, 0.0)
        assert first.ceilings[0].value is not None
        assert ("unmap_alone" in first.detail) == (axes["unmap"] == "sync")
    if name == "deflate":
        assert rows["maps_per_cycle"].value == MAPS[str(axes["deflate"]), str(axes["prefill"])]
    if name == "elastic_pool":
        assert first.basis == "simulated"
        assert first.value is not None
        assert first.value > 1.1
        assert rows["bytes_copied"].value == 0.0


@pytest.mark.parametrize("name", ["inflate", "deflate"])
def test_a_pool_that_copies_has_no_number(gpu: gpu_rig.Rig, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    numbers = ElasticPool.chunks_of
    monkeypatch.setattr(ElasticPool, "chunks_of", lambda self, slot: numbers(self, slot)[::-1])
    chunks = {"inflate": 5, "deflate": 4}[name]
    monkeypatch.setattr(
        "kvbench.systems.ellm.identity.stamp", lambda pool, slot, touch: None
    )  # nothing carries a number: as if every chunk were another one
    (row,) = run(gpu, name, "host", {"chunks": chunks, "chunk_bytes": CHUNK})
    assert (row.status, row.value) == ("failed", None)
    assert "memory was not remapped" in row.reason


def test_chunks_a_gpu_cannot_have_are_skipped(gpu: gpu_rig.Rig) -> None:
    gpu.fake.set(granularity=2 << 20)
    (row,) = run(gpu, "inflate", "cuda", {"chunks": 2, "chunk_bytes": CHUNK})
    assert (row.status, row.value) == ("skipped", None)
    assert "chunks off the granularity" in row.reason


def test_more_than_there_is_is_skipped(gpu: gpu_rig.Rig) -> None:
    for driver in ("host", "cuda"):
        (row,) = run(gpu, "inflate", driver, {"chunks": 1 << 16, "chunk_bytes": 1 << 30})
        assert (row.status, row.value) == ("skipped", None), row.reason


@pytest.mark.parametrize("driver", ["host", "cuda"])
def test_a_case_that_breaks_off_leaves_nothing(gpu: gpu_rig.Rig, monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    def broken(pool: ElasticPool) -> None:
        raise KvbenchError("broken off", where="a test")

    monkeypatch.setattr(ElasticPool, "settle", broken)
    before = len(list(Path("/proc/self/fd").iterdir()))
    (row,) = run(gpu, "deflate", driver, {"chunks": 4, "chunk_bytes": CHUNK})
    assert (row.status, row.value) == ("failed", None)
    assert "broken off" in row.reason
    assert gpu.fake.live() == {}
    assert len(list(Path("/proc/self/fd").iterdir())) == before


class Clocked:
    """A pool that takes no memory: each call moves the clock by a time of its own."""

    def __init__(self) -> None:
        self.cost = {  # ns
            "open_kv": 1, "open_act": 10, "grow": 100, "close_act": 1000, "close_kv": 10_000, "premap": 100_000,
        }  # fmt: skip
        self.now, self.calls = 0, Counter[str]()
        self.sizes, self.tally = SimpleNamespace(chunk_bytes=CHUNK), SimpleNamespace(mapped=0)

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*_: object) -> object:
            self.calls[name] += 1
            self.now += self.cost[name]
            self.tally.mapped += name == "grow"
            return SimpleNamespace(address=0)

        return call

    def slack_bytes(self) -> int:
        return 7


def player(monkeypatch: pytest.MonkeyPatch, *, ahead: bool = False) -> tuple[Any, Clocked]:
    told = load_suites().find("ellm", "slot_alloc").body.__globals__
    pool = Clocked()
    monkeypatch.setattr("kvbench.timing.clock.now_ns", lambda: pool.now)
    monkeypatch.setattr(told["Player"], "_compute", lambda self, slots: None)
    streams = [mixed.stream(30, 3, seed) for seed in range(told["STREAMS"])]
    return told["Player"](pool, streams, None, ahead=ahead, on_host=True), pool


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pass_of_slot_alloc_is_every_stream_and_all_that_the_caller_waits_for(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    work, pool = player(monkeypatch, ahead=ahead)
    events = Counter(event.kind for stream in work.streams for event in stream)
    first = work.run(1)
    assert pool.calls["open_kv"] == events["open"] == pool.calls["close_kv"]
    assert bool(pool.calls["premap"]) == ahead
    asked = events["open"] + events["act"] + events["grow"]
    waited = sum(pool.cost[name] * count for name, count in pool.calls.items())
    assert first == pytest.approx(waited * 1e-9 / asked)
    assert [work.run(1), work.run(2) / 2] == pytest.approx([first, first])


def test_the_further_rows_of_slot_alloc_are_of_the_samples_behind_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    work, pool = player(monkeypatch)
    cold = work.run(1)  # as a warm-up: slower than the samples
    monkeypatch.setattr(pool, "cost", {name: 2 * cost for name, cost in pool.cost.items()})
    kept = work.run(1)
    assert work.run(1) == kept != cold
    found: dict[str, tuple[float, int]] = {}

    def extra(metric: str, value: float, *, n: int, **_: object) -> None:
        found[metric] = (value, n)

    row = SimpleNamespace(samples=(kept,), status="ok", reason="", kernel="")
    work.add_rows(SimpleNamespace(extra=extra), row)
    events = Counter(event.kind for stream in work.streams for event in stream)
    asked, steps = events["open"] + events["act"] + events["grow"], events["step"]
    assert found["crossing_p99"][0] == pytest.approx(200e-9)
    assert found["crossing_p99"][1] == 2 * events["grow"]
    assert found["alloc_p50"][1] == found["alloc_p99"][1] == 2 * asked
    assert found["slack_bytes"] == (7.0, 2 * steps)
    assert found["maps_per_1000"][0] == pytest.approx(1000 * events["grow"] / asked)


@pytest.mark.parametrize(
    ("name", "axes"),
    [("slot_alloc", CASES[2][1]), ("inflate", CASES[4][1]), ("deflate", CASES[7][1])],
)
def test_the_thread_that_maps_is_one_of_those_that_measure(
    gpu: gpu_rig.Rig, monkeypatch: pytest.MonkeyPatch, name: str, axes: dict[str, Value]
) -> None:
    named: list[int] = []
    started: list[int] = []
    start = ElasticPool.start_background
    monkeypatch.setattr(Measure, "threads", lambda self, tids: named.extend(tids))

    def noted(self: ElasticPool) -> int:
        started.append(start(self))
        return started[-1]

    monkeypatch.setattr(ElasticPool, "start_background", noted)
    run(gpu, name, "host", axes)
    assert named == [threading.get_native_id(), *started]
    assert len(started) == 1
