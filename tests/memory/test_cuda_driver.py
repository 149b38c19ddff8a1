"""The driver layer: its table against the real headers, entry points by version, one clear line for every failure."""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.errors import Unavailable, UsageError
from kvbench.memory.cuda import driver as driver_module
from kvbench.memory.cuda import entries
from kvbench.memory.cuda.device import Device, Event, Module, Stream
from kvbench.memory.cuda.driver import CudaError, Driver, PoisonedDevice
from kvbench.memory.cuda.entries import CONSTANTS, ENTRIES, GET_PROC_ADDRESS, STICKY, STRUCTURES, Entry
from tests.fake_cuda import IMAGE, Fake, Rig, compiler, fake, include, rig
from tests.memory.test_limits import tree
from tests.memory.test_numa import node_files


@pytest.fixture
def lib() -> Iterator[Fake]:
    with fake() as made:
        yield made


@pytest.fixture
def gpu() -> Iterator[Rig]:
    with rig() as made:
        yield made


# -- the table against the headers -----------------------------------------------------------------------------------


def declaration(number: int, entry: Entry) -> str:
    """Return C that compiles only if ``entry`` is the type the headers give this version of this name."""
    arguments = ", ".join(entry.arguments) or "void"
    return (
        f"typedef CUresult (CUDAAPI *Ours{number})({arguments});\n"
        f"_Static_assert(__builtin_types_compatible_p(Ours{number}, PFN_{entry.name}_v{entry.version}), "
        f'"{entry.name} {entry.version}");\n'
        f"_Static_assert(__builtin_types_compatible_p(Ours{number}, __typeof__(&{entry.symbol})), "
        f'"{entry.symbol}");\n'
    )


def compiles(tmp_path: Path, body: str) -> str:
    """Return what the compiler objects to in ``body``; empty when it accepts it."""
    source = tmp_path / "check.c"
    head = "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n#include <cudaTypedefs.h>\n#include <stddef.h>\n"
    source.write_text(head + body, encoding="utf-8")
    command = [compiler(), "-std=gnu11", "-Werror", "-fsyntax-only", f"-I{include()}", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_every_signature_is_the_one_of_the_headers(tmp_path: Path) -> None:
    every = [*ENTRIES.values(), GET_PROC_ADDRESS]
    assert compiles(tmp_path, "".join(declaration(i, entry) for i, entry in enumerate(every))) == ""


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("cuMemAlloc", {"arguments": ("CUdeviceptr*", "unsigned int")}),  # what the first version took
        ("cuMemcpyBatchAsync", {"version": 12080}),  # the argument list without failIdx at the version that has it
        ("cuMemcpyBatchAsync", {"symbol": "cuMemcpyBatchAsync"}),
        ("cuCtxSetCurrent", {"arguments": ()}),
    ],
)
def test_a_wrong_signature_does_not_compile(tmp_path: Path, key: str, change: dict[str, object]) -> None:
    assert "static assertion failed" in compiles(tmp_path, declaration(0, replace(ENTRIES[key], **change)))  # type: ignore[arg-type]


def test_types_structures_and_constants_are_those_of_the_headers(tmp_path: Path) -> None:
    lines = [f'_Static_assert({name} == {value}, "{name}");' for name, value in (*CONSTANTS.items(),)]
    lines += [f'_Static_assert({name} == {value}, "{name}");' for value, name in STICKY.items()]
    for name, kind in entries.C_TYPES.items():
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "{name}");')
    for name in entries.HANDLES:
        lines.append(f'_Static_assert(sizeof({name}) == sizeof(void *), "{name}");')
    for name, structure in STRUCTURES.items():
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name}");')
        for field, *_ in structure._fields_:
            offset = getattr(structure, field).offset
            lines.append(f'_Static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}");')
    assert compiles(tmp_path, "\n".join(lines)) == ""


def test_every_error_the_header_calls_final_is_sticky() -> None:
    text = (include() / "cuda.h").read_text(encoding="utf-8", errors="replace")
    block = text[text.index("typedef enum cudaError_enum") :].partition("} CUresult")[0]
    final = set()
    for piece in block.split("/**")[1:]:
        comment, _, value = piece.partition("*/")
        found = re.match(r"\s*(CUDA_ERROR_\w+)\s*=\s*(\d+)", value)
        if found and re.search("must be (terminated|destroyed)", " ".join(comment.replace("*", " ").split())):
            final.add((int(found[2]), found[1]))
    assert len(final) > 8
    assert final <= set(STICKY.items())


