"""What ``kvbench --help`` and ``kvbench list`` load: neither numba nor any other package that takes its time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("numba", "llvmlite", "torch", "pandas", "scipy", "triton", "pyarrow", "alembic", "pytest")

# main() may return a code or leave by SystemExit; both ways the modules are counted.
PROBE = """
import json, sys
sys.argv = ["kvbench", *sys.argv[1:]]
from kvbench.cli.main import main
try:
    code = main()
except SystemExit as error:
    code = error.code
print(json.dumps({"code": code or 0, "modules": sorted({name.split(".")[0] for name in sys.modules})}), file=sys.stderr)
"""


def loaded(*arguments: str) -> tuple[int, set[str], str]:
    """Return exit code, top-level modules loaded at the end, and standard output of ``kvbench ARGUMENTS``."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip(), done.stdout
    report = json.loads(done.stderr.splitlines()[-1])
    return report["code"], set(report["modules"]), done.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("list",), ("list", "--json"), ("run", "--help")])
def test_light_commands_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    code, modules, output = loaded(*arguments)
    assert code == 0
    assert output.strip()
    assert sorted(modules.intersection(HEAVY)) == []


def test_help_does_not_load_the_store() -> None:
    assert "sqlalchemy" not in loaded("--help")[1]


def test_the_probe_sees_what_is_loaded() -> None:
    assert {"kvbench", "typer", "json"} <= loaded("--help")[1]
