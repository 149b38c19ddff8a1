"""The tables of a report page as plain cells: text only, escaped where the page is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.analysis.compare import Against, Row, Side
from kvbench.contract.result import Result
from kvbench.report.decision_figures import case_text
from kvbench.report.figures import spread_text
from kvbench.report.pooled import Pooled, pool, showable
from kvbench.report.summary import MEANING, short_code
from kvbench.report.table import SAMPLE_WORDS, axes_text, ceiling_text, shared_axes
from kvbench.units import counted, format_bytes, format_value

if TYPE_CHECKING:
    from kvbench.analysis.claim_check import Check
    from kvbench.analysis.shapes import Shape
    from kvbench.analysis.trend import Trend

View = dict[str, Any]
MOST_ONLY = 40  # rows of one side alone that are listed by name
_FACTS = (
    "cpu_name", "cpus", "threads_per_core", "llc_bytes", "memory_bytes", "kernel", "virtualisation", "governor", "thp",
    "numa_balancing", "affinity", "cpu_quota", "container", "python",
)  # fmt: skip
_KEY = ("sockets", "numa_nodes", "cores")


def side(name: str, found: Side) -> View:
    """Return what heads the page about one side: its runs, and what kind of machine they are of."""
    runs = [
        {
            "uuid": run.info.uuid[:8], "group": run.info.group[:8], "label": run.info.label or "",
            "started": run.info.started_at[:19] + "Z", "profile": run.info.profile,
            "status": run.info.status + (", resumed" if run.info.resumed else ""),
            "code": short_code(run.info.git), "version": run.info.kvbench_version, "env": run.info.env_digest,
        } for run in found.runs
    ]  # fmt: skip
    return {"name": name, "runs": runs, "hw_class": found.hw_class, "env": found.env}


def warnings(rows: Sequence[Pooled], sides: Sequence[Side]) -> list[str]:
    """Return what a reader must know before any number."""
    statuses = Counter(pooled.row.status for pooled in rows)
    lines = [f"{counted(len(rows), 'row')}: " + (", ".join(f"{n} {s}" for s, n in sorted(statuses.items())) or "none")]
    bases = Counter(pooled.row.basis for pooled in rows if pooled.row.basis != "measured")
    if bases:
        found = ", ".join(f"{number} {basis}" for basis, number in sorted(bases.items()))
        lines.append(f"not measured: {found}; each is marked with its basis")
    unfinished = [run.info for each in sides for run in each.runs if run.info.status not in ("ok",)]
    lines += [f"run {info.uuid[:8]} is {info.status}: what is missing was not measured" for info in unfinished[:10]]
    disturbed = [p for i, each in enumerate(sides) for p in pool(i, each.runs, canaries=True) if p.row.status != "ok"]
    if disturbed:
        names = ", ".join(sorted({p.row.bench for p in disturbed}))
        lines.append(f"canaries not ok ({names}): the machine was not quiet")
    return lines


def machine(sides: Sequence[Side]) -> View:
    """Return the facts about the machines: the chosen ones first, all of them for who looks further."""
    trees = [_flat({"hardware": each.runs[0].info.machine, "environment": each.runs[0].info.env}) for each in sides]
    every = list(dict.fromkeys(name for tree in trees for name in tree))
    rows = [_fact(name, [tree.get(name, "-") for tree in trees]) for name in every]
    chosen = {f"hardware.facts.{n}" for n in _FACTS} | {f"environment.{n}" for n in _FACTS}
    chosen |= {f"hardware.key.{n}" for n in _KEY}
    card = [
        row for row in rows
        if row["path"] in chosen or (row["path"].startswith("hardware.facts.gpus.") and row["path"].endswith(
            (".name", ".memory_bytes", ".max_gen", ".max_width"))) or row["path"].startswith("environment.gpu.driver")
        or row["path"].startswith("hardware.disagreements")
    ]  # fmt: skip
    card = [row for row in card if any(value not in ("-", "unknown") for value in row["values"])]
    return {"card": card, "all": rows, "classes": [each.hw_class for each in sides]}


def _fact(path: str, values: Sequence[object]) -> View:
    name = path.rpartition(".")[2]
    words = path.split(".")
    if "gpus" in words or "disagreements" in words:
        name = ".".join(words[words.index("gpus" if "gpus" in words else "disagreements") :])
    shown = [
        format_bytes(value) if name.endswith("bytes") and isinstance(value, int) and not isinstance(value, bool)
        and value >= 0 else "unknown" if value is None else str(value) for value in values
    ]  # fmt: skip
    return {"path": path, "name": name.replace("_", " "), "values": shown, "differs": len(set(shown)) > 1}


def _flat(tree: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, object]:
    """Return the leaves of a fact tree by dotted path; lists of plain values stay whole."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and depth < 8:
            found |= _flat(value, f"{path}.", depth + 1)
        elif isinstance(value, list) and any(isinstance(each, dict) for each in value) and depth < 8:
            for number, each in enumerate(value):
                found |= _flat(each if isinstance(each, dict) else {"": each}, f"{path}.{number}.", depth + 1)
        else:
            found[path] = " ".join(map(str, value)) if isinstance(value, list) else value
    return found


