"""The Triton kernels under the interpreter, on CPU tensors, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.kernels.gpu import build
from tests.needs import missing_module, require

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def said() -> dict[str, str | None]:
    require("triton", build.missing_triton())
    require("torch", missing_module("torch"))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.kernels.gpu.interpreted"],
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


def test_copies_and_sums_agree_with_the_reference(said: dict[str, str | None]) -> None:
    wrong = {case: text for case, text in said.items() if text is not None and case != "stray"}
    assert wrong == {}
    assert sum(case.startswith("copy") for case in said) == 6
    assert sum(case.startswith("sum") for case in said) == 4


def test_a_store_outside_its_array_is_noticed(said: dict[str, str | None]) -> None:
    assert said["stray"] == "a canary of k_dst died"
