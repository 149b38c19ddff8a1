"""Writing: a run, its cases one by one, its end. Every call is one transaction and may be repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, RowMapping, Table, select, update
from sqlalchemy.dialects import postgresql, sqlite

from kvbench.contract.result import RUN_STATUSES, Result, RunInfo, RunStatus
from kvbench.errors import StoreError, UsageError
from kvbench.store.database import Database
from kvbench.store.labels import check_label, check_no_uuid, storable
from kvbench.store.liveness import Here
from kvbench.store.rows import digest_of, encode_samples, result_values, run_values
from kvbench.store.schema import SAMPLES_CODEC, cases, environments, machines, results, runs, samples
from kvbench.store.wire import check_case, check_row, check_run, check_time


def now() -> str:
    """Return the time as UTC ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class Writes:
    """The writing half of a Store."""

    _db: Database
    _here: Here

    def begin_run(self, run: RunInfo) -> None:
        """Insert ``run`` with its machine and environment. A resumed run that is here already goes on under its UUID.

        Raises ValueError for a malformed record, UsageError for a label that reads as a UUID, StoreError when the UUID
        belongs to another run.
        """
        check_run(run.to_wire())
        if run.label is not None and not run.resumed:  # a run that is here may have got its label before this check
            check_no_uuid(run.label)

        def work(connection: Connection) -> None:
            run_id, new = insert_run(connection, run)
            if not new and run.resumed:
                _reopen(connection, run_id, run)

        self._db.transact(work)

    def reopen_run(self, run: RunInfo) -> None:
        """Let the process in ``run`` go on with a run that is here: status ``running``, flagged ``resumed``.

        Raises StoreError when it is not here, has ended, or differs in anything a resume may not change.
        """
        check_run(run.to_wire())
        with self._db.write() as connection:
            if locked_run(connection, run.uuid) is None:
                raise StoreError("the run to resume is not in this database", where=self._where, got=run.uuid)
            run_id, _ = insert_run(connection, run)
            _reopen(connection, run_id, run)

    def mark_interrupted(self) -> tuple[str, ...]:
        """Write ``interrupted`` into every ``running`` run of this host whose process is gone; return their UUIDs.

        When they ended is not known and stays NULL.
        """
        with self._db.write() as connection:
            found = connection.execute(
                select(runs.c.id, runs.c.uuid, runs.c.boot_id, runs.c.pid, runs.c.pid_start).where(
                    runs.c.status == "running", runs.c.host == self._here.host, runs.c.boot_id != ""
                )
            ).all()
            gone = [row for row in found if not self._here.alive(row.boot_id, row.pid, row.pid_start)]
            for row in gone:
                connection.execute(update(runs).where(runs.c.id == row.id).values(status="interrupted"))
        return tuple(row.uuid for row in gone)

    def add_results(self, run_uuid: str, results: Sequence[Result], position: int) -> None:
        """Commit the rows of one case with their samples: all of them are durable on return, or none is visible.

        ``position`` is the case's place in the order of the run. Rows already there (run, digest, metric) stay.
        Raises ValueError for rows that are no case or hold what JSON cannot say, StoreError for an unknown or
        finished run and when the database fails.
        """
        for row in results:
            check_row(row)
        check_case(results)
        at = now()

        def work(connection: Connection) -> None:
            found = locked_run(connection, run_uuid)
            if found is None:
                raise StoreError("rows for a run that is not in this database", where=self._where, got=run_uuid)
            status = found["status"]
            if status not in ("running", "interrupted"):
                raise StoreError(f"rows for a run that has ended {status}", where=self._where, got=run_uuid)
            insert_case(connection, found["id"], results, position, at)

        self._db.transact(work)

    def finish_run(self, run_uuid: str, status: RunStatus, finished_at: str) -> None:
        """Write how the run ended. Raises StoreError for an unknown run or one that ended otherwise before."""
        if status not in RUN_STATUSES or status == "running":
            raise ValueError(f"a run cannot end {status!r}")
        check_time(finished_at, "finished_at")
        with self._db.write() as connection:
            found = locked_run(connection, run_uuid)
            if found is None:
                raise StoreError("the end of a run that is not in this database", where=self._where, got=run_uuid)
            before = found["status"]
            if before == status:
                return
            if before not in ("running", "interrupted"):
                raise StoreError(f"the run has ended {before} before", where=self._where, got=status)
            ended = update(runs).where(runs.c.id == found["id"])
            connection.execute(ended.values(status=status, finished_at=finished_at))

    def set_label(self, uuid: str, label: str | None) -> int:
        """Label the run, or every run of the group, ``uuid``; return how many. Raises UsageError if there is none."""
        if label is not None:
            check_label(label)
        with self._db.write() as connection:
            matching = (runs.c.uuid == uuid) | (runs.c.group_uuid == uuid)
            done = connection.execute(update(runs).where(matching).values(label=label)).rowcount
        if not done:
            raise UsageError("no run has this UUID", where=self._where, got=uuid)
        return done

    @property
    def _where(self) -> str:
        return self._db.target.display


