"""activation, offload_overlap and slo_controller as the worker runs them: honest rows and the paper's numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

import pytest

from kvbench.context import Context
from kvbench.contract.axis import Value
from kvbench.contract.discover import load_suites
from kvbench.contract.result import HAS_VALUE, Result
from kvbench.systems.ellm import movers
from kvbench.systems.ellm.buffer import Copy, Ticket
from kvbench.worker import measure_case
from tests.needs import missing_gpu, missing_module, require

USABLE = HAS_VALUE - {"invalid"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors on a busy machine: a second thread that waits for its CPU costs more than it brings."""
    if missing_module("torch"):
        yield
        return
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def case(known: Context, name: str, /, **axes: Value) -> dict[str, Result]:
    bench = load_suites().find("ellm", name)
    values = {axis: declared.smoke[0] for axis, declared in bench.axes.items()} | axes
    assert bench.where is None or bench.where(values)
    rows = measure_case(bench, values, known)
    return {row.metric: row for row in rows}


def test_the_paper_s_share_is_modelled(context: Context) -> None:
    rows = case(context, "activation", context=204800)
    assert rows["activation"].basis == rows["share"].basis == "modelled"
    assert rows["share"].value == pytest.approx(0.308, abs=0.001)
    assert rows["utilisation_2k"].value == pytest.approx(0.01)
    decode = case(context, "activation", context=204800, phase="decode", batch=256)
    assert decode["utilisation"].value == pytest.approx(0.0031, abs=1e-4)
    chunked = case(context, "activation", context=204800, phase="decode", batch=256, prefill="chunk512")
    assert chunked["utilisation"].value == 1.0


@pytest.mark.parametrize(
    "axes",
    [
        {"context": 512}, {"context": 1024, "prefill": "chunk512"}, {"phase": "decode", "batch": 8},
        {"context": 512, "model": "llama-3-8b"},
    ],
)  # fmt: skip
def test_activation_is_measured_on_the_small_shape(context: Context, axes: dict[str, Value]) -> None:
    require("torch", missing_module("torch"))
    rows = case(context, "activation", form="host", **axes)
    assert (rows["measured"].status, rows["measured"].basis) == ("ok", "measured")
    assert rows["measured"].value == rows["activation"].value
    assert "share" not in rows


def test_what_is_too_long_to_run_is_skipped(context: Context) -> None:
    require("torch", missing_module("torch"))
    (row,) = case(context, "activation", form="host", context=204800).values()
    assert (row.status, row.value) == ("skipped", None)
    assert "operations" in row.reason


@pytest.mark.parametrize("name", ["activation", "offload_overlap"])
def test_without_a_gpu_its_cases_are_skipped(context: Context, name: str) -> None:
    if missing_gpu() is None:
        pytest.skip("there is a GPU")
    (row,) = case(context, name, form="cuda").values()
    assert (row.status, row.value) == ("skipped", None)
    assert "no GPU here" in row.reason


@pytest.mark.parametrize("name", ["activation", "offload_overlap"])
def test_without_torch_the_extra_is_named(context: Context, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (row,) = case(context, name, form="host").values()
    assert (row.status, row.value) == ("skipped", None)
    assert "kvbench[torch]" in row.reason


@pytest.mark.parametrize(("phase", "link"), [("prefill", "free"), ("decode", "free"), ("prefill", "equal")])
def test_copies_hide_or_say_so(context: Context, phase: str, link: str) -> None:
    require("torch", missing_module("torch"))
    if len(context.topology.measuring_cpus("all")) < 2:
        pytest.skip("compute and loader need a core each")
    before = os.sched_getaffinity(0)
    rows = case(context, "offload_overlap", phase=phase, link=link, tokens=128)
    assert os.sched_getaffinity(0) == before
    basis = "measured" if link == "free" else "emulated"
    assert {row.status for row in rows.values()} <= USABLE, [row.reason for row in rows.values()]
    assert {row.basis for row in rows.values()} == {basis}
    assert rows["hidden"].value is not None
    assert 0.0 <= rows["hidden"].value <= 1.0
    assert ("crossover" in rows) == ((phase, link) == ("prefill", "free"))
    assert bool(rows["pass_time"].ceilings) == (link == "free")
    assert rows["pass_time"].bytes.unique == 4 * 2 * (128 + (phase == "decode")) * 32 * 4


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_copies_carried_out_on_the_spot_hide_nothing(
    context: Context, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap T63: overlap that is claimed, and is none."""
    require("torch", missing_module("torch"))
    if len(context.topology.measuring_cpus("all")) < 2:
        pytest.skip("compute and loader need a core each")
    submit = movers.LoaderThread.submit

    def blocking(self: movers.LoaderThread, copies: Sequence[Copy], label: str) -> Ticket:
        ticket = submit(self, copies, label)
        self.wait(ticket)
        return ticket

    monkeypatch.setattr(movers.LoaderThread, "submit", blocking)
    hidden = case(context, "offload_overlap", phase=phase, link="equal", tokens=128)["hidden"]
    assert (hidden.value, hidden.status) == (pytest.approx(0.0, abs=0.05), "suspect")
    assert "not_in_flight" in hidden.flags


def test_one_core_is_not_enough(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    require("torch", missing_module("torch"))
    monkeypatch.setattr(type(context.topology), "measuring_cpus", lambda self, threads: (0,))
    (row,) = case(context, "offload_overlap").values()
    assert (row.status, row.reason) == ("skipped", "compute and loader thread need a core each, there is one")


def test_the_controller_is_simulated(context: Context) -> None:
    rows = case(context, "slo_controller", requests=60, slo=5)
    assert {row.basis for row in rows.values()} == {"simulated"}
    assert rows["attainment"].value is not None
    assert 0.0 <= rows["attainment"].value <= 1.0
    assert set(rows) == {
        "attainment", "ttft_attainment", "tpot_attainment", "p99_ttft", "reversals", "mean_size", "reaction"
    }  # fmt: skip
    fixed = case(context, "slo_controller", requests=60, policy="fixed")
    assert set(fixed) == {"attainment", "ttft_attainment", "tpot_attainment", "p99_ttft"}
    assert fixed["attainment"].kernel == "queue model of kvbench.systems.ellm.burst, seeds 1 2 3"