# -- loading -----------------------------------------------------------------------------------------------------------


def test_every_entry_point_is_found_at_its_version(lib: Fake) -> None:
    driver = Driver(lib.path)
    assert (driver.version, driver.version_text) == (13000, "13.0")
    assert all(driver.has(key) for key in ENTRIES)
    assert driver.address("cuMemcpyBatchAsync") != driver.address("cuMemcpyBatchAsync@12080")


def test_plain_symbols_serve_a_driver_without_the_lookup(lib: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Driver(lib.path)
    monkeypatch.setattr(driver_module, "GET_PROC_ADDRESS", replace(GET_PROC_ADDRESS, symbol="cuNoSuchThing"))
    plain = Driver(lib.path)
    assert {key: plain.address(key) for key in ENTRIES} == {key: asked.address(key) for key in ENTRIES}


@pytest.mark.parametrize(
    ("version", "present", "absent"),
    [
        (12040, (), ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync@12080")),
        (12080, ("cuMemcpyBatchAsync@12080",), ("cuMemcpyBatchAsync",)),
        (13000, ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync@12080"), ()),
    ],
)
def test_an_older_driver_lacks_what_came_later(
    lib: Fake, version: int, present: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    lib.set(driver_version=version)
    driver = Driver(lib.path)
    assert all(map(driver.has, present))
    for key in absent:
        assert not driver.has(key)
        with pytest.raises(Unavailable, match=r"lacks cuMemcpyBatchAsync, got .a driver of CUDA 12"):
            driver.call(key)


def test_a_driver_too_old_to_work_with_is_named(lib: Fake) -> None:
    lib.set(driver_version=10020)
    with pytest.raises(Unavailable, match=r"driver of CUDA 10\.2.*update the driver"):
        Driver(lib.path)


def test_no_library_and_no_device_are_unavailable(lib: Fake, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no NVIDIA driver.*cannot open"):
        Driver(tmp_path / "libcuda.so.1")
    lib.set(devices=0)
    with pytest.raises(Unavailable, match="CUDA_ERROR_NO_DEVICE"):
        Driver(lib.path)


def test_every_call_that_loads_a_driver_may_fail(lib: Fake) -> None:
    lines: list[str] = []
    for k in range(1, 200):
        lib.reset()
        lib.fail(k, 803)
        try:
            Driver(lib.path)
        except (CudaError, Unavailable) as error:
            lines.append(str(error))
        if not lib.fired:
            break
    assert len(lines) == k - 1 > len(ENTRIES)
    assert all("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in line and "\n" not in line for line in lines)


# -- calls -------------------------------------------------------------------------------------------------------------


def test_an_error_names_call_result_and_text(gpu: Rig) -> None:
    gpu.fake.fail(1, 1, call="cuMemGetInfo_v2")
    with pytest.raises(CudaError) as caught:
        gpu.device.memory()
    assert str(caught.value) == "CUDA driver: cuMemGetInfo: CUDA_ERROR_INVALID_VALUE (1), invalid argument"
    gpu.device.memory()


def test_an_unknown_result_is_still_a_clear_line(gpu: Rig) -> None:
    gpu.fake.fail(1, 12345, call="cuMemGetInfo_v2")
    with pytest.raises(
        CudaError, match=r"cuMemGetInfo: CUresult 12345 \(12345\), an error this driver has no text for"
    ):
        gpu.device.memory()


def test_after_a_device_error_the_driver_is_not_called_again(gpu: Rig) -> None:
    gpu.fake.fail(1, 719, call="cuCtxSynchronize", sticky=True)
    with pytest.raises(PoisonedDevice, match=r"CUDA_ERROR_LAUNCH_FAILED.*new worker"):
        gpu.device.synchronize()
    gpu.fake.forget()
    for use in (gpu.device.memory, gpu.device.synchronize, lambda: Stream(gpu.device)):
        with pytest.raises(PoisonedDevice):
            use()
    assert gpu.fake.names() == []


def test_a_compiled_loop_hands_its_result_in(gpu: Rig) -> None:
    gpu.driver.check("cuMemcpyAsync", 0)
    with pytest.raises(CudaError, match="cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE"):
        gpu.driver.check("cuMemcpyAsync", 1)
    with pytest.raises(PoisonedDevice):
        gpu.driver.check("cuMemcpyAsync", 700)
    assert gpu.driver.poisoned is not None


def test_addresses_are_callable_from_anywhere(gpu: Rig) -> None:
    count = ctypes.c_int()
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(gpu.driver.address("cuDeviceGetCount"))
    assert (function(ctypes.addressof(count)), count.value) == (0, 1)


def test_each_thread_gets_the_context_once(gpu: Rig) -> None:
    gpu.fake.forget()
    found: list[object] = []

    def work() -> None:
        try:
            found.append((gpu.device.memory(), gpu.device.memory()))
        except CudaError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gpu.device.memory()
    assert found == [(gpu.device.memory(), gpu.device.memory())]
    calls = gpu.fake.trace()
    assert [call.name for call in calls] == ["cuCtxSetCurrent"] + 5 * ["cuMemGetInfo_v2"]
    assert [call.thread == threading.get_native_id() for call in calls] == 3 * [False] + 3 * [True]


def test_the_fake_refuses_a_thread_without_context(gpu: Rig) -> None:
    codes: list[int] = []
    free = ctypes.c_size_t()
    thread = threading.Thread(
        target=lambda: codes.append(gpu.driver.code("cuMemGetInfo", ctypes.byref(free), ctypes.byref(free)))
    )
    thread.start()
    thread.join()
    assert codes == [201]


# -- devices -----------------------------------------------------------------------------------------------------------


def test_facts_come_from_the_driver(tmp_path: Path) -> None:
    with fake(devices=2, l2_bytes=50 << 20, sms=132, compute_major=12) as lib:
        root = tree(tmp_path, {"sys/bus/pci/devices/0000:f1:00.0/numa_node": "1"} | node_files(1, "0-3", 1 << 20))
        with Device(Driver(lib.path), 1, root) as device:
            facts = device.facts
        assert (facts.ordinal, facts.name, facts.bus_id) == (1, "Fake GPU 1", "0000:F1:00.0")
        assert (facts.arch, facts.sms, facts.l2_bytes, facts.total_bytes) == ((12, 0), 132, 50 << 20, 256 << 20)
        assert facts.node.value == 1  # of sysfs: the driver names none


@pytest.mark.parametrize(
    ("number", "text", "expected"),
    [
        (0, "1", 0),
        (-1, "-1", "name no node"),
        (-1, "x", "cannot read"),
        (1, "0", "no node with CPUs"),
        (5, "0", "no node"),
    ],
)
def test_the_gpu_node_is_a_node_with_cpus_or_unknown(
    tmp_path: Path, number: int, text: str, expected: int | str
) -> None:
    files = {"sys/bus/pci/devices/0000:f0:00.0/numa_node": text} | node_files(0, "0", 1) | node_files(1, "", 1)
    with fake(numa_node=number) as lib, Device(Driver(lib.path), 0, tree(tmp_path, files)) as device:
        node = device.facts.node
        assert node.value == expected if isinstance(expected, int) else node.value is None and expected in node.reason


def test_a_driver_that_does_not_know_its_node_leaves_it_to_sysfs(tmp_path: Path) -> None:
    with fake() as lib:
        driver = Driver(lib.path)
        lib.fail(5, 1, call="cuDeviceGetAttribute")
        with Device(driver, 0, tmp_path) as device:
            assert lib.fired
            assert device.facts.node.value is None
            assert "numa_node" in device.facts.node.reason


@pytest.mark.parametrize("ordinal", [-1, 1, 7])
def test_an_unknown_ordinal_is_a_usage_error(lib: Fake, ordinal: int) -> None:
    with pytest.raises(UsageError, match=r"no such GPU, .*expected 0 to 0"):
        Device(Driver(lib.path), ordinal)


def test_a_closed_device_stream_or_event_cannot_be_used(lib: Fake) -> None:
    with Device(Driver(lib.path)) as device:
        stream, event = Stream(device), Event(device)
        stream.close()
        stream.close()
        with pytest.raises(ValueError, match="stream is closed"):
            stream.synchronize()
        event.close()
        with pytest.raises(ValueError, match="event is closed"):
            event.synchronize()
    device.close()
    with pytest.raises(ValueError, match="device is closed"):
        device.memory()
    assert lib.live() == {}


def test_an_image_or_kernel_that_is_none_is_refused(gpu: Rig) -> None:
    with pytest.raises(CudaError, match="cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE"):
        Module(gpu.device, b"not a cubin")
    with Module(gpu.device, IMAGE + b" kv_unheard_of") as module:
        for name in ("kv_unheard_of", "kv_other"):
            with pytest.raises(CudaError, match="cuModuleGetFunction: CUDA_ERROR_NOT_FOUND"):
                module.function(name)
