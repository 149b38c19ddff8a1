"""``kvbench gate`` as a user runs it: refusals, the verdict file however it ends, and one real gate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.analysis.sides import around
from tests.cli.conftest import Kvbench
from tests.cli.test_compare import document, said, write


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return write(tmp_path / "base.jsonl", around(1.0))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "one baseline is needed"),
        (["--baseline", "base.jsonl", "--baseline-python", "python3"], "one baseline is needed"),
        (["--baseline", "base.jsonl", "--no-db"], "the calibration lies in the database"),
        (["--baseline", "none.jsonl", "--no-calibration"], "no such file"),
        (["--baseline", "base.jsonl", "--no-calibration"], "of other hardware"),
        (["toy/fine", "--baseline-python", "/bin/true", "--no-calibration"], "no Python with kvbench"),
        (["--baseline-python", "/none/python", "--no-calibration"], "cannot be run"),
        (["--baseline-python", sys.executable, "--no-calibration"], "the same code"),
        (["ladder", "--baseline-python", "/bin/true", "--no-calibration", "-a", "nope=1"], "unknown axis"),
        (["--baseline", "base.jsonl", "--verdict", "/none/v.json"], "cannot be written"),
        (["--baseline", "base.jsonl", "--verdict", "o", "--junit", "o"], "one file for two outputs"),
        (["nosuite", "--baseline-python", "/bin/true", "--no-calibration"], "unknown suite"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_2_before_anything_is_measured(
    words: list[str], text: str, baseline: Path, kvbench: Kvbench
) -> None:
    given = [str(baseline) if word == "base.jsonl" else word for word in words]
    ran = kvbench("gate", *given)
    assert ran.returncode == 2, ran.stderr
    assert ran.stdout == ""
    lines = [line for line in ran.stderr.splitlines() if "error" in line]
    assert len(lines) == 1
    assert text.lower() in lines[0].lower()
    assert "Traceback" not in ran.stderr


def test_a_verdict_of_before_does_not_survive_a_gate_that_failed(tmp_path: Path) -> None:
    verdict = tmp_path / "v.json"
    verdict.write_text('{"verdict": "PASS"}')
    junit = tmp_path / "j.xml"
    base = write(tmp_path / "base.jsonl", around(1.0))
    code, _, _ = said(
        "gate", "--baseline", base, "--no-calibration", "--db", tmp_path / "k.db", "--verdict", verdict,
        "--junit", junit,
    )  # fmt: skip
    assert code == 2
    found = document(verdict.read_text())
    assert (found["verdict"], found["exit_code"]) == ("NO_DATA", 2)
    assert "other hardware" in found["reason"]
    assert "<error" in junit.read_text()


def test_a_real_gate_of_unchanged_code_never_fails_it(kvbench: Kvbench, tmp_path: Path) -> None:
    base = tmp_path / "base.jsonl"
    ran = kvbench("run", "toy/fine", "-a", "n=1", "--profile", "smoke", "--runs", "5", "--bundle", str(base), "--no-db")
    assert ran.returncode == 0, ran.stderr
    verdict = tmp_path / "v.json"
    ran = kvbench(
        "gate", "toy/fine", "-a", "n=1", "--baseline", str(base), "--no-calibration", "--no-db", "--json",
        "--verdict", str(verdict), "--bundles", str(tmp_path / "kept"),
    )  # fmt: skip
    found = document(ran.stdout)
    assert ran.returncode == found["exit_code"], ran.stderr
    assert found["verdict"] in ("PASS", "INCONCLUSIVE", "TAINTED", "NO_DATA"), ran.stderr  # of a busy machine
    assert json.loads(verdict.read_text()) == found
    assert [row["bench"] for row in found["rows"]] == ["fine"]
    assert len(found["sides"][1]["runs"]) == 5
    assert list((tmp_path / "kept").glob("candidate-*.jsonl"))


def test_a_gate_that_is_terminated_takes_its_measurement_with_it(
    kvbench: Kvbench, environment: dict[str, str], tmp_path: Path
) -> None:
    base = tmp_path / "base.jsonl"
    ran = kvbench("run", "toy/fine", "-a", "n=1", "--profile", "smoke", "--runs", "5", "--bundle", str(base), "--no-db")
    assert ran.returncode == 0, ran.stderr
    verdict = tmp_path / "v.json"
    words = ["gate", "toy/fine", "-a", "n=1", "--baseline", str(base), "--no-calibration", "--no-db"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvbench.cli.main", *words, "--verdict", str(verdict)], env=environment, cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    children: list[str] = []
    deadline = time.monotonic() + 30
    while not children and time.monotonic() < deadline:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        time.sleep(0.05)
    assert children
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=30) == 130
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert "stopped" in json.loads(verdict.read_text())["reason"]
