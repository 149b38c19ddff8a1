"""Replays in the database: who may go on with a run, what rows without a value say, and that they never gate."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench import runner
from kvbench.cli.commands_replay import _plan
from kvbench.cli.main import main
from kvbench.context import Context
from kvbench.contract.discover import load_suites
from kvbench.contract.result import RunInfo
from kvbench.data import root
from kvbench.replay.job import Job, know_trace
from kvbench.replay.traces.trace import open_trace
from kvbench.replay.traces.write import write_requests
from kvbench.store import open_store
from kvbench.worker import measure_case
from tests.replay.traces.samples import requests

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, with a database that is not there yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_DB", str(tmp_path / "r.db"))
    return tmp_path


def cut(workload: str, machine: str = "h200") -> RunInfo:
    """Store a run of one replay whose process is gone before it had replayed anything."""
    job = Job(workload, "recompute", "default", machine, "llama-3-8b", 0, 0, 0, 0, 0, 0)
    (run,) = runner.new_runs(_plan(load_suites(), [job]), 1, None, seed=0)
    run = replace(run, started_at=runner.now(), pid_start="0")
    with open_store(None) as store:
        store.begin_run(run)
    return run


def stored(run: RunInfo) -> tuple[str, int]:
    with open_store(None) as store:
        (found,) = store.resolve(run.uuid)
        return store.effective_status(found), len(list(store.results(run.uuid)))


@pytest.mark.parametrize("name", ["t.jsonl", "a b@c.jsonl", "x" * 50 + ".jsonl"])
def test_run_does_not_finish_what_only_replay_can(name: str, here: Path, capsys: Capture) -> None:
    write_requests(here / name, requests(5))
    run = cut(know_trace(open_trace(here / name)))
    assert main(["run", "--resume", run.uuid[:8]]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    word = {"t": "t.jsonl", "a": "'a b@c.jsonl'", "x": "FILE"}[name[0]]
    assert f"kvbench replay {word} --resume {run.uuid[:8]} goes on with it" in err
    assert stored(run) == ("interrupted", 0)
    assert main(["replay", name, "--resume", run.uuid[:8]]) == 0
    assert stored(run)[0] == "ok"
    assert stored(run)[1] > 1


def test_nor_what_needs_the_numbers_of_this_machine(here: Path, capsys: Capture) -> None:
    run = cut("osc", "this@0123456789ab")
    assert main(["run", "--resume", run.uuid[:8]]) == 2
    assert "got 'this@0123456789ab'" in (err := capsys.readouterr().err)
    assert f"kvbench replay --resume {run.uuid[:8]} goes on with it" in err
    assert stored(run) == ("interrupted", 0)


@pytest.mark.parametrize("axis", ["workload=t.jsonl@0123456789ab", "machine=this@0123456789ab"])
def test_run_takes_no_case_of_a_file_or_of_measured_numbers(axis: str, here: Path, capsys: Capture) -> None:
    assert main(["run", "routes/replay", "-a", axis]) == 2
    assert f"-a {axis.partition('=')[0]}: unknown value" in capsys.readouterr().err
    assert not (here / "r.db").exists()


def test_a_replay_without_a_value_is_simulated_wherever_it_stands(here: Path, capsys: Capture) -> None:
    words = ["sharegpt", "--requests", "20", "--policy", "recompute", "--param", "near_tokens=16", "--label", "full"]
    assert main(["replay", *words, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["replays"][0]["basis"] == "simulated"
    assert main(["show", "full", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert (row["value"], row["status"], row["basis"]) == (None, "skipped", "simulated")
    assert main(["export", "full", "b.jsonl"]) == 0
    assert '"basis":"simulated"' in (here / "b.jsonl").read_text().replace(" ", "")


def calls(tree: ast.AST) -> set[str]:
    """Return the names called on ``measure`` that add a primary row which is no measurement."""
    return {
        node.func.attr for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name) and node.func.value.id == "measure"
        and node.func.attr in ("simulated", "model")
    }  # fmt: skip


def test_every_bench_that_computes_its_row_says_so_before_it_runs() -> None:
    found: dict[str, set[str]] = {}
    for file in sorted(Path(root("suites")).glob("*/bench_*.py")):
        found[str(file)] = calls(ast.parse(file.read_text()))
    assert sum("simulated" in each for each in found.values()) >= 10
    for bench in load_suites().select([]):
        bases = {bench.basis_of(case.axes) for case in bench.cases("full")}
        if "simulated" in found[str(bench.source)]:
            assert bases == {"simulated"}, bench.name
        # which products are too large to run depends on the memory there is
        elif "model" in found[str(bench.source)] and bench.name != "traffic":
            assert "modelled" in bases, bench.name


def test_the_gate_says_that_simulated_rows_never_gate(here: Path, capsys: Capture) -> None:
    assert main(["gate", "routes/replay", "--baseline-python", "/bin/true", "--no-calibration"]) == 3
    assert "the selected cases are simulated, and only measured rows gate" in capsys.readouterr().err
    assert main(["calibrate", "strata/hit_rate", "--profile", "smoke"]) == 3
    assert "only measured rows gate" in capsys.readouterr().err


def test_nor_does_a_stored_baseline_of_them(here: Path, capsys: Capture) -> None:
    suites = load_suites()
    plan = runner.make_plan(suites, ["routes/replay"], {"policy": "recompute"}, "smoke")
    ((bench, case),) = plan.pairs
    rows = measure_case(bench, dict(case.axes), Context.create(profile="smoke", scratch=None, seed=0))
    assert {row.basis for row in rows} == {"simulated"}
    with open_store(None) as store:
        for run in runner.new_runs(plan, 5, "base"):
            run = replace(run, started_at=runner.now())
            store.begin_run(run)
            store.add_results(run.uuid, rows, 0)
            store.finish_run(run.uuid, "ok", runner.now())
    # of all that can be selected the baseline has these alone
    assert main(["gate", "--baseline", "base", "--no-calibration"]) == 3
    err = capsys.readouterr().err
    assert "what the baseline has of the selected cases is simulated, and only measured rows gate" in err
    assert main(["gate", "ladder", "--baseline", "base", "--no-calibration"]) == 3
    assert "the baseline has a value for none of the selected cases" in capsys.readouterr().err
