"""What is decided about results and kept beside them: calibrations of the gate, and notes that accept a new level."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import literal, or_, select

from kvbench.contract.result import Scalar
from kvbench.errors import UsageError
from kvbench.store.database import Database
from kvbench.store.labels import storable
from kvbench.store.schema import calibrations, cases, environments, machines, notes, results, runs
from kvbench.store.write import now

MAX_NOTE = 2_000


@dataclass(frozen=True, slots=True)
class Calibration:
    """A/A noise of one case and metric: ``run_sd`` is the relative standard deviation of ``runs`` run medians, and
    ``margin`` the least relative effect the gate may flag. ``env`` are the environment's facts, as stored."""

    digest: str
    metric: str
    hw_class: str
    env_digest: str
    created_at: str
    runs: int
    run_sd: float
    margin: float
    env: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Note:
    """``text`` about a run, a case, or hardware. With both a run and a case: the level from that run on is accepted."""

    uuid: str
    created_at: str
    hw_class: str | None
    run_uuid: str | None
    case_digest: str | None
    text: str


@dataclass(frozen=True, slots=True)
class KnownCase:
    """A case some run of this database has rows for."""

    digest: str
    suite: str
    bench: str
    bench_version: int
    axes: Mapping[str, Scalar]


class Decisions:
    """The part of a Store that keeps decisions."""

    _db: Database

    def add_calibrations(self, found: Sequence[Calibration]) -> str:
        """Store calibrations taken together; their cases must have rows here. Returns when. Raises UsageError."""
        at = now()
        with self._db.write() as connection:
            digests = {each.digest for each in found}
            known = select(cases.c.digest, cases.c.id).where(cases.c.digest.in_(digests))
            ids = {row.digest: row.id for row in connection.execute(known)}
            for each in found:
                if each.digest not in ids:
                    raise UsageError("this case is not in the database", where=self._db.target.display, got=each.digest)
                connection.execute(
                    calibrations.insert().values(
                        uuid=str(uuid.uuid4()), created_at=at, hw_class=storable(each.hw_class),
                        env_digest=storable(each.env_digest), case_id=ids[each.digest], metric=storable(each.metric),
                        runs=each.runs, run_sd=each.run_sd, margin=each.margin,
                    )
                )  # fmt: skip
        return at

    def calibrations(self, hw_class: str) -> dict[tuple[str, str], Calibration]:
        """Return the newest calibration of every (case digest, metric) on ``hw_class``."""
        columns = (
            cases.c.digest, calibrations.c.metric, calibrations.c.hw_class, calibrations.c.env_digest,
            calibrations.c.created_at, calibrations.c.runs, calibrations.c.run_sd, calibrations.c.margin,
        )  # fmt: skip
        statement = (
            select(*columns).join(cases, cases.c.id == calibrations.c.case_id)
            .where(calibrations.c.hw_class == hw_class).order_by(calibrations.c.created_at, calibrations.c.id)
        )  # fmt: skip
        with self._db.read() as connection:
            rows = connection.execute(statement).all()
            digests = {row.env_digest for row in rows}
            facts: dict[str, Mapping[str, Any]] = {
                row.env_digest: row.facts for row in connection.execute(
                    select(environments.c.env_digest, environments.c.facts)
                    .where(environments.c.env_digest.in_(digests)).order_by(environments.c.id)
                )
            }  # fmt: skip
        return {(row.digest, row.metric): Calibration(*row, env=facts.get(row.env_digest, {})) for row in rows}

    def annotate(
        self, text: str, *, hw_class: str | None = None, run_uuid: str | None = None, case_digest: str | None = None
    ) -> Note:
        """Store a note. Raises UsageError for an empty or overlong text and for a run that is not here."""
        text = text.strip()
        if not text or len(text) > MAX_NOTE:
            raise UsageError("a note", where="--text", got=f"{len(text)} characters", expected=f"1..{MAX_NOTE}")
        note = Note(str(uuid.uuid4()), now(), hw_class, run_uuid, case_digest, text)
        with self._db.write() as connection:
            if run_uuid is not None and connection.scalar(select(runs.c.id).where(runs.c.uuid == run_uuid)) is None:
                raise UsageError("no run has this UUID", where=self._db.target.display, got=run_uuid)
            connection.execute(
                notes.insert().values(
                    uuid=note.uuid, created_at=note.created_at, hw_class=hw_class, run_uuid=run_uuid,
                    case_digest=case_digest, text=storable(text),
                )
            )  # fmt: skip
        return note

    def annotations(self, *, hw_class: str, case_digest: str | None = None) -> list[Note]:
        """Return the notes about a case (None: about any) on some hardware, and those about the hardware or all,
        oldest first."""
        statement = (
            select(
                notes.c.uuid, notes.c.created_at, notes.c.hw_class, notes.c.run_uuid, notes.c.case_digest, notes.c.text
            )
            .where(
                or_(notes.c.case_digest == case_digest, notes.c.case_digest.is_(None), literal(case_digest is None)),
                or_(notes.c.hw_class == hw_class, notes.c.hw_class.is_(None)),
            )
            .order_by(notes.c.created_at, notes.c.id)
        )
        with self._db.read() as connection:
            return [Note(*row) for row in connection.execute(statement).all()]

    def known_cases(self, *, suite: str | None = None, bench: str | None = None, digest: str = "") -> list[KnownCase]:
        """Return the cases of a suite or bench, or those whose digest begins with ``digest``."""
        statement = select(cases.c.digest, cases.c.suite, cases.c.bench, cases.c.bench_version, cases.c.axes).order_by(
            cases.c.suite, cases.c.bench, cases.c.id
        )
        for column, value in ((cases.c.suite, suite), (cases.c.bench, bench)):
            if value is not None:
                statement = statement.where(column == value)
        if digest:
            statement = statement.where(cases.c.digest.like(f"{digest}%"))
        with self._db.read() as connection:
            return [KnownCase(*row) for row in connection.execute(statement).all()]

    def series_keys(self, digest: str) -> list[tuple[str, str]]:
        """Return (metric, hw_class) of everything measured for a case, the primary metric first."""
        statement = (
            select(results.c.metric, machines.c.hw_class, results.c.ordinal)
            .join(cases, cases.c.id == results.c.case_id).join(runs, runs.c.id == results.c.run_id)
            .join(machines, machines.c.id == runs.c.machine_id)
            .where(cases.c.digest == digest, results.c.basis == "measured").distinct()
        )  # fmt: skip
        with self._db.read() as connection:
            rows = connection.execute(statement).all()
        ordered = sorted(rows, key=lambda row: (row.hw_class, row.ordinal))
        return list(dict.fromkeys((row.metric, row.hw_class) for row in ordered))
