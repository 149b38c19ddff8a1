"""`kvbench run` as a user runs it: rows, exit codes, signals, crashes, resume."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvbench.schemas import schema_for
from tests.cli.conftest import Kvbench


def document(text: str) -> dict[str, Any]:
    """Parse a strict JSON document and hold it against the schema it names."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"not strict JSON: {word}")

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    jsonschema.Draft202012Validator(schema_for(found["schema"])).validate(found)
    return found


def test_json_is_one_document_that_keeps_its_schema_and_what_was_stored_is_what_was_printed(kvbench: Kvbench) -> None:
    ran = kvbench("run", "toy/fine", "--profile", "smoke", "--json")
    assert ran.returncode == 0, ran.stderr
    printed = document(ran.stdout)
    assert [row["axes"]["n"] for row in printed["results"]] == [1, 2, 4]
    for row in printed["results"]:
        assert row["status"] in ("ok", "tainted", "suspect")
        assert 200e-6 / row["axes"]["n"] <= row["value"] < 0.1
        assert row["seconds"] == row["value"]
        assert row["low"] is None or row["low"] <= row["value"] <= row["high"]
        assert row["kept"] == row["n"] >= 3
    assert {row["bench"] for row in printed["canaries"]} >= {"cpu_loop", "fma", "memory_read", "memory_latency"}
    assert re.findall(r"^stored (\d+)/3 ", ran.stderr, re.M) == ["1", "2", "3"]
    shown = document(kvbench("show", "latest", "--json").stdout)
    assert shown == printed


def test_every_way_to_fail_is_one_row_with_a_reason_and_the_run_goes_on(kvbench: Kvbench, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    ran = kvbench("run", "toy/odd", "--profile", "smoke", "--json", KVB_PIDS=str(pids))
    assert ran.returncode == 3
    rows = {row["axes"]["how"]: row for row in document(ran.stdout)["results"]}
    assert {how: row["status"] for how, row in rows.items() if row["status"] in ("failed", "skipped")} == {
        "exit": "failed", "segv": "failed", "raise": "failed", "verify": "failed", "nothing": "failed",
        "hang": "failed", "children": "failed", "instant": "failed", "zero": "failed", "twice": "failed",
        "skip": "skipped", "unavailable": "skipped", "memory": "skipped",
    }  # fmt: skip
    for how, text in {
        "exit": "exit code 7", "segv": "SIGSEGV", "raise": "deliberate", "verify": "byte 3 differs",
        "nothing": "without measuring", "hang": "limit of 5 s", "skip": "no such tier", "unavailable": "buy memory",
        "children": "exit code 1", "memory": "out of memory",
        "instant": "takes no time", "zero": "takes no time", "twice": "measured twice",
    }.items():  # fmt: skip
        assert text in rows[how]["reason"]
        assert rows[how]["value"] is None
    assert "\x1b" not in ran.stderr
    assert rows["print"]["value"] is not None
    assert rows["escapes"]["status"] == "tainted"
    assert "left 1 process" in rows["escapes"]["reason"]
    assert rows["exit"]["detail"]["workers_lost"] == 1
    assert rows["hang"]["detail"]["case_wall_s"] >= 5.0
    assert 0.0 < rows["exit"]["detail"]["case_wall_s"] < 60.0
    for pid in pids.read_text().split():
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


def test_only_skipped_cases_are_no_success(kvbench: Kvbench) -> None:
    ran = kvbench("run", "toy/odd", "-a", "how=skip", "--profile", "smoke")
    assert ran.returncode == 3
    assert "1 skipped" in ran.stdout
    assert document(kvbench("runs", "--json").stdout)["runs"][0]["status"] == "failed"


def test_runs_of_a_group_are_fresh_processes_in_a_recorded_shuffled_order(kvbench: Kvbench) -> None:
    ran = kvbench("run", "toy/fine", "--profile", "smoke", "--runs", "2", "--label", "pair", "--json")
    assert ran.returncode == 0, ran.stderr
    found = document(ran.stdout)
    assert len({run["uuid"] for run in found["runs"]}) == 2
    assert len({run["group"] for run in found["runs"]}) == 1
    assert len(found["results"]) == 6
    assert document(kvbench("show", "pair", "--json").stdout) == found


def test_without_a_database_a_bundle_holds_the_run(kvbench: Kvbench, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    ran = kvbench("run", "toy/fine", "-a", "n=1", "--profile", "smoke", "--no-db", "--bundle", str(file), "--json")
    assert "stored 1/1 " in ran.stderr
    assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "toy.db").exists()
    for new in (1, 0):
        took = kvbench("import", str(file), "--json")
        assert took.returncode == 0, took.stderr
        assert document(took.stdout)["files"][0]["runs_new"] == new
    assert document(kvbench("show", "latest", "--json").stdout) == document(ran.stdout)


def test_what_is_kept_nowhere_is_not_called_stored(kvbench: Kvbench) -> None:
    ran = kvbench("run", "toy/fine", "-a", "n=1", "--profile", "smoke", "--no-db")
    assert ran.returncode == 0, ran.stderr
    assert "done 1/1 " in ran.stderr
    assert "stored" not in ran.stderr


def wait_for_line(process: subprocess.Popen[str], text: str) -> list[str]:
    """Read stderr until a line contains ``text``; returns all lines so far."""
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} never came: {lines}")


