"""Traps of order, drift, tools and nodes: the code as it is passes, each fault is found, and what numbers mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench import measure as measure_module
from kvbench.kernels.stream import Stream
from kvbench.machine.probe import Fact
from kvbench.memory import host, numa
from kvbench.timing import sampler, samples
from kvbench.timing.traps import nodes, order
from kvbench.timing.traps.catalogue import examine
from kvbench.timing.traps.record import Finding, Trap
from kvbench.units import GiB, KiB, MiB

Patch = pytest.MonkeyPatch

LOOKS: dict[str, Callable[[], Finding]] = {
    "T13": lambda: order.drift(30),
    "T14": lambda: order.nothing_left(),
    "T21": lambda: order.lazy_candidate(64 * KiB),
    "T22": lambda: order.tools(),
    "T58": lambda: order.turns(20),
}
NODES: dict[str, Callable[[], Finding]] = {
    "T28": lambda: nodes.remote_memory(MiB),
    "T30": lambda: nodes.bound_memory(MiB),
}
MACHINE = frozenset({"T13"})  # looks at what the machine does now: a busy one may make it unknown, never a failure


def look(name: str) -> Finding:
    return examine(Trap(name, "t", "m", "", (LOOKS | NODES)[name])).finding


@pytest.mark.parametrize("name", LOOKS)
def test_the_code_as_it_is_is_in_no_trap(name: str, monkeypatch: Patch) -> None:
    for variable in order.TOOL_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    found = look(name)
    assert found.verdict in (("pass", "unknown") if name in MACHINE else ("pass",)), found.reason


# -- faults ------------------------------------------------------------------------------------------------------------


def drift_never_flagged(patch: Patch) -> None:
    patch.setattr(samples, "DRIFT_FLAG", float("inf"))


def marks_forgotten(patch: Patch) -> None:
    patch.setattr(samples, "TAINT_SHARE", 2.0)


def judge_asleep(patch: Patch) -> None:
    real = measure_module.judge
    patch.setattr(measure_module, "judge", lambda *a, **k: replace(real(*a, **k), status="ok"))
    patch.setattr("kvbench.worker.check_case", lambda rows: None)  # which would refuse such a row by itself


def nothing_is_checked(patch: Patch) -> None:
    patch.setattr(Stream, "verify", lambda self: None)


def always_the_same_order(patch: Patch) -> None:
    real = sampler._loop

    class Fixed(tuple[Any, ...]):
        def __getitem__(self, key: Any) -> Any:
            return self if isinstance(key, slice) else super().__getitem__(key)

    patch.setattr(sampler, "_loop", lambda sides, *rest: real(Fixed(sides), *rest))


def a_profiler(patch: Patch) -> None:
    patch.setenv("CUDA_INJECTION64_PATH", "/opt/tool/libinjection.so")


FAULTS: list[tuple[str, Callable[[Patch], None], str]] = [
    ("T13", drift_never_flagged, "carry no flag"),
    ("T14", marks_forgotten, "leave the status ok"),
    ("T14", judge_asleep, "leave the status ok"),
    ("T21", nothing_is_checked, "has a number"),
    ("T22", a_profiler, "CUDA_INJECTION64_PATH"),
    ("T58", always_the_same_order, "of 20 rounds"),
]


@pytest.mark.parametrize(("name", "inject", "reason"), FAULTS, ids=[f"{n}-{f.__name__}" for n, f, _ in FAULTS])
def test_a_fault_in_the_measured_path_is_found(
    name: str, inject: Callable[[Patch], None], reason: str, monkeypatch: Patch
) -> None:
    inject(monkeypatch)
    found = look(name)
    assert found.verdict == "fail", found
    assert reason in found.reason


def test_a_run_whose_every_window_is_empty_is_told(monkeypatch: Patch) -> None:
    """T14's second half: were such windows taken for samples, the median would be 0 s."""
    monkeypatch.setattr(order, "_told_of_a_stopped_clock", lambda bed: (False, "0 s"))
    found = look("T14")
    assert (found.verdict, found.reason) == ("fail", "a run without one usable sample is not told")


def test_every_trap_has_a_fault() -> None:
    assert {name for name, _, _ in FAULTS} == set(LOOKS)


# -- what numbers mean -------------------------------------------------------------------------------------------------


