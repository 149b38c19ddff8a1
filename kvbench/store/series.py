"""Reading across runs: two runs side by side, and one case over time. Narrow rows, no samples, indexed at any size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Text, cast, select

from kvbench.contract.result import Basis, Better, Scalar, Status
from kvbench.errors import UsageError
from kvbench.store.database import Database
from kvbench.store.schema import cases, environments, machines, results, runs


@dataclass(frozen=True, slots=True)
class Figure:
    """What one run found for one case and metric. ``value``, ``low``, ``high`` in ``unit`` (SI); None: no value."""

    value: float | None
    low: float | None
    high: float | None
    unit: str
    better: Better
    n: int
    status: Status
    reason: str
    basis: Basis
    kernel: str | None
    transport: str | None
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A case and metric in two runs. ``a`` or ``b`` is None where that run has no row for it, never both.

    The digest makes them the same case; that units agree, and that both are measured, is for the caller to look at.
    ``axes`` are those stored with the case first: an axis added later may be absent at its default.
    """

    digest: str
    suite: str
    bench: str
    bench_version: int
    axes: Mapping[str, Scalar]
    metric: str
    a: Figure | None
    b: Figure | None


@dataclass(frozen=True, slots=True)
class Point:
    """One run's figure in the history of a case. ``started_at`` is UTC ISO 8601; ``env_digest`` tells changes apart."""

    run: str
    group: str
    label: str | None
    started_at: str
    host: str
    env_digest: str
    git: str | None
    profile: str
    resumed: bool
    figure: Figure


_FIGURE = (
    results.c.value, results.c.low, results.c.high, results.c.unit, results.c.better, results.c.n, results.c.status,
    results.c.reason, results.c.basis, results.c.kernel, results.c.transport,
    cast(results.c.flags, Text),  # as text: nearly all are [], and a decoder run a row is half the cost of a comparison
)  # fmt: skip


def _figure(values: Sequence[Any]) -> Figure:
    flags = () if values[-1] == "[]" else tuple(json.loads(values[-1]))
    return Figure(*(*values[:-1], flags))


class Series:
    """The part of a Store that reads across runs."""

    _db: Database

    def pairs(self, a: str, b: str, *, canaries: bool | None = False) -> list[Pair]:
        """Return every case and metric of the runs with UUIDs ``a`` and ``b``, matched by case digest and metric.

        In the order of run ``a``, then what only ``b`` has. ``canaries``: only them (True), without them (False), all
        (None). Raises UsageError when a run is not here. Reads one snapshot.
        """
        with self._db.read() as connection:
            ids = {}
            for uuid in (a, b):
                ids[uuid] = connection.scalar(select(runs.c.id).where(runs.c.uuid == uuid))
                if ids[uuid] is None:
                    raise UsageError("no run has this UUID", where=self._db.target.display, got=uuid)
            # cases apart from results: each is decoded once, not once a row
            wanted = select(results.c.case_id).where(results.c.run_id.in_(ids.values()))
            named = select(
                cases.c.id, cases.c.digest, cases.c.suite, cases.c.bench, cases.c.bench_version, cases.c.axes
            ).where(cases.c.id.in_(wanted))
            if canaries is not None:
                named = named.where(cases.c.suite == "canary" if canaries else cases.c.suite != "canary")
            known = {row[0]: row[1:] for row in connection.execute(named).all()}
            sides: list[dict[tuple[int, str], Figure]] = []
            for uuid in (a, b):
                rows = connection.execute(
                    select(results.c.case_id, results.c.metric, *_FIGURE)
                    .where(results.c.run_id == ids[uuid]).order_by(results.c.id)
                ).all()  # fmt: skip
                sides.append({(row[0], row[1]): _figure(row[2:]) for row in rows if row[0] in known})
        first, second = sides
        return [
            Pair(*known[key[0]], metric=key[1], a=first.get(key), b=second.get(key))
            for key in dict.fromkeys((*first, *second))
        ]

    def history(self, digest: str, metric: str, hw_class: str, *, limit: int | None = None) -> list[Point]:
        """Return the figures of one case and metric on one hardware class, oldest run first; ``limit``: the newest.

        Measured rows only, whatever their status: a tainted or failed one is a point without weight, not a gap.
        A case or hardware class that is not here has no history: an empty list.
        """
        # The runs of the hardware first: joined the plain way, SQLite reads the case's rows of all other machines too.
        there = select(runs.c.id).join(machines, machines.c.id == runs.c.machine_id)
        case_id = select(cases.c.id).where(cases.c.digest == digest).scalar_subquery()
        statement = (
            select(
                runs.c.uuid, runs.c.group_uuid, runs.c.label, runs.c.started_at, runs.c.host,
                environments.c.env_digest, runs.c.git, runs.c.profile, runs.c.resumed, *_FIGURE,
            )
            .join(runs, runs.c.id == results.c.run_id)
            .join(environments, environments.c.id == runs.c.environment_id)
            .where(
                results.c.case_id == case_id, results.c.run_id.in_(there.where(machines.c.hw_class == hw_class)),
                results.c.metric == metric, results.c.basis == "measured",
            )
            .order_by(runs.c.started_at.desc(), runs.c.id.desc())
            .limit(limit)
        )  # fmt: skip
        with self._db.read() as connection:
            found = [Point(*row[:9], figure=_figure(row[9:])) for row in connection.execute(statement).all()]
        return found[::-1]
