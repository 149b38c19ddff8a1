"""``strata_host``: the host side of Strata's data plane: copies against C and ceilings, the law of pages, call costs.

Ratios are of seconds, reference / ours, medians over interleaved pairs on one team: 1.00 is equal, below it ours is
slower. The payload of both sides is checked after each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvbench.errors import printable
from kvbench.kernels import libc
from kvbench.kernels.driver_loop import CallLoop
from kvbench.kernels.gather import Gather, gather_kernel
from kvbench.kernels.io_calls import IoCalls, call_row
from kvbench.kernels.moves import FragmentCopy
from kvbench.kernels.team import Team
from kvbench.locks import acquire, machine_resources
from kvbench.memory.host import HostBuffer, host_buffer
from kvbench.memory.tiers import parse_tier
from kvbench.model.geometry import geometry
from kvbench.systems.strata.ends import Buffers, end, plain_copies
from kvbench.systems.strata.transfer import change, plan
from kvbench.transport.host_job import HostJob, MemoryEnd
from kvbench.units import format_value

from .processes import Neighbours, command, run
from .ratios import Found, Timed, build, compare, entry, swapped
from .record import Figure, judge, lost

if TYPE_CHECKING:
    from kvbench.memory.region import Pages

GROUP = "strata-host"
MODEL, SEED = "Llama-3.1-8B", 5
LEAST_COPY, LEAST_CHANGE, RESIDUAL, SUBMIT_S = 0.95, 0.90, 0.15, 20e-9
C_PAGES = (32, 128)  # tokens: fragments of 64 and 256 KiB
CHANGES = (
    ("layer_first", "page_first"), ("page_first", "layer_first"), ("layer_first", "page_first_direct"),
    ("page_first_direct", "layer_first"), ("page_first", "page_first_direct"), ("page_first_direct", "page_first"),
)  # fmt: skip
CALLS, ROUNDS = 100_000, 21
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Buffers of this script: each is new, filled where it is a source, kept by ``stack``."""

    stack: ExitStack

    def sources(self, count: int, nbytes: int, pages: Pages, *, node: int | None = None) -> list[HostBuffer]:
        """Return ``count`` buffers of payload."""
        return [self.stack.enter_context(host_buffer(nbytes, pages, node, seed=SEED + i)) for i in range(count)]

    def target(self, nbytes: int, pages: Pages, *, node: int | None = None) -> HostBuffer:
        """Return a buffer to write to."""
        return self.stack.enter_context(host_buffer(nbytes, pages, node, kind=None))

    def enter(self, resource: AbstractContextManager[Any]) -> Any:
        """Keep ``resource`` open."""
        return self.stack.enter_context(resource)


def figures(pairs: int = 40, nbytes: int = 128 << 20) -> Iterator[Figure]:
    """Yield every figure of the group from at least ``pairs`` undisturbed pairs of ``nbytes`` a pass."""
    cpus = sorted(os.sched_getaffinity(0))
    with acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)):
        with tempfile.TemporaryDirectory(prefix="kvbench-crosscheck-") as folder:
            code = entry(build(Path(folder)), "c_gather", "iiiiiiiiiiiii")
            with Team(cpus[:1]) as team:
                for page in C_PAGES:
                    yield against(f"cpu fragments {page * 2} KiB, C", page, code, team, pairs, nbytes)
        with Team(cpus) as team:
            for page in (1, 32, 128):
                yield against(f"cpu fragments {page * 2} KiB, host_gather", page, gather_kernel, team, pairs, nbytes)
            for layouts in CHANGES:
                yield changed(layouts, team, pairs, nbytes)
        with Team(cpus[:1]) as team:
            yield call_cost(team)
    yield file_law()


