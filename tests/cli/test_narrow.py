"""Text for people at the width of their terminal; whole lines elsewhere."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from kvbench.cli import output

KVBENCH = [sys.executable, "-m", "kvbench.cli.main"]


def on_terminal(columns: int, *arguments: str) -> list[str]:
    """Return the lines a command prints on a terminal of ``columns``, colours left out."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    with subprocess.Popen([*KVBENCH, *arguments], stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        printed = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # how a terminal ends
                break
            if not part:
                break
            printed += part
    os.close(ours)
    assert process.returncode == 0
    return re.sub(rb"\x1b\[[0-9;]*m", b"", printed).decode().replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize("arguments", [("list", "ladder"), ("doctor",)])
def test_nothing_is_wider_than_60_columns(arguments: tuple[str, ...]) -> None:
    lines = on_terminal(60, *arguments)
    assert len(lines) > 20
    assert [line for line in lines if len(line) > 60] == []


def test_elsewhere_a_line_is_a_line() -> None:
    done = subprocess.run([*KVBENCH, "list", "ladder/link"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 + 9
    assert any("pair=hbm:pinned | hbm:pageable | hbm:managed | hbm:file" in line for line in lines)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_folding_keeps_the_indent_and_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "      mend: " + " ".join(f"word{n}" for n in range(20))
    assert output.fitted(line, "  ") == [line]
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    folded = output.fitted(line, "  ")
    assert max(map(len, folded)) <= 30
    assert folded[0].startswith("      mend:")
    assert all(part.startswith("        word") for part in folded[1:])
    assert " ".join(part.strip() for part in folded) == line.strip()
    assert output.fitted("x" * 70, "") == ["x" * 30, "x" * 30, "x" * 10]
    assert output.fitted("", "  ") == [""]
    monkeypatch.setenv("COLUMNS", "5")
    assert max(map(len, output.fitted(line, "  "))) <= 20


def test_a_run_whose_cases_are_all_skipped_says_why_canaries_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvbench import canary
    from kvbench.cli.main import main

    suite = tmp_path / "suites" / "toy"
    suite.mkdir(parents=True)
    (suite / "bench_toy.py").write_text(
        "import time\nfrom kvbench import axis, bench\n"
        "@bench(version=1, metric='time', unit='s', better='lower', how=axis.choice('skip', 'fine'))\n"
        "def toy(case, measure):\n    'A toy.'\n    if case.how == 'skip':\n        measure.skip('no such thing')\n"
        "    measure(lambda reps: time.sleep(0.0005 * reps))\n"
    )
    monkeypatch.setenv("KVBENCH_SUITES", str(suite.parent))
    first = {"cpu_loop": canary.benches()["cpu_loop"]}  # all of them take seconds
    for chosen, made, code, said in (
        ("how=skip", first, 3, True), ("how=skip", {}, 3, False), ("how=skip,fine", first, 0, False)
    ):  # fmt: skip
        monkeypatch.setattr(canary, "benches", lambda made=made: made)
        with pytest.raises(SystemExit) as end:
            raise SystemExit(main(["run", "toy", "-a", chosen, "--profile", "smoke", "--no-db"]))
        assert end.value.code == code
        assert ("canaries ran before them" in capsys.readouterr().err) == said
