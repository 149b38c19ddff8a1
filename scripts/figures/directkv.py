"""``directkv``: the product with B far on this host: bytes against the algebra, time against prediction and swap."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from kvbench.errors import KvbenchError
from kvbench.kernels.team import Team
from kvbench.locks import acquire, machine_resources
from kvbench.machine.topology import read_topology
from kvbench.systems.directkv.host_gemm import ERROR, HostGemm
from kvbench.systems.directkv.host_rig import PANEL, Rig, Sample, contenders, cores, open_rig, take, tiled
from kvbench.systems.directkv.predict import TIE, regret, winner
from kvbench.systems.directkv.shapes import FAR_METHODS, Gemm, Method

from .processes import Neighbours
from .record import Figure, Scalar, judge, lost

GROUP = "directkv"
PAIR = "dram:file"
BYTES_N = (1000, 1024, 2048, 4096)
LARGE_N = 4096
TIME_N, TIME_TILES = (1024, 2048, 4096), ("128", "256", PANEL)
TINY_N, TINY_TILE, MEMORY = 512, "64", "dram:dram"  # with one row a load is nothing beside handing it over
SWEEP_N, SWEEP_M, SWEEP_TILES = (512, 1024, 2048), (0, 64, 256), ("128", "256")
PASSES, ROUNDS = 3, 7
LINK_LOW, LINK_HIGH = 0.99, 1.01
SWAP_HIGH, BUFFER_HIGH = 1.10, 0.10
TIME_LOW, TIME_HIGH = 0.8, 1.2
AGREE_LOW = 0.9


class Kept:
    """Threads and resources of one rig, as a bench's ``measure`` keeps them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def team_on(self, cpus: Sequence[int]) -> Team:
        return self._stack.enter_context(Team(cpus))

    def enter(self, resource: Any) -> Any:
        return self._stack.enter_context(resource)


@contextmanager
def rig_of(gemm: Gemm, pair: str = PAIR, seed: int = 5) -> Iterator[Rig]:
    """Yield a rig of ``gemm`` in the default scratch directory; everything goes with the block."""
    with ExitStack() as stack:
        yield open_rig(Kept(stack), gemm, pair, read_topology(), None, seed)


def figures(rounds: int = ROUNDS) -> Iterator[Figure]:
    """Yield every figure of the group; the machine's lock is held meanwhile."""
    with acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)):
        try:
            cores(read_topology(), None)
        except KvbenchError as error:
            yield lost(GROUP, "every host figure", "ratio", LINK_HIGH, str(error), low=LINK_LOW)
            return
        for n in BYTES_N:
            yield from crossed(n)
        yield from against_swap(rounds)
        for n in TIME_N:
            for tile in TIME_TILES:
                yield from predicted(n, tile, rounds)
        for pair in (PAIR, MEMORY):
            yield from predicted(TINY_N, TINY_TILE, rounds, ("cpu_aware_pipelined",), pair, 1)
        yield agreement(rounds)


