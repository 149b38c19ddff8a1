"""The benches of the elastic pool, run as the worker runs them: on host memory, and on the fake GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.errors import KvbenchError
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
