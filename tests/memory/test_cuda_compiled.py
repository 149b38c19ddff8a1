"""Kernels with macros and tensor maps: what they are compiled to, what a launch carries, what is refused."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kvbench.errors import KvbenchError, Unavailable, UsageError
from kvbench.kernels.gpu import build
from kvbench.kernels.gpu.arch import arch
from kvbench.kernels.gpu.gemm_kernels import groups_kernel, simt_kernel
from kvbench.memory.cuda import compiled
from kvbench.memory.cuda.compiled import Matrix, arch_of, image_of, launch, launch_maps, map_scratch, tensor_map
from kvbench.memory.cuda.portable import Image
from tests.fake_cuda import rig
from tests.needs import require

SIMT, GROUPS = simt_kernel("aware", 64, 4), groups_kernel(64, 2)
MAP = ["b8", "u32", "u32", "u64", "u64"]
OWN = [*MAP * 3, *["u32"] * 4]


def entry(types: list[str], body: str = "") -> str:
    said = [f".param .align 64 .b8 gemm_groups_param_{k}[128]" if t == "b8" else f".param .{t} gemm_groups_param_{k}"
            for k, t in enumerate(types)]  # fmt: skip
    return f".visible .entry gemm_groups(\n\t{', '.join(said)}\n)\n{{ {body} }}"


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_unused_pointers_behind_the_maps_are_counted(extra: int) -> None:
    assert map_scratch(GROUPS, entry([*OWN, *["u64"] * extra])) == extra


@pytest.mark.parametrize(
    "text",
    [
        entry(OWN[:-1]),
        entry(["u64", *OWN[1:]]),
        entry([*OWN, "u32"]),
        entry([*OWN, "u64"], "ld.param.b64 %rd1, [gemm_groups_param_19];"),
        "no entry",
    ],
)
def test_code_with_other_arguments_is_not_launched(text: str) -> None:
    with pytest.raises(KvbenchError, match="compiled to other arguments"):
        map_scratch(GROUPS, text)


def test_both_compilers_make_what_the_catalogue_says() -> None:
    require("nvrtc", build.missing_nvrtc())
    require("triton", build.missing_triton())
    image_of.cache_clear()
    small = simt_kernel("naive", 64)
    made, groups = image_of(small, arch("sm_75")), image_of(GROUPS, arch("sm_90a"))
    assert made.code[:4] == groups.code[:4] == b"\x7fELF"
    assert (made.scratch, made.shared) == (0, small.shared)
    assert small.entry.encode() in made.code
    assert 0 <= groups.scratch <= 2
    assert groups.shared > 2 * 64 * 64 * 4 + 4 * 64 * 64


def test_a_compiler_that_is_missing_or_refuses_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    image_of.cache_clear()
    monkeypatch.setattr(build, "missing_nvrtc", lambda: "no libnvrtc")
    with pytest.raises(Unavailable, match=r"no libnvrtc; pip install 'kvbench\[compile\]'"):
        image_of(SIMT, arch("sm_90a"))
    monkeypatch.setattr(build, "missing_nvrtc", lambda: None)
    monkeypatch.setattr(build, "cuda", lambda sources: [build.Built("sm_90a", reason="NVRTC said no")])
    with pytest.raises(Unavailable, match=r"for sm_90a: the kernel does not compile, got 'NVRTC said no'"):
        image_of(SIMT, arch("sm_90a"))


NUMBERS = (8, 8, 8, 8, 8, 8, 1, 0)


def test_a_launch_opts_in_and_checks_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "image_of", lambda kernel, arch: Image(b"FAKE kv_flush", 0, kernel.shared))
    named = replace(SIMT, entry="kv_flush")
    with rig() as made, ExitStack() as stack:
        got = launch(made.device, stack.enter_context, named, 3, 16, 32, 48, *NUMBERS)
        assert (got.grid, got.block, got.shared) == (3, 256, 75_776)
        assert [a.value for a in got.arguments[:3]] == [16, 32, 48]
        assert [type(a) for a in got.arguments[3:7]] == [*[ctypes.c_int32] * 3, ctypes.c_uint64]
        opted = next(call for call in made.fake.trace() if call.name == "cuFuncSetAttribute")
        assert opted.args[1:3] == (8, 75_776)
        with pytest.raises(UsageError, match="c: not an address"):
            launch(made.device, stack.enter_context, named, 3, 8, 32, 48, *NUMBERS)
        with pytest.raises(UsageError, match="got '0 blocks'"):
            launch(made.device, stack.enter_context, named, 0, 16, 32, 48, *NUMBERS)
        with pytest.raises(UsageError, match=r"not a CUDA C\+\+ kernel"):
            launch(made.device, stack.enter_context, GROUPS, 1)
    with rig(compute_major=5) as made, pytest.raises(Unavailable, match="got 'sm_50', expected sm_75, "):
        arch_of(made.device)


def words(made: object) -> list[int]:
    return list((ctypes.c_uint64 * 11).from_buffer(made))  # type: ignore[arg-type]


def test_a_tensor_map_describes_the_matrix_in_boxes_of_128_bytes() -> None:
    with rig() as made:
        got = tensor_map(made.device, Matrix(1 << 20, 1000, 300, 608, "bf16", (64, 64)))
        # address, type, rank, columns, rows, pitch, box columns, box rows, swizzle, L2 promotion, zeros beyond
        assert words(got) == [1 << 20, 9, 2, 300, 1000, 608, 64, 64, 3, 2, 0]
        assert ctypes.addressof(got) % 64 == 0
        wide = tensor_map(made.device, Matrix(1 << 20, 8, 128, 512, "fp32", (128, 128)))
        assert words(wide)[6:8] == [32, 128]
        for address, pitch in ((8, 608), (16, 600)):
            with pytest.raises(UsageError, match="whole 16 bytes"):
                tensor_map(made.device, Matrix(address, 8, 8, pitch, "bf16", (64, 64)))
    with rig(driver_version=11080) as made, pytest.raises(Unavailable, match="cuTensorMapEncodeTiled"):
        tensor_map(made.device, Matrix(16, 8, 8, 16, "bf16", (64, 64)))


def test_a_launch_with_maps_carries_shapes_strides_and_null_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "image_of", lambda kernel, arch: Image(b"FAKE kv_flush", 2, 65_852))
    named = replace(GROUPS, entry="kv_flush")
    c = Matrix(1 << 20, 130, 200, 800, "fp32", (64, 64))
    a, b = Matrix(2 << 20, 130, 70, 144, "bf16", (64, 64)), Matrix(3 << 20, 200, 70, 144, "bf16", (64, 64))
    with rig() as made, ExitStack() as stack:
        got = launch_maps(made.device, stack.enter_context, named, 5, [c, a, b], [3, 4, 2, 3])
        values = [x.value if hasattr(x, "value") else "map" for x in got.arguments]
        assert values == ["map", 130, 200, 200, 1, "map", 130, 70, 72, 1, "map", 200, 70, 72, 1, 3, 4, 2, 3, 0, 0]
        assert (got.grid, got.block, got.shared) == (5, 256, 65_852)
        with pytest.raises(UsageError, match="2 maps"):
            launch_maps(made.device, stack.enter_context, named, 5, [c, a], [3, 4, 2, 3])