def bench(rows: Sequence[Pooled], names: Sequence[str]) -> View:
    """Return the table of one bench: what all cases share in the heading, then a line a case, metric and side."""
    shared = shared_axes([pooled.row for pooled in rows])
    metrics = list(dict.fromkeys(pooled.row.metric for pooled in rows))
    first = rows[0].row
    order = {key: i for i, key in enumerate(dict.fromkeys((p.row.digest, p.row.metric) for p in rows))}
    lines = [
        row_view(pooled, axes_text(pooled.row, shared) or "-", names if len(names) > 1 else ())
        for pooled in sorted(rows, key=lambda p: (order[p.row.digest, p.row.metric], p.side))
    ]  # fmt: skip
    heading = axes_text(first, set(first.axes) - shared)
    reasons = {(p.row.status, p.row.reason) for p in rows}
    status, reason = reasons.pop()
    alike = "" if reasons or status != "skipped" else f"{counted(len(rows), 'case')} skipped: {reason}"
    return {
        "alike": alike,
        "name": f"{first.suite}/{first.bench}", "shared": heading, "metrics": ", ".join(metrics),
        "several_metrics": len(metrics) > 1, "rows": lines,
    }  # fmt: skip


def row_view(pooled: Pooled, case: str, names: Sequence[str]) -> View:
    """Return the cells of one row of results."""
    row = pooled.row
    flags = [flag for flag in row.flags if flag not in SAMPLE_WORDS]
    return {
        "case": case, "metric": row.metric, "side": names[pooled.side] if names else "", "value": spread_text(pooled),
        "ceiling": _ceiling(row), "basis": row.basis, "status": row.status, "flags": flags, "kernel": row.kernel or "",
        "why": row.reason, "runs": f"{pooled.runs}/{pooled.of}" if pooled.of > 1 else "",
    }  # fmt: skip


def _ceiling(row: Result) -> str:
    known = row.ceilings[0].value if row.ceilings else None
    if row.fraction is None or known is None or not showable(known) or not abs(row.fraction) < 1e9:
        return "-"
    return f"{ceiling_text(row)} {format_value(known, row.unit)}"


def against(other: Against, names: Sequence[str], shapes: Sequence[Shape]) -> View:
    """Return the tables of one comparison."""
    verdicts = Counter(row.verdict for row in other.rows)
    kinds = Counter(row.comparable for row in other.rows)
    lines = [
        f"{counted(len(other.rows), 'row')} on both sides: " + ", ".join(f"{n} {w}" for w, n in verdicts.most_common()),
        ", ".join(f"{number} {kind}" for kind, number in kinds.items()),
    ]
    if other.moved:
        lines.append(f"canaries moved, so nothing here is about the code alone: {', '.join(other.moved)}")
    if other.balance:
        lines.append(f"warning: {other.balance}")
    return {
        "name": names[other.index], "base": names[0], "lines": [line for line in lines if line],
        "rows": [_compared(row) for row in sorted(other.rows, key=lambda row: -abs(row.loss))],
        "hardware": other.hardware, "environment": other.environment,
        "shapes": [_shape(shape) for shape in shapes],
        "only": [
            {"title": f"only in {title}", "rows": [_named(row) for row in rows[:MOST_ONLY]],
             "more": max(0, len(rows) - MOST_ONLY)}
            for title, rows in ((names[0], other.missing), (names[other.index], other.extra)) if rows
        ],
    }  # fmt: skip


def _named(row: Result) -> str:
    return f"{row.suite}/{row.bench} {axes_text(row)} {row.metric}"


