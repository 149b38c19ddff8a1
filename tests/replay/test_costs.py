"""Costs: every preset complete and plausible, the roofline and the laws worked out by hand, errors."""

from __future__ import annotations

import json

import pytest

from kvbench.errors import UsageError
from kvbench.replay.costs import TRANSPORTS, Costs, Work, costs
from kvbench.replay.machine import NUMBERS, PRESETS, Machine, preset
from kvbench.replay.models import MODELS, model, token_bytes, weight_bytes
from kvbench.replay.protocol import Phase
from kvbench.systems.neo.costs import Line, Plane, Tables


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_complete_with_a_source_for_each_number(name: str) -> None:
    machine = preset(name)
    assert machine.name == name
    assert set(machine.numbers) == set(NUMBERS)
    assert all(len(number.source) > 8 for number in machine.numbers.values())
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine
    assert machine["link_out"] < machine["hbm"] * machine["hbm_share"]


def test_peaks_are_those_of_the_data_sheets() -> None:
    """Dense 16-bit arithmetic, memory bandwidth, memory; the A10G is not an A10, of which NEO cites 125 TFLOP/s."""
    sheets = {
        "t4": (65e12, 320e9, 16e9), "a10g": (70e12, 600e9, 24e9), "a100": (312e12, 2039e9, 80e9),
        "h100": (989.5e12, 3350e9, 80e9), "h200": (989.5e12, 4800e9, 141e9), "gh200": (989.5e12, 4000e9, 96e9),
    }  # fmt: skip
    assert set(sheets) == set(PRESETS)
    for name, numbers in sheets.items():
        machine = preset(name)
        assert tuple(machine[number] for number in ("flops", "hbm", "memory")) == numbers, name
        assert {machine.numbers[number].kind for number in ("flops", "hbm", "memory")} == {"spec"}, name
        assert "data sheet" in machine.numbers["flops"].source, name


