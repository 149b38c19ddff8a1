"""T1, T2, T12: what a number counts, in which unit, and out of which memory it came."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvbench.contract.bench import Body
from kvbench.contract.case import Case
from kvbench.timing.budget import BUDGETS
from kvbench.timing.sampler import sample_pair
from kvbench.timing.traps.bed import Bed, PathBroken, brief
from kvbench.timing.traps.record import Finding, Number, check, unknown
from kvbench.units import MiB, format_bytes, format_value, parse_bytes

if TYPE_CHECKING:
    from kvbench.measure import Measure

# Written out here on purpose: a wrong constant in units.py must not agree with itself.
_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SIZES = {"1kB": 1_000, "1KiB": 1_024, "1GB": 1_000_000_000, "1GiB": 1_073_741_824}
UNIT_SLACK = 0.01  # three digits are shown; GB against GiB is 7.4 %

STREAM_COUNT = {"read": 1, "write": 1, "copy_plain": 2, "memcpy": 2, "nt_copy": 2, "triad": 3}

CACHE_MULTIPLE = 4  # design 6 and traps.md T12
CACHE_SPEEDUP = 1.3
LOOKS = 2  # one may meet a neighbour; a cache is there in every one


def decimal_units(nbytes: int = 4 * MiB) -> Finding:
    """T1: the text of a real row's bandwidth, read back, against its bytes over its seconds."""
    threshold = f"within {UNIT_SLACK:.0%}; GB for GiB is 7.4 % off"
    row = Bed().case("ladder", "host_bandwidth", op="read", pages="4k", bytes=nbytes, threads=1)
    if row.value is None or row.seconds is None:
        raise PathBroken("a row without a value", where="host_bandwidth")
    by_hand = nbytes / row.seconds
    text = format_value(row.value, row.unit)
    match = re.fullmatch(r"([0-9.]+) ([kMGT]?)B/s", text)
    shown = float(match[1]) * _DECIMAL[match[2]] if match else 0.0
    found = Number(f"a pass by the rate shown ({text})", nbytes / shown if shown else 0.0, "s")
    expected = Number("a pass as it was measured", row.seconds, "s")
    wrong = [name for name, size in _SIZES.items() if parse_bytes(name) != size]
    note = f"{nbytes} bytes in {row.seconds * 1e9:.0f} ns: {by_hand / 1e9:.2f} GB/s, {by_hand / 2**30:.2f} GiB/s"
    if wrong:
        size = Number(f"{wrong[0]} is read as", float(parse_bytes(wrong[0])), "bytes")
        return check(False, size, Number(wrong[0], float(_SIZES[wrong[0]]), "bytes"), "equal", "a unit is wrong", note)
    good = abs(shown / by_hand - 1.0) <= UNIT_SLACK
    return check(good, found, expected, threshold, f"what is shown is {shown / by_hand:.3f} x what was measured", note)


def bytes_per_pass(nbytes: int = MiB) -> Finding:
    """T2: value x seconds of a row of every stream operation over the bytes of one array."""
    bed = Bed()
    counted = {}
    for op in STREAM_COUNT:
        row = bed.case("ladder", "host_bandwidth", op=op, pages="4k", bytes=nbytes, threads=1)
        counted[op] = (row.value or 0.0) * (row.seconds or 0.0)
    wrong = [op for op, times in STREAM_COUNT.items() if abs(counted[op] - times * nbytes) > 1e-6 * nbytes]
    op = wrong[0] if wrong else "memcpy"
    found = Number(f"bytes {op} counts a pass", round(counted[op], 3), "B")
    listed = ", ".join(f"{name} {counted[name] / nbytes:.3g}" for name in STREAM_COUNT)
    return check(
        not wrong, found, Number("bytes of one array", nbytes, "B"), f"exactly {STREAM_COUNT[op]} x (STREAM counting)",
        f"{op} counts {counted[op] / nbytes:.3g} arrays a pass, not {STREAM_COUNT[op]}",
        f"arrays counted a pass: {listed}; gather counts the payload once",
    )  # fmt: skip


def last_level_cache(largest: int | None = None) -> Finding:
    """T12: rate at four last-level caches against eight, and the flag below four.

    ``largest``: bytes the timed part may take at most, default half of the memory available.
    """
    from kvbench.kernels.stream import Stream
    from kvbench.memory.limits import available_memory

    threshold = f"at most {CACHE_SPEEDUP}; in_llc below {CACHE_MULTIPLE} x LLC and not from there on"
    bed = Bed()
    llc = bed.context.topology.llc()
    near, far = CACHE_MULTIPLE * llc.bytes, 2 * CACHE_MULTIPLE * llc.bytes
    flagged = [("in_llc" in bed.measured(_labelled(nbytes)).flags) for nbytes in (near - 1, near)]
    notes = [f"LLC {format_bytes(llc.bytes)} in {llc.instances} instance(s)" + (" (assumed)" if llc.unknown else "")]
    if flagged != [True, False]:
        said = ("in_llc" if f else "no flag" for f in flagged)
        return check(
            False, Number("working set", near - 1 if not flagged[0] else near, "B"),
            Number(f"{CACHE_MULTIPLE} x LLC", near, "B"), threshold,
            "one byte below and at {} x LLC the rows say: {}, {}".format(CACHE_MULTIPLE, *said), *notes,
        )  # fmt: skip
    room = available_memory().value
    limit = largest if largest is not None else (room.nbytes // 2 if room is not None else 0)
    if far > limit:
        return unknown(f"{format_bytes(far)} do not fit into half of the memory available: not timed", threshold)
    with bed.team("all") as team, bed.buffer(far, "4k", kind=None) as buffer:
        small, large = (Stream("read", [buffer.address], nbytes, team) for nbytes in (near, far))

        def twice(reps: int) -> float:
            return small.run(2 * reps)  # as many bytes as the other side, so a neighbour meets both alike

        limits = brief(BUDGETS["smoke"], samples=5, block_seconds=1e-3, cap_seconds=0.5)
        for _ in range(LOOKS):
            pair = sample_pair(twice, large.run, limits, tids=team.tids)
            a, b = pair.a.summary, pair.b.summary
            if pair.ratio is None or a is None or b is None:
                raise PathBroken("no pair of samples", where="sample_pair")
            speedup = 1.0 / pair.ratio.value
            notes.append(f"{format_value(far / a.median, 'B/s')} against {format_value(far / b.median, 'B/s')} a look")
            if speedup <= CACHE_SPEEDUP:
                break
    found = Number(f"rate at {format_bytes(near)} / rate at {format_bytes(far)}, in turns", speedup, "1")
    expected = Number("both from memory", 1.0, "1")
    if speedup > CACHE_SPEEDUP and (pair.a.tainted or pair.b.tainted):
        reason = "the two rates differ, but other work disturbed them: stop it and look again"
        return unknown(reason, threshold, found, expected).note(*notes)
    return check(
        speedup <= CACHE_SPEEDUP, found, expected, threshold,
        f"{speedup:.2f} x faster in every look: the last-level cache is larger than {format_bytes(llc.bytes)}", *notes,
    )  # fmt: skip


def _labelled(nbytes: int) -> Body:
    """Return a bench body that claims a working set of ``nbytes`` and measures the least there is."""

    def working_set_flag(case: Case, measure: Measure) -> None:
        from kvbench.kernels.fixed import IntegerChain

        measure.working_set(nbytes)
        work = IntegerChain(measure.team(1))
        measure(work.run, link=1, verify=work.verify, gate=None)

    return working_set_flag
