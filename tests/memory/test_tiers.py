"""Tier and pair names, discovery with reasons, third-party tiers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.errors import Unavailable, UsageError
from kvbench.machine.probe import Fact
from kvbench.memory import tiers
from kvbench.memory.tiers import Tier, parse_pair, parse_tier, register_tier, require_tier, tier_state
from tests.memory.test_limits import tree
from tests.memory.test_numa import node_files


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_registered", {})


@pytest.mark.parametrize("text", ["hbm", "pinned", "pageable", "managed", "dram", "dram@0", "dram@17", "file"])
def test_names_read_back_as_they_were(text: str) -> None:
    tier = parse_tier(text)
    assert str(tier) == text
    assert tier.description
    assert tier == Tier(tier.name, tier.node)  # a place is its name, not how it is described


@pytest.mark.parametrize(
    "text", ["", "DRAM", "dram@", "dram@-1", "dram@x", "dram@1024", "hbm@1", "file@0", "vram", "dram@٣", "dram @1"]
)
def test_other_names_list_what_is_legal(text: str) -> None:
    with pytest.raises(UsageError, match="dram"):
        parse_tier(text)


def test_a_typing_error_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match="did you mean 'pinned'"):
        parse_tier("pined")


@pytest.mark.parametrize("text", ["hbm:pinned", "dram@0:dram@1", "dram:dram", "dram:file"])
def test_pairs(text: str) -> None:
    pair = parse_pair(text)
    assert str(pair) == text
    assert (str(pair.near), str(pair.far)) == tuple(text.split(":"))


@pytest.mark.parametrize("text", ["dram", "dram:", ":file", "dram:file:file", "file:dram", "dram-file"])
def test_bad_pairs(text: str) -> None:
    with pytest.raises(UsageError):
        parse_pair(text)


def test_discovery_on_a_machine_with_a_memory_only_node(tmp_path: Path) -> None:
    root = tree(tmp_path, node_files(0, "0-3", 1 << 20) | node_files(1, "", 1 << 20))
    found = {str(s.tier): s for s in tiers.tiers(root, scratch=tmp_path, gpu=lambda: Fact(False, "no driver"))}
    assert set(found) == {"hbm", "pinned", "pageable", "managed", "dram", "dram@0", "dram@1", "file"}
    assert found["dram"].available is found["dram@0"].available is found["file"].available is True
    assert found["dram@1"].available is False
    assert "no CPUs" in found["dram@1"].reason
    assert (found["hbm"].available, found["pinned"].reason) == (False, "no driver")
    assert tier_state(Tier("dram", 7), root).available is False


def test_nodes_are_unknown_without_sys(tmp_path: Path) -> None:
    state = tier_state(Tier("dram", 0), tmp_path)
    assert state.available is None
    assert state.reason
    require_tier(Tier("dram", 0), tmp_path)  # unknown is not a no


def test_an_absent_tier_is_unavailable_with_its_reason(tmp_path: Path) -> None:
    root = tree(tmp_path, node_files(0, "0", 1))
    with pytest.raises(Unavailable, match="no NUMA node 3; this machine has 0"):
        require_tier(parse_tier("dram@3"), root)


def test_the_file_tier_needs_a_writable_directory(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    state = tier_state(parse_tier("file"), scratch=tmp_path / "plain")
    assert state.available is False
    assert "plain" in state.reason


@pytest.mark.usefixtures("registry")
def test_a_third_party_tier_is_parsed_and_probed() -> None:
    register_tier("cxl", "expansion memory", lambda: Fact(False, "no expander"))
    assert parse_pair("dram:cxl").far.description == "expansion memory"
    assert tier_state(parse_tier("cxl")) == tiers.TierState(Tier("cxl", None, "expansion memory"), False, "no expander")
    assert "cxl" in [s.tier.name for s in tiers.tiers(gpu=lambda: Fact(False, "none"))]


@pytest.mark.usefixtures("registry")
def test_a_broken_probe_is_unknown_and_named() -> None:
    def probe() -> Fact[bool]:
        raise ZeroDivisionError("oops")

    register_tier("odd", "broken", probe)
    state = tier_state(parse_tier("odd"))
    assert state.available is None
    assert "ZeroDivisionError: oops" in state.reason


@pytest.mark.parametrize("name", ["dram", "hbm", "", "Upper", "a@b", "a:b", "1a"])
@pytest.mark.usefixtures("registry")
def test_names_that_cannot_be_registered(name: str) -> None:
    with pytest.raises(UsageError):
        register_tier(name, "x", lambda: Fact(True))


def test_the_gpu_probe_answers_here_without_raising() -> None:
    found = tiers.gpu_present()
    assert found.value is True or found.reason


def test_no_driver_is_a_no_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert tiers.gpu_present() == Fact(False, "no NVIDIA driver found (libcuda.so.1 does not load)")


def test_importing_tiers_loads_no_numpy() -> None:
    code = "import sys, kvbench.memory.tiers; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
