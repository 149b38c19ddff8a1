"""A bundle that was cut off: what is whole comes in, the user is told, and no run counts as more than its rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.contract.result import PlannedCase, RunInfo
from kvbench.errors import UsageError
from kvbench.store.bundle import check_bundle, read_bundle
from kvbench.store.engine import Store, open_store
from kvbench.store.transfer import export_bundle, import_bundle
from tests.store.factories import at, here, make_row, make_run

Files = Callable[[int], Path]


def planned() -> RunInfo:
    rows = [make_row(number) for number in range(3)]
    return make_run(plan=tuple(PlannedCase(r.digest, r.suite, r.bench, r.bench_version, {}) for r in rows))


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """An exported run that ended ok: header (which says so too), three cases, end."""
    run = planned()
    with open_store(tmp_path / "origin.db", here=here()) as origin:
        origin.begin_run(run)
        for number in range(3):
            origin.add_results(run.uuid, [make_row(number)], number)
        origin.finish_run(run.uuid, "ok", at(9))
        export_bundle(origin, run.uuid, tmp_path / "whole.jsonl")
    assert json.loads((tmp_path / "whole.jsonl").read_text().splitlines()[0])["run"]["status"] == "ok"
    return tmp_path / "whole.jsonl"


def cut(path: Path, *numbers: int) -> Path:
    """Write the lines ``numbers`` of ``path`` to a file of their own."""
    lines = path.read_text().splitlines(keepends=True)
    made = path.with_name(f"cut-{'-'.join(map(str, numbers))}.jsonl")
    made.write_text("".join(lines[number] for number in numbers))
    return made


@pytest.mark.parametrize(
    ("kept", "status", "done", "said"),
    [
        ((0,), "interrupted", 0, "the file ends before the run, 0 of 3 planned cases: interrupted, not ok"),
        ((0, 1), "interrupted", 1, "the file ends before the run, 1 of 3 planned cases: interrupted, not ok"),
        ((0, 4), "interrupted", 0, "0 of 3 planned cases: interrupted, not ok"),
        ((0, 1, 3, 4), "interrupted", 2, "2 of 3 planned cases: interrupted, not ok"),
        ((0, 1, 2, 3), "ok", 3, "the file ends before the run, 3 of 3 planned cases: none is missing"),
        ((0, 1, 2, 3, 4), "ok", 3, None),
    ],
)
def test_what_is_missing_is_never_ok(
    any_store: Store, exported: Path, kept: tuple[int, ...], status: str, done: int, said: str | None
) -> None:
    path = cut(exported, *kept)
    (run,) = read_bundle(path).runs
    assert (run.info.status, len(run.results)) == (status, done)
    counts = import_bundle(any_store, path)
    stored = any_store.run(run.info.uuid)
    assert (stored.info.status, stored.stored_status, stored.done) == (status, status, done)
    assert counts.notices == read_bundle(path).notices
    assert counts.notices == (() if said is None else (f"{path}, run {run.info.uuid[:8]}: {said}",))
    again = import_bundle(any_store, path)
    assert (again.rows_new, any_store.run(run.info.uuid)) == (0, stored)
    # the whole file, whenever it comes, completes the run; the cut one after it takes nothing back
    for later in (exported, path):
        import_bundle(any_store, later)
        assert (any_store.run(run.info.uuid).info.status, any_store.run(run.info.uuid).done) == ("ok", 3)


def test_a_file_cut_at_any_byte_keeps_its_whole_lines(store: Store, exported: Path) -> None:
    data = exported.read_bytes()
    ends = [*itertools.accumulate(len(line) for line in data.splitlines(keepends=True))]
    path = exported.with_name("cut.jsonl")
    for size in range(ends[0], len(data) - 1, 97):
        path.write_bytes(data[:size])
        (run,) = read_bundle(path).runs
        whole = sum(end <= size + 1 for end in ends[1:4])  # a line is whole without its newline
        assert len(run.results) == whole
        assert run.info.status == ("ok" if whole == 3 else "interrupted")
        assert read_bundle(path).notices


def test_an_end_line_is_not_believed_against_the_rows(store: Store, exported: Path) -> None:
    lines = [json.loads(line) for line in exported.read_text().splitlines()]
    lines[2]["results"][0] |= {"status": "failed", "value": None, "reason": "died"}
    path = exported.with_name("lies.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = import_bundle(store, path)
    assert store.runs()[0].info.status == "partial"
    assert [notice.partition(": ")[2] for notice in counts.notices] == ["3 of 3 planned cases: partial, not ok"]


def test_importing_its_own_file_changes_no_run(store: Store, tmp_path: Path) -> None:
    """A process may know more than the rows: one of several that share the cases of a plan ended well."""
    run = planned()
    store.begin_run(run)
    store.add_results(run.uuid, [make_row(0)], 0)
    store.finish_run(run.uuid, "ok", at(3))
    export_bundle(store, run.uuid, tmp_path / "own.jsonl")
    before = store.run(run.uuid)
    import_bundle(store, tmp_path / "own.jsonl")
    assert store.run(run.uuid) == before


def test_a_run_that_goes_on_stays_running_and_is_told(store: Store, tmp_path: Path) -> None:
    run = planned()
    with open_store(tmp_path / "origin.db", here=here()) as origin:
        origin.begin_run(run)
        origin.add_results(run.uuid, [make_row(0)], 0)
        export_bundle(origin, run.uuid, tmp_path / "live.jsonl")
    counts = import_bundle(store, tmp_path / "live.jsonl")
    assert store.run(run.uuid).stored_status == "running"
    assert counts.notices[0].endswith(
        "the file ends before the run, 1 of 3 planned cases: it was still being measured, or the file is cut off"
    )


def test_a_file_is_checked_without_a_database(tmp_path: Path, exported: Path) -> None:
    check_bundle(exported)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"bad.jsonl, line 1: this is not a kvbench bundle"):
        check_bundle(tmp_path / "bad.jsonl")
