"""The fake driver behaves like the documented one where kvbench depends on it: a kinder fake would prove nothing."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvbench.memory.cuda.device import Event, Launch, Stream
from kvbench.memory.cuda.driver import CudaError, Driver, PoisonedDevice
from kvbench.memory.cuda.entries import MemAccessDesc, MemAllocationProp, MemcpyAttributes, MemLocation
from tests.fake_cuda import Rig, fake, rig

CHUNK = 2 << 20


@pytest.fixture
def gpu() -> Iterator[Rig]:
    with rig() as made:
        yield made


def alloc(gpu: Rig, nbytes: int) -> int:
    address = ctypes.c_uint64()
    gpu.device.call("cuMemAlloc", ctypes.byref(address), nbytes)
    return address.value


def host_alloc(gpu: Rig, nbytes: int) -> int:
    pointer = ctypes.c_void_p()
    gpu.device.call("cuMemHostAlloc", ctypes.byref(pointer), nbytes, 3)
    return pointer.value or 0


def wait_for(condition: object) -> None:
    end = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.001)


def test_nothing_works_before_init_and_after_the_context_is_gone() -> None:
    with fake() as lib:
        driver = Driver(lib.path)
        lib.reset()
        free = ctypes.c_size_t()
        ask = ("cuMemGetInfo", ctypes.byref(free), ctypes.byref(free))
        assert driver.code(*ask) == 3
        driver.call("cuInit", 0)
        assert driver.code(*ask) == 201
        context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        driver.call("cuCtxSetCurrent", context)
        assert driver.code(*ask) == 0
        driver.call("cuDevicePrimaryCtxRelease", 0)
        assert driver.code(*ask) == 709
        assert driver.code("cuDevicePrimaryCtxRelease", 0) == 201


def test_device_addresses_are_not_for_the_host(gpu: Rig) -> None:
    code = (
        "import ctypes, sys\n"
        "from kvbench.memory.cuda.driver import Driver\n"
        "from kvbench.memory.cuda.device import Device\n"
        "d = Device(Driver(sys.argv[1])); p = ctypes.c_uint64(); d.call('cuMemAlloc', ctypes.byref(p), 4096)\n"
        "print(flush=True); ctypes.memset(p.value, 1, 1)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(gpu.fake.path)], capture_output=True, check=False)
    assert (done.stdout, done.returncode) == (b"\n", -11)


def test_streams_run_behind_the_caller_and_in_order(gpu: Rig) -> None:
    address, data = alloc(gpu, 8), np.arange(8, dtype=np.uint8)
    gpu.service.write(address, np.zeros(8, np.uint8))
    with Stream(gpu.device) as stream:
        gpu.fake.set(pause=1)
        stream.set_bytes(address, 7, 8)
        stream.copy(address, data.ctypes.data, 4)
        assert gpu.driver.code("cuStreamQuery", stream.handle) == 600
        assert not gpu.fake.peek(address, 8).any()
        gpu.fake.set(pause=0)
        stream.synchronize()
        assert list(gpu.fake.peek(address, 8)) == [0, 1, 2, 3, 7, 7, 7, 7]
    gpu.device.call("cuMemFree", address)


def test_a_pinned_source_is_read_late_and_a_pageable_one_at_the_call(gpu: Rig) -> None:
    """T8 and T9: the two ways to get the wrong bytes are there to be caught."""
    address, pinned = alloc(gpu, 16), host_alloc(gpu, 8)
    pageable = np.full(8, 1, np.uint8)
    ctypes.memset(pinned, 1, 8)
    with Stream(gpu.device) as stream:
        gpu.fake.set(pause=1)
        stream.copy(address, pinned, 8)
        stream.copy(address + 8, pageable.ctypes.data, 8)
        ctypes.memset(pinned, 2, 8)
        pageable[:] = 2
        gpu.fake.set(pause=0)
        stream.synchronize()
    assert list(gpu.fake.peek(address, 16)) == 8 * [2] + 8 * [1]
    gpu.device.call("cuMemFreeHost", pinned)
    gpu.device.call("cuMemFree", address)


def test_submission_waits_when_the_queue_is_full(gpu: Rig) -> None:
    address, done = alloc(gpu, 8), threading.Event()
    with Stream(gpu.device) as stream:

        def work() -> None:
            for _ in range(5):
                stream.set_bytes(address, 1, 8)
            done.set()

        gpu.fake.set(pause=1, depth=4)
        thread = threading.Thread(target=work)
        thread.start()
        wait_for(lambda: stream.queued == 4)
        assert not done.wait(0.02)
        gpu.fake.set(pause=0)
        assert done.wait(10)
        thread.join()
        stream.synchronize()
    gpu.device.call("cuMemFree", address)


def test_events_keep_virtual_time_exactly() -> None:
    with rig(virtual_time=1, op_ns=700, byte_ps=250, record_ns=40, event_quantum_ns=10) as gpu:
        address = alloc(gpu, 4000)
        with Stream(gpu.device) as stream, Event(gpu.device) as start, Event(gpu.device) as stop:
            with pytest.raises(CudaError, match="INVALID_HANDLE"):
                stop.since(start)
            gpu.fake.set(pause=1)
            stream.record(start)
            stream.set_bytes(address, 1, 4000)
            stream.record(stop)
            with pytest.raises(CudaError, match="NOT_READY"):
                stop.since(start)
            gpu.fake.set(pause=0)
            stop.synchronize()
            assert stop.since(start) == pytest.approx((700 + 1000 + 40) * 1e-9, rel=1e-6)
        gpu.device.call("cuMemFree", address)


def test_an_event_orders_two_streams(gpu: Rig) -> None:
    address = alloc(gpu, 8)
    with Stream(gpu.device) as first, Stream(gpu.device) as second, Event(gpu.device) as event:
        gpu.fake.set(pause=1)
        first.set_bytes(address, 1, 8)
        first.record(event)
        gpu.device.call("cuStreamWaitEvent", second.handle, event.handle, 0)
        second.set_bytes(address, 2, 8)
        gpu.fake.set(pause=0)
        gpu.device.synchronize()
        assert list(gpu.fake.peek(address, 8)) == 8 * [2]
    gpu.device.call("cuMemFree", address)


def test_addresses_outside_an_allocation_are_refused_or_fatal(gpu: Rig) -> None:
    address = alloc(gpu, 64)
    with Stream(gpu.device) as stream:
        for target, size in ((address, 65), (address + 60, 8)):
            with pytest.raises(CudaError, match="INVALID_VALUE"):
                stream.set_bytes(target, 0, size)
        stream.launch(Launch(gpu.service._fill, 1, 32, [ctypes.c_uint64(v) for v in (address, 65, address, 0, 0)]))
        with pytest.raises(PoisonedDevice, match="ILLEGAL_ADDRESS"):
            stream.synchronize()
    assert gpu.fake.live()["device"] == 2  # of the broken context nothing can be given back


def test_a_kernel_does_not_read_registered_memory_by_its_host_address(gpu: Rig) -> None:
    """T39: where the device cannot use host pointers, only the alias works."""
    host = host_alloc(gpu, 4096)
    with pytest.raises(PoisonedDevice, match="ILLEGAL_ADDRESS"):
        gpu.service.checksum(host, 4096)


def test_faults_strike_the_named_call_once_and_release_calls_still_release(gpu: Rig) -> None:
    address = alloc(gpu, 8)
    gpu.fake.fail(2, 999, call="cuMemGetInfo_v2")
    gpu.device.memory()
    assert not gpu.fake.fired
    with pytest.raises(CudaError, match="cuMemGetInfo: CUDA_ERROR_UNKNOWN"):
        gpu.device.memory()
    gpu.device.memory()
    before = gpu.fake.live()["device"]
    gpu.fake.fail(1, 999, call="cuMemFree_v2", keep=True)
    with pytest.raises(CudaError, match="cuMemFree"):
        gpu.device.call("cuMemFree", address)
    assert gpu.fake.live()["device"] == before
    gpu.fake.fail(1, 999, call="cuMemFree_v2")
    with pytest.raises(CudaError, match="cuMemFree"):
        gpu.device.call("cuMemFree", address)
    assert gpu.fake.live()["device"] == before - 1


def test_a_broken_operation_breaks_everything_after_it(gpu: Rig) -> None:
    address = alloc(gpu, 8)
    gpu.service.write(address, np.zeros(8, np.uint8))
    with Stream(gpu.device) as stream:
        gpu.fake.fail_op(2, 719)
        for value in (1, 2, 3):
            gpu.driver.code("cuMemsetD8Async", address, value, 8, stream.handle)
        assert gpu.driver.code("cuStreamSynchronize", stream.handle) == 719
        assert gpu.driver.code("cuMemFree", address) == 719
        assert list(gpu.fake.peek(address, 8)) == 8 * [1]
        gpu.driver.error("cuMemFree", 719)  # tells the driver layer what the codes above, asked unchecked, did not


@pytest.mark.parametrize("version", [12080, 13000])
def test_the_batched_copy_has_two_interfaces(version: int) -> None:
    """T40: the same name with and without failIdx."""
    with rig(driver_version=version) as gpu:
        source, target = alloc(gpu, 64), alloc(gpu, 64)
        gpu.service.write(source, np.arange(64, dtype=np.uint8))
        gpu.service.write(target, np.zeros(64, np.uint8))
        to, of = (ctypes.c_uint64 * 2)(target + 32, target), (ctypes.c_uint64 * 2)(source, source + 8)
        sizes, indices = (ctypes.c_size_t * 2)(8, 4), (ctypes.c_size_t * 1)(0)
        attributes = (MemcpyAttributes * 1)(MemcpyAttributes(srcAccessOrder=1))
        failed = ctypes.c_size_t(5)
        arguments = [to, of, sizes, 2, attributes, indices, 1]
        with Stream(gpu.device) as stream:
            if version < 13000:
                gpu.device.call("cuMemcpyBatchAsync@12080", *arguments, ctypes.byref(failed), stream.handle)
            else:
                with pytest.raises(CudaError, match="INVALID_VALUE"):
                    gpu.device.call("cuMemcpyBatchAsync", *arguments, None)  # the legacy stream is not allowed
                gpu.device.call("cuMemcpyBatchAsync", *arguments, stream.handle)
            stream.synchronize()
        assert list(gpu.fake.peek(target, 64)) == [8, 9, 10, 11, *(28 * [0]), *range(8), *(24 * [0])]
        for address in (source, target):
            gpu.device.call("cuMemFree", address)


def test_virtual_memory_is_reserved_mapped_shared_and_given_back(gpu: Rig) -> None:
    prop = MemAllocationProp(type=1, location=MemLocation(1, 0))
    access = MemAccessDesc(MemLocation(1, 0), 3)
    va, handle, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
    call, code = gpu.device.call, gpu.driver.code
    call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(prop), 0)
    assert size.value == CHUNK
    assert code("cuMemAddressReserve", ctypes.byref(va), CHUNK + 1, 0, 0, 0) == 1
    call("cuMemAddressReserve", ctypes.byref(va), 2 * CHUNK, 0, 0, 0)
    free = gpu.device.memory()[0]
    call("cuMemCreate", ctypes.byref(handle), CHUNK, ctypes.byref(prop), 0)
    assert gpu.device.memory()[0] == free - CHUNK
    for offset in (0, CHUNK):
        call("cuMemMap", va.value + offset, CHUNK, 0, handle.value, 0)
    assert code("cuMemMap", va.value, CHUNK, 0, handle.value, 0) == 1  # mapped already
    assert code("cuMemsetD8Async", va.value, 1, 8, gpu.service.stream.handle) == 1  # no access yet
    call("cuMemSetAccess", va.value, 2 * CHUNK, ctypes.byref(access), 1)
    gpu.service.write(va.value, np.arange(8, dtype=np.uint8))
    assert list(gpu.service.read(va.value + CHUNK, 8)) == list(range(8))
    gpu.service.fill(va.value + CHUNK - 64, 128)  # across both mappings
    assert gpu.fake.live()["mappings"] == 2
    assert code("cuMemAddressFree", va.value, 2 * CHUNK) == 1  # still mapped
    call("cuMemRelease", handle.value)
    assert gpu.device.memory()[0] == free - CHUNK  # the mappings hold the memory
    call("cuMemUnmap", va.value, 2 * CHUNK)
    assert gpu.device.memory()[0] == free
    call("cuMemAddressFree", va.value, 2 * CHUNK)


def test_unmapping_under_a_queued_operation_is_fatal(gpu: Rig) -> None:
    """T61: nothing waits for the streams at an unmap."""
    prop, access = MemAllocationProp(type=1, location=MemLocation(1, 0)), MemAccessDesc(MemLocation(1, 0), 3)
    va, handle = ctypes.c_uint64(), ctypes.c_uint64()
    gpu.device.call("cuMemAddressReserve", ctypes.byref(va), CHUNK, 0, 0, 0)
    gpu.device.call("cuMemCreate", ctypes.byref(handle), CHUNK, ctypes.byref(prop), 0)
    gpu.device.call("cuMemMap", va.value, CHUNK, 0, handle.value, 0)
    gpu.device.call("cuMemSetAccess", va.value, CHUNK, ctypes.byref(access), 1)
    with Stream(gpu.device) as stream:
        gpu.fake.set(pause=1)
        stream.set_bytes(va.value, 1, 8)
        gpu.device.call("cuMemUnmap", va.value, CHUNK)
        gpu.fake.set(pause=0)
        with pytest.raises(PoisonedDevice, match="ILLEGAL_ADDRESS"):
            stream.synchronize()


def test_nobody_else_in_the_process_finds_the_fake(gpu: Rig) -> None:
    code = (
        "import ctypes, sys\n"
        "def found():\n"
        "    try: ctypes.CDLL('libcuda.so.1')\n"
        "    except OSError: return False\n"
        "    return True\n"
        "before = found(); ctypes.CDLL(sys.argv[1]); print(before == found())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(gpu.fake.path)], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n"


def test_settings_reach_a_child_by_its_environment(gpu: Rig) -> None:
    code = "import sys; from kvbench.memory.cuda.driver import Driver; print(Driver(sys.argv[1]).version)"
    environment = os.environ | {"FAKE_CUDA": "driver_version=12040,devices=3"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(gpu.fake.path)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout == "12040\n"
