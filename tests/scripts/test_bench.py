"""scripts/bench: what it runs, with which exit code, and what it says at the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .fake import ROOT, Checkout, make_checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    checkout = make_checkout(tmp_path)
    checkout.add_python()
    assert checkout.run("bench", "list").returncode == 0
    return checkout


def test_without_arguments_ladder_at_quick_then_the_others_at_smoke(checkout: Checkout) -> None:
    done = checkout.run("bench")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "kvbench run ladder --profile quick",
        "kvbench run neo routes --profile smoke",
    ]
    assert "results are in /nonexistent/.local/share/kvbench/kvbench.db" in done.stderr
    for command in ("show latest", "runs", "export latest"):
        assert f"scripts/bench {command}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("fails", "runs"), [("run ladder", 2), ("run neo", 2)])
def test_a_failing_part_fails_the_whole_and_the_rest_still_runs(checkout: Checkout, fails: str, runs: int) -> None:
    done = checkout.run("bench", FAKE_FAILS=fails)
    assert done.returncode == 3
    assert len(done.stdout.splitlines()) == runs


def test_an_interrupt_stops_the_rest(checkout: Checkout) -> None:
    done = checkout.run("bench", FAKE_FAILS="run ladder", FAKE_CODE="130")
    assert done.returncode == 130
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show", "latest"], "kvbench show latest"),
        (["ladder", "-a", "op=read"], "kvbench run ladder -a op=read"),
        (["run", "ladder/host_latency"], "kvbench run ladder/host_latency"),
        (["--profile", "smoke"], "kvbench run --profile smoke"),
        (["--version"], "kvbench --version"),
    ],
)
def test_first_word_decides(checkout: Checkout, arguments: list[str], expected: str) -> None:
    done = checkout.run("bench", *arguments)
    assert (done.returncode, done.stdout) == (0, expected + "\n")


def test_exit_code_is_that_of_kvbench(checkout: Checkout) -> None:
    done = checkout.run("bench", "show", "nothing", FAKE_FAILS="show", FAKE_CODE="2")
    assert done.returncode == 2
    usage = checkout.run("bench", "nosuch", FAKE_FAILS="run nosuch", FAKE_CODE="2")
    assert (usage.returncode, usage.stderr) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "env", "where", "more"),
    [
        (["run", "ladder"], {"XDG_DATA_HOME": "/x"}, "/x/kvbench/kvbench.db", "show latest |"),
        (["run", "ladder"], {"KVBENCH_DB": "/y.db", "XDG_DATA_HOME": "/x"}, "/y.db", "show latest |"),
        (["run", "--db", "/z 1.db"], {"KVBENCH_DB": "/y.db"}, "/z 1.db", "show latest --db /z\\ 1.db |"),
        (["run", "--db=postgresql://u:s3cret@h/d"], {}, "postgresql://u:***@h/d", "show latest --db postgresql://u:"),
        (["run"], {"HOME": "/h", "XDG_DATA_HOME": "relative"}, "/h/.local/share/kvbench/kvbench.db", "show latest |"),
    ],
)
def test_end_says_where_the_database_is(
    checkout: Checkout, arguments: list[str], env: dict[str, str], where: str, more: str
) -> None:
    done = checkout.run("bench", *arguments, **env)
    assert f"results are in {where}\n" in done.stderr
    assert more in done.stderr
    assert "s3cret" not in done.stderr
    assert done.stdout == f"kvbench {' '.join(arguments)}\n"


def test_no_db_has_no_place_to_name(checkout: Checkout) -> None:
    assert checkout.run("bench", "run", "--no-db").stderr == ""


def test_help_installs_nothing(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path)
    done = checkout.run("bench", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage:")
    assert not (checkout.root / ".venv").exists()


def test_command_words_are_those_of_the_application() -> None:
    """A command scripts/bench does not know is taken for a suite; a suite named like a command could not be reached."""
    from tests.docs_check import Surface

    surface = Surface.of_application()
    line = re.search(r'^COMMANDS="(.*)"$', (ROOT / "scripts/bench").read_text(), re.MULTILINE)
    assert line
    words = set(line[1].split())
    assert {name for name in surface.commands if name and " " not in name} <= words
    assert not words & set(surface.suites.benches)
