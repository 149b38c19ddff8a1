"""A child runs the code of its parent, wherever it is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvbench import children

ROOT = Path(__file__).resolve().parents[1]


def test_a_child_never_takes_modules_from_the_folder_it_is_started_in(tmp_path: Path) -> None:
    for name in ("kvbench", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong code')\n")
    (tmp_path / "outside.py").write_text("import kvbench, sys; print(kvbench.__file__, *sys.argv[1:])\n")
    script = (
        "import subprocess, sys; from kvbench import children; sys.path.append(sys.argv[1]); "
        "sys.exit(subprocess.run(children.python('outside', 'a', 'b c')).returncode)"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script, str(tmp_path)], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == [str(ROOT / "kvbench" / "__init__.py"), "a", "b", "c"]


def test_the_command_names_the_module() -> None:
    assert "kvbench.worker" in children.python("kvbench.worker", "3")
