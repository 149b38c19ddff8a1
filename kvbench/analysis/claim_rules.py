"""How a claim is measured from rows: small named functions, each tested on rows made for it.

A rule gets the points its form names and nothing else; all of them are there, clean and finite. It returns what it
found; whether that is the paper's number is not its business. A rule raises Undecided where the points have no such
number (a ratio with nothing below it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvbench.analysis.claim_rules_base import SLACK, Finding, Point, Points, Undecided
from kvbench.analysis.claim_rules_numbers import (
    difference,
    largest,
    peak_ratio,
    ratio,
    ratio_beside,
    rest,
    scaled,
    share,
    sustained,
    value,
)
from kvbench.analysis.claim_rules_shapes import (
    all_ordered,
    all_rise,
    at_least,
    climbs,
    fades,
    falls,
    flat,
    humped,
    nothing,
    of_ceiling,
    ordered,
    per_operation_law,
    proportional,
    rising,
    saturates,
    within,
)

__all__ = ["RULES", "SLACK", "Finding", "Point", "Points", "Undecided"]

RULES: Mapping[str, Callable[..., Finding]] = {
    rule.__name__: rule for rule in (
        value, share, scaled, rest, ratio, ratio_beside, difference, largest, peak_ratio, sustained, at_least,
        of_ceiling, within, ordered, all_ordered, flat, rising, all_rise, climbs, falls, fades, humped, proportional,
        saturates, per_operation_law, nothing,
    )
}  # fmt: skip
