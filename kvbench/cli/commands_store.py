"""``doctor runs show export import db``: what is here, what is stored, and moving it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.options import Db, Json
from kvbench.cli.output import emit, emit_json, say
from kvbench.cli.reading import load_runs, reading
from kvbench.errors import EXIT_NO_DATA, EXIT_OK, UsageError, printable

if TYPE_CHECKING:
    from kvbench.contract.result import Result
    from kvbench.machine.fingerprint import Fingerprint
    from kvbench.store.importers import Foreign

RUNS_SCHEMA = "kvbench.runs/1"
IMPORT_SCHEMA = "kvbench.import/1"
EXPORT_SCHEMA = "kvbench.export/1"
DB_SCHEMA = "kvbench.db/1"
MAX_LISTED = 1_000_000

Selector = Annotated[
    str, typer.Argument(metavar="SELECTOR", help="Run or group UUID (prefix), label, bundle file, latest or latest~N.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    app.command("doctor")(doctor)
    app.command("runs")(runs)
    app.command("show")(show)
    app.command("export")(export)
    app.command("import")(import_)
    app.command("db")(db)


def doctor(
    traps: Annotated[bool, typer.Option("--traps", help="Run the self-tests of known wrong-number traps.")] = False,
    scratch: Annotated[Path | None, typer.Option("--scratch", metavar="DIR", help="Directory for file tiers.")] = None,
    json: Json = False,
) -> None:
    """Say what this machine is, what can run here and why not, and the command that mends each obstacle."""
    from kvbench.cli import doctor as command

    raise typer.Exit(command.run(traps=traps, json=json, scratch=scratch))


def runs(
    limit: Annotated[int, typer.Option("--limit", help="At most this many, newest first.")] = 20,
    db: Db = None,
    json: Json = False,
) -> None:
    """List the runs in the database, newest first."""
    from kvbench.report.table import plain_table

    if not 1 <= limit <= MAX_LISTED:
        raise UsageError("out of range", where="--limit", got=limit, expected=f"1..{MAX_LISTED}")
    with reading(db) as store:
        found = store.runs(limit=limit)
        now = datetime.now(UTC)
        ages = {
            run.info.uuid: (now - datetime.fromisoformat(run.last_commit_at)).total_seconds()
            for run in found if run.info.status == "running" and run.last_commit_at
        }  # fmt: skip
        if json:
            emit_json({
                "schema": RUNS_SCHEMA,
                "runs": [
                    {**run.info.to_json(), "host": run.info.host, "cases": len(run.info.plan), "done": run.done,
                     "ok": run.ok, "age_s": ages.get(run.info.uuid)} for run in found
                ],
            })  # fmt: skip
            return
        if not found:
            emit(f"no runs in {store.describe()}; kvbench run measures one")
            return
        lines = [
            (
                run.info.uuid[:8], run.info.group[:8], run.info.label or "",
                "not told" if "time_unknown" in run.info.flags else run.info.started_at[:19] + "Z",
                run.info.hw_class, run.info.profile, f"{run.done}/{len(run.info.plan)}",
                run.info.status + (f", last commit {ages[run.info.uuid]:.0f} s ago" if run.info.uuid in ages else ""),
            ) for run in found
        ]  # fmt: skip
        emit(plain_table(("run", "group", "label", "started", "hardware", "profile", "cases", "status"), lines))


def show(
    selector: Selector = "latest",
    select: Annotated[
        list[str] | None, typer.Argument(metavar="[SELECT]...", help="Only these: suite or suite/bench.")
    ] = None,
    canaries: Annotated[bool, typer.Option("--canaries", help="Show the canary cases too.")] = False,
    charts: Annotated[bool, typer.Option("--charts/--no-charts", help="Draw each curve.")] = True,
    db: Db = None,
    json: Json = False,
) -> None:
    """Show the rows of a run or group: values, ceilings, status, a chart of each curve and its fit."""
    from kvbench.contract.document import results_document
    from kvbench.report.summary import run_summary

    loaded = load_runs(selector, db)
    rows: list[tuple[str, Result]] = []
    beside: list[tuple[str, Result]] = []
    for run in loaded:
        for row in run.results:
            (beside if row.is_canary else rows).append((run.info.uuid, row))
    if select:
        rows = [(uuid, row) for uuid, row in rows if any(_matches(row, word) for word in select)]
        if not rows:
            say(f"kvbench: no rows of {' '.join(select)} in {selector}")
            raise typer.Exit(EXIT_NO_DATA)
    infos = [run.info for run in loaded]
    if json:
        emit_json(results_document(infos, rows, beside))
    else:
        emit(run_summary(infos, rows, beside, charts=charts, show_canaries=canaries))


def export(
    selector: Selector,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write; never overwritten without --force.")],
    format: Annotated[
        str | None,
        typer.Option(
            "--format", help="bundle, json, csv, parquet, markdown or openmetrics; default: by the file's suffix."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    db: Db = None,
    json: Json = False,
) -> None:
    """Write runs to a file: a bundle travels and imports without loss; the other formats are for people and tools."""
    from kvbench.store import export as export_rows

    with reading(db) as store:
        written = export_rows(store, selector, file, format, force=force)
    if json:
        emit_json({"schema": EXPORT_SCHEMA, "files": [{"path": str(file), "format": written.format,
                   "runs": written.runs, "rows": written.rows}]})  # fmt: skip
    else:
        emit(f"wrote {written.runs} runs, {written.rows} rows to {printable(str(file))} ({written.format})")


def import_(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Bundles, or what another tool wrote, told by its content.")
    ],
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TOOL",
            help="The tool that wrote FILE: nvbandwidth, nvbench, google-benchmark, pytest-benchmark, stream or mlc.",
        ),
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="It was measured on this machine: the run gets its hardware class.")
    ] = False,
    db: Db = None,
    json: Json = False,
) -> None:
    """Merge bundles and results of other tools into the database; importing one twice changes nothing.

    A file with a bad line changes nothing either. Of a bundle that was cut off what is whole comes in, and a line says
    so; a file of another tool becomes a run of its own under suite `imported`, whole or not at all.
    """
    from kvbench.store import import_bundle, open_store
    from kvbench.store.importers import admit

    machine = _this_machine() if here else None
    # all files before the database: one that is refused leaves no empty database behind
    read = [(file, _read_import(file, from_, machine)) for file in files]
    done = []
    with open_store(db) as store:
        store.check_writable()
        for file, foreign in read:
            if foreign is None:
                counts = import_bundle(store, file)
            else:
                counts = admit(store, foreign, here=machine)
                said = "" if from_ else ", recognised by its content"
                run = foreign.run
                say(f"{printable(str(file))}: {foreign.tool} output{said}; run {run.uuid[:8]} {run.status}")
            done.append((file, foreign, counts))
            say(
                f"{printable(str(file))}: {counts.runs_new} new runs, {counts.runs_known} known; "
                f"{counts.rows_new} new rows, {counts.rows_known} known"
            )
            for notice in (*(foreign.notices if foreign is not None else ()), *counts.notices):
                say(f"kvbench: {printable(notice, 400)}")
    if json:
        document = [
            {"path": str(file), "from": "bundle" if f is None else f.tool, "run": None if f is None else f.run.uuid,
             "runs_new": c.runs_new, "runs_known": c.runs_known, "rows_new": c.rows_new, "rows_known": c.rows_known,
             "notices": [*(f.notices if f is not None else ()), *c.notices]} for file, f, c in done
        ]  # fmt: skip
        emit_json({"schema": IMPORT_SCHEMA, "files": document})
    else:
        emit(f"imported {len(done)} file{'s' if len(done) != 1 else ''} into {store.describe()}")


def _this_machine() -> Fingerprint:
    from kvbench.machine.fingerprint import fingerprint

    return fingerprint()


def _read_import(file: Path, tool: str | None, machine: Fingerprint | None) -> Foreign | None:
    """Return what a file of another tool holds, None for a bundle that was read through. Raises UsageError."""
    from kvbench.store import check_bundle
    from kvbench.store.importers import TOOLS, is_bundle, read_foreign, recognise

    if tool is not None or recognise(file) is not None:
        return read_foreign(file, tool, here=machine)
    try:
        check_bundle(file)
    except UsageError as error:
        if error.mend or is_bundle(file):
            raise
        raise UsageError(
            error.what, where=error.where, got=error.got, expected=error.expected,
            mend=f"if another tool wrote it, say which with --from: {', '.join(TOOLS)}",
        ) from None  # fmt: skip
    if machine is not None:
        raise UsageError(
            "a bundle says itself where it was measured", where=str(file), got="--here",
            mend="--here is for the output of other tools; nothing was imported",
        )  # fmt: skip
    return None


def db(
    action: Annotated[str, typer.Argument(metavar="info|check|upgrade", help="What to do.")] = "info",
    db: Db = None,
    json: Json = False,
) -> None:
    """Say where the database is and what is in it, check its integrity, or bring an older schema up to date."""
    from kvbench.store import admin

    actions = {"info": admin.info, "check": admin.check, "upgrade": admin.upgrade}
    if action not in actions:
        raise UsageError("unknown action", where="kvbench db", got=action, expected="info, check or upgrade")
    facts = actions[action](db)
    if json:
        emit_json({"schema": DB_SCHEMA, "databases": [facts]})
    else:
        emit("\n".join(f"{name}: {value}" for name, value in facts.items()))
    raise typer.Exit(EXIT_OK if facts.get("integrity", "ok") == "ok" else EXIT_NO_DATA)


def _matches(row: Result, word: str) -> bool:
    return word in (row.suite, f"{row.suite}/{row.bench}")
