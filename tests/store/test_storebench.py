"""scripts/storebench on a small database: filled, asked and deleted. The figure itself needs ten million rows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def storebench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "storebench", *words], capture_output=True, text=True, timeout=120
    )


@pytest.mark.postgres
def test_it_fills_asks_and_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not below pytest's own, which is closed to the server's user
        os.chmod(folder, 0o711)
        done = storebench("--rows", "20000", "--repeats", "1", "--folder", folder)
        assert os.listdir(folder) == []
    assert done.returncode in (0, 3), done.stderr  # no time is asserted
    lines = done.stdout.splitlines()
    assert len(lines) == 17
    for kind, block in (("sqlite", lines[:8]), ("postgresql", lines[8:16])):
        assert re.match(rf"{kind} [\d.]+: 20000 rows \(40 runs of 500 cases, 20 hosts\), built in", block[0])
        rows = {line[:33].strip(): int(line[33:40]) for line in block[2:]}
        assert rows.pop("kvbench compare, whole command") > 20  # lines it printed
        assert rows.pop("kvbench --version") == 1
        assert rows == {
            "latest against latest~1": 500, "two runs at random": 500, "resolve latest and latest~1": 2,
            "history of one case": 2,
        }  # fmt: skip
    assert lines[-1].endswith(("met", "missed"))


def test_no_room_is_said_before_anything_is_built() -> None:
    done = storebench("--rows", str(10**15))
    assert (done.returncode, done.stdout) == (2, "")
    assert "B free in the folder, expected 1200000000000000000" in done.stderr
    assert "Traceback" not in done.stderr
