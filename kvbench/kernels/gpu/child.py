"""The process that compiles: reads a request on stdin, leaves K.json for job K, in order. Started by :mod:`.build`."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """One compilation; ``kind`` is ``nvrtc`` (uses ``text``), ``triton`` or ``gluon`` (use the rest)."""

    kind: str
    arch: str
    text: str = ""
    path: str = ""
    entry: str = ""
    types: dict[str, str] = field(default_factory=dict)
    constants: dict[str, int | str] = field(default_factory=dict)
    aligned: list[int] = field(default_factory=list)
    warps: int = 0
    backend: str = ""
    number: int | str = 0
    warp: int = 32
    registers: int = 0


class _Refused(Exception):
    """The compiler said no; the text is its last word."""


def _nvrtc(job: Job) -> dict[str, Any]:
    from cuda.bindings import nvrtc

    def got(answer: tuple[Any, ...]) -> Any:
        if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise _Refused(f"NVRTC: {answer[0].name}")
        return answer[1] if len(answer) > 1 else None

    def text_of(size: Any, fill: Any) -> bytes:
        buffer = b" " * int(got(size(program)))
        got(fill(program, buffer))
        return buffer

    _, major, minor = nvrtc.nvrtcVersion()
    program = got(nvrtc.nvrtcCreateProgram(job.text.encode(), b"kernel.cu", 0, [], []))
    options = [f"--gpu-architecture={job.arch}".encode(), b"--std=c++17", b"--ptxas-options=-v"]
    outcome = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = text_of(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0").decode(errors="replace")
    if outcome[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        wrong = [line for line in log.splitlines() if "error" in line] or [log.strip()]
        raise _Refused(f"NVRTC: {outcome[0].name}: {wrong[0]}")
    return {
        "binary": text_of(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN),
        "assembly": text_of(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0").decode(),
        "log": log,
        "compiler": f"NVRTC {major}.{minor}",
    }


def _triton(job: Job) -> dict[str, Any]:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    spec = importlib.util.spec_from_file_location("kvbench_triton_kernels", job.path)
    if spec is None or spec.loader is None:
        raise _Refused(f"{job.path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # A dtype travels as its name: tl.float32 is not JSON.
    constants = {k: getattr(tl, v) if isinstance(v, str) else v for k, v in job.constants.items()}
    types = {**job.types, **dict.fromkeys(constants, "constexpr")}
    if job.kind == "gluon":
        from triton.experimental.gluon._runtime import GluonASTSource

        kind: Any = GluonASTSource
        types = {name: _with_layout(text) for name, text in types.items()}
    else:
        kind = ASTSource
    source = kind(getattr(module, job.entry), types, constants, {(k,): [["tt.divisibility", 16]] for k in job.aligned})
    options: dict[str, int] = {"num_warps": job.warps}
    if job.registers and job.backend == "cuda":
        options["maxnreg"] = job.registers
    log = io.StringIO()  # Triton prints ptxas' report there, and the whole PTX when ptxas refuses
    with contextlib.redirect_stdout(log):
        made = triton.compile(source, target=GPUTarget(job.backend, job.number, job.warp), options=options)
    return {
        "binary": made.asm["cubin" if job.backend == "cuda" else "hsaco"],
        "assembly": made.asm["ptx" if job.backend == "cuda" else "amdgcn"],
        "log": log.getvalue(),
        "dynamic_shared": int(made.metadata.shared),
        "compiler": f"Triton {triton.__version__}",
    }


def _with_layout(text: str) -> str:
    """Return a tensor map's type with the layout its box has in shared memory, any other type as it is."""
    found = re.fullmatch(r"tensordesc<(\w+)\[([\d,]+)\]>", text)
    if not found:
        return text
    import triton.language as tl
    from triton.experimental.gluon import language as gl

    element = {"fp32": tl.float32, "bf16": tl.bfloat16}[found[1]]
    layout = gl.NVMMASharedLayout.get_default_for([int(n) for n in found[2].split(",")], element)
    return f"{text[:-1]},{layout!r}>"


def _disassemble(cubin: bytes, nvdisasm: str | None) -> dict[str, str | None]:
    if nvdisasm is None:
        return {"sass_reason": "no nvdisasm (the triton wheel carries one)"}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        ran = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, errors="replace", check=False)
    if ran.returncode:
        return {"sass_reason": f"nvdisasm: {(ran.stderr.strip().splitlines() or ['no message'])[-1]}"}
    return {"sass": ran.stdout}


def _one(job: Job, nvdisasm: str | None) -> dict[str, Any]:
    try:
        made = _nvrtc(job) if job.kind == "nvrtc" else _triton(job)
    except Exception as error:  # whatever a compiler raises is the result of this job, and the next one goes on
        lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        return {"binary": None, "reason": " ".join(lines)[:400]}
    if job.backend != "hip":
        made |= _disassemble(made["binary"], nvdisasm)
    return made | {"binary": base64.b64encode(made["binary"]).decode("ascii")}


def main() -> int:
    """Compile every job of the request on stdin; results appear in its folder one by one, complete or not at all."""
    request = json.load(sys.stdin)
    folder = Path(request["folder"])
    for number, entry in enumerate(request["jobs"]):
        result = _one(Job(**entry), request["nvdisasm"])
        waiting = folder / f"{number}.part"
        waiting.write_text(json.dumps(result), encoding="utf-8")
        waiting.rename(folder / f"{number}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
