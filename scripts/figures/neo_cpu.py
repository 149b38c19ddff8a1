"""``neo-cpu``: decode attention on cores against its ceilings, against PyTorch, and its errors against float64.

A ratio is the median over interleaved, undisturbed pairs of the other side's seconds / ours on the same bytes: of the
gather it is the fraction of that ceiling we reach, of PyTorch how many times faster we are.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from kvbench.attention import oracles
from kvbench.attention.cpu import DecodeAttention
from kvbench.attention.cpu_work import DecodeWork, layers_for, nbytes_for
from kvbench.attention.shapes import Dtype, Shape
from kvbench.errors import MissingExtra
from kvbench.kernels.team import Team
from kvbench.locks import acquire, machine_resources
from kvbench.machine.topology import read_topology
from kvbench.memory.host import HostBuffer, host_buffer
from kvbench.model.paged import attend, make_batch
from kvbench.units import format_value

from .ratios import Found, Timed, compare
from .record import Figure, Scalar, judge, lost

GROUP = "neo-cpu"
LEAST_BYTES = 256 << 20
LENGTHS = [16384] * 4
PAIRS, TRIALS = 40, 5
KV_HEADS, HEAD_DIM, PAGE = 8, 128, 16
# dtype, query heads a KV head, threads (0: all), least fraction of the gather
CEILINGS: tuple[tuple[Dtype, int, int, float], ...] = (
    ("bf16", 1, 1, 0.90), ("bf16", 4, 1, 0.90), ("bf16", 8, 1, 0.80), ("fp16", 4, 1, 0.70), ("fp32", 4, 1, 0.85),
    ("bf16", 4, 0, 0.90),
)  # fmt: skip
LEAST_PYTORCH, LEAST_SPLIT = 2.5, 0.9
BATCH_LENGTHS = [8192] * 8
BORDERS = [1, 15, 16, 17, 33, 4095, 4096, 4097]
ERRORS: tuple[Dtype, ...] = ("fp32", "fp16", "bf16")
TINY: dict[Dtype, float] = {"fp32": 2.0**-134, "fp16": 2.0**-18}  # of numbers from 0.5 to 2: subnormal in that dtype


def figures(pairs: int = PAIRS) -> Iterator[Figure]:
    """Yield every figure of the group; the machine's lock is held."""
    cpus = sorted(os.sched_getaffinity(0))
    least = max(LEAST_BYTES, 4 * read_topology().llc().bytes)
    try:
        oracles.warm_threads(1)  # before any thread is pinned
        torch = True
    except MissingExtra as missing:
        print(f"crosscheck: {missing}", file=sys.stderr)
        torch = False
    with acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)):
        for dtype, group, threads, low in CEILINGS:
            with Team(cpus if threads == 0 else cpus[:threads]) as team:
                yield of_gather(shape(dtype, group), team, least, low, pairs)
        yield of_pytorch(cpus[:1], least, pairs) if torch else lost(
            GROUP, "bf16 g=4 against the best PyTorch form", "ratio", None, "PyTorch is not installed",
            low=LEAST_PYTORCH,
        )  # fmt: skip
        with Team(cpus) as team:
            yield of_batch(team, least, pairs)
        with Team(cpus[:1]) as team:
            for dtype in ERRORS:
                yield error(dtype, team)
            for dtype, tiny in TINY.items():
                yield subnormal(shape(dtype, 4), tiny, team, pairs)


def shape(dtype: Dtype, group: int) -> Shape:
    return Shape(dtype, group * KV_HEADS, KV_HEADS, HEAD_DIM, PAGE)


def place(shape: Shape, lengths: Sequence[int], least: int) -> tuple[HostBuffer, int]:
    """Return memory on huge pages for enough layers of ``lengths``, and how many."""
    layers = layers_for(shape, lengths, least)
    return host_buffer(nbytes_for(shape, lengths, layers), "thp", kind=None), layers


def once(run: object) -> Timed:
    """Return ``run(1)`` as a call without arguments, timed around the call where it returns no seconds."""

    def timed() -> float:
        began = time.perf_counter()
        own = run(1)  # type: ignore[operator]
        return time.perf_counter() - began if own is None else float(own)

    return timed


