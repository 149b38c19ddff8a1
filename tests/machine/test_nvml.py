"""Asking NVML: every refusal is a gap with a reason, and the fake that stands in for it is held to the real package."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pynvml
import pytest

from kvbench.machine import nvml
from kvbench.machine.nvml import Asker, use, uuid_hash
from tests.machine.fake_nvml import ERRORS, FUNCTIONS, FakeNvml, error

PACKAGE = Path(nvml.__file__).parent


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_fake_takes_the_arguments_of_the_real_function(name: str) -> None:
    real = inspect.signature(getattr(pynvml, name)).parameters.values()
    required = sum(parameter.default is parameter.empty for parameter in real)
    special = getattr(FakeNvml, f"_{name}", None)
    taken = len(inspect.signature(special).parameters) - 1 if special else 1
    assert required <= taken <= len(real)


def test_every_function_the_package_asks_is_in_the_fake_and_in_nvidia_ml_py() -> None:
    asked = {
        name
        for path in PACKAGE.glob("*.py")
        for name in re.findall(r"\"(nvml(?:Device|System|Init|Shutdown)\w*)\"", path.read_text())
    }
    assert asked == set(FUNCTIONS) - {"nvmlInit"}  # which is called by name, because nothing can go on without it
    assert all(hasattr(pynvml, name) for name in asked)


def test_field_ids_and_bits_are_those_of_the_header() -> None:
    from kvbench.machine import gpu, nvml_state

    assert gpu._C2C_LINK_COUNT == pynvml.NVML_FI_DEV_C2C_LINK_COUNT
    assert gpu._C2C_STATUS == pynvml.NVML_FI_DEV_C2C_LINK_GET_STATUS
    assert gpu._C2C_MAX_BW == pynvml.NVML_FI_DEV_C2C_LINK_GET_MAX_BW
    assert gpu._NVLINK_SPEED_COMMON == pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
    assert [
        pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL, pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN,
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN,
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN,
    ] == nvml_state._SLOWDOWN_COUNTERS  # fmt: skip
    assert sum(nvml_state.REASONS) == pynvml.nvmlClocksEventReasonAll
    assert pynvml.nvmlClocksEventReasonSwPowerCap == nvml_state.POWER_CAP
    assert (
        pynvml.nvmlClocksEventReasonHwSlowdown | pynvml.nvmlClocksEventReasonSwThermalSlowdown
        | pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
    ) == nvml_state.SLOWDOWN  # fmt: skip
    assert gpu._ADDRESSING[2] == "ats"
    assert pynvml.NVML_DEVICE_ADDRESSING_MODE_ATS == 2
    assert (gpu._CLOCK_SM, gpu._CLOCK_MEMORY) == (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM)
    assert {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND} < nvml._LASTING
    assert {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED} == nvml._LOST


def test_nvml_is_closed_however_it_ends() -> None:
    fake = FakeNvml("dgx")

    def fails() -> None:
        with use(fake) as found:
            assert (found.module, fake.open) == (fake, 1)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert fake.open == 0
    with use(FakeNvml("dgx", {"nvmlShutdown": "Uninitialized"})):
        pass


def test_without_a_driver_nothing_is_asked() -> None:
    with use(loads=lambda: False) as found:
        assert (found.module, found.absent) == (None, True)
    with use(FakeNvml("dgx", {"nvmlInit": "LibRmVersionMismatch"})) as found:
        assert (found.module, found.absent) == (None, False)
        assert "version mismatch" in found.reason


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_error_is_a_gap_and_lasting_ones_are_not_asked_again(name: str) -> None:
    fake = FakeNvml("dgx", {"nvmlDeviceGetName": name})
    fake.nvmlInit()
    ask = Asker(fake)
    assert [ask.text("nvmlDeviceGetName", fake.boards[0]) for _ in range(3)] == [None] * 3
    assert ask.gaps == [("nvmlDeviceGetName", str(error(name)))]
    assert fake.calls["nvmlDeviceGetName"] == (1 if name in ("NotSupported", "FunctionNotFound") else 3)
    assert ask.lost == (name == "GpuIsLost")


def _mask(ask: Asker, fake: FakeNvml) -> tuple[int, ...] | None:
    fake.nvmlDeviceGetCpuAffinity = lambda handle, words: 7  # not the array it should be
    return ask.mask("nvmlDeviceGetCpuAffinity", fake.boards[0], 64)


def test_answers_of_another_kind_are_no_answers() -> None:
    fake = FakeNvml({"driver": "1", "cuda": 1, "boards": [{"nvmlDeviceGetName": 7, "nvmlDeviceGetPowerUsage": "7"}]})
    fake.nvmlInit()
    ask = Asker(fake)
    assert ask.text("nvmlDeviceGetName", fake.boards[0]) is None
    assert ask.integer("nvmlDeviceGetPowerUsage", fake.boards[0]) is None
    assert _mask(ask, fake) is None
    assert ask.fields(fake.boards[0], [1, 2]) == [None, None]
    assert ask("nvmlDeviceGetPowerUsage", *range(9)) is None  # too many arguments: a TypeError is a gap too
    assert nvml.as_text(b"old \xff") == "old \N{REPLACEMENT CHARACTER}"


def test_hashes_tell_boards_apart() -> None:
    assert uuid_hash(None) is None
    assert uuid_hash("GPU-1") != uuid_hash("GPU-2")