def crossed(n: int, passes: int = PASSES, tile: str = "128") -> Iterator[Figure]:
    """Yield measured over predicted link bytes, of the method farthest off, and the largest error over its bound."""
    name, wrong = f"link bytes / algebra, n = {n}, every method", f"fp32 error / bound, n = {n}"
    try:
        with rig_of(tiled(n, n, n, tile)) as rig:
            ratios: dict[str, float] = {}
            errors: dict[str, float] = {}
            moved: dict[str, int] = {}
            for method in FAR_METHODS:
                work = rig.make(method)
                work.run()
                assert work.store is not None
                work.store.forget()
                work.run(passes)
                if work.store.link is None:
                    yield lost(GROUP, name, "ratio", LINK_HIGH, work.store.link_reason, low=LINK_LOW)
                    return
                moved[method], ratios[method] = work.store.link, work.store.link / work.plan.traffic.link
                work.verify()
                errors[method] = work.error or 0.0
            resident = rig.make("resident")
            resident.verify()
            errors["resident"] = resident.error or 0.0
    except KvbenchError as error:
        yield lost(GROUP, name, "ratio", LINK_HIGH, str(error), low=LINK_LOW)
        return
    worst = max(ratios, key=lambda method: abs(ratios[method] - 1.0))
    detail: dict[str, Scalar] = {f"{method}_bytes": value for method, value in moved.items()}
    note = ", ".join(f"{method} {ratio:.4f}" for method, ratio in ratios.items())
    value = ratios[worst]
    verdict = judge(value, LINK_LOW, LINK_HIGH, disturbed=False)
    yield Figure(GROUP, name, "ratio", value, LINK_LOW, LINK_HIGH, verdict, note, detail=detail | ratios)
    bound = ERROR * n**0.5
    value = max(errors.values()) / bound
    note = f"norm of C - float64 over norm, at most {max(errors.values()):.2g}, bound {bound:.2g}"
    yield Figure(
        GROUP, wrong, "ratio", value, None, 1.0, judge(value, None, 1.0, disturbed=False), note, detail=dict(errors)
    )


def against_swap(rounds: int = ROUNDS, n: int = LARGE_N) -> Iterator[Figure]:
    """Yield the time of ``cpu_aware`` in panels over that of a swap of all of B, and their near buffers, in turns."""
    names = [f"cpu_aware / swap 100 %, n = {n}, {what}" for what in ("time", "near buffer")]
    others = Neighbours()
    try:
        with rig_of(tiled(n, n, n, PANEL)) as rig:
            aware, swap = rig.make("cpu_aware"), rig.make("swap")
            pairs = in_turns([aware, swap], rounds)
            for work in (aware, swap):
                work.verify()
            held = [(work.near_bytes, work.plan.near_buffer) for work in (aware, swap)]
    except KvbenchError as error:
        for name, high in zip(names, (SWAP_HIGH, BUFFER_HIGH), strict=True):
            yield lost(GROUP, name, "ratio", high, str(error))
        return
    value = median(a / b for a, b in pairs)
    times = [median(side) for side in zip(*pairs, strict=True)]
    note = f"{times[0]:.3f} s against {times[1]:.3f} s, median of {rounds} ratios in turns; {others.note()}".rstrip(
        "; "
    )
    verdict = judge(value, None, SWAP_HIGH, disturbed=others.disturbing())
    detail: dict[str, Scalar] = {"cpu_aware": times[0], "swap": times[1]}
    yield Figure(GROUP, names[0], "ratio", value, None, SWAP_HIGH, verdict, note, detail=detail)
    (own, planned), (whole, _) = held
    if own is None or whole is None:
        yield lost(GROUP, names[1], "ratio", BUFFER_HIGH, "the kernel does not tell which pages are in memory")
        return
    value = own / whole
    note = f"{own} of {whole} bytes resident, planned {planned}"
    verdict = judge(value, None, BUFFER_HIGH, disturbed=False)
    yield Figure(GROUP, names[1], "ratio", value, None, BUFFER_HIGH, verdict, note)


def in_turns(works: Sequence[HostGemm], rounds: int) -> list[list[float]]:
    """Return the seconds of each work in ``rounds`` rounds, every second one in reverse, after one that is dropped."""
    found: list[list[float]] = []
    for turn in range(rounds + 1):
        places = range(len(works)) if turn % 2 else reversed(range(len(works)))
        taken = {place: works[place].run() for place in places}
        if turn:
            found.append([taken[place] for place in range(len(works))])
    return found


