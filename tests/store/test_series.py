"""Two runs side by side, and one case over time: matched by what they are, and by nothing that looks like it."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event

from kvbench.contract.result import Result
from kvbench.errors import UsageError
from kvbench.store.engine import Store
from tests.store.factories import at, digest_of, make_row, make_run


def stored(store: Store, *rows: Result, **changes: object) -> str:
    """Store a run of cases with one row each, or with two where two rows in a row share a digest; return its UUID."""
    run = make_run(**changes)
    store.begin_run(run)
    for position, row in enumerate(rows):
        store.add_results(run.uuid, [row], position)
    return run.uuid


def test_pairs_are_matched_by_case_and_metric(any_store: Store) -> None:
    slow = make_row(1, "latency", unit="s", better="lower", value=2e-6)
    a = stored(any_store, make_row(0, suite="canary"), make_row(2), make_row(1), slow)
    failed = make_row(1, status="failed", value=None, samples=(), reason="died")
    b = stored(any_store, make_row(1).with_(value=3.0, flags=("in_llc",)), make_row(3), slow.with_(value=1e-6))
    c = stored(any_store, failed)
    found = any_store.pairs(a, b)
    assert [(p.axes["bytes"], p.metric, p.a and p.a.value, p.b and p.b.value) for p in found] == [
        (12288, "bandwidth", 1e10 + 2, None), (8192, "bandwidth", 1e10 + 1, 3.0), (8192, "latency", 2e-6, 1e-6),
        (16384, "bandwidth", None, 1e10 + 3),
    ]  # fmt: skip
    pair = found[1]
    assert (pair.suite, pair.bench, pair.bench_version, pair.digest) == (
        "ladder",
        "host_bandwidth",
        1,
        make_row(1).digest,
    )
    assert pair.b is not None
    assert (pair.b.unit, pair.b.better, pair.b.n, pair.b.status, pair.b.flags) == (
        "B/s",
        "higher",
        6,
        "ok",
        ("in_llc",),
    )
    (dead,) = [p.b for p in any_store.pairs(a, c) if p.b is not None]
    assert (dead.status, dead.value, dead.reason) == ("failed", None, "died")
    assert [p.suite for p in any_store.pairs(a, b, canaries=True)] == ["canary"]
    assert len(any_store.pairs(a, b, canaries=None)) == 5
    assert all(p.a == p.b for p in any_store.pairs(a, a))
    with pytest.raises(UsageError, match="no run has this UUID"):
        any_store.pairs(a, make_run().uuid)


def test_another_version_or_axis_is_another_case(any_store: Store) -> None:
    a = stored(any_store, make_row(0))
    axes = make_row(0).axes
    newer = make_row(0, bench_version=2, digest=digest_of("ladder", "host_bandwidth", 2, axes))
    b = stored(any_store, newer, make_row(0, axes={**axes, "bytes": "4096"}))
    assert [(p.bench_version, p.a is None, p.b is None) for p in any_store.pairs(a, b)] == [
        (1, False, True), (2, True, False), (1, True, False)
    ]  # fmt: skip


def test_history_is_that_of_one_case_on_one_hardware(any_store: Store) -> None:
    digest = make_row(0).digest
    for second, value in ((3, 3.0), (1, 1.0), (2, 2.0)):
        stored(any_store, make_row(0, value=value), make_row(1), started_at=at(second), label=f"l{second}")
    stored(any_store, make_row(0), hw_class="cpu-b")
    stored(any_store, make_row(0, basis="modelled", value=7.0), started_at=at(4))
    tainted = stored(any_store, make_row(0, status="tainted", value=5.0), started_at=at(5), env_digest="env-b")
    failed = stored(any_store, make_row(0, status="failed", value=None, samples=()), started_at=at(6), host="other")
    found = any_store.history(digest, "bandwidth", "cpu-a")
    assert [p.figure.value for p in found] == [1.0, 2.0, 3.0, 5.0, None]
    assert [p.figure.status for p in found] == ["ok", "ok", "ok", "tainted", "failed"]
    assert [p.label for p in found[:3]] == ["l1", "l2", "l3"]
    assert (found[3].run, found[3].env_digest, found[4].run, found[4].host) == (tainted, "env-b", failed, "other")
    assert any_store.history(digest, "bandwidth", "cpu-a", limit=2) == found[3:]
    assert any_store.history(digest, "latency", "cpu-a") == []
    assert any_store.history("0" * 64, "bandwidth", "cpu-a") == []
    assert len(any_store.history(digest, "bandwidth", "cpu-b")) == 1


def test_sqlite_answers_both_from_indices(store: Store) -> None:
    """A scan answers too, a thousand times slower at ten million rows: no table may be read from end to end."""
    a, b = stored(store, make_row(0)), stored(store, make_row(0))
    asked: list[tuple[str, Any]] = []
    with store.database.read() as connection:
        event.listen(connection.engine, "before_cursor_execute", lambda c, u, s, p, x, m: asked.append((s, p)))
    store.pairs(a, b)
    store.history(make_row(0).digest, "bandwidth", "cpu-a", limit=5)
    queries = [(statement, values) for statement, values in asked if "results" in statement]
    assert len(queries) == 4
    with store.database.read() as connection:
        for statement, values in queries:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
            assert not [row for row in plan if row[3].startswith("SCAN")], plan
            steps = " ".join(row[3] for row in plan)
            assert "(run_id=?" in steps or "run_id=?)" in steps, plan


def test_latest_is_found_behind_many_runs_without_a_value(any_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.store.query._PAGE", 2)
    wanted = [stored(any_store, make_row(0), started_at=at(second)) for second in range(3)]
    group = make_run().group
    several = [stored(any_store, make_row(0), started_at=at(10 + second), group=group) for second in range(5)]
    for second in range(3):
        stored(any_store, make_row(0, status="failed", value=None, samples=()), started_at=at(20 + second))
    assert [run.uuid for run in any_store.resolve("latest")] == several
    assert [any_store.resolve(f"latest~{back}")[0].uuid for back in (1, 2, 3)] == wanted[::-1]
    with pytest.raises(UsageError, match=r"4 groups.*at most latest~3"):
        any_store.resolve("latest~4")