def _compared(row: Row) -> View:
    ratio = "-"
    if row.ratio is not None and showable(row.ratio):
        ratio = f"{row.ratio:.3f}"
        if row.low is not None and row.high is not None and showable(row.low) and showable(row.high):
            ratio += f" [{row.low:.3f}, {row.high:.3f}]"
        ratio += " of fractions" if row.compares == "fraction" else ""
    shares = ["-" if share is None or share > 1e9 else f"{share:.0%}" for share in (row.fraction_a, row.fraction_b)]
    differs = [name for name in row.differs if name != "hw_class"]
    why = "; ".join(filter(None, (row.reason, f"differs: {', '.join(differs)}" if differs else "")))
    return {
        "case": case_text(row), "a": _number(row.a, row.unit), "b": _number(row.b, row.unit), "ratio": ratio,
        "better": row.better, "shares": "-" if shares == ["-", "-"] else " / ".join(shares), "verdict": row.verdict,
        "as": row.comparable, "why": why, "runs": f"{row.runs_a} / {row.runs_b}",
    }  # fmt: skip


def _shape(shape: Shape) -> View:
    curve = shape.curve
    ratio = "-" if shape.effect is None else f"{shape.effect.ratio:.3f}"
    name = f"{curve.suite}/{curve.bench} {axes_text(curve.rows[0], (curve.axis,))} over {curve.axis}"
    return {"curve": name, "parameter": shape.parameter, "a": _number(shape.a, shape.unit),
            "b": _number(shape.b, shape.unit), "ratio": ratio, "why": shape.reason}  # fmt: skip


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if not (value == 0 or showable(value)):
        return f"{value!r} {unit}"
    return format_bytes(round(value)) if unit == "B" and value >= 0 else format_value(value, unit)


def trends(found: Sequence[Trend]) -> list[View]:
    """Return one line a series: how many runs count, the newest value, its changes of level."""
    lines = []
    for trend in found:
        used = [p for p, counts in zip(trend.points, trend.counted, strict=True) if counts]
        last = used[-1].figure.value if used else None
        case = f"{trend.case.suite}/{trend.case.bench} " + " ".join(
            f"{name}={value}" for name, value in trend.case.axes.items()
        )
        changes = [f"{c.verdict} x{c.ratio:.3f} at {c.run[:8]}{' with the environment' if c.environment else ''}"
                   for c in trend.changes]  # fmt: skip
        lines.append({
            "case": f"{case} {trend.metric}", "hw": trend.hw_class, "runs": f"{len(used)} of {len(trend.points)}",
            "last": _number(last, trend.unit), "changes": ", ".join(changes) or ("-" if trend.reason else "one level"),
            "changed": bool(changes), "why": trend.reason,
        })  # fmt: skip
    return lines


def claims(found: Sequence[Check]) -> list[View]:
    """Return one line a claim: the paper's number and conditions, what was found here, the verdict and why."""
    lines = []
    for check in found:
        claim = check.claim
        papers = [
            f"{'at least ' if n.bound == 'at_least' else 'at most ' if n.bound == 'at_most' else ''}"
            f"{_number(n.value, n.unit)}{f' to {_number(n.high, n.unit)}' if n.high is not None else ''} ({n.name})"
            for n in claim.numbers
        ]
        ours = "-"
        if check.finding is not None:
            ours = f"{_number(check.finding.value, check.finding.unit)}: {check.finding.text}"
        lines.append({
            "system": claim.system, "id": claim.id, "statement": claim.statement, "paper": "; ".join(papers) or "-",
            "where": f"section {claim.section}; {claim.hardware}; against {claim.baseline}; {claim.conditions}",
            "ours": ours, "basis": check.seen.basis if check.seen is not None else "", "label": check.label,
            "verdict": check.verdict, "why": check.reason, "commands": list(check.commands),
            "misquoted": claim.misquoted, "contradiction": claim.contradiction,
        })  # fmt: skip
    return lines


def canaries(sides: Sequence[Side], names: Sequence[str]) -> list[View]:
    """Return the rows of the canary cases: the checks of the machine beside the results."""
    return [
        row_view(pooled, f"{pooled.row.bench} {axes_text(pooled.row)}".strip(), names if len(names) > 1 else ())
        for i, each in enumerate(sides) for pooled in pool(i, each.runs, canaries=True)
    ]  # fmt: skip


def flags(rows: Sequence[Pooled]) -> list[tuple[str, int, str]]:
    """Return every flag of ``rows`` with how many have it and what it means."""
    return list(_meanings(Counter(flag for pooled in rows for flag in pooled.row.flags)))


def _meanings(counts: Counter[str]) -> Iterator[tuple[str, int, str]]:
    for flag, number in sorted(counts.items()):
        yield flag, number, MEANING.get(flag, "see the row")
