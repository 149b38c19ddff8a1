"""What was found about the papers' claims, kept beside the results; and the rows such a check reads."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from kvbench import __version__
from kvbench.store.database import Database
from kvbench.store.labels import storable
from kvbench.store.query import LoadedRun, run_rows, stored_rows
from kvbench.store.rows import result_from_row, run_from_row
from kvbench.store.schema import cases, claim_checks, machines, results, runs
from kvbench.store.write import now

NEWEST = 64  # rows of a case and metric that are read, of each status: more runs than a group has
_CHUNK = 500  # older SQLite takes 999 parameters


@dataclass(frozen=True, slots=True)
class ClaimCheck:
    """One verdict on a claim. ``value``, ``low``, ``high`` are in ``unit``; ``basis`` that of the rows behind it.

    ``group`` is the group of the newest run it was judged on, ``detail`` what the paper says and what was found.
    """

    claim: str
    checked_at: str
    group: str | None
    verdict: str
    basis: str | None
    value: float | None
    low: float | None
    high: float | None
    unit: str | None
    detail: Mapping[str, Any]
    kvbench_version: str = __version__


class Checks:
    """The part of a Store that keeps checks of claims."""

    _db: Database

    def add_claim_checks(self, found: Sequence[ClaimCheck]) -> int:
        """Store checks whose outcome differs from the newest one of the same claim; return how many that are.

        The same check on the same runs, made again, is nothing new.
        """
        if not found:
            return 0
        newest = {(each.claim, each.detail.get("hw_class")): each for each in reversed(self.claim_checks())}
        fresh = [each for each in found if not _same(each, newest.get((each.claim, each.detail.get("hw_class"))))]
        if not fresh:
            return 0
        with self._db.write() as connection:
            for each in fresh:
                connection.execute(
                    claim_checks.insert().values(
                        uuid=str(uuid.uuid4()), claim=storable(each.claim), checked_at=each.checked_at or now(),
                        group_uuid=each.group, verdict=each.verdict, basis=each.basis, value=each.value, low=each.low,
                        high=each.high, unit=each.unit, detail=storable(dict(each.detail)),
                        kvbench_version=each.kvbench_version,
                    )
                )  # fmt: skip
        return len(fresh)

    def claim_checks(self, claim: str | None = None) -> list[ClaimCheck]:
        """Return the checks of ``claim``, or of all, newest first."""
        statement = select(
            claim_checks.c.claim, claim_checks.c.checked_at, claim_checks.c.group_uuid, claim_checks.c.verdict,
            claim_checks.c.basis, claim_checks.c.value, claim_checks.c.low, claim_checks.c.high, claim_checks.c.unit,
            claim_checks.c.detail, claim_checks.c.kvbench_version,
        ).order_by(claim_checks.c.checked_at.desc(), claim_checks.c.id.desc())  # fmt: skip
        if claim is not None:
            statement = statement.where(claim_checks.c.claim == claim)
        with self._db.read() as connection:
            return [ClaimCheck(*row) for row in connection.execute(statement).all()]

    def rows_of_cases(self, digests: Sequence[str], hw_class: str) -> list[LoadedRun]:
        """Return the newest rows of the cases ``digests`` on ``hw_class``, by run, oldest run first; one snapshot.

        At most NEWEST rows of each case, metric and status: a check wants the newest and nothing before.
        """
        rows: dict[int, list[dict[str, Any]]] = {}
        with self._db.read() as connection:
            for start in range(0, len(digests), _CHUNK):
                rank = func.row_number().over(
                    partition_by=(results.c.case_id, results.c.metric, results.c.status),
                    order_by=(runs.c.started_at.desc(), runs.c.id.desc()),
                )
                ranked = (
                    select(results.c.id, rank.label("rank")).join(cases, cases.c.id == results.c.case_id)
                    .join(runs, runs.c.id == results.c.run_id).join(machines, machines.c.id == runs.c.machine_id)
                    .where(cases.c.digest.in_(digests[start : start + _CHUNK]), machines.c.hw_class == hw_class)
                    .subquery()
                )  # fmt: skip
                wanted = results.c.id.in_(select(ranked.c.id).where(ranked.c.rank <= NEWEST))
                for row in stored_rows(connection, wanted, with_samples=False):
                    rows.setdefault(row["run_id"], []).append(row)
            infos: dict[int, Any] = {}
            ids = list(rows)
            for start in range(0, len(ids), _CHUNK):
                chosen = run_rows().where(runs.c.id.in_(ids[start : start + _CHUNK]))
                infos |= {row["id"]: dict(row) for row in connection.execute(chosen).mappings()}
        found = [
            LoadedRun(run_from_row(infos[run_id], infos[run_id]["status"]), tuple(map(result_from_row, rows[run_id])))
            for run_id in ids
        ]
        return sorted(found, key=lambda run: (run.info.started_at, run.info.uuid))


def _same(one: ClaimCheck, other: ClaimCheck | None) -> bool:
    return other is not None and (one.verdict, one.group, one.value, one.basis, one.kvbench_version) == (
        other.verdict, other.group, other.value, other.basis, other.kvbench_version
    )  # fmt: skip