def test_ends_that_differ_are_no_steady_state() -> None:
    assert order.judge_drift(1.0, 1.02, flagged=False, tainted=False).verdict == "pass"
    assert order.judge_drift(1.0, 1.10, flagged=True, tainted=False).verdict == "pass"
    assert order.judge_drift(1.0, 1.10, flagged=False, tainted=False).verdict == "unknown"
    assert "other work" in order.judge_drift(1.0, 0.8, flagged=False, tainted=True).reason


def test_tools_are_told_by_what_they_leave() -> None:
    assert order.attached_tools({"PATH": "/bin"}, {"TracerPid": "0"}, False) == ()
    assert order.attached_tools({"CUDA_LAUNCH_BLOCKING": "0"}, {}, False) == ()
    found = order.attached_tools({"LD_PRELOAD": "libprofiler.so"}, {"TracerPid": "41"}, True)
    assert found == ("LD_PRELOAD", "a debugger (TracerPid)", "a Python tracer or profiler")
    assert order.judge_tools(found).mend == "unset LD_PRELOAD"


def test_a_drift_that_order_does_not_cancel() -> None:
    assert order.judge_turns(10, 20, 1.0, "t").verdict == "pass"
    assert order.judge_turns(20, 20, 0.98, "t").verdict == "fail"
    assert "under a drift" in order.judge_turns(10, 20, 0.95, "t").reason


def matrix(local: float, remote: float) -> dict[tuple[int, int], float]:
    return {(a, b): local if a == b else remote for a in (0, 1) for b in (0, 1)}


def test_memory_of_the_own_node_must_not_be_slower() -> None:
    good = nodes.judge_matrix(matrix(100e9, 40e9))
    assert good.verdict == "pass"
    assert good.found is not None
    assert (good.found.value, good.found.unit) == (100e9, "B/s")
    swapped = nodes.judge_matrix(matrix(40e9, 100e9))
    assert swapped.verdict == "fail"
    assert "local memory is slower" in swapped.reason
    lame = {**matrix(100e9, 40e9), (1, 1): 30e9}
    assert nodes.judge_matrix(lame).verdict == "fail"


def test_memory_must_lie_where_it_was_asked_for() -> None:
    assert nodes.judge_placement({0: GiB, 1: GiB}, GiB).verdict == "pass"
    everything_on_0 = nodes.judge_placement({0: GiB, 1: 0}, GiB)
    assert everything_on_0.verdict == "fail"
    assert "node 1" in everything_on_0.reason
    assert nodes.judge_placement({0: None}, GiB).verdict == "unknown"


def node(number: int) -> numa.Node:
    return numa.Node(number, (number,), GiB, GiB)


@pytest.mark.parametrize("name", NODES)
def test_one_node_has_no_other(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(numa, "dram_nodes", lambda: Fact((node(0),)))
    monkeypatch.setattr(nodes, "Bed", lambda: SimpleNamespace(context=SimpleNamespace(topology=SimpleNamespace(
        nodes=(SimpleNamespace(id=0, cpus=(0,)), SimpleNamespace(id=1, cpus=()))))))  # fmt: skip
    assert look(name).verdict == "not applicable"


def test_every_pair_of_nodes_is_measured_by_the_bench(monkeypatch: Patch) -> None:
    asked: list[tuple[int, int]] = []

    def case(suite: str, bench: str, *, cpu_node: int, memory_node: int, bytes: int) -> SimpleNamespace:
        assert (suite, bench, bytes) == ("ladder", "numa", MiB)
        asked.append((cpu_node, memory_node))
        return SimpleNamespace(value=100e9 if cpu_node == memory_node else 40e9)

    topology = SimpleNamespace(nodes=tuple(SimpleNamespace(id=n, cpus=(n,)) for n in (0, 1)))
    monkeypatch.setattr(nodes, "Bed", lambda: SimpleNamespace(context=SimpleNamespace(topology=topology), case=case))
    assert look("T28").verdict == "pass"
    assert asked == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_bind_that_does_nothing_is_found(monkeypatch: Patch) -> None:
    """Two nodes in the list, and whatever is asked for lies on the first."""
    monkeypatch.setattr(numa, "dram_nodes", lambda: Fact((node(0), node(1))))
    monkeypatch.setattr(host, "_bind", lambda region, node: [])
    monkeypatch.setattr(host, "preflight", lambda *_, **__: 0)
    monkeypatch.setattr(numa, "histogram", lambda address, nbytes: Fact({0: nbytes}))
    found = look("T30")
    assert (found.verdict, "node 1" in found.reason) == ("fail", True), found
