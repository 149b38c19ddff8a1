"""Compile GPU kernels on a machine without a GPU, each batch in a child process.

In a child, because an unsupported instruction ends in SIGABRT of the compiling process ("LLVM ERROR: Cannot select"),
and because cuda.bindings without a driver has calls that poison later ones. NVRTC is used through
cuda.bindings.nvrtc alone: cuda.core asks for a driver and can hang without one.
"""

from __future__ import annotations

import base64
import ctypes.util
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbench import children
from kvbench.errors import KvbenchError, MissingExtra
from kvbench.kernels.gpu import child
from kvbench.kernels.gpu.arch import Arch
from kvbench.kernels.gpu.catalogue import GpuKernel
from kvbench.kernels.gpu.settings import triton_settings


@dataclass(frozen=True, slots=True)
class Built:
    """What one compilation left. ``reason`` is None when it worked, otherwise why not, on one line.

    ``binary``: cubin or hsaco; ``assembly``: PTX or AMD assembly; ``sass``: nvdisasm's text, None with
    ``sass_reason`` where no disassembler is at hand; ``log``: the assembler's; ``dynamic_shared``: bytes to ask for
    at launch. ``compiler`` names it with its version.
    """

    arch: str
    binary: bytes | None = None
    assembly: str | None = None
    sass: str | None = None
    sass_reason: str | None = None
    log: str = ""
    dynamic_shared: int = 0
    compiler: str = ""
    reason: str | None = None


def missing_nvrtc() -> str | None:
    """Return why NVRTC cannot compile here, None when bindings and library are installed (they are not loaded)."""
    if not _installed("cuda.bindings"):
        return "the package cuda-bindings is not installed"
    spec = importlib.util.find_spec("nvidia") if _installed("nvidia") else None
    wheels = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if any(any(p.glob("*/lib/libnvrtc.so*")) for p in wheels) or any(toolkit.glob("lib*/libnvrtc.so*")):
        return None
    return None if ctypes.util.find_library("nvrtc") else "no libnvrtc (the package nvidia-cuda-nvrtc carries it)"


def missing_triton() -> str | None:
    """Return why Triton cannot compile here, None when it is installed (it is not imported)."""
    return None if _installed("triton") else "the package triton is not installed"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


def disassembler() -> str | None:
    """Return the path of nvdisasm: the one in the triton wheel, or one on the PATH; None without."""
    spec = importlib.util.find_spec("triton") if _installed("triton") else None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "backends" / "nvidia" / "bin" / "nvdisasm"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    return shutil.which("nvdisasm")


def cuda(sources: Sequence[tuple[str, Arch]], timeout: float = 120.0) -> list[Built]:
    """Compile each (CUDA C++ text, architecture) with NVRTC; all entries of a text are in one cubin.

    Raises MissingExtra without NVRTC. A text that does not compile is a Built with a reason.
    """
    if missing_nvrtc():
        raise MissingExtra("cuda-bindings with nvidia-cuda-nvrtc", "compile", "compiling CUDA C++")
    return _compile([child.Job("nvrtc", arch.name, text=text) for text, arch in sources], timeout)


def triton(kernels: Sequence[tuple[GpuKernel, Arch]], timeout: float = 120.0) -> list[Built]:
    """Compile each (Triton kernel, architecture) ahead of time. Raises MissingExtra without triton."""
    if missing_triton():
        raise MissingExtra("triton", "compile", "compiling Triton kernels")
    return _compile([triton_job(kernel, arch) for kernel, arch in kernels], timeout)


def triton_job(kernel: GpuKernel, arch: Arch) -> child.Job:
    """Return what the child needs to compile ``kernel``: its file, types, constants, and the aligned pointers."""
    names = [a.name for a in kernel.arguments]
    gluon = kernel.form == "gluon"
    return child.Job(
        "gluon" if gluon else "triton",
        arch.name,
        path=str(kernel.source),
        entry=kernel.entry,
        types=dict(zip(names, kernel.types, strict=True)),
        constants=dict(kernel.constants),
        aligned=[k for k, a in enumerate(kernel.arguments) if a.kind == "pointer" and a.align % 16 == 0],
        # Groups of warps stand beside those the kernel begins with.
        warps=int(dict(kernel.constants)["WARPS"]) if gluon else kernel.block // arch.warp,
        backend=arch.backend,
        number=arch.number,
        warp=arch.warp,
        registers=kernel.registers,
    )


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvbench-build-") as name:
        yield Path(name)


def _compile(jobs: Sequence[child.Job], timeout: float) -> list[Built]:
    """Run the jobs in children; one that kills its child costs that job alone, a new child goes on behind it."""
    with _folder() as folder:
        done: list[Built] = []
        while len(done) < len(jobs):
            ended = _run_child(jobs[len(done) :], folder, timeout)
            results = sorted(folder.glob("*.json"), key=lambda p: int(p.stem))
            for job, path in zip(jobs[len(done) :], results, strict=False):
                done.append(_built(job.arch, json.loads(path.read_text(encoding="utf-8"))))
                path.unlink()
            if ended is not None and len(done) < len(jobs):
                done.append(Built(jobs[len(done)].arch, reason=ended))
        return done


def _built(arch: str, result: dict[str, Any]) -> Built:
    binary = result.pop("binary")
    return Built(arch=arch, binary=base64.b64decode(binary) if binary else None, **result)


def _run_child(jobs: Sequence[child.Job], folder: Path, timeout: float) -> str | None:
    """Run one child over ``jobs``; it leaves 0.json, 1.json, ... Return None when it finished, else how it ended."""
    request = {"folder": str(folder), "nvdisasm": disassembler(), "jobs": [asdict(job) for job in jobs]}
    root = str(Path(__file__).resolve().parents[3])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "PYTHON"))}
    # A cache of its own for every batch: a gate passes for code that this compiler made from this source, or not.
    environment |= triton_settings(folder / "triton") | {"TRITON_DUMP_PTXAS_LOG": "1", "PYTHONPATH": root}
    with subprocess.Popen(
        children.python(child.__name__),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        cwd=folder,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            _, said = process.communicate(json.dumps(request), timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # ptxas is a child of the child
            process.communicate()
            return f"compiler stopped after {timeout:g} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode == 0:
        if not any(folder.glob("*.json")):
            raise KvbenchError("the compiling process left nothing", where=child.__name__, got=said[-200:])
        return None
    last = (said.strip().splitlines() or ["nothing on stderr"])[-1]
    code = process.returncode
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"compiler ended with {how}: {last}"
