"""Writers at once and writers killed, through the same functions ``python -m tests.store.stress`` runs larger."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_writers_at_once_and_killed_writers_lose_nothing(any_target: str) -> None:
    """Eight processes; scripts/crosscheck and `--runs 40` do 320 runs, here 24 must do."""
    arguments = ["--processes", "8", "--runs", "3", "--cases", "2", "--kills", "2"]
    if "://" in any_target:
        arguments += ["--db", any_target]
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.stress", *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("acknowledged 24/24 runs, 48/48 cases")
    assert lines[2].startswith("2 kills: ")


def test_the_stress_sees_a_loss(tmp_path: Path) -> None:
    """The check behind both can fail: an acknowledged case taken out of the file is reported."""
    code = (
        "import sqlite3, sys\nfrom tests.store import stress\nfrom tests.store.factories import make_row\n"
        "path = sys.argv[1]\nstress.one_writer(path, cases=2)\nraw = sqlite3.connect(path)\n"
        "(uuid,), = raw.execute('SELECT uuid FROM runs')\nack = [(uuid, make_row(n).digest) for n in range(2)]\n"
        "print(stress._check(path, ack, [uuid]))\n"
        "raw.execute('DELETE FROM samples WHERE result_id = 1')\nraw.commit()\n"
        "print(stress._check(path, ack, [uuid]))\n"
        "raw.execute('DELETE FROM samples'); raw.execute('DELETE FROM results WHERE id > 2')\nraw.commit()\n"
        "print(stress._check(path, ack, [uuid]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "kv.db")], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    whole, half, lost = done.stdout.splitlines()
    assert whole == "[]"
    assert "half a case" in half
    assert "1 acknowledged cases are missing" in lost
