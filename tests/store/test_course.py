"""The lines of a run agree: cases of its plan, one a position, between its beginning and its end."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kvbench.contract.result import PlannedCase, RunInfo
from kvbench.errors import UsageError
from kvbench.store.bundle import SCHEMA, BundleWriter, read_bundle
from kvbench.store.course import later_of
from kvbench.store.engine import Store, open_store
from kvbench.store.transfer import export_bundle, import_bundle
from tests.store.factories import at, here, make_row, make_run

ROWS = [make_row(number) for number in range(3)]
PLAN = tuple(PlannedCase(r.digest, r.suite, r.bench, r.bench_version, {}) for r in ROWS[:2])
IN_2099 = "2099-01-01T00:00:00.000000+00:00"
AHEAD = (datetime.now(UTC) + timedelta(days=2)).isoformat(timespec="microseconds")


def lines_of(**changes: Any) -> list[dict[str, Any]]:
    """Return a good file as `kvbench export` writes it: header with the end in it, canary, two cases, end."""
    run = make_run(**{"plan": PLAN, "status": "ok", "finished_at": at(9)} | changes)
    rows = [make_row(0, suite="canary"), *ROWS[:2]]
    cases = [
        {"kind": "case", "run": run.uuid, "position": n, "at": at(n), "results": [row.to_wire()]}
        for n, row in enumerate(rows)
    ]
    end = {"kind": "end", "run": run.uuid, "status": "ok", "finished_at": at(9)}
    return [{"schema": SCHEMA, "kind": "run", "run": run.to_wire()}, *cases, end]


def put(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


BAD: list[tuple[int, dict[str, Any], str]] = [
    (2, {"at": IN_2099}, "at is 2099-01-01.*, later than this machine's clock"),
    (2, {"at": AHEAD}, "at is .*, later than this machine's clock"),
    (1, {"at": at(-1)}, "at is 2025-02-28T23:59:59.*, before the run began at 2025-03-01"),
    (3, {"at": at(10)}, r"at is 2025-03-01T00:00:10.*, after the run's end at 2025-03-01T00:00:09"),
    (3, {"results": [ROWS[2].to_wire()]}, "the case ladder/host_bandwidth .* is not in the run's plan of 2 cases"),
    (3, {"position": 1}, "the case ladder/host_bandwidth .* is at position 1, where .* is already"),
    (3, {"results": [make_row(0, "latency").to_wire()]}, "the case .* is at position 2, and at 1 before"),
    (4, {"finished_at": at(1)}, "finished_at is .*, before the run's last case at 2025-03-01T00:00:02"),
]


@pytest.mark.parametrize(("number", "changes", "said"), BAD)
@pytest.mark.parametrize("live", [False, True], ids=["exported", "written while it ran"])
def test_a_line_that_does_not_fit_its_run_is_refused(
    store: Store, tmp_path: Path, number: int, changes: dict[str, Any], said: str, live: bool
) -> None:
    lines = lines_of(**({"status": "running", "finished_at": None} if live else {}))
    lines[number] |= changes
    if live and "after the run's end" in said:  # its header is from before the end: the end line tells
        number, said = 4, "finished_at is .*, before the run's last case"
    with pytest.raises(UsageError, match=f"b.jsonl, line {number + 1}: {said}") as caught:
        import_bundle(store, put(tmp_path / "b.jsonl", lines))
    assert "\n" not in str(caught.value)
    assert store.runs() == []


def test_a_good_file_and_its_edges_are_taken(store: Store, tmp_path: Path) -> None:
    lines = lines_of()
    lines[1]["at"], lines[3]["at"] = at(0), at(9)  # at the very beginning, and at the end
    assert import_bundle(store, put(tmp_path / "a.jsonl", lines)).rows_new == 3
    unplanned = lines_of(plan=())  # a run that does not say what it planned may hold anything
    unplanned[3]["results"] = [ROWS[2].to_wire()]
    assert import_bundle(store, put(tmp_path / "b.jsonl", unplanned)).rows_new == 3
    apart = [lines_of(), lines_of(started_at=at(-60), finished_at=at(9))]  # runs of one file share no positions
    for each in apart:
        each[1]["at"] = each[0]["run"]["started_at"]
    assert len(read_bundle(put(tmp_path / "c.jsonl", apart[0] + apart[1])).runs) == 2


def test_two_files_of_one_run_may_not_put_two_cases_at_one_position(store: Store, tmp_path: Path) -> None:
    lines = lines_of(status="running", finished_at=None)
    import_bundle(store, put(tmp_path / "a.jsonl", lines[:3]))
    other = [lines[0], lines[3] | {"position": 1}]
    with pytest.raises(UsageError, match=r"another case is here at position 1 of this run.*nothing was imported"):
        import_bundle(store, put(tmp_path / "b.jsonl", other))
    assert len(store.results(lines[1]["run"])) == 2
    import_bundle(store, put(tmp_path / "c.jsonl", [lines[0], *lines[3:]]))
    assert len(store.results(lines[1]["run"])) == 3


def written(path: Path, run: RunInfo, at_times: list[str], end: str) -> list[dict[str, Any]]:
    with BundleWriter(path, sync_lines=False) as writer:
        writer.begin_run(run)
        for number, time in enumerate(at_times):
            writer.add_results(run.uuid, [ROWS[number]], number, committed_at=time)
        writer.finish_run(run.uuid, "ok", end)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_clock_that_was_set_back_costs_no_run(store: Store, tmp_path: Path) -> None:
    run = make_run(started_at=at(60))
    lines = written(tmp_path / "b.jsonl", run, [at(30), at(70), at(65)], at(50))
    assert [line.get("at") for line in lines[1:4]] == [at(60), at(70), at(65)]
    assert lines[4]["finished_at"] == at(70)
    import_bundle(store, tmp_path / "b.jsonl")
    assert store.run(run.uuid).info.finished_at == at(70)


def test_an_exported_run_whose_end_lies_before_its_cases_comes_in_and_changes_nothing(
    store: Store, tmp_path: Path
) -> None:
    run = make_run(plan=PLAN)
    with open_store(tmp_path / "origin.db", here=here()) as origin:
        origin.begin_run(run)
        for number in range(2):
            origin.add_results(run.uuid, [ROWS[number]], number)  # now, long after the end below
        origin.finish_run(run.uuid, "ok", at(9))
        export_bundle(origin, run.uuid, tmp_path / "b.jsonl")
        before = origin.run(run.uuid)
        import_bundle(origin, tmp_path / "b.jsonl")
        assert origin.run(run.uuid) == before
    import_bundle(store, tmp_path / "b.jsonl")
    assert store.run(run.uuid).info.finished_at == before.last_commit_at


def test_a_file_that_no_import_takes_is_not_written(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b.jsonl", sync_lines=False) as writer:
        run = make_run(plan=PLAN)
        writer.begin_run(run)
        writer.add_results(run.uuid, [ROWS[0]], 0)
        with pytest.raises(ValueError, match="not in the run's plan"):
            writer.add_results(run.uuid, [ROWS[2]], 1)
        with pytest.raises(ValueError, match="is already"):
            writer.add_results(run.uuid, [ROWS[1]], 0)
        with pytest.raises(ValueError, match="later than this machine's clock"):
            writer.add_results(run.uuid, [ROWS[1]], 1, committed_at=IN_2099)
        writer.add_results(run.uuid, [ROWS[1]], 1)
    assert read_bundle(tmp_path / "b.jsonl").runs[0].results == (ROWS[0], ROWS[1])


def test_times_are_compared_as_times_not_as_text() -> None:
    assert later_of("2025-03-01T00:00:00.5+00:00", "2025-03-01T00:00:00.500001+00:00").endswith("500001+00:00")
    assert later_of("2025-03-01T00:00:01+00:00", "2025-03-01T00:00:00.9+00:00") == "2025-03-01T00:00:01+00:00"