def against(
    name: str, page: int, code: Callable[..., int], team: Team, pairs: int, nbytes: int
) -> Figure:  # fmt: skip
    """Return our transfer of shuffled pages against ``code``'s gather copy of the same fragments in the same order."""
    shape = geometry(MODEL)
    chosen = plan(shape, "layer_first", page, max(1, nbytes // shape.page_bytes(page)), "shuffled", SEED)
    with ExitStack() as stack:
        buffers, dram = Memory(stack), parse_tier("dram")
        source = end(dram, chosen.far.nbytes, True, cast(Buffers, buffers), None, SEED)
        target = end(dram, chosen.near.nbytes, False, cast(Buffers, buffers), None, SEED)
        job = HostJob(chosen.moves("fetch"), source, target, team, buffers.enter, SEED)
        return ratio(name, job, code, pairs, LEAST_COPY)


def changed(layouts: tuple[str, str], team: Team, pairs: int, nbytes: int) -> Figure:
    """Return a change between two layouts whose items are 2 KiB or more against a plain copy of its fragments."""
    shape = geometry(MODEL)
    source_pool, target_pool, work = change(shape, layouts, 32, max(1, nbytes // shape.page_bytes(32)), SEED)
    with ExitStack() as stack:
        buffers, dram = Memory(stack), parse_tier("dram")
        source = end(dram, source_pool.nbytes, True, cast(Buffers, buffers), None, SEED)
        target = end(dram, target_pool.nbytes, False, cast(Buffers, buffers), None, SEED)
        job = HostJob(work, source, target, team, buffers.enter, SEED)
        return ratio(f"{layouts[0]} to {layouts[1]}", job, gather_kernel, pairs, LEAST_CHANGE)


def ratio(name: str, job: HostJob, code: Callable[..., int], pairs: int, low: float) -> Figure:
    """Return seconds of the plain copy by ``code`` over ours, each side in its fastest variant, both verified."""
    copies = plain_copies(job)
    source, target = job.source, job.target
    threads = f"{len(job.team)} thread{'s' if len(job.team) > 1 else ''}"
    if not copies or not isinstance(source, MemoryEnd) or not isinstance(target, MemoryEnd):
        return lost(GROUP, f"{name}, {threads}", "ratio", None, "no plain copy of these fragments", low=low)
    rows = job.memory_rows(source.address, target.address)
    works = {variant: FragmentCopy(variant, rows, job.team) for variant in copies}
    ours: dict[str, Timed] = {variant: work.run for variant, work in works.items()}
    theirs = {variant: swapped(copy, code, 1) for variant, copy in copies.items()}
    others = Neighbours()
    found = compare(ours, theirs, job.team, pairs)
    best = works[found.best[0]] if found is not None else next(iter(works.values()))
    best.run()
    job.verify(best.run)
    checked: Gather = copies[found.best[1]] if found is not None else next(iter(copies.values()))
    swapped(checked, code, 1)()
    checked.verify()
    return _figure(f"{name}, {threads}", found, low, job, others)


def _figure(name: str, found: Found | None, low: float, job: HostJob, others: Neighbours) -> Figure:
    if found is None:
        verdict = judge(None, low, None, disturbed=True)
        return Figure(GROUP, name, "ratio", None, low, None, verdict, "too few undisturbed pairs")
    rates = [format_value(job.total / seconds, "B/s") for seconds in (found.ours, found.c)]
    note = f"ours {rates[0]} ({found.best[0]}), other {rates[1]} ({found.best[1]}), {found.pairs} pairs, "
    note += f"{len(job.moves)} fragments of {job.moves.fragment} B"
    detail = {"ours": job.total / found.ours, "other": job.total / found.c, "pairs": found.pairs,
              "fragment_bytes": job.moves.fragment, "threads": len(job.team)}  # fmt: skip
    verdict = judge(found.ratio, low, None, disturbed=others.disturbing())
    return Figure(GROUP, name, "ratio", found.ratio, low, None, verdict, note, detail=detail)


def call_cost(team: Team, calls: int = CALLS, rounds: int = ROUNDS) -> Figure:
    """Return the seconds a fragment of our submit loop takes beyond the bare call in a loop of nothing else.

    The call is libc's labs: it returns its argument and touches nothing. Ours reads a row a fragment and checks what
    came back, the bare loop makes the same call with the same arguments over and over.
    """
    rows = np.array([call_row("labs", i, returns=i) for i in range(1000)] * (calls // 1000), np.int64)
    ours = IoCalls(rows, np.array([0, len(rows)], np.int64), team)
    bare = CallLoop(libc.address_of("labs"), np.zeros((1, 4), np.int64))
    others = Neighbours()
    ours.run()
    bare.repeat(1000)
    taken: list[tuple[float, float]] = []
    for _ in range(rounds):
        own = ours.run()
        before = time.perf_counter()
        if bare.repeat(len(rows)) != 0:
            return lost(GROUP, "submit loop a fragment, beyond the call", "s", SUBMIT_S, "the no-op call failed")
        taken.append((own / len(rows), (time.perf_counter() - before) / len(rows)))
    each, call = (median(column) for column in zip(*taken, strict=True))
    value = max(0.0, each - call)
    note = f"{each * 1e9:.1f} ns a fragment, {call * 1e9:.1f} ns a bare call, median of {rounds} x {len(rows)}"
    verdict = judge(value, None, SUBMIT_S, disturbed=others.disturbing())
    return Figure(GROUP, "submit loop a fragment, beyond the call", "s", value, None, SUBMIT_S, verdict, note)


def file_law() -> Figure:
    """Return the residual of one law over pages of 1 to 512 tokens, one call a fragment, as the bench reports it.

    Met within 15 %, or where the bench names a step: then the note has it.
    """
    name = "dram:file a call a fragment, residual of one law"
    words = command(
        "run", "strata/page_law", "--profile", "quick", "-a", "pair=dram:file", "-a", "transport=cpu", "--no-db",
        "--json",
    )  # fmt: skip
    others = Neighbours()
    try:
        done = run(words, LIMIT_S)
    except subprocess.TimeoutExpired:
        return lost(GROUP, name, "share", RESIDUAL, f"did not end within {LIMIT_S:.0f} s")
    try:
        rows = {row["metric"]: row for row in json.loads(done.stdout)["results"]}
        value, law = rows["residual"]["value"], rows["per_fragment"]["detail"]
    except (ValueError, KeyError, TypeError) as error:
        return lost(GROUP, name, "share", RESIDUAL, f"exit code {done.code}, no law: {printable(str(error))}")
    step, c, top = law["step"], rows["per_fragment"]["value"], rows["asymptote"]["value"]
    if value is None:
        return lost(GROUP, name, "share", RESIDUAL, str(rows["residual"]["reason"]))
    note = f"{law['law']}, c {'unknown' if c is None else format_value(c, 's')}, "
    note += f"B {'unknown' if top is None else format_value(top, 'B/s')}, {law['points']} pages"
    verdict = judge(value, None, RESIDUAL, disturbed=others.disturbing())
    if step:
        note += f"; step: {step}"
        verdict = "met" if verdict == "missed" else verdict
    return Figure(GROUP, name, "share", value, None, RESIDUAL, verdict, note)
