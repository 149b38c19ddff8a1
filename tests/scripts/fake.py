"""A checkout with the real scripts and a fake Python: the shell's decisions without downloading anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Answers the calls scripts/lib.sh makes; every other call goes to the real interpreter.
FAKE_PYTHON = f"""#!/bin/sh
here=$(dirname "$0")
case "$*" in
    *ensurepip*) echo "${{FAKE_VERSION:-3.12.1}}${{FAKE_NOVENV:+ novenv}}" ;;
    "-I -S -c"*) echo "${{FAKE_VERSION:-3.12.1}} (fake)" ;;
    "-m venv "*)
        [ -z "$FAKE_VENV_FAILS" ] || {{ echo "no space"; exit 1; }}
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo venv >>"$FAKE_CALLS" ;;
    "-m pip --version") [ ! -e "$here/no-pip" ] ;;
    "-m pip install"*)
        echo "$*" >>"$FAKE_CALLS"
        [ -z "$FAKE_PIP_SLEEP" ] || sleep "$FAKE_PIP_SLEEP"
        [ -z "$FAKE_PIP_OUTPUT" ] || printf '%s\\n' "$FAKE_PIP_OUTPUT"
        [ -z "$FAKE_PIP_CODE" ] || exit "$FAKE_PIP_CODE"
        case "$*" in *torch==*) touch "$here/torch" ;; esac
        cp "$FAKE_KVBENCH" "$here/kvbench" ;;
    *"import torch"*) [ -e "$here/torch" ] && echo 2.13.0+cpu ;;
    "-m ruff"*|"-m mypy"*|"-m pytest"*|"tests/docs_check.py"*)
        echo "stage $*"
        case "$*" in *"$FAKE_STAGE_FAILS"*) [ -z "$FAKE_STAGE_FAILS" ] || exit 5 ;; esac
        case "$*" in "-m pytest"*) echo "7 passed in 0.01s" ;; esac ;;
    *) PYTHONPATH={ROOT} exec {sys.executable} "$@" ;;
esac
"""

FAKE_KVBENCH = """#!/bin/sh
if [ "$1 $2" = "list --json" ]; then
    printf '{"benches": [{"suite": "%s"}' ladder
    printf ', {"suite": "%s"}' canary neo neo routes
    echo ']}'
    exit
fi
echo "kvbench $*"
case "$*" in *"$FAKE_FAILS"*) [ -z "$FAKE_FAILS" ] || exit "${FAKE_CODE:-3}" ;; esac
"""

TOOLS = (
    *("sh", "bash", "env", "sed", "cat", "cut", "awk", "grep", "head", "tail", "find", "sha256sum", "mkdir"),
    *("mv", "rm", "cp", "touch", "dirname", "flock", "sleep", "chmod"),
)


@dataclass(slots=True)
class Checkout:
    """A fake checkout: ``root``, ``bin`` (its whole PATH), and ``calls``: what pip and venv were asked."""

    root: Path
    bin: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def add_python(self, name: str = "python3.12", folder: Path | None = None) -> Path:
        path = (folder or self.bin) / name
        path.write_text(FAKE_PYTHON)
        path.chmod(0o755)
        return path

    def popen(self, script: str, *args: str, **env: str) -> subprocess.Popen[str]:
        return self._popen(self.root, script, args, env)

    def run(self, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run_in(self.root, script, *args, **env)

    def run_in(self, cwd: Path, script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self._popen(cwd, script, args, env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def _popen(self, cwd: Path, script: str, args: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "scripts" / script), *args],
            cwd=cwd,
            env={"PATH": str(self.bin), "HOME": "/nonexistent", **self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def make_checkout(folder: Path) -> Checkout:
    """Build a :class:`Checkout` under ``folder`` whose name holds a space, with the scripts of this tree."""
    root = folder / "a clone"
    (root / "scripts").mkdir(parents=True)
    for name in ("lib.sh", "bench", "test"):
        shutil.copy(ROOT / "scripts" / name, root / "scripts" / name)
    shutil.copy(ROOT / "pyproject.toml", root / "pyproject.toml")
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, tool
        os.symlink(found, bin_folder / tool)
    kvbench = folder / "kvbench"
    kvbench.write_text(FAKE_KVBENCH)
    kvbench.chmod(0o755)
    return Checkout(root, bin_folder, {"FAKE_CALLS": str(root / "calls"), "FAKE_KVBENCH": str(kvbench)})
