"""The product with B far on the fake device: right values by every method, bytes of the algebra, order of calls."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from kvbench.errors import KvbenchError, Unavailable, UsageError, VerifyError
from kvbench.memory.cuda.driver import CudaError
from kvbench.systems.directkv import gpu_gemm
from kvbench.systems.directkv.gpu_gemm import Asked, unit_bounds
from kvbench.systems.directkv.gpu_operands import bf16_bits, bf16_values, require_alias, slabs_of, tf32_values
from kvbench.systems.directkv.gpu_swap import SwapQueue
from kvbench.systems.directkv.shapes import Gemm, ceil_div
from kvbench.systems.directkv.traffic import column_loads
from kvbench.systems.directkv.traffic import unit_bounds as whole_bounds
from tests.fake_cuda import Call
from tests.systems.directkv.gemm_rig import Bed, bed

SMALL = Asked(130, 200, 70, "naive", tile=64)
FORMS = {
    "resident": replace(SMALL, method="resident"),
    "naive": SMALL,
    "naive 3 stages": replace(SMALL, depth=3),
    "cpu_aware": replace(SMALL, method="cpu_aware"),
    "cpu_aware whole columns": replace(SMALL, method="cpu_aware", split=1),
    "pipelined": replace(SMALL, method="cpu_aware_pipelined", depth=2),
    "swap": replace(SMALL, method="swap"),
    "swap half": replace(SMALL, method="swap", staging=50),
    "swap two halves": replace(SMALL, method="swap", double=True),
    "swap quarter": replace(SMALL, method="swap", staging=32),  # one of four columns of tiles, the last a narrow one
    "swap two quarters": replace(SMALL, method="swap", staging=64, double=True),
    "bf16 naive": replace(SMALL, compute="bf16"),
    "bf16 swap": replace(SMALL, compute="bf16", method="swap", staging=50),
    "tf32 cpu_aware": replace(SMALL, compute="tf32", method="cpu_aware"),
    "groups": replace(SMALL, compute="bf16", method="cpu_aware_pipelined", depth=2),
}


@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_leaves_the_product_and_keeps_the_algebra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked = FORMS[name]
    with bed(monkeypatch) as b:
        work = b.make(asked)
        with pytest.raises(VerifyError, match="got 'an error of nan'"):
            work.check()
        before = b.stream.queued + sum(s.queued for s in work.also)
        assert b.once(work) > 0.0
        assert b.stream.queued + sum(s.queued for s in work.also) - before == work.operations
        work.spoil()
        assert b.once(work) > 0.0
        moved, o = work.traffic, work.operands
        near = asked.method == "resident"
        assert o.b.tier == ("hbm" if near else "pinned")
        assert (moved.link == 0) == near
        if asked.method in ("swap", "naive"):
            assert moved.link == o.b_bytes * (work.gemm.rows if asked.method == "naive" else 1)
        assert work.near_bytes == o.a.nbytes + o.c.nbytes + work.staging_bytes
        assert str(work.grid) in work.kernel
        assert work.notes()["ctas"] == work.grid
        assert ("gemm_groups" in work.kernel) == (name == "groups")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 150, 9), (200, 2, 33), (65, 63, 1)])
@pytest.mark.parametrize("method", ["naive", "cpu_aware"])
@pytest.mark.parametrize("compute", ["simt", "bf16"])
def test_degenerate_and_oblong_shapes(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int, method: str, compute: str
) -> None:
    asked = Asked(m, n, k, method, compute, tile=64)  # type: ignore[arg-type]
    with bed(monkeypatch) as b:
        b.once(b.make(asked))


def test_a_product_that_left_something_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with bed(monkeypatch) as b:
        work = b.make(SMALL)
        b.once(work)
        b.fake._c.gemm_short(ctypes.c_uint64(1))
        with pytest.raises(VerifyError, match="the product is wrong"):
            b.once(work)


def test_staging_holds_its_share_and_one_column_of_tiles_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    with bed(monkeypatch) as b:
        whole = b.make(FORMS["swap"])
        halves = b.make(replace(FORMS["swap two halves"], n=256))
        quarter = b.make(FORMS["swap quarter"])
        assert whole.staging_bytes == whole.operands.b_bytes
        assert (len(halves._staging), len(halves.operands.slabs)) == (2, 2)
        assert (len(quarter._staging), len(quarter.operands.slabs)) == (1, 4)  # 200 columns are four of tiles of 64
        assert quarter.staging_bytes <= 0.35 * whole.staging_bytes
        with pytest.raises(UsageError, match="smaller than a tile column"):
            b.make(replace(SMALL, method="swap", staging=10))


# -- order of calls ----------------------------------------------------------------------------------------------------

Queued = list[tuple[str, str, int]]  # what, on which stream, which event


def queued(calls: list[Call], main: int, side: int) -> Queued:
    """Return what was put on the two streams; a copy's stream is the side one, as a launch's is the main one."""
    names = {main: "main", side: "side"}
    found: Queued = []
    for call in calls:
        if call.name == "cuEventRecord":
            found.append(("record", names[call.args[1]], call.args[0]))
        elif call.name == "cuStreamWaitEvent":
            found.append(("wait", names[call.args[0]], call.args[1]))
        elif call.name == "cuMemcpyAsync":
            found.append(("copy", names[call.args[3]], 0))
        elif call.name == "cuLaunchKernel":
            found.append(("launch", "main", 0))
    return found


def proven(order: Queued, slabs: int, slots: int) -> bool:
    """Return whether every product waits for its copy, and every copy for the product that had its buffer."""
    copied: list[int] = []
    freed: list[int] = []
    seen: dict[str, set[int]] = {"main": set(), "side": set()}
    recorded: set[int] = set()
    copies = launches = 0
    pending = ""
    for what, where, event in order:
        if what == "wait":
            if event not in recorded:
                return False  # CUDA takes an event that was never recorded for one that has happened
            seen[where].add(event)
        elif what == "record":
            recorded.add(event)
            if pending == "copy" and where == "side":
                copied.append(event)
            if pending == "launch" and where == "main":
                freed.append(event)
        elif what == "copy":
            if copies >= slots and not (copies - slots < len(freed) and freed[copies - slots] in seen["side"]):
                return False
            copies += 1
        else:
            if launches >= len(copied) or copied[launches] not in seen["main"]:
                return False
            if slots > 1 and copies < min(slabs, launches + 2):
                return False  # the copy of the next slab comes before this product
            launches += 1
        pending = what
    return copies == launches == slabs


SWAPS = ["swap", "swap half", "swap two halves", "swap quarter", "swap two quarters"]


def traced(b: Bed, name: str) -> tuple[Queued, int, int, list[str]]:
    work = b.make(FORMS[name])
    b.fake.forget()
    work.submit(b.stream)
    calls = b.fake.trace()
    b.stream.synchronize()
    work.check()
    order = queued(calls, b.stream.handle.value or 0, work.also[0].handle.value or 0)  # type: ignore[union-attr]
    return order, len(work.operands.slabs), len(work._staging), [c.name for c in calls]


@pytest.mark.parametrize("name", SWAPS)
def test_copies_run_ahead_products_wait_and_nothing_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with bed(monkeypatch) as b:
        order, slabs, slots, names = traced(b, name)
        assert proven(order, slabs, slots)
        assert order[0][:2] == ("record", "main")
        assert order[1] == ("wait", "side", order[0][2])
        assert not {"cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuEventQuery"} & set(names)


@pytest.mark.parametrize("place", range(20))
def test_a_wait_left_out_is_caught_by_the_trace(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    with bed(monkeypatch) as b:
        order, slabs, slots, _ = traced(b, "swap two quarters")
        waits = [k for k, (what, _, _) in enumerate(order) if what == "wait"][1:]  # the first is the fork
        if place >= len(waits):
            assert len(waits) >= slabs + slabs - slots
            return
        broken = [step for k, step in enumerate(order) if k != waits[place]]
        assert not proven(broken, slabs, slots)


def test_a_product_that_does_not_wait_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The side stream is held by an event that comes only after the products: they multiply what was spoilt."""
    with bed(monkeypatch) as b:
        work = b.make(FORMS["swap"])
        monkeypatch.setattr(SwapQueue, "_load", lambda self, slab: None)
        work._swap.submit(b.stream)
        b.stream.synchronize()
        with pytest.raises(VerifyError):
            work.check()


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"])
def test_a_refused_call_is_an_error_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with bed(monkeypatch) as b:
        work = b.make(FORMS["swap two quarters"])
        b.fake.fail(2, 1, call=call)
        with pytest.raises(CudaError):
            b.once(work)


