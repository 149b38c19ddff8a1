"""Triton's machine code on the driver: its arguments are those of the catalogue, or it is not launched."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kvbench.errors import KvbenchError, Unavailable, UsageError
from kvbench.kernels.gpu import build
from kvbench.kernels.gpu.catalogue import kernel, pages_kernel
from kvbench.memory.cuda import portable
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.portable import Image, image_of, scratch_arguments
from tests.fake_cuda import rig
from tests.needs import require

PAGES = pages_kernel(2048, True)
NUMBERS = (1, 1, 1, 1, 1, *[0] * 8)


def entry(types: list[str], body: str = "") -> str:
    lines = ",\n".join(f"\t.param .{kind} .ptr .global .align 1 copy_pages_param_{k}" for k, kind in enumerate(types))
    return f".visible .entry copy_pages(\n{lines}\n)\n.reqntid 1024\n{{\n{body}\n}}"


OWN = ["u64"] * 6 + ["u32"] * 5 + ["u64"] * 8


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_unused_pointers_behind_our_arguments_are_counted(extra: int) -> None:
    assert scratch_arguments(PAGES, entry(OWN + ["u64"] * extra)) == extra


@pytest.mark.parametrize(
    "text",
    [
        entry(OWN[:-1]),  # one was dropped: every later one would be another's
        entry([*OWN[:6], "u64", *OWN[7:]]),
        entry([*OWN, "u32"]),
        entry([*OWN, "u64"], "ld.param.b64 %rd1, [copy_pages_param_19];"),  # scratch that is used has to be there
        "no entry",
    ],
)
def test_code_with_other_arguments_is_not_launched(text: str) -> None:
    with pytest.raises(KvbenchError, match="compiled to other arguments"):
        scratch_arguments(PAGES, text)


def test_what_triton_compiles_takes_the_arguments_of_the_catalogue() -> None:
    require("triton", build.missing_triton())
    image_of.cache_clear()
    image = image_of(pages_kernel(24, True, width=8), (9, 0))
    assert image.code[:4] == b"\x7fELF"
    assert 0 <= image.scratch <= 2
    assert 0 < image.shared <= portable.SHARED_LIMIT


def test_without_triton_the_case_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    image_of.cache_clear()
    monkeypatch.setattr(build, "missing_triton", lambda: "the package triton is not installed")
    with pytest.raises(Unavailable, match=r"triton is not installed; pip install 'kvbench\[compile\]'"):
        image_of(PAGES, (9, 0))


def test_a_refusing_compiler_is_unavailable_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    image_of.cache_clear()
    monkeypatch.setattr(build, "triton", lambda jobs: [build.Built(jobs[0][1].name, reason="ptxas said no")])
    with pytest.raises(Unavailable, match=r"for sm_87: the kernel does not compile, got 'ptxas said no'"):
        image_of(PAGES, (8, 7))


def test_a_launch_carries_shared_memory_and_null_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    with rig() as made, ExitStack() as stack:
        kernels = Kernels(made.device, lambda source, arch: b"", stack)
        monkeypatch.setattr(portable, "image_of", lambda kernel, arch: Image(b"FAKE kv_flush", 2, 4096))
        named = replace(PAGES, entry="kv_flush")
        launch = kernels.portable(named, 3, *[1 << 20] * 6, *NUMBERS)
        assert (launch.grid, launch.block, launch.shared) == (3, 1024, 4096)
        assert [a.value for a in launch.arguments[-2:]] == [0, 0]
        assert [type(a) for a in launch.arguments[6:11]] == [ctypes.c_int32] * 5
        with pytest.raises(UsageError, match="programs"):
            kernels.portable(named, 0, *[1 << 20] * 6, *NUMBERS)
        with pytest.raises(UsageError, match="k_dst: not an address it can use"):
            kernels.portable(named, 1, 8, *[1 << 20] * 5, *NUMBERS)
        with pytest.raises(UsageError, match="not a Triton kernel"):
            kernels.portable(kernel("copy"), 1, 16, 16, 16)
        monkeypatch.setattr(portable, "image_of", lambda kernel, arch: Image(b"FAKE kv_flush", 2, 64 << 10))
        assert kernels.portable(named, 1, *[1 << 20] * 6, *NUMBERS).shared == 64 << 10
        assert made.fake.names()[-1] == "cuFuncSetAttribute"
        made.fake.set(shared_optin=48 << 10)
        with pytest.raises(Unavailable, match=r"more shared memory.*got '65536 bytes', expected at most 49152"):
            kernels.portable(named, 1, *[1 << 20] * 6, *NUMBERS)
