"""The figures of the products on a GPU: errors within their bounds, gates counted, GPU ratios read off a document."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.errors import Unavailable
from kvbench.kernels.gpu import build
from kvbench.kernels.gpu.gemm_kernels import simt_kernel
from scripts.figures import directkv_gpu
from tests.needs import missing_gcc, missing_module, require


def test_errors_are_those_of_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    require("gcc", missing_gcc())
    require("triton", build.missing_triton())
    require("torch", missing_module("torch"))
    found = {f.name: f for f in directkv_gpu.errors()}
    assert len(found) == 6
    assert {f.verdict for f in found.values()} == {"met"}
    for figure in found.values():
        assert figure.value is not None
        assert 0.0 < figure.value < 1e-5
    monkeypatch.setattr(directkv_gpu, "on_host", lambda: {"simt naive": 1.0})
    monkeypatch.setattr(build, "missing_triton", lambda: "the package triton is not installed")
    worse = list(directkv_gpu.errors())
    assert [f.verdict for f in worse] == ["missed"] * 5
    assert "triton is not installed" in worse[-1].note


def test_one_form_that_fails_its_gates_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    row = SimpleNamespace(status="pass", kernel="a", arch="sm_80", reason=None)
    bad = SimpleNamespace(status="fail", kernel="b", arch="sm_80", reason="spills: 4 B")
    monkeypatch.setattr(directkv_gpu, "GATED", (simt_kernel("naive", 64),))
    monkeypatch.setattr(build, "missing_nvrtc", lambda: None)
    monkeypatch.setattr(build, "missing_triton", lambda: None)
    monkeypatch.setattr("kvbench.kernels.gpu.gates.table", lambda forms, archs: [row])
    fine = directkv_gpu.gated(("sm_80",))
    assert (fine.verdict, fine.value_text) == ("met", "1 of 1")
    monkeypatch.setattr("kvbench.kernels.gpu.gates.table", lambda forms, archs: [row, bad])
    missed = directkv_gpu.gated(("sm_80",))
    assert (missed.verdict, missed.value_text, missed.note) == ("missed", "1 of 2", "b sm_80: spills: 4 B")
    monkeypatch.setattr(build, "missing_nvrtc", lambda: "no libnvrtc")
    assert directkv_gpu.gated(("sm_80",)).verdict == "missed"


def test_without_a_gpu_its_figures_have_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise Unavailable("no GPU here")

    monkeypatch.setattr("kvbench.timing.gpu_session.open_driver", absent)
    found = list(directkv_gpu.on_gpu())
    assert [(f.value, f.verdict, f.note) for f in found] == [(None, "no target", "no GPU here")] * 2


@pytest.mark.parametrize(("row", "verdict"), [
    ({"value": 2.0, "fraction": 1.0, "status": "ok"}, "met"),
    ({"value": 2.0, "fraction": 0.5, "status": "ok"}, "missed"),
    ({"value": 2.0, "fraction": 0.5, "status": "tainted"}, "disturbed"),
    ({"value": None, "fraction": None, "status": "skipped", "reason": "no room"}, "missed"), (None, "missed"),
])  # fmt: skip
def test_a_ratio_is_the_row_against_its_ceiling(
    monkeypatch: pytest.MonkeyPatch, row: dict[str, Any] | None, verdict: str
) -> None:
    said = "" if row is None else json.dumps({"results": [{"reason": "", "kernel": "k", **row}]})
    done = SimpleNamespace(stdout=said, stderr="broken", returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda *words, **how: done)
    found = directkv_gpu.one_case("name", {"n": 64}, 0.8, 1.2)
    assert found.verdict == verdict
    assert (found.value is None) == (row is None or row["value"] is None)
