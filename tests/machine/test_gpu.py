"""NVML answers some questions on some boards: each call may fail alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvbench.machine.gpu import read_gpus


class NVMLError(Exception):
    pass


class FakeNvml:
    """The module pynvml of a machine with ``boards``; functions named in ``refuse`` raise as NVML does."""

    NVMLError = NVMLError

    def __init__(self, boards: int = 1, refuse: tuple[str, ...] = (), init: str | None = None) -> None:
        self.boards, self.refuse, self.init, self.open = boards, refuse, init, 0
        self.answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": lambda: "580.65.06",
            "nvmlSystemGetCudaDriverVersion": lambda: 13000,
            "nvmlDeviceGetCount": lambda: self.boards,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda _: b"NVIDIA H200",
            "nvmlDeviceGetUUID": lambda index: f"GPU-0000-{index}",
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=150754820096),
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
            "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
            "nvmlDeviceGetEccMode": lambda _: [1, 1],
            "nvmlDeviceGetMigMode": lambda _: [0, 0],
            "nvmlDeviceGetPowerManagementLimit": lambda _: 650000,
            "nvmlDeviceGetPowerManagementDefaultLimit": lambda _: 700000,
            "nvmlDeviceGetPersistenceMode": lambda _: 1,
            "nvmlDeviceGetPciInfo": lambda _: SimpleNamespace(busId="00000000:01:00.0"),
            "nvmlDeviceGetNvLinkState": self._nvlink,
            "nvmlDeviceGetFieldValues": lambda *_: [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=10))],
        }

    def _nvlink(self, _: int, link: int) -> int:
        if link >= 18:
            raise NVMLError("Invalid Argument")
        return int(link < 17)

    def nvmlInit(self) -> None:
        if self.init:
            raise NVMLError(self.init)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def __getattr__(self, name: str) -> Any:
        if name in self.refuse:

            def refused(*_: Any) -> None:
                raise NVMLError("Not Supported")

            return refused
        try:
            return self.answers[name]
        except KeyError:
            raise AttributeError(name) from None


def test_a_board_that_answers_everything() -> None:
    nvml = FakeNvml(2)
    found = read_gpus(nvml)
    assert (found.present, found.driver, found.cuda, len(found.boards)) == (True, "580.65.06", "13.0", 2)
    board = found.boards[0]
    assert (board.name, board.memory_bytes, board.max_gen, board.max_width) == ("NVIDIA H200", 150754820096, 5, 16)
    assert (board.nvlinks, board.c2c_links, board.ecc, board.mig) == (17, 10, True, False)
    assert (board.power_limit_w, board.default_power_limit_w) == (650.0, 700.0)
    assert board.gaps == ()
    assert nvml.open == 0


def test_uuids_are_hashed_and_tell_boards_apart() -> None:
    found = read_gpus(FakeNvml(2))
    assert "GPU-" not in repr(found)
    assert found.boards[0].uuid_hash != found.boards[1].uuid_hash


def test_every_question_may_go_unanswered_alone() -> None:
    for name in FakeNvml().answers:
        found = read_gpus(FakeNvml(1, refuse=(name,)))
        if name == "nvmlDeviceGetCount":
            assert found.present is None
            assert "Not Supported" in found.reason
        elif not name.startswith("nvmlSystem"):
            assert found.present is True
            assert (name, "Not Supported") in found.boards[0].gaps


def test_all_at_once_and_functions_this_package_does_not_have() -> None:
    nvml = FakeNvml(1, refuse=tuple(n for n in FakeNvml().answers if n not in ("nvmlDeviceGetCount",)))
    assert read_gpus(nvml).boards[0].name == "unknown"
    old = FakeNvml(1)
    del old.answers["nvmlDeviceGetMigMode"]
    board = read_gpus(old).boards[0]
    assert board.mig is None
    assert ("nvmlDeviceGetMigMode", "not in this nvidia-ml-py") in board.gaps


def test_no_driver_no_boards_and_a_driver_that_does_not_start() -> None:
    missing = read_gpus(loads=lambda: False)
    assert missing.present is False
    assert "does not load" in missing.reason
    assert read_gpus(FakeNvml(0)).present is False
    broken = read_gpus(FakeNvml(1, init="Driver/library version mismatch"))
    assert broken.present is None
    assert "mismatch" in broken.reason
