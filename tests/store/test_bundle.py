"""Bundles: what a killed writer leaves can be read, and nothing else that is not exactly a bundle can."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import StoreError, UsageError
from kvbench.store import bundle as bundle_module
from kvbench.store.bundle import SCHEMA, BundleWriter, read_bundle
from kvbench.store.engine import Store, open_store
from kvbench.store.sink import Sink
from kvbench.store.transfer import export_bundle, import_bundle
from tests.store.factories import at, here, make_row, make_run

LATER = (datetime.now(UTC) + timedelta(hours=1)).isoformat(timespec="microseconds")


def lines_of(**changes: Any) -> list[dict[str, Any]]:
    """Return the lines of a good bundle: header, two cases, end."""
    run = make_run(**changes)
    cases = [
        {"kind": "case", "run": run.uuid, "position": n, "at": at(n), "results": [make_row(n).to_wire()]}
        for n in range(2)
    ]
    return [
        {"schema": SCHEMA, "kind": "run", "run": run.to_wire()}, *cases,
        {"kind": "end", "run": run.uuid, "status": "ok", "finished_at": at(9)},
    ]  # fmt: skip


def put(path: Path, lines: list[dict[str, Any]] | bytes) -> Path:
    data = lines if isinstance(lines, bytes) else b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    path.write_bytes(data)
    return path


def test_both_sinks_are_sinks(store: Store, tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b.jsonl") as writer:
        for sink in (store, writer):
            _drive(sink)
    (run,) = read_bundle(tmp_path / "b.jsonl").runs
    assert run.info == store.run(run.info.uuid).info
    assert list(run.results) == store.results(run.info.uuid, with_samples=True)


def _drive(sink: Sink) -> None:
    run = make_run(uuid="c0ffee00-0000-4000-8000-000000000000", group="c0ffee00-0000-4000-8000-000000000001")
    sink.check_writable()
    for _ in range(2):  # a retry changes nothing
        sink.begin_run(run)
        sink.add_results(run.uuid, [make_row(0), make_row(0, "latency")], 0)
    for _ in range(2):
        sink.finish_run(run.uuid, "ok", LATER)
    with pytest.raises(StoreError, match="ended ok"):
        sink.add_results(run.uuid, [make_row(1)], 1)
    with pytest.raises(StoreError, match="rows for a run that is not"):
        sink.add_results("c0ffee00-0000-4000-8000-000000000009", [make_row(1)], 1)
    with pytest.raises(ValueError, match="nothing measured"):
        sink.add_results(run.uuid, [], 1)


def test_several_runs_in_one_file(tmp_path: Path) -> None:
    runs = [make_run(), make_run()]
    with BundleWriter(tmp_path / "b.jsonl") as writer:
        for run in runs:
            writer.begin_run(run)
            writer.add_results(run.uuid, [make_row(0)], 0)
            writer.finish_run(run.uuid, "ok", at(1))
    assert [run.info.uuid for run in read_bundle(tmp_path / "b.jsonl").runs] == [run.uuid for run in runs]


@pytest.mark.parametrize("cut", [1, 20, 400])
def test_a_cut_off_last_line_is_told_and_the_rest_kept(tmp_path: Path, store: Store, cut: int) -> None:
    lines = lines_of()
    whole = b"".join(json.dumps(line).encode() + b"\n" for line in lines[:2])
    path = put(tmp_path / "b.jsonl", whole + json.dumps(lines[2]).encode()[:cut])
    bundle = read_bundle(path)
    assert len(bundle.runs[0].results) == 1
    assert bundle.runs[0].info.status == "running"
    tail = f"{path}, line 3: cut off after {cut} B and left out; the lines before are whole"
    open_end = f"{path}, run {lines[1]['run'][:8]}: the file ends before the run, no plan, 1 cases: it was still being"
    assert bundle.notices[0] == tail
    assert bundle.notices[1].startswith(open_end)
    counts = import_bundle(store, path)
    assert (counts.runs_new, counts.cases_new, counts.notices) == (1, 1, bundle.notices)
    put(path, lines)  # the whole file, imported later, completes the run
    counts = import_bundle(store, path)
    assert (counts.runs_known, counts.cases_known, counts.cases_new) == (1, 1, 1)
    assert store.run(lines[1]["run"]).info.status == "ok"


def test_a_last_line_without_its_newline_counts_when_it_is_whole(tmp_path: Path) -> None:
    data = b"\n".join(json.dumps(line).encode() for line in lines_of())
    bundle = read_bundle(put(tmp_path / "b.jsonl", data))
    assert (bundle.runs[0].info.status, bundle.notices) == ("ok", ())


def _with(number: int, *path: Any, value: Any) -> list[dict[str, Any]]:
    lines = lines_of()
    target: Any = lines[number]
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    return lines


def _text(number: int, old: str, new: str) -> bytes:
    lines = [json.dumps(line) for line in lines_of()]
    assert old in lines[number]
    lines[number] = lines[number].replace(old, new)
    return "\n".join(lines).encode() + b"\n"


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(tmp_path_factory.mktemp("empty") / "kv.db", here=here()) as opened:
        yield opened


ROW = ("results", 0)
BAD: list[tuple[Any, int, str]] = [
    (b"", 0, "holds no run"),
    (b"\n", 1, "not JSON"),
    (b"hello\n", 1, "not JSON"),
    (b"\xff\xfe\n", 1, "the file is UTF-16, expected UTF-8; save it as UTF-8"),
    (b"[]\n", 1, "expected an object"),
    (b'{"a": 1}\n', 1, "not a kvbench bundle"),
    (b'{"benchmarks": [], "machine_info": {}}\n', 1, "not a kvbench bundle"),
    (b"[" * 100_000, 1, "nested too deep"),
    (b'{"schema":' + b'{"a":' * 5000 + b"1" + b"}" * 5001 + b"\n", 1, "nested too deep"),
    (_with(0, "schema", value="kvbench.bundle/2"), 1, "by a newer kvbench"),
    (_with(0, "run", "uuid", value="'); drop table runs"), 1, "expected a UUID"),
    (_with(0, "run", "started_at", value="yesterday"), 1, "expected a UTC time"),
    (_with(0, "run", "seed", value=2**64), 1, "64-bit"),
    (_with(0, "run", "pid", value=True), 1, "run.pid is True"),
    (_with(0, "run", "status", value="great"), 1, "run.status"),
    (_with(0, "run", "surprise", value=1), 1, "unknown field 'surprise'"),
    (_with(0, "run", "machine", value={"a": json.loads("[" * 40 + "]" * 40)}), 1, "nested more than 32"),
    (_with(0, "run", "profile", value="fast"), 1, "run.profile is 'fast', expected one of smoke, quick, full"),
    (_with(0, "run", "started_at", value="2025-03-01\x1b00:00:00+00:00"), 1, "expected a UTC time"),
    (_with(0, "run", "finished_at", value="2025-03-01T00:00:00+02:00"), 1, "expected a UTC time"),
    (_with(2, *ROW, "better", value="lower"), 3, "is better lower here, higher before"),
    (_with(0, "extra", value=1), 1, "unknown field 'extra'"),
    (lines_of()[1:], 1, "not a kvbench bundle"),
    (lines_of() + lines_of()[1:2], 5, "belongs to no run"),
    (_with(1, "kind", value="note"), 2, "unknown kind"),
    (_with(1, "position", value=-1), 2, "position -1"),
    (_with(1, "results", value=[]), 2, "nothing measured"),
    (_with(1, *ROW, "value", value="fast"), 2, "result.value is 'fast'"),
    (_with(1, *ROW, "n", value=1.5), 2, "result.n is 1.5"),
    (_with(1, *ROW, "status", value="failed"), 2, "carries the value"),
    (_with(1, *ROW, "status", value="brilliant"), 2, "result.status is 'brilliant'"),
    (_with(1, *ROW, "digest", value="0" * 64), 2, "does not belong to"),
    (_with(1, *ROW, "axes", "bytes", value=8192), 2, "does not belong to"),
    (_with(1, *ROW, "bench", value="other"), 2, "does not belong to"),
    (_with(1, *ROW, "axes", "x", value=[1]), 2, "result.axes.x"),
    (_with(1, *ROW, "samples", value=[1.0, None]), 2, "result.samples[1] is None"),
    (_text(1, "10000000000.0", "NaN"), 2, "NaN is no JSON number"),
    (_text(1, "10000000000.0", "1e999"), 2, "result.value is inf"),
    (_text(1, "10000000000.0", "1" * 5000), 2, "not JSON"),
    (_text(1, '"metric":', '"unit": "s", "metric":'), 2, "same key twice"),
    (_with(3, "status", value="running"), 4, "status 'running'"),
]


@pytest.mark.parametrize(("lines", "number", "said"), BAD)
def test_anything_else_is_one_line_naming_file_and_line(
    tmp_path: Path, empty: Store, lines: list[dict[str, Any]] | bytes, number: int, said: str
) -> None:
    path = put(tmp_path / "bad.jsonl", lines)
    for read in (lambda: read_bundle(path), lambda: import_bundle(empty, path)):
        with pytest.raises(UsageError) as caught:
            read()
        line = str(caught.value)
        assert line.startswith(f"{path}, line {number}: " if number else f"{path}: ")
        assert said in line
        assert "\n" not in line
        assert len(line) < 1500
    assert empty.runs() == []  # the good lines before the bad one were not kept


def test_repeats_and_strangers_inside_a_file(tmp_path: Path) -> None:
    lines = lines_of()
    for bad, number, said in (
        ([*lines, lines[0]], 5, "second header"),
        ([*lines[:2], lines[1], lines[3]], 3, "second row"),
        ([*lines, lines[2]], 5, "follows the end"),
    ):
        with pytest.raises(UsageError, match=rf"line {number}: .*{said}"):
            read_bundle(put(tmp_path / "b.jsonl", bad))


def test_huge_lines_and_odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_module, "MAX_LINE_BYTES", 1000)
    with pytest.raises(UsageError, match="line 1: the line is too long"):
        read_bundle(put(tmp_path / "b.jsonl", b"x" * 5000))
    with BundleWriter(tmp_path / "w.jsonl") as writer, pytest.raises(StoreError, match="too long"):
        writer.begin_run(make_run(label="x" * 1000))
    assert not (tmp_path / "w.jsonl").exists()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "pipe", "a\x00b"):
        with pytest.raises(UsageError):
            read_bundle(path)


def test_an_old_digest_without_the_axis_added_later_is_accepted(tmp_path: Path) -> None:
    old = make_row(0, axes={"op": "read"})
    lines = lines_of()
    lines[1]["results"] = [old.with_(axes={"op": "read", "order": "seq"}).to_wire()]
    assert read_bundle(put(tmp_path / "b.jsonl", lines)).runs[0].results[0].axes["order"] == "seq"


def test_import_is_all_or_nothing_and_never_mixes_runs(tmp_path: Path, store: Store) -> None:
    lines = lines_of()
    path = put(tmp_path / "a.jsonl", lines)
    assert import_bundle(store, path).rows_new == 2
    before = store.load(lines[1]["run"], with_samples=True)
    forged_run = json.loads(json.dumps(lines))
    forged_run[0]["run"]["hw_class"] = "another machine"
    forged_value = json.loads(json.dumps(lines))
    forged_value[2]["results"][0]["value"] = 9e99
    fresh = lines_of()
    for bad, said in (
        (forged_run, "another run has this UUID"), (forged_value, "here with other content"),
        ([*fresh, *forged_value], "here with other content"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            import_bundle(store, put(tmp_path / "bad.jsonl", bad))
        assert store.load(lines[1]["run"], with_samples=True) == before
        assert len(store.runs()) == 1
    again = import_bundle(store, path)
    assert (again.runs_new, again.rows_new, again.runs_known, again.rows_known) == (0, 0, 1, 2)


def test_a_later_end_wins_and_an_earlier_one_does_not(tmp_path: Path, store: Store) -> None:
    lines = lines_of()
    early = [*lines[:2], lines[3] | {"status": "interrupted", "finished_at": at(3)}]
    uuid = lines[1]["run"]
    import_bundle(store, put(tmp_path / "a.jsonl", early))
    assert store.run(uuid).info.status == "interrupted"
    import_bundle(store, put(tmp_path / "b.jsonl", lines))
    import_bundle(store, tmp_path / "a.jsonl")
    assert (store.run(uuid).info.status, store.run(uuid).done) == ("ok", 2)


def test_export_and_import_between_databases(any_store: Store, tmp_path: Path) -> None:
    run = make_run(label="x")
    any_store.begin_run(run)
    for number in range(3):
        any_store.add_results(run.uuid, [make_row(number), make_row(number, "latency")], 2 - number)
    assert export_bundle(any_store, "x", tmp_path / "x.jsonl") == (1, 6)
    with open_store(tmp_path / "other.db", here=here(host="elsewhere")) as other:
        import_bundle(other, tmp_path / "x.jsonl")
        assert other.load("x", with_samples=True) == any_store.load("x", with_samples=True)
        assert other.run(run.uuid).last_commit_at == any_store.run(run.uuid).last_commit_at
        assert other.run(run.uuid).info.status == "running"  # of another machine: nothing here can say it is dead


def test_nothing_is_overwritten(tmp_path: Path, store: Store) -> None:
    path = put(tmp_path / "b.jsonl", lines_of())
    before = path.read_bytes()
    import_bundle(store, path)
    with pytest.raises(UsageError, match="there already"):
        BundleWriter(path)
    uuid = store.runs()[0].info.uuid
    with pytest.raises(UsageError, match="there already"):
        export_bundle(store, uuid, path)
    assert path.read_bytes() == before
    for target in (tmp_path, tmp_path / "no" / "b.jsonl", "a\x00b"):
        with pytest.raises(UsageError):
            BundleWriter(target)
    with BundleWriter(tmp_path / "unused.jsonl") as writer:
        writer.check_writable()
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("kv.db")) == ["b.jsonl"]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    run = make_run()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with BundleWriter(path) as writer:
        writer.begin_run(run)
        writer.add_results(run.uuid, [make_row(0)], 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
        try:
            with pytest.raises(StoreError, match="the bundle cannot be written"):
                writer.add_results(run.uuid, [make_row(1)], 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.add_results(run.uuid, [make_row(1)], 1)  # there is room again: the same case is tried again
    bundle = read_bundle(path)
    assert bundle.runs[0].results == (make_row(0), make_row(1))
    assert bundle.runs[0].info == replace(run, status="running")
