"""What goes in comes out, bit for bit, from the database and from a bundle."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.contract.result import Ceiling, PlannedCase, Result, RunInfo, RunStatus
from kvbench.store.bundle import BundleWriter, read_bundle
from kvbench.store.engine import Store, open_store
from kvbench.store.labels import storable
from kvbench.store.rows import decode_samples, encode_samples
from kvbench.store.transfer import export_bundle, import_bundle
from tests.store import factories
from tests.store.conftest import BOTH, fresh_postgres
from tests.store.factories import HOSTILE, at, here, make_row, make_run


@pytest.fixture(scope="module", params=BOTH)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with contextlib.ExitStack() as stack:
        if request.param == "sqlite":
            target = str(tmp_path_factory.mktemp("roundtrip") / "kv.db")
        else:
            target = stack.enter_context(fresh_postgres())
        yield stack.enter_context(open_store(target, here=here(host="nowhere")))


cases = factories.settings.flatmap(
    lambda axes: st.lists(factories.results(axes=axes), min_size=1, max_size=3, unique_by=lambda row: row.metric)
)


def _typed(row: Result) -> str:
    return repr(row)  # equality takes 1 for 1.0 and True; repr does not


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(run=factories.runs(), rows=cases)
def test_database_returns_records_exactly(kept: Store, run: RunInfo, rows: list[Result]) -> None:
    first = replace(run, status="running", finished_at=None)
    kept.begin_run(first)
    kept.add_results(run.uuid, rows, 0)
    assert kept.run(run.uuid).info == first
    found = kept.results(run.uuid, with_samples=True)
    assert sorted(map(_typed, found)) == sorted(map(_typed, rows))
    assert [row.metric for row in found] == [row.metric for row in rows]  # the first row stays the primary metric
    if run.status != "running":
        assert run.finished_at is not None
        kept.finish_run(run.uuid, run.status, run.finished_at)
        assert kept.run(run.uuid).info == run


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(run=factories.runs(), rows=cases)
def test_bundle_returns_records_exactly_and_imports_as_written(kept: Store, run: RunInfo, rows: list[Result]) -> None:
    run = replace(run, plan=tuple(PlannedCase(row.digest, "ladder", "bench", 3, {}) for row in rows[:1]))
    if run.status not in ("running", "interrupted"):  # the status of an ended run is that of its rows
        statuses = {row.status for row in rows}
        follows: RunStatus = "partial" if statuses & {"failed", "invalid"} else "ok"
        run = replace(run, status="failed" if statuses <= {"failed", "skipped"} else follows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        with BundleWriter(path, sync_lines=False) as writer:
            writer.begin_run(replace(run, status="running", finished_at=None))
            writer.add_results(run.uuid, rows, 4, committed_at=run.started_at)
            if run.status != "running":
                assert run.finished_at is not None
                writer.finish_run(run.uuid, run.status, run.finished_at)
        bundle = read_bundle(path)
        assert len(bundle.notices) == (run.status == "running")
        assert [(r.info, [*map(_typed, r.results)]) for r in bundle.runs] == [(run, [*map(_typed, rows)])]
        import_bundle(kept, path)
        assert kept.run(run.uuid).info == run
        assert [*map(_typed, kept.results(run.uuid, with_samples=True))] == [*map(_typed, rows)]
        export_bundle(kept, run.uuid, Path(folder) / "b.jsonl")
        assert read_bundle(Path(folder) / "b.jsonl").runs == bundle.runs


# What a document of a database may change: JSONB makes 1e16 an integer and drops the sign of zero.
AWKWARD = (-0.0, 1e16, 1e300, 5e-324, 1.7976931348623157e308, 0.1, 1.0, 1, 2**63 - 1, -(2**63), True, None)


def test_awkward_numbers_come_back_as_they_went_in(any_store: Store) -> None:
    values = {f"v{n}": value for n, value in enumerate(AWKWARD)}
    ceilings = tuple(Ceiling("c", v, "measured", "s") for v in AWKWARD if type(v) is float and v > 0)
    run = make_run(machine={"facts": [*AWKWARD, {"b": 1, "a": 2}]})
    taken = tuple(v for v in AWKWARD if type(v) is float)
    row = make_row(
        axes={"large": 2**63 - 1, "small": -(2**63), "word": "1e16"}, resolved=values, detail=values, ceilings=ceilings,
        value=1e16, low=5e-324, high=1e300, samples=taken, n=len(taken), kept=len(taken),
    )  # fmt: skip
    any_store.begin_run(run)
    any_store.add_results(run.uuid, [row], 0)
    assert repr(any_store.results(run.uuid, with_samples=True)) == repr([row])
    assert repr(any_store.run(run.uuid).info.machine) == repr(run.machine)


def test_hostile_text_changes_nothing_but_itself(any_store: Store) -> None:
    for hostile in HOSTILE:
        run = make_run(label=hostile, git=hostile, env={hostile: [hostile, 1, None]})
        row = make_row(axes={"op": hostile}, reason=hostile, detail={hostile: hostile}, flags=(hostile,))
        any_store.begin_run(run)
        any_store.add_results(run.uuid, [row], 0)
        assert any_store.run(run.uuid).info == run
        assert any_store.results(run.uuid, with_samples=True) == [row]
        assert len(any_store.runs(label=hostile)) == 1


def test_text_no_database_takes_is_stored_as_visible_escapes(any_store: Store) -> None:
    run = make_run(env={"path\udcff": "a\x00b"})
    row = make_row(reason="no such file: caf\udce9", detail={"nul": "\x00"})
    any_store.begin_run(run)
    any_store.add_results(run.uuid, [row], 0)
    assert any_store.run(run.uuid).info.env == {"path\\udcff": "a\\x00b"}
    found = any_store.results(run.uuid)[0]
    assert (found.reason, found.detail) == ("no such file: caf\\udce9", {"nul": "\\x00"})
    any_store.begin_run(run)  # the retry is the same run


@given(factories.text)
def test_storable_leaves_storable_text_alone(text: str) -> None:
    assert storable(text) == text


@given(st.lists(st.floats(width=64, allow_nan=False)))
def test_samples_are_little_endian_doubles(samples: list[float]) -> None:
    data = encode_samples(samples)
    assert len(data) == 8 * len(samples)
    assert list(decode_samples("f64le", data)) == samples
    assert encode_samples([1.0]) == bytes.fromhex("000000000000f03f")


def test_an_axis_added_later_keeps_the_history_and_shows_its_own_axes(store: Store) -> None:
    """The digest leaves an axis with ``since`` out at its default: two axes dicts, one case (design 4)."""
    old = make_row(axes={"op": "read"})
    new = old.with_(axes={"op": "read", "order": "seq"})
    for number, row in enumerate((old, new)):
        run = make_run(started_at=at(number))
        store.begin_run(run)
        store.add_results(run.uuid, [row], 0)
        assert store.results(run.uuid, with_samples=True) == [row]
