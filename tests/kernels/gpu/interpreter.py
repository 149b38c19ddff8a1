"""Running a module of kernel cases under Triton's interpreter, in a process of its own: it patches Triton for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kvbench.kernels.gpu import build
from tests.needs import missing_module, require

ROOT = Path(__file__).resolve().parents[3]


def interpreted(module: str) -> dict[str, str | None]:
    """Return what each case of ``tests.kernels.gpu.<module>`` says: None where it agrees, else how it differs."""
    require("triton", build.missing_triton())
    require("torch", missing_module("torch"))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"tests.kernels.gpu.{module}"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    document: dict[str, str | None] = json.loads(done.stdout)
    return document
