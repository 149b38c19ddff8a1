"""What disturbed a window of time: steal, pressure, preemption, migration, throttling, foreign load, clock.

A probe keeps its files open and reads them with pread: a snapshot has to fit between two sample blocks.
"""

from __future__ import annotations

import os
import re
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from kvbench.machine.cgroup import throttle_file
from kvbench.machine.probe import ROOT, under
from kvbench.machine.topology import read_affinity

# Each threshold says what it must not miss and what it must not report.
STEAL_FRACTION = 0.01  # of the watched CPUs' time; 1 % stolen moves a bandwidth by about 1 %, half the gate's margin
STEAL_MIN_TICKS = 2  # one tick (10 ms) in a short window is rounding: steal is counted in whole ticks
CPU_PRESSURE = 0.10  # PSI "some"; its own threads waking up make a few percent on an otherwise idle box
MEMORY_PRESSURE = 0.01  # PSI "some"; an undisturbed run with free memory has none at all
PREEMPTIONS_PER_SECOND = 50.0  # a hog on a shared core preempts some 300 times a second, kernel threads a few times
PREEMPTIONS_MIN = 5
FOREIGN_CPUS = 0.15  # of one CPU; daemons and this process's own parent stay below a tenth
# Busy time is rounded to ticks per CPU and kind of time, ours is exact: the sum over n CPUs strays by sqrt(n) ticks.
FOREIGN_MIN_TICKS = 3.0
CLOCK_CHANGE = 0.05  # trap T13 asks for 3 % between first and last samples; a single reading jitters by 1 to 2 %

