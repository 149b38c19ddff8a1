"""What NEO sends over the link, a token's q, k, v and o, against moving the KV of the request (N5, NEO 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvbench import Case, Measure, axis, bench
from kvbench.contract.axis import Value

if TYPE_CHECKING:
    from kvbench.contract.result import Result, Status
    from kvbench.memory.cuda.device import Stream
    from kvbench.model.layout import Moves
    from kvbench.systems.neo.shipping import Leg, Transfer
    from kvbench.timing.gate import GateKind
    from kvbench.transport.gpu_lane import Lane
    from kvbench.transport.host_job import End

MODELS = ["Llama-2-7B", "Llama-3-8B", "Llama-3-70B"]
PAIRS = {"dram:dram": "cpu", "dram:file": "cpu", "hbm:pinned": "ce"}
SWEEPS = {"coarse": (2, 4, 16, 64, 256, 1024), "fine": (2, 4, 8, 12, 16, 32, 64, 128, 256, 512, 1024)}
ROUNDS = {"smoke": 7, "quick": 21, "full": 101}  # passes of each size, taken in turns
RETAKES = 3  # of a disturbed pass: then it counts
MOST_DISTURBED = 0.1
FLUSH_LLC = 2  # last-level caches read over before a pass
FILE_TOKENS = 256  # beyond, a pass of every size takes seconds on a disk
LONG = 1000  # tokens of the paper's case for shipping
LAYERS = 8
PAIR = axis.choice(*PAIRS, smoke=["dram:dram", "hbm:pinned"], quick=[*PAIRS])
MODEL = axis.choice(*MODELS, smoke=["Llama-3-8B"], quick=["Llama-3-8B"])
COPIES = axis.choice("coalesced", "scattered", smoke=["scattered"])
PAGE = axis.integer(smoke=["16"], quick=["16"], full=["16"], low=2, high=256)
THREADS = axis.threads(smoke=["1"], quick=["1"], full=["1", "all"])


def exists(axes: Mapping[str, Value]) -> bool:
    """Return whether there is such a case: a copy engine takes no threads of the host."""
    return axes["pair"] != "hbm:pinned" or axes["threads"] == 1


def scratch_bytes(axes: Mapping[str, Value]) -> int:
    """Return the bytes of the scratch files a case writes."""
    from kvbench.systems.neo.shipping import Request

    one = Request(str(axes["model"]))
    layer = FILE_TOKENS * one.token
    if "tokens" in axes:
        layer = LAYERS * int(axes["tokens"]) * one.token
    requests = int(axes["requests"]) if "requests" in axes else 1
    return 2 * (requests * (layer + one.qkv + one.o) + (1 << 20)) if axes["pair"] == "dram:file" else 0


@bench(
    version=1, metric="ship_time", unit="s", better="lower", where=exists, disk=scratch_bytes, limit=180.0,
    extra_metrics=["crossover", "byte_crossover", "advantage", "kv_per_token"],
    seconds={"smoke": 1.5, "quick": 4.0, "full": 20.0},
    pair=PAIR, model=MODEL, copies=COPIES, page_tokens=PAGE,
    sweep=axis.choice("coarse", "fine", smoke=["coarse"], quick=["fine"], full=["fine"]),
    requests=axis.integer(smoke=["16"], quick=["16"], full=["1", "16", "128"], low=1, high=4096), threads=THREADS,
)  # fmt: skip
def qkvo_vs_kv(case: Case, measure: Measure) -> None:
    """Seconds to send q, k, v of one token of each request to the far tier and to bring o back, for one layer.

    crossover: the tokens of KV a request from which bringing its KV of the layer near takes longer, interpolated
    between sizes taken in turns with the shipping; byte_crossover: the same by bytes alone (modelled); advantage: the
    time of 1,000 tokens' KV, interpolated, over the shipping's; kv_per_token: seconds a token and request beyond the
    fixed cost. coalesced: all requests in one piece a tensor; scattered: a copy a request, and one a page, K and V.
    """
    from kvbench.systems.neo.shipping import Request, Transfer, in_order, record

    link, one, seed = Link(case, measure), Request(case.model), measure.context.seed
    legs = [
        link.leg(Transfer(record(name, nbytes), 1, case.requests, case.copies, seed), way)
        for name, nbytes, way in (("qkv", one.qkv, "evict"), ("o", one.o, "fetch"))
    ]
    ship = in_order(legs)
    pages = {tokens: min(tokens, case.page_tokens) for tokens in sizes(case)}
    found = {
        tokens: link.leg(Transfer(one.layer, page, case.requests * tokens // page, case.copies, seed), "fetch",
                         shared=True)
        for tokens, page in reversed(pages.items())  # the largest pools serve the others too
    }  # fmt: skip
    kv = dict(reversed(found.items()))
    row = measure(
        link.cold(ship.run), link=ship.nbytes, unique=ship.nbytes, verify=ship.verify, kernel=ship.kernel,
        transport=link.name,
    )  # fmt: skip
    measure.note("ship_fragments", ship.fragments)
    measure.note("token_bytes", one.token)
    measure.note("no_ceiling", "two small transfers; what they are held against is the KV")
    if row.value is None:
        return
    times, disturbed = in_turns(link, [ship, *kv.values()], ROUNDS[measure.context.profile], seed)
    for leg in kv.values():
        leg.verify()
    crossover(case, measure, row, kv, times, disturbed)


def in_turns(link: Link, legs: Sequence[Leg], rounds: int, seed: int) -> tuple[list[float], float]:
    """Return the median seconds of a pass of each of ``legs``, taken in turns in an order that changes every round, and
    the share of passes that were disturbed every time they were taken. The first round warms up.
    """
    from statistics import median

    import numpy as np

    from kvbench.timing.clock import now_ns
    from kvbench.timing.gate import open_gate

    rng, taken, lost = np.random.default_rng(seed), [list[float]() for _ in legs], 0
    gate = open_gate(link.gate, link.tids)
    runs = [link.cold(leg.run) for leg in legs]
    try:
        for _ in range(rounds + 1):
            for number in rng.permutation(len(runs)).tolist():
                for attempt in range(RETAKES):
                    if gate is not None:
                        gate.rebase()
                    before = now_ns()
                    seconds = runs[number](1)
                    if gate is None or not gate.disturbed(now_ns() - before):
                        break
                    lost += attempt == RETAKES - 1
                taken[number].append(seconds)
    finally:
        if gate is not None:
            gate.close()
    return [median(values[1:]) for values in taken], lost / (len(legs) * rounds)


def sizes(case: Case) -> list[int]:
    """Return the tokens a request of the sweep: whole pages, or less than one."""
    most = FILE_TOKENS if case.pair == "dram:file" else max(SWEEPS[case.sweep])
    return [n for n in SWEEPS[case.sweep] if n <= most and n % min(n, case.page_tokens) == 0]


def crossover(
    case: Case, measure: Measure, row: Result, kv: Mapping[int, Leg], times: Sequence[float], disturbed: float
) -> None:  # fmt: skip
    """Add the crossover, the arithmetic it is compared with, and what a token costs.

    ``times``: seconds of the shipping, then of each of ``kv``.
    """
    import numpy as np

    from kvbench.analysis.fits import fit, onset
    from kvbench.systems.neo.shipping import Request

    one = Request(case.model)
    reason = f"{disturbed:.0%} of the passes were disturbed" if disturbed > MOST_DISTURBED else ""
    good: Status = "tainted" if reason else "ok"
    rounds = ROUNDS[measure.context.profile]

    def add(metric: str, value: float | None, unit: str, better: str, why: str, **more: object) -> None:
        detail = more.get("detail")
        measure.extra(
            metric, value, unit=unit, better="higher" if better == "higher" else "lower", n=rounds,
            status="skipped" if value is None else good, reason=why if value is None else reason, kernel=row.kernel,
            detail=detail if isinstance(detail, dict) else None,
        )  # fmt: skip

    measure.extra(
        "byte_crossover", one.crossover(), unit="1", better="lower", basis="modelled",
        kernel="bytes of q, k, v (16 bit) and o (float32) over those of a token's K and V",
        detail={"ship_bytes": one.qkv + one.o, "kv_1000_over_ship": LONG / one.crossover()},
    )  # fmt: skip
    ship, seconds, tokens = times[0], list(times[1:]), list(kv)
    law = fit([leg.nbytes for leg in kv.values()], seconds)
    # fits.onset finds where a curve reaches a multiple of its base: here twice half the shipping
    found = onset(tokens, seconds, 2.0, base=ship / 2.0, confirm=1)
    why = f"never up to {tokens[-1]} tokens" if found is None else ""
    if seconds[0] >= ship:
        found, why = None, f"already at {tokens[0]} tokens, the fewest moved, the KV takes longer"
    detail = {f"kv_{n}_s": value for n, value in zip(tokens, seconds, strict=True)} | {
        "ship_s": ship, "law": law.best.law, "law_holds": law.fits, "law_reason": law.best.reason or None,
        "fixed_s": law.best.alpha, "rate_Bps": law.best.beta,
    }  # fmt: skip
    add("crossover", None if found is None else found.x, "1", "lower", why, detail=detail)
    reached = tokens[-1] >= LONG
    add("advantage", float(np.interp(LONG, tokens, seconds)) / ship if reached else None, "1", "higher",
        f"the sweep ends at {tokens[-1]} tokens")  # fmt: skip
    beta = law.best.beta if law.fits else None  # of a law that does not hold no parameter is quoted
    add("kv_per_token", None if beta is None else one.token / beta, "s", "lower", law.best.reason or "not determined")


class Link:
    """Opens transfers of the case's pair. ``tids``: the threads that move bytes; ``gate``: of the sampler."""

    def __init__(self, case: Case, measure: Measure) -> None:
        self.case, self.measure, self.name = case, measure, PAIRS[case.pair]
        self.tids: tuple[int, ...] = ()
        self.gate: GateKind | None = None
        self._held: tuple[End, End] | None = None
        self._flush: Callable[[int], float] | None = None
        if case.pair == "hbm:pinned":
            from kvbench.timing.gpu_rows import on_gpu
            from kvbench.timing.gpu_session import GpuSession

            self.gpu = measure.enter(GpuSession(0))  # raises Unavailable, with the reason, where there is no GPU
            on_gpu(measure, self.gpu, link=True)
        else:
            self.team = measure.team(case.threads)
            self.tids, self.gate = self.team.tids, "delay"
            self._flush = self._other_memory() if case.pair == "dram:dram" else None

    def _other_memory(self) -> Callable[[int], float]:
        """Return a read of other memory that leaves the caches with none of what is moved."""
        from kvbench.kernels.stream import Stream

        nbytes = FLUSH_LLC * self.measure.context.llc
        self.measure.note("flushed_by_reading", nbytes)
        address = self.measure.sources(1, nbytes, "thp")[0].address
        return Stream("read", [address], nbytes, self.team).run

    def cold(self, run: Callable[[int], float]) -> Callable[[int], float]:
        """Return ``run``, between memory each pass after a flush of the caches that its seconds leave out: KV that
        waits in the far tier is in none."""
        flush = self._flush
        if flush is None:
            return run

        def one_by_one(reps: int) -> float:
            seconds = 0.0
            for _ in range(reps):
                flush(1)
                seconds += run(1)
            return seconds

        return one_by_one

    def leg(self, moved: Transfer, way: str, *, layers: range | None = None, shared: bool = False) -> Leg:
        """Return the transfer of ``moved``; ``shared``: between the pools of the first one that was."""
        moves = moved.moves(way, layers)
        return self._gpu(moved, moves, way) if self.case.pair == "hbm:pinned" else self._host(moved, moves, way, shared)

    def _host(self, moved: Transfer, moves: Moves, way: str, shared: bool) -> Leg:
        from kvbench.systems.neo.shipping import Leg
        from kvbench.systems.strata.ends import ends, fastest
        from kvbench.transport.host_job import HostJob
        from kvbench.transport.host_open import open_host

        measure, seed = self.measure, self.measure.context.seed
        held = self._held
        if held is None or not shared:
            held = ends(
                self.case.pair, moved.near, moved.far, "fetch" if way == "fetch" else "evict", measure,
                measure.context.scratch, seed,
            )  # fmt: skip
            self._held = held if shared else self._held
        job = HostJob(moves, *held, self.team, measure.enter, seed)
        chosen = fastest(open_host(self.name, job), partial(measure.best, rounds=1))
        for flag in chosen.flags:
            measure.flag(flag)
        return Leg(chosen.submit, job.total, len(moves), lambda: job.arrived(chosen.submit), chosen.kernel)

    def _gpu(self, moved: Transfer, moves: Moves, way: str) -> Leg:
        from kvbench.systems.neo.shipping import Leg
        from kvbench.transport.paged import open_paged

        gpu = self.gpu
        lane = open_paged(
            self.name, gpu.service, gpu.kernels, moves, way, moved.near, moved.far, gpu.enter, self.measure.context.seed
        )
        for flag in lane.flags:
            self.measure.flag(flag)
        timed = gpu.clock.submission(submitted(lane), lane.mover.operations)
        return Leg(timed, lane.mover.link_bytes, len(moves), checked(lane, timed), lane.mover.kernel)


