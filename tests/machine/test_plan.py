"""What a run visits by default: every GPU at every node of host memory, on the recorded machines."""

from __future__ import annotations

import pytest

from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.machine.nvml_devices import Device, Visit, choose, paths, read_devices, visits
from kvbench.machine.topology import read_topology
from kvbench.runner import Plan, make_plan
from tests.machine.conftest import Tree
from tests.machine.fake_nvml import FakeNvml


def visited(kept_tree: Tree, machine: str, spec: str | None = None) -> tuple[Visit, ...]:
    return visits(choose(spec, read_devices(FakeNvml(machine)), {}), read_topology(kept_tree(machine)))


def plan(gpus: tuple[Visit, ...] = (), **overrides: str) -> Plan:
    return make_plan(load_suites(), ["ladder/link", "ladder/launch", "ladder/host_gather"], overrides, "smoke", gpus)


def test_the_nearest_node_keeps_its_word_and_the_others_come_by_number(kept_tree: Tree) -> None:
    near_0, near_1 = ("near", "1"), ("near", "0")
    assert visited(kept_tree, "dgx") == tuple(Visit(n, near_0 if n < 4 else near_1) for n in range(8))
    assert visited(kept_tree, "dgx", "6,1") == (Visit(0, near_1), Visit(1, near_0))
    dgx = read_devices(FakeNvml("dgx")).found
    assert sum(len(v.nodes) for v in visited(kept_tree, "dgx")) == len(paths(dgx, read_topology(kept_tree("dgx"))))


def test_one_node_or_none_told_is_the_grid_of_one_gpu(kept_tree: Tree) -> None:
    for machine in ("gh200", "wsl"):
        assert visited(kept_tree, machine) == (Visit(0, ("near",)),)
        gpus = visited(kept_tree, machine)
        assert [case for _, case in plan(gpus).pairs] == [case for _, case in plan().pairs]
    assert visits((), read_topology(kept_tree("dgx"))) == ()


def test_a_gpu_whose_node_is_not_told_also_visits_each_by_number(kept_tree: Tree) -> None:
    for nodes in ((), (0, 1)):
        assert visits([Device(0, "x", "GPU-a", nodes=nodes)], read_topology(kept_tree("dgx"))) == (
            Visit(0, ("near", "0", "1")),
        )


def test_of_mig_instances_the_one_that_cuda_shows(kept_tree: Tree) -> None:
    assert [v.device for v in visited(kept_tree, "mig")] == [0]
    assert [v.device for v in visited(kept_tree, "mig", "2,3")] == [0, 1]


def test_eight_gpus_and_two_nodes(kept_tree: Tree) -> None:
    alone, all_of_them = plan(), plan(visited(kept_tree, "dgx"))
    places = {
        (c.axes["device"], c.axes["node"]) for b, c in all_of_them.pairs
        if b.name == "link" and c.axes["pair"] == "hbm:pinned"
    }  # fmt: skip
    assert places == {(n, node) for n in range(8) for node in ("near", "1" if n < 4 else "0")}
    assert {c.axes["device"] for b, c in all_of_them.pairs if b.name == "launch"} == set(range(8))
    digests = [case.digest for _, case in all_of_them.pairs]
    assert len(digests) == len(set(digests))
    assert {case.digest for _, case in alone.pairs} <= set(digests)  # what was stored before keeps its series
    first = [
        c.digest for _, c in all_of_them.pairs if c.axes.get("device", 0) == 0 and c.axes.get("node") in ("near", None)
    ]
    assert first == [case.digest for _, case in alone.pairs]
    assert all_of_them.seconds > alone.seconds
    hosts = [c.digest for b, c in all_of_them.pairs if b.name == "host_gather"]
    assert hosts == [c.digest for b, c in alone.pairs if b.name == "host_gather"]


def test_a_chosen_axis_is_kept(kept_tree: Tree) -> None:
    gpus = visited(kept_tree, "dgx")
    suites = load_suites()
    link = {"pair": "hbm:pinned", "alloc": "register", "transport": "ce", "direction": "fetch"}
    for given, expected in (
        ({"device": "2"}, {(2, "near")}),
        ({"node": "1"}, {(n, "1") for n in range(8)}),
        ({"device": "2,9", "node": "0"}, {(2, "0"), (9, "0")}),
    ):
        found = make_plan(suites, ["ladder/link"], link | given, "smoke", gpus)
        assert {(c.axes["device"], c.axes["node"]) for _, c in found.pairs} == expected


@pytest.mark.parametrize("node", ["0", "1"])
def test_managed_memory_has_no_node_of_ours(node: str) -> None:
    where = load_suites().find("ladder", "link").where
    assert where is not None
    axes: dict[str, Value] = {
        "pair": "hbm:managed", "alloc": "plain", "transport": "ce", "direction": "fetch", "bytes": 1 << 20,
        "pieces": 1, "pages": "4k",
    }  # fmt: skip
    assert where(axes | {"node": "near"})
    assert not where(axes | {"node": node})
