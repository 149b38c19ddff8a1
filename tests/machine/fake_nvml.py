"""A module object that answers as pynvml does on a machine described by ``fixtures/machine/<name>.nvml.json``.

Errors are those of the real nvidia-ml-py, which imports without a driver. What a fixture does not hold is refused with
its ``otherwise`` error. ``fail`` makes single functions fail on top of that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "machine"
ERRORS = {
    "NotSupported": pynvml.NVML_ERROR_NOT_SUPPORTED, "NotFound": pynvml.NVML_ERROR_NOT_FOUND,
    "Uninitialized": pynvml.NVML_ERROR_UNINITIALIZED, "Unknown": pynvml.NVML_ERROR_UNKNOWN,
    "GpuIsLost": pynvml.NVML_ERROR_GPU_IS_LOST, "NoPermission": pynvml.NVML_ERROR_NO_PERMISSION,
    "InvalidArgument": pynvml.NVML_ERROR_INVALID_ARGUMENT,
    "FunctionNotFound": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    "LibRmVersionMismatch": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
}  # fmt: skip
SYSTEM = (
    "nvmlInit", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion", "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
)  # fmt: skip
# every question about a board that kvbench asks
BOARD = (
    "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetGpuMaxPcieLinkGeneration", "nvmlDeviceGetEccMode",
    "nvmlDeviceGetMigMode", "nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetPowerManagementDefaultLimit",
    "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPersistenceMode", "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkVersion", "nvmlDeviceGetFieldValues", "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetMemoryBusWidth", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetAddressingMode", "nvmlDeviceGetVirtualizationMode", "nvmlDeviceGetCpuAffinity",
    "nvmlDeviceGetMemoryAffinity", "nvmlDeviceGetNumaNodeId", "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetAttributes",
)  # fmt: skip
STATE = (
    "nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetPcieReplayCounter", "nvmlDeviceGetComputeRunningProcesses",
)  # fmt: skip
FUNCTIONS = (*SYSTEM, *BOARD, *STATE)


def error(name: str) -> Exception:
    """Return the exception nvidia-ml-py raises for an error of ``ERRORS``."""
    made: Exception = pynvml.NVMLError(ERRORS[name])
    return made


def load(name: str) -> dict[str, Any]:
    """Return the description of a fixture."""
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.nvml.json").read_text())
    return found


class FakeNvml(ModuleType):
    """``machine``: ``driver``, ``cuda``, ``defaults`` and ``boards`` (answers by function name), ``otherwise``.

    ``fail``: function -> error name. ``missing``: functions this nvidia-ml-py does not have. ``calls`` counts.
    """

    NVMLError = pynvml.NVMLError

    def __init__(
        self, machine: str | Mapping[str, Any], fail: Mapping[str, str] | None = None, missing: Sequence[str] = ()
    ) -> None:
        super().__init__("pynvml")
        self.machine = load(machine) if isinstance(machine, str) else machine
        self.boards: list[dict[str, Any]] = [
            {**self.machine.get("defaults", {}), **board} for board in self.machine["boards"]
        ]
        self.fail = dict(fail or {})
        self.calls: dict[str, int] = {}
        self.open = 0
        for name in FUNCTIONS:
            if name not in missing:
                setattr(self, name, self._function(name))

    def _function(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            if name in self.fail:
                raise error(self.fail[name])
            if not self.open and name != "nvmlInit":
                raise error("Uninitialized")
            special = getattr(self, f"_{name}", None)
            return special(*arguments) if special else self._answer(name, *arguments)

        call.__name__ = name
        return call

    def _answer(self, name: str, handle: dict[str, Any], *more: Any) -> Any:
        if name not in handle:
            raise error(self.machine.get("otherwise", "NotSupported"))
        value = handle[name]
        if isinstance(value, dict) and "error" in value:
            raise error(value["error"])
        return value

    def _nvmlInit(self) -> None:
        self.open += 1

    def _nvmlShutdown(self) -> None:
        self.open -= 1

    def _nvmlSystemGetDriverVersion(self) -> Any:
        return self.machine["driver"]

    def _nvmlSystemGetCudaDriverVersion(self) -> Any:
        return self.machine["cuda"]

    def _nvmlDeviceGetCount(self) -> int:
        return len(self.boards)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self.boards):
            raise error("InvalidArgument")
        if "error" in self.boards[index]:
            raise error(self.boards[index]["error"])
        return self.boards[index]

    def _nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any]) -> Any:
        return SimpleNamespace(total=self._answer("nvmlDeviceGetMemoryInfo", handle))

    def _nvmlDeviceGetPciInfo(self, handle: dict[str, Any]) -> Any:
        return SimpleNamespace(busId=self._answer("nvmlDeviceGetPciInfo", handle))

    def _nvmlDeviceGetNvLinkState(self, handle: dict[str, Any], link: int) -> int:
        states: list[int] = self._answer("nvmlDeviceGetNvLinkState", handle)
        if link >= len(states):
            raise error("InvalidArgument")
        return states[link]

    def _nvmlDeviceGetNvLinkVersion(self, handle: dict[str, Any], link: int) -> Any:
        return self._answer("nvmlDeviceGetNvLinkVersion", handle)

    def _nvmlDeviceGetFieldValues(self, handle: dict[str, Any], wanted: Sequence[Any]) -> list[Any]:
        """Answers are in a board's ``fields``: id -> number, or id -> list by scope; else error 3 for that field."""
        known = handle.get("fields", {})
        answers = []
        for each in wanted:
            number, scope = each if isinstance(each, tuple) else (each, 0)
            value = known.get(str(number))
            if isinstance(value, list):
                value = value[scope] if scope < len(value) else None
            union = SimpleNamespace(uiVal=value, ullVal=value)
            answers.append(SimpleNamespace(nvmlReturn=3 if value is None else 0, valueType=3, value=union))
        return answers

    def _mask(self, name: str, handle: dict[str, Any], words: int) -> list[int]:
        mask = [0] * words
        for bit in self._answer(name, handle):
            mask[bit // 64] |= 1 << bit % 64
        return mask

    def _nvmlDeviceGetCpuAffinity(self, handle: dict[str, Any], words: int) -> list[int]:
        runs = self._answer("nvmlDeviceGetCpuAffinity", handle)
        bits = [cpu for first, last in runs for cpu in range(first, last + 1)]
        return self._mask("bits", {"bits": bits}, words)

    def _nvmlDeviceGetMemoryAffinity(self, handle: dict[str, Any], words: int, scope: int) -> list[int]:
        assert scope == pynvml.NVML_AFFINITY_SCOPE_NODE
        return self._mask("nvmlDeviceGetMemoryAffinity", handle, words)

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: dict[str, Any]) -> int:
        return 7 if "mig" in handle else int(self._answer("nvmlDeviceGetMaxMigDeviceCount", handle))

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, Any], index: int) -> dict[str, Any]:
        """A board's ``mig``: descriptions by index; None is a hole."""
        found = handle.get("mig", [])
        if index >= len(found) or found[index] is None:
            raise error("NotFound")
        child: dict[str, Any] = found[index]
        return child

    def _nvmlDeviceGetAttributes(self, handle: dict[str, Any]) -> Any:
        return SimpleNamespace(**self._answer("nvmlDeviceGetAttributes", handle))

    def _clock(self, name: str, handle: dict[str, Any], kind: int) -> Any:
        clocks = self._answer(name, handle)
        return clocks[{pynvml.NVML_CLOCK_SM: "sm", pynvml.NVML_CLOCK_MEM: "memory"}[kind]]

    def _nvmlDeviceGetMaxClockInfo(self, handle: dict[str, Any], kind: int) -> Any:
        return self._clock("nvmlDeviceGetMaxClockInfo", handle, kind)

    def _nvmlDeviceGetClockInfo(self, handle: dict[str, Any], kind: int) -> Any:
        return self._clock("nvmlDeviceGetClockInfo", handle, kind)

    def _nvmlDeviceGetTemperature(self, handle: dict[str, Any], sensor: int) -> Any:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._answer("nvmlDeviceGetTemperature", handle)