def test_generations_are_in_order() -> None:
    for number in ("flops", "hbm", "link_in"):
        found = [preset(name)[number] for name in ("t4", "a10g", "a100", "h100")]
        assert found == sorted(found)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"hbm_share": 1.5}, "hbm_share.*0.001..1"),
        ({"link_in": float("nan")}, "link_in"),
        ({"link_inn": 1e9}, "unknown number.*did you mean 'link_in'"),
        ({"memory": -1.0}, "memory"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(values: dict[str, float], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        preset("h200").with_(**values)  # type: ignore[arg-type]


def test_unknown_machines_and_models_name_their_neighbours() -> None:
    with pytest.raises(UsageError, match="did you mean 'h200'"):
        preset("h20")
    with pytest.raises(UsageError, match="did you mean 'llama-3-8b'"):
        model("llama-3-8")
    with pytest.raises(UsageError, match="devices"):
        preset("h200").with_(devices=5000)
    with pytest.raises(UsageError, match=r"not a machine.*kvbench\.machine/1"):
        Machine.from_json({"schema": "x"})
    with pytest.raises(UsageError, match="malformed machine"):
        Machine.from_json({"schema": "kvbench.machine/1", "name": "x", "numbers": {"hbm": 3}})


def test_given_numbers_say_so_and_devices_share_ideally() -> None:
    machine = preset("h100").with_(link_in=1e9, devices=2, why="a test")
    assert (machine.numbers["link_in"].kind, machine.numbers["link_in"].source) == ("given", "a test")
    one, two = costs(preset("h100"), "llama-3-8b"), costs(preset("h100").with_(devices=2), "llama-3-8b")
    assert two.linear(4096).seconds == pytest.approx(one.linear(4096).seconds / 2)
    assert two.near_bytes == 2 * one.near_bytes + one.weight_bytes
    assert two.far_bytes == one.far_bytes


def test_bytes_of_models() -> None:
    assert token_bytes(model("llama-3-8b")) == 131_072
    assert token_bytes(model("llama-2-7b")) == 524_288
    assert weight_bytes(model("llama-3-8b")) == pytest.approx(2 * 8.03e9, rel=0.002)
    assert weight_bytes(model("llama-2-7b")) == pytest.approx(2 * 6.74e9, rel=0.002)
    assert weight_bytes(model("llama-3-70b")) == pytest.approx(2 * 70.6e9, rel=0.002)
    assert all(shape.source for shape in MODELS.values())


def test_a_model_that_leaves_no_memory_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no memory for KV.*more devices"):
        costs(preset("a10g"), "llama-3-70b")


@pytest.fixture
def made() -> Costs:
    """Round numbers: 1 TFLOP/s, 0.5 TB/s near, a link of 10 and 20 GB/s."""
    return costs(
        preset("h200").with_(
            flops=2e12, flops_share=0.5, attention_share=0.25, hbm=1e12, hbm_share=0.5, link_in=10e9, link_out=20e9,
            sm_copy=5e9, direct_read=4e9, ce_call=1e-3, batch_call=1e-4, host_bandwidth=100e9, cpu_share=0.5,
            cpu_flops=1e12,
        ),
        "llama-3-8b",
    )  # fmt: skip


def test_the_roofline_of_a_layer(made: Costs) -> None:
    weights = made.shape.layer_weights
    assert made.linear(0) == Work(0.0, 0.0)
    assert made.linear(1) == Work(0.0, 2 * weights / 0.5e12)  # bound by its weights
    assert made.linear(1000) == Work(2.0 * weights * 1000 / 1e12, 0.0)
    pairs = 10 * 90 + 55
    assert made.prefill_attention(10, 90) == Work(4.0 * 4096 * pairs / 0.5e12, 0.0)
    assert made.decode_attention(3, 3000).seconds == pytest.approx(max(4 * 4096 * 3000 / 0.5e12, 3000 * 4096 / 0.5e12))
    assert made.cpu_attention(3, 3000) == pytest.approx(3000 * 4096 / 50e9)
    assert made.decode_attention(0, 0).seconds == made.cpu_attention(0, 0) == 0.0
    whole = made.layer([(10, 90)], 3, 3000)
    parts = made.linear(13), made.prefill_attention(10, 90), made.decode_attention(3, 3000)
    assert whole.seconds == pytest.approx(sum(part.seconds for part in parts))


def test_prefill_in_chunks_costs_as_much_attention_as_at_once(made: Costs) -> None:
    at_once = made.prefill_attention(4096, 0).compute
    chunks = sum(made.prefill_attention(512, start).compute for start in range(0, 4096, 512))
    assert chunks == pytest.approx(at_once, rel=1e-9)


def test_moving_a_layers_kv(made: Costs) -> None:
    nbytes = 100 * 4096
    assert made.load(100, transport="ideal") == pytest.approx(nbytes / 10e9)
    assert made.evict(100, transport="ideal") == pytest.approx(nbytes / 20e9)
    assert made.load(100) == made.evict(100) == pytest.approx(nbytes / 5e9)  # the SM copy is the slower one
    assert made.load(100, 32_768, "ce") == pytest.approx(13 * 1e-3 + nbytes / 10e9)  # 12.5 fragments
    assert made.load(100, 32_768, "batch") == pytest.approx(13 * 1e-4 + nbytes / 10e9)
    assert made.load(100, None, "ce") == pytest.approx(1e-3 + nbytes / 10e9)
    assert made.read_in_place(100) == pytest.approx(nbytes / 4e9)
    assert all(made.load(0, 1, transport) == 0.0 for transport in TRANSPORTS)
    with pytest.raises(UsageError, match="unknown transport"):
        made.load(1, None, "mail")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="empty fragment"):
        made.load(1, 0, "ce")


def test_stratas_figure_comes_out_of_the_preset() -> None:
    """64 KiB a call reach 22 % of PCIe 5's 64 GB/s and 5 % of NVLink-C2C's 384 (strata.md 1.b.2)."""
    for name, link, share in (("h200", 64e9, 0.22), ("gh200", 384e9, 0.05)):
        made = costs(preset(name), "llama-3-8b")
        rate = 8192 * made.layer_token_bytes / made.load(8192, 32 * 2048, "ce")
        assert rate / link == pytest.approx(share, rel=0.08)


def test_remapping_is_charged_by_the_chunk(made: Costs) -> None:
    assert made.remap(0) == 0.0
    assert made.remap(10) == pytest.approx(10 * (37.45e-6 + 25.6e-6))
    assert made.remap(10, unmap=False) == pytest.approx(10 * 37.45e-6)
    assert made.chunk_tokens == 16


def test_a_phase_stands_under_what_bounds_most_of_it() -> None:
    assert Costs.phase(Work(3.0, 1.0), repeat=2) == Phase(compute=4.0, repeat=2)
    assert Costs.phase(Work(1.0, 3.0), link_in=0.5) == Phase(hbm=4.0, link_in=0.5)
    assert Costs.phase(Work(1.0, 3.0).then(Work(5.0, 0.0)), until=9.0) == Phase(compute=9.0, until=9.0)


def test_sources_name_every_number(made: Costs) -> None:
    found = made.sources()
    assert set(NUMBERS) <= set(found)
    assert found["hbm"] == "given: given by the caller"
    assert found["contention compute_link"].startswith("1.0: no measured factor")


def tables(name: str = "llama-3-8b") -> Tables:
    grid = (16, 1024, 4096)
    return Tables(
        name, "T4", "all", Line("linr", grid, (1e-3, 2e-3, 8e-3)), Line("pref", grid, (1e-4, 1e-3, 9e-3)),
        Line("gdec", grid, (1e-5, 1e-4, 4e-4)), Plane("cdec", (1, 16), grid, ((1e-4, 1e-3, 4e-3), (2e-4, 2e-3, 5e-3))),
        5e-4, {"linr": "measured"},
    )  # fmt: skip


def test_tables_answer_where_they_are_given() -> None:
    on = preset("h200")
    made = Costs(on, model("llama-3-8b"), tables=tables())
    assert made.linear(1024).seconds == 2e-3
    assert made.linear(2560).seconds == pytest.approx(5e-3)
    assert made.prefill_attention(3072, 1024).seconds == pytest.approx(8e-3)
    assert made.decode_attention(4, 1024).seconds == 1e-4
    assert made.cpu_attention(16, 1024) == 2e-3
    assert made.launch == 5e-4
    assert not made.notes
    assert made.linear(8192).seconds == pytest.approx(16e-3)
    assert list(made.notes) == ["table linr was extrapolated"]
    assert made.sources()["table linr"] == "measured"
    with pytest.raises(UsageError, match="tables of another model"):
        Costs(on, model("opt-13b"), tables=tables())