def locked_run(connection: Connection, uuid: str) -> RowMapping | None:
    """Return id, status and finished_at of a run, kept from other writers until the end of the transaction.

    SQLite has one writer at a time and no such clause; PostgreSQL would let two writers decide on the same old status.
    """
    statement = select(runs.c.id, runs.c.status, runs.c.finished_at).where(runs.c.uuid == uuid).with_for_update()
    return connection.execute(statement).mappings().first()


def _reopen(connection: Connection, run_id: int, run: RunInfo) -> None:
    status = connection.scalar(select(runs.c.status).where(runs.c.id == run_id))
    if status not in ("running", "interrupted"):
        raise StoreError(f"the run to resume has ended {status}", got=run.uuid)
    values = {"boot_id": run.boot_id, "pid": run.pid, "pid_start": run.pid_start, "flags": list(run.flags)}
    reopened = update(runs).where(runs.c.id == run_id)
    connection.execute(reopened.values(status="running", finished_at=None, resumed=True, **values))


def _insert(connection: Connection, table: Table, values: Mapping[str, Any]) -> int | None:
    """Insert a row unless its key is there; return its id, or None for a row that was there."""
    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = make(table).values(**values).on_conflict_do_nothing().returning(table.c.id)
    found: int | None = connection.execute(statement).scalar_one_or_none()
    return found


def _dimension(connection: Connection, table: Table, values: Mapping[str, Any]) -> int:
    known = select(table.c.id).where(table.c.digest == values["digest"])
    # the look-up first: nearly every row of these tables is there already, and a failed insert burns an id
    found = connection.scalar(known) or _insert(connection, table, values) or connection.scalar(known)
    assert found is not None
    return int(found)


def insert_run(connection: Connection, run: RunInfo, last_commit_at: str | None = None) -> tuple[int, bool]:
    """Insert ``run`` unless its UUID is there; return its id and whether it is new. Raises StoreError for another."""
    machine, env = storable(run.machine), storable(run.env)
    hw_class, env_digest = storable(run.hw_class), storable(run.env_digest)
    machine_id = _dimension(
        connection, machines, {"digest": digest_of(hw_class, machine), "hw_class": hw_class, "facts": machine}
    )
    environment_id = _dimension(
        connection, environments, {"digest": digest_of(env_digest, env), "env_digest": env_digest, "facts": env}
    )
    values = run_values(run) | {"machine_id": machine_id, "environment_id": environment_id}
    new = _insert(connection, runs, values | {"last_commit_at": last_commit_at})
    if new is not None:
        return new, True
    known = connection.execute(select(runs).where(runs.c.uuid == run.uuid)).mappings().one()
    # what changes in the life of a run: its end, its label, and the process that resumed it
    fixed = values.keys() - {"status", "finished_at", "label", "resumed", "flags", "boot_id", "pid", "pid_start"}
    differing = sorted(name for name in fixed if known[name] != values[name])
    if differing:
        raise StoreError("another run has this UUID", got=f"{run.uuid}, differing in {', '.join(differing)}")
    return int(known["id"]), False


def insert_case(connection: Connection, run_id: int, rows: Sequence[Result], position: int, at: str) -> int:
    """Insert the rows of one case and their samples in the caller's transaction; return how many are new.

    Raises StoreError when the digest is known as another case.
    """
    first = rows[0]
    axes = storable(first.axes)
    identity = {"suite": first.suite, "bench": first.bench, "bench_version": first.bench_version}
    identity = storable(identity)
    # few statements, because each is a round trip to a server that may be far away: 5 or 6 a case, whatever its rows
    find = select(cases).where(cases.c.digest == first.digest)
    known: Mapping[Any, Any] | None = connection.execute(find).mappings().one_or_none()
    if known is None:
        made = _insert(connection, cases, {"digest": first.digest, "axes": axes, **identity})
        # None: another writer was first
        known = connection.execute(find).mappings().one() if made is None else {"id": made, "axes": axes, **identity}
    stored_axes: dict[str, Any] = known["axes"]
    # an axis added later is absent from one side at its default; an axis both have must agree
    if any(known[name] != value for name, value in identity.items()) or any(
        axes[name] != stored_axes[name] for name in axes.keys() & stored_axes.keys()
    ):
        raise StoreError(
            "this digest is known as another case", got=f"{first.suite}/{first.bench} {axes}",
            expected=f"{known['suite']}/{known['bench']} {stored_axes}",
        )  # fmt: skip
    place = {"run_id": run_id, "case_id": known["id"], "position": position, "committed_at": at}
    values = [result_values(row, stored_axes) | place | {"ordinal": ordinal} for ordinal, row in enumerate(rows)]
    make = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = make(results).on_conflict_do_nothing().returning(results.c.id, results.c.metric)
    ids = {row.metric: row.id for row in connection.execute(statement, values)}
    aside = [
        {"result_id": ids[value["metric"]], "codec": SAMPLES_CODEC, "data": encode_samples(row.samples)}
        for row, value in zip(rows, values, strict=True) if value["metric"] in ids and row.samples
    ]  # fmt: skip
    if aside:
        # with RETURNING it is one statement of many rows, not one a row
        connection.execute(samples.insert().returning(samples.c.result_id), aside)
    if ids:
        later = (runs.c.last_commit_at.is_(None)) | (runs.c.last_commit_at < at)
        connection.execute(update(runs).where((runs.c.id == run_id) & later).values(last_commit_at=at))
    return len(ids)
