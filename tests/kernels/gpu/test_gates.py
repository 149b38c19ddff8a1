"""The compile gates: our kernels pass, and each gate fails on code that deserves it.

Three architectures stand for all here, one per assembler (ptxas 12, ptxas 13, LLVM's AMD back end); ``scripts/gates``
compiles every kernel for every one of them.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from kvbench.errors import KvbenchError
from kvbench.kernels.gpu import build, child, gates
from kvbench.kernels.gpu.arch import arch
from kvbench.kernels.gpu.catalogue import KERNELS, Argument, Demand, GpuKernel, kernel, service_kernels
from tests.needs import require

ROOT = Path(__file__).resolve().parents[3]
COPY = Demand(loads=True, stores=True, in_flight=64 << 10)


def needs(*forms: str) -> None:
    if "cuda" in forms:
        require("nvrtc", build.missing_nvrtc())
    if "triton" in forms:
        require("triton", build.missing_triton())
    require("triton", None if build.disassembler() else "no nvdisasm (the triton wheel carries one)")


def cuda_kernel(folder: Path, name: str, body: str, block: int, demand: Demand) -> GpuKernel:
    source = folder / f"{name}.cu"
    source.write_text(textwrap.dedent(body))
    return GpuKernel(name, "cuda", source, name, block, "a test's", (), demand, None)


def failing(row: gates.Row) -> set[str]:
    return {g.name for g in row.gates if g.ok is False}


def test_our_kernels_pass() -> None:
    needs("cuda", "triton")
    cuda = [*(k for k in KERNELS.values() if k.form == "cuda"), *service_kernels().values()]
    triton = [kernel(n) for n in ("fragments_kv_64b_i64", "fragments_kv_4k_i32", "read_sum_bf16")]
    rows = gates.table([*cuda, *triton], [arch(n) for n in ("sm_75", "sm_90a", "gfx942")])
    assert [f"{r.kernel} {r.arch}: {r.reason}" for r in rows if r.status != "pass"] == []
    assert len(rows) == 2 * len(cuda) + 3 * len(triton)
    copies = [r for r in rows if r.kernel in ("copy", "link_copy") or r.kernel.startswith("fragments")]
    assert len(copies) == 10
    for row in copies:
        assert (row.load_bits, row.store_bits, row.spill_bytes) == (128, 128, 0)
        assert row.in_flight is not None
        assert row.in_flight >= 64 << 10
    timed = [g for r in rows if r.kernel == "chase" for g in r.gates if g.name == "timed"]
    assert [g.ok for g in timed] == [True, True]


BAD = {
    # 100 values at once do not fit into the 64 registers that 1024 threads leave each other
    "spills": (
        """
        extern "C" __global__ void __launch_bounds__(1024) spills(float *p) {
            float v[100];
        #pragma unroll
            for (int k = 0; k < 100; k++) v[k] = ((volatile float *)p)[k];
        #pragma unroll
            for (int k = 0; k < 100; k++) ((volatile float *)p)[k] = v[99 - k];
        }""",
        1024,
        Demand(),
        {"spills"},
    ),
    # an array indexed by data lives in local memory
    "indexed": (
        """
        extern "C" __global__ void indexed(int *p, const int *at) {
            int v[64] = {0};
            for (int k = 0; k < 64; k++) v[at[k] & 63] += k;
            for (int k = 0; k < 64; k++) p[k] = v[at[k + 64] & 63];
        }""",
        32,
        Demand(),
        {"spills"},
    ),
    "scalar": (
        """
        extern "C" __global__ void scalar(float *dst, const float *src, unsigned long long n) {
            for (unsigned long long k = threadIdx.x; k < n; k += blockDim.x) dst[k] = src[k];
        }""",
        512,
        COPY,
        {"wide", "in_flight"},
    ),
    # as wide as can be, one access at a time: 8 KiB of 64
    "alternates": (
        """
        extern "C" __global__ void alternates(uint4 *dst, const uint4 *src, unsigned long long n) {
        #pragma unroll 1
            for (unsigned long long k = threadIdx.x; k < n; k += blockDim.x) dst[k] = src[k];
        }""",
        512,
        COPY,
        {"in_flight"},
    ),
    # the second reading waits for nothing
    "early": (
        """
        extern "C" __global__ void early(long long *out, const unsigned long long *p) {
            long long begin = clock64();
            for (int k = 0; k < 64; k++) p = (const unsigned long long *)*(volatile const unsigned long long *)p;
            out[0] = clock64() - begin;
            out[1] = (long long)p;
        }""",
        1,
        Demand(timed=True),
        {"timed"},
    ),
    "crowded": (
        """
        extern "C" __global__ void crowded(float *p) {
            float v[100];
        #pragma unroll
            for (int k = 0; k < 100; k++) v[k] = ((volatile float *)p)[k];
        #pragma unroll
            for (int k = 0; k < 100; k++) ((volatile float *)p)[k] = v[99 - k];
        }""",
        1024,
        Demand(),
        {"limits"},
    ),
}


@pytest.fixture(scope="module")
def bad_rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, gates.Row]:
    needs("cuda")
    folder = tmp_path_factory.mktemp("bad")
    kernels = [cuda_kernel(folder, name, body, block, demand) for name, (body, block, demand, _) in BAD.items()]
    kernels.append(cuda_kernel(folder, "broken", 'extern "C" __global__ void broken() { nonsense(); }', 1, Demand()))
    kernels.append(cuda_kernel(folder, "absent", 'extern "C" __global__ void present() {}', 1, Demand()))
    return {row.kernel: row for row in gates.table(kernels, [arch("sm_90a")])}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_code_fails_its_gate(bad_rows: dict[str, gates.Row], name: str) -> None:
    row = bad_rows[name]
    assert failing(row) == BAD[name][3], row
    assert row.status == "fail"
    assert all(gate in (row.reason or "") for gate in BAD[name][3])
    assert gates.failed([row])


def test_a_source_that_does_not_compile_and_a_missing_entry_fail(bad_rows: dict[str, gates.Row]) -> None:
    assert "nonsense" in (bad_rows["broken"].reason or "")
    assert bad_rows["absent"].reason == "no code of absent in the binary"
    assert {bad_rows[n].status for n in ("broken", "absent")} == {"fail"}


def test_triton_without_aligned_pointers_loses_its_wide_accesses() -> None:
    needs("triton")
    good = kernel("fragments_kv_4k_i64")
    loose = replace(good, name="loose", arguments=tuple(replace(a, align=1) for a in good.arguments))
    (row,) = gates.table([loose], [arch("sm_90a")])
    assert {"wide", "in_flight"} <= failing(row)


def test_a_kernel_that_kills_its_compiler_costs_itself_alone(tmp_path: Path) -> None:
    needs("triton")
    names = {"abort": "import os\nos.abort()\n", "hang": "import time\ntime.sleep(60)\n"}
    rows = []
    good = kernel("read_sum_i32")
    for name, text in names.items():
        (tmp_path / f"{name}.py").write_text(text)
        rows.append(replace(good, name=name, source=tmp_path / f"{name}.py"))
    target = arch("sm_90a")
    died, lived = build.triton([(rows[0], target), (good, target)])
    assert (died.reason or "").startswith("compiler ended with signal SIGABRT")
    assert gates.check(rows[0], target, died).status == "fail"
    assert gates.check(good, target, lived).status == "pass"
    (late,) = build.triton([(rows[1], target)], timeout=2)
    assert late.reason == "compiler stopped after 2 s"


def test_what_cannot_be_read_or_compiled_is_unknown_and_not_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("cuda")
    monkeypatch.setattr(build, "disassembler", lambda: None)
    monkeypatch.setattr(build, "missing_triton", lambda: "the package triton is not installed")
    chosen = [kernel("copy"), kernel("read_sum_i32")]
    copy, portable = gates.table(chosen, [arch("sm_90a")])
    assert (copy.status, copy.reason) == ("unknown", "no nvdisasm (the triton wheel carries one)")
    assert copy.registers is not None
    assert copy.load_bits is None
    assert (portable.status, portable.reason) == ("unknown", "the package triton is not installed")
    assert gates.failed([copy])
    assert gates.failed([portable])
    assert gates.failed([])


def test_shared_memory_is_held_against_the_limit_of_the_architecture() -> None:
    log = """Compiling entry function 'k' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info    : Used 32 registers, used 1 barriers, {} bytes smem"""
    k = replace(kernel("empty"), entry="k", block=128)
    section = "//---- .text.k ----\n.text.k:\n  /*0000*/  EXIT ;\n"

    def limits(name: str, static: int, dynamic: int) -> bool | None:
        target = arch(name)
        built = build.Built(name, b"", "", section, log=log.format(static), dynamic_shared=dynamic)
        return next(g.ok for g in gates.check(k, target, built).gates if g.name == "limits")

    assert limits("sm_90a", 0, 232_448) is True
    assert limits("sm_90a", 0, 262_144) is False  # what AOT compilation lets through
    assert limits("sm_120a", 0, 232_448) is False
    assert limits("sm_90a", 1024, 232_448) is False
    assert limits("sm_90a", 49_152, 0) is True
    assert limits("sm_90a", 49_153, 0) is False


def test_no_pair_to_compile_is_an_error() -> None:
    with pytest.raises(KvbenchError, match="no kernel can be compiled"):
        gates.table([kernel("read")], [arch("gfx942")])


def load_script() -> ModuleType:
    loader = SourceFileLoader("gates_script", str(ROOT / "scripts" / "gates"))
    spec = importlib.util.spec_from_loader("gates_script", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_script_prints_one_document_and_its_exit_code_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("cuda")
    script = load_script()
    assert script.main(["empty", "copy", "--arch", "sm_90a", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["basis"]) == ("kvbench.gates/1", "compiled only")
    assert [r["kernel"] for r in document["gates"]] == ["empty", "copy"]
    assert document["archs"][0]["source"]
    bad = cuda_kernel(tmp_path, "alternates", *BAD["alternates"][:3])
    monkeypatch.setattr(script, "kernel", lambda name: bad)
    assert script.main(["alternates", "--arch", "sm_90a"]) == 3
    out = capsys.readouterr().out
    assert "8 KiB >= 64" in out
    assert "fail in_flight: 8192 B a block in flight, 65536 asked for" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--arch", "sm_91"], 2, "arch: unknown architecture, got 'sm_91'"),
        (["cpoy"], 2, "kernel: unknown GPU kernel, got 'cpoy'"),
        (["read", "--arch", "gfx942"], 3, "no kernel can be compiled"),
    ],
)
def test_mistakes_in_the_command(words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_script().main(words) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_importing_the_catalogue_loads_no_compiler() -> None:
    code = "import sys, kvbench.kernels.gpu.gates as g; print([m for m in sys.modules if m in " \
        "('triton', 'torch', 'numba', 'cuda.bindings.nvrtc')])"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_child_names_the_aligned_pointers_alone() -> None:
    job = build.triton_job(kernel("fragments_kv_4k_i64"), arch("gfx942"))
    assert (job.aligned, job.warps, job.number) == ([0, 1, 2, 3, 4, 5], 8, "gfx942")
    assert isinstance(job, child.Job)
    scalars = [Argument("n", "i64", "a number")]
    odd = GpuKernel("x", "triton", Path("x.py"), "x", 512, "", tuple(scalars), Demand(), None, ("i64",))
    assert build.triton_job(odd, arch("sm_90a")).aligned == []
