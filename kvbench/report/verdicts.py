"""What ``compare`` prints for people: what was held against what, the verdicts, and the rows that moved most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvbench.analysis.compare import Against, Comparison, Row, Side
from kvbench.analysis.effect import Verdict
from kvbench.analysis.shapes import Shape
from kvbench.contract.result import Result
from kvbench.errors import printable
from kvbench.report.table import axes_text, plain_table, setting
from kvbench.units import counted, format_bytes, format_value

MOST = 10  # rows of each kind in the short form: a summary is read in a minute
WORDS: tuple[Verdict, ...] = ("SLOWER", "FASTER", "SAME", "INCONCLUSIVE", "TAINTED", "NO_DATA", "INCOMPARABLE")


def comparison_text(found: Comparison, shapes: Sequence[tuple[int, Sequence[Shape]]], *, everything: bool) -> str:
    """Return the report of ``found``; ``everything``: all rows instead of those that moved most."""
    names = [chr(ord("a") + i) if i < 26 else str(i) for i in range(len(found.sides))]
    lines = [_side(name, side) for name, side in zip(names, found.sides, strict=True)]
    by_side = dict(shapes)
    for other in found.against:
        letter = names[other.index]
        lines += ["", f"{letter} against a"]
        lines += _differing("hardware", other.hardware) + _differing("environment", other.environment)
        lines += _counts(other)
        if everything:
            lines.append(_table(list(other.rows), letter))
        else:
            lines += _most(other, letter)
        lines += _shapes(by_side.get(other.index, ()), letter)
        for title, missing in (("only in a", other.missing), (f"only in {letter}", other.extra)):
            lines += _only(title, missing, everything)
    lines += ["", f"verdict: {found.verdict}"]
    return "\n".join(lines)


def _side(letter: str, side: Side) -> str:
    info = side.runs[0].info
    label = f" label {info.label!r}" if info.label else ""
    profiles = "+".join(sorted({run.info.profile for run in side.runs}))
    resumed = ", one resumed" if any(run.info.resumed for run in side.runs) else ""
    text = (
        f"{letter}  {side.name}: {counted(len(side.runs), 'run')} at {profiles}, group {info.group[:8]}{label}, "
        f"{info.started_at[:19]}Z{resumed}, hardware {info.hw_class}, environment {info.env_digest}"
    )
    return printable(text, 800)


def _differing(title: str, fields: Sequence[tuple[str, str, str]]) -> list[str]:
    if not fields:
        return [f"  same {title}"]
    shown = [printable(f"    {name}: {a} -> {b}", 160) for name, a, b in fields[:MOST]]
    more = [f"    and {len(fields) - MOST} more fields"] if len(fields) > MOST else []
    return [f"  {title} differs in {counted(len(fields), 'field')}", *shown, *more]


def _counts(other: Against) -> list[str]:
    words = Counter(row.verdict for row in other.rows)
    kinds = Counter(row.comparable for row in other.rows)
    text = ", ".join(f"{words[word]} {word}" for word in WORDS if words[word]) or "none"
    split = ", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "-"
    lines = [
        f"  {counted(len(other.rows), 'row')} on both sides ({split}), "
        f"{len(other.missing)} only in the first, {len(other.extra)} only in the second",
        f"  verdicts: {text}",
    ]
    if other.moved:
        lines.append(f"  canaries moved, so nothing here is about the code alone: {', '.join(other.moved)}")
    elif other.canaries:
        ratios = ", ".join(f"{row.bench} {row.ratio:.3f}x" for row in other.canaries if row.ratio is not None)
        lines.append(printable(f"  canaries: {ratios or 'without values'}", 400))
    lines += [f"  warning: {text}" for text in (other.profiles, other.balance) if text]
    return lines


def _most(other: Against, letter: str) -> list[str]:
    rated = sorted((row for row in other.rows if row.ratio is not None), key=lambda row: -row.loss)
    worse = [row for row in rated if row.loss > 0.0][:MOST]
    better = [row for row in reversed(rated) if row.loss < 0.0][:MOST]
    lines: list[str] = []
    if worse:
        lines += [f"  slowest on {letter} against a", _table(worse, letter)]
    if better:
        lines += [f"  fastest on {letter} against a", _table(better, letter)]
    rest = [row for row in other.rows if row.ratio is None][:MOST]
    if rest:
        lines += ["  without a ratio", _table(rest, letter)]
    left = len(other.rows) - len(worse) - len(better) - len(rest)
    if left > 0:
        lines.append(f"  {counted(left, 'row')} more: --all shows them")
    return lines


def _table(rows: Sequence[Row], letter: str) -> str:
    cells = [
        (
            _case(row), _value(row.a, row.unit), _value(row.b, row.unit), _ratio(row),
            _fractions(row), row.verdict, row.comparable, _reason(row),
        ) for row in rows
    ]  # fmt: skip
    return plain_table(("case", "a", letter, "ratio, 99 %", "of ceiling", "verdict", "as", "why"), cells)


def _case(row: Row) -> str:
    axes = " ".join(f"{name}={setting(name, value)}" for name, value in row.axes.items())
    return f"{row.suite}/{row.bench} {axes} {row.metric}"


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return format_bytes(round(value)) if unit == "B" else format_value(value, unit)


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "-"
    of = " of fractions" if row.compares == "fraction" else ""
    if row.low is None or row.high is None:
        return f"{row.ratio:.3f}{of}"
    return f"{row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}]{of}"


def _fractions(row: Row) -> str:
    shares = ["-" if share is None else f"{share:.0%}" for share in (row.fraction_a, row.fraction_b)]
    return "-" if shares == ["-", "-"] else " / ".join(shares)


def _reason(row: Row) -> str:
    fields = [name for name in row.differs if name != "hw_class"]
    return "; ".join(filter(None, (row.reason, f"differs: {', '.join(fields)}" if fields else "")))


def _shapes(found: Sequence[Shape], letter: str) -> list[str]:
    if not found:
        return []
    cells = []
    for shape in found:
        values = [_value(value, shape.unit) for value in (shape.a, shape.b)]
        ratio = "-" if shape.effect is None else f"{shape.effect.ratio:.3f}"
        curve = shape.curve
        name = f"{curve.suite}/{curve.bench} {axes_text(curve.rows[0], (curve.axis,))} over {curve.axis}"
        cells.append((name, shape.parameter, *values, ratio, shape.reason))
    return ["  shapes of the curves", plain_table(("curve", "parameter", "a", letter, "ratio", "why"), cells)]


def _only(title: str, rows: Sequence[Result], everything: bool) -> list[str]:
    if not rows:
        return []
    shown = rows if everything else rows[:MOST]
    lines = [printable(f"    {row.suite}/{row.bench} {axes_text(row)} {row.metric}", 300) for row in shown]
    more = [f"    and {len(rows) - len(shown)} more"] if len(shown) < len(rows) else []
    return [f"  {title}: {counted(len(rows), 'row')}", *lines, *more]
