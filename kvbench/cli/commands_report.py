"""``report``: everything about one or several measurements as one HTML page, and its figures as files."""

from __future__ import annotations

import json as json_text
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.commands_decide import check_distinct, side
from kvbench.cli.options import Db, Json
from kvbench.cli.output import emit, emit_json, say
from kvbench.cli.reading import is_bundle, reading
from kvbench.errors import EXIT_NO_DATA, EXIT_OK, UsageError, printable

if TYPE_CHECKING:
    from kvbench.analysis.claim_check import Check
    from kvbench.analysis.compare import Side
    from kvbench.analysis.trend import Trend
    from kvbench.report.html import Contents, Report

REPORT_SCHEMA = "kvbench.report/1"
INDEX = "kvbench-figures.json"
LEAST_HISTORY = 3
MOST_POINTS = 200


def register(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    app.command("report")(report)


def report(
    selectors: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SELECTOR]...",
            help="Run or group UUID (prefix), label, bundle file, latest, latest~N; of several the first is the base.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="The page to write.")] = None,
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="SELECTOR", help="Hold everything against this measurement.")
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", metavar="DIR", help="Also write each figure there: SVG, PNG and its spec."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a file that is no report, figures that are not listed in DIR.")
    ] = False,
    db: Db = None,
    json: Json = False,
) -> None:
    """Write one page that needs no network: machine, curves, comparison, claims, history; light, dark and on paper.

    Exit code 0 when a row has a value, 3 when none has; the page is written then too.
    """
    words = list(selectors or ["latest"])
    if compare is not None:
        words.insert(0, compare)
    if output is None:
        raise UsageError("a file is needed", where="-o", expected="the page to write, such as report.html")
    check_page(output, force=force)
    if figures is not None:
        check_folder(figures, force=force)
    from kvbench.report.html import make_report

    sides = tuple(side(word, db) for word in words)
    check_distinct(sides)
    made = make_report(contents(sides, words, db))
    _write(output, made.html.encode("utf-8"))
    files = list(write_figures(figures, made)) if figures is not None else []
    has_value = any(row.value is not None for each in sides for run in each.runs for row in run.results)
    if json:
        emit_json({"schema": REPORT_SCHEMA, "reports": [{
            "path": printable(str(output), 4_000), "bytes": len(made.html.encode("utf-8")), "cases": made.cases,
            "rows": made.rows, "figures": len(made.figures), "undrawn": made.undrawn,
            "sides": [{"name": each.name, "runs": [run.info.uuid for run in each.runs]} for each in sides],
            "files": [printable(str(path), 4_000) for path in files],
        }]})  # fmt: skip
    else:
        size = f"{len(made.html.encode('utf-8')) / 1e6:.2f} MB"
        emit(
            f"wrote {printable(str(output))}: {made.cases} cases, {made.rows} rows, {len(made.figures)} figures, {size}"
        )
        if files and figures is not None:
            emit(f"wrote {len(files)} files to {printable(str(figures))}")
    if not has_value:
        say("kvbench: no row has a value; the page says what was tried")
    raise typer.Exit(EXIT_OK if has_value else EXIT_NO_DATA)


def contents(sides: tuple[Side, ...], words: Sequence[str], db: str | None) -> Contents:
    """Return what the page is made of: the comparison of several sides, the history and claims of the last one."""
    from kvbench.analysis.compare import compare as hold
    from kvbench.analysis.shapes import shapes
    from kvbench.report.html import Contents

    found = hold(sides) if len(sides) > 1 else None
    trends, no_trends = histories(sides[-1], db, stored=db is not None or not all(map(is_bundle, words)))
    judged, no_claims = claims_of(sides[-1])
    return Contents(
        sides=sides, made_at=datetime.now(UTC).isoformat(timespec="seconds"), comparison=found,
        shapes={i: shapes(sides[0], sides[i]) for i in range(1, len(sides))}, trends=trends, no_trends=no_trends,
        claims=judged, no_claims=no_claims,
    )  # fmt: skip


