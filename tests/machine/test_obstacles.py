"""Each obstacle is found where it is, absent where it is not, and unchecked where that cannot be told."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.machine import obstacles, state, trial
from kvbench.machine.gpu import Gpu, Gpus
from kvbench.machine.obstacles import Obstacle, Unchecked
from kvbench.machine.topology import read_topology
from tests.machine.conftest import Tree
from tests.machine.trees import write

NO_DRIVER = Gpus(False, reason="libnvidia-ml.so.1 does not load")


def names(root: Path, gpus: Gpus = NO_DRIVER) -> tuple[set[str], set[str]]:
    found = obstacles.settings(root, read_topology(root), gpus)
    return ({f.name for f in found if isinstance(f, Obstacle)}, {f.name for f in found if isinstance(f, Unchecked)})


@pytest.mark.parametrize(
    ("name", "expected", "unchecked"),
    [("vm", {"gpu_driver", "memlock", "huge_pages"}, {"governor"}),
     ("epyc", {"gpu_driver", "thp", "numa_balancing", "governor", "clocksource", "swap"}, set()),
     ("gh200", {"gpu_driver", "huge_pages"}, {"memlock", "governor", "cpu_quota", "swap"}),
     ("container", {"gpu_driver", "cpu_quota"}, {"memlock", "thp", "huge_pages", "governor", "clocksource", "swap"}),
     ("wsl", {"gpu_driver", "clocksource", "huge_pages", "swap", "wsl"}, {"memlock", "thp", "governor", "cpu_quota"}),
     ("empty", {"gpu_driver"},
      {"memlock", "thp", "huge_pages", "governor", "clocksource", "cpu_quota", "swap"})],
)  # fmt: skip
def test_settings_of_each_machine(tree: Tree, name: str, expected: set[str], unchecked: set[str]) -> None:
    assert names(tree(name)) == (expected, unchecked)


def test_every_obstacle_says_what_it_costs_and_how_to_mend_it(every_tree: Path) -> None:
    for finding in obstacles.settings(every_tree, read_topology(every_tree), NO_DRIVER):
        texts = (finding.found, finding.costs, finding.mend) if isinstance(finding, Obstacle) else (finding.reason,)
        assert all(text and "\n" not in text for text in texts)


def test_memlock_does_not_bind_with_the_capability(tree: Tree) -> None:
    root = tree("vm")
    assert isinstance(obstacles.memlock(root), Obstacle)
    write(root, "/proc/self/status", "CapEff:\t0000000000004000\n")
    assert obstacles.memlock(root) is None
    write(root, "/proc/self/status", "CapEff:\tzz\n")
    assert isinstance(obstacles.memlock(root), Unchecked)


def test_a_quota_of_all_cpus_of_the_mask_never_binds(tree: Tree) -> None:
    root = tree("container")
    assert isinstance(obstacles.quota(root, 2), Obstacle)
    assert obstacles.quota(root, 1) is None


def test_the_clock_is_mended_only_with_a_clock_that_is_there(tree: Tree) -> None:
    epyc, wsl = obstacles.clocksource(tree("epyc")), obstacles.clocksource(tree("wsl"))
    assert isinstance(epyc, Obstacle)
    assert isinstance(wsl, Obstacle)
    assert epyc.mend.startswith("echo tsc")
    assert "echo" not in wsl.mend


def test_a_board_without_its_driver_is_told_from_no_board(tree: Tree) -> None:
    with_board, without = obstacles.gpu_driver(tree("epyc"), NO_DRIVER), obstacles.gpu_driver(tree("vm"), NO_DRIVER)
    assert isinstance(with_board, Obstacle)
    assert isinstance(without, Obstacle)
    assert "0000:01:00.0" in with_board.found
    assert "no NVIDIA device on the bus" in without.found
    assert obstacles.gpu_driver(tree("gh200"), Gpus(True, (Gpu("x"),))) is None
    assert isinstance(obstacles.gpu_driver(tree("wsl"), Gpus(None, reason="nvmlInit: mismatch")), Unchecked)


def _script(tmp_path: Path, body: str) -> str:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(stat.S_IRWXU)
    return str(script)


@pytest.mark.parametrize(
    ("body", "found"),
    [("echo 'Operation not permitted' >&2; exit 1", "Operation not permitted"), ("kill -SYS $$", "killed by SIGSYS")],
)
def test_a_refused_or_deadly_mbind_is_an_obstacle_and_not_our_end(
    tree: Tree, tmp_path: Path, body: str, found: str
) -> None:
    finding = trial.mbind(read_topology(tree("vm")), _script(tmp_path, body))
    assert isinstance(finding, Obstacle)
    assert found in finding.found


def test_mbind_that_cannot_be_tried_is_unchecked(tree: Tree, tmp_path: Path) -> None:
    vm = read_topology(tree("vm"))
    assert isinstance(trial.mbind(vm, str(tmp_path / "none")), Unchecked)
    other = _script(tmp_path, "echo 'no mbind system call number known for vax' >&2; exit 1")
    assert isinstance(trial.mbind(vm, other), Unchecked)


def test_mbind_to_a_node_that_is_not_there_is_refused_by_the_kernel(tmp_path: Path) -> None:
    write(tmp_path, "/sys/devices/system/node/online", "900")
    write(tmp_path, "/sys/devices/system/node/node900/cpulist", "0")
    finding = trial.mbind(read_topology(tmp_path))
    assert isinstance(finding, Obstacle | Unchecked)  # EINVAL, or no system call number for this machine
    if isinstance(finding, Obstacle):
        assert re.search(r"node 900 is refused: \S", finding.found)


def test_cache_directory(tmp_path: Path) -> None:
    assert trial.cache_directory(tmp_path / "new" / "cache") is None
    (tmp_path / "file").write_text("")
    finding = trial.cache_directory(tmp_path / "file" / "cache")
    assert isinstance(finding, Obstacle)
    assert str(tmp_path / "file") in finding.found


def test_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert isinstance(trial.c_compiler(), Obstacle)
    (tmp_path / "mycc").write_text("#!/bin/sh\n")
    (tmp_path / "mycc").chmod(stat.S_IRWXU)
    monkeypatch.setenv("CC", "mycc -std=c11")
    assert trial.c_compiler() is None
    monkeypatch.setenv("CC", "'unclosed")
    assert isinstance(trial.c_compiler(), Obstacle)


def stat_text(busy: dict[int, int]) -> str:
    return "cpu  0 0 0\n" + "".join(f"cpu{n} {ticks} 0 0 0 0 0 0 0 0 0\n" for n, ticks in busy.items())


def test_a_busy_sibling_of_a_measuring_cpu_is_named(tree: Tree) -> None:
    epyc = read_topology(tree("epyc"))
    ticks = os.sysconf("SC_CLK_TCK")
    busy = trial.busy_fractions(stat_text({1: 0, 9: 0, 10: 5}), stat_text({1: ticks, 9: ticks, 10: 5}), 1.0)
    assert busy == {1: 1.0, 9: 1.0, 10: 0.0}
    finding = trial.busy_siblings(epyc, busy)
    assert isinstance(finding, Obstacle)
    assert "CPU 9," in finding.found  # 1 measures itself: that is foreign load, not a busy sibling
    assert trial.busy_siblings(epyc, {9: 0.01}) is None
    assert trial.busy_siblings(read_topology(tree("vm")), {0: 1.0, 1: 1.0}) is None


def test_foreign_load_and_steal() -> None:
    before = state.Snapshot(at=0.0, own_cpu=0.0, involuntary=0, watched=2, steal_ticks=0, busy_ticks=0)
    ticks = os.sysconf("SC_CLK_TCK")

    def after(**change: int) -> state.StateDelta:
        fields = {"steal_ticks": 0, "busy_ticks": 0} | change
        return state.delta(before, state.Snapshot(at=1.0, own_cpu=0.0, involuntary=0, watched=2, **fields))

    assert trial.foreign_load(after()) is None
    loaded, stolen = trial.foreign_load(after(busy_ticks=ticks)), trial.foreign_load(after(steal_ticks=ticks))
    assert isinstance(loaded, Obstacle)
    assert isinstance(stolen, Obstacle)
    assert "keep 1.0 CPUs busy" in loaded.found
    assert "takes 50 %" in stolen.found
    unknown = state.delta(*(state.Snapshot(at=t, own_cpu=0.0, involuntary=0, watched=0) for t in (0.0, 1.0)))
    assert isinstance(trial.foreign_load(unknown), Unchecked)


@pytest.mark.parametrize("check", [obstacles.memlock, obstacles.thp, obstacles.huge_pages, obstacles.clocksource])
def test_garbage_is_unchecked_or_named_never_a_crash(
    tmp_path: Path, check: Callable[[Path], obstacles.Finding]
) -> None:
    for path in ("/proc/self/limits", "/proc/meminfo", "/sys/kernel/mm/transparent_hugepage/enabled"):
        write(tmp_path, path, b"\xff\x00 Max locked memory HugePages_Total: x [")
    assert isinstance(check(tmp_path), Unchecked)
