"""The report of any machine, as text and as a document that its schema accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvbench import data
from kvbench.cli import doctor
from kvbench.errors import UsageError
from kvbench.machine.gpu import Gpu, Gpus
from kvbench.machine.obstacles import Obstacle, Unchecked
from kvbench.schemas import schema_for
from tests.machine.conftest import Tree

SCHEMA = "kvbench.doctor/1"


def document(report: doctor.DoctorReport) -> dict[str, Any]:
    text = json.dumps(doctor.to_document(report), allow_nan=False)
    found: dict[str, Any] = json.loads(text)
    jsonschema.validate(found, schema_for(SCHEMA))
    return found


def test_no_tree_makes_it_fail(every_tree: Path) -> None:
    report = doctor.doctor_report(every_tree)
    assert document(report)["schema"] == SCHEMA
    text = doctor.render_text(report)
    for obstacle in report.obstacles:
        assert obstacle.mend in text
    assert "trials" in {check.name for check in report.unchecked}  # a copy is never passed off as tried


def test_the_report_of_a_tree_tells_its_facts(tree: Tree) -> None:
    found = document(
        doctor.doctor_report(tree("epyc"), gpus=Gpus(True, (Gpu("NVIDIA H200", 150754820096),), "580", "13.0"))
    )
    machine = found["machine"]
    assert (machine["cores"], machine["sockets"], machine["numa_nodes"]) == (8, 2, 2)
    assert machine["gpus"] == ["NVIDIA H200"]
    assert {c["name"]: c["value"] for c in found["ceilings"]} == {
        "dram": 4 * 4800e6 * 8, "pcie:gpu@0000:01:00.0": pytest.approx(31.5e9, rel=1e-3)
    }  # fmt: skip
    able = {c["name"]: c["available"] for c in found["capabilities"]}
    assert (able["pages=thp"], able["pages=huge"], able["numa matrix"], able["GPU suites"]) == (False, True, True, True)
    assert [o["effect"] for o in found["obstacles"]] == ["blocks", *["distorts"] * 4]


def test_a_memory_limit_is_shown_beside_the_machines_memory(tree: Tree) -> None:
    report = doctor.doctor_report(tree("container"))
    assert report.memory_limit_bytes == 4 * 2**30
    assert "4 GiB" in doctor.render_text(report)


def test_hostile_names_do_not_reach_the_terminal(tree: Tree) -> None:
    text = doctor.render_text(doctor.doctor_report(tree("vm"), gpus=Gpus(True, (Gpu("\x1b[31m[bold]evil"),))))
    assert "\x1b" not in text
    assert "[bold]evil" in text


def test_this_machine(tmp_path: Path) -> None:
    report = doctor.doctor_report(scratch=tmp_path, gpus=Gpus(False, reason="none"), watch_seconds=0.02)
    found = document(report)
    assert {"dram", "file", "hbm"} <= {tier["name"] for tier in found["tiers"]}
    assert next(t for t in found["tiers"] if t["name"] == "hbm")["available"] is False
    assert all(entry["available"] or entry["reason"] for entry in [*found["tiers"], *found["capabilities"]])
    assert list(tmp_path.iterdir()) == []  # scratch files leave nothing behind


def test_a_scratch_directory_in_memory_blocks_direct_reads() -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no /dev/shm")
    findings, direct = doctor.try_scratch(memory)
    assert direct.available is False
    assert [f.name for f in findings] == ["scratch_direct"]
    assert isinstance(findings[0], Obstacle)
    assert "tmpfs" in findings[0].found


def test_an_unusable_scratch_directory_blocks_the_file_tier(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    findings, direct = doctor.try_scratch(tmp_path / "file")
    assert direct.available is False
    assert isinstance(findings[0], Obstacle)
    assert findings[0].effect == "blocks"


def test_a_counter_that_does_not_count_is_an_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.machine.probe import Fact
    from kvbench.memory import readers

    works = doctor.try_scratch(tmp_path)[1].available
    monkeypatch.setattr(readers, "probe_counter", lambda _: Fact(False, "read_bytes grew by [0, 0]"))
    findings, _ = doctor.try_scratch(tmp_path)
    if works:
        assert [f.name for f in findings if isinstance(f, Obstacle)] == ["read_bytes"]
    else:  # here the temporary directory takes no direct read, so there is nothing to check the counter with
        assert all(isinstance(f, Obstacle | Unchecked) for f in findings)


def test_output_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(json=True) == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), schema_for(SCHEMA))
    assert doctor.run() == 0
    assert "what can run" in capsys.readouterr().out


def test_data_folders_of_the_checkout_and_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "kvbench"
    package.mkdir(parents=True)
    monkeypatch.setattr(data, "_PACKAGE", package)
    with pytest.raises(UsageError, match="the suites folder is missing"):
        data.root("suites")
    (tmp_path / "site" / "suites").mkdir()
    with pytest.raises(UsageError, match="missing"):
        data.root("suites")  # beside an installed package it is somebody else's
    (tmp_path / "site" / "pyproject.toml").write_text("")
    assert data.root("suites") == tmp_path / "site" / "suites"
    (package / "_data" / "suites").mkdir(parents=True)
    assert data.root("suites") == package / "_data" / "suites"
