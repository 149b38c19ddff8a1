"""``measure``: what a bench calls. Times, verifies, judges, and turns it all into rows; a bench owns no clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from kvbench.context import Context
from kvbench.contract.bench import Bench
from kvbench.contract.case import Case
from kvbench.contract.result import Basis, Better, Bytes, Ceiling, Result, Scalar, Status
from kvbench.errors import KvbenchError
from kvbench.timing.judge import judge
from kvbench.timing.sampler import Run, sample, sample_turns

if TYPE_CHECKING:
    from kvbench.kernels.team import Team
    from kvbench.memory.host import HostBuffer
    from kvbench.memory.payload import Kind
    from kvbench.memory.region import Pages
    from kvbench.timing.gate import GateKind
    from kvbench.timing.samples import Samples

RateOf = Literal["unique", "link", "demand", "near"]
Verify = Callable[[], None]
# What threads that outnumber the CPUs do to each other; see Measure.crowded.
SELF_INFLICTED = frozenset({"cpu_pressure", "preempted"})
# Three 64-byte loads, or two 512-bit FMAs of 32 float16 lanes, a cycle at 6 GHz: more than any core sold.
CORE_BYTES = 3 * 64 * 6e9
CORE_FLOPS = 2 * 2 * 32 * 6e9
SMALL_WINDOW = 0.1  # a bench whose own window is less than this share of its calls says so
CACHE_MULTIPLE = 4  # a working set below this many LLCs is partly served by it (traps.md T12)


class SkipCase(Exception):
    """Raised by :meth:`Measure.skip`; the case becomes one ``skipped`` row with the reason."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A measured ceiling, interleaved with the case: ``run`` like the case's, ``amount`` bytes or operations a pass."""

    name: str
    run: Run
    amount: float
    verify: Verify | None = None


