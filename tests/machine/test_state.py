"""A window's disturbances: what is counted, what is marked, and what cannot be told."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.machine import state
from kvbench.machine.state import Snapshot, StateProbe, delta
from tests.machine.conftest import Tree

TICK = os.sysconf("SC_CLK_TCK")
QUIET = Snapshot(
    at=100.0, own_cpu=5.0, involuntary=10, watched=2, steal_ticks=7, busy_ticks=1000, runnable=1, cpu_pressure_us=500,
    memory_pressure_us=500, pages_migrated=3, pages_swapped=4, throttled=5, mhz=3000.0,
)  # fmt: skip
# one second later: this process used one CPU, nobody else did anything
LATER = replace(QUIET, at=101.0, own_cpu=6.0, busy_ticks=1000 + TICK, involuntary=12)


def test_a_quiet_window_has_no_marks() -> None:
    found = delta(QUIET, LATER)
    assert found.marks == ()
    assert (found.wall, found.steal, found.foreign_cpus, found.runnable) == (1.0, 0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("mark", "change"),
    [("steal", {"steal_ticks": 7 + TICK // 10}), ("cpu_pressure", {"cpu_pressure_us": 200_500}),
     ("memory_pressure", {"memory_pressure_us": 50_500}), ("preempted", {"involuntary": 310}),
     ("migrated", {"pages_migrated": 4}), ("swapped", {"pages_swapped": 5}), ("throttled", {"throttled": 6}),
     ("foreign_load", {"busy_ticks": 1000 + TICK + TICK // 2}), ("clock_moved", {"mhz": 2000.0})],
)  # fmt: skip
def test_each_disturbance_has_its_mark_and_only_it(mark: str, change: dict[str, float]) -> None:
    assert delta(QUIET, replace(LATER, **change)).marks == (mark,)  # type: ignore[arg-type]


def test_what_is_not_counted_is_none_and_marks_nothing() -> None:
    bare = Snapshot(at=1.0, own_cpu=0.0, involuntary=0, watched=0)
    found = delta(bare, replace(bare, at=2.0))
    assert found.marks == ()
    assert (found.steal, found.foreign_cpus, found.throttled, found.cpu_pressure, found.runnable) == (None,) * 5


def test_one_tick_of_steal_in_a_short_window_is_rounding() -> None:
    after = replace(QUIET, at=100.01, steal_ticks=8)
    assert "steal" not in delta(QUIET, after).marks


def test_tick_rounding_of_many_cpus_is_no_foreign_load() -> None:
    before = replace(QUIET, watched=64)
    after = replace(before, at=100.1, own_cpu=5.1, busy_ticks=1000 + TICK // 10 + 20)
    assert "foreign_load" not in delta(before, after).marks


def test_snapshots_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="older than the first"):
        delta(LATER, QUIET)


def test_a_tree_is_read_as_written(tree: Tree) -> None:
    with StateProbe(tree("vm")) as probe:
        found = probe.snapshot()
    assert (found.watched, found.steal_ticks, found.runnable) == (2, 8, 3)
    assert found.busy_ticks == (426 + 588 + 3) + (3253 + 1006 + 19)
    assert (found.pages_migrated, found.pages_swapped, found.throttled) == (7, 2, 0)
    assert (found.cpu_pressure_us, found.memory_pressure_us, found.mhz) == (3700653, 11, None)


def test_only_watched_cpus_count(tree: Tree) -> None:
    with StateProbe(tree("vm"), cpus=(0,)) as probe:
        found = probe.snapshot()
    assert (found.watched, found.steal_ticks) == (1, 2)


def test_throttling_and_clock_are_found(tree: Tree) -> None:
    with StateProbe(tree("container")) as probe:
        assert probe.snapshot().throttled == 3
    with StateProbe(tree("epyc")) as probe:
        assert probe.snapshot().mhz == 1500.0


def test_no_tree_makes_it_fail(every_tree: Path) -> None:
    with StateProbe(every_tree) as probe:
        before = probe.snapshot()
        found = delta(before, probe.snapshot())
    assert set(found.marks) == set()


def test_this_machine_counts_time_forward_and_files_are_closed() -> None:
    probe = StateProbe()
    handles = set(probe._files.values())
    before, after = probe.snapshot(), probe.snapshot()
    assert delta(before, after).wall > 0
    assert after.own_cpu >= before.own_cpu
    probe.close()
    assert handles
    for handle in handles:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(handle)


def test_the_shared_probe_is_kept() -> None:
    first, second = state.snapshot(), state.snapshot()
    assert second.at > first.at
    assert len([pid for pid in state._probes if pid == os.getpid()]) == 1
