"""``scripts/simulate``: few trials, the real code, the verdicts and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "simulate", *words], capture_output=True, text=True, check=False
    )


def test_a_few_trials_give_every_figure_and_the_same_ones_again() -> None:
    first, second = (simulate("--trials", "40", "--json") for _ in range(2))
    document = json.loads(first.stdout)
    assert first.stdout == second.stdout
    names = [figure["name"] for figure in document["figures"]]
    assert len(names) == len(set(names)) == 12
    assert all(figure["unit"] == "share" and 0.0 <= figure["value"] <= 1.0 for figure in document["figures"])
    assert first.returncode == document["exit_code"]


def test_a_mistake_is_one_line_and_exit_2() -> None:
    for words in (["gates"], ["--trials", "0"]):
        found = simulate(*words)
        assert found.returncode == 2
        assert "Traceback" not in found.stderr
