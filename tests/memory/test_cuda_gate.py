"""Compile gates of the CUDA C++ kernels: machine code for every arch, without spills, and doing what they are for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from kvbench.errors import KvbenchError
from kvbench.kernels.cuda import build
from kvbench.kernels.cuda.build import KERNELS, SERVICE, compile_source, parse_log
from kvbench.memory import payload
from kvbench.memory.cuda.buffers import hbm
from kvbench.memory.cuda.device import Device
from kvbench.memory.cuda.driver import Driver
from kvbench.memory.cuda.service import Service
from tests.fake_cuda import _package, fake
from tests.needs import missing_module, require

ARCHES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
MOST_REGISTERS = 64  # 256 threads of them leave every arch at full occupancy of 1024 threads per SM or more


def nvrtc() -> None:
    """Skip (``KVBENCH_REQUIRE=nvrtc``: fail) where NVRTC or its bindings are missing."""
    missing = missing_module("cuda") or missing_module("cuda.bindings")
    if missing is None and not any((_package("nvidia") or Path("none")).glob("*/lib/libnvrtc.so*")):
        missing = "the package nvidia-cuda-nvrtc is not installed"
    require("nvrtc", missing)


@cache
def gate() -> dict[str, dict[str, dict[str, int]]]:
    """Compile in a process of its own; print and return arch -> kernel -> resources."""
    done = subprocess.run(
        [sys.executable, "-m", build.__name__, *ARCHES], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    table = {}
    for line in done.stdout.splitlines():
        row = json.loads(line)
        table[row["arch"]] = {found.pop("kernel"): found for found in row["kernels"]}
        print(
            row["arch"], *(f"{name}: {r['registers']} regs" for name, r in sorted(table[row["arch"]].items())), sep="  "
        )
    return table


@pytest.mark.parametrize("arch", ARCHES)
def test_every_kernel_compiles_without_spills(arch: str) -> None:
    nvrtc()
    found = gate()[arch]
    assert set(found) == set(KERNELS)
    for name, resources in found.items():
        print(f"{arch} {name}: {resources}")
        assert 0 < resources["registers"] <= MOST_REGISTERS, name
        assert resources["spill_bytes"] == resources["stack_bytes"] == resources["shared_bytes"] == 0, name


def test_the_gate_sees_a_spill() -> None:
    nvrtc()
    text = """extern "C" __global__ void hungry(int *p) {
        int v[300];
        for (int i = 0; i < 300; i++) v[i] = p[i * p[i]];
        for (int i = 0; i < 300; i++) p[v[i] + i] = v[299 - i];
    }"""
    (found,) = compile_source(text, "sm_80").resources
    assert found.stack_bytes + found.spill_bytes > 0


def test_what_the_compiler_refuses_is_a_line() -> None:
    nvrtc()
    with pytest.raises(KvbenchError, match=r"compiling broken\.cu for sm_80 failed.*expected a"):
        compile_source("this is no C", "sm_80", "broken.cu")
    with pytest.raises(KvbenchError, match="NVRTC"):
        compile_source("", "sm_13")


def test_a_log_without_figures_is_not_a_pass() -> None:
    with pytest.raises(KvbenchError, match="did not say"):
        parse_log("ptxas info : Compiling entry function 'k' for 'sm_80'\nptxas info : Used 8 registers")
    assert parse_log("nothing compiled") == ()


def sass(tmp_path: Path, arch: str) -> dict[str, str]:
    """Return the disassembly of each kernel by the tool in the triton wheel."""
    triton = _package("triton")
    tool = triton / "backends" / "nvidia" / "bin" / "nvdisasm" if triton else None
    require("nvdisasm", None if tool and tool.is_file() else "the triton wheel with nvdisasm is not installed")
    cubin = tmp_path / "service.cubin"
    cubin.write_bytes(compile_source(SERVICE.read_text(encoding="utf-8"), arch, SERVICE.name).image)
    done = subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parts = re.split(r"(?m)^\s*\.section\s+\.text\.", done.stdout)[1:]
    return {re.match(r"\w+", part)[0]: part for part in parts}  # type: ignore[index]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_machine_code_does_what_the_source_says(tmp_path: Path, arch: str) -> None:
    nvrtc()
    code = sass(tmp_path, arch)
    assert set(KERNELS) <= set(code)
    # The flag is read again in each turn and past every cache that is not coherent with the host; time is the device's.
    assert re.search(r"LDG\.E\.STRONG\.SYS", code["kv_block"])
    assert "GLOBALTIMER" in code["kv_block"]
    assert "NANOSLEEP" in code["kv_block"]
    # A flush that the compiler saw through would read nothing (trap T11).
    assert code["kv_flush"].count("LDG.E.64") >= 1
    assert code["kv_fill"].count("STG.E.64") >= 1
    assert code["kv_checksum"].count("LDG.E.64") >= 2


def test_a_real_cubin_loads_into_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default image of Service: compiled for the device at hand, its kernels found by name."""
    nvrtc()
    build.service_image.cache_clear()
    with fake(compute_major=8, compute_minor=9) as lib:
        with Device(Driver(lib.path)) as device, Service(device) as service, hbm(service, 4096) as buffer:
            assert buffer.checksum() == payload.checksum(payload.expected(4096))
        assert lib.live() == {}
    assert build.service_image.cache_info().misses == 1
