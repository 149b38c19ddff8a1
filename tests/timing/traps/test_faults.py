"""Each trap passes on the code as it is; with its fault in the code that measures, the same trap fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvbench import measure as measure_module
from kvbench import units
from kvbench.kernels import cache, compile_count, gather, jit, stream, team
from kvbench.kernels.stream import Stream
from kvbench.kernels.team import Team
from kvbench.machine import cgroup, state
from kvbench.machine.cgroup import Limit
from kvbench.machine.probe import Fact
from kvbench.machine.topology import Llc, Topology
from kvbench.memory import host, payload
from kvbench.memory.host import HostBuffer, Placement
from kvbench.memory.region import Region
from kvbench.timing import clock, sampler, samples
from kvbench.timing.budget import Budget
from kvbench.timing.gate import DelayGate
from kvbench.timing.sampler import _Side
from kvbench.timing.traps import compiled, counting, environment, memory, sampling
from kvbench.timing.traps.catalogue import examine
from kvbench.timing.traps.record import Finding, Trap
from kvbench.units import KiB, MiB

Patch = pytest.MonkeyPatch
Look = Callable[[], Finding]

# The traps at sizes a test can afford: what they look at does not depend on them.
LOOKS: dict[str, Look] = {
    "T1": lambda: counting.decimal_units(MiB),
    "T2": lambda: counting.bytes_per_pass(256 * KiB),
    "T4": lambda: memory.never_written(4 * MiB),
    "T5": lambda: memory.constant_payload(2 * MiB),
    "T6": lambda: memory.first_touch(4 * MiB),
    "T12": lambda: counting.last_level_cache(),
    "T16": lambda: sampling.clock_grain(),
    "T19": lambda: sampling.submit_only(256 * KiB),
    "T23": lambda: sampling.cold_first_sample(),
    "T24": lambda: compiled.compiled_late(64 * KiB),
    "T25": lambda: sampling.allocations(MiB),
    "T29": lambda: environment.pages_migrated(MiB),
    "T31": lambda: environment.own_cores(),
    "T32": lambda: environment.cpu_quota(),
    "T33": lambda: environment.stolen_core(),
    "T34": lambda: memory.huge_pages(4 * MiB),
    "T53": lambda: sampling.clock_source(0.02),
    "T55": lambda: memory.beyond_32_bits(9 * MiB),
    "T57": lambda: sampling.same_twice(MiB, samples=12),
}
# Traps that compare with what the machine does at this moment: a busy one may make them unknown, never a failure.
MACHINE = frozenset({"T12", "T29", "T32", "T33", "T34", "T57"})


@pytest.fixture(autouse=True)
def small(monkeypatch: Patch) -> None:
    """A last-level cache of 1 MiB and short windows; more looks than a user gets, because tests share their machine."""
    monkeypatch.setattr(Topology, "llc", lambda self, affinity=None: Llc(MiB, False, 1))
    monkeypatch.setattr(environment, "BUSY_SECONDS", 0.05)
    monkeypatch.setattr(environment, "HOG_BLOCK_S", 0.01)
    monkeypatch.setattr(counting, "LOOKS", 3)
    monkeypatch.setattr(sampling, "LOOKS", 3)


def look(name: str) -> Finding:
    return examine(Trap(name, "t", "m", "", LOOKS[name])).finding


@pytest.mark.parametrize("name", LOOKS)
def test_the_code_as_it_is_is_in_no_trap(name: str) -> None:
    found = look(name)
    assert found.verdict in (("pass", "unknown") if name in MACHINE else ("pass",)), found.reason
    assert found.verdict == "pass" or found.reason
    if found.verdict == "pass":
        assert found.found is not None
        assert found.expected is not None


# -- faults ----------------------------------------------------------------------------------------------------------


def gib_for_gb(patch: Patch) -> None:
    patch.setattr(units, "_PREFIXES", tuple((2.0**30 if p == "G" else scale, p) for scale, p in units._PREFIXES))


def gb_read_as_gib(patch: Patch) -> None:
    patch.setitem(units._UNITS, "GB", 2**30)


def copy_counted_once(patch: Patch) -> None:
    built = Stream.__init__

    def init(self: Stream, op: str, buffers: Any, nbytes: int, members: Team) -> None:
        built(self, op, buffers, nbytes, members)
        self.link_bytes = nbytes

    patch.setattr(Stream, "__init__", init)


def buffers_not_written(patch: Patch) -> None:
    def lie(nbytes: int, pages: Any = "4k", *_: Any, **__: Any) -> HostBuffer:
        return HostBuffer(Region(nbytes, "4k"), nbytes, Placement(pages, 4096, 0.0, nbytes, {0: nbytes}))

    patch.setattr(host, "host_buffer", lie)


def touch_forgotten(patch: Patch) -> None:
    patch.setattr(host, "_touch", lambda *_: None)


def payload_of_sevens(patch: Patch) -> None:
    patch.setattr(payload, "fill", lambda array, *_: array.__setitem__(slice(None), 7))


def pages_alike(patch: Patch) -> None:
    """Random within a block, but every block the same: what page merging finds."""
    patch.setattr(payload, "_key", lambda seed, kind, block: np.uint64(5))


def no_llc_flag(patch: Patch) -> None:
    patch.setattr(measure_module, "CACHE_MULTIPLE", 0)


def cache_larger_than_said(patch: Patch) -> None:
    run = Stream.run
    # six passes for one over the larger set: what a cache that holds only the smaller one does to the times
    patch.setattr(Stream, "run", lambda self, reps=1: run(self, reps * (6 if self.nbytes == 8 * MiB else 1)))
    gate_sees_nothing(patch)  # or a busy machine makes it unknown


def blocks_too_short(patch: Patch) -> None:
    patch.setattr(Budget, "target_seconds", lambda self: 0.0)


def work_not_awaited(patch: Patch) -> None:
    def submit(self: Team, kernel: object, *args: object) -> float:
        time.sleep(1e-3)  # whatever was asked: only handing it over is in the window
        return 1e-3

    patch.setattr(Team, "run", submit)


def window_always_empty(patch: Patch) -> None:
    patch.setattr(Team, "run", lambda self, kernel, *args: 2e-6)


def judge_asleep(patch: Patch) -> None:
    real = measure_module.judge
    patch.setattr(measure_module, "judge", lambda *a, **k: replace(real(*a, **k), status="ok"))
    patch.setattr("kvbench.worker.check_case", lambda rows: None)  # which would refuse such a row by itself


def first_sample_kept(patch: Patch) -> None:
    patch.setattr(samples, "FIRST_RATIO", float("inf"))


def no_warm_up(patch: Patch) -> None:
    patch.setattr(_Side, "warm", lambda self: None)


def compiles_in_the_loop(patch: Patch) -> None:
    run = Stream.run
    calls: list[int] = []

    def late(self: Stream, reps: int = 1) -> float:
        calls.append(reps)
        if len(calls) == 5:
            jit.numba.njit("int64()")(lambda: 2)
        return run(self, reps)

    patch.setattr(Stream, "run", late)


def nothing_counts_compilations(patch: Patch) -> None:
    patch.setattr(compile_count, "compile_count", lambda: 0)


def cache_key_without_sources(patch: Patch) -> None:
    patch.setattr(cache, "source_digest", lambda roots: "0" * 16)


def kernels_kept_elsewhere(patch: Patch) -> None:
    patch.setattr(jit.numba.core.config, "CACHE_DIR", "/somewhere/else")


def allocates_each_call(patch: Patch) -> None:
    run = Stream.run

    def wasteful(self: Stream, reps: int = 1) -> float:
        np.ones(self.nbytes, np.uint8)
        return run(self, reps)

    patch.setattr(Stream, "run", wasteful)


def _counter(patch: Patch, name: str) -> None:
    real = state.StateProbe.snapshot
    count = [0]

    def snapshot(self: state.StateProbe) -> state.Snapshot:
        count[0] += 3
        return replace(real(self), **{name: count[0]})

    patch.setattr(state.StateProbe, "snapshot", snapshot)


def pages_move(patch: Patch) -> None:
    _counter(patch, "pages_migrated")


def group_is_stopped(patch: Patch) -> None:
    _counter(patch, "throttled")


def windows_never_marked(patch: Patch) -> None:
    real = state.delta
    patch.setattr(state, "delta", lambda a, b: replace(real(a, b), marks=()))


def quota_of_half_a_cpu(patch: Patch) -> None:
    patch.setattr(cgroup, "cpu_quota", lambda: Fact(Limit(0.5, "cpu.max")))


def threads_not_pinned(patch: Patch) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one CPU a thread cannot be loose")
    patch.setattr(team, "pin", lambda cpu: None)


def threads_on_one_core(patch: Patch) -> None:
    first = min(os.sched_getaffinity(0))
    patch.setattr(Topology, "measuring_cpus", lambda self, threads, affinity=None: (first, first))


def gate_sees_nothing(patch: Patch) -> None:
    patch.setattr(DelayGate, "disturbed", lambda self, wall_ns: False)


def page_type_ignored(patch: Patch) -> None:
    real = host.host_buffer

    def ignore(nbytes: int, pages: Any = "4k", *args: Any, **options: Any) -> HostBuffer:
        buffer = real(nbytes, "4k", *args, **options)
        buffer.placement = replace(buffer.placement, pages=pages, huge_share=1.0 if pages == "thp" else 0.0)
        return buffer

    patch.setattr(host, "host_buffer", ignore)


def page_share_not_recorded(patch: Patch) -> None:
    real = host._read_back
    patch.setattr(host, "_read_back", lambda *args: replace(real(*args), huge_share=None))


def clock_too_fast(patch: Patch) -> None:
    patch.setattr(sampler, "now_ns", lambda: time.perf_counter_ns() * 107 // 100)


def clock_steps_back(patch: Patch) -> None:
    reads = [0]

    def now() -> int:
        reads[0] += 1
        return time.perf_counter_ns() - (1_000_000 if reads[0] % 100 == 0 else 0)

    patch.setattr(clock, "now_ns", now)


def _short_kernel(patch: Patch, ops: tuple[int, ...]) -> None:
    real = stream.stream_kernel

    def overflown(ctl: int, member: int, members: int, op: int, a: int, b: int, c: int, nbytes: int, *rest: Any) -> int:
        return real(ctl, member, members, op, a, b, c, nbytes % (4 * MiB) if op in ops else nbytes, *rest)

    patch.setattr(stream, "stream_kernel", overflown)


def write_overflows(patch: Patch) -> None:
    _short_kernel(patch, (stream.WRITE,))


def read_overflows(patch: Patch) -> None:
    _short_kernel(patch, (stream.READ,))


def gather_overflows(patch: Patch) -> None:
    real = gather.gather_kernel

    def overflown(ctl: int, member: int, members: int, kind: int, dst: int, src: int, index: int, count: int,
                  *rest: Any) -> int:  # fmt: skip
        return real(ctl, member, members, kind, dst, src, index, count - 1, *rest)

    patch.setattr(gather, "gather_kernel", overflown)


def second_side_slower(patch: Patch) -> None:
    built, take = _Side.__init__, _Side.take
    sides: list[_Side] = []

    def init(self: _Side, *args: Any) -> None:
        built(self, *args)
        sides.append(self)

    def taken(self: _Side, watch: Any) -> None:
        take(self, watch)
        if sides.index(self) % 2:
            self.seconds[self.taken - 1] *= 5.0

    patch.setattr(_Side, "__init__", init)
    patch.setattr(_Side, "take", taken)
    gate_sees_nothing(patch)  # or a busy machine makes it unknown


FAULTS: list[tuple[str, Callable[[Patch], None], str]] = [
    ("T1", gib_for_gb, "x what was measured"),
    ("T1", gb_read_as_gib, "a unit is wrong"),
    ("T2", copy_counted_once, "counts 1 arrays a pass, not 2"),
    ("T4", buffers_not_written, "0.0% of the buffer is in memory"),
    ("T4", touch_forgotten, "did not stay in memory"),
    ("T5", payload_of_sevens, "pages begin alike"),
    ("T5", pages_alike, "pages begin alike"),
    ("T6", buffers_not_written, "page faults lie inside timed passes"),
    ("T12", no_llc_flag, "the rows say: no flag, no flag"),
    ("T12", cache_larger_than_said, "cache is larger than 1 MiB"),
    ("T16", blocks_too_short, "x what reading the clock twice takes"),
    ("T19", work_not_awaited, "does not grow with the work"),
    ("T19", window_always_empty, "takes no time however often"),
    ("T19", judge_asleep, "got the status ok"),
    ("T23", first_sample_kept, "is among the samples"),
    ("T23", no_warm_up, "is among the samples"),
    ("T24", compiles_in_the_loop, "inside the timed loop"),
    ("T24", nothing_counts_compilations, "leaves no flag"),
    ("T24", cache_key_without_sources, "machine code from before an edit"),
    ("T24", kernels_kept_elsewhere, "not under the digest"),
    ("T25", allocates_each_call, "inside a sampled call"),
    ("T29", pages_move, "moved pages while they were read"),
    ("T29", windows_never_marked, "is not marked"),
    ("T31", threads_not_pinned, "may run on several CPUs"),
    ("T31", threads_on_one_core, "share a core"),
    ("T32", quota_of_half_a_cpu, "the quota allows 0.5 CPUs"),
    ("T32", group_is_stopped, "the group was stopped"),
    ("T32", windows_never_marked, "is not marked"),
    ("T33", gate_sees_nothing, "the samples count"),
    ("T34", page_type_ignored, "says something else about its pages"),
    ("T34", page_share_not_recorded, "does not know its pages"),
    ("T53", clock_too_fast, "of true ones"),
    ("T53", clock_steps_back, "ran backwards"),
    ("T55", write_overflows, "write leaves the 4 KiB"),
    ("T55", read_overflows, "checksum of a read"),
    ("T55", gather_overflows, "gather: "),
    ("T57", second_side_slower, "x itself in every look"),
]


@pytest.mark.parametrize(("name", "inject", "reason"), FAULTS, ids=[f"{n}-{f.__name__}" for n, f, _ in FAULTS])
def test_a_fault_in_the_measured_path_is_found(
    name: str, inject: Callable[[Patch], None], reason: str, monkeypatch: Patch
) -> None:
    inject(monkeypatch)
    found = look(name)
    assert found.verdict == "fail", found
    assert reason in found.reason


def test_every_trap_has_a_fault() -> None:
    assert {name for name, _, _ in FAULTS} == set(LOOKS)


def test_what_cannot_be_checked_is_unknown(monkeypatch: Patch) -> None:
    real = state.StateProbe.snapshot
    monkeypatch.setattr(
        state.StateProbe, "snapshot", lambda self: replace(real(self), pages_migrated=None, throttled=None)
    )
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: Fact(None, "no controller"))
    monkeypatch.setattr(memory, "mapping_bytes", lambda address, field: None)
    for name in ("T4", "T29", "T32", "T34"):
        assert look(name).verdict == "unknown", name
    assert "no controller" in look("T32").reason


@pytest.mark.parametrize(
    ("name", "inject"), [("T12", cache_larger_than_said), ("T57", second_side_slower), ("T33", lambda patch: None)]
)
def test_a_disturbed_machine_makes_it_unknown(name: str, inject: Callable[[Patch], None], monkeypatch: Patch) -> None:
    inject(monkeypatch)
    monkeypatch.setattr(DelayGate, "disturbed", lambda self, wall_ns: True)
    monkeypatch.setattr(counting, "LOOKS", 1)
    monkeypatch.setattr(sampling, "LOOKS", 1)
    found = look(name)
    assert found.verdict == "unknown", found
    assert "other work" in found.reason


def test_a_set_that_does_not_fit_into_memory_is_not_called_checked() -> None:
    found = counting.last_level_cache(largest=MiB)
    assert (found.verdict, found.found) == ("unknown", None)
