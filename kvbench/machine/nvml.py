"""NVML through nvidia-ml-py, every question optional: boards, drivers and systems differ in what they answer."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# Error codes of nvml.h that stay as long as the driver is loaded: asking again only costs time.
_LASTING = frozenset({3, 13, 26})  # NOT_SUPPORTED, FUNCTION_NOT_FOUND, DEPRECATED
_LOST = frozenset({15, 16})  # GPU_IS_LOST, RESET_REQUIRED
INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 2, 3, 6
# nvmlValueType_t of nvml.h: which member of the union holds the answer
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


@dataclass(frozen=True, slots=True)
class Nvml:
    """NVML as it can be asked here. ``module`` is None where it cannot; ``absent`` where there is no driver at all."""

    module: Any
    absent: bool = False
    reason: str = ""


def library_loads() -> bool:
    """Return whether libnvidia-ml is there: the cheapest and safest probe for a driver."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def use(nvml: Any = None, loads: Callable[[], bool] | None = None) -> Iterator[Nvml]:
    """Open NVML for the length of the block; ``nvml`` stands in for the module pynvml. Opening never raises."""
    found = start(nvml, loads)
    try:
        yield found
    finally:
        stop(found)


def start(nvml: Any = None, loads: Callable[[], bool] | None = None) -> Nvml:
    """Initialise NVML, to be ended with :func:`stop`. Never raises; what is in the way is the ``reason``."""
    if nvml is None:
        if not (loads or library_loads)():
            return Nvml(None, absent=True, reason="libnvidia-ml.so.1 does not load: no NVIDIA driver here")
        try:
            import pynvml as nvml  # type: ignore[no-redef]  # 30 ms: only where there is a driver
        except ImportError as error:
            return Nvml(None, reason=f"nvidia-ml-py does not import: {error}")
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        # "driver/library version mismatch" after an update without reboot ends here
        return Nvml(None, reason=f"nvmlInit: {error}")
    return Nvml(nvml)


def stop(found: Nvml) -> None:
    """Give back what :func:`start` opened; a driver that is gone meanwhile is no reason to fail."""
    if found.module is not None:
        Asker(found.module)("nvmlShutdown")


@dataclass(slots=True)
class Asker:
    """Calls NVML functions about one board and collects what does not answer.

    ``gaps`` are (call, reason), each call once. A call that this board or driver will never answer is not made again.
    ``lost`` says that the board fell off the bus or needs a reset.
    """

    module: Any
    gaps: list[tuple[str, str]] = field(default_factory=list)
    lost: bool = False
    _never: set[str] = field(default_factory=set)

    def __call__(self, name: str, *arguments: Any, ends: tuple[int, ...] = ()) -> Any:
        """Return the answer, or None. ``ends`` are error codes that are an answer too (an index beyond the last)."""
        if name in self._never:
            return None
        lasting = False
        try:
            return getattr(self.module, name)(*arguments)
        except AttributeError:
            reason, lasting = "not in this nvidia-ml-py", True
        except (self.module.NVMLError, OSError, ValueError, TypeError, ctypes.ArgumentError) as error:
            code = getattr(error, "value", None)
            if code in ends:
                return None
            reason, lasting = str(error)[:120] or type(error).__name__, code in _LASTING
            self.lost = self.lost or code in _LOST
        if lasting:
            self._never.add(name)
        if not self.failed(name):
            self.gaps.append((name, reason))
        return None

    def failed(self, name: str) -> bool:
        """Return whether ``name`` has gone unanswered."""
        return any(call == name for call, _ in self.gaps)

    def integer(self, name: str, *arguments: Any) -> int | None:
        value = self(name, *arguments)
        return int(value) if isinstance(value, int) else None

    def text(self, name: str, *arguments: Any) -> str | None:
        return as_text(self(name, *arguments))

    def fields(self, handle: Any, wanted: list[int | tuple[int, int]]) -> list[int | float | None]:
        """Return one number for each field id (or (id, scope)); None where the board has none."""
        answers = self("nvmlDeviceGetFieldValues", handle, wanted)
        try:
            found = [_number(answer) for answer in answers]
        except TypeError:
            found = []
        return found if len(found) == len(wanted) else [None] * len(wanted)

    def mask(self, name: str, handle: Any, bits: int, *more: Any) -> tuple[int, ...] | None:
        """Return the numbers of the bits set in an affinity mask of at least ``bits`` bits."""
        words = self(name, handle, -(-bits // 64), *more)
        try:
            return tuple(
                64 * place + bit for place, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1
            )
        except TypeError:
            return None


def _number(answer: Any) -> int | float | None:
    if getattr(answer, "nvmlReturn", None) != 0:
        return None
    kind = getattr(answer, "valueType", 1)
    value = getattr(answer.value, _MEMBERS[kind], None) if 0 <= kind < len(_MEMBERS) else None
    return value if isinstance(value, int | float) else None


def as_text(value: Any) -> str | None:
    """Return a string of NVML, None for anything else; nvidia-ml-py before 11.5 returned bytes."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else None


def uuid_hash(uuid: str | None) -> str | None:
    """Return 12 hex digits that tell boards apart without publishing a serial number; None without a UUID."""
    return hashlib.sha256(uuid.encode()).hexdigest()[:12] if uuid else None
