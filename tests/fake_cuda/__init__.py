"""A libcuda for tests: compiled from this folder against the real cuda.h, controlled from Python.

:func:`library` builds it (once per source and header), :class:`Fake` is the handle tests hold: faults at the k-th call,
settings, the call trace, counters of what is alive. Everything else goes through the driver interface itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvbench.memory.cuda.device import Device
from kvbench.memory.cuda.driver import Driver
from kvbench.memory.cuda.service import Service
from tests.needs import missing_gcc, require

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kvbench" / "kernels" / "cuda"
IMAGE = b"FAKE kv_block kv_flush kv_fill kv_checksum kv_checksum_end"
FLAGS = [
    "-std=gnu11",
    "-O1",
    "-g",
    "-fPIC",
    "-Wl,-Bsymbolic",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Werror",
]


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


@cache
def header() -> tuple[Path | None, str]:
    """Return the folder of a cuda.h of CUDA 13 (in the triton or an nvidia wheel), or None and why there is none."""
    triton, nvidia = _package("triton"), _package("nvidia")
    folders = [triton / "backends" / "nvidia" / "include"] if triton else []
    folders += sorted(nvidia.glob("*/include")) if nvidia else []
    reason = "no wheel with cuda.h is installed (triton, nvidia-cuda-runtime)"
    for folder in folders:
        if (folder / "cuda.h").is_file() and (folder / "cudaTypedefs.h").is_file():
            text = (folder / "cuda.h").read_text(encoding="utf-8", errors="replace")
            found = re.search(r"^#define CUDA_VERSION (\d+)", text, re.MULTILINE)
            if found and int(found[1]) >= 13000:
                return folder, ""
            reason = f"the cuda.h of the wheels is of CUDA {found[1] if found else '?'}, and 13000 is needed"
    return None, reason


def compiler() -> str:
    """Return the C compiler, or skip (``KVBENCH_REQUIRE=gcc``: fail)."""
    require("gcc", missing_gcc())
    return next(found for found in map(shutil.which, ("gcc", "cc", "clang")) if found)


def include() -> Path:
    """Return the folder of cuda.h, or skip (``KVBENCH_REQUIRE=cuda_header``: fail)."""
    folder, reason = header()
    require("cuda_header", None if folder else reason)
    assert folder is not None
    return folder


def library() -> Path:
    """Return the compiled libcuda.so.1; skips where compiler or header is missing. A wrong signature fails here."""
    gcc, folder = compiler(), include()
    sources = sorted(HERE.glob("*.c"))
    digest = hashlib.sha256(" ".join((gcc, str(folder), *FLAGS)).encode())
    for path in (*sources, HERE / "fake.h", KERNELS / "service.cu"):
        digest.update(path.read_bytes())
    # No soname: by it the loader would hand this library to whoever asks for libcuda.so.1 in this process. NVRTC does,
    # and dies of it; a probe for a driver would find one.
    target = Path(os.environ["XDG_CACHE_HOME"]) / "fake_cuda" / digest.hexdigest()[:16] / "libcuda.so.1"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f"building.{os.getpid()}")  # another session may build the same one
        command = [gcc, *FLAGS, "-shared", f"-I{folder}", f"-I{KERNELS}"]
        done = subprocess.run(
            [*command, "-o", str(fresh), *map(str, sources)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        fresh.replace(target)
    return target


class _Call(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("thread", ctypes.c_uint64), ("args", ctypes.c_uint64 * 4))


@dataclass(frozen=True, slots=True)
class Call:
    """One traced call: the entry point, the native thread, its first four arguments."""

    name: str
    thread: int
    args: tuple[int, ...]


class Fake:
    """Controls of the loaded library at ``path``; made fresh (``reset``) for each test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._c = ctypes.CDLL(str(path))
        for name, returns, arguments in (
            ("fake_set", ctypes.c_int, (ctypes.c_char_p, ctypes.c_int64)),
            ("fake_fail", None, (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int)),
            ("fake_fail_op", None, (ctypes.c_int64, ctypes.c_int)),
            ("fake_fired", ctypes.c_int, ()),
            ("fake_calls", ctypes.c_uint64, ()),
            ("fake_call", ctypes.POINTER(_Call), (ctypes.c_uint64,)),
            ("fake_forget", None, ()),
            ("fake_reset", None, ()),
            ("fake_live", ctypes.c_int64, (ctypes.c_char_p,)),
            ("fake_live_at", ctypes.c_int64, (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))),
            ("fake_peek", ctypes.c_int, (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)),
            ("fake_poke", ctypes.c_int, (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)),
        ):
            function = getattr(self._c, name)
            function.restype, function.argtypes = returns, arguments

    def reset(self) -> None:
        """Forget everything: streams are stopped in the middle of their work, memory is unmapped, settings default."""
        self._c.fake_reset()

    def set(self, **settings: int) -> None:
        """Change settings (fields of ``Settings`` in fake.h)."""
        for name, value in settings.items():
            assert self._c.fake_set(name.encode(), value) == 0, f"no setting {name}"

    def fail(
        self, k: int = 1, code: int = 999, *, call: str | None = None, keep: bool = False, sticky: bool = False
    ) -> None:
        """Let the ``k``-th call from now on (of ``call``) return ``code``.

        A call that gives something back does so even when told to fail, unless ``keep``. ``sticky``: every later call
        in the context fails with it too.
        """
        self._c.fake_fail(call.encode() if call else None, k, code, keep, sticky)

    def fail_op(self, k: int, code: int) -> None:
        """Let the ``k``-th operation that a stream executes break the context with ``code``."""
        self._c.fake_fail_op(k, code)

    @property
    def fired(self) -> bool:
        """Whether the armed fault has happened."""
        return bool(self._c.fake_fired())

    def forget(self) -> None:
        """Begin a new trace."""
        self._c.fake_forget()

    def trace(self) -> list[Call]:
        """Return the calls since the beginning or :meth:`forget`."""
        calls = []
        for i in range(self._c.fake_calls()):
            found = self._c.fake_call(i)
            assert found, "the trace is full"
            calls.append(Call(found[0].name.decode(), found[0].thread, tuple(found[0].args)))
        return calls

    def names(self) -> list[str]:
        """Return the names of the traced calls."""
        return [call.name for call in self.trace()]

    def live(self) -> dict[str, int]:
        """Return what is alive, by kind; empty when nothing leaks."""
        found, name = {}, ctypes.c_char_p()
        for i in range(16):
            count = self._c.fake_live_at(i, ctypes.byref(name))
            if name.value and count:
                found[name.value.decode()] = count
        return found

    def peek(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return what a device address holds."""
        out = np.empty(nbytes, np.uint8)
        assert self._c.fake_peek(address, out.ctypes.data, nbytes) == 0, f"nothing at {address:#x}"
        return out

    def poke(self, address: int, data: bytes) -> None:
        """Change what a device address holds."""
        assert self._c.fake_poke(address, data, len(data)) == 0, f"nothing at {address:#x}"


@contextmanager
def fake(**settings: int) -> Iterator[Fake]:
    """A fresh fake driver with ``settings``; everything still alive in it goes with the block."""
    made = Fake(library())
    made.reset()
    made.set(**settings)
    try:
        yield made
    finally:
        made.reset()


@dataclass(frozen=True, slots=True)
class Rig:
    """A fake driver in use."""

    fake: Fake
    driver: Driver
    device: Device
    service: Service


@contextmanager
def rig(**settings: int) -> Iterator[Rig]:
    """An opened device with its service kernels. A test that ends well must have left nothing behind."""
    with fake(**settings) as made:
        driver = Driver(made.path)
        with Device(driver) as device, Service(device, IMAGE) as service:
            yield Rig(made, driver, device, service)
        assert driver.poisoned is not None or made.live() == {}
