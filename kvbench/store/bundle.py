"""Bundles: JSON Lines files that carry runs between machines. Needs no SQLAlchemy.

One object a line, its ``kind`` says which: ``run`` (schema and the run's record), then one ``case`` a line with all its
rows, samples included, then ``end``. A file may hold several runs one after the other. Every line is on disk before
the call that wrote it returns, so a killed run leaves at most one broken line at the end.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from kvbench.contract.result import RUN_STATUSES, Result, RunInfo, RunStatus
from kvbench.errors import StoreError, UsageError, printable
from kvbench.store.consistent import Standing, standing
from kvbench.store.course import Course, later_of
from kvbench.store.opened import SQLITE_MAGIC, refuse_open_database
from kvbench.store.wire import (
    check_case,
    check_digest,
    check_foreign_run,
    check_result,
    check_row,
    check_run,
    check_time,
)

SCHEMA = "kvbench.bundle/1"
MAX_LINE_BYTES = 64 << 20


class BundleWriter:
    """Writes a new bundle file; a Sink. Raises UsageError when the file cannot be made or holds something already."""

    def __init__(self, path: str | Path, *, sync_lines: bool = True) -> None:
        self.path, self._sync_lines = Path(path), sync_lines
        self._written: set[tuple[str, str, str]] = set()
        self._ended: dict[str, str | None] = {}
        self._courses: dict[str, Course] = {}
        if self.path.is_symlink():
            raise UsageError("this is a symbolic link", where=str(path), mend="give another --bundle")
        refuse_open_database(self.path, "a new file")
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(
                f"the bundle cannot be written ({reason})", where=str(path), mend="give another --bundle"
            ) from None
        info = os.fstat(self._file)
        if not stat.S_ISREG(info.st_mode) or info.st_size:
            os.close(self._file)
            raise UsageError(
                "the bundle is there already" if info.st_size else "this is not a regular file", where=str(path),
                mend="give another --bundle; nothing was changed",
            )  # fmt: skip
        self._size = 0

    def check_writable(self) -> None:
        """Write and sync one byte, and take it back. Raises UsageError when the disk does not take it."""
        try:
            os.pwrite(self._file, b"\n", self._size)
            os.fsync(self._file)
        except OSError as error:
            raise UsageError(f"the bundle cannot be written ({error.strerror})", where=str(self.path)) from None
        finally:
            os.ftruncate(self._file, self._size)

    def begin_run(self, run: RunInfo) -> None:
        """Write the header of ``run``. Raises ValueError for a malformed record, StoreError when the write fails."""
        check_run(run.to_wire())
        if run.uuid in self._ended:
            return
        self._line({"schema": SCHEMA, "kind": "run", "run": run.to_wire()})
        self._ended[run.uuid] = None
        self._courses[run.uuid] = Course(run)

    def add_results(
        self, run_uuid: str, results: Sequence[Result], position: int, *, committed_at: str | None = None
    ) -> None:
        """Write one case; rows already written (run, digest, metric) are left out.

        A time before the run began, of a clock that was set back, is written as its beginning. Raises ValueError for
        rows that are no case of this run, StoreError for an unknown or ended run and when the write fails.
        """
        for row in results:
            check_row(row)
        check_case(results)
        self._check_open(run_uuid)
        keys = {(run_uuid, row.digest, row.metric) for row in results}
        new = [row for row in results if (run_uuid, row.digest, row.metric) not in self._written]
        if new:
            course = self._courses[run_uuid]
            at = committed_at or datetime.now(UTC).isoformat(timespec="microseconds")
            at = later_of(at, course.started)
            course.case(new[0], position, at)
            wire = [row.to_wire() for row in new]
            self._line({"kind": "case", "run": run_uuid, "position": position, "at": at, "results": wire})
            self._written |= keys

    def finish_run(self, run_uuid: str, status: RunStatus, finished_at: str) -> None:
        """Write how the run ended; not before its last case, where a clock was set back meanwhile.

        Raises StoreError for an unknown run, one that ended otherwise, a failed write.
        """
        if status not in RUN_STATUSES or status == "running":
            raise ValueError(f"a run cannot end {status!r}")
        check_time(finished_at, "finished_at")
        if self._ended.get(run_uuid) == status:
            return
        self._check_open(run_uuid)
        finished_at = later_of(finished_at, self._courses[run_uuid].latest)
        self._line({"kind": "end", "run": run_uuid, "status": status, "finished_at": finished_at})
        self._ended[run_uuid] = status

    def close(self) -> None:
        """Close the file; a bundle nothing was written to is removed. May be called twice."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        if not self._size:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_open(self, run_uuid: str) -> None:
        if run_uuid not in self._ended:
            raise StoreError("rows for a run that is not in this bundle", where=str(self.path), got=run_uuid)
        if self._ended[run_uuid] is not None:
            raise StoreError(f"the run has ended {self._ended[run_uuid]}", where=str(self.path), got=run_uuid)

    def _line(self, value: dict[str, Any]) -> None:
        data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
        if len(data) > MAX_LINE_BYTES:
            raise StoreError(
                "a line of the bundle would be too long", where=str(self.path), got=f"{len(data)} B",
                expected=f"at most {MAX_LINE_BYTES} B",
            )  # fmt: skip
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self._size + done)
            if self._sync_lines:
                os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._size)  # half a line would make the file unreadable from here on
            raise StoreError(
                f"the bundle cannot be written ({error.strerror})", where=str(self.path),
                mend="free space; the lines before are kept",
            ) from None  # fmt: skip
        self._size += len(data)


