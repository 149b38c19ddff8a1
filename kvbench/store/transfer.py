"""Moves runs between a database and bundle files."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import Connection, distinct, func, select, update

from kvbench.errors import StoreError, UsageError
from kvbench.store.bundle import (
    BrokenTail,
    BundleWriter,
    CaseLine,
    Declared,
    EndLine,
    RunLine,
    check_bundle,
    describe_standing,
    describe_tail,
    iter_bundle,
)
from kvbench.store.course import later_of
from kvbench.store.engine import Store
from kvbench.store.labels import storable, usable_label
from kvbench.store.newfile import new_file
from kvbench.store.query import results_of, run_rows, stored_rows
from kvbench.store.rows import result_from_row, run_from_row
from kvbench.store.schema import cases, results, runs
from kvbench.store.write import insert_case, insert_run, locked_run

_IMPORT_LOCK = 0x6B76_6266  # pg_advisory_xact_lock key; engine.py uses the one before it


@dataclass(frozen=True, slots=True)
class ImportCounts:
    """What an import found: runs, cases and rows that are new here or were known; ``notices`` are for the user."""

    runs_new: int = 0
    runs_known: int = 0
    cases_new: int = 0
    cases_known: int = 0
    rows_new: int = 0
    rows_known: int = 0
    notices: tuple[str, ...] = ()


def import_bundle(store: Store, path: str | Path) -> ImportCounts:
    """Bring all runs of a bundle into ``store``: all of the file or nothing. Importing again changes nothing.

    A run that was unfinished when it was imported before gets its new cases and its end. The status of a run follows
    from its rows: what the file says of a run whose cases are not all there is not believed. Of a file that was cut off
    the whole lines come in. Raises UsageError for a file that is not a bundle, and for one whose run, case or row is
    here with other content.
    """
    path = Path(path)
    check_bundle(path)  # the whole file, before the database is locked for writing
    try:
        return store.database.transact(lambda connection: _import(connection, path))
    except StoreError as error:
        if error.where:  # the database's own failure, not the file's
            raise
        raise UsageError(
            error.what, where=str(path), got=error.got, expected=error.expected, mend="nothing was imported"
        ) from None


def _import(connection: Connection, path: Path) -> ImportCounts:
    if connection.dialect.name == "postgresql":
        # one import at a time, as in SQLite: two files with the same cases in another order would wait for each other
        connection.execute(select(func.pg_advisory_xact_lock(_IMPORT_LOCK)))
    counts = ImportCounts()
    ids: dict[str, int] = {}
    declared: dict[str, Declared] = {}
    grown: set[str] = set()
    for line in iter_bundle(path):
        match line:
            case RunLine(run):
                ids[run.uuid], new = insert_run(connection, replace(run, status="running", finished_at=None))
                declared[run.uuid] = Declared(run)
                counts = replace(counts, runs_new=counts.runs_new + new, runs_known=counts.runs_known + (not new))
            case CaseLine():
                before = counts.rows_new
                counts = _import_case(connection, ids[line.run], line, counts)
                if counts.rows_new > before:
                    grown.add(line.run)
            case EndLine():
                declared[line.run] = declared[line.run].ended_by(line)
            case BrokenTail():
                counts = replace(counts, notices=(*counts.notices, describe_tail(path, line)))
    for uuid, said in declared.items():
        notices = _import_end(connection, path, said, grew=uuid in grown)
        counts = replace(counts, notices=(*counts.notices, *notices))
    return counts


def _import_case(connection: Connection, run_id: int, line: CaseLine, counts: ImportCounts) -> ImportCounts:
    new = insert_case(connection, run_id, line.results, line.position, line.at)
    known = len(line.results) - new
    if known:
        digest = line.results[0].digest
        condition = (results.c.run_id == run_id) & (cases.c.digest == digest)
        stored = {row.metric: row for row in results_of(connection, condition, with_samples=True)}
        for row in line.results:
            here = stored[storable(row.metric)]
            wanted = row if here.samples else row.with_(samples=())  # samples may have been pruned here
            if storable(here.to_wire()) != storable(wanted.to_wire()):
                raise StoreError(
                    f"the row {row.suite}/{row.bench} {row.metric} is here with other content",
                    got=f"value {row.value}", expected=f"value {here.value}",
                )  # fmt: skip
    return replace(
        counts, rows_new=counts.rows_new + new, rows_known=counts.rows_known + known,
        cases_new=counts.cases_new + (not known), cases_known=counts.cases_known + bool(known),
    )  # fmt: skip


def _import_end(connection: Connection, path: Path, said: Declared, *, grew: bool) -> list[str]:
    """Write how the run stands with all its rows here; return what the user should know."""
    found = locked_run(connection, said.info.uuid)
    assert found is not None
    _check_places(connection, found["id"], said.info.uuid)
    rows = connection.execute(
        select(cases.c.digest, results.c.status)
        .join(cases, cases.c.id == results.c.case_id)
        .where(results.c.run_id == found["id"], cases.c.suite != "canary")
    )
    stands = said.standing((row.digest, row.status) for row in rows)
    here, there = _end_of(connection, found["id"]), said.info.finished_at
    # the later end holds: a run may have been resumed after the first file was written; the same end may have come
    # with fewer rows before
    later = there is not None and (here is None or here < there or (here == there and grew))
    if said.info.status != "running" and (found["status"] == "running" or later):
        values = {"status": stands.status, "finished_at": there}
        connection.execute(update(runs).where(runs.c.id == found["id"]).values(**values))
    return describe_standing(path, said, stands)


def _end_of(connection: Connection, run_id: int) -> str | None:
    """Return when a run ended as a file may say it: not before its own beginning and its last case.

    A clock that was set back while it ran wrote such an end; the database keeps it.
    """
    times = select(runs.c.started_at, runs.c.last_commit_at, runs.c.finished_at).where(runs.c.id == run_id)
    started, last, finished = connection.execute(times).one()
    return None if finished is None else later_of(started, later_of(last or started, finished))


def _check_places(connection: Connection, run_id: int, uuid: str) -> None:
    """Raise StoreError where a case came to a place of the run that another case has here."""
    places = select(results.c.position).where(results.c.run_id == run_id).group_by(results.c.position)
    twice = connection.scalar(places.having(func.count(distinct(results.c.case_id)) > 1).limit(1))
    if twice is not None:
        raise StoreError(
            f"another case is here at position {twice} of this run", got=uuid, expected="one case a position"
        )


def export_bundle(store: Store, selector: str, path: str | Path, *, force: bool = False) -> tuple[int, int]:
    """Write the runs ``selector`` names, samples included, to a bundle file; return how many runs and rows.

    The file appears whole or not at all. Raises UsageError for the selector, or a file that is there already (unless
    ``force``).
    """
    chosen = [run.uuid for run in store.resolve(selector)]
    rows = 0
    with (
        new_file(path, force=force) as temporary,
        BundleWriter(temporary, sync_lines=False) as writer,
        store.database.read() as connection,
    ):
        for uuid in chosen:
            rows += _export_run(connection, writer, uuid)
    return len(chosen), rows


def _export_run(connection: Connection, writer: BundleWriter, uuid: str) -> int:
    found = connection.execute(run_rows().where(runs.c.uuid == uuid)).mappings().one_or_none()
    if found is None:
        raise UsageError("the run is in a bundle already", got=uuid, mend="copy that file")
    info = run_from_row(dict(found), found["status"])  # as stored: only this host can say that its process is gone
    info = replace(info, label=usable_label(info.label))
    info = replace(info, finished_at=_end_of(connection, found["id"]))
    writer.begin_run(info)
    written = 0
    rows = stored_rows(connection, results.c.run_id == found["id"], with_samples=True)
    for (_, position, at), group in itertools.groupby(
        rows, key=lambda row: (row["digest"], row["position"], row["committed_at"])
    ):
        case = [result_from_row(row) for row in group]
        try:
            writer.add_results(uuid, case, position, committed_at=at)
        except ValueError as error:  # from before a rule refused it; a file with it could not be imported
            row = case[0]
            raise UsageError(
                f"a row of {row.suite}/{row.bench} contradicts itself: {error}", where=f"run {uuid}",
                mend="`kvbench show` and `kvbench export --format csv` still give it; export other runs",
            ) from None  # fmt: skip
        written += len(case)
    if info.status != "running" and info.finished_at is not None:
        writer.finish_run(uuid, info.status, info.finished_at)
    return written
