"""What no row and no run may say of itself: a number that contradicts its own record is no number.

Every way into a store goes through here: the worker, the database, bundles written and bundles read.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

from kvbench.contract.result import HAS_VALUE, Bytes, Ceiling, Result, RunStatus

COUNTED = tuple(field.name for field in fields(Bytes))
POSITIVE_UNITS = frozenset({"s", "B/s", "FLOP/s"})
SIGNED_UNIT = "1"  # differences, gains and logarithms; nothing else that is measured is less than nothing
LAW = 1.02  # as kvbench.timing.judge has it: beyond that times a physical ceiling no number is true (design 6.8)
CLOCKS, CLOCKS_S = 1.02, 3e-6  # kvbench.timing.sampler takes a window this much longer than its call, plus rounding
SHY = 1 - 1e-9  # two roundings of one number
# A formula may find that nothing has to be waited for; a clock never read 0 s or 0 B/s for work that was done.
_TIMED = frozenset({"measured", "emulated"})


def check_consistent(row: Result) -> None:
    """Check that the fields of ``row``, whose types are right, agree with each other and with ``kvbench.results/1``.

    Raises ValueError naming the field.
    """
    for name in ("suite", "bench", "metric", "unit"):
        if not getattr(row, name).strip():
            raise ValueError(f"result.{name} is empty")
    if row.bench_version < 1:
        raise ValueError(f"result.bench_version is {row.bench_version}, expected 1 or more")
    for axis, setting in row.axes.items():
        if isinstance(setting, bool) or not isinstance(setting, str | int):
            raise ValueError(f"result.axes.{axis} is {setting!r}, expected a word or a whole number")
    _check_value(row)
    _check_counts(row)
    if row.rate_of is not None and row.rate_of not in COUNTED:
        raise ValueError(f"result.rate_of is {row.rate_of!r}, expected one of {', '.join(COUNTED)}")
    for name in COUNTED:
        count = getattr(row.bytes, name)
        if count is not None and count < 0:
            raise ValueError(f"result.bytes.{name} is {count}, expected a count")
    _check_ceilings(row)
    if row.value is not None and row.value > 0 and row.basis in _TIMED:
        _check_seconds(row)
    if "tainted" in row.flags and row.status in ("ok", "suspect"):
        raise ValueError(f"result.status is {row.status} in a row with the flag tainted")


def _check_seconds(row: Result) -> None:
    """Check value, seconds, bytes and samples of ``row`` against each other, as far as it has them.

    ``seconds`` is the median of one pass for a rate, of one operation for anything else; samples are of one pass.
    ``stop`` marks the rows that the sampler made: of any other row nobody knows whose median ``seconds`` is.
    """
    if row.basis == "measured" and row.unit == "B/s" and row.rate_of is not None and row.seconds is not None:
        counted = getattr(row.bytes, row.rate_of)
        if counted is not None and not _same(row.value, counted / row.seconds):
            raise ValueError(
                f"result.value is {row.value} B/s, but {counted} {row.rate_of} bytes in {row.seconds} s are "
                f"{counted / row.seconds:.6g} B/s"
            )
    if row.stop is None:
        return
    if row.unit == "s" and row.seconds is not None and not _same(row.value, row.seconds):
        raise ValueError(f"result.value is {row.value} s, but result.seconds is {row.seconds}")
    if row.samples:
        _check_samples(row)


def _check_samples(row: Result) -> None:
    low, middle, high = min(row.samples), statistics.median(row.samples), max(row.samples)
    if low <= 0:
        raise ValueError(f"result.samples holds {low} s in a row that is {row.basis}, expected more than 0")
    whole = row.kept == row.n
    if row.seconds is not None:
        # of a reservoir of 1,000 the median of all is outside with a chance of 2^-999
        passes_agree = _same(row.seconds, middle) if whole else low * SHY <= row.seconds <= high / SHY
        # how many operations make a pass is not in the row, but one at least does
        if not (passes_agree if row.unit.endswith("/s") else row.seconds * SHY <= high):
            raise ValueError(
                f"result.seconds is {row.seconds}, but the samples are {low:.6g} to {high:.6g} s, median {middle:.6g} s"
            )
    if whole:
        _check_interval(row, low / middle, high / middle)
    reps, spent = row.detail.get("reps"), row.detail.get("sampled_seconds")
    if isinstance(reps, int) and isinstance(spent, int | float):
        taken = sum(row.samples) * reps
        # own windows may be longer than the call around them by as much as the sampler lets two clocks differ
        if taken > CLOCKS * spent + CLOCKS_S * (row.kept + 1):
            raise ValueError(f"result.samples take {taken:.6g} s, but sampling took {spent} s (detail.sampled_seconds)")


def _check_interval(row: Result, least: float, most: float) -> None:
    """Check that the interval of ``row`` is inside its samples, all of which are there: it is made of some of them.

    ``least`` and ``most`` are the shortest and the longest sample over the median.
    """
    assert row.value is not None
    low, high = (None if end is None or end <= 0 else end for end in (row.low, row.high))
    if row.unit.endswith("/s"):
        short, long = (None if end is None else row.value / end for end in (high, low))
    else:
        short, long = (None if end is None else end / row.value for end in (low, high))
    if (short is not None and short < least * SHY) or (long is not None and long > most / SHY):
        raise ValueError(
            f"result.low and result.high are {row.low} and {row.high}, wider than the samples ({least:.6g} to "
            f"{most:.6g} of their median)"
        )


def _same(one: float | None, other: float) -> bool:
    return one is not None and math.isclose(one, other, rel_tol=1e-9)


def _check_ceilings(row: Result) -> None:
    shares: list[float | None] = []
    for number, ceiling in enumerate(row.ceilings):
        if ceiling.value is not None and ceiling.value <= 0:
            raise ValueError(f"result.ceilings[{number}].value is {ceiling.value}, expected more than 0")
        shares.append(_share(row, ceiling))
        share = shares[-1]
        if share is None or ceiling.kind != "physical" or row.basis != "measured" or row.status == "invalid":
            continue
        if share > LAW:
            raise ValueError(
                f"result.value is {share:.4g} x the physical ceiling {ceiling.name} in a row that is {row.status}, "
                f"expected invalid beyond {LAW}"
            )
    if row.fraction is None:
        return
    if not shares or shares[0] is None:
        raise ValueError(f"result.fraction is {row.fraction} of a value or a first ceiling that is null")
    if not math.isclose(row.fraction, shares[0], rel_tol=1e-9):
        raise ValueError(f"result.fraction is {row.fraction}, but the value is {shares[0]:.6g} of the first ceiling")


def _share(row: Result, ceiling: Ceiling) -> float | None:
    """Return how much of ``ceiling`` the row reaches (of a floor, where less is better), None where one is null."""
    if row.value is None or ceiling.value is None:
        return None
    if row.better == "lower":
        return ceiling.value / row.value if row.value else math.inf
    return row.value / ceiling.value


def _check_value(row: Result) -> None:
    value, low, high = row.value, row.low, row.high
    if value is None:
        if row.status in HAS_VALUE:
            raise ValueError(f"result.value is null in a row that is {row.status}")
        if low is not None or high is not None:
            raise ValueError("result.low and result.high bound a value that is null")
        if not row.reason:
            raise ValueError(f"result.reason is empty in a row that is {row.status}")
    elif row.unit in POSITIVE_UNITS and (value < 0 or (value == 0 and row.basis in _TIMED)):
        raise ValueError(f"result.value is {value} {row.unit}, expected more than 0")
    elif row.unit != SIGNED_UNIT and min(value, value if low is None else low) < 0:
        raise ValueError(f"result.value is {value} {row.unit} from {low} on, expected 0 or more")
    elif not (-math.inf if low is None else low) <= value <= (math.inf if high is None else high):
        ends = ["unknown" if end is None else end for end in (low, high)]
        raise ValueError(f"result.value is {value}, outside its interval {ends[0]} to {ends[1]}")
    if row.seconds is not None and row.seconds <= 0:
        raise ValueError(f"result.seconds is {row.seconds}, expected more than 0")


def _check_counts(row: Result) -> None:
    if row.n < 0 or row.kept < 0:
        raise ValueError(f"result.n is {row.n} and result.kept {row.kept}, expected counts")
    if row.value is not None and row.stop == "no_samples":
        raise ValueError(f"result.value is {row.value} in a row that stopped for no_samples")
    if row.value is not None and row.basis == "measured" and row.stop is not None and row.n == 0:
        raise ValueError(f"result.n is 0 in a measured row with the value {row.value}")
    if row.kept > row.n:
        raise ValueError(f"result.kept is {row.kept}, more than the {row.n} samples taken")
    if row.samples:  # none may be left: they can be pruned
        if len(row.samples) != row.kept:
            raise ValueError(f"result.samples holds {len(row.samples)}, result.kept is {row.kept}")
        if min(row.samples) < 0:
            raise ValueError(f"result.samples holds {min(row.samples)} s, expected 0 or more")


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run of a file stands: the cases planned and there (canaries apart), and the status that follows."""

    planned: int
    done: int
    status: RunStatus

    def cases(self) -> str:
        return f"{self.done} of {self.planned} planned cases" if self.planned else f"no plan, {self.done} cases"


def standing(declared: RunStatus, planned: Collection[str], rows: Iterable[tuple[str, str]]) -> Standing:
    """Return how a run stands that says it is ``declared``.

    ``planned`` are the digests of its plan, ``rows`` (digest, status) of its rows without canaries. ``running`` and
    ``interrupted`` are what only its own process could know and stay; any other status follows from the rows: a case
    of the plan missing: interrupted; no row with a value: failed; a failed or invalid row: partial; else ok.
    """
    found = list(rows)
    there = {digest for digest, _ in found}
    statuses = {status for _, status in found}
    wanted = set(planned)
    status = declared
    if declared not in ("running", "interrupted"):
        if wanted - there:
            status = "interrupted"
        elif not statuses & HAS_VALUE:
            status = "failed"
        else:
            status = "partial" if statuses & {"failed", "invalid"} else "ok"
    return Standing(len(wanted), len(wanted & there) if wanted else len(there), status)