def predicted(
    n: int, tile: str, rounds: int = ROUNDS, methods: Sequence[Method] = ("naive", "cpu_aware"), pair: str = PAIR,
    m: int = 0,
) -> Iterator[Figure]:  # fmt: skip
    """Yield measured over predicted seconds of ``methods`` at one size and tile; ``m`` of 0 is ``n``."""
    where = (f", m = {m}" if m else "") + ("" if pair == PAIR else f", {pair}")
    names = {method: f"{method} time / prediction, n = {n}, tile {tile}{where}" for method in methods}
    others = Neighbours()
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    try:
        with rig_of(tiled(m or n, n, n, tile), pair) as rig:
            works = {method: rig.make(method) for method in methods}
            for turn in range(rounds + 1):
                for method, work in works.items():
                    one = take(work)
                    if turn:
                        samples[method].append(one)
            for work in works.values():
                work.verify()
    except KvbenchError as error:
        for name in names.values():
            yield lost(GROUP, name, "ratio", TIME_HIGH, str(error), low=TIME_LOW)
        return
    for method, name in names.items():
        value = median(one.measured / one.predicted for one in samples[method])
        seconds, loads, products = (
            median(getattr(one, part) for one in samples[method]) for part in ("measured", "loads", "products")
        )
        note = f"{seconds:.3f} s, loads {loads:.3f} s, products {products:.3f} s; {others.note()}".rstrip("; ")
        verdict = judge(value, TIME_LOW, TIME_HIGH, disturbed=others.disturbing())
        detail: dict[str, Scalar] = {"seconds": seconds, "loads": loads, "products": products, "samples": rounds}
        yield Figure(GROUP, name, "ratio", value, TIME_LOW, TIME_HIGH, verdict, note, detail=detail)


def agreement(
    rounds: int = ROUNDS, sizes: Sequence[int] = SWEEP_N, rows: Sequence[int] = SWEEP_M,
    tiles: Sequence[str] = SWEEP_TILES,
) -> Figure:  # fmt: skip
    """Return the share of the sweep's points at which the predicted winner is the measured one, ties within 5 %.

    Misses are listed: the point, the predicted and the measured winner, and what the wrong choice costs.
    """
    name = "predicted winner = measured winner"
    others = Neighbours()
    points = [(n, m, tile) for n in sizes for m in rows for tile in tiles if (m or n) <= n]
    right = strictly = 0
    misses: list[str] = []
    detail: dict[str, Scalar] = {}
    for n, m, tile in points:
        try:
            found = decided(m or n, n, tile, rounds)
        except KvbenchError as error:
            return lost(GROUP, name, "share", None, f"n = {n}, m = {m or n}, tile {tile}: {error}", low=AGREE_LOW)
        chosen, best, cost = found
        right += cost <= 1.0 + TIE
        strictly += chosen == best
        detail[f"n{n}_m{m or n}_tile{tile}"] = f"{chosen} for {best}, {cost:.3f}"
        if cost > 1.0 + TIE:
            misses.append(f"n {n} m {m or n} tile {tile}: {chosen} for {best} ({cost:.2f} x)")
    value = right / len(points)
    listed = "; ".join(misses) if misses else "none"
    note = f"{right} of {len(points)} within {TIE:.0%}, {strictly} the very same; misses: {listed}; {others.note()}"
    verdict = judge(value, AGREE_LOW, None, disturbed=others.disturbing())
    return Figure(GROUP, name, "share", value, AGREE_LOW, None, verdict, note.rstrip("; "), detail=detail)


def decided(m: int, n: int, tile: str, rounds: int) -> tuple[str, str, float]:
    """Return the predicted winner, the measured one, and the cost of the first over the second, medians of rounds."""
    with rig_of(tiled(m, n, n, tile)) as rig:
        works = contenders(rig)
        samples: dict[str, list[Sample]] = {name: [] for name in works}
        for turn in range(rounds + 1):
            for name, work in works.items():
                one = take(work)
                if turn:
                    samples[name].append(one)
        for work in works.values():
            work.verify()
    measured = {name: median(one.measured for one in taken) for name, taken in samples.items()}
    chosen = winner({name: median(one.predicted for one in taken) for name, taken in samples.items()})
    return chosen, winner(measured), regret(chosen, measured)