# -- units, addresses, what is refused --------------------------------------------------------------------------------


def test_units_of_whole_tiles_are_those_of_the_algebra() -> None:
    gemm = Gemm.square(10240, 128)
    assert unit_bounds(gemm, 80, 132) == whole_bounds(gemm, 132)
    assert sum(column_loads(gemm, unit_bounds(gemm, 80, 132))) / 80 <= 2.64
    assert set(column_loads(gemm, unit_bounds(gemm, 1, 80))) == {1}
    for split in (1, 2, 7, 80):
        bounds = unit_bounds(gemm, split, 132)
        assert (bounds[0], bounds[-1]) == (0, 6400)
    for split in (0, 81):
        with pytest.raises(UsageError, match="expected 1 to 80"):
            unit_bounds(gemm, split, 132)


def test_a_host_address_is_refused_where_it_is_not_the_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    with bed(monkeypatch, alias_differs=1) as b:
        work = b.make(SMALL)
        host, alias = work.operands.b.host_address, work.operands.b.device_address
        assert host is not None
        assert host != alias
        assert require_alias(b.service.device, alias) == alias
        with pytest.raises(UsageError, match=rf"not the device's alias of it, got '{host:#x}', expected {alias:#x}"):
            require_alias(b.service.device, host)
        plain = np.zeros(64, np.uint8)
        with pytest.raises(UsageError, match="does not know this address"):
            require_alias(b.service.device, plain.ctypes.data)
        with pytest.raises(UsageError, match="pageable"):
            require_alias(b.service.device, None)


