"""CUDA graphs of the bench launch on the fake driver: built once, in order, looked at, given back."""

from __future__ import annotations

import pytest

from kvbench.context import Context
from kvbench.errors import UsageError
from kvbench.transport import gpu_graph
from tests.suites.gpu_rig import Rig, good, refused, rig


def test_a_graph_is_built_once_in_order_and_given_back(gpu: Rig) -> None:
    gpu.fake.set(op_ns=200)  # 64 of them take less than the fake really needs
    gpu.fake.forget()
    good(gpu, gpu.case("launch", op="graph_64"))
    calls = [call for call in gpu.fake.trace() if "Graph" in call.name]
    made = [call.name for call in calls if call.name != "cuGraphLaunch"]
    one = ["cuGraphCreate", *64 * ["cuGraphAddKernelNode_v2"], "cuGraphInstantiateWithFlags", "cuGraphExecDestroy",
           "cuGraphDestroy"]  # fmt: skip
    assert made == 2 * one  # the probe's and the one that is measured
    after = [call.args[1] for call in calls if call.name == "cuGraphAddKernelNode_v2"]
    assert after == 2 * [0, *63 * [1]]  # each kernel waits for the one before
    assert sum(call.name == "cuGraphLaunch" for call in calls) > 4


def test_a_graph_that_does_not_run_its_kernels_is_skipped(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.fake.fail(call="cuGraphLaunch", code=801)
    refused(gpu, gpu.case("launch", op="graph"), "skipped", "does not serve a graph of 1", "NOT_SUPPORTED")
    monkeypatch.setattr(gpu_graph.KernelGraph, "submit", lambda self, stream: None)
    refused(gpu, gpu.case("launch", op="graph_64"), "skipped", "does something else", "64 of 64 kernels")
    with pytest.raises(UsageError, match="a graph of nothing"):
        gpu_graph.KernelGraph(None, [])  # type: ignore[arg-type]


def test_graphs_need_cuda_12(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    with rig(monkeypatch, context, driver_version=11080) as gpu:
        refused(gpu, gpu.case("launch", op="graph"), "skipped", "lacks cuGraphAddKernelNode", "CUDA 12.0")
        good(gpu, gpu.case("launch", op="kernel"))
