"""GPU tiers on the fake driver: exact, placed, read by the device, named by the driver, and gone after any failure."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvbench.errors import KvbenchError, Unavailable, UsageError, VerifyError
from kvbench.machine.probe import Fact
from kvbench.memory import host, numa, payload
from kvbench.memory.cuda import buffers
from kvbench.memory.cuda.buffers import GpuBuffer, hbm, managed, pageable, pinned, pointer_facts
from kvbench.memory.cuda.device import Device
from kvbench.memory.cuda.driver import CudaError, Driver, PoisonedDevice
from kvbench.memory.cuda.pinlimit import PinnedLimit, _outcome, pinned_limit
from kvbench.memory.cuda.service import Service
from kvbench.memory.limits import Available
from tests.fake_cuda import IMAGE, Rig, fake, rig

MiB = 1 << 20
Make = Callable[[Service, int], GpuBuffer]
MAKERS: dict[str, Make] = {
    "hbm": hbm,
    "pinned": pinned,
    "hostalloc": lambda service, nbytes: pinned(service, nbytes, how="hostalloc"),
    "pageable": pageable,
    "managed": managed,
}


@pytest.fixture
def gpu() -> Iterator[Rig]:
    with rig() as made:
        yield made


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 3 * MiB + 13])
def test_every_tier_is_exact_and_holds_the_payload(gpu: Rig, make: Make, nbytes: int) -> None:
    with make(gpu.service, nbytes) as buffer:
        assert buffer.nbytes == nbytes
        assert buffer.checksum() == payload.checksum(payload.expected(nbytes))
        buffer.verify()
        buffer.refill(9)
        assert buffer.checksum() == payload.checksum(payload.expected(nbytes, 9))
        buffer.verify()
    for use in (lambda: buffer.device_address, lambda: buffer.host_address, buffer.checksum, buffer.array):
        with pytest.raises(ValueError, match="closed"):
            use()
    buffer.close()


def test_the_name_comes_from_the_driver_not_from_the_maker(gpu: Rig) -> None:
    """T7, T38."""
    for tier, maker in MAKERS.items():
        with maker(gpu.service, 4096) as buffer:
            asked = [a for a in (buffer.device_address, buffer.host_address) if a is not None]
            assert {pointer_facts(gpu.device, a).tier for a in asked} == {buffer.tier}
            assert buffer.tier == {"hostalloc": "pinned"}.get(tier, tier)


@pytest.mark.parametrize("alias_differs", [0, 1])
def test_the_alias_is_asked_for_and_never_assumed(alias_differs: int) -> None:
    """T39."""
    with rig(alias_differs=alias_differs) as gpu:
        for maker in (MAKERS["pinned"], MAKERS["hostalloc"]):
            with maker(gpu.service, 8192) as buffer:
                assert (buffer.device_address != buffer.host_address) == bool(alias_differs)
                assert buffer.copy_address == buffer.device_address
                buffer.array()[-1] ^= 1
                with pytest.raises(VerifyError, match="does not read what was written"):
                    buffer.verify()


def test_hbm_has_no_host_view_and_pageable_no_device_address(gpu: Rig) -> None:
    with hbm(gpu.service, 64) as buffer:
        assert buffer.host_address is None
        with pytest.raises(ValueError, match="no host view"):
            buffer.array()
    with pageable(gpu.service, 64) as buffer:
        assert buffer.device_address is None
        assert buffer.copy_address == buffer.host_address
        with pytest.raises(ValueError, match="multiple"):
            buffer.array("V12")
        buffer.array()[63] ^= 1
        with pytest.raises(VerifyError, match="does not hold the payload"):
            buffer.verify()


def test_registering_covers_exactly_the_bytes_asked(gpu: Rig) -> None:
    gpu.fake.forget()
    with pinned(gpu.service, 5000, threads=2) as buffer:
        call = next(c for c in gpu.fake.trace() if c.name == "cuMemHostRegister_v2")
        assert call.args[:3] == (buffer.host_address, 5000, buffers.REGISTER)
        assert buffer.placement is not None
        assert buffer.placement.resident in (8192, None)


def test_the_last_bytes_are_looked_at(gpu: Rig) -> None:
    """T55: whoever covers a size in part leaves the tail."""
    for nbytes in (8, 64 << 10, (64 << 10) + 1, 5 * MiB + 3):
        with hbm(gpu.service, nbytes) as buffer:
            last = buffer.copy_address + nbytes - 1
            gpu.fake.poke(last, bytes([int(gpu.fake.peek(last, 1)[0]) ^ 1]))
            with pytest.raises(VerifyError, match=f"of {nbytes}"):
                buffer.verify()


def test_everything_is_given_back_last_first(gpu: Rig) -> None:
    buffer = pinned(gpu.service, 4096)
    dropped: list[str] = []
    buffer_close = host.Region.drop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.Region, "drop", lambda self: (dropped.extend(gpu.fake.names()), buffer_close(self)))
        gpu.fake.forget()
        buffer.close()
    assert dropped == ["cuMemHostUnregister"]  # pages are unpinned before they go


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_bytes_are_a_usage_error(gpu: Rig, make: Make, nbytes: int) -> None:
    with pytest.raises(UsageError, match="at least one byte"):
        make(gpu.service, nbytes)


def test_an_unknown_way_to_pin_is_a_usage_error(gpu: Rig) -> None:
    with pytest.raises(UsageError, match="register or hostalloc"):
        pinned(gpu.service, 4096, how="mlock")  # type: ignore[arg-type]


def test_more_than_there_is_says_what_is_free() -> None:
    with rig(total_bytes=8 * MiB, pin_limit=4 * MiB) as gpu:
        with pytest.raises(
            Unavailable, match=r"no 8388608 bytes of GPU memory.*OUT_OF_MEMORY, \d+ of 8388608 bytes free"
        ):
            hbm(gpu.service, 8 * MiB)
        for maker in (MAKERS["pinned"], MAKERS["hostalloc"]):
            with pytest.raises(Unavailable, match=r"5 MiB could not be had.*OUT_OF_MEMORY.*pinlimit"):
                maker(gpu.service, 5 * MiB)


def test_managed_memory_beyond_the_free_is_refused_before_the_call() -> None:
    with rig(total_bytes=8 * MiB) as gpu:
        free, _ = gpu.device.memory()
        gpu.fake.forget()
        with pytest.raises(Unavailable, match="beyond free GPU memory is not measured"):
            managed(gpu.service, free + 1)
        assert "cuMemAllocManaged" not in gpu.fake.names()
        gpu.fake.set(managed=0)
        with pytest.raises(Unavailable, match="no managed memory"):
            managed(gpu.service, 4096)


def test_a_wrong_label_is_caught_before_a_number(gpu: Rig) -> None:
    gpu.fake.set(registered_attribute=2)
    with pytest.raises(VerifyError, match=r"calls this buffer something else.*got 'hbm at"):
        pinned(gpu.service, 4096)
    gpu.fake.set(registered_attribute=0)
    buffer = pageable(gpu.service, 4096)
    gpu.device.call("cuMemHostRegister", buffer.host_address, 4096, 0)
    with pytest.raises(VerifyError, match=r"got 'pinned at .*expected pageable"):
        buffers._expect(gpu.device, buffer.host_address or 0, "pageable", "pageable")
    gpu.device.call("cuMemHostUnregister", buffer.host_address)
    buffer.close()


def test_memory_of_another_gpu_is_caught() -> None:
    with fake(devices=2) as lib:
        driver = Driver(lib.path)
        with (
            Device(driver, 0) as first,
            Device(driver, 1) as second,
            Service(second, IMAGE) as service,
            hbm(service, 4096) as buffer,
        ):
            first.bind()
            with pytest.raises(VerifyError, match="on another GPU, got 'GPU 1', expected GPU 0"):
                buffers._expect(first, buffer.copy_address, "hbm", "hbm")
            second.bind()
        assert lib.live() == {}


# -- placement ---------------------------------------------------------------------------------------------------------


def test_pinned_pages_come_from_the_node_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    monkeypatch.setattr(numa, "bind", lambda _address, _nbytes, node: (bound.append(node), Fact(True))[1])
    with rig(numa_node=0) as gpu, pinned(gpu.service, 4096) as buffer:
        assert bound == [0]
        assert "gpu_node_unknown" not in buffer.flags


def test_what_is_not_known_of_the_place_is_flagged(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "nodes", lambda _root=None: Fact(None, "no /sys"))
    with pinned(gpu.service, 4096) as buffer:
        assert "gpu_node_unknown" in buffer.flags
    monkeypatch.setattr(numa, "histogram", lambda *_: Fact({}))
    with pinned(gpu.service, 4096, how="hostalloc") as buffer:
        assert {"nodes_unknown", "pages_unverified"} <= set(buffer.flags)
        assert buffer.placement is not None
        assert buffer.placement.nodes is None
    monkeypatch.setattr(numa, "histogram", lambda *_: Fact({3: 4096}))
    with pinned(gpu.service, 4096, how="hostalloc", node=0) as buffer:
        assert "misplaced" in buffer.flags


# -- every failure point -----------------------------------------------------------------------------------------------


def scenario(driver: Driver, make: Make) -> None:
    with Device(driver) as device, Service(device, IMAGE) as service, make(service, 4100) as buffer:
        buffer.refill(2)


def outcomes(make: Make, code: int, **how: bool) -> Iterator[tuple[str, KvbenchError | None, dict[str, int]]]:
    """Fail each call of the scenario in turn: yield its name, the error and what is left alive."""
    with fake() as lib:
        for k in range(1, 1000):
            lib.reset()
            driver = Driver(lib.path)
            lib.forget()
            lib.fail(k, code, **how)
            error = None
            try:
                scenario(driver, make)
            except KvbenchError as raised:
                error = raised
            if not lib.fired:
                return
            yield lib.names()[k - 1], error, lib.live()
    pytest.fail("the scenario does not end")


# The one question a driver may not know; sysfs answers it instead.
TOLERATED = "cuDeviceGetAttribute"


@pytest.mark.parametrize("code", [2, 999])
def test_any_failing_call_unwinds_what_was_done_and_says_so_in_a_line(make: Make, code: int) -> None:
    seen, silent = [], []
    for name, error, live in outcomes(make, code):
        assert live == {}, name
        seen.append(name)
        if error is None:
            silent.append(name)
            continue
        assert isinstance(error, (CudaError, Unavailable))
        assert "\n" not in str(error)
        assert name.partition("_v")[0] in str(error) or (code, name) == (2, "cuMemAlloc_v2")
        assert {2: "CUDA_ERROR_OUT_OF_MEMORY", 999: "CUDA_ERROR_UNKNOWN"}[code] in str(error)
    assert silent == [TOLERATED]
    assert {"cuDevicePrimaryCtxRetain", "cuMemAlloc_v2", "cuLaunchKernel", "cuPointerGetAttributes"} <= set(seen)


def test_what_the_driver_keeps_is_all_that_stays(make: Make) -> None:
    """A release that fails and does not release leaves one thing; what lies below it is given back all the same."""
    releases = ("cuMemFree_v2", "cuMemFreeHost", "cuMemHostUnregister", "cuStreamDestroy_v2", "cuModuleUnload")
    seen = set()
    for name, error, live in outcomes(make, 999, keep=True):
        if name in releases:
            seen.add(name)
            assert isinstance(error, CudaError)
            assert sum(live.values()) == 1, (name, live)
    assert {"cuMemFree_v2", "cuStreamDestroy_v2", "cuModuleUnload"} <= seen


def test_a_device_error_anywhere_ends_in_poison_without_another_call(make: Make) -> None:
    for name, error, _ in outcomes(make, 719, sticky=True):
        assert isinstance(error, PoisonedDevice) or name == TOLERATED, name
        assert "\n" not in str(error)


# -- how much can be pinned --------------------------------------------------------------------------------------------


def test_the_probe_finds_the_limit_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake() as lib:
        monkeypatch.setenv("FAKE_CUDA", f"pin_limit={5 * MiB + 100}")
        found = pinned_limit(library=lib.path, ceiling=64 * MiB, first=MiB)
        assert (found.nbytes, found.ended) == (5 * MiB, "refused")
        assert "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY" in found.reason
        assert lib.names() == []  # nothing of it happened in this process


@pytest.mark.parametrize(
    ("words", "nbytes", "ended"),
    [("", 3 * MiB + 1, "ceiling"), (f"die_limit={2 * MiB}", MiB, "killed"), ("pin_limit=1", None, "refused"),
     ("devices=0", None, "failed")],
)  # fmt: skip
def test_how_the_probe_ends(monkeypatch: pytest.MonkeyPatch, words: str, nbytes: int | None, ended: str) -> None:
    monkeypatch.setenv("FAKE_CUDA", words)
    with fake() as lib:
        found = pinned_limit(library=lib.path, ceiling=3 * MiB + 1, first=MiB)
        assert (found.nbytes, found.ended) == (nbytes, ended)
        assert found.reason


def test_the_probe_of_a_machine_without_driver_or_time_says_so(tmp_path: Path) -> None:
    found = pinned_limit(library=tmp_path / "none.so", ceiling=MiB)
    assert (found.nbytes, found.ended) == (None, "failed")
    assert "no NVIDIA driver" in found.reason
    assert pinned_limit(ceiling=MiB, timeout_s=0.001).ended == "timeout"


def test_the_default_ceiling_leaves_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "kvbench.memory.cuda.pinlimit.available_memory"
    monkeypatch.setattr(module, lambda: Fact(Available(2 * MiB, MiB, "test")))
    with fake() as lib:
        assert pinned_limit(library=lib.path, first=256 << 10).nbytes == int(0.8 * MiB)
    monkeypatch.setattr(module, lambda: Fact(None, "no /proc"))
    assert pinned_limit().ended == "failed"


def test_a_line_cut_short_is_no_reading() -> None:
    assert _outcome('{"pinned": 7}\n{"pinned": 9', "killed", "x") == PinnedLimit(7, "killed", "x")
    assert _outcome("", "killed", "x") == PinnedLimit(None, "killed", "x")


# -- the service kernels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", payload.KINDS)
@pytest.mark.parametrize("nbytes", [1, 8, 15, MiB - 1, MiB, MiB + 9, 2 * MiB])
def test_both_sides_write_and_sum_the_same(gpu: Rig, kind: payload.Kind, nbytes: int) -> None:
    with hbm(gpu.service, nbytes, kind=kind, seed=5) as buffer:
        expected = payload.expected(nbytes, 5, kind)
        assert np.array_equal(gpu.service.read(buffer.copy_address, nbytes), expected)
        assert buffer.checksum() == payload.checksum(expected)
        before = buffer.checksum()
        gpu.fake.poke(buffer.copy_address + nbytes // 2, bytes([int(expected[nbytes // 2]) ^ 4]))
        assert buffer.checksum() != before


def test_swapped_words_and_blocks_change_the_sum(gpu: Rig) -> None:
    with hbm(gpu.service, 2 * MiB) as buffer:
        data = payload.expected(2 * MiB)
        before = buffer.checksum()
        for a, b, n in ((0, 8, 8), (0, MiB, MiB)):
            swapped = data.copy()
            swapped[a : a + n], swapped[b : b + n] = data[b : b + n], data[a : a + n]
            gpu.service.write(buffer.copy_address, swapped)
            assert buffer.checksum() == payload.checksum(swapped) != before


def test_sums_beyond_the_scratch_get_their_own(gpu: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.memory.cuda.service.SUMS", 1)
    with hbm(gpu.service, 2 * MiB + 1) as buffer:
        gpu.fake.forget()
        assert buffer.checksum() == payload.checksum(payload.expected(2 * MiB + 1))
        sums = next(c for c in gpu.fake.trace() if c.name == "cuMemAlloc_v2")
        assert sums.args[0] == 24


def test_an_unreadable_address_is_not_a_checksum(gpu: Rig) -> None:
    with pytest.raises(PoisonedDevice):
        gpu.service.checksum(ctypes.addressof(ctypes.c_uint64()), 8)
