"""T29, T31, T32, T33: do the measuring threads have their cores, and pages their node, for as long as it takes?"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbench.contract.case import Case
from kvbench.machine import cgroup, state
from kvbench.machine.probe import ROOT, read_int
from kvbench.timing.budget import BUDGETS
from kvbench.timing.sampler import sample
from kvbench.timing.samples import Samples
from kvbench.timing.traps.bed import Bed, brief
from kvbench.timing.traps.record import Finding, Number, check, unknown
from kvbench.units import MiB

if TYPE_CHECKING:
    from kvbench.measure import Measure

BUSY_SECONDS = 0.35  # three periods of a CPU quota (100 ms as a rule)
HOG_BLOCK_S = 0.020  # several time slices of a scheduler
GATED_LEAST = 0.5
LOOKS = 3  # for a quiet moment of a busy machine


def pages_migrated(nbytes: int = 32 * MiB) -> Finding:
    """T29: pages the kernel moved between nodes while a buffer was read, against none."""
    threshold = "none moved, and moved ones are marked"
    delta, seen = _window(nbytes, pages_migrated=1)
    if not seen:
        return check(False, Number("windows marked", 0, "1"), Number("windows in which a page moved", 1, "1"),
                     threshold, "a window in which pages moved is not marked")  # fmt: skip
    if delta.pages_migrated is None:
        return unknown("this kernel does not count moved pages (no numa_pages_migrated)", threshold)
    setting = read_int(ROOT, "/proc/sys/kernel/numa_balancing")
    nodes = sum(not node.cpuless for node in Bed().context.topology.nodes)
    found = Number(f"pages moved in {delta.wall:.2f} s of reading", delta.pages_migrated, "pages")
    expected = Number("allowed", 0, "pages")
    note = f"numa_balancing {'unknown' if setting.value is None else setting.value}, {nodes} node(s) with CPUs"
    if delta.pages_migrated == 0 and setting.value and nodes > 1:
        reason = "balancing is on; nothing moved in this window, a longer one may see it"
        return unknown(reason, threshold, found, expected).note(note)
    return check(delta.pages_migrated == 0, found, expected, threshold, "the kernel moved pages while they were read",
                 note)  # fmt: skip


def own_cores() -> Finding:
    """T31: measuring threads that are bound to exactly the CPU of a core of their own, against measuring threads."""
    seen: dict[int, frozenset[int]] = {}
    wanted: list[int] = []
    bed = Bed()

    def pinned_threads(case: Case, measure: Measure) -> None:
        from kvbench.kernels.fixed import IntegerChain

        team = measure.team("all")
        wanted.extend(team.cpus)
        work = IntegerChain(team)

        def run(reps: int) -> float:
            seconds = work.run(reps)
            seen.update({tid: frozenset(os.sched_getaffinity(tid)) for tid in team.tids})
            return seconds

        measure(run, link=1, verify=work.verify, gate=None)

    row = bed.measured(pinned_threads)
    siblings = {cpu.id: cpu.siblings for cpu in bed.context.topology.cpus}
    cores: set[tuple[int, ...]] = set()
    for tid, cpu in zip(seen, wanted, strict=True):
        if seen[tid] == {cpu}:
            cores.add(siblings.get(cpu, (cpu,)))
    physical = len({siblings.get(cpu, (cpu,)) for cpu in bed.context.topology.affinity})
    loose = {tid: mask for tid, mask in seen.items() if len(mask) > 1}
    reason = f"{len(loose)} of {len(seen)} threads may run on several CPUs" if loose else "threads share a core"
    refused = "unpinned" in row.flags
    if refused:
        reason = f"pinning was refused: {row.detail.get('pin_reason')}"
    return check(
        len(cores) == len(seen) and not refused,
        Number("threads alone on a core", len(cores), "threads"), Number("measuring threads", len(seen), "threads"),
        "all of them", reason,
        f"CPUs {','.join(map(str, wanted))}; {physical} physical core(s) in the mask",
        mend="let this process call sched_setaffinity (a container's filter may refuse it)" if refused else "",
    )  # fmt: skip


def cpu_quota() -> Finding:
    """T32: CPUs a quota allows against threads that measure, and whether the group was stopped while all were busy."""
    threshold = "at least as many, never stopped, and a stop is marked"
    delta, seen = _window(None, throttled=1)
    if not seen:
        return check(False, Number("windows marked", 0, "1"), Number("windows in which the group was stopped", 1, "1"),
                     threshold, "a window in which the quota stopped the group is not marked")  # fmt: skip
    limit = cgroup.cpu_quota()
    topology = Bed().context.topology
    threads = len(topology.measuring_cpus("all"))
    if limit.value is None and delta.throttled is None:
        return unknown(f"neither quota nor throttle counter can be read: {limit.reason}", threshold)
    quota = None if limit.value is None else limit.value.value
    allowed = Number("CPUs a quota allows" if quota is not None else "CPUs in the mask, no quota",
                     len(topology.affinity) if quota is None else quota, "CPUs")  # fmt: skip
    wrong = []
    if delta.throttled:
        wrong.append(f"the group was stopped {delta.throttled} times in {delta.wall:.2f} s")
    if quota is not None and quota < threads:
        wrong.append(f"the quota allows {quota:g} CPUs, {threads} threads measure")
    counter = "not counted" if delta.throttled is None else f"{delta.throttled} times"
    return check(
        not wrong, allowed, Number("measuring threads", threads, "threads"), threshold, "; ".join(wrong),
        f"stopped {counter} in {delta.wall:.2f} s with all threads busy",
    )  # fmt: skip


def stolen_core() -> Finding:
    """T33: share of samples the gate sets aside beside a thread that takes the core, against without it."""
    threshold = f"more than {GATED_LEAST:.0%} beside it, less without"
    bed = Bed()
    cpu = bed.context.topology.measuring_cpus(1)[0]
    quiet = min((_gated(bed) for _ in range(LOOKS)), key=lambda taken: taken.gated / max(1, taken.taken))
    with _hog(cpu):
        beside = _gated(bed)
    shares = [taken.gated / max(1, taken.taken) for taken in (beside, quiet)]
    found = Number("samples set aside beside a hog", shares[0], "1")
    expected = Number("without one", shares[1], "1")
    note = f"{beside.gated} of {beside.taken} against {quiet.gated} of {quiet.taken} samples; CPU {cpu}"
    off = beside.gate_reason or quiet.gate_reason
    if off:
        return unknown(
            f"the gate cannot work here: {off}",
            threshold,
            found,
            expected,
            mend="use a kernel built with CONFIG_SCHED_INFO",
        )
    if shares[0] <= GATED_LEAST:
        return check(False, found, expected, threshold, "another thread had the core and the samples count", note)
    if shares[1] >= GATED_LEAST:
        return unknown("other work has this core now, so its absence cannot be shown", threshold, found, expected).note(
            note
        )
    return check(True, found, expected, threshold, "", note)


def _window(nbytes: int | None, **moved: int) -> tuple[state.StateDelta, bool]:
    """Return what happened while all threads were busy, and whether a window with ``moved`` counts gets a mark.

    They read ``nbytes``, or compute where that is None.
    """
    bed = Bed(brief(BUDGETS["smoke"], samples=5, block_seconds=BUSY_SECONDS / 5))
    ends: list[state.Snapshot] = []

    def busy(case: Case, measure: Measure) -> None:
        from kvbench.kernels.fixed import IntegerChain
        from kvbench.kernels.stream import Stream

        team = measure.team("all")
        work: IntegerChain | Stream = IntegerChain(team)
        if nbytes is not None:
            work = Stream("read", [measure.sources(1, nbytes, "4k")[0].address], nbytes, team)
        ends.append(state.snapshot())
        measure(work.run, link=1, verify=work.verify, gate=None)
        ends.append(state.snapshot())

    bed.measured(busy)
    before, after = ends
    # The same pair of snapshots as if the counter had moved: the marker of every case asks this function.
    counted = {name: (getattr(before, name) or 0) + count for name, count in moved.items()}
    fake = replace(before, **{name: getattr(before, name) or 0 for name in moved})
    marks = state.delta(fake, replace(after, **counted)).marks
    words = {"pages_migrated": "migrated", "throttled": "throttled"}
    return state.delta(before, after), all(words[name] in marks for name in moved)


def _gated(bed: Bed) -> Samples:
    from kvbench.kernels.fixed import IntegerChain

    limits = brief(BUDGETS["smoke"], samples=5, block_seconds=HOG_BLOCK_S, cap_seconds=15 * HOG_BLOCK_S)
    with bed.team() as team:
        return sample(IntegerChain(team).run, limits, tids=team.tids)


@contextmanager
def _hog(cpu: int) -> Iterator[None]:
    """Keep ``cpu`` busy from another thread."""
    from kvbench.kernels.fixed import IntegerChain
    from kvbench.kernels.team import Team

    stop, going = threading.Event(), threading.Event()

    def spin() -> None:
        with Team([cpu]) as team:
            work = IntegerChain(team)
            while not stop.is_set():
                work.run(10_000)
                going.set()

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        going.wait(10.0)
        yield
    finally:
        stop.set()
        thread.join()