def histories(found: Side, db: str | None, *, stored: bool) -> tuple[list[Trend], str]:
    """Return the history of each primary metric of ``found`` that three or more runs measured, or why there is none."""
    from kvbench.analysis.trend import trend
    from kvbench.store import KnownCase

    if not stored:
        return [], "bundles have no history: import them, or name a database with --db"
    primary: dict[str, Any] = {}
    for run in found.runs:
        for row in run.results:
            if not row.is_canary and row.value is not None:
                primary.setdefault(row.digest, row)
    trends: list[Trend] = []
    with reading(db) as store:
        noted = store.annotations(hw_class=found.hw_class)  # once: a query a case was a sixth of a page of 500
        for row in primary.values():
            points = store.history(row.digest, row.metric, found.hw_class, limit=MOST_POINTS)
            if sum(point.figure.value is not None for point in points) < LEAST_HISTORY:
                continue
            known = KnownCase(row.digest, row.suite, row.bench, row.bench_version, row.axes)
            notes = [note for note in noted if note.case_digest in (None, row.digest)]
            trends.append(trend(known, row.metric, found.hw_class, points, notes))
    return trends, "" if trends else f"no case has {LEAST_HISTORY} runs with a value on {found.hw_class}"


def claims_of(found: Side) -> tuple[list[Check], str]:
    """Return the papers' claims judged by the runs of ``found`` alone, or why none was."""
    from kvbench.analysis.claim_check import Machine, check
    from kvbench.analysis.claims import load_claims
    from kvbench.contract.discover import load_suites

    try:
        claims = load_claims()
    except UsageError as error:
        return [], f"no claim was judged: {error}"
    suites = load_suites()
    machine = Machine.of(found.hw_class, found.runs[0].info.machine)
    checks = [check(claim, suites, machine, found.runs) for claim in claims]
    order = {"REPRODUCED": 0, "DIRECTION ONLY": 1, "NOT REPRODUCED": 2, "NOT MEASURED": 3, "CONDITIONS NOT MET": 4}
    return sorted(checks, key=lambda each: order[each.verdict]), ""


def check_page(path: Path, *, force: bool) -> None:
    """Raise UsageError unless ``path`` is free, an older report, or (``force``) any regular file."""
    from kvbench.report.html import HEAD

    if not path.exists() and not path.is_symlink():
        if not path.parent.is_dir():
            raise UsageError("the folder is not there", where=str(path.parent), mend="make it, or name another file")
        return
    if path.is_symlink() or not path.is_file():
        raise UsageError("not a regular file", where=str(path), expected="the name of a file to write")
    if force:
        return
    try:
        with path.open("rb") as file:
            begins = file.read(len(HEAD))
    except OSError as error:
        raise UsageError(f"the file cannot be read ({error.strerror})", where=str(path)) from None
    if begins != HEAD.encode():
        raise UsageError("there is a file that is no report", where=str(path), mend="name another, or give --force")


def check_folder(path: Path, *, force: bool) -> None:
    """Raise UsageError unless ``path`` can take figures: free, empty, or the folder of an earlier report."""
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir():
        raise UsageError("not a folder", where=str(path), expected="a folder for figures")
    if not force and any(path.iterdir()) and not (path / INDEX).is_file():
        raise UsageError(
            "the folder holds other files", where=str(path), expected=f"an empty one, or one with {INDEX}",
            mend="name another, or give --force",
        )  # fmt: skip


def write_figures(folder: Path, made: Report) -> Iterator[Path]:
    """Write every figure as SVG, PNG and Vega-Lite spec, and the index that lists them; yield the paths.

    Only files of its own names are replaced. Raises UsageError when the folder cannot be made.
    """
    from kvbench.report.drawing import to_png

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder cannot be made ({error.strerror})", where=str(folder)) from None
    index = []
    for drawn in made.figures:
        figure = drawn.figure
        index.append(
            {"name": figure.name, "title": figure.title, "basis": list(figure.basis), "notes": list(figure.notes)}
        )
        spec = json_text.dumps(figure.spec, indent=1, allow_nan=False)
        for suffix, data in ((".svg", drawn.svg.encode()), (".png", to_png(drawn.svg)), (".vl.json", spec.encode())):
            path = folder / f"{figure.name}{suffix}"
            _write(path, data)
            yield path
    listed = json_text.dumps({"figures": index}, indent=1, allow_nan=False)
    _write(folder / INDEX, listed.encode())
    yield folder / INDEX


def _write(path: Path, data: bytes) -> None:
    from kvbench.store.newfile import new_file

    with new_file(path, force=True) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
