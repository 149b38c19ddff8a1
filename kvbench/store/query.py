"""Reading: runs as they stand now, their rows, and what a selector means."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, case, distinct, func, select

from kvbench.contract.result import Result, RunInfo, RunStatus
from kvbench.errors import UsageError
from kvbench.store.database import Database
from kvbench.store.labels import MIN_PREFIX
from kvbench.store.liveness import Here
from kvbench.store.rows import result_from_row, run_from_row
from kvbench.store.schema import cases, environments, machines, results, runs, samples

_PREFIX = re.compile(r"[0-9a-f][0-9a-f-]*")
_LATEST = re.compile(r"latest(?:~(?P<back>[0-9]{1,9}))?")
_MAX_LISTED = 5
_PAGE = 50


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run with what the database knows beyond the record. ``info.status`` is the effective status.

    ``stored_status`` is the word last written; ``last_commit_at`` UTC ISO 8601, None before the first case;
    ``done`` counts cases with rows and ``ok`` rows with status ok, canaries left out of both.
    """

    info: RunInfo
    stored_status: RunStatus
    last_commit_at: str | None
    done: int
    ok: int


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run and all its rows in the order they were committed, canaries included."""

    info: RunInfo
    results: tuple[Result, ...]


class Queries:
    """The reading half of a Store."""

    _db: Database
    _here: Here

    def runs(self, *, limit: int | None = None, host: str | None = None, label: str | None = None) -> list[StoredRun]:
        """Return runs, newest first; ``host`` and ``label`` filter exactly."""
        statement = run_rows().order_by(runs.c.started_at.desc(), runs.c.id.desc())
        if host is not None:
            statement = statement.where(runs.c.host == host)
        if label is not None:
            statement = statement.where(runs.c.label == label)
        with self._db.read() as connection:
            return self._stored(connection, statement.limit(limit) if limit is not None else statement)

    def run(self, uuid: str) -> StoredRun:
        """Return the run with exactly this UUID. Raises UsageError when it is not here."""
        with self._db.read() as connection:
            found = self._stored(connection, run_rows().where(runs.c.uuid == uuid))
        if not found:
            raise UsageError("no run has this UUID", where=self._db.target.display, got=uuid)
        return found[0]

    def results(self, run_uuid: str, *, with_samples: bool = False, canaries: bool | None = None) -> list[Result]:
        """Return the rows of a run in the order they were committed; a case's first row is its primary metric.

        ``canaries``: only them (True), without them (False), all (None). Raises UsageError for an unknown run.
        """
        with self._db.read() as connection:
            run_id = connection.scalar(select(runs.c.id).where(runs.c.uuid == run_uuid))
            if run_id is None:
                raise UsageError("no run has this UUID", where=self._db.target.display, got=run_uuid)
            condition = results.c.run_id == run_id
            if canaries is not None:
                condition &= cases.c.suite == "canary" if canaries else cases.c.suite != "canary"
            return results_of(connection, condition, with_samples=with_samples)

    def resolve(self, selector: str, host: str | None = None) -> tuple[RunInfo, ...]:
        """Return the runs ``selector`` names, oldest first: all of one group, or one run.

        A selector is a group or run UUID or a prefix of at least 4 characters, a label, a bundle file, ``latest`` or
        ``latest~N`` (the groups of ``host``, by default this one, that have a row with a value, newest first; a group
        that is still being measured counts as soon as it has one).
        Raises UsageError when nothing or more than one thing matches.
        """
        return tuple(loaded.info for loaded in self._select(selector, host, rows=False, with_samples=False))

    def load(self, selector: str, host: str | None = None, *, with_samples: bool = False) -> tuple[LoadedRun, ...]:
        """Return the runs ``selector`` names with their rows, read in one snapshot. Raises as :meth:`resolve`."""
        return self._select(selector, host, rows=True, with_samples=with_samples)

    def effective_status(self, run: RunInfo) -> RunStatus:
        """Return ``interrupted`` for a ``running`` run of this machine whose process is gone, else its status."""
        return self._here.effective_status(run)

    def _select(self, selector: str, host: str | None, *, rows: bool, with_samples: bool) -> tuple[LoadedRun, ...]:
        where = self._db.target.display
        latest = _LATEST.fullmatch(selector)
        with self._db.read() as connection:
            if latest is not None:
                found = self._latest(connection, int(latest["back"] or 0), host or self._here.host)
                return self._loaded(connection, found, rows, with_samples)
            candidates = self._candidates(connection, selector)
            bundle = _bundle(selector)
            if len(candidates) + (bundle is not None) > 1:
                raise self._ambiguous(connection, selector, candidates, bundle)
            if candidates:
                return self._loaded(connection, next(iter(candidates.values())), rows, with_samples)
        if bundle is not None:
            from kvbench.store.bundle import read_bundle

            return tuple(LoadedRun(run.info, run.results) for run in read_bundle(bundle).runs)
        if _looks_like_path(selector):
            raise UsageError("there is no such bundle file", where=selector, expected="a file `kvbench export` wrote")
        if _PREFIX.fullmatch(selector) and len(selector) < MIN_PREFIX:
            raise UsageError("too short for a UUID prefix", got=selector, expected=f"at least {MIN_PREFIX} characters")
        raise UsageError(
            "no run matches", where=where, got=selector,
            expected="a run or group UUID (prefix), a label, a bundle file, latest or latest~N",
            mend="`kvbench runs` lists them",
        )  # fmt: skip

    def _candidates(self, connection: Connection, selector: str) -> dict[str, tuple[int, ...]]:
        """Return what the selector may mean as name -> run ids; two names for the same runs count once."""
        named: dict[str, list[int]] = {}
        for row in connection.execute(select(runs.c.id, runs.c.group_uuid).where(runs.c.label == selector)):
            named.setdefault(f"label of group {row.group_uuid}", []).append(row.id)
        if len(selector) >= MIN_PREFIX and _PREFIX.fullmatch(selector):
            # the pattern above holds no LIKE wildcard
            pattern = f"{selector}%"
            statement = select(runs.c.id, runs.c.uuid, runs.c.group_uuid)
            for run_id, _, group in connection.execute(statement.where(runs.c.group_uuid.like(pattern))):
                named.setdefault(f"group {group}", []).append(run_id)
            for run_id, uuid, _ in connection.execute(statement.where(runs.c.uuid.like(pattern))):
                named.setdefault(f"run {uuid}", []).append(run_id)
        exact = [name for name in (f"run {selector}", f"group {selector}") if name in named]
        if exact:  # a whole UUID means itself, though a label may repeat it
            named = {name: named[name] for name in exact}
        distinct_runs: dict[tuple[int, ...], str] = {}
        for name, ids in named.items():
            distinct_runs.setdefault(tuple(sorted(ids)), name)
        return {name: ids for ids, name in distinct_runs.items()}

    def _ambiguous(
        self, connection: Connection, selector: str, candidates: Mapping[str, tuple[int, ...]], bundle: Path | None
    ) -> UsageError:
        listed = []
        for name, ids in list(candidates.items())[:_MAX_LISTED]:
            first = connection.execute(
                select(func.min(runs.c.started_at)).where(runs.c.id.in_(ids))
            ).scalar_one()  # fmt: skip
            listed.append(f"{name} ({str(first)[:19]}, {len(ids)} run{'s' if len(ids) > 1 else ''})")
        if len(candidates) > _MAX_LISTED:
            listed.append(f"{len(candidates) - _MAX_LISTED} more")
        if bundle is not None:
            listed.append(f"the file {bundle}")
        return UsageError(
            f"matches {len(candidates) + (bundle is not None)} things: {'; '.join(listed)}",
            got=selector, expected="one group or run", mend="give more of the UUID",
        )  # fmt: skip

    def _latest(self, connection: Connection, back: int, host: str) -> tuple[int, ...]:
        # suspect and tainted rows too: passing over the run of a busy machine would show an older one as the newest
        useful = results.c.status.in_(("ok", "suspect", "tainted")) & results.c.value.is_not(None)
        has_value = (
            select(results.c.id)
            .join(cases, cases.c.id == results.c.case_id)
            .where(results.c.run_id == runs.c.id, useful, cases.c.suite != "canary")
            .exists()
        )
        newest = (
            select(runs.c.group_uuid)
            .where(runs.c.host == host, has_value)
            .order_by(runs.c.started_at.desc(), runs.c.id.desc())
        )
        # from the newest run down the index and no further than needed: a host may have thousands of runs
        groups: dict[str, None] = {}
        read = 0
        while len(groups) <= back:
            page = connection.execute(newest.offset(read).limit(_PAGE)).scalars().all()
            groups |= dict.fromkeys(page)
            read += len(page)
            if len(page) < _PAGE:
                break
        found = next(itertools.islice(groups, back, None), None)
        if found is None:
            count = len(groups)
            have = "group of this host has" if count == 1 else "groups of this host have"
            raise UsageError(
                f"{count} {have} a row with a value", where=self._db.target.display,
                got=f"latest~{back}" if back else "latest", expected=f"at most latest~{count - 1}" if count else "",
                mend="`kvbench runs` lists all" if count else "`kvbench run` makes one",
            )  # fmt: skip
        ids = connection.execute(select(runs.c.id).where(runs.c.group_uuid == found, runs.c.host == host))
        return tuple(ids.scalars())

    def _loaded(
        self, connection: Connection, ids: Sequence[int], rows: bool, with_samples: bool
    ) -> tuple[LoadedRun, ...]:
        statement = run_rows().where(runs.c.id.in_(ids)).order_by(runs.c.started_at, runs.c.id)
        out = []
        for row in connection.execute(statement).mappings().all():
            info = self._info(dict(row))
            found = results_of(connection, results.c.run_id == row["id"], with_samples=with_samples) if rows else []
            out.append(LoadedRun(info, tuple(found)))
        return tuple(out)

    def _info(self, row: Mapping[str, Any]) -> RunInfo:
        info = run_from_row(row, row["status"])
        status = self._here.effective_status(info)
        return info if status == info.status else replace(info, status=status)

    def _stored(self, connection: Connection, statement: Select[Any]) -> list[StoredRun]:
        found = connection.execute(statement).mappings().all()
        counts: dict[int, tuple[int, int]] = {}
        ids = [row["id"] for row in found]
        for start in range(0, len(ids), 500):  # SQLite takes 32,766 parameters, older ones 999
            counted = (
                select(
                    results.c.run_id, func.count(distinct(results.c.case_id)),
                    func.sum(case((results.c.status == "ok", 1), else_=0)),
                )
                .join(cases, cases.c.id == results.c.case_id)
                .where(results.c.run_id.in_(ids[start : start + 500]), cases.c.suite != "canary")
                .group_by(results.c.run_id)
            )  # fmt: skip
            counts |= {run_id: (done, ok) for run_id, done, ok in connection.execute(counted)}
        return [
            StoredRun(self._info(dict(row)), row["status"], row["last_commit_at"], *counts.get(row["id"], (0, 0)))
            for row in found
        ]


def run_rows() -> Select[Any]:
    return (
        select(
            runs, machines.c.hw_class, machines.c.facts.label("machine_facts"), environments.c.env_digest,
            environments.c.facts.label("env_facts"),
        )
        .join(machines, machines.c.id == runs.c.machine_id)
        .join(environments, environments.c.id == runs.c.environment_id)
    )  # fmt: skip


def stored_rows(
    connection: Connection, condition: ColumnElement[bool], *, with_samples: bool
) -> Iterator[dict[str, Any]]:
    """Yield result rows joined with their case (and samples) in the order they were committed."""
    columns: list[Any] = [
        results, cases.c.digest, cases.c.suite, cases.c.bench, cases.c.bench_version, cases.c.axes.label("case_axes")
    ]  # fmt: skip
    joined = results.join(cases, cases.c.id == results.c.case_id)
    if with_samples:
        columns += [samples.c.codec, samples.c.data]
        joined = joined.outerjoin(samples, samples.c.result_id == results.c.id)
    # ids grow with every commit of a run; positions start again at 0 when a run is resumed
    statement = select(*columns).select_from(joined).where(condition).order_by(results.c.id)
    for row in connection.execute(statement).mappings():
        yield dict(row)


def results_of(connection: Connection, condition: ColumnElement[bool], *, with_samples: bool) -> list[Result]:
    """Return the results that ``condition`` picks, in the order they were committed."""
    return [result_from_row(row) for row in stored_rows(connection, condition, with_samples=with_samples)]


def _bundle(selector: str) -> Path | None:
    """Return the file ``selector`` names, None when it names none (or is no name a file system takes)."""
    with contextlib.suppress(OSError, ValueError):
        return Path(selector) if selector and Path(selector).is_file() else None
    return None


def _looks_like_path(selector: str) -> bool:
    return "/" in selector or selector.endswith((".jsonl", ".json", ".bundle"))