def submitted(lane: Lane) -> Callable[[Stream], None]:
    """Return what queues one pass of ``lane``."""
    return lane.mover.submit


def checked(lane: Lane, timed: Callable[[int], float]) -> Callable[[], None]:
    """Return a check of the last pass of ``lane``, and of one more into a spoilt target."""

    def verify() -> None:
        lane.check()
        lane.spoil()
        timed(1)
        lane.check()

    return verify


@bench(
    version=1, metric="bandwidth", unit="B/s", better="higher", where=exists, disk=scratch_bytes, limit=180.0,
    extra_metrics=["layer_time"], seconds={"smoke": 1.0, "quick": 3.0, "full": 20.0},
    pair=PAIR, model=MODEL, page_tokens=PAGE,
    copies=axis.choice("coalesced", "scattered", smoke=["scattered"], quick=["scattered"]),
    tokens=axis.integer(smoke=["512"], quick=["512"], full=["512", "4096"], low=16, high=1 << 18), threads=THREADS,
)  # fmt: skip
def swap_out(case: Case, measure: Measure) -> None:
    """The KV of a prefill of `tokens` leaves layer by layer, as each of 8 layers ends; nothing runs beside it.

    Its ceiling moves all layers in one go, as a swap-out at the end of the iteration would. layer_time: seconds of a
    layer, what a layer of the prefill must take to hide it.
    """
    from kvbench.measure import Reference
    from kvbench.systems.neo.shipping import Request, Transfer, in_order

    if case.tokens % case.page_tokens:
        measure.skip(f"{case.tokens} tokens are no whole pages of {case.page_tokens}")
    link, shape = Link(case, measure), Request(case.model).layers(LAYERS)
    moved = Transfer(shape, case.page_tokens, case.tokens // case.page_tokens, case.copies, measure.context.seed)
    whole = link.leg(moved, "evict", shared=True)
    single = in_order([link.leg(moved, "evict", layers=range(n, n + 1), shared=True) for n in range(LAYERS)])
    at_once = Reference("all layers in one go", link.cold(whole.run), whole.nbytes, whole.verify)
    row = measure.pair(
        link.cold(single.run), at_once, link=single.nbytes, unique=single.nbytes, rate_of="unique",
        verify=single.verify, kernel=single.kernel, transport=link.name,
    )  # fmt: skip
    measure.note("fragments", single.fragments)
    if row.value is not None and row.seconds is not None:
        measure.extra(
            "layer_time", row.seconds / LAYERS, unit="s", better="lower", n=row.n, status=row.status,
            reason=row.reason, kernel=single.kernel,
        )  # fmt: skip
