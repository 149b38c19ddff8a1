"""scripts/test: the set it installs, its stages, and that the last line is pytest's."""

from __future__ import annotations

from pathlib import Path

import pytest

from .fake import Checkout, make_checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = make_checkout(tmp_path)
    checkout.add_python()
    checkout.add_python("gcc")
    return checkout


def test_stages_in_order_and_pytest_last(checkout: Checkout) -> None:
    done = checkout.run("test", "-x")
    assert done.returncode == 0, done.stderr
    stages = [line for line in done.stdout.splitlines() if line.startswith("stage")]
    assert stages == [
        "stage -m ruff check .",
        "stage -m ruff format --check .",
        "stage -m mypy",
        "stage tests/docs_check.py",
        "stage -m pytest -q -x",
    ]
    assert "== mypy: ok, 0 s" in done.stdout
    assert done.stdout.splitlines()[-1] == "7 passed in 0.01s"


@pytest.mark.parametrize("stage", ["ruff check", "ruff format", "mypy", "docs_check"])
def test_first_failing_stage_ends_it(checkout: Checkout, stage: str) -> None:
    done = checkout.run("test", FAKE_STAGE_FAILS=stage)
    assert done.returncode == 5
    assert "FAILED (exit 5)" in done.stdout.splitlines()[-1]
    assert "pytest" not in done.stdout


def test_pytest_exit_code_is_kept(checkout: Checkout) -> None:
    assert checkout.run("test", FAKE_STAGE_FAILS="pytest").returncode == 5


@pytest.mark.parametrize("argument", ["tests/test_a.py", "tests/test_a.py::test_b"])
def test_a_test_file_runs_pytest_alone(checkout: Checkout, argument: str, tmp_path: Path) -> None:
    (checkout.root / "tests").mkdir()
    (checkout.root / "tests/test_a.py").touch()
    for cwd in (checkout.root, tmp_path):
        done = checkout.run_in(cwd, "test", argument)
        stages = [line for line in done.stdout.splitlines() if line.startswith("stage")]
        assert stages == [f"stage -m pytest -q {argument}"]


def test_torch_comes_first_and_is_pinned(checkout: Checkout) -> None:
    assert checkout.run("test").returncode == 0
    assert "torch==2.13.0" in checkout.calls[1]
    assert "-e .[dev,compile]" in checkout.calls[2]
    assert "-c" in checkout.calls[2]
    assert (checkout.root / ".venv/torch.txt").read_text() == "torch==2.13.0+cpu\n"


def test_a_torch_that_imports_is_kept(checkout: Checkout) -> None:
    assert checkout.run("bench", "list").returncode == 0
    (checkout.root / ".venv/bin/torch").touch()
    assert checkout.run("test").returncode == 0
    assert not any("torch==" in call for call in checkout.calls)


def test_test_set_contains_the_bench_set(checkout: Checkout) -> None:
    assert checkout.run("test").returncode == 0
    before = checkout.calls
    assert checkout.run("bench", "list").stderr == ""
    assert checkout.run("test").stderr == ""
    assert checkout.calls == before


def test_bench_set_is_not_the_test_set(checkout: Checkout) -> None:
    assert checkout.run("bench", "list").returncode == 0
    assert checkout.run("test").returncode == 0
    assert any("[dev,compile]" in call for call in checkout.calls)


def test_no_compiler(checkout: Checkout) -> None:
    (checkout.bin / "gcc").unlink()
    done = checkout.run("test")
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    for part in ("no C compiler", "apt-get install gcc", "CC="):
        assert part in lines[0]
    assert checkout.run("bench", "list").returncode == 0
