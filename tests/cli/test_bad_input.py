"""Every mistake of a user: one line, the right exit code, no traceback, nothing measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.store import open_store
from tests.cli.conftest import Kvbench


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("run", "tox"), 2, "did you mean 'toy'"),
        (("run", "toy/fin"), 2, "did you mean 'fine'"),
        (("run", "toy/fine", "-a", "m=1"), 2, "one of n"),
        (("run", "toy/fine", "-a", "n=x"), 2, "whole number"),
        (("run", "toy/fine", "-a", "n"), 2, "AXIS=VALUE"),
        (("run", "toy/fine", "-a", "n="), 2, "AXIS=VALUE"),
        (("run", "toy/fine", "-a", "n=1", "-a", "n=2"), 2, "twice"),
        (("run", "toy/odd", "-a", "how=segv2"), 2, "did you mean 'segv'"),
        (("run", "ladder/host_bandwidth", "-a", "bytes=64kb"), 2, "64KiB"),
        (("run", "ladder/host_bandwidth", "-a", "bytes=-1"), 2, "-1"),
        (("run", "ladder/host_bandwidth", "-a", "bytes=0"), 2, "'0'"),
        (("run", "ladder/host_bandwidth", "-a", "bytes=1e30"), 2, "1e30"),
        (("run", "toy", "-a", "n=1"), 2, "every selected bench"),
        (("run", "toy/fine", "--profile", "fast"), 2, "smoke quick full"),
        (("run", "toy/fine", "--runs", "0"), 2, "--runs"),
        (("run", "toy/fine", "--runs", "x"), 2, "--runs"),
        (("run", "toy/fine", "--label", ""), 2, "--label"),
        (("run", "toy/fine", "--label", " "), 2, "not blank"),
        (("run", "toy/fine", "--scratch", "/nonexistent"), 2, "not a directory"),
        (("run", "toy/fine", "--scratch", ""), 2, "--scratch"),
        (("runs", "--limit", "99999999999999999999"), 2, "--limit"),
        (("run", "toy/fine", "--nope"), 2, "--nope"),
        (("run", "toy/fine", "--db", "/"), 2, "directory"),
        (("run", "toy/fine", "--db", "/proc/none/x.db"), 2, "/proc"),
        (("run", "toy/fine", "--resume", "deadbeef"), 2, "keeps its plan"),
        (("run", "--resume", "deadbeef"), 2, "deadbeef"),
        (("run", "--resume", "deadbeef", "--no-db"), 2, "nothing to resume"),
        (("frobnicate",), 2, "frobnicate"),
        (("show", "latest~x"), 2, "latest~x"),
        (("show", "'); drop table runs; --"), 2, "drop table"),
        (("show", "[red]x[/red]"), 2, "[red]x[/red]"),
        (("runs", "--limit", "0"), 2, "--limit"),
        (("db", "shrink"), 2, "info, check or upgrade"),
        (("import", "nowhere.jsonl"), 2, "nowhere.jsonl"),
        (("export", "latest", "x.json"), 2, "latest"),
        (("list", "nosuch"), 2, "nosuch"),
    ],
)
def test_one_line_and_the_right_code(
    kvbench: Kvbench, environment: dict[str, str], arguments: tuple[str, ...], code: int, text: str
) -> None:
    if arguments[0] in ("show", "export") or "deadbeef" in arguments:
        with open_store(environment["KVBENCH_DB"]):
            pass  # an empty database, so the selector is what is wrong
    ran = kvbench(*arguments)
    assert ran.returncode == code, ran.stderr
    assert text in ran.stderr
    assert "Traceback" not in ran.stderr
    errors = [line for line in ran.stderr.splitlines() if "error" in line]
    assert len(errors) == 1
    assert ran.stdout == ""


def test_a_database_that_is_none_is_refused_before_anything_is_measured(kvbench: Kvbench, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("these are my notes\n" * 1000)
    ran = kvbench("run", "toy/fine", "--db", str(file))
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert file.read_text().startswith("these are my notes")


def test_a_closed_pipe_is_no_error_and_a_full_disk_is_one_line(environment: dict[str, str]) -> None:
    command = f"{sys.executable} -m kvbench.cli.main list"
    for shell, code, text in ((f"{command} | head -1", 0, ""), (f"{command} > /dev/full", 3, "could not be written")):
        ran = subprocess.run(
            ["bash", "-o", "pipefail", "-c", shell], env=environment, text=True, capture_output=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert ran.returncode == code, ran.stderr
        assert "Traceback" not in ran.stderr
        assert text in ran.stderr


def shell(command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], env=environment, text=True, capture_output=True, timeout=60, check=False
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_take_no_measurement_down(closed: str, environment: dict[str, str], tmp_path: Path) -> None:
    command = f"{sys.executable} -m kvbench.cli.main run toy/fine -a n=1 --profile smoke --json {closed}"
    ran = subprocess.run(
        ["bash", "-c", command], env=environment, text=True, capture_output=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    with open_store(environment["KVBENCH_DB"]) as store:
        assert [run.info.status for run in store.runs()] == ["ok"]


@pytest.mark.parametrize("words", ["--version", "--help", "run --help"])
def test_a_full_disk_under_help_is_one_line(words: str, environment: dict[str, str]) -> None:
    command = f"{sys.executable} -m kvbench.cli.main {words} > /dev/full"
    ran = subprocess.run(
        ["bash", "-c", command], env=environment, text=True, capture_output=True, timeout=60, check=False
    )
    assert ran.returncode == 3
    assert len(ran.stderr.splitlines()) == 1


def test_a_label_that_is_not_text_is_refused(environment: dict[str, str]) -> None:
    command = f"{sys.executable} -m kvbench.cli.main run toy/fine --label $'\\xff'"
    ran = subprocess.run(
        ["bash", "-c", command], env=environment, text=True, capture_output=True, timeout=60, check=False
    )
    assert ran.returncode == 2
    assert "--label" in ran.stderr


def test_a_plain_locale_and_no_home_still_work(kvbench: Kvbench) -> None:
    ran = kvbench("list", LC_ALL="C", LANG="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert ran.returncode == 0, ran.stderr
    shown = kvbench(
        "run", "toy/fine", "-a", "n=1", "--profile", "smoke", "--label", "größe", LC_ALL="C", PYTHONUTF8="0",
        PYTHONIOENCODING="ascii",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert "\\xf6" in shown.stdout
    assert shown.stdout.isascii()
