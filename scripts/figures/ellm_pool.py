"""``ellm-pool``: what the elastic pool of eLLM promises: remapping without copies, reuse, mapping ahead, lending.

Both sides of a ratio are taken in turns in one process, on the host's driver.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from statistics import fmean, median

import numpy as np

from kvbench.errors import Unavailable
from kvbench.kernels.raw import bytes_at
from kvbench.locks import acquire, machine_resources
from kvbench.memory.vmm.host import HostVmm
from kvbench.memory.vmm.protocol import SLOTS, Chunk, Counters, Fence, Reservation, Span
from kvbench.memory.vmm.touch import HostTouch
from kvbench.systems.ellm import mixed
from kvbench.systems.ellm.act_slots import ActSlot
from kvbench.systems.ellm.alone import CallsAlone
from kvbench.systems.ellm.backing import Policy, Sizes
from kvbench.systems.ellm.chunks import PoolExhausted
from kvbench.systems.ellm.identity import moved_bytes, stamp
from kvbench.systems.ellm.isolated import Memory, play, requests
from kvbench.systems.ellm.kv_slots import KvSlot
from kvbench.systems.ellm.pool import ElasticPool
from kvbench.units import format_value

from .processes import Neighbours
from .record import Figure, Scalar, judge, lost

GROUP = "ellm-pool"
MIB = 1 << 20
CHUNK = 2 * MIB
GIB_CHUNKS = 512
CURVE_TOKENS = 1 << 19


@dataclass(frozen=True, slots=True)
class Options:
    """How often each thing is done, and on how many chunks.

    Inflations of ``chunks``; passes of the mixed stream; steps that cross a chunk boundary; operations on paper; decode
    steps of each pool of the curve, with ``curve_chunks`` of memory.
    """

    inflations: int = 15
    passes: int = 24
    crossings: int = 120
    operations: int = 40_000
    chunks: int = GIB_CHUNKS
    steps: int = 400
    curve_chunks: int = 2048


def figures(options: Options | None = None) -> Iterator[Figure]:
    """Yield every figure of the group; the machine's lock is held."""
    options = options or Options()
    with acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)):
        for part in (inflation, reuse, ahead, curve, bookkeeping):
            try:
                yield from part(options)
            except Unavailable as error:
                yield lost(GROUP, part.__name__, "count", None, str(error), low=1)


def inflation(options: Options) -> Iterator[Figure]:
    """Yield the bytes an inflation of 1 GiB copies, and its time against the sum of its calls measured alone."""
    count, nbytes, touch = options.chunks, options.chunks * CHUNK, HostTouch()
    name = f"inflation of {format_value(float(nbytes), 'B')}"
    with ExitStack() as stack:
        vmm = stack.enter_context(HostVmm(nbytes))
        pool = stack.enter_context(ElasticPool(vmm, Sizes(CHUNK, 0, count, 2, nbytes, nbytes)))
        alone = stack.enter_context(CallsAlone(vmm, pool.chunks))
        first = pool.open_act(nbytes)
        stamp(pool, first, touch)
        pool.close_act(first)
        copied = 0
        pairs: list[tuple[float, float]] = []
        others = Neighbours()
        for turn in range(options.inflations + 1):
            sides: list[float] = [0.0, 0.0]
            for side in (0, 1) if turn % 2 else (1, 0):
                if side:
                    alone.prepare()
                    sides[1] = sum(_seconds(call) for call in (alone.unmap, alone.map, alone.access))
                    continue
                pool.close_act(pool.open_act(nbytes))
                began = time.perf_counter()
                slot = pool.open_kv(nbytes)
                sides[0] = time.perf_counter() - began
                copied = max(copied, moved_bytes(pool, slot, touch))
                pool.close_kv(slot)
            if turn:
                pairs.append((sides[0], sides[1]))
    disturbed, note = others.disturbing(), others.note()
    yield Figure(
        GROUP, f"{name}, bytes copied", "count", copied, 0, 0, judge(copied, 0, 0, disturbed=False),
        f"{count} chunks found by the numbers they carry, {len(pairs) + 1} inflations",
    )  # fmt: skip
    ratio = median(pool_s / alone_s for pool_s, alone_s in pairs)
    ours, calls = median(a for a, _ in pairs), median(b for _, b in pairs)
    detail: dict[str, Scalar] = {"pool": ours, "calls": calls, "pairs": len(pairs), "chunks": count}
    yield Figure(
        GROUP, f"{name} / its calls alone", "ratio", ratio, None, 1.15, judge(ratio, None, 1.15, disturbed=disturbed),
        _join(f"pool {format_value(ours, 's')}, calls {format_value(calls, 's')}, {len(pairs)} pairs", note),
        detail=detail,
    )  # fmt: skip


