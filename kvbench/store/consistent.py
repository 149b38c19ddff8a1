"""What no row and no run may say of itself: a number that contradicts its own record is no number.

Every way into a store goes through here: the worker, the database, bundles written and bundles read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

from kvbench.contract.result import HAS_VALUE, Bytes, Ceiling, Result, RunStatus

COUNTED = tuple(field.name for field in fields(Bytes))
POSITIVE_UNITS = frozenset({"s", "B/s", "FLOP/s"})
SIGNED_UNIT = "1"  # differences, gains and logarithms; nothing else that is measured is less than nothing
LAW = 1.02  # as kvbench.timing.judge has it: beyond that times a physical ceiling no number is true (design 6.8)
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
