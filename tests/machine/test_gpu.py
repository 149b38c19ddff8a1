"""What each machine's boards say of themselves: each call may fail alone."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.machine.gpu import Gpu, MigInstance, read_gpus
from tests.machine.fake_nvml import BOARD, ERRORS, FakeNvml, error, load

MACHINES = ("dgx", "mig", "gh200", "wsl")


def board(**answers: Any) -> Gpu:
    """Return the only board of a machine that gives ``answers``; ``fields`` are its field values."""
    found = read_gpus(FakeNvml({"driver": "1", "cuda": 12040, "boards": [answers]}))
    return found.boards[0]


def test_a_board_that_answers_everything() -> None:
    fake = FakeNvml("dgx")
    found = read_gpus(fake)
    assert (found.present, found.driver, found.cuda, len(found.boards)) == (True, "550.163.01", "12.4", 8)
    first, last = found.boards[0], found.boards[7]
    assert (first.name, first.memory_bytes) == ("NVIDIA H100 80GB HBM3", 80 * 2**30)
    assert (first.max_gen, first.max_width, first.own_max_gen) == (5, 16, 5)
    assert (first.nvlinks, first.nvlinks_total, first.nvlink_version, first.nvlink_mb_s) == (18, 18, 4, 26562)
    assert (first.c2c_links, first.c2c_mb_s) == (0, None)
    assert (first.ecc, first.mig, first.mig_instances, first.persistence) == (True, False, (), True)
    assert (first.power_limit_w, first.default_power_limit_w, first.enforced_limit_w) == (700.0, 700.0, 700.0)
    assert (first.max_sm_mhz, first.max_memory_mhz, first.memory_bus_bits) == (1980, 1593, 5120)
    assert (first.compute_capability, first.compute_mode, first.addressing) == ("9.0", "default", "none")
    assert (first.cpus, first.memory_nodes, first.gpu_node) == ("0-55,112-167", (0,), None)
    assert (last.cpus, last.memory_nodes, last.bus_id) == ("56-111,168-223", (1,), "00000000:CB:00.0")
    assert first.gaps == ()
    assert fake.open == 0


def test_mig_instances_are_parts_of_their_board() -> None:
    first, second, third = read_gpus(FakeNvml("mig")).boards[:3]
    assert (first.mig, second.mig, third.mig) == (True, True, False)
    assert first.mig_instances is not None
    assert [(m.gpu_instance, m.slices, m.sms, m.copy_engines, m.memory_bytes) for m in first.mig_instances] == [
        (1, 3, 42, 3, 19968 * 2**20), (2, 3, 42, 3, 19968 * 2**20)
    ]  # fmt: skip
    assert len({m.uuid_hash for m in first.mig_instances}) == 2
    assert (second.mig_instances, third.mig_instances) == ((), ())


def test_instances_that_may_not_be_listed_are_unknown_and_not_none() -> None:
    found = read_gpus(FakeNvml("mig", {"nvmlDeviceGetMigDeviceHandleByIndex": "NoPermission"})).boards[0]
    assert found.mig_instances is None
    assert ("nvmlDeviceGetMigDeviceHandleByIndex", "Insufficient Permissions") in found.gaps


def test_memory_that_is_a_node_and_a_coherent_link() -> None:
    found = read_gpus(FakeNvml("gh200")).boards[0]
    assert (found.gpu_node, found.memory_nodes, found.cpus, found.addressing) == (1, (0,), "0-71", "ats")
    assert (found.c2c_links, found.c2c_mb_s, found.nvlinks) == (10, 45000, None)
    assert (found.max_gen, found.max_width, found.power_limit_w) == (None, None, None)


def test_what_wsl_does_not_answer_is_unknown() -> None:
    found = read_gpus(FakeNvml("wsl")).boards[0]
    assert (found.max_gen, found.max_width, found.ecc, found.mig, found.nvlinks) == (3, 16, None, None, None)
    assert dict(found.gaps)["nvmlDeviceGetPersistenceMode"] == "Unknown Error"


@pytest.mark.parametrize(
    ("fields", "links", "speed"),
    [({"170": 10}, 10, None), ({"170": 2, "171": [1, 0], "172": [45000, 1]}, 1, 45000),
     ({"170": 2, "171": [0, 0]}, 0, None), ({"170": 0}, 0, None), ({}, None, None), ({"170": 10**9}, None, None)],
)  # fmt: skip
def test_c2c_links_that_are_up_are_counted(fields: dict[str, Any], links: int | None, speed: float | None) -> None:
    found = board(fields=fields)
    assert (found.c2c_links, found.c2c_mb_s) == (links, speed)


def test_links_that_are_down_are_told_from_links_that_are_not_there() -> None:
    found = board(nvmlDeviceGetNvLinkState=[1, 1, 0, 1])
    assert (found.nvlinks, found.nvlinks_total) == (3, 4)
    assert board(nvmlDeviceGetNvLinkState=[]).nvlinks is None


def test_a_link_count_that_breaks_off_is_no_count() -> None:
    class Breaks(FakeNvml):
        def _nvmlDeviceGetNvLinkState(self, handle: dict[str, Any], link: int) -> int:
            if link == 5:
                raise error("Unknown")
            return 1

    found = read_gpus(Breaks("dgx")).boards[0]
    assert (found.nvlinks, found.nvlinks_total) == (None, None)


def test_uuids_are_hashed_and_tell_boards_apart() -> None:
    for name in MACHINES:
        found = read_gpus(FakeNvml(name))
        assert "GPU-" not in repr(found)
        assert "MIG-" not in repr(found)
        assert len({one.uuid_hash for one in found.boards}) == len(found.boards)


@pytest.mark.parametrize("name", BOARD)
def test_every_question_may_go_unanswered_alone(name: str) -> None:
    for machine in ("mig", "gh200"):
        fake = FakeNvml(machine)
        whole = read_gpus(fake).boards
        for kind in ERRORS:
            found = read_gpus(FakeNvml(machine, {name: kind}))
            assert found.present is True
            assert len(found.boards) == len(whole)
            hit = [one for one in found.boards if dict(one.gaps).get(name) == str(error(kind))]
            ends = name == "nvmlDeviceGetMigDeviceHandleByIndex" and kind in ("NotFound", "InvalidArgument")
            assert bool(hit) == (name in fake.calls and not ends)
        without = read_gpus(FakeNvml(machine, missing=(name,)))
        assert [one.name for one in without.boards] == ["unknown" if name == "nvmlDeviceGetName" else one.name
                                                       for one in whole]  # fmt: skip


@pytest.mark.parametrize("kind", sorted(ERRORS))
def test_nothing_answers_at_all(kind: str) -> None:
    found = read_gpus(FakeNvml("mig", dict.fromkeys(BOARD, kind)))
    assert [one.name for one in found.boards] == ["unknown"] * 8
    assert {(one.memory_bytes, one.max_gen, one.nvlinks, one.mig, one.uuid_hash) for one in found.boards} == {
        (None,) * 5
    }


def test_a_board_that_fell_off_the_bus_does_not_hide_the_others() -> None:
    machine = load("dgx")
    machine["boards"][3] = {"error": "GpuIsLost"}
    found = read_gpus(FakeNvml(machine))
    assert (found.boards[3].name, found.boards[3].gaps[0][1]) == ("unknown", "GPU is lost")
    assert found.boards[4].name == "NVIDIA H100 80GB HBM3"


def test_no_driver_no_boards_and_a_driver_that_does_not_start() -> None:
    missing = read_gpus(loads=lambda: False)
    assert missing.present is False
    assert "does not load" in missing.reason
    assert read_gpus(FakeNvml({"driver": "1", "cuda": 1, "boards": []})).present is False
    broken = read_gpus(FakeNvml("dgx", {"nvmlInit": "LibRmVersionMismatch"}))
    assert (broken.present, broken.boards) == (None, ())
    assert "mismatch" in broken.reason
    uncounted = read_gpus(FakeNvml("dgx", {"nvmlDeviceGetCount": "Unknown"}))
    assert uncounted.present is None
    assert "Unknown Error" in uncounted.reason


def test_system_questions_are_optional_too() -> None:
    found = read_gpus(FakeNvml("dgx", {"nvmlSystemGetDriverVersion": "Unknown"}, ("nvmlSystemGetCudaDriverVersion",)))
    assert (found.present, found.driver, found.cuda) == (True, None, None)


def test_an_instance_that_says_nothing_is_still_one() -> None:
    found = board(nvmlDeviceGetMigMode=[1, 0], mig=[{}])
    assert found.mig_instances == (MigInstance(),)
