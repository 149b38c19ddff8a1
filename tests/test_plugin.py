"""The pytest plug-in: bench functions as items, pytest-benchmark fed with the seconds kvbench measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.store import open_store

SUITE = '''
import time
from kvbench import axis, bench
from kvbench.errors import VerifyError

@bench(version=1, metric="bandwidth", unit="B/s", better="higher", extra_metrics=["more"],
       how=axis.choice("fine", "skip", "wrong"), n=axis.integer(smoke=["1"], quick=["1", "2"], full=["1"]))
def toy(case, measure):
    """A toy."""
    if case.how == "skip":
        measure.skip("no such thing here")
    def run(reps):
        end = time.perf_counter_ns() + 200_000 * reps
        while time.perf_counter_ns() < end:
            pass
    def verify():
        if case.how == "wrong":
            raise VerifyError("byte 3 differs")
    measure(run, link=1000, verify=verify)
    measure.extra("more", 4.0, unit="1", better="higher")
'''


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "PYTHONWARNINGS": ""}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *arguments], cwd=folder, env=environment,
        text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "bench_toy.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def test_cases_are_items_and_statuses_are_outcomes(suite: Path) -> None:
    ran = run_pytest(suite, "mine", "-v", "-p", "no:benchmark")
    assert "toy[how=fine-n=1] PASSED" in ran.stdout, ran.stdout
    assert "toy[how=skip-n=1] SKIPPED" in ran.stdout
    assert "no such thing here" in ran.stdout
    assert "toy[how=wrong-n=1] FAILED" in ran.stdout
    assert "byte 3 differs" in ran.stdout
    assert "1 failed, 1 passed, 1 skipped" in ran.stdout
    assert ran.returncode == 1


def test_pytest_benchmark_reports_the_measured_seconds_and_the_store_holds_the_rows(suite: Path) -> None:
    ran = run_pytest(
        suite, "mine", "-k", "fine", "--benchmark-json=out.json", "--benchmark-save-data", "--kvbench-db=kept.db",
        "--kvbench-axis=n=1,2",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    benchmarks = json.loads((suite / "out.json").read_text())["benchmarks"]
    assert len(benchmarks) == 2
    with open_store(suite / "kept.db") as store:
        stored = store.runs()
        assert len(stored) == 1
        assert stored[0].info.status == "ok"
        assert len(stored[0].info.plan) == stored[0].done == 2
        rows = [row for row in store.results(stored[0].info.uuid, with_samples=True) if row.metric == "bandwidth"]
    for row, seen in zip(rows, benchmarks, strict=True):
        # six or more decimal digits: pytest-benchmark adds the samples up on its virtual clock
        assert sorted(seen["stats"]["data"]) == pytest.approx(sorted(row.samples), rel=1e-6)
        assert seen["extra_info"]["value"] == row.value
        assert seen["extra_info"]["more"] == 4.0
        assert seen["options"]["timer"] == "kvbench_measured_seconds"
        assert row.seconds is not None
        assert row.seconds >= 200e-6


def test_what_was_asked_on_the_command_line_is_checked_before_anything_is_measured(suite: Path) -> None:
    (suite / "notes.txt").write_text("not a database, " * 1000)
    for argument in ("--kvbench-axis=nosuch=1", "--kvbench-db=notes.txt"):
        ran = run_pytest(suite, "mine", "-k", "fine", argument)
        assert ran.returncode == 4, ran.stdout
        assert argument.split("=")[0] in ran.stdout + ran.stderr
        assert "passed" not in ran.stdout


def test_nothing_is_stored_unless_asked(suite: Path, own_home: Path) -> None:
    ran = run_pytest(suite, "mine", "-k", "fine")
    assert ran.returncode == 0, ran.stdout
    assert not list(own_home.rglob("*.db"))
    assert not list(suite.rglob("*.db"))


def test_a_broken_bench_file_is_a_collection_error_and_a_bad_axis_a_usage_error(suite: Path) -> None:
    (suite / "mine" / "bench_broken.py").write_text("1/0\n")
    assert "ZeroDivisionError" in run_pytest(suite, "mine").stdout
    (suite / "mine" / "bench_broken.py").unlink()
    for argument, said in (
        (
            "--kvbench-axis=how=fin",
            "--kvbench-axis how: unknown value, got 'fin', expected one of fine skip wrong; did you",
        ),
        ("--kvbench-axis=n=many", "--kvbench-axis n: not a whole number, got 'many'"),
        ("--kvbench-axis=n=0", "--kvbench-axis n: out of range, got '0'"),
        ("--kvbench-axis=n=", "--kvbench-axis n: empty value"),
    ):
        ran = run_pytest(suite, "mine", argument)
        assert ran.returncode == 4, ran.stdout
        (line,) = [line for line in (ran.stdout + ran.stderr).splitlines() if "--kvbench-axis" in line]
        assert line.startswith(f"ERROR: {said}"), line
        assert "Traceback" not in ran.stdout + ran.stderr