class Measure:
    """Handed to each bench with its case. Call it once for the primary metric; ``extra`` adds rows after it."""

    def __init__(self, bench: Bench, case: Case, context: Context) -> None:
        self._bench, self._case, self._context = bench, case, context
        self._rows: list[Result] = []
        self._stack = contextlib.ExitStack()
        self._tids: list[int] = []
        self._flags: dict[str, None] = {}
        self._detail: dict[str, Scalar] = {}
        self._crowded = False
        self._on_cores = True
        self._device_marker: Callable[[], Sequence[str]] | None = None

    # -- what a bench asks for -----------------------------------------------------------------------------------

    @property
    def context(self) -> Context:
        """The worker's facts: profile, scratch directory, topology, seed."""
        return self._context

    def team(self, threads: int | Literal["all"]) -> Team:
        """Return ``threads`` threads pinned one by one, ended with the case; skips it when CPUs lack."""
        return self.team_on(self._context.topology.measuring_cpus(threads))

    def team_on(self, cpus: Sequence[int]) -> Team:
        """Return one thread pinned to each of ``cpus``, ended with the case."""
        from kvbench.kernels.team import Team

        team = self._stack.enter_context(Team(cpus))
        self._tids = list(team.tids)
        if not team.pinned:
            self.flag("unpinned")
            self.note("pin_reason", team.pin_reason)
        return team

    def sources(
        self, count: int, nbytes: int, pages: Pages, *, kind: Kind = "bits", node: int | None = None
    ) -> list[HostBuffer]:
        """Return ``count`` host buffers of ``nbytes`` random payload, placed and read back. Only to be read."""
        seed = self._context.seed
        return [self._placed(f"source{i}", nbytes, pages, node, kind, seed + i) for i in range(count)]

    def target(self, nbytes: int, pages: Pages, *, node: int | None = None) -> HostBuffer:
        """Return a host buffer of ``nbytes`` to write to: touched, placed and read back, its content is nobody's."""
        return self._placed("target", nbytes, pages, node, None, self._context.seed)

    def _placed(
        self, role: str, nbytes: int, pages: Pages, node: int | None, kind: Kind | None, seed: int
    ) -> HostBuffer:
        buffer = self._context.arena.get(role, nbytes, pages, node, kind, seed)
        place = buffer.placement
        for flag in place.flags:
            self.flag(flag)
        self.note("page_bytes", place.page_bytes)
        self.note("huge_share", None if place.huge_share is None else round(place.huge_share, 4))
        if place.nodes is not None:
            self.note("nodes", "+".join(str(number) for number, held in sorted(place.nodes.items()) if held))
        return buffer

    def working_set(self, nbytes: int) -> bool:
        """Record how many last-level caches ``nbytes`` fill; flag ``in_llc`` and return True if part stays in them."""
        llc = self._context.topology.llc()
        for flag in llc.flags:
            self.flag(flag)
        self.note("working_set", nbytes)
        self.note("llc_bytes", llc.bytes)
        cached = nbytes < CACHE_MULTIPLE * llc.bytes
        if cached:
            self.flag("in_llc")
        return cached

    def dram_ceilings(self, nbytes: int) -> tuple[Ceiling, ...]:
        """Return the physical ceiling of host memory for a working set of ``nbytes``; none where caches answer.

        The value is None, with the reason as source, where the firmware does not tell (in most guests).
        """
        if nbytes < CACHE_MULTIPLE * self._context.llc:
            return ()
        found = self._context.dram
        return (Ceiling("dram", found.value, "physical", found.source if found.value is not None else found.reason),)

    def enter(self, resource: contextlib.AbstractContextManager[Any]) -> Any:
        """Open ``resource`` until the case ends."""
        return self._stack.enter_context(resource)

    def threads(self, tids: Sequence[int]) -> None:
        """Name the native ids of the threads that measure, when they are not a :meth:`team`'s."""
        self._tids = list(tids)

    def on_device(self, marker: Callable[[], Sequence[str]] | None = None) -> None:
        """Say that a device does the work: what cores can do is no bound then, and run-queue delay gates nothing.

        ``marker`` names what happened to the device since it was last asked (throttled, pcie_downshift, ...).
        """
        self._on_cores = False
        self._device_marker = marker

    def crowded(self) -> None:
        """Say that this case has more threads than CPUs on purpose: they delay each other, so delay gates nothing."""
        self._crowded = True
        self.flag("crowded")

    def flag(self, word: str) -> None:
        """Add ``word`` to the flags of every row of this case."""
        self._flags[word] = None

    def note(self, name: str, value: Scalar) -> None:
        """Keep a scalar under ``detail`` of the primary row; raises KvbenchError for NaN and infinity."""
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise KvbenchError(f"detail {name!r} is not a number", got=value, expected="a finite number or None")
        self._detail[name] = value

    def suspect(self, reason: str) -> None:
        """Make the primary row, which must be there, `suspect`: far from what it should be, and ``reason`` says how.

        A tainted or invalid row stays what it is; the reason is added to its own.
        """
        for at, row in enumerate(self._rows):
            if row.metric == self._bench.metric:
                status: Status = "suspect" if row.status == "ok" else row.status
                self._rows[at] = row.with_(status=status, reason="; ".join(filter(None, (reason, row.reason))))
                return
        raise KvbenchError("nothing measured can be suspect", where=f"{self._bench.suite}/{self._bench.name}")

    def skip(self, reason: str) -> NoReturn:
        """End the case as ``skipped``; ``reason`` is for the user."""
        raise SkipCase(reason.strip() or "the bench gave no reason")

    # -- measuring -----------------------------------------------------------------------------------------------

    def __call__(
        self, run: Run, *, link: int | Callable[[], int | None] | None = None, unique: int | None = None,
        demand: int | None = None, near: int | None = None, rate_of: RateOf | None = None, ops: float = 1.0,
        verify: Verify | None = None, kernel: str | None = None, transport: str | None = None,
        ceilings: Sequence[Ceiling] = (), gate: GateKind | None = "delay", basis: Basis = "measured",
    ) -> Result:  # fmt: skip
        """Time ``run(reps)`` and add the primary row.

        ``link`` and the other byte counts are those of one pass; ``link`` may be a function, asked after the
        timing, where the bytes are counted and not known. A B/s metric counts ``rate_of`` (default: link bytes).
        ``ops`` are the operations of one pass: a seconds metric is per operation, a FLOP/s metric counts them.
        ``verify`` runs after the timed region and raises VerifyError; then the case keeps no number (design 6.7).
        ``basis`` is ``emulated`` where part of the machine was paced to another one's rates.
        """
        taken = sample(
            run, self._context.budget, tids=self._tids, gate=self._gate(gate),
            marker=self._marker(), seed=self._context.seed,
        )  # fmt: skip
        if verify is not None:
            verify()
        crossed = link() if callable(link) else link
        self._once()
        moved = Bytes(unique=unique, link=crossed, demand=demand, near=near)
        row, _ = self._row(taken, moved, rate_of, ops, kernel, transport, tuple(ceilings), retaken=True)
        row = row.with_(basis=basis)
        self._rows.insert(0, row)
        return row

    def pair(
        self, run: Run, reference: Reference | Sequence[Reference], *, link: int | None = None,
        unique: int | None = None, demand: int | None = None, near: int | None = None, rate_of: RateOf | None = None,
        ops: float = 1.0, verify: Verify | None = None, kernel: str | None = None, transport: str | None = None,
        ceilings: Sequence[Ceiling] = (), gate: GateKind | None = "delay",
    ) -> Result:  # fmt: skip
        """Time ``run`` and its measured ceilings in turns; they head the row's list in the order given, so the fraction
        is against the first. Otherwise like a call.

        A row that comes out above one of them is retaken once, then flagged ``above_ceiling`` (design 6.8).
        """
        references = (reference,) if isinstance(reference, Reference) else tuple(reference)
        if not references:
            raise KvbenchError("pair() without a reference", where=self._case.text(), mend="call measure() instead")
        moved = Bytes(unique=unique, link=link, demand=demand, near=near)
        self._once()
        for attempt in (1, 2):
            taken, *others = sample_turns(
                [run, *(each.run for each in references)], self._context.budget, tids=self._tids,
                gate=self._gate(gate), marker=self._marker(), seed=self._context.seed,
            )  # fmt: skip
            for again, check in ((run, verify), *((each.run, each.verify) for each in references)):
                if check is not None:
                    again(1)  # another side ran last over the same threads and maybe the same memory
                    check()
            tops = [
                Ceiling(each.name, self._median(each.amount, found), "measured", "interleaved with the case")
                for each, found in zip(references, others, strict=True)
            ]
            row, retake = self._row(
                taken, moved, rate_of, ops, kernel, transport, (*tops, *ceilings), retaken=attempt == 2
            )
            if not retake:
                break
            self.note("retaken", 1)
        self._rows.insert(0, row)
        return row

    def _median(self, amount: float, taken: Samples) -> float | None:
        return None if taken.summary is None else self._value(amount, taken.summary.median)

    def best(self, candidates: Mapping[str, Run], *, passes: int = 1, rounds: int = 3) -> str:
        """Return the name of the fastest of ``candidates`` by ``rounds`` interleaved calls after one warm-up each."""
        from kvbench.timing.clock import now_ns

        best: dict[str, float] = {}
        for attempt in range(rounds + 1):
            for name, run in candidates.items():
                before = now_ns()
                own = run(passes)
                seconds = (now_ns() - before) * 1e-9 if own is None else own
                if attempt:
                    best[name] = min(seconds, best.get(name, seconds))
        return min(best, key=best.__getitem__)

    def extra(
        self, metric: str, value: float | None, *, unit: str, better: Better, low: float | None = None,
        high: float | None = None, n: int = 0, basis: Basis = "measured", status: Status | None = None,
        reason: str = "", kernel: str | None = None, moved: Bytes | None = None, rate_of: RateOf | None = None,
        seconds: float | None = None, detail: Mapping[str, Scalar] | None = None, ceilings: Sequence[Ceiling] = (),
    ) -> Result:  # fmt: skip
        """Add a row for a further metric of this case; call it after the primary. ``metric`` must be declared.

        A value beyond a physical one of its ``ceilings`` is ``invalid``, as in a primary row; the fraction is against
        the first.
        """
        if metric not in self._bench.extra_metrics:
            raise KvbenchError(
                "undeclared metric", where=f"{self._bench.suite}/{self._bench.name}", got=metric,
                expected="one of extra_metrics=... in its @bench",
            )  # fmt: skip
        fraction = None
        if value is not None and value > 0.0 and ceilings:
            found = judge(value, better, ceilings, reason=reason, retaken=True)
            fraction, reason = found.fraction, found.reason
            status = "invalid" if found.status == "invalid" else status
        row = self.empty(status or ("ok" if value is not None else "failed"), reason).with_(
            metric=metric, unit=unit, better=better, value=value, low=low, high=high, n=n, basis=basis, kernel=kernel,
            bytes=moved or Bytes(), rate_of=rate_of, seconds=seconds, detail=dict(detail or {}),
            ceilings=tuple(ceilings), fraction=fraction,
        )  # fmt: skip
        self._rows.append(row)
        return row

    def model(self, value: float, *, source: str, detail: Mapping[str, Scalar] | None = None) -> Result:
        """Add the primary row as ``modelled``: a number computed, not measured. ``source`` names the formula."""
        return self._computed(value, "modelled", source, detail)

    def simulated(self, value: float, *, source: str, detail: Mapping[str, Scalar] | None = None) -> Result:
        """Add the primary row as ``simulated``: what a replay of events gave. ``source`` names the simulation."""
        return self._computed(value, "simulated", source, detail)

    def counted(
        self, value: float, *, n: int, source: str, kernel: str | None = None, seconds: float | None = None,
        ceilings: Sequence[Ceiling] = (), detail: Mapping[str, Scalar] | None = None,
    ) -> Result:  # fmt: skip
        """Add the primary row as measured without timing: bytes, calls or shares counted ``n`` times on real work.

        ``source`` says by what (an allocator's ledger, a kernel counter). Raises KvbenchError for ``n`` below 1.
        """
        if n < 1:
            raise KvbenchError("nothing was counted", where=self._case.text(), got=n, expected="at least one count")
        self._once()
        self.note("counted_by", source)
        self._detail.update(detail or {})
        row = self.empty("ok", "").with_(value=value, n=n, kernel=kernel, seconds=seconds, basis="measured")
        if ceilings and value > 0.0:
            found = judge(value, self._bench.better, ceilings, retaken=True)
            row = row.with_(
                status=found.status, reason=found.reason, flags=(*row.flags, *found.flags), fraction=found.fraction,
                ceilings=tuple(ceilings),
            )  # fmt: skip
        self._rows.insert(0, row)
        return row

    def _computed(self, value: float, basis: Basis, source: str, detail: Mapping[str, Scalar] | None) -> Result:
        self._once()
        self._detail.update(detail or {})
        row = self.empty("ok", "").with_(value=value, basis=basis, kernel=source)
        self._rows.insert(0, row)
        return row

    def _gate(self, asked: GateKind | None) -> GateKind | None:
        return asked if self._on_cores and not self._crowded else None

    def _marker(self) -> Callable[[], Sequence[str]]:
        """Return a function naming what happened since it was last asked: steal, throttling, a compilation (T24)."""
        from kvbench.kernels.compile_count import compile_count
        from kvbench.machine import state

        # a device times its own work: which threads of the host waited meanwhile says nothing about it
        ignore = SELF_INFLICTED if self._crowded or not self._on_cores else frozenset()
        device = self._device_marker
        last = [state.snapshot()]
        compiled = [compile_count()]

        def marks() -> Sequence[str]:
            now, count = state.snapshot(), compile_count()
            words = [word for word in state.delta(last[0], now).marks if word not in ignore]
            if count != compiled[0]:
                words.append("compiled")
            last[0], compiled[0] = now, count
            return [*words, *(device() if device is not None else ())]

        return marks

    def _once(self) -> None:
        if any(row.metric == self._bench.metric for row in self._rows):
            raise KvbenchError(
                "the primary metric was measured twice", where=f"{self._bench.suite}/{self._bench.name}",
                mend="one measure() or pair() a case; further numbers are measure.extra rows",
            )  # fmt: skip

    # -- rows ----------------------------------------------------------------------------------------------------

    def rows(self) -> list[Result]:
        """Return the rows of the case, primary first; empty when the bench measured nothing."""
        if not any(row.metric == self._bench.metric for row in self._rows):
            return []
        ordered = sorted(self._rows, key=lambda row: row.metric != self._bench.metric)
        flags = tuple(self._flags)
        done = [row.with_(flags=tuple(dict.fromkeys((*row.flags, *flags)))) for row in ordered]
        return [done[0].with_(detail={**self._detail, **done[0].detail}), *done[1:]]

    def close(self, failed: bool) -> None:
        """End threads and give buffers back."""
        self._stack.close()
        self._context.arena.end_case(failed)

    def empty(self, status: Status, reason: str) -> Result:
        """Return the primary row without a value."""
        case, bench = self._case, self._bench
        return Result(
            suite=case.suite, bench=case.bench, bench_version=case.version, axes=dict(case.axes),
            resolved=dict(case.resolved), metric=bench.metric, unit=bench.unit, better=bench.better,
            digest=case.digest, status=status, reason=reason, flags=tuple(self._flags), detail=dict(self._detail),
            basis=bench.basis_of(case.axes),
        )  # fmt: skip

    def _row(
        self, taken: Samples, moved: Bytes, rate_of: RateOf | None, ops: float, kernel: str | None,
        transport: str | None, ceilings: tuple[Ceiling, ...], *, retaken: bool,
    ) -> tuple[Result, bool]:  # fmt: skip
        """Return the row of ``taken`` and whether the pair should be retaken."""
        self._detail.update(
            warm_seconds=round(taken.warm_seconds, 6), warm_calls=taken.warm_calls, reps=taken.reps, gated=taken.gated,
            marked=taken.marked, sampled_seconds=round(taken.sampled_seconds, 6), kernels=self._context.kernels[:16],
            first_ratio=_rounded(taken.first_ratio), first_call_ratio=_rounded(taken.first_call_ratio),
        )  # fmt: skip
        inside = float(taken.seconds.sum() + taken.aside.sum()) * taken.reps
        if taken.sampled_seconds:
            share = inside / taken.sampled_seconds
            self.note("window_share", round(share, 4))
            if share < SMALL_WINDOW:
                self.flag("small_window")
        if taken.gate_reason:
            self.note("gate_reason", taken.gate_reason)
        summary = taken.summary
        if summary is None:
            return self.empty("failed", taken.reason or "no samples").with_(stop="no_samples", basis="measured"), False
        if self._bench.unit == "B/s" and rate_of is None:
            rate_of = "link"
        amount = ops
        if rate_of is not None:
            counted = getattr(moved, rate_of)
            if counted is None:
                raise KvbenchError(f"a rate of {rate_of} bytes needs them", where=self._case.text())
            amount = float(counted)
        value = self._value(amount, summary.median)
        ends = [None if end is None else self._value(amount, end) for end in (summary.low, summary.high)]
        low, high = (ends[1], ends[0]) if self._is_rate else (ends[0], ends[1])
        found = judge(
            value, self._bench.better, (*ceilings, *self._sanity()), flags=taken.flags,
            reason=taken.reason if taken.tainted else "", retaken=retaken, causes=taken.marks,
        )  # fmt: skip
        row = self.empty(found.status, found.reason).with_(
            value=value, low=low, high=high, n=summary.n, kept=len(taken.kept), stop=taken.stop, kernel=kernel,
            transport=transport, ceilings=ceilings, fraction=found.fraction if ceilings else None, bytes=moved,
            rate_of=rate_of,
            seconds=summary.median / (1.0 if self._is_rate else ops),
            flags=found.flags, samples=tuple(float(s) for s in taken.kept), basis="measured",
        )  # fmt: skip
        return row, found.retake

    def _sanity(self) -> tuple[Ceiling, ...]:
        """Return what no cores of this machine can do, for metrics where there is such a law; never shown in a row.

        The guest of a VM knows no memory channels, so without it a window that lost most of its work would pass.
        """
        if self._bench.unit not in ("B/s", "FLOP/s") or not self._on_cores:
            return ()
        most = CORE_BYTES if self._bench.unit == "B/s" else CORE_FLOPS
        cpus = max(1, len(self._context.topology.cpus))
        return (Ceiling(f"{cpus} cores", most * cpus, "physical", "load ports and vector units at 6 GHz"),)

    @property
    def _is_rate(self) -> bool:
        return self._bench.unit.endswith("/s")

    def _value(self, amount: float, seconds: float) -> float:
        """Return amount per second for rates, seconds per operation otherwise."""
        return amount / seconds if self._is_rate else seconds / amount


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
