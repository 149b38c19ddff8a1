"""The CUDA driver by ctypes: entry points at explicit versions, every call checked, nothing after a device error.

``cuMemcpyBatchAsync`` shows why versions are explicit: CUDA 12.8 and 13.0 gave one name two argument lists, and which
of them a plain symbol has depends on the suffix (trap T40).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError, Unavailable
from kvbench.memory.cuda.entries import ENTRIES, GET_PROC_ADDRESS, STICKY, Entry, c_type

LIBRARY = "libcuda.so.1"
_LEGACY_STREAM = 1  # CU_GET_PROC_ADDRESS_LEGACY_STREAM: stream 0 means what it does for plain symbols


class CudaError(KvbenchError):
    """A driver call failed: ``call``, its ``code`` and the ``name`` cuda.h gives the code."""

    def __init__(self, call: str, code: int, name: str, text: str, *, mend: str = "") -> None:
        self.call, self.code, self.name = call, code, name
        super().__init__(f"{call}: {name} ({code}), {text}", where="CUDA driver", mend=mend)


class PoisonedDevice(CudaError):
    """The device reported an error after which nothing works in this process: the worker has to be replaced.

    Every number taken since the last successful check is void. Raised again, without calling the driver, by every
    later call.
    """

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__(call, code, name, text, mend="this process cannot use the GPU any more: go on in a new worker")


def _prototype(entry: Entry) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int, *(c_type(kind) for kind in entry.arguments))


class Driver:
    """An initialised driver. ``version`` is the CUDA version it serves, 1000 x major + 10 x minor.

    ``library`` is a name or path for the dynamic loader. Raises Unavailable when it does not load, has no device, or
    lacks an entry point kvbench cannot do without; CudaError for anything else it answers. Initialises CUDA in this
    process: a later fork cannot use it.
    """

    def __init__(self, library: str | Path = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise Unavailable(
                "no NVIDIA driver", where="CUDA", got=str(error), mend="install the driver, or pass the GPU in"
            ) from error
        self.poisoned: PoisonedDevice | None = None
        self._functions: dict[str, Any] = {}
        self._addresses: dict[str, int] = {}
        for key in ("cuGetErrorName", "cuGetErrorString", "cuDriverGetVersion"):
            self._bind(key, self._symbol(ENTRIES[key]))
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.version = version.value
        self._resolve()
        code = self._functions["cuInit"](0)
        if code:
            raise Unavailable(
                "the NVIDIA driver does not start", where="CUDA", got=f"cuInit: {self._name(code)} ({code}), "
                f"{self._text(code)}", mend="see nvidia-smi",
            )  # fmt: skip

    # -- entry points --------------------------------------------------------------------------------------------

    def _symbol(self, entry: Entry) -> int | None:
        """Return the address of the plain symbol; None where the library has none."""
        try:
            function = getattr(self._library, entry.symbol)
        except AttributeError:
            return None
        return ctypes.cast(function, ctypes.c_void_p).value

    def _resolve(self) -> None:
        ask = self._symbol(GET_PROC_ADDRESS)
        lookup = None if ask is None else _prototype(GET_PROC_ADDRESS)(ask)
        for key, entry in ENTRIES.items():
            if entry.version > self.version:
                address = None  # asking for it would be an invalid argument, and a plain symbol a stub
            elif lookup is None:
                address = self._symbol(entry)  # a driver before CUDA 12
            else:
                found, status = ctypes.c_void_p(), ctypes.c_int()
                code = lookup(
                    entry.name.encode(), ctypes.byref(found), entry.version, _LEGACY_STREAM, ctypes.byref(status)
                )
                if code:
                    raise self.error(f"cuGetProcAddress({entry.name})", code)
                address = found.value
            if address is None and not entry.optional:
                raise Unavailable(
                    f"the NVIDIA driver lacks {entry.name}", where="CUDA", got=f"a driver of CUDA {self.version_text}",
                    expected=f"CUDA {max(11000, entry.version) // 1000} or later", mend="update the driver",
                )  # fmt: skip
            self._bind(key, address)

    def _bind(self, key: str, address: int | None) -> None:
        if address is not None:
            self._addresses[key] = address
            self._functions[key] = _prototype(ENTRIES[key])(address)

    @property
    def version_text(self) -> str:
        return f"{self.version // 1000}.{self.version % 1000 // 10}"

    def has(self, key: str) -> bool:
        """Return whether this driver has the entry point ``key`` of :data:`entries.ENTRIES`."""
        return key in self._functions

    def address(self, key: str) -> int:
        """Return the address of an entry point, for compiled loops. Raises Unavailable where the driver lacks it."""
        if key not in self._addresses:
            entry = ENTRIES[key]
            raise Unavailable(
                f"the NVIDIA driver lacks {entry.name}", where="CUDA", got=f"a driver of CUDA {self.version_text}",
                expected=f"CUDA {entry.version // 1000}.{entry.version % 1000 // 10} or later",
            )  # fmt: skip
        return self._addresses[key]

    # -- calls ---------------------------------------------------------------------------------------------------

    def code(self, key: str, *arguments: Any) -> int:
        """Call and return the CUresult unchecked. Raises PoisonedDevice, without a call, once a device error is known;
        Unavailable where the driver lacks ``key``."""
        if self.poisoned is not None:
            raise self.poisoned
        function = self._functions.get(key)
        if function is None:
            self.address(key)
        return int(function(*arguments))  # type: ignore[misc]

    def call(self, key: str, *arguments: Any) -> None:
        """Call and raise CudaError unless it succeeded, PoisonedDevice if nothing can succeed after it."""
        code = self.code(key, *arguments)
        if code:
            raise self.error(key.partition("@")[0], code)

    def check(self, call: str, code: int) -> None:
        """Do for ``code``, which a compiled loop brought back from ``call``, what :meth:`call` does."""
        if code:
            raise self.error(call, code)

    def error(self, call: str, code: int) -> CudaError:
        """Return the exception for ``code`` and remember it if the device is lost."""
        if code not in STICKY:
            return CudaError(call, code, self._name(code), self._text(code))
        found = PoisonedDevice(call, code, self._name(code), self._text(code))
        if self.poisoned is None:
            self.poisoned = found
        return found

    def _name(self, code: int) -> str:
        return self._string("cuGetErrorName", code) or f"CUresult {code}"

    def _text(self, code: int) -> str:
        return self._string("cuGetErrorString", code) or "an error this driver has no text for"

    def _string(self, key: str, code: int) -> str | None:
        text = ctypes.c_char_p()
        if self._functions[key](code, ctypes.byref(text)) or text.value is None:
            return None
        return text.value.decode("utf-8", "replace")

    def device_count(self) -> int:
        """Return how many devices the driver lists for this process (``CUDA_VISIBLE_DEVICES`` applied)."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value
