"""GPU traps on the fake driver: the whole look runs, passes on the code as it is, and fails with its fault in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import Unavailable
from kvbench.memory.cuda import buffers
from kvbench.memory.cuda.buffers import GpuBuffer
from kvbench.memory.cuda.device import Device, Stream
from kvbench.memory.cuda.driver import Driver
from kvbench.memory.cuda.service import Service
from kvbench.timing import events, gpu_session
from kvbench.timing.events import EventClock
from kvbench.timing.traps import gpu_bed, gpu_board, gpu_clock, gpu_memory
from kvbench.timing.traps.catalogue import examine
from kvbench.timing.traps.catalogue_gpu import GPU_TRAPS
from kvbench.timing.traps.record import Finding, Trap
from kvbench.units import KiB, MiB
from tests.fake_cuda import IMAGE, Fake, fake

Patch = pytest.MonkeyPatch

# At sizes for a CPU. Those that compare two speeds of a device need a device: test_gpu_judges.py has their numbers.
LOOKS: dict[str, Callable[[], Finding]] = {
    "T8": lambda: gpu_memory.pageable_race((64 * KiB, 128 * KiB), 8),
    "T9": lambda: gpu_memory.source_overwritten(256 * KiB),
    "T20": lambda: gpu_clock.escaped_work(),
    "T27": lambda: gpu_memory.separate_blocks(4, 64 * KiB),
    "T38": lambda: gpu_memory.right_labels(64 * KiB),
    "T39": lambda: gpu_memory.device_alias(64 * KiB),
    "T48": lambda: gpu_memory.resident_source(256 * KiB),
    "T62": lambda: gpu_memory.free_memory(4 * MiB),
}
SPEEDS: dict[str, Callable[[], Finding]] = {
    "T7": lambda: gpu_memory.pinned_is_pinned(MiB),
    "T10": lambda: gpu_clock.beyond_l2(),
    "T11": lambda: gpu_clock.flush_flushes(),
    "T17": lambda: gpu_clock.launch_gaps(64 * KiB),
    "T18": lambda: gpu_clock.queue_depth(20),
    "T35": lambda: gpu_memory.write_combined(MiB),
    "T36": lambda: gpu_clock.large_buffers(MiB, 8 * MiB),
    "T47": lambda: gpu_memory.first_copy(MiB),
    "T54": lambda: gpu_clock.waited_for(4 * MiB),
    "T56": lambda: gpu_memory.pages_that_move(MiB),
}


@pytest.fixture
def driver(monkeypatch: Patch) -> Iterator[Fake]:
    """The fake as the driver of this process, with patience for a busy test machine."""
    with fake(l2_bytes=1 << 16) as made:
        opened = Driver(made.path)
        monkeypatch.setattr(gpu_session, "open_driver", lambda: opened)
        monkeypatch.setattr(gpu_session, "keep_context", lambda *_: None)
        monkeypatch.setattr(gpu_session, "image_of", lambda *_: IMAGE)
        monkeypatch.setattr(events, "ESCAPE_S", 0.02)
        monkeypatch.setattr(events, "ESCAPE_TRIES", 2)
        yield made
        assert opened.poisoned is not None or made.live() == {}


def look(name: str) -> Finding:
    return examine(Trap(name, "t", "m", "", (LOOKS | SPEEDS)[name])).finding


@pytest.mark.parametrize("name", LOOKS)
def test_the_code_as_it_is_is_in_no_trap(name: str, driver: Fake) -> None:
    found = look(name)
    assert found.verdict == "pass", found.reason


@pytest.mark.parametrize("name", SPEEDS)
def test_a_look_that_compares_speeds_runs_to_its_two_numbers(name: str, driver: Fake) -> None:
    found = look(name)
    assert found.found is not None, found.reason
    assert found.expected is not None
    assert found.found.value > 0


def test_all_traps_of_the_gpu_are_looked_at_or_judged() -> None:
    elsewhere = {"T15", "T26", "T37", "T40", "T41", "T42", "T43", "T44", "T45", "T46"}
    assert {trap.id for trap in GPU_TRAPS} == set(LOOKS) | set(SPEEDS) | elsewhere


def test_without_a_driver_none_applies_and_none_takes_time(monkeypatch: Patch) -> None:
    def absent() -> Driver:
        raise Unavailable("no GPU here: no such library")

    monkeypatch.setattr(gpu_session, "open_driver", absent)
    monkeypatch.setattr(gpu_session, "GpuSession", lambda *_: pytest.fail("it went on"))
    results = [examine(trap) for trap in GPU_TRAPS]
    assert {result.verdict for result in results} == {"not applicable"}
    assert {result.finding.reason for result in results} == {"no GPU here: no such library"}


def test_a_gpu_that_nvml_does_not_list_is_unknown(driver: Fake, monkeypatch: Patch) -> None:
    monkeypatch.setattr(gpu_bed, "read_gpus", lambda: gpu_bed.Gpus(None, reason="nvmlInit: version mismatch"))
    for name in ("T15", "T42", "T43", "T44", "T45"):
        found = examine(next(trap for trap in GPU_TRAPS if trap.id == name)).finding
        assert (found.verdict, "version mismatch" in found.reason) == ("unknown", True)


def test_a_gpu_without_its_compiler_is_unknown_not_absent(driver: Fake, monkeypatch: Patch) -> None:
    from kvbench.errors import MissingExtra

    def missing(*_: Any) -> bytes:
        raise MissingExtra("cuda-bindings", "compile", "compiling CUDA C++")

    monkeypatch.setattr(gpu_session, "image_of", missing)
    found = look("T62")
    assert (found.verdict, "cuda-bindings" in found.reason) == ("unknown", True)


# -- faults ------------------------------------------------------------------------------------------------------------


def copies_that_stay(patch: Patch) -> None:
    """A copy that reports success and moves nothing."""
    patch.setattr(Stream, "copy", lambda self, target, source, nbytes: self.count(1))


def checksum_of_one_word(patch: Patch) -> None:
    patch.setattr(Service, "checksum", lambda self, address, nbytes: 1)


def clock_counts_nothing(patch: Patch) -> None:
    patch.setattr(EventClock, "_counted", lambda self, work, calls, own, queue: (queue(), self._finish()))
    patch.setattr(EventClock, "_look_for_escapes", lambda self, work: None)


def only_counts(patch: Patch) -> None:
    patch.setattr(EventClock, "_look_for_escapes", lambda self, work: None)


def one_block_for_all(patch: Patch) -> None:
    real = GpuBuffer.copy_address.fget
    assert real is not None
    first: list[int] = []

    def address(self: GpuBuffer) -> int:
        first.append(real(self))
        return first[0]

    patch.setattr(GpuBuffer, "copy_address", property(address))


def everything_is_pinned(patch: Patch) -> None:
    patch.setattr(buffers.PointerFacts, "tier", property(lambda self: "pinned"))
    patch.setattr(buffers, "_expect", lambda device, address, tier, where: buffers.pointer_facts(device, address))


def directions_swapped(patch: Patch) -> None:
    real = Stream.copy
    patch.setattr(Stream, "copy", lambda self, target, source, nbytes: real(self, source, target, nbytes)
                  if nbytes == 64 * KiB else real(self, target, source, nbytes))  # fmt: skip


def host_address_for_the_device(patch: Patch) -> None:
    real = Service.checksum

    def checksum(self: Service, address: int, nbytes: int) -> int:
        # what the device reads at an address that means something else to it
        return real(self, address, nbytes) ^ (nbytes == 64 * KiB)

    patch.setattr(Service, "checksum", checksum)


def pages_given_back(patch: Patch) -> None:
    patch.setattr(gpu_memory, "mapping_bytes", lambda address, field: 4096)


def free_memory_stands_still(patch: Patch) -> None:
    patch.setattr(Device, "memory", lambda self: (1 << 27, 1 << 28))


FAULTS: list[tuple[str, Callable[[Patch], None], str]] = [
    ("T8", copies_that_stay, "were read before they had arrived"),
    ("T9", checksum_of_one_word, "holds what was written"),
    ("T20", clock_counts_nothing, "is not timed"),
    ("T20", only_counts, "is not timed"),
    ("T27", one_block_for_all, "share memory"),
    ("T38", everything_is_pinned, "another's name"),
    ("T38", directions_swapped, "another's name"),
    ("T39", host_address_for_the_device, "reads something else"),
    ("T48", pages_given_back, "pages are missing"),
    ("T62", free_memory_stands_still, "it is stale"),
]


@pytest.mark.parametrize(("name", "inject", "reason"), FAULTS, ids=[f"{n}-{f.__name__}" for n, f, _ in FAULTS])
def test_a_fault_in_the_measured_path_is_found(
    name: str, inject: Callable[[Patch], None], reason: str, driver: Fake, monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patch:
        inject(patch)
        found = look(name)
    assert found.verdict == "fail", found
    assert reason in found.reason or "payload check failed" in found.reason, found.reason


def test_the_real_paths_of_the_link_are_looked_at(driver: Fake, monkeypatch: Patch) -> None:
    """T37 and T40 run whole cases of the ladder: what these leave is what is judged."""
    batch = examine(Trap("T40", "t", "m", "", lambda: gpu_clock.batch_interface(64 * KiB))).finding
    assert batch.verdict == "pass", batch.reason
    both = examine(Trap("T37", "t", "m", "", lambda: gpu_clock.both_directions(64 * KiB))).finding
    assert both.found is not None, both.reason  # one lock serves both streams of the fake: the overlap is chance
    driver.set(driver_version=12000)
    old = Driver(driver.path)
    monkeypatch.setattr(gpu_session, "open_driver", lambda: old)
    assert "lacks" in examine(Trap("T40", "t", "m", "", lambda: gpu_clock.batch_interface(64 * KiB))).finding.reason


def test_a_broken_kernel_is_heard_in_a_process_of_its_own(driver: Fake, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(IMAGE)
    found = gpu_clock.swallowed_error(driver.path, image)
    assert found.verdict == "pass", found.reason


def test_the_link_watch_says_why_it_cannot_look(driver: Fake) -> None:
    found = examine(Trap("T46", "t", "m", "", lambda: gpu_board.link_under_load(64 * KiB))).finding
    assert found.verdict == "unknown"
    assert found.reason


def test_nothing_is_left_behind_when_a_look_breaks_off(driver: Fake) -> None:
    driver.fail(3, call="cuMemcpyAsync")
    found = look("T9")
    assert driver.fired
    assert (found.verdict, "cuMemcpyAsync" in found.reason) == ("fail", True)
