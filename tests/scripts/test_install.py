"""scripts/lib.sh: one .venv, installed once, repaired after a cut, one line for what is missing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from .fake import Checkout, make_checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return make_checkout(tmp_path)


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    checkout.add_python()
    assert checkout.run("bench", "list").returncode == 0
    return checkout


def one_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


def test_first_call_installs_and_second_does_not(ready: Checkout) -> None:
    assert ready.calls[0] == "venv"
    assert "-e .[pytest,report]" in ready.calls[1]
    assert "index" not in ready.calls[1]
    assert len(ready.calls) == 2
    again = ready.run("bench", "list")
    assert (again.returncode, again.stderr) == (0, "")
    assert len(ready.calls) == 2


def test_works_from_any_folder_without_pip_noise(checkout: Checkout, tmp_path: Path) -> None:
    checkout.add_python()
    done = checkout.run_in(tmp_path, "bench", "list", FAKE_PIP_OUTPUT="Collecting numpy")
    assert done.stdout == "kvbench list\n"
    assert "Collecting" not in done.stderr
    assert "Collecting numpy" in (checkout.root / ".venv/install.log").read_text()


@pytest.mark.parametrize("change", ["pyproject", "python", "place"])
def test_what_an_install_depends_on_makes_it_again(ready: Checkout, change: str) -> None:
    env: dict[str, str] = {}
    if change == "pyproject":
        with (ready.root / "pyproject.toml").open("a") as file:
            file.write("# changed\n")
    elif change == "python":
        env["FAKE_VERSION"] = "3.12.2"
    else:
        moved = ready.root.with_name("moved")
        ready.root.rename(moved)
        ready.root = moved
        env["FAKE_CALLS"] = str(moved / "calls")
    assert ready.run("bench", "list", **env).returncode == 0
    assert len([c for c in ready.calls if "pip install" in c]) == 2


def test_python_of_another_version_rebuilds_the_venv(ready: Checkout, tmp_path: Path) -> None:
    other = ready.add_python("other-python", tmp_path)
    other.write_text(other.read_text().replace("3.12.1", "3.13.0"))
    stale = ready.root / ".venv/stale"
    stale.touch()
    done = ready.run("bench", "list", PYTHON=str(other))
    assert done.returncode == 0, done.stderr
    assert ready.calls.count("venv") == 2
    assert not stale.exists()
    assert ready.run("bench", "list", PYTHON=str(other)).stderr == ""


def test_no_python(checkout: Checkout) -> None:
    done = checkout.run("bench")
    assert done.returncode == 2
    line = one_line(done.stderr)
    for part in ("no Python >= 3.11", "found none", "apt-get install python3", "PYTHON="):
        assert part in line


def test_only_old_python_is_named(checkout: Checkout) -> None:
    old = checkout.add_python("python3")
    done = checkout.run("bench", FAKE_VERSION="3.10.13")
    assert done.returncode == 2
    assert f"found {old} (3.10.13)" in one_line(done.stderr)


def test_a_shim_that_does_not_run_is_passed_over(checkout: Checkout) -> None:
    shim = checkout.bin / "python3.13"
    shim.write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    checkout.add_python("python3.11")
    assert checkout.run("bench", "list").returncode == 0


@pytest.mark.parametrize("named", [False, True])
def test_no_venv_module(checkout: Checkout, named: bool) -> None:
    path = checkout.add_python("python3.12")
    env = {"PYTHON": str(path)} if named else {}
    done = checkout.run("bench", FAKE_NOVENV="1", **env)
    assert done.returncode == 2
    line = one_line(done.stderr)
    for part in (str(path), "3.12.1", "python3-venv", "python3.12-venv", "PYTHON="):
        assert part in line


@pytest.mark.parametrize(
    ("value", "version", "part"),
    [
        ("/nowhere/python", "3.12.1", "is not an executable"),
        ("python3.12", "3.9.2", "is Python 3.9.2, expected >= 3.11"),
    ],
)
def test_bad_python_named(checkout: Checkout, value: str, version: str, part: str) -> None:
    checkout.add_python("python3.12")
    done = checkout.run("bench", PYTHON=value, FAKE_VERSION=version)
    assert done.returncode == 2
    line = one_line(done.stderr)
    assert f"PYTHON={value}" in line
    assert part in line


NETWORK = """Collecting numba>=0.61
  WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError': /simple/numba/
ERROR: Could not find a version that satisfies the requirement numba>=0.61 (from versions: none)
ERROR: No matching distribution found for numba>=0.61"""
CUT = """Collecting scipy>=1.13
  Downloading scipy-1.17.1.whl (35.0 MB)
ERROR: Exception: urllib3 ReadTimeoutError: Read timed out."""
ABSENT = "ERROR: No matching distribution found for typer>=0.20"
FULL = "Collecting rich\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("output", "package", "hint"),
    [
        (NETWORK, "numba>=0.61", "check the network"),
        (CUT, "scipy>=1.13", "check the network"),
        (ABSENT, "typer>=0.20", "no version for this Python"),
        (FULL, "rich", "disk is full"),
    ],
)
def test_failed_download_is_named_and_repeatable(checkout: Checkout, output: str, package: str, hint: str) -> None:
    checkout.add_python()
    done = checkout.run("bench", "list", FAKE_PIP_CODE="1", FAKE_PIP_OUTPUT=output)
    assert done.returncode == 3
    assert done.stdout == ""
    *tail, last = done.stderr.splitlines()
    assert any(line.startswith("  | ") for line in tail)
    for part in (f"could not install {package}", hint, "repeating is safe", "install.log"):
        assert part in last
    assert not list((checkout.root / ".venv").glob(".stamp-*"))
    assert checkout.run("bench", "list").returncode == 0


def test_interrupted_install_is_repaired(checkout: Checkout) -> None:
    checkout.add_python()
    process = checkout.popen("bench", "list", FAKE_PIP_SLEEP="3")
    deadline = time.monotonic() + 20
    while len(checkout.calls) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=20)
    assert not list((checkout.root / ".venv").glob(".stamp-*"))
    done = checkout.run("bench", "list")
    assert (done.returncode, done.stdout) == (0, "kvbench list\n")
    assert len(checkout.calls) == 3


def test_venv_without_pip_is_made_again(checkout: Checkout) -> None:
    checkout.add_python()
    (checkout.root / ".venv/bin").mkdir(parents=True)
    checkout.add_python("python", checkout.root / ".venv/bin")
    (checkout.root / ".venv/bin/no-pip").touch()
    assert checkout.run("bench", "list").returncode == 0
    assert checkout.calls[0] == "venv"


def test_failing_venv_says_so(checkout: Checkout) -> None:
    checkout.add_python()
    done = checkout.run("bench", "list", FAKE_VENV_FAILS="1")
    assert done.returncode == 2
    assert "could not make" in done.stderr.splitlines()[-1]


def test_two_calls_at_once_install_once(checkout: Checkout) -> None:
    checkout.add_python()
    both = [checkout.popen("bench", "list", FAKE_PIP_SLEEP="0.5") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [out for out, _ in outputs] == ["kvbench list\n"] * 2
    assert len([c for c in checkout.calls if "pip install" in c]) == 1
    assert sum("waiting" in err for _, err in outputs) <= 1
