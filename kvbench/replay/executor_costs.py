"""A small cost table of the pair an executed replay runs on, measured on the same memory, threads and moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from kvbench.replay.contention import Contention
from kvbench.replay.costs import Costs
from kvbench.replay.executor import Clock, Mover
from kvbench.replay.executor_course import Attended, Copied
from kvbench.replay.executor_pair import NEAR_BLOCKS, PairMemory
from kvbench.replay.policies.neo import Part
from kvbench.systems.neo.costs import Line, Plane, Tables

if TYPE_CHECKING:
    from kvbench.attention.cpu import DecodeAttention
    from kvbench.model.layers import LayerShape
    from kvbench.replay.executor_near import BlasNear
    from kvbench.replay.machine import Machine

REQUESTS = (1, 4, 16, 48)
ROUNDS = 5  # of every layer; the median counts: the replay is to say what a pass takes, not what it could take
PAGES = 64  # of keys and of values in the copy that is measured
BESIDE_S = 0.02  # of near work beside attention, a turn
PHASES = 40  # whose hand-overs are measured


@dataclass(frozen=True, slots=True)
class NearCosts:
    """What a real near side takes: linr and pref, and seconds of the output head over one row and over ``rows``."""

    linr: Line
    pref: Line
    head_one: float
    head_many: float
    rows: int


@dataclass(frozen=True, slots=True)
class PairCosts:
    """What was measured: ``cdec``, seconds a layer of CPU attention; ``copy``, bytes/s of page copies; ``launch``,
    seconds a phase with CPU attention takes beyond it."""

    cdec: Plane
    copy: float
    launch: float

    def costs(
        self, machine: Machine, shape: LayerShape, near: NearCosts | None = None, contention: Contention | None = None
    ) -> Costs:
        """Return costs whose near side is that of ``machine``, or as measured (``near``); all else is as measured.

        ``contention``: how both sides disturb each other; a near side that is only paced disturbs nothing.
        """
        basis = "modelled" if near is None else "measured"
        if near is None:
            source = Costs(machine, shape)
            lines = (
                line("linr", lambda n: source.linear(n).seconds, 1 << 12),
                line("pref", lambda n: source.prefill_attention(n, 0).seconds, 1 << 12),
            )
        else:
            lines = (near.linr, near.pref)
            elements = shape.vocab * shape.hidden
            machine = machine.with_(
                why="measured right before: the output head over one and many rows", flops_share=1.0, hbm_share=1.0,
                flops=2.0 * elements * near.rows / near.head_many, hbm=2.0 * elements / near.head_one,
            )  # fmt: skip
        decode = Costs(machine, shape)
        tables = Tables(
            shape.name, machine.name, "all", *lines,
            line("gdec", lambda n: decode.decode_attention(1, n).seconds, 1 << 18), self.cdec, self.launch,
            {"linr": basis, "pref": basis, "gdec": "modelled", "cdec": "measured", "lnch": "measured"},
        )  # fmt: skip
        measured = machine.with_(
            why="measured right before, on the pair", link_in=self.copy, link_out=self.copy, sm_copy=self.copy,
            launch=self.launch, link_duplex=1.0,
        )  # fmt: skip
        return Costs(measured, shape, contention=contention or Contention(), tables=tables)


def line(name: str, at: Callable[[int], float], most: int) -> Line:
    """Return a table of ``at(n)`` at powers of two and of two and a half between, up to ``most``."""
    points = sorted({max(1, n * k // 4) for i in range(most.bit_length()) for n in (1 << i,) for k in (4, 5, 6, 7)})
    return Line(name, tuple(points), tuple(at(n) for n in points))


def measure_pair(
    memory: PairMemory, attention: DecodeAttention, mover: Mover, near: BlasNear | None = None
) -> PairCosts:  # fmt: skip
    """Measure the costs of a pair with nothing beside them but, for ``launch``, a ``near`` side that is real; the
    memory is filled anew afterwards."""
    memory.fill()
    clear(memory)
    found = PairCosts(_cdec(memory, attention), _copy(memory, mover), _launch(memory, attention, near))
    memory.fill()
    return found


def measure_near(near: BlasNear) -> NearCosts:
    """Measure a real near side with nothing beside it."""
    clock = Clock()
    linr, pref = near.lines(clock)
    one, many = (near.seconds(Part(heads=(rows,)), clock) for rows in (1, near.most))
    return NearCosts(linr, pref, one, many, near.most)


def measure_beside(memory: PairMemory, attention: DecodeAttention, near: BlasNear) -> Contention:
    """Measure how a real near side and CPU attention slow each other: each one without an end beside the other, over
    what it takes alone. The memory is cleared.

    Both sides share a memory bus, and on many machines caches and clock: on one without spare bandwidth a replay that
    leaves this out is as much too fast.
    """
    clear(memory)
    clock = Clock()
    decodes = batch(memory, 1, memory.shape.page_tokens * memory.blocks)
    table = memory.tables(decodes)
    steps = [memory.step(attention, 0, layer, *table) for layer in range(memory.layers)]
    for step in steps:
        step.run()
    alone = median(sum(step.run() for step in steps) / len(steps) for _ in range(ROUNDS))
    many = max(1, round(BESIDE_S / near.seconds(Part(linear=(near.most,)), clock)))
    part = Part(linear=(near.most,) * many)
    slowed, attended = [], []
    for turn in range(ROUNDS):
        begin = clock.now()
        near.begin(part, turn % near.layers)
        taken: list[float] = []
        while near.busy:
            taken.append(steps[len(taken) % len(steps)].run())
        slowed.append((clock.now() - begin) * 1e-9 - 0.5 * taken[-1])  # it ended somewhere in the last step
        near.wait()
        attended += taken[:-1] or taken
    factors = {"near_cpu": median(slowed) / near.seconds(part, clock), "cpu_near": median(attended) / alone}
    return Contention(
        **{name: max(1.0, factor) for name, factor in factors.items()},
        sources=dict.fromkeys(factors, "measured right before, each beside the other"),
    )


def clear(memory: PairMemory) -> None:
    """Copy numbers over the far tier: attention to NaN may take another time."""
    for layer in range(memory.layers):
        near = memory.near_bytes(layer, 0)
        far = memory.far_bytes(layer)
        for start in range(0, len(far), len(near)):
            far[start : start + len(near)] = near[: len(far) - start]


def batch(memory: PairMemory, requests: int, tokens: int) -> list[Attended]:
    """Return decodes of one length in all of the far tier's blocks, in no order."""
    page = memory.shape.page_tokens
    each = tokens // requests
    pages = -(-each // page)
    order = np.random.default_rng(requests).permutation(memory.blocks)[: requests * pages].tolist()
    return [Attended(i, each, tuple(order[i * pages : (i + 1) * pages])) for i in range(requests)]


def _cdec(memory: PairMemory, attention: DecodeAttention) -> Plane:
    page, most = memory.shape.page_tokens, len(memory.far[0][0])
    tokens = [n for n in (page << i for i in range(20)) if n <= memory.blocks * page]
    requests = [r for r in REQUESTS if r <= most]
    cells = tuple(tuple(_cell(memory, attention, r, n) for n in tokens) for r in requests)
    return Plane("cdec", tuple(requests), tuple(tokens), cells)


def _cell(memory: PairMemory, attention: DecodeAttention, requests: int, tokens: int) -> float | None:
    pages = requests * -(-(tokens // requests) // memory.shape.page_tokens)
    if tokens < requests or pages > memory.blocks:
        return None
    table = memory.tables(batch(memory, requests, tokens))
    steps = [memory.step(attention, 0, layer, *table) for layer in range(memory.layers)]
    for step in steps:
        step.run()
    return median(sum(step.run() for step in steps) / len(steps) for _ in range(ROUNDS))


def _copy(memory: PairMemory, mover: Mover) -> float:
    """Return bytes/s of pages copied out and in, layer by layer."""
    pages = min(PAGES, NEAR_BLOCKS, memory.blocks)
    order = tuple(np.random.default_rng(1).permutation(memory.blocks)[:pages].tolist())
    rates = []
    for layer in range(memory.layers):
        for out in (True, False):
            copy = memory.copy(memory.rows([Copied(0, order, out)], layer), mover.team)
            assert copy is not None
            seconds = []
            for _ in range(ROUNDS):
                mover.begin(copy)
                seconds.append(mover.wait())
            rates.append(copy.link_bytes / median(seconds))
    return median(rates)


def _launch(memory: PairMemory, attention: DecodeAttention, near: BlasNear | None = None) -> float:
    """Return what a phase takes beyond its attention and the copy of a token's q, k, v and o before it; with a real
    near side beyond the longer of that and the near work, so that two threads which start and meet are in it."""
    clock, part = Clock(), Part(linear=(1,))
    alone = 0.0 if near is None else near.seconds(part, clock)
    decodes = batch(memory, 1, memory.shape.page_tokens * min(64, memory.blocks))
    step = memory.step(attention, 0, 0, *memory.tables(decodes))
    copy = memory.copy(memory.shipped(0, 1), attention.team)
    assert copy is not None
    beyond: list[float] = []
    for _ in range(PHASES):
        begin = clock.now()
        if near is not None:
            near.begin(part, 0)
        seconds = copy.run() + step.run()
        if near is not None:
            near.wait()
        beyond.append((clock.now() - begin) * 1e-9 - max(seconds, alone))
    return max(1e-9, median(beyond))