def _seconds(call: object) -> float:
    assert callable(call)
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def reuse(options: Options) -> Iterator[Figure]:
    """Yield map calls per 1000 allocations of pooled reuse over those of mapping every time, mixed streams."""
    size, sequences = 64 << 10, 8
    streams = [mixed.stream(128, sequences, seed) for seed in range(8)]
    kv, act = (max(peaks) for peaks in zip(*(mixed.peak_chunks(s, size) for s in streams), strict=True))
    context = mixed.kv_bytes(mixed.LONGEST_PROMPT + mixed.LONGEST_OUTPUT + mixed.TOKENS_PER_CHUNK, size)
    sizes = Sizes(size, kv + 1, act + 1, 2 * sequences, context, 4 * (kv + act + 2) * size)
    maps: dict[str, float] = {}
    for name, policy in (("pooled", Policy()), ("every time", Policy(reuse=False))):
        with HostVmm((kv + act + 2) * size) as vmm, ElasticPool(vmm, sizes, policy) as pool:
            rates = []
            for number in range(options.passes):
                mapped, made = pool.tally.mapped, pool.tally.allocations
                _replay(pool, streams[number % len(streams)])
                rates.append(1000.0 * (pool.tally.mapped - mapped) / (pool.tally.allocations - made))
            maps[name] = fmean(rates[len(streams) :] or rates)
    ratio = maps["pooled"] / maps["every time"]
    note = ", ".join(f"{name} {value:.0f}" for name, value in maps.items()) + " maps per 1000 allocations"
    yield Figure(
        GROUP, "pooled reuse, map calls / every time", "ratio", ratio, None, 0.1,
        judge(ratio, None, 0.1, disturbed=False), note,
        detail={key.replace(" ", "_"): value for key, value in maps.items()},
    )  # fmt: skip


def _replay(pool: ElasticPool, events: Sequence[mixed.Event]) -> None:
    size = pool.sizes.chunk_bytes
    slots: dict[int, KvSlot] = {}
    for event in events:
        if event.kind == "open":
            slots[event.key] = pool.open_kv(mixed.kv_bytes(event.tokens, size))
        elif event.kind == "grow":
            pool.grow(slots[event.key], mixed.kv_bytes(event.tokens, size))
        elif event.kind == "act":
            pool.close_act(pool.open_act(mixed.act_bytes(event.tokens, size)))
        elif event.kind == "close":
            pool.close_kv(slots.pop(event.key))


SEQUENCES, FIRST, TOKENS, MOST = 8, 4, 8, 24  # chunks a sequence starts with, tokens a chunk, chunks it ends with
# Times that a step reads 8 MiB of each sequence: 10 to 20 ms, as a decode step of an 8B model takes on a GPU. All
# sequences enter a chunk in the same step, and what maps 8 of them has to fit into the step before.
READS = 4


