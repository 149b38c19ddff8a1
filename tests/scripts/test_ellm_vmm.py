"""The figure of the host driver against C: both sides do the work, and a verdict follows from the ratio."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from kvbench.errors import KvbenchError, VerifyError
from kvbench.memory import libc
from kvbench.memory.vmm.host import HostVmm
from kvbench.memory.vmm.remap import Chunks
from kvbench.memory.vmm.touch import HostTouch
from scripts.figures import ellm_vmm
from scripts.figures.ratios import Found
from tests.needs import missing_gcc, require

PAGE = libc.base_page_bytes()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    require("gcc", missing_gcc())
    return ellm_vmm.build(tmp_path_factory.mktemp("c"))


@pytest.mark.parametrize("cold", [True, False])
def test_the_c_side_touches_all_and_gives_it_back(library: ctypes.CDLL, cold: bool) -> None:
    with HostVmm(12 * PAGE, granularity=4 * PAGE) as vmm:
        way = Chunks(vmm, HostTouch(), 4 * PAGE, 3, cold=cold)
        side = ellm_vmm.Plain(library, way, vmm.descriptor, 4 * PAGE, 3, cold=cold)
        lines = Path("/proc/self/maps").read_text().count("\n")
        assert side.run() > 0.0
        assert side.run() > 0.0
        assert Path("/proc/self/maps").read_text().count("\n") <= lines + 1
        assert vmm.file_bytes() == (0 if cold else 12 * PAGE)
        side._take(side._fd, side._base, 4 * PAGE, 3, PAGE, 9)
        pages = [ctypes.string_at(side._base + k * PAGE, 1) for k in range(12)]
        assert pages == [b"\t"] * 12
        side._value = 8
        with pytest.raises(VerifyError, match="touched nothing"):
            side.check()
        side._back(side._fd, side._base, 4 * PAGE, 3, int(cold))
        way.take()
        way.check()  # the driver finds its memory as it left it
        way.give_back()
        way.close()


def test_a_failing_call_of_the_c_side_is_no_number(library: ctypes.CDLL) -> None:
    with pytest.raises(KvbenchError, match="C side failed"):
        ellm_vmm.entry(library, "c_take", 6)(-1, 0, PAGE, 1, PAGE, 1)


def test_c_makes_each_call_until_one_fails(library: ctypes.CDLL) -> None:
    import numpy as np

    seen: list[int] = []

    def answer(*arguments: int) -> int:
        seen.append(arguments[0])
        return 700 if arguments[0] == 12 else 0

    called = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 6)(answer)
    table = np.arange(24, dtype=np.int64)
    loop = ellm_vmm.entry(library, "c_calls", 3)
    with pytest.raises(KvbenchError, match="700"):
        loop(ctypes.cast(called, ctypes.c_void_p).value or 0, table.ctypes.data, 4)
    assert seen == [0, 6, 12]


@pytest.mark.parametrize(("ratio", "verdict"), [(1.0, "met"), (1 / 1.05, "met"), (0.9, "missed")])
def test_the_value_is_ours_over_c(ratio: float, verdict: str) -> None:
    found = ellm_vmm.figure("x", Found(2.0, 2.0 * ratio, ratio, 40, 0.01, ("calls", "calls")), 4)
    assert found.value == pytest.approx(1 / ratio)
    assert found.verdict == verdict
    assert found.detail["ours"] == 0.5


def test_too_few_pairs_are_disturbed_not_met() -> None:
    found = ellm_vmm.figure("x", None, 4)
    assert (found.value, found.verdict) == (None, "disturbed")


def test_both_sides_run_through_the_comparison(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from kvbench.kernels.team import Team
    from scripts.figures import ratios

    monkeypatch.setattr(ratios, "undisturbed", lambda team, run: (run(), True))
    with Team([min(os.sched_getaffinity(0))]) as team:
        for cold in (True, False):
            found = ellm_vmm.host(library, team, 4 * PAGE, 4, cold=cold, pairs=3)
            assert found.value is not None
            assert found.value > 0.0
