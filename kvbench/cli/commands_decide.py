"""``compare``: what two or more measurements say about each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.options import Db, Json
from kvbench.cli.output import emit, emit_json, say
from kvbench.cli.reading import load_runs
from kvbench.errors import EXIT_NO_DATA, EXIT_OK, UsageError

if TYPE_CHECKING:
    from kvbench.analysis.compare import Against, Comparison, Row, Side
    from kvbench.analysis.shapes import Shape

VERDICTS_SCHEMA = "kvbench.verdicts/1"


def register(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    app.command("compare")(compare)


def compare(
    selectors: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C]...",
            help="Run or group UUID (prefix), label, bundle file, latest, latest~N; A is the base.",
        ),
    ],
    everything: Annotated[bool, typer.Option("--all", help="Every row, and curves on one hardware too.")] = False,
    db: Db = None,
    json: Json = False,
) -> None:
    """Hold B (and C...) against A: matched cases, ratios with intervals, and what may be compared at all.

    Exit code 0 when something was compared, 3 when nothing matched; never 1: a verdict that fails a build is `gate`.
    """
    from kvbench.analysis.compare import compare as hold
    from kvbench.report.verdicts import comparison_text

    if len(selectors) < 2:
        raise UsageError("nothing to compare with", where="kvbench compare", got=" ".join(selectors), expected="A B")
    sides = [side(selector, db) for selector in selectors]
    check_distinct(sides)
    found = hold(sides)
    curves = curves_between(sides, [other.index for other in found.against], everything=everything)
    code = EXIT_OK if found.matched else EXIT_NO_DATA
    if json:
        emit_json(verdicts_document(found, curves, code))
    else:
        emit(comparison_text(found, curves, everything=everything))
        if code:
            say("kvbench: nothing to compare: no case has a value on both sides")
    raise typer.Exit(code)


def curves_between(
    sides: Sequence[Side], others: Sequence[int], *, everything: bool
) -> list[tuple[int, Sequence[Shape]]]:  # fmt: skip
    """Return the shapes of the curves of the first side and each of ``others`` that is other hardware, or of all.

    They are what travels across machines. On one kind of hardware the rows themselves compare, and fitting every curve
    would be a third of the command.
    """
    asked = [index for index in others if everything or _hardware(sides[index]) != _hardware(sides[0])]
    if not asked:
        return []
    from kvbench.analysis.shapes import shapes

    return [(index, shapes(sides[0], sides[index])) for index in asked]


def _hardware(one: Side) -> str:
    return one.runs[0].info.hw_class


def side(selector: str, db: str | None) -> Side:
    """Return what ``selector`` names as one side. Raises UsageError when its runs are of several machines or none."""
    from kvbench.analysis.compare import Side

    runs = tuple(load_runs(selector, db))
    if not runs:
        raise UsageError("no run in it", where=selector)
    kinds = sorted({run.info.hw_class for run in runs})
    if len(kinds) > 1:
        raise UsageError(
            "runs of several kinds of hardware are no side", where=selector, got=", ".join(kinds), expected="one",
            mend="name the runs of one machine by their UUID",
        )  # fmt: skip
    return Side(selector, runs)


def check_distinct(sides: Sequence[Side]) -> None:
    """Raise UsageError when two sides share a run: it would be compared with itself."""
    seen: dict[str, int] = {}
    for index, each in enumerate(sides):
        for run in each.runs:
            other = seen.setdefault(run.info.uuid, index)
            if other != index:
                raise UsageError(
                    "a run compared with itself says nothing", where=f"{sides[other].name} and {each.name}",
                    got=run.info.uuid[:8], expected="two measurements", mend="`kvbench runs` lists them",
                )  # fmt: skip


def verdicts_document(found: Comparison, curves: Sequence[tuple[int, Sequence[Shape]]], code: int) -> dict[str, Any]:
    """Return the ``kvbench.verdicts/1`` document of a comparison."""
    by_side = dict(curves)
    return {
        "schema": VERDICTS_SCHEMA, "command": "compare", "verdict": found.verdict, "exit_code": code,
        "sides": [side_document(each) for each in found.sides],
        "rows": [row_document(row) for row in found.rows],
        "against": [_against(other, by_side.get(other.index, ())) for other in found.against],
    }  # fmt: skip


def side_document(found: Side) -> dict[str, Any]:
    """Return a side of ``kvbench.verdicts/1``."""
    return {
        "name": found.name, "runs": [run.info.uuid for run in found.runs], "hw_class": found.hw_class,
        "env": found.env, "labels": sorted({run.info.label for run in found.runs if run.info.label}),
    }  # fmt: skip


def row_document(row: Row) -> dict[str, Any]:
    """Return a row of ``kvbench.verdicts/1``."""
    return {
        "side": row.side, "suite": row.suite, "bench": row.bench, "axes": dict(row.axes), "metric": row.metric,
        "unit": row.unit, "better": row.better, "a": row.a, "b": row.b, "runs_a": row.runs_a, "runs_b": row.runs_b,
        "fraction_a": row.fraction_a, "fraction_b": row.fraction_b, "compares": row.compares, "ratio": row.ratio,
        "low": row.low, "high": row.high, "margin": row.margin, "verdict": row.verdict, "comparable": row.comparable,
        "differs": list(row.differs), "reason": row.reason,
    }  # fmt: skip


def _against(other: Against, found: Sequence[Shape]) -> dict[str, Any]:
    def only(rows: Sequence[Any]) -> list[dict[str, Any]]:
        return [{"suite": r.suite, "bench": r.bench, "axes": dict(r.axes), "metric": r.metric} for r in rows]

    def fields(differing: Sequence[tuple[str, str, str]]) -> list[dict[str, str]]:
        return [{"field": name, "a": a, "b": b} for name, a, b in differing]

    return {
        "side": other.index, "missing": only(other.missing), "extra": only(other.extra),
        "hardware": fields(other.hardware), "environment": fields(other.environment),
        "canaries": [row_document(row) for row in other.canaries], "moved": list(other.moved),
        "balance": other.balance or None, "profiles": other.profiles or None,
        "shapes": [
            {
                "suite": shape.curve.suite, "bench": shape.curve.bench, "axis": shape.curve.axis,
                "axes": dict(shape.curve.fixed), "parameter": shape.parameter, "unit": shape.unit, "a": shape.a,
                "b": shape.b, "ratio": None if shape.effect is None else shape.effect.ratio,
                "low": None if shape.effect is None else shape.effect.low,
                "high": None if shape.effect is None else shape.effect.high, "reason": shape.reason,
            } for shape in found
        ],
    }  # fmt: skip