def ahead(options: Options) -> Iterator[Figure]:
    """Yield p99 of the decode steps in which every sequence enters a new chunk, over p99 of the others."""
    found: dict[bool, tuple[float, float]] = {}
    others = Neighbours()
    for premap in (False, True):
        steps = _decode(options.crossings, premap=premap)
        found[premap] = (_p99(steps[True]), _p99(steps[False]))
    ratio, without = (found[premap][0] / found[premap][1] for premap in (True, False))
    detail: dict[str, Scalar] = {
        "crossing": found[True][0], "plain": found[True][1], "without": without, "crossings": options.crossings,
    }  # fmt: skip
    yield Figure(
        GROUP, "mapped ahead, p99 of crossing / other steps", "ratio", ratio, None, 1.2,
        judge(ratio, None, 1.2, disturbed=others.disturbing()),
        _join(
            f"crossing {format_value(found[True][0], 's')}, others {format_value(found[True][1], 's')}, "
            f"without mapping ahead {without:.2f}", others.note(),
        ), detail=detail,
    )  # fmt: skip


def _decode(crossings: int, *, premap: bool) -> dict[bool, list[float]]:
    """Return the seconds of decode steps that cross a chunk boundary (True) and of the others (False).

    A step grows 8 sequences by a token each, reads part of each, and maps ahead for the next meanwhile. Their memory is
    borrowed from idle activations chunk by chunk.
    """
    taken: dict[bool, list[float]] = {True: [], False: []}
    total = SEQUENCES * MOST
    with HostVmm(total * CHUNK) as vmm:
        sizes = Sizes(CHUNK, 0, total, SEQUENCES, MOST * CHUNK, total * CHUNK)
        with ElasticPool(vmm, sizes) as pool:
            while len(taken[True]) < crossings:
                pool.close_act(pool.open_act(total * CHUNK))
                slots = [pool.open_kv(FIRST * CHUNK) for _ in range(SEQUENCES)]
                for tokens in range(FIRST * TOKENS + 1, MOST * TOKENS + 1):
                    now, then = ((at * CHUNK + TOKENS - 1) // TOKENS for at in (tokens, tokens + 1))
                    began = time.perf_counter()
                    pool.grant(grows=[(slot, now) for slot in slots])
                    if premap and tokens < MOST * TOKENS:
                        pool.premap([(slot, then) for slot in slots])
                    for slot in READS * slots:
                        bytes_at(slot.address, FIRST * CHUNK).view(np.uint64).sum()
                    seconds = time.perf_counter() - began
                    taken[tokens % TOKENS == 1].append(seconds)
                for slot in slots:
                    pool.close_kv(slot)
    return taken


def _p99(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.99))