def test_slabs_lie_one_behind_the_other() -> None:
    slabs = slabs_of(200, 70, "simt", 64)
    assert [s.width for s in slabs] == [64, 64, 64, 8]
    assert [s.offset for s in slabs] == [0, 17920, 35840, 53760]
    assert slabs_of(200, 70, "bf16", 128)[1].offset == 128 * 72 * 2
    assert sum(s.nbytes for s in slabs) == 4 * 70 * 200
    assert ceil_div(200, 64) == len(slabs)


def test_bf16_is_rounded_to_nearest_even() -> None:
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -2.5, 0.0, 3.1415927, 1e-40], np.float32)
    want = np.array([1.0, 1.0, 1.0 + 2**-6, -2.5, 0.0, 3.140625], np.float32)
    assert np.array_equal(bf16_values(bf16_bits(values))[:6], want)


def test_tf32_keeps_ten_bits_to_nearest_even() -> None:
    values = np.array([1.0, 1.0 + 2**-11, 1.0 + 3 * 2**-11, 1.0 + 2**-10, -3.0, 0.0], np.float32)
    want = np.array([1.0, 1.0, 1.0 + 2**-9, 1.0 + 2**-10, -3.0, 0.0], np.float32)
    assert np.array_equal(tf32_values(values), want)


@pytest.mark.parametrize(("change", "words"), [
    ({"method": "cpu_aware_pipelined"}, "a pipeline of one stage"),
    ({"method": "cpu_aware", "depth": 2}, "the method is cpu_aware_pipelined"),
    ({"method": "telepathy"}, "gemm method: unknown value"),
    ({"compute": "fp8"}, "gemm compute: unknown value"),
    ({"raster": "spiral"}, "expected m_fastest, n_fastest, swizzle"),
    ({"tile": 96}, "no kernel of that tile"),
    ({"m": 0}, "gemm m: a product without elements"),
    ({"method": "cpu_aware", "split": 9}, "parts of a column of tiles, got 9, expected 1 to 3"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch, change: dict[str, object], words: str) -> None:
    with bed(monkeypatch) as b, pytest.raises(UsageError, match=words):
        b.make(replace(SMALL, **change))  # type: ignore[arg-type]


def test_what_this_gpu_has_not_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with bed(monkeypatch) as b:
        with pytest.raises(Unavailable, match=r"282624 bytes of shared memory.*what fits: .*tile 64 depth 4"):
            b.make(replace(SMALL, tile=128, method="cpu_aware_pipelined", depth=4))
        with pytest.raises(
            Unavailable, match=r"no tf32 kernel of that form.*expected tile 64 depth 1/2, tile 128 depth 1"
        ):
            b.make(replace(SMALL, tile=128, compute="tf32", method="cpu_aware_pipelined", depth=2))
        with pytest.raises(Unavailable, match=r"gemm m: a dimension beyond 32 bits, got 2147483648"):
            b.make(replace(SMALL, m=1 << 31))
        b.fake.set(shared_optin=16 << 10)
        with pytest.raises(Unavailable, match="at most 16384"):
            b.make(replace(SMALL, method="cpu_aware_pipelined", depth=4))
    with bed(monkeypatch, compute_major=7, compute_minor=2) as b, pytest.raises(Unavailable, match="got 'sm_72'"):
        b.make(SMALL)
    with bed(monkeypatch, compute_major=7, compute_minor=5) as b, pytest.raises(KvbenchError, match="sm_75"):
        b.make(replace(SMALL, compute="bf16"))


def test_without_groups_the_portable_form_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_gemm, "triton_version", lambda: (3, 6))
    with bed(monkeypatch) as b:
        work = b.make(FORMS["groups"])
        b.once(work)
        assert "gemm_bf16_aware_64_d2" in work.kernel
        assert "(no groups of warps: Triton 3.6)" in work.kernel
    with bed(monkeypatch, compute_major=8) as b:
        assert "(no groups of warps: sm_80)" in b.make(FORMS["groups"]).kernel
