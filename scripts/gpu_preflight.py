"""What a GPU box has and lacks, found in seconds, before anything long begins. Standard library only."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.memory.cuda.driver import Driver

DRIVER = "libcuda.so.1"
PROBE_LIMIT_S = 120.0  # a first import of numba and cuInit on a box of many GPUs take seconds each
SANITIZER = "compute-sanitizer"


@dataclass(frozen=True, slots=True)
class Need:
    """A package: ``module`` to import, ``package`` to install, what it is ``for_``; without a vital one nothing runs.

    ``call``: what must work beyond the import, as an expression of ``m``.
    """

    module: str
    package: str
    for_: str
    vital: bool = False
    call: str = ""


NEEDS = (
    Need("numpy", "numpy", "payloads and statistics", vital=True),
    Need("numba", "numba", "host kernels, and driver calls in compiled loops", vital=True),
    Need("typer", "typer", "the command line", vital=True),
    Need("rich", "rich", "the tables", vital=True),
    Need("cuda.bindings.nvrtc", "cuda-bindings and nvidia-cuda-nvrtc", "compiling CUDA C++: without it no kernel of "
         "kvbench runs on the GPU, the one behind the event clock included", call="m.nvrtcVersion()[1]"),
    Need("pynvml", "nvidia-ml-py", "clocks, throttling, link state, and which GPU it is"),
    Need("triton", "triton", "Triton kernels"),
    Need("torch", "torch", "baselines of torch"),
    Need("scipy", "scipy", "host matrix products"),
    Need("pytest", "pytest", "the tests marked gpu"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """What the probe answered for one package: its ``version``, or the ``problem`` in the way of using it."""

    version: str | None
    problem: str


@dataclass(frozen=True, slots=True)
class Probe:
    """The box as seen by a fresh interpreter. ``devices`` are names in the driver's order; ``driver_problem`` says why
    there are none."""

    packages: Mapping[str, Found]
    devices: tuple[str, ...]
    cuda: str | None
    driver_problem: str
    compiler: str | None
    header: bool
    sanitizer: str | None


def driver_missing(library: str = DRIVER, dev: Path = Path("/dev")) -> str | None:
    """Return why there can be no NVIDIA GPU here, None where a driver loads. Takes a millisecond, starts nothing."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return f"no NVIDIA GPU driver: {library} does not load"
    if library != DRIVER:
        return None
    # images built for GPUs carry libcuda on machines without one
    nodes = [node.name for node in dev.iterdir()] if dev.is_dir() else []
    if not any(re.fullmatch(r"nvidia[0-9]+|dxg", name) for name in nodes):
        return f"no NVIDIA GPU: {library} loads, and no device is in {dev} (pass the GPU into the container)"
    return None


def look(root: Path, env: Mapping[str, str], library: str = DRIVER, limit_s: float = PROBE_LIMIT_S) -> Probe:
    """Return what a fresh interpreter with ``env`` finds; a probe that dies or hangs is itself an answer."""
    command = [sys.executable, str(Path(__file__).resolve()), str(root), library]
    answer: dict[str, Any] = {}
    limit_s = min(limit_s, PROBE_LIMIT_S)
    try:
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=limit_s, check=False)
        problem = f"the probe ended with code {done.returncode}: {_last(done.stderr)}"
        lines = done.stdout.splitlines()
    except subprocess.TimeoutExpired as error:
        # it answers package by package, so what came before the one that hangs is known
        problem = f"no answer within {limit_s:g} s"
        out = error.stdout or b""
        lines = (out.decode("utf-8", "replace") if isinstance(out, bytes) else out).splitlines()
    for line in lines:
        name, _, text = line.partition("\t")
        if text:
            answer[name] = json.loads(text)
    packages = {need.module: Found(*answer.get(need.module, (None, problem))) for need in NEEDS}
    devices, cuda, missing = answer.get("driver", ((), None, problem))
    compilers = (*os.environ.get("CC", "").split()[:1], "gcc", "cc", "clang")
    compiler = next((path for path in map(shutil.which, compilers) if path), None)
    return Probe(
        packages, tuple(devices), cuda, missing, compiler,
        Path(sysconfig.get_paths()["include"], "Python.h").is_file(), _sanitizer(env),
    )  # fmt: skip


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "without a word"