def curve(options: Options) -> Iterator[Figure]:
    """Yield requests admitted by the elastic pool over those of isolated ones, 2K to 128K tokens of longest context."""
    memory = Memory(4096, options.curve_chunks, CURVE_TOKENS // options.curve_chunks)
    stream = requests(6000, seed=1)
    aims: dict[int, tuple[float | None, float | None]] = {2048: (0.99, 1.01), 131072: (1.15, None)}
    with HostVmm(memory.chunks * memory.chunk_bytes) as vmm:
        for context in (2048 << k for k in range(7)):
            elastic, isolated = (
                play(vmm, memory, context, stream, options.steps, elastic=each, touch=HostTouch())
                for each in (True, False)
            )
            ratio = elastic.admitted / isolated.admitted
            low, high = aims.get(context, (None, None))
            note = f"{elastic.admitted} / {isolated.admitted} admitted, {elastic.largest_batch} / "
            note += f"{isolated.largest_batch} at once, {elastic.moved_bytes + isolated.moved_bytes} bytes copied"
            yield Figure(
                GROUP, f"elastic / isolated, {context // 1024}K", "ratio", ratio, low, high,
                judge(ratio, low, high, disturbed=False), note,
                detail={"context": context, "elastic": elastic.admitted, "isolated": isolated.admitted},
            )  # fmt: skip


class Paper:
    """A driver that does nothing: what is left is the pool's own bookkeeping."""

    name = "paper"

    def __init__(self) -> None:
        self._serials = itertools.count(1)
        self._next = 1 << 40

    def granularity(self) -> int:
        return 4096

    def reserve(self, nbytes: int) -> Reservation:
        self._next += nbytes
        return Reservation(next(self._serials), self._next, nbytes)

    def free(self, reservation: Reservation) -> None: ...

    def create(self, nbytes: int) -> Chunk:
        return self.create_many(nbytes, 1)[0]

    def create_many(self, nbytes: int, count: int) -> list[Chunk]:
        return [Chunk(next(self._serials) * SLOTS + i, nbytes, i) for i in range(count)]

    def release(self, chunk: Chunk) -> None: ...

    def release_many(self, chunks: Sequence[Chunk]) -> None: ...

    def map(self, reservation: Reservation, offset: int, chunk: Chunk) -> None: ...

    def map_many(self, reservation: Reservation, offsets: Sequence[int], chunks: Sequence[Chunk]) -> None: ...

    def set_access(self, reservation: Reservation, offset: int, nbytes: int) -> None: ...

    def set_access_many(self, reservation: Reservation, spans: Sequence[Span]) -> None: ...

    def unmap(self, reservation: Reservation, offset: int, nbytes: int) -> None: ...

    def unmap_many(self, reservation: Reservation, spans: Sequence[Span]) -> None: ...

    def guard(self, reservation: Reservation, fence: Fence) -> None: ...

    def mapped_count(self, chunk: Chunk) -> int:
        return 0

    def counters(self) -> Counters:
        return Counters(0, 0, 0, 0, 0, 0)

    def close(self) -> None: ...

    def destroy(self) -> Counters:
        return self.counters()


def bookkeeping(options: Options) -> Iterator[Figure]:
    """Yield the CPU seconds of one operation of the pool at 1,000 and at 100,000 chunks, without any driver."""
    others = Neighbours()
    found = {chunks: _operation(chunks, options.operations) for chunks in (1_000, 100_000)}
    for chunks, (value, made) in found.items():
        high = 5e-6 if chunks == 100_000 else None
        yield Figure(
            GROUP, f"bookkeeping an operation, {chunks} chunks", "s", value, None, high,
            judge(value, None, high, disturbed=others.disturbing()),
            _join(f"median of 5 rounds, {made} opened, grown and closed slots in all", others.note()),
            detail={"chunks": chunks, "operations": made},
        )  # fmt: skip


def _operation(chunks: int, operations: int) -> tuple[float, int]:
    """Return CPU seconds an operation (median of 5 rounds) and operations, on a pool about three quarters full."""
    rng, size = Random(1), 4096
    most = max(2, chunks // 2500)  # of one slot, so that slots scale with the pool
    pool = ElasticPool(Paper(), Sizes(size, chunks // 2, chunks // 2, chunks, 16 * most * size, 2 * chunks * size))
    kv = [pool.open_kv(rng.randint(1, most) * size) for _ in range(chunks // most)]
    act = [pool.open_act(rng.randint(1, most) * size) for _ in range(chunks // most // 4)]
    rounds, made = [], 0
    for _ in range(5):
        draws = [(rng.random(), rng.randrange(1 << 30), rng.randint(1, most) * size) for _ in range(operations // 5)]
        began = time.thread_time()
        done = sum(_operate(pool, kv, act, *draw, 16 * most) for draw in draws)
        rounds.append((time.thread_time() - began) / max(1, done))
        made += done
    pool.check()
    return median(rounds), made


def _operate(
    pool: ElasticPool, kv: list[KvSlot], act: list[ActSlot], which: float, at: int, nbytes: int, most: int
) -> bool:
    """Open, grow or close a slot; return whether there was one, and room for it."""
    try:
        if which < 0.2:
            kv.append(pool.open_kv(nbytes))
        elif which < 0.4:
            pool.close_kv(kv.pop(at % len(kv)))
        elif which < 0.6:
            slot = kv[at % len(kv)]
            pool.grow(slot, min(slot.need + 1, most) * pool.sizes.chunk_bytes)
        elif which < 0.8:
            act.append(pool.open_act(nbytes))
        else:
            pool.close_act(act.pop(at % len(act)))
    except (PoolExhausted, ZeroDivisionError):
        return False
    return True


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
