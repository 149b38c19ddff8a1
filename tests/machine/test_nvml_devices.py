"""Which GPUs CUDA shows and which of them ``--device`` chooses; ids are opaque, errors are one line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from kvbench.errors import EXIT_USAGE, UsageError
from kvbench.machine.nvml_devices import Device, Devices, choose, only, paths, read_devices, visible
from kvbench.machine.topology import read_topology
from tests.machine.conftest import Tree
from tests.machine.fake_nvml import ERRORS, FakeNvml, load

DGX = read_devices(FakeNvml("dgx"))
MIG = read_devices(FakeNvml("mig"))
NONE = read_devices(loads=lambda: False)
MIXED = Devices((Device(0, "NVIDIA T4", "GPU-aaaa"), Device(1, "NVIDIA A100", "GPU-aabb")))
CUDA = "CUDA_VISIBLE_DEVICES"


def ids(found: tuple[Device, ...] | None) -> list[str] | None:
    return None if found is None else [device.id for device in found]


def seen(devices: Devices, text: str | None, **more: str) -> list[str] | None:
    environ = dict(more) if text is None else {CUDA: text, **more}
    return ids(visible(devices, environ).value)


def test_boards_are_listed_in_bus_order() -> None:
    assert ids(DGX.found) == [str(n) for n in range(8)]
    assert [device.nodes for device in DGX.found] == [(0,)] * 4 + [(1,)] * 4
    assert len({device.lock for device in DGX.found}) == 8
    assert DGX.found[0].lock.startswith("gpu-")
    assert DGX.reason == ""


def test_a_board_in_mig_mode_is_its_instances() -> None:
    assert ids(MIG.found) == ["0:0", "0:1", "2", "3", "4", "5", "6", "7"]
    assert [device.instance for device in MIG.found[:2]] == [(1, 0), (2, 0)]
    assert MIG.found[0].lock == MIG.found[1].lock  # they share the board's link, power and clocks
    assert MIG.reason == "GPU 1 is in MIG mode and its instances are none"


def test_full_ids_are_not_printed() -> None:
    text = repr(MIG) + MIG.describe() + repr(choose("0:1", MIG, {}))
    assert all(device.uuid not in text and device.board_uuid not in text for device in MIG.found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, [0, 1, 2, 3, 4, 5, 6, 7]), ("", []), ("3", [3]), ("5,2", [5, 2]), (" 1 , 0 ", [1, 0]), ("-1", []),
     ("1,-1,0", [1]), ("9,0", []), ("0,x,1", [0]), ("GPU-31000100-0000-0000-0000-000000000003", [3]),
     ("GPU-3,0", [3, 0]), ("GPU-", []), ("31000100", []), ("NoDevFiles", []), ("MIG-GPU-nothing/1/0", []), ("0x1", []),
     ("٣", []), ("1e1", [])],
)  # fmt: skip
def test_visible_devices_follow_cuda(text: str | None, expected: list[int]) -> None:
    assert seen(DGX, text) == [str(n) for n in expected]


def test_ambiguous_prefixes_name_nothing() -> None:
    assert seen(MIXED, "GPU-aa") == []
    assert seen(MIXED, "GPU-aab") == ["1"]


def test_indices_on_unlike_boards_count_in_an_order_nobody_tells() -> None:
    found = visible(MIXED, {CUDA: "0"})
    assert found.value is None
    assert "PCI_BUS_ID" in found.reason
    assert seen(MIXED, "0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["0"]
    assert visible(DGX, {CUDA: "0,0"}).value is None


def test_mig_entries_old_and_new() -> None:
    first = MIG.found[1]
    assert seen(MIG, first.uuid) == ["0:1"]
    assert seen(MIG, f"MIG-{MIG.found[0].board_uuid}/2/0") == ["0:1"]
    assert seen(MIG, f"MIG-{MIG.found[0].board_uuid}/9/0") == []
    assert visible(MIG, {CUDA: "0"}).value is None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("0", ["0"]), ("7,1", ["7", "1"]), ("all", [str(n) for n in range(8)]), ("GPU-4", ["4"]),
     (None, [str(n) for n in range(8)]), (" 2 , GPU-51000100-0 ", ["2", "5"])],
)  # fmt: skip
def test_choices(spec: str | None, expected: list[str]) -> None:
    assert ids(choose(spec, DGX, {})) == expected


@pytest.mark.parametrize(
    ("spec", "devices", "environ", "said"),
    [("8", DGX, {}, "unknown device, got '8', expected one of: 0 = NVIDIA H100 80GB HBM3 (GPU-01000100)"),
     ("", DGX, {}, "unknown device, got ''"), ("0,", DGX, {}, "unknown device, got ''"),
     ("GPU-9", DGX, {}, "unknown device"), ("-1", DGX, {}, "unknown device"), ("0:0", DGX, {}, "unknown device"),
     ("all,0", DGX, {}, "device given twice, got '0'"), ("1,1", DGX, {}, "device given twice"),
     ("GPU-", DGX, {}, "unknown device"),
     ("\x1b[31m", DGX, {}, "unknown device"),
     ("0", MIG, {}, "split into MIG instances, got '0', expected one of: 0:0 = "), ("1", MIG, {}, "unknown device"),
     ("0", NONE, {}, "there is no GPU here, got '0'"), ("all", NONE, {}, "there is no GPU here"),
     ("2", DGX, {CUDA: "0,1"}, "hidden by CUDA_VISIBLE_DEVICES, got '2', expected one of: 0 = NVIDIA H100"),
     ("2", DGX, {CUDA: ""}, "CUDA_VISIBLE_DEVICES hides every GPU"), ("GPU-aa", MIXED, {}, "ambiguous device"),
     ("0", MIXED, {CUDA: "0"}, "visible GPUs are unknown, got '0'; CUDA_VISIBLE_DEVICES counts in an order")],
)  # fmt: skip
def test_what_cannot_be_chosen_is_one_line(spec: str, devices: Devices, environ: Mapping[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose(spec, devices, environ)
    text = str(caught.value)
    assert said in text
    assert caught.value.exit_code == EXIT_USAGE
    assert text.startswith("--device: ")
    assert text.isprintable()


def test_all_is_what_is_visible() -> None:
    assert ids(choose("all", DGX, {CUDA: "6,1"})) == ["6", "1"]
    assert choose(None, NONE, {}) == ()


def test_cuda_sees_the_chosen_ones_only_and_only_for_a_while() -> None:
    environ = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    with only(choose("0:1", MIG, {}), environ):
        assert environ == {CUDA: MIG.found[1].uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert ids(visible(MIG, environ).value) == ["0:1"]  # a worker finds the same device again
    assert environ == {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    nameless = Device(3, "x", "")

    def fails() -> None:
        with only([nameless], environ):
            assert environ[CUDA] == "3"
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert CUDA not in environ
    assert nameless.lock == "gpu-index3"


@pytest.mark.parametrize("kind", sorted(ERRORS))
@pytest.mark.parametrize(
    "name",
    ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetName",
     "nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
     "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetMemoryAffinity"],
)  # fmt: skip
def test_every_question_may_go_unanswered_alone(name: str, kind: str) -> None:
    found = read_devices(FakeNvml("mig", {name: kind}))
    assert found.found or found.reason
    if name == "nvmlDeviceGetUUID":
        assert ids(found.found) == ["2", "3", "4", "5", "6", "7"]  # instances can only be named by UUID
        assert [device.cuda_id for device in found.found] == ["2", "3", "4", "5", "6", "7"]
    if name == "nvmlDeviceGetMigDeviceHandleByIndex" and kind == "NoPermission":
        assert "cannot be listed" in found.reason


def test_one_lost_board_does_not_hide_the_others() -> None:
    machine = load("dgx")
    machine["boards"][0] = {"error": "GpuIsLost"}
    found = read_devices(FakeNvml(machine))
    assert ids(found.found) == [str(n) for n in range(1, 8)]
    assert found.reason == "GPU 0: GPU is lost"


def test_gpus_by_nodes_leave_out_nodes_that_are_gpu_memory(kept_tree: Tree) -> None:
    def pairs(machine: str, spec: str | None = None) -> list[tuple[str, int]]:
        chosen = choose(spec, read_devices(FakeNvml(machine)), {})
        return [(device.id, node) for device, node in paths(chosen, read_topology(kept_tree(machine)))]

    assert pairs("dgx", "0,7") == [("0", 0), ("0", 1), ("7", 0), ("7", 1)]
    assert len(pairs("dgx")) == 16
    assert pairs("gh200") == [("0", 0)]
    assert pairs("wsl") == [("0", 0)]  # no node is told: the memory there is counts as node 0


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUDA, raising=False)
    found = read_devices()
    assert found.found or found.reason
    with only(found.found[:1]) if found.found else only([]):
        assert os.environ[CUDA] == ",".join(device.cuda_id for device in found.found[:1])


def test_the_descriptor_of_a_device_is_hidden_from_any_record() -> None:
    fields: Any = Device.__dataclass_fields__
    assert {name for name, spec in fields.items() if not spec.repr} == {"uuid", "board_uuid"}
