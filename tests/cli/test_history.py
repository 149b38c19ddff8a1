"""``kvbench history`` and ``annotate``: one case over time, its levels, and accepting a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.contract.result import Result
from kvbench.store import open_store
from tests.analysis.sides import row
from tests.cli.test_compare import document, said
from tests.store.factories import at, make_run

UUIDS = [f"{i:08x}-0000-4000-8000-000000000000" for i in range(40)]
CASE = ["ladder/host_bandwidth", "-a", "bytes=4KiB"]


def fill(db: Path, values: list[float | None], **changes: Any) -> None:
    """Store one run a value, an hour apart, the first oldest."""
    with open_store(db) as store:
        for i, value in enumerate(values):
            status: Any = "ok" if value is not None else "failed"
            info = {"env_digest": "env-a" if i < 12 else "env-b", "env": {"kernel": "6.1"}, **changes}
            run = make_run(uuid=UUIDS[i], started_at=at(3600 * i), **info)
            store.begin_run(run)
            found: list[Result] = [row(0, value, status=status), row(0, 7.0, metric="further", unit="1")]
            store.add_results(run.uuid, found if value is not None else found[:1], 0)
            store.finish_run(run.uuid, "ok", at(3600 * i + 60))


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "k.db"
    fill(path, [1e10 * (1 + 0.001 * (i % 5)) * (0.8 if i >= 12 else 1.0) for i in range(24)])
    return path


def history(db: Path, *words: object) -> dict[str, Any]:
    code, out, err = said("history", *CASE, *words, "--db", db, "--hw", "cpu-a", "--json")
    assert code == 0, err
    (found,) = document(out)["histories"]
    return dict(found)


def test_a_step_is_found_at_its_run_with_what_changed_there(db: Path) -> None:
    found = history(db)
    (change,) = found["changes"]
    assert change["run"] == UUIDS[12]
    assert change["verdict"] == "SLOWER"
    assert change["environment_changed"] is True
    assert change["ratio"] == pytest.approx(0.8, rel=0.01)
    code, text, _ = said("history", *CASE, "--db", db, "--hw", "cpu-a")
    assert code == 0
    assert "SLOWER x0.8" in text
    assert "environment changed" in text


def test_an_accepted_level_is_not_reported_again(db: Path) -> None:
    code, _, err = said("annotate", *CASE, "--run", UUIDS[12], "--text", "new kernel", "--db", db)
    assert code == 0, err
    found = history(db)
    assert found["changes"] == []
    assert found["notes"][0]["accepts"] is True
    assert "level accepted: new kernel" in said("history", *CASE, "--db", db, "--hw", "cpu-a")[1]


def test_a_note_on_a_run_accepts_nothing(db: Path) -> None:
    assert said("annotate", "--run", UUIDS[12], "--text", "moved the box", "--db", db)[0] == 0
    found = history(db)
    assert len(found["changes"]) == 1
    assert found["notes"][0]["accepts"] is False


def test_runs_without_a_clean_value_are_shown_and_do_not_count(tmp_path: Path) -> None:
    db = tmp_path / "k.db"
    fill(db, [1e10, None, 1e10, 1e10])
    found = history(db)
    assert [point["counts"] for point in found["points"]] == [True, False, True, True]
    assert "3 runs count" in found["reason"]


def test_another_metric_and_another_hardware(db: Path) -> None:
    assert history(db, "--metric", "further")["metric"] == "further"
    code, _, err = said("history", *CASE, "--db", db, "--hw", "cpu-z")
    assert code == 3
    assert "no measured row" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["history", "ladder"], "not a case"), (["history", "ladder/none"], "no such case"),
        (["history", "ladder/host_bandwidth", "-a", "bytes=8KiB"], "no such case"),
        (["history", *CASE, "--limit", "0"], "out of range"), (["annotate", *CASE, "--text", "x"], "a run is needed"),
        (["annotate", *CASE, "--run", UUIDS[1]], "a text is needed"),
        (["annotate", *CASE, "--run", UUIDS[1], "--text", "x" * 3000], "3000 characters"),
        (["annotate", *CASE, "--run", "ffffffff", "--text", "x"], "no run matches"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_2(words: list[str], text: str, db: Path) -> None:
    code, out, err = said(*words, "--db", db)
    assert (code, out) == (2, "")
    assert text in err
    assert len(err.strip().splitlines()) == 1


def test_a_clock_that_went_back_does_not_shuffle_or_break(tmp_path: Path) -> None:
    db = tmp_path / "k.db"
    with open_store(db) as store:
        for i in (3, 1, 2, 0):
            run = make_run(uuid=UUIDS[i], started_at=at(3600 * i))
            store.begin_run(run)
            store.add_results(run.uuid, [row(0, 1e10 + i)], 0)
            store.finish_run(run.uuid, "ok", at(3600 * i + 1))
    assert [point["value"] for point in history(db)["points"]] == [1e10, 1e10 + 1, 1e10 + 2, 1e10 + 3]