def start(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvbench.cli.main", "run", *arguments], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_was_measured(
    number: int, code: int, environment: dict[str, str], kvbench: Kvbench
) -> None:
    process = start(environment, "toy/slow", "--profile", "smoke", "--json")
    wait_for_line(process, "stored 1/3")
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == code
    printed = document(out)
    assert printed["runs"][0]["status"] == "interrupted"
    assert document(kvbench("show", printed["runs"][0]["uuid"], "--json").stdout)["results"] == printed["results"]
    assert len(printed["results"]) in (1, 2)


def test_seconds_in_cases_count_the_case_a_signal_ended(environment: dict[str, str]) -> None:
    process = start(environment, "toy/odd", "-a", "how=nothing,hang", "--profile", "smoke", "--no-db")
    wait_for_line(process, "done 1/2")
    time.sleep(1.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    row = next(line for line in out.splitlines() if "in cases" in line)
    assert float(row.split(";")[1].split()[0]) > 1.0, row


def workers() -> set[int]:
    """Pids of all kvbench workers on this machine."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"kvbench.worker\0" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found


def test_kill_9_of_the_parent_loses_nothing_and_the_run_resumes(
    environment: dict[str, str], kvbench: Kvbench, tmp_path: Path
) -> None:
    before = workers()
    process = start(environment, "toy/slow", "--profile", "smoke")
    lines = wait_for_line(process, "stored 1/3")
    mine = workers() - before
    assert mine
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    deadline = time.monotonic() + 5
    while workers() & mine and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workers() & mine, "a worker outlived its parent"
    stored = len([line for line in lines if line.startswith("stored")])
    run = document(kvbench("runs", "--json").stdout)["runs"][0]
    assert run["status"] == "interrupted"
    assert run["done"] >= stored == 1
    resumed = kvbench("run", "--resume", run["uuid"][:8], "--json")
    assert resumed.returncode == 0, resumed.stderr
    whole = document(resumed.stdout)
    assert len(whole["results"]) == 3, "a resumed run prints the whole run"
    assert whole["runs"][0]["resumed"] is True
    assert whole["runs"][0]["status"] == "ok"
    again = kvbench("run", "--resume", run["uuid"][:8])
    assert again.returncode == 2
    assert "finished" in again.stderr


def test_a_second_run_waits_or_fails_at_once(environment: dict[str, str], kvbench: Kvbench) -> None:
    process = start(environment, "toy/slow", "--profile", "smoke")
    wait_for_line(process, "stored 1/3")
    refused = kvbench("run", "toy/fine", "-a", "n=1", "--profile", "smoke", "--no-wait")
    assert refused.returncode == 3
    assert str(process.pid) in refused.stderr
    waited = kvbench("run", "toy/fine", "-a", "n=1", "--profile", "smoke")
    assert waited.returncode == 0
    assert str(process.pid) in waited.stderr
    process.communicate(timeout=30)