def _sanitizer(env: Mapping[str, str]) -> str | None:
    folders = [Path(env[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    places = [env.get("PATH", ""), *map(str, folders), "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
    return shutil.which(SANITIZER, path=os.pathsep.join(places))


def report(probe: Probe) -> list[str]:
    """Return one line for each thing looked at."""
    lines = [
        f"GPU: {', '.join(probe.devices)} (CUDA {probe.cuda})"
        if probe.devices
        else f"GPU: none: {probe.driver_problem}"
    ]
    for need in NEEDS:
        found = probe.packages[need.module]
        if found.version is not None and not found.problem:
            lines.append(f"{need.package}: {found.version}")
        else:
            word = "MISSING, indispensable" if need.vital else "missing"
            lines.append(f"{need.package}: {word} ({found.problem}); it is for {need.for_}")
    tools = (
        ("C compiler", probe.compiler, "Triton builds its launcher with it at run time"),
        ("Python.h", "found" if probe.header else None, "Triton's launcher includes it (python3-dev)"),
        (SANITIZER, probe.sanitizer, "tiny shapes are run under it"),
    )
    lines += [f"{name}: {value or 'missing'}{'' if value else f'; {why}'}" for name, value, why in tools]
    return lines


def obstacle(probe: Probe) -> str | None:
    """Return the one line that stops the run, None when it can begin."""
    lacking = [need for need in NEEDS if need.vital and probe.packages[need.module].problem]
    if not lacking:
        return None if probe.devices else f"no usable NVIDIA GPU: {probe.driver_problem}"
    why = "; ".join(f"{need.package} for {need.for_} ({probe.packages[need.module].problem})" for need in lacking)
    return f"{sys.executable} lacks {why}: pass --wheels DIR with their wheels, or set PYTHON= to one that has them"


def _found(need: Need) -> tuple[str | None, str]:
    try:
        module = importlib.import_module(need.module)
        if need.call:
            eval(need.call, {"m": module})  # noqa: S307 (the constants above)
    except Exception as error:  # whatever a broken package raises is the answer
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"
    version = getattr(module, "__version__", None)
    for name in (need.package.split(" ")[0], need.module):
        try:
            version = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(version or "version unknown"), ""


def _listed(need: Need) -> tuple[str | None, str]:
    """Like `_found` without importing: torch alone takes seconds, and nothing here needs it."""
    try:
        if importlib.util.find_spec(need.module) is None:
            return None, "not installed"
        return importlib.metadata.version(need.package), ""
    except importlib.metadata.PackageNotFoundError:
        return "version unknown", ""


def _driver(library: str) -> tuple[list[str], str | None, str]:
    from kvbench.errors import KvbenchError
    from kvbench.memory.cuda.driver import Driver

    try:
        driver = Driver(library)
        names = [_name(driver, ordinal) for ordinal in range(driver.device_count())]
        return names, driver.version_text, "" if names else "the driver lists no device"
    except KvbenchError as error:
        return [], None, str(error)


def _name(driver: Driver, ordinal: int) -> str:
    handle, text = ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.call("cuDeviceGet", ctypes.byref(handle), ordinal)
    driver.call("cuDeviceGetName", text, len(text), handle)
    return text.value.decode("utf-8", "replace")


def main(root: str, library: str) -> int:
    """Answer line by line, ``NAME<tab>JSON``: a package that kills the process takes only its own answer along."""
    sys.path[0] = root
    for need in NEEDS:
        answer = _found(need) if need.vital or need.call or need.module == "pynvml" else _listed(need)
        print(f"{need.module}\t{json.dumps(answer)}", flush=True)
    try:
        answer_driver = _driver(library)
    except ImportError as error:
        answer_driver = ([], None, str(error))
    print(f"driver\t{json.dumps(answer_driver)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2]))
