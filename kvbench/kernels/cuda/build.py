"""CUDA C++ to machine code by NVRTC, without a GPU or a driver.

``python -m kvbench.kernels.cuda.build sm_90a ...`` prints what ptxas says of each kernel, one JSON line per arch: the
compile gate runs it in a process of its own, because a compiler that dies takes its process along.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError, MissingExtra

SERVICE = Path(__file__).with_name("service.cu")
KERNELS = ("kv_block", "kv_flush", "kv_fill", "kv_checksum", "kv_checksum_end")


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas reports of one kernel: registers a thread, bytes spilled (stores + loads), stack and shared bytes."""

    kernel: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code for ``arch``, and the resources of its kernels in the order ptxas names them."""

    arch: str
    image: bytes
    resources: tuple[Resources, ...]


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise MissingExtra("cuda-bindings", "compile", "compiling CUDA C++") from error
    return nvrtc


def _checked(nvrtc: Any, answer: tuple[Any, ...], what: str, log: str = "") -> Any:
    code, *values = answer
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        last = " ".join(log.split())[:300]
        raise KvbenchError(f"{what} failed", where="NVRTC", got=f"{code.name}{': ' + last if last else ''}")
    return values[0] if len(values) == 1 else values


def parse_log(log: str) -> tuple[Resources, ...]:
    """Return the resources named in the output of ``ptxas -v``. Raises KvbenchError where a kernel's are incomplete."""
    found = []
    blocks = re.split(r"Compiling entry function '", log)[1:]
    for block in blocks:
        name = block.partition("'")[0]
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block)
        registers = re.search(r"Used (\d+) registers", block)
        if not spills or not registers:
            raise KvbenchError("ptxas did not say what a kernel needs", where="NVRTC log", got=block[:200])
        shared = re.search(r"(\d+) bytes smem", block)
        found.append(
            Resources(
                name,
                int(registers[1]),
                int(spills[2]) + int(spills[3]),
                int(spills[1]),
                int(shared[1]) if shared else 0,
            )
        )
    return tuple(found)


def compile_source(text: str, arch: str, name: str = "kernel.cu") -> Cubin:
    """Compile CUDA C++ for ``arch`` (``sm_90a``).

    Raises MissingExtra without cuda-bindings, KvbenchError with the compiler's words when it refuses or NVRTC itself
    is not there.
    """
    nvrtc = _nvrtc()
    try:
        program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []), "creating")
    except RuntimeError as error:  # cuda-bindings without libnvrtc: its own error, a RuntimeError
        raise MissingExtra("nvidia-cuda-nvrtc", "compile", "compiling CUDA C++") from error
    try:
        options = [f"-arch={arch}".encode(), b"--ptxas-options=-v", b"--std=c++17"]
        answer = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc, program)
        _checked(nvrtc, answer, f"compiling {name} for {arch}", log)
        image = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program), "cubin"))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, image), "cubin")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(arch, bytes(image), parse_log(log))


def _text(nvrtc: Any, program: Any) -> str:
    size = _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program), "log")
    log = bytearray(size)
    _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log), "log")
    return log.rstrip(b"\0").decode("utf-8", "replace")


@lru_cache(maxsize=4)
def service_image(major: int, minor: int) -> bytes:
    """Return the service kernels for a GPU of compute capability ``major``.``minor``; errors as compile_source."""
    return compile_source(SERVICE.read_text(encoding="utf-8"), f"sm_{major}{minor}", SERVICE.name).image


def main(arches: list[str]) -> int:
    """Compile the service kernels for each arch and print one JSON line per arch."""
    text = SERVICE.read_text(encoding="utf-8")
    for arch in arches:
        cubin = compile_source(text, arch, SERVICE.name)
        print(json.dumps({"arch": arch, "bytes": len(cubin.image), "kernels": [asdict(r) for r in cubin.resources]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