def fastest(sides: dict[str, Timed]) -> str:
    """Return the name of the fastest of ``sides`` by the least of ``TRIALS`` runs in turns."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run()
    for _ in range(TRIALS):
        for name, run in sides.items():
            taken[name].append(run())
    return min(taken, key=lambda name: min(taken[name]))


def beside(ours: Timed, sides: dict[str, Timed], team: Team, pairs: int) -> Found | None:
    """Compare ``ours`` with the fastest of ``sides``."""
    best = fastest(sides)
    return compare({best: ours}, {best: sides[best]}, team, pairs)


def figure(name: str, found: Found | None, low: float | None, nbytes: int, note: str) -> Figure:
    """Return the figure of a comparison over ``nbytes`` a side."""
    if found is None:
        verdict = judge(None, low, None, disturbed=True)
        return Figure(GROUP, name, "ratio", None, low, None, verdict, "too few undisturbed pairs")
    ours, other = (format_value(nbytes / seconds, "B/s") for seconds in (found.ours, found.c))
    spread = "" if math.isinf(found.half_width) else f"±{found.half_width:.3f}, "
    detail: dict[str, Scalar] = {"ours": nbytes / found.ours, "other": nbytes / found.c, "pairs": found.pairs}
    text = f"{spread}ours {ours}, {found.best[1]} {other}, {found.pairs} pairs{note}"
    verdict = judge(found.ratio, low, None, disturbed=False)
    return Figure(GROUP, name, "ratio", found.ratio, low, None, verdict, text, detail=detail)


def of_gather(shape: Shape, team: Team, least: int, low: float, pairs: int) -> Figure:
    """Compare a decode step a layer with the gather of the same pages."""
    buffer, layers = place(shape, LENGTHS, least)
    with buffer:
        work = DecodeWork(shape, LENGTHS, layers, team, buffer.address, seed=1)
        gathers = work.gathers()
        sides = {name: once(gather.run) for name, gather in gathers.items()}
        found = beside(once(work.run), sides, team, pairs)
        work.run()
        work.verify()
        for gather in gathers.values():
            gather.run(1)
            gather.verify()
        threads = f"{len(team)} thread{'s' if len(team) > 1 else ''}"
        name = f"{shape.dtype} g={shape.group} of the gather, {threads}"
        return figure(name, found, low, work.kv_bytes, f", {work.attention.isa}")


def of_pytorch(cpus: Sequence[int], least: int, pairs: int) -> Figure:
    """Compare bf16 at four query heads a KV head with the fastest PyTorch form, one thread each."""
    spec = shape("bf16", 4)
    buffer, layers = place(spec, LENGTHS, least)
    with buffer, Team(cpus) as team:
        work = DecodeWork(spec, LENGTHS, layers, team, buffer.address, seed=1)
        others = {form: work.dense(form, 1) for form in oracles.FORMS if form.startswith("torch")}
        found = beside(once(work.run), {name: once(each.run) for name, each in others.items()}, team, pairs)
        work.run()
        work.verify()
        for other in others.values():
            other.run()
            other.verify()
        return figure("bf16 g=4 against the best PyTorch form", found, LEAST_PYTORCH, work.kv_bytes, ", 1 thread each")


def of_batch(team: Team, least: int, pairs: int) -> Figure:
    """Compare one long sequence with a batch of eight that holds the same bytes, all threads."""
    spec = shape("bf16", 4)
    buffer, layers = place(spec, BATCH_LENGTHS, least)
    with buffer:
        works = [
            DecodeWork(spec, lengths, layers, team, buffer.address, seed=1)
            for lengths in ([sum(BATCH_LENGTHS)], BATCH_LENGTHS)
        ]
        found = beside(once(works[0].run), {"batch 8": once(works[1].run)}, team, pairs)
        for work in works:
            work.run()
            work.verify()
        return figure("batch 1 x 64k against batch 8 x 8k, all threads", found, LEAST_SPLIT, works[0].kv_bytes, "")


def error(dtype: Dtype, team: Team) -> Figure:
    """Return the largest error of a query head over lengths at the borders of pages, against float64."""
    spec, rng = shape(dtype, 4), np.random.default_rng(3)
    blocks = sum(-(-n // PAGE) for n in BORDERS)
    batch = make_batch(BORDERS, PAGE, blocks, seed=3)
    k, v = (spec.array(rng.standard_normal(spec.plain_shape(blocks))) for _ in range(2))
    q = spec.array(rng.standard_normal((len(BORDERS), spec.q_heads, HEAD_DIM)))
    out, _ = DecodeAttention(spec, team).decode(q, *spec.pack(k, v), batch.table, batch.lengths)
    worst = 0.0
    for b, h in np.ndindex(len(BORDERS), KV_HEADS):
        rows, heads = batch.table[b, : int(batch.pages[b])], slice(4 * h, 4 * h + 4)
        keys, values = (spec.floats(half[rows, h]).reshape(-1, HEAD_DIM)[: BORDERS[b]] for half in (k, v))
        want, _ = attend(spec.floats(q)[b, heads], keys, values, 1.0 / math.sqrt(HEAD_DIM))
        norms = np.linalg.norm(out[b, heads] - want, axis=1) / np.linalg.norm(want, axis=1)
        worst = max(worst, float(norms.max()))
    most = oracles.TOLERANCE[dtype]
    note = f"largest of {len(BORDERS) * spec.q_heads} heads, lengths {BORDERS[0]} to {BORDERS[-1]}"
    verdict = judge(worst, None, most, disturbed=False)
    return Figure(GROUP, f"{dtype} error against float64", "1", worst, None, most, verdict, note)


def subnormal(shape: Shape, tiny: float, team: Team, pairs: int) -> Figure:
    """Return how much slower subnormal values are: measured, no target (trap T49)."""
    lengths = [4096]
    buffer, layers = place(shape, lengths, 2 * nbytes_for(shape, lengths, 1))
    with buffer:
        work = DecodeWork(shape, lengths, layers, team, buffer.address, seed=1)
        plain, small = work.steps
        work.run()
        values = work._caches[1][1]
        values *= values.dtype.type(tiny)
        found = beside(small.run, {"normal values": plain.run}, team, pairs)
        if not np.isfinite(small.out).all():
            return lost(GROUP, f"{shape.dtype} subnormal values", "ratio", None, "the output is not finite")
        return figure(f"{shape.dtype} subnormal values", found, None, plain.kv_bytes, ", no target")
