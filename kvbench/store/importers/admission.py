"""From a foreign file to a run in a store, through the same door as a bundle: all of the file or nothing.

A run's UUID follows from the content of its file (and from the machine, where the user says it is this one), so the
same file is the same run in every store, under any name, however often it comes.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.contract.result import PlannedCase, Result, RunInfo
from kvbench.errors import UsageError, printable
from kvbench.store.bundle import BundleWriter
from kvbench.store.consistent import standing
from kvbench.store.importers.found import Found, rows_of
from kvbench.store.importers.source import Malformed, Source, read_source
from kvbench.store.importers.tools import PARSERS, TOOLS, recognise
from kvbench.store.wire import check_foreign_run

if TYPE_CHECKING:
    from kvbench.machine.fingerprint import Fingerprint
    from kvbench.store.engine import Store
    from kvbench.store.transfer import ImportCounts

# Raise it when an importer reads the same file to other rows: they then are another run, not a contradiction.
FORMAT = 1
IMPORTED_BY = f"imported by format {FORMAT}"
NOWHERE = "(imported)"  # no host has this name: `latest` is of this machine and never finds an imported run
TIME_UNKNOWN = "1970-01-01T00:00:00.000000+00:00"
_NAMESPACE = uuid.UUID("5b0f5c1e-5d0c-4b7e-9f4e-6b7662656e63")


@dataclass(frozen=True, slots=True)
class Foreign:
    """A file that was read and is fit to be imported: its run, its cases in order, lines for the user."""

    path: Path
    tool: str
    run: RunInfo
    cases: tuple[tuple[Result, ...], ...]
    notices: tuple[str, ...]


def read_foreign(
    path: str | Path, tool: str | None = None, *, here: Fingerprint | None = None, name: str | None = None
) -> Foreign:
    """Return what the file of another tool holds. ``tool``: one of TOOLS, None to go by the content.

    ``here``: the machine it was measured on, where the user says so; ``name``: what its rows call the file. Raises
    UsageError, one line, for anything that is not whole and consistent output of the tool.
    """
    path = Path(path)
    if tool is not None and tool not in PARSERS:
        raise UsageError("unknown tool", where="--from", got=tool, expected=" ".join(TOOLS))
    told, tool = tool, tool or recognise(path)
    if tool is None:
        raise UsageError(
            "no tool that is known here wrote this", where=str(path), expected=" ".join(TOOLS),
            mend="say which with --from",
        )  # fmt: skip
    source = read_source(path)
    try:
        found = PARSERS[tool](source)
        rows = rows_of(found, source.sha256, name or source.name)
        run = _run(source, found, rows, here, name or source.name)
        check_foreign_run(run)
    except Malformed as error:
        raise UsageError(
            f"not importable as {tool} output: {printable(str(error), 300)}", where=str(path),
            mend="nothing was imported" + _other(path, told),
        ) from None  # fmt: skip
    except ValueError as error:
        raise UsageError(printable(str(error), 300), where=str(path), mend="nothing was imported") from None
    unknown = (
        () if found.started_at else (f"the file does not tell when it was measured: {TIME_UNKNOWN[:10]} stands for it",)
    )
    return Foreign(path, tool, run, tuple(rows), (*found.notices, *unknown))


def _other(path: Path, told: str | None) -> str:
    if told is None:
        return ""
    with suppress(UsageError):
        found = recognise(path)
        if found not in (None, told):
            return f"; it looks like {found} output"
    return ""


def admit(store: Store, foreign: Foreign, *, here: Fingerprint | None = None) -> ImportCounts:
    """Bring ``foreign`` into ``store``: all of it or nothing. A file that came under another name changes nothing.

    Raises UsageError where the store has the run with other content.
    """
    from kvbench.store.transfer import import_bundle

    known = _known_name(store, foreign.run.uuid)
    if known is not None and known != foreign.path.name:
        foreign = read_foreign(foreign.path, foreign.tool, here=here, name=known)
    with tempfile.TemporaryDirectory(prefix="kvbench-import-") as folder:
        bundle = Path(folder) / "run.jsonl"
        write_bundle(foreign, bundle)
        try:
            return import_bundle(store, bundle)
        except UsageError as error:
            raise UsageError(
                error.what, where=str(foreign.path), got=error.got, expected=error.expected, mend="nothing was imported"
            ) from None


def write_bundle(foreign: Foreign, path: Path) -> None:
    """Write the run of ``foreign`` as a new bundle."""
    run = foreign.run
    with BundleWriter(path, sync_lines=False) as writer:
        writer.begin_run(run)
        for position, rows in enumerate(foreign.cases):
            writer.add_results(run.uuid, rows, position, committed_at=run.started_at)
        assert run.finished_at is not None
        writer.finish_run(run.uuid, run.status, run.finished_at)


def _known_name(store: Store, run_uuid: str) -> str | None:
    """Return the name under which the store has this file, None when it has it not."""
    try:
        env = store.run(run_uuid).info.env
    except UsageError:
        return None
    origin = env.get("origin")
    name = origin.get("file") if isinstance(origin, dict) else None
    return name if isinstance(name, str) else None


def _run(
    source: Source, found: Found, rows: list[tuple[Result, ...]], here: Fingerprint | None, name: str
) -> RunInfo:  # fmt: skip
    identity = source.sha256 if here is None else f"{source.sha256} {here.hw_class}"
    identity = f"{FORMAT} {found.tool} {identity}"
    origin = {"tool": found.tool, "version": found.version, "file": name, "sha256": source.sha256}
    started = found.started_at or TIME_UNKNOWN
    hw_class, key = _hardware(source, found, here)
    plan = tuple(PlannedCase(c[0].digest, c[0].suite, c[0].bench, c[0].bench_version, _settings(c[0])) for c in rows)
    stands = standing("ok", {case.digest for case in plan}, [(row.digest, row.status) for case in rows for row in case])
    settings = dict(found.env)
    flags = ("imported", *(() if found.started_at else ("time_unknown",)))
    return RunInfo(
        uuid=str(uuid.uuid5(_NAMESPACE, identity)), group=str(uuid.uuid5(_NAMESPACE, f"group {identity}")), label=None,
        started_at=started, hw_class=hw_class, env_digest=f"imported-{_digest(settings)}",
        machine={"key": key, "origin": found.tool}, env={**settings, "origin": origin}, git=None,
        # no budget of kvbench cut it short; the flag says whose it is
        profile="full", seed=0, plan=plan, host=NOWHERE, boot_id="", pid=0, pid_start="", kvbench_version=IMPORTED_BY,
        status=stands.status, flags=flags, finished_at=started,
    )  # fmt: skip


def _settings(row: Result) -> dict[str, str | int]:
    return {name: value for name, value in row.axes.items() if isinstance(value, str | int)}


def _hardware(source: Source, found: Found, here: Fingerprint | None) -> tuple[str, Mapping[str, Any]]:
    """Return the hardware class and the fields behind it.

    Two files are of one class only where both name the same machine: a file that does not name its machine is of a
    class of its own, because nobody knows whether another is of the same.
    """
    if here is not None:
        key = here.machine["key"]
        return here.hw_class, key if isinstance(key, dict) else {"key": key}
    key = dict(found.machine) if found.machine is not None else {"file": source.sha256[:16]}
    return f"imported-{_digest(key)}", key


def _digest(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:12]
