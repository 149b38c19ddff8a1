"""``claims`` for people: the paper's number and conditions, ours and ours, and the verdict, grouped by system."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from kvbench.analysis.claim_check import Check, Verdict
from kvbench.analysis.claims import Number
from kvbench.contract.result import RunInfo
from kvbench.errors import printable
from kvbench.report.table import SHOWABLE, setting
from kvbench.report.text import unicode_ok
from kvbench.units import counted, format_interval, format_value

NAMES = {"directkv": "DirectKV", "neo": "NEO", "ellm": "eLLM", "strata": "Strata"}
ORDER: tuple[Verdict, ...] = get_args(Verdict)
WIDTH = 100  # off a terminal
LEAST_WIDTH = 60
AS = {"number": "", "shape": " as a shape", "direction": " as a direction"}


def claims_text(checks: Sequence[Check], hw_class: str, *, everything: bool) -> str:
    """Return the report on ``checks``, judged on ``hw_class``; ``everything`` adds baselines, misreadings and rows."""
    lines = _wrapped(f"{counted(len(checks), 'claim')} on {hw_class}: {_counts(checks)}", "", "  ")
    for system in dict.fromkeys(check.claim.system for check in checks):
        members = [check for check in checks if check.claim.system == system]
        lines += ["", *_wrapped(f"{NAMES.get(system, system)}: {_counts(members)}", "", "  ")]
        for check in sorted(members, key=lambda each: ORDER.index(each.verdict)):
            lines += ["", *_claim(check, everything)]
    text = "\n".join(lines)
    return text if unicode_ok(sys.stdout) else text.replace("±", "+-").encode("ascii", "backslashreplace").decode()


def _counts(checks: Sequence[Check]) -> str:
    words = Counter(check.verdict for check in checks)
    return ", ".join(f"{words[word]} {word}" for word in ORDER if words[word]) or "none"


def verdict_text(check: Check) -> str:
    """Return the verdict with what it is a verdict on: a shape, a direction, and not on a measurement on a GPU."""
    kind = AS[check.claim.kind] if check.verdict in ("REPRODUCED", "NOT REPRODUCED") else ""
    return check.verdict + kind + (f" ({check.label})" if check.label else "")


def paper_text(number: Number) -> str:
    """Return a paper's number with its bound or range, its unit and its name."""
    bound = {"about": "", "at_least": "at least ", "at_most": "at most "}[number.bound]
    low, high = (
        None if each is None else f"{each:g}" if number.unit == "1" else format_value(each, number.unit)
        for each in (number.value, number.high)
    )
    return f"{bound}{low}{'' if high is None else f' to {high}'} ({number.name})"


def found_text(check: Check) -> str:
    """Return what was found here, empty where nothing was."""
    found = check.finding
    if found is None:
        return ""
    if check.claim.kind == "shape":
        return found.text
    low, value, high = found.low, found.value, found.high
    if max(abs(each) for each in (value, low or 0.0, high or 0.0)) > SHOWABLE:
        shown = f"{value!r} {found.unit}"
    elif low is None or high is None or not low <= value <= high:
        shown = format_value(value, found.unit)
    else:
        shown = format_interval(low, value, high, found.unit)
    return shown if shown == found.text else f"{shown}: {found.text}"


def _claim(check: Check, everything: bool) -> Iterator[str]:
    claim = check.claim
    yield f"  {claim.id}: {verdict_text(check)}"
    yield from _folded("", claim.statement)
    numbers = "; ".join(map(paper_text, claim.numbers)) or claim.kind
    mark = "" if claim.verified else "; not verified in the paper"
    place = f"section {claim.section}" if claim.section[0].isdigit() else claim.section
    yield from _folded("paper", f"{numbers}{mark}; {claim.hardware}; {claim.conditions} ({place})")
    here = "; ".join(filter(None, (found_text(check), check.reason))) or "-"
    runs = [] if check.seen is None else [_run(info) for info in check.seen.runs[:3]]
    if check.seen is not None and len(check.seen.runs) > 3:
        runs.append(f"{len(check.seen.runs) - 3} runs more")
    yield from _folded("here", "; ".join([here, *([f"run {', '.join(runs)}"] if runs else [])]))
    if claim.contradiction:
        yield from _folded("beware", claim.contradiction)
    if everything:
        yield from _folded("against", claim.baseline)
        if claim.misquoted:
            yield from _folded("misread", claim.misquoted)
        for answer in check.unmet:
            yield from _folded("needs", f"{answer.need} (here {answer.found})")
        for point in check.seen.points if check.seen is not None else ():
            axes = " ".join(f"{name}={setting(name, value)}" for name, value in point.row.axes.items())
            yield from _folded("row", f"{point.row.suite}/{point.row.bench} {axes} {point.row.metric}")
    if check.commands and check.verdict == "NOT MEASURED":
        later = "" if check.bench_is_here else " (not in this version)"
        yield f"    measure it with{later}"
        yield from (f"      {command}" for command in check.commands)  # whole: it is made to be copied


def _run(info: RunInfo) -> str:
    return f"{info.uuid[:8]} {info.profile} {info.started_at[:16]}Z"


def _folded(title: str, text: str) -> list[str]:
    return _wrapped(text, f"    {title:<8}" if title else "    ", " " * (12 if title else 4))


def _wrapped(text: str, first: str, below: str) -> list[str]:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    return textwrap.wrap(
        printable(text, 2_000), max(LEAST_WIDTH, width), initial_indent=first, subsequent_indent=below,
        break_on_hyphens=False,
    )  # fmt: skip
