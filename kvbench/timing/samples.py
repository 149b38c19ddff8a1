"""What a sampling run leaves behind: frozen records, and the step that turns raw blocks into them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvbench.timing.reservoir import keep
from kvbench.timing.summary import Interval, Summary, interval, summarise

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvbench.contract.result import Stop
    from kvbench.timing.gate import GateKind

OK, GATED, UNUSABLE, FIRST = 0, 1, 2, 3  # what became of a sample

TAINT_SHARE = 0.10  # more disturbed samples than this: the neighbours were hardly measured on a quiet machine either
TAINT_COUNT = 2  # one disturbed sample of six is over the share already, and says nothing about the other five
FIRST_RATIO = 3.0  # a first sample this far above the median still held lazy loading or compiling (traps.md T23)
DRIFT_FLAG = 0.03  # clock ramp or heating (traps.md T13)
SHORT_SHARE = 0.5  # blocks that came out shorter than this share of the wanted length are flagged


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """One sampled piece of work. Times are seconds; arrays hold float64 seconds per pass in order of taking.

    ``seconds``: accepted samples; ``kept``: at most 1,000 of them; ``aside``: samples set aside (gated, or the first).
    ``taken`` = accepted + aside + ``unusable`` (own window zero). ``marked`` of the taken samples lie where the machine
    changed its state (``marks``: the words seen); they are not set aside for that. ``reps`` passes make one sample.
    ``warm_seconds``, ``warm_calls`` and ``first_call_ratio`` (first warm-up call over the median) describe the warm-up,
    ``first_ratio`` is the first sample over the median. ``sampled_seconds`` were spent inside sampled calls,
    ``wall_seconds`` in warm-up, sampling and all between.
    ``gate`` is the gate that worked, None with ``gate_reason`` when it did not. ``summary`` is None exactly when
    ``stop`` is ``no_samples``. Flags: ``tainted gate_off short_samples unusable_windows first_sample_dropped drifting
    autocorrelated bimodal``, and one per mark.
    """

    seconds: NDArray[np.float64]
    kept: NDArray[np.float64]
    aside: NDArray[np.float64]
    taken: int
    gated: int
    marked: int
    unusable: int
    marks: tuple[str, ...]
    reps: int
    warm_seconds: float
    warm_calls: int
    first_call_ratio: float | None
    first_ratio: float | None
    sampled_seconds: float
    wall_seconds: float
    stop: Stop
    gate: GateKind | None
    gate_reason: str
    summary: Summary | None
    flags: tuple[str, ...]
    reason: str

    @property
    def tainted(self) -> bool:
        return "tainted" in self.flags


@dataclass(frozen=True, slots=True, eq=False)
class Paired:
    """Two pieces of work sampled in turns; unpacks as ``a, b``.

    ``ratios``: seconds per pass of a over b, one per pair of adjacent blocks of which neither was set aside; ``ratio``
    is their median with its 95 % interval, None without a single such pair. Slow drift of the machine cancels in it.
    """

    a: Samples
    b: Samples
    ratios: NDArray[np.float64]
    ratio: Interval | None

    def __iter__(self) -> Iterator[Samples]:
        return iter((self.a, self.b))


@dataclass(frozen=True, slots=True, eq=False)
class Raw:
    """What the sampling loop hands over: seconds per pass, fate and mark of every block, and the counters."""

    seconds: NDArray[np.float64]
    fate: NDArray[np.uint8]
    marked: NDArray[np.bool_]
    marks: tuple[str, ...]
    reps: int
    target_seconds: float
    warm_seconds: float
    warm_calls: int
    first_call_seconds: float
    sampled_seconds: float
    wall_seconds: float
    stop: Stop
    gate: GateKind | None
    gate_reason: str


def finish(raw: Raw, seed: int, floor: int, lag_limit: float) -> Samples:
    """Sort the blocks of ``raw`` into accepted and aside, summarise, and flag."""
    fate = raw.fate.copy()
    flags: list[str] = []
    reasons: list[str] = []
    taken = len(fate)
    gated = int(np.count_nonzero(fate == GATED))
    unusable = int(np.count_nonzero(fate == UNUSABLE))
    marked = int(np.count_nonzero(raw.marked))
    disturbed = int(np.count_nonzero(raw.marked | (fate == GATED)))
    if gated and int(np.count_nonzero(fate == OK)) < min(floor, taken - unusable):
        fate[fate == GATED] = OK
        flags.append("tainted")
        reasons.append(f"{gated} of {taken} samples were disturbed: all are used")
    elif disturbed >= TAINT_COUNT and disturbed > TAINT_SHARE * taken:
        flags.append("tainted")
        reasons.append(f"{disturbed} of {taken} samples were disturbed ({gated} set aside, {marked} marked)")
    if unusable:
        flags += ["unusable_windows", "tainted"]
        reasons.append(f"{unusable} of {taken} timed windows came back as 0 s")
    usable = raw.seconds[fate == OK]
    first_ratio = None
    if taken and fate[0] == OK:
        first_ratio = float(raw.seconds[0] / np.median(usable))
        if first_ratio > FIRST_RATIO and len(usable) > floor:
            fate[0] = FIRST
            usable = raw.seconds[fate == OK]
            flags.append("first_sample_dropped")
            reasons.append(f"the first sample took {first_ratio:.1f} x the median")
    if raw.gate_reason:
        flags.append("gate_off")
        reasons.append(raw.gate_reason)
    flags += raw.marks
    summary = summarise(usable, lag_limit=lag_limit) if len(usable) else None
    if summary is None:
        reasons.append("no sample was taken" if not taken else "no sample could be used")
    else:
        if summary.median * raw.reps < SHORT_SHARE * raw.target_seconds:
            flags.append("short_samples")
            reasons.append(f"samples of {summary.median * raw.reps:.2g} s, wanted {raw.target_seconds:.2g} s")
        if summary.drift is not None and abs(summary.drift) > DRIFT_FLAG:
            flags.append("drifting")
        if summary.ci == "block":
            flags.append("autocorrelated")
        if summary.bimodal:
            flags.append("bimodal")
    return Samples(
        seconds=usable,
        kept=keep(usable, seed),
        aside=raw.seconds[(fate == GATED) | (fate == FIRST)],
        taken=taken,
        gated=gated,
        marked=marked,
        unusable=unusable,
        marks=raw.marks,
        reps=raw.reps,
        warm_seconds=raw.warm_seconds,
        warm_calls=raw.warm_calls,
        first_call_ratio=None if summary is None else raw.first_call_seconds / summary.median,
        first_ratio=first_ratio,
        sampled_seconds=raw.sampled_seconds,
        wall_seconds=raw.wall_seconds,
        stop="no_samples" if summary is None else raw.stop,
        gate=None if raw.gate_reason else raw.gate,
        gate_reason=raw.gate_reason,
        summary=summary,
        flags=tuple(dict.fromkeys(flags)),
        reason="; ".join(reasons),
    )


def pair_ratios(a: Raw, b: Raw) -> tuple[NDArray[np.float64], Interval | None]:
    """Return a / b per adjacent pair (block i of both), and the median ratio with its interval.

    When gating left too few clean pairs all usable ones count; the samples of such a side are tainted anyway.
    """
    n = min(len(a.fate), len(b.fate))
    clean = (a.fate[:n] == OK) & (b.fate[:n] == OK)
    if np.count_nonzero(clean) < 3:
        clean = (a.fate[:n] != UNUSABLE) & (b.fate[:n] != UNUSABLE)
    ratios = a.seconds[:n][clean] / b.seconds[:n][clean]
    if not len(ratios):
        return ratios, None
    found = interval(ratios)
    low, high = (None, None) if found is None else found[:2]
    return ratios, Interval(float(np.median(ratios)), low, high)