_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_VMSTAT = re.compile(rb"^(numa_pages_migrated|pswpin|pswpout) (\d+)$", re.MULTILINE)
_THROTTLED = re.compile(rb"^nr_throttled (\d+)$", re.MULTILINE)
_PSI = re.compile(rb"^some .*total=(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters at one moment; None where this system does not count. Times in seconds, CPU times over watched CPUs."""

    at: float
    own_cpu: float
    involuntary: int
    watched: int
    steal_ticks: int | None = None
    busy_ticks: int | None = None
    runnable: int | None = None
    cpu_pressure_us: int | None = None
    memory_pressure_us: int | None = None
    pages_migrated: int | None = None
    pages_swapped: int | None = None
    throttled: int | None = None
    mhz: float | None = None


@dataclass(frozen=True, slots=True)
class StateDelta:
    """What happened between two snapshots. Fractions are of wall time; None: not counted here.

    ``steal`` is the share of the watched CPUs' time the hypervisor gave away; ``foreign_cpus`` how many watched CPUs
    other processes kept busy on average; ``runnable`` tasks ready to run at the end, ours left out. ``marks`` name what
    went beyond its threshold.
    """

    wall: float
    steal: float | None
    cpu_pressure: float | None
    memory_pressure: float | None
    involuntary: int
    pages_migrated: int | None
    pages_swapped: int | None
    throttled: int | None
    foreign_cpus: float | None
    runnable: int | None
    mhz_before: float | None
    mhz_after: float | None
    marks: tuple[str, ...]


class StateProbe:
    """Open files of the state of ``root``; ``cpus`` (default: the affinity mask) are the ones watched.

    Use as a context manager or call :meth:`close`. Missing files are simply not counted.
    """

    def __init__(self, root: Path = ROOT, cpus: tuple[int, ...] | None = None) -> None:
        watched = cpus if cpus is not None else (read_affinity(root).value or ())
        self._cpus = frozenset(b"cpu%d" % cpu for cpu in watched)
        clock_cpu = min(watched, default=0)
        throttle = throttle_file(root)
        self._files: dict[str, int] = {}
        for name, path in (
            ("stat", "/proc/stat"),
            ("vmstat", "/proc/vmstat"),
            ("psi_cpu", "/proc/pressure/cpu"),
            ("psi_memory", "/proc/pressure/memory"),
            ("throttle", throttle),
            ("clock", f"/sys/devices/system/cpu/cpu{clock_cpu}/cpufreq/scaling_cur_freq"),
        ):
            if path is None:
                continue
            try:
                self._files[name] = os.open(under(root, path), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # a missing counter stays None in every snapshot

    def __enter__(self) -> StateProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()

    def _read(self, name: str) -> bytes:
        handle = self._files.get(name)
        if handle is None:
            return b""
        try:
            return os.pread(handle, 1 << 17, 0)
        except OSError:  # pressure files answer EOPNOTSUPP when booted with psi=0
            return b""

    def snapshot(self) -> Snapshot:
        """Return the counters now. Never raises."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        steal, busy, runnable, seen = self._cpu_ticks(self._read("stat"))
        counters = {name: int(value) for name, value in _VMSTAT.findall(self._read("vmstat"))}
        swapped = [counters[name] for name in (b"pswpin", b"pswpout") if name in counters]
        clock = self._read("clock").strip()
        return Snapshot(
            at=time.perf_counter(),
            own_cpu=usage.ru_utime + usage.ru_stime,
            involuntary=usage.ru_nivcsw,
            watched=seen,
            steal_ticks=steal,
            busy_ticks=busy,
            runnable=runnable,
            cpu_pressure_us=_first(_PSI, self._read("psi_cpu")),
            memory_pressure_us=_first(_PSI, self._read("psi_memory")),
            pages_migrated=counters.get(b"numa_pages_migrated"),
            pages_swapped=sum(swapped) if swapped else None,
            throttled=_first(_THROTTLED, self._read("throttle")),
            mhz=int(clock) / 1000 if clock.isdigit() else None,
        )

    def _cpu_ticks(self, text: bytes) -> tuple[int | None, int | None, int | None, int]:
        """Return (steal, busy, runnable tasks, CPUs seen) of /proc/stat over the watched CPUs."""
        steal = busy = seen = 0
        runnable: int | None = None
        for line in text.splitlines():
            if line.startswith(b"cpu"):
                name, *fields = line.split()
                # user nice system idle iowait irq softirq steal ...; guest time is inside user already
                if name in self._cpus and len(fields) >= 8 and all(f.isdigit() for f in fields[:8]):
                    numbers = [int(field) for field in fields[:8]]
                    busy += numbers[0] + numbers[1] + numbers[2] + numbers[5] + numbers[6]
                    steal += numbers[7]
                    seen += 1
            elif line.startswith(b"procs_running "):
                number = line.split()[1]
                runnable = int(number) if number.isdigit() else None
        return (steal, busy, runnable, seen) if seen else (None, None, runnable, 0)


def _first(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    match = pattern.search(text)
    return int(match[1]) if match else None


_probes: dict[int, StateProbe] = {}


def snapshot() -> Snapshot:
    """Return the state of this machine now, over the affinity mask this process had at its first call."""
    pid = os.getpid()
    if pid not in _probes:  # a forked child starts its own: it may have been pinned elsewhere
        _probes[pid] = StateProbe()
    return _probes[pid].snapshot()


def delta(before: Snapshot, after: Snapshot) -> StateDelta:
    """Return what happened between two snapshots of the same probe. Raises ValueError when they are out of order."""
    wall = after.at - before.at
    if wall <= 0:
        raise ValueError(f"the second snapshot is {-wall:.6f} s older than the first")
    steal_ticks = _difference(before.steal_ticks, after.steal_ticks)
    busy_ticks = _difference(before.busy_ticks, after.busy_ticks)
    available = wall * after.watched
    steal = None if steal_ticks is None or not available else steal_ticks / _TICK / available
    foreign = None
    if busy_ticks is not None:
        # tick counts lag behind the exact CPU time of ours: below zero is rounding and means none
        foreign = max(0.0, (busy_ticks / _TICK - (after.own_cpu - before.own_cpu)) / wall)
    foreign_least = FOREIGN_MIN_TICKS / _TICK * max(1, after.watched) ** 0.5
    cpu_pressure = _pressure(before.cpu_pressure_us, after.cpu_pressure_us, wall)
    memory_pressure = _pressure(before.memory_pressure_us, after.memory_pressure_us, wall)
    involuntary = after.involuntary - before.involuntary
    migrated = _difference(before.pages_migrated, after.pages_migrated)
    swapped = _difference(before.pages_swapped, after.pages_swapped)
    throttled = _difference(before.throttled, after.throttled)
    checks = (
        ("steal", steal is not None and steal > STEAL_FRACTION and (steal_ticks or 0) >= STEAL_MIN_TICKS),
        ("cpu_pressure", cpu_pressure is not None and cpu_pressure > CPU_PRESSURE),
        ("memory_pressure", memory_pressure is not None and memory_pressure > MEMORY_PRESSURE),
        ("preempted", involuntary >= PREEMPTIONS_MIN and involuntary / wall > PREEMPTIONS_PER_SECOND),
        ("migrated", bool(migrated)),
        ("swapped", bool(swapped)),
        ("throttled", bool(throttled)),
        ("foreign_load", foreign is not None and foreign > FOREIGN_CPUS and foreign * wall >= foreign_least),
        (
            "clock_moved",
            bool(before.mhz and after.mhz) and abs((after.mhz or 0) / (before.mhz or 1) - 1) > CLOCK_CHANGE,
        ),
    )
    return StateDelta(
        wall=wall,
        steal=steal,
        cpu_pressure=cpu_pressure,
        memory_pressure=memory_pressure,
        involuntary=involuntary,
        pages_migrated=migrated,
        pages_swapped=swapped,
        throttled=throttled,
        foreign_cpus=foreign,
        runnable=None if after.runnable is None else max(0, after.runnable - 1),
        mhz_before=before.mhz,
        mhz_after=after.mhz,
        marks=tuple(name for name, marked in checks if marked),
    )


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _pressure(before: int | None, after: int | None, wall: float) -> float | None:
    stalled = _difference(before, after)
    return None if stalled is None else stalled / 1e6 / wall
