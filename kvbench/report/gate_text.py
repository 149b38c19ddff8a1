"""What the gate leaves behind: text for people, a JUnit file, a step summary, worst first in each."""

from __future__ import annotations

import html
from collections.abc import Sequence
from xml.etree import ElementTree

from kvbench.analysis.gated import Gated, GateResult
from kvbench.errors import printable
from kvbench.report.table import plain_table, setting
from kvbench.units import counted, format_value

SUMMARY_BYTES = 1 << 20  # a larger step summary is dropped whole
MOST = 20
_RANK = {"regression": 0, "unknown": 1, "pass": 2}


def ordered(cases: Sequence[Gated]) -> list[Gated]:
    """Return regressions first, then what is not known, then the rest; the largest loss first in each."""
    return sorted(cases, key=lambda case: (_RANK[case.outcome], -case.loss))


def gate_text(found: GateResult, *, everything: bool) -> str:
    """Return the gate's report for a terminal."""
    cases = ordered(found.cases)
    shown = cases if everything else [c for c in cases if c.outcome != "pass" or c.looks == 2][:MOST] or cases[:5]
    lines = [plain_table(("case", "baseline", "candidate", "time", "counts", "verdict", "why"), map(_cells, shown))]
    if len(shown) < len(cases):
        lines.append(f"  {counted(len(cases) - len(shown), 'case')} more: --all shows them")
    if found.left_out:
        lines.append(f"  {counted(found.left_out, 'case')} measured that the baseline does not have: not judged")
    lines.append(f"gate: {found.word}: {printable(found.reason, 600)}")
    return "\n".join(lines)


def _cells(case: Gated) -> tuple[str, ...]:
    return (
        name_of(case), _value(case, "a"), _value(case, "b"), f"{case.loss:+.1%}" if case.judged else "-",
        f"{case.rule.threshold:.1%}", case.judged.verdict if case.judged else "NO_DATA",
        f"{case.outcome}: {case.reason}" if case.reason else case.outcome,
    )  # fmt: skip


def name_of(case: Gated) -> str:
    """Return ``suite/bench axis=value ... metric``."""
    row = case.row_a or case.row_b
    assert row is not None  # a case comes from a row
    axes = " ".join(f"{name}={setting(name, value)}" for name, value in row.axes.items())
    return " ".join(filter(None, (f"{row.suite}/{row.bench}", axes, row.metric)))


def _value(case: Gated, side: str) -> str:
    row = case.row_a if side == "a" else case.row_b
    if case.judged is None or row is None:
        return "-"
    return format_value(case.judged.effect.a if side == "a" else case.judged.effect.b, row.unit)


def junit(found: GateResult) -> str:
    """Return a JUnit document: a regression is a failure, what is not known is skipped with its reason."""
    cases = ordered(found.cases)
    suite = ElementTree.Element(
        "testsuite", name="kvbench gate", tests=str(len(cases)),
        failures=str(sum(case.outcome == "regression" for case in cases)),
        skipped=str(sum(case.outcome == "unknown" for case in cases)), errors="0",
    )  # fmt: skip
    for case in cases:
        row = case.row_a or case.row_b
        assert row is not None
        seconds = (row.seconds or 0.0) if case.judged else 0.0
        element = ElementTree.SubElement(
            suite, "testcase", classname=_xml(f"kvbench.{row.suite}.{row.bench}"), name=_xml(name_of(case)),
            time=f"{seconds:.9f}",
        )  # fmt: skip
        if case.outcome == "regression":
            ElementTree.SubElement(element, "failure", type="regression", message=_xml(case.reason))
        elif case.outcome == "unknown":
            ElementTree.SubElement(element, "skipped", message=_xml(case.reason))
    head = ElementTree.SubElement(suite, "system-out")
    head.text = _xml(f"{found.word}: {found.reason}")
    return _document(suite)


def junit_error(reason: str) -> str:
    """Return the JUnit document of a gate without a verdict: one error."""
    suite = ElementTree.Element("testsuite", name="kvbench gate", tests="1", failures="0", skipped="0", errors="1")
    element = ElementTree.SubElement(suite, "testcase", classname="kvbench", name="gate")
    ElementTree.SubElement(element, "error", message=_xml(reason))
    return _document(suite)


def _document(suite: ElementTree.Element) -> str:
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    return printable(text, 2_000)


def summary(found: GateResult) -> str:
    """Return a GitHub step summary in Markdown, under 1 MiB: what does not fit is counted."""
    cases = ordered(found.cases)
    head = [
        f"### kvbench gate: {found.word}", "", _markdown(found.reason), "",
        "| case | baseline | candidate | time | verdict | why |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    size = sum(len(line.encode()) + 1 for line in head) + 200
    lines: list[str] = []
    for case in cases:
        cells = _cells(case)
        line = "| " + " | ".join(_markdown(cells[i]) for i in (0, 1, 2, 3, 5, 6)) + " |"
        size += len(line.encode()) + 1
        if size >= SUMMARY_BYTES:
            break
        lines.append(line)
    left = len(cases) - len(lines)
    foot = ["", f"{left} more cases are not shown: the verdict file has them all."] if left else []
    return "\n".join([*head, *lines, *foot]) + "\n"


def _markdown(text: str) -> str:
    """Return ``text`` as it is in a table cell of Markdown: no markup, no HTML, no column of its own."""
    safe = html.escape(printable(text, 1_000), quote=False)
    for mark in "\\`*_[]|~":
        safe = safe.replace(mark, f"\\{mark}")
    return safe