@dataclass(frozen=True, slots=True)
class RunLine:
    """The header of a run."""

    run: RunInfo


@dataclass(frozen=True, slots=True)
class CaseLine:
    """All rows of one case of ``run``; ``at``: when its producer committed it."""

    run: str
    position: int
    at: str
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class EndLine:
    """How ``run`` ended."""

    run: str
    status: RunStatus
    finished_at: str


@dataclass(frozen=True, slots=True)
class BrokenTail:
    """The last line is cut off: its writer was killed. ``number`` counts from 1, ``size`` is what is there of it, B."""

    number: int
    size: int


Line = RunLine | CaseLine | EndLine | BrokenTail


@dataclass(frozen=True, slots=True)
class BundleRun:
    """A run of a bundle with its rows in file order. ``info.status`` follows from them, see ``consistent.standing``."""

    info: RunInfo
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a bundle file holds; ``notices`` are lines the user should see."""

    path: Path
    runs: tuple[BundleRun, ...]
    notices: tuple[str, ...]


def read_bundle(path: str | Path) -> Bundle:
    """Return all runs of a bundle file. Raises UsageError naming file and line for anything that is not one."""
    path = Path(path)
    declared: dict[str, Declared] = {}
    rows: dict[str, list[Result]] = {}
    notices: list[str] = []
    for line in iter_bundle(path):
        match line:
            case RunLine(run):
                declared[run.uuid] = Declared(run)
                rows[run.uuid] = []
            case CaseLine():
                rows[line.run].extend(line.results)
            case EndLine():
                declared[line.run] = declared[line.run].ended_by(line)
            case BrokenTail():
                notices.append(describe_tail(path, line))
    found = []
    for uuid, said in declared.items():
        stands = said.standing((row.digest, row.status) for row in rows[uuid] if not row.is_canary)
        notices += describe_standing(path, said, stands)
        found.append(BundleRun(replace(said.info, status=stands.status), tuple(rows[uuid])))
    return Bundle(path, tuple(found), tuple(notices))


def check_bundle(path: str | Path) -> None:
    """Read a bundle file through, and keep nothing. Raises UsageError naming file and line as :func:`read_bundle`."""
    for _ in iter_bundle(path):
        pass


@dataclass(frozen=True, slots=True)
class Declared:
    """A run as its header says, or its end line where the file has one (``ended``)."""

    info: RunInfo
    ended: bool = False

    def ended_by(self, line: EndLine) -> Declared:
        return Declared(replace(self.info, status=line.status, finished_at=line.finished_at), True)

    def standing(self, rows: Iterable[tuple[str, str]]) -> Standing:
        """Return how the run stands with ``rows`` (digest, status), canaries left out."""
        return standing(self.info.status, {case.digest for case in self.info.plan}, rows)


def describe_tail(path: Path, tail: BrokenTail) -> str:
    """Return the line that tells a user about a cut-off file."""
    return printable(
        f"{path}, line {tail.number}: cut off after {tail.size} B and left out; the lines before are whole", 400
    )


def describe_standing(path: Path, said: Declared, stands: Standing) -> list[str]:
    """Return the line about a run whose file ends before it, or that stands otherwise than the file says; or none."""
    name = f"{path}, run {said.info.uuid[:8]}: "
    if stands.status != said.info.status:
        cut = "" if said.ended else "the file ends before the run, "
        return [printable(f"{name}{cut}{stands.cases()}: {stands.status}, not {said.info.status}", 400)]
    if said.ended or (said.info.status == "interrupted" and said.info.finished_at is None):
        return []  # nobody wrote when that run ended: there is no line to miss
    why = "it was still being measured, or the file is cut off" if said.info.status == "running" else "none is missing"
    return [printable(f"{name}the file ends before the run, {stands.cases()}: {why}", 400)]


def iter_bundle(path: str | Path) -> Iterator[Line]:
    """Yield the checked lines of a bundle in order, one in memory at a time. Raises UsageError naming file and line."""
    path = Path(path)
    reader = _Reader(path)
    refuse_open_database(path, "a bundle file")
    try:
        # O_NONBLOCK: opening a named pipe must not hang
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"the bundle cannot be read ({reason})", where=str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError("this is not a regular file", where=str(path), expected="a bundle file")
    with os.fdopen(descriptor, "rb") as file:
        while True:
            try:
                raw = file.readline(MAX_LINE_BYTES + 1)
            except OSError as error:
                raise UsageError(f"the bundle cannot be read ({error.strerror})", where=str(path)) from None
            if not raw:
                break
            line = reader.line(raw)
            yield line
    if reader.number == 0 or (reader.number == 1 and not reader.runs):
        raise UsageError("the file holds no run", where=str(path), expected=f"a {SCHEMA} header in line 1")


class _Reader:
    """The state a line is checked against: runs seen, ended, and rows per run."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, 0
        self.runs: dict[str, bool] = {}
        self._rows: set[tuple[str, str, str]] = set()
        self._courses: dict[str, Course] = {}
        self._unit: dict[tuple[str, str, int, str], str] = {}
        self._better: dict[tuple[str, str, int, str, str], str] = {}

    def line(self, raw: bytes) -> Line:
        self.number += 1
        if len(raw) > MAX_LINE_BYTES:
            self._fail("the line is too long", expected=f"at most {MAX_LINE_BYTES} B")
        if self.number == 1:
            raw = self._unmarked(raw)
        whole = raw.endswith(b"\n")
        try:
            value = _parse(raw)
        except (ValueError, RecursionError) as error:
            if not whole and self.runs:
                return BrokenTail(self.number, len(raw))
            reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
            self._fail(f"not JSON ({printable(reason, 120)})")
        try:
            return self._checked(value)
        except (KeyError, TypeError, ValueError) as error:
            self._fail(printable(str(error), 300))

    def _unmarked(self, raw: bytes) -> bytes:
        """Return the first line without the byte order mark an editor put before it."""
        if raw.startswith(SQLITE_MAGIC):
            self._fail("this is a database", expected="a bundle file", mend="--db names a database")
        if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            self._fail("the file is UTF-16", expected="UTF-8", mend="save it as UTF-8")
        return raw.removeprefix(codecs.BOM_UTF8)

    def _fail(self, what: str, *, expected: str = "", mend: str = "") -> NoReturn:
        raise UsageError(what, where=f"{self.path}, line {self.number}", expected=expected, mend=mend)

    def _checked(self, value: object) -> Line:
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__}, expected an object")
        kind = value.get("kind")
        if kind == "run" or not self.runs:
            return self._run(value)
        run = value.get("run")
        if not isinstance(run, str) or run not in self.runs:
            raise ValueError("it belongs to no run of this file")
        if self.runs[run]:
            raise ValueError(f"it follows the end of its run {run}")
        if kind == "case":
            return self._case(value, run)
        if kind == "end":
            _only(value, "kind", "run", "status", "finished_at")
            status = value["status"]
            if status not in RUN_STATUSES or status == "running":
                raise ValueError(f"status {status!r}, expected one of {', '.join(RUN_STATUSES[1:])}")
            finished = check_time(value["finished_at"], "finished_at")
            self._courses[run].end(finished)
            self.runs[run] = True
            return EndLine(run, status, finished)
        raise ValueError(f"unknown kind of line {kind!r}")

    def _run(self, value: dict[str, Any]) -> Line:
        schema = value.get("schema")
        if schema != SCHEMA:
            name, _, version = schema.rpartition("/") if isinstance(schema, str) else ("", "", "")
            if name == SCHEMA.rpartition("/")[0] and version.isdigit():
                self._fail(f"written as {schema} by a newer kvbench", expected=SCHEMA, mend="upgrade kvbench")
            self._fail("this is not a kvbench bundle", expected=f'"schema": "{SCHEMA}" in line 1')
        _only(value, "schema", "kind", "run")
        run = check_run(value["run"])
        check_foreign_run(run)
        if run.uuid in self.runs:
            raise ValueError(f"a second header of run {run.uuid}")
        self._courses[run.uuid] = Course(run)
        self.runs[run.uuid] = False
        return RunLine(run)

    def _case(self, value: dict[str, Any], run: str) -> CaseLine:
        _only(value, "kind", "run", "position", "at", "results")
        position, listed = value["position"], value["results"]
        if type(position) is not int or not 0 <= position < 1 << 31:
            raise ValueError(f"position {position!r}, expected a count")
        if not isinstance(listed, list):
            raise ValueError("results is not a list")
        results = tuple(check_result(row) for row in listed)
        check_case(results)
        check_digest(results[0])
        at = check_time(value["at"], "at")
        self._courses[run].case(results[0], position, at)
        for row in results:
            key = (run, row.digest, row.metric)
            if key in self._rows:
                raise ValueError(f"a second row of {row.suite}/{row.bench} {row.metric} in one run")
            self._rows.add(key)
            sense = self._better.setdefault((row.suite, row.bench, row.bench_version, row.metric, row.unit), row.better)
            if sense != row.better:
                raise ValueError(f"{row.suite}/{row.bench} {row.metric} is better {row.better} here, {sense} before")
            unit = self._unit.setdefault((row.suite, row.bench, row.bench_version, row.metric), row.unit)
            if unit != row.unit:
                raise ValueError(f"{row.suite}/{row.bench} {row.metric} is in {row.unit} here, in {unit} before")
        return CaseLine(run, position, at, results)


def _only(value: dict[str, Any], *names: str) -> None:
    if set(value) != set(names):
        wrong = sorted(set(value) ^ set(names))[0]
        raise ValueError(f"{'unknown' if wrong in value else 'missing'} field {wrong!r}")


def _parse(raw: bytes) -> object:
    return json.loads(raw.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_repeats)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found
