"""NVIDIA facts through NVML, where its library loads. Every call is optional: boards differ in what they answer."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_FIELD_C2C_LINK_COUNT = 170  # NVML_FI_DEV_C2C_LINK_COUNT of nvml.h, CUDA 12.3 and later
_MAX_NVLINKS = 36  # Rubin-class boards; NVML answers "invalid argument" beyond what a board has


@dataclass(frozen=True, slots=True)
class Gpu:
    """One board. None means that the board or this driver does not say; ``gaps`` holds (call, reason).

    ``max_gen`` and ``max_width`` are what board **and** slot can do, not the present state: an idle link drops.
    ``uuid_hash`` tells boards apart without publishing a serial number.
    """

    name: str
    memory_bytes: int | None = None
    max_gen: int | None = None
    max_width: int | None = None
    nvlinks: int | None = None
    c2c_links: int | None = None
    ecc: bool | None = None
    mig: bool | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    persistence: bool | None = None
    uuid_hash: str | None = None
    bus_id: str | None = None
    gaps: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Gpus:
    """All boards NVML lists. ``present`` is None when that cannot be told; ``reason`` says why there is no list."""

    present: bool | None
    boards: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    reason: str = ""


@dataclass(slots=True)
class _Asker:
    """Calls NVML functions and collects what does not answer."""

    nvml: Any
    gaps: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, name: str, *arguments: Any, silent: bool = False) -> Any:
        try:
            return getattr(self.nvml, name)(*arguments)
        except AttributeError:
            reason = "not in this nvidia-ml-py"
        except (self.nvml.NVMLError, OSError, ValueError, TypeError, UnicodeDecodeError) as error:
            reason = str(error)[:120]
        if not silent:
            self.gaps.append((name, reason))
        return None


def library_loads() -> bool:
    """Return whether libnvidia-ml is there: the cheapest and safest probe for a driver."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def read_gpus(nvml: Any = None, loads: Callable[[], bool] = library_loads) -> Gpus:
    """Return the boards of this machine; ``nvml`` stands in for the module pynvml. Never raises."""
    if nvml is None:
        if not loads():
            return Gpus(False, reason="libnvidia-ml.so.1 does not load: no NVIDIA driver here")
        try:
            import pynvml as nvml  # type: ignore[no-redef]  # 30 ms: only where there is a driver
        except ImportError as error:
            return Gpus(None, reason=f"nvidia-ml-py does not import: {error}")
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        # "driver/library version mismatch" after an update without reboot ends here
        return Gpus(None, reason=f"nvmlInit: {error}")
    try:
        return _boards(nvml)
    finally:
        _Asker(nvml)("nvmlShutdown")


def _boards(nvml: Any) -> Gpus:
    ask = _Asker(nvml)
    driver = _text(ask("nvmlSystemGetDriverVersion"))
    version = ask("nvmlSystemGetCudaDriverVersion")
    cuda = f"{version // 1000}.{version % 1000 // 10}" if isinstance(version, int) else None
    count = ask("nvmlDeviceGetCount")
    if not isinstance(count, int):
        return Gpus(
            None, driver=driver, cuda=cuda, reason=f"nvmlDeviceGetCount: {ask.gaps[-1][1] if ask.gaps else '?'}"
        )
    boards = tuple(_board(nvml, index) for index in range(count))
    return Gpus(count > 0, boards, driver, cuda, "" if count else "the driver lists no GPU")


def _board(nvml: Any, index: int) -> Gpu:
    ask = _Asker(nvml)
    handle = ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return Gpu(name="unknown", gaps=tuple(ask.gaps))
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    ecc, mig = ask("nvmlDeviceGetEccMode", handle), ask("nvmlDeviceGetMigMode", handle)
    limit = ask("nvmlDeviceGetPowerManagementLimit", handle)
    default_limit = ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)
    persistence = ask("nvmlDeviceGetPersistenceMode", handle)
    uuid = _text(ask("nvmlDeviceGetUUID", handle))
    pci = ask("nvmlDeviceGetPciInfo", handle)
    return Gpu(
        name=_text(ask("nvmlDeviceGetName", handle)) or "unknown",
        memory_bytes=int(memory.total) if memory is not None else None,
        max_gen=_int(ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)),
        max_width=_int(ask("nvmlDeviceGetMaxPcieLinkWidth", handle)),
        nvlinks=_nvlinks(ask, handle),
        c2c_links=_c2c_links(ask, handle),
        ecc=bool(ecc[0]) if isinstance(ecc, (list, tuple)) and ecc else None,
        mig=bool(mig[0]) if isinstance(mig, (list, tuple)) and mig else None,
        power_limit_w=limit / 1000 if isinstance(limit, int) else None,
        default_power_limit_w=default_limit / 1000 if isinstance(default_limit, int) else None,
        persistence=bool(persistence) if persistence is not None else None,
        uuid_hash=hashlib.sha256(uuid.encode()).hexdigest()[:12] if uuid else None,
        bus_id=_text(getattr(pci, "busId", None)),
        gaps=tuple(ask.gaps),
    )


def _nvlinks(ask: _Asker, handle: Any) -> int | None:
    """Links that are up; None when the first link gives no answer (boards without NVLink say "not supported")."""
    active = 0
    for link in range(_MAX_NVLINKS):
        state = ask("nvmlDeviceGetNvLinkState", handle, link, silent=link > 0)
        if state is None:
            return None if link == 0 else active
        active += bool(state)
    return active


def _c2c_links(ask: _Asker, handle: Any) -> int | None:
    values = ask("nvmlDeviceGetFieldValues", handle, [_FIELD_C2C_LINK_COUNT])
    try:
        answer = values[0]
        return int(answer.value.uiVal) if answer.nvmlReturn == 0 else None
    except (TypeError, IndexError, AttributeError):
        return None


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):  # nvidia-ml-py before 11.5 returned bytes
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else None


def _int(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None
