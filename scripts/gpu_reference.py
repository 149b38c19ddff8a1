#!/usr/bin/env python3
"""Turn a bundle into a reference of a kind of machine that may be published: no samples, nothing that names anybody.

    python scripts/gpu_reference.py BUNDLE [--into results/reference] [--hide WORD]... [--replace]

Writes results/reference/HARDWARE.jsonl.gz, at most 1 MiB: the runs that have a value, in the format of a bundle. Kept:
hardware, settings, library versions, rows, hashed ids. Left out: host name, boot id, process ids, labels, samples, and
out of every text file paths, home folders and user names. ``--hide`` names further words to leave out. Exit code 2 for
a mistake, 3 when nothing may be written.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import gzip
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from kvbench.contract.result import HAS_VALUE, Result, RunInfo  # noqa: E402
from kvbench.errors import EXIT_OK, KvbenchError, NoData, UsageError, printable  # noqa: E402
from kvbench.store.bundle import BundleRun, BundleWriter, CaseLine, iter_bundle, read_bundle  # noqa: E402
from kvbench.units import format_bytes  # noqa: E402

LIMIT_BYTES = 1 << 20
INTO = ROOT / "results" / "reference"
HIDDEN = "[hidden]"
LEAST_WORD = 3  # shorter names are part of other words
# No names of persons: accounts and hosts that every machine has.
COMMON = frozenset({"root", "localhost", "unknown", "ubuntu", "debian", "user", "home", "nobody"})
# What these folders of Linux hold is the same on every machine, and reasons quote it.
_PUBLIC = r"(?:proc(?!/\d)|sys|dev)(?:/|\b)"
_PATH = re.compile(
    # quoted: with its spaces
    r"(?P<quote>['\"`])[~/](?!" + _PUBLIC + r")[^'\"`]*(?P=quote)"
    rf"|(?:file://|(?<![\w.)/])~[\w.-]*|(?<![\w.)/]))/(?!{_PUBLIC})[\w.+~-][^\s'\"`,;:)\]]*"
)
_HOME = re.compile(r"/(?:home|Users)/([^/\s'\"`,;:)\]]+)")
_ENV_KEPT_OUT = frozenset({"cuda_visible_devices", "hostname"})
_FACTS_KEPT_OUT = frozenset({"hostname", "serial"})


def words_to_hide(runs: Iterable[BundleRun], more: Sequence[str] = ()) -> tuple[str, ...]:
    """Return host and user names known from ``runs`` and from this machine, longest first. ``more`` is taken as it is.

    The host of a run carries six hex digits of its machine id behind its name: the name alone is hidden too. Users are
    taken from the home folders in the texts of rows: the bundle may come from another machine.
    """
    found = {socket.gethostname(), os.path.expanduser("~")}
    with contextlib.suppress(OSError, KeyError):  # a container whose user has no name has none to hide
        found.add(getpass.getuser())
    for run in runs:
        found |= {run.info.host, re.sub(r"-[0-9a-f]{6}$", "", run.info.host)}
        for text in _texts(run):
            found.update(_HOME.findall(text))
    found |= {name.split(".")[0] for name in found if "/" not in name}
    kept = {word for word in found if len(word) >= LEAST_WORD and word.lower() not in COMMON and word != "/root"}
    return tuple(sorted(kept | set(more), key=lambda word: (-len(word), word)))


def _texts(run: BundleRun) -> Iterable[str]:
    for row in run.results:
        yield row.reason
        yield from (value for value in row.detail.values() if isinstance(value, str))


def clean(text: str, hide: Collection[str]) -> str:
    """Return ``text`` without paths and without the words of ``hide`` (any case, as whole words)."""
    text = _PATH.sub(HIDDEN, text)
    for word in hide:
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", HIDDEN, text, flags=re.IGNORECASE)
    return text


def _cleaned(value: Any, hide: Collection[str]) -> Any:
    if isinstance(value, str):
        return clean(value, hide)
    if isinstance(value, Mapping):
        return {name: _cleaned(item, hide) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item, hide) for item in value]
    return value


def clean_run(run: RunInfo, hide: Collection[str]) -> RunInfo:
    """Return the record of ``run`` with its hardware class in place of the host and nothing that names a process."""
    facts = run.machine.get("facts")
    machine = dict(run.machine)
    if isinstance(facts, Mapping):
        machine["facts"] = {name: value for name, value in facts.items() if name not in _FACTS_KEPT_OUT}
    env = {name: value for name, value in run.env.items() if name not in _ENV_KEPT_OUT}
    return replace(
        run, label=None, host=run.hw_class, boot_id="", pid=0, pid_start="", machine=_cleaned(machine, hide),
        env=_cleaned(env, hide), git=None if run.git is None else clean(run.git, hide), status="running",
        finished_at=None,
    )  # fmt: skip


def clean_row(row: Result, hide: Collection[str]) -> Result:
    """Return ``row`` without samples. What identifies the case (suite, bench, axes, metric) stays as it is."""
    ceilings = tuple(replace(c, name=clean(c.name, hide), source=clean(c.source, hide)) for c in row.ceilings)
    kernel = None if row.kernel is None else clean(row.kernel, hide)
    return row.with_(
        samples=(), reason=clean(row.reason, hide), detail=_cleaned(row.detail, hide), kernel=kernel,
        resolved=_cleaned(row.resolved, hide), ceilings=ceilings,
    )  # fmt: skip


def make(bundle: Path, into: Path, *, hide: Sequence[str] = (), overwrite: bool = False) -> Path:
    """Write the reference of ``bundle`` and return where it is.

    Raises UsageError for a file that is no bundle, one of several kinds of machine, or a reference that is there
    already; NoData when no run has a value, when more than 1 MiB would be left, or when a hidden word came through.
    """
    read = read_bundle(bundle)
    runs = {run.info.uuid: run for run in read.runs if any(_counts(row) for row in run.results)}
    if not runs:
        raise NoData("no run of it has a value", where=str(bundle))
    classes = sorted({run.info.hw_class for run in runs.values()})
    if len(classes) != 1:
        raise UsageError("a reference is of one kind of machine", where=str(bundle), got=", ".join(classes))
    words = words_to_hide(runs.values(), hide)
    name = classes[0]
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+_-]{2,120}", name) or clean(name, words) != name:
        raise UsageError("the hardware class is no name for a file", where=str(bundle), got=name)
    target = into / f"{name}.jsonl.gz"
    if target.exists() and not overwrite:
        raise UsageError(
            "there is a reference of this machine", where=str(target), mend="--replace puts this one there"
        )
    with tempfile.TemporaryDirectory() as folder:
        data = _written(bundle, runs, words, Path(folder, "reference.jsonl"))
    _check(data.decode("ascii"), words, str(bundle))
    packed = gzip.compress(data, 9, mtime=0)  # no time and no name inside: the same bundle gives the same bytes
    if len(packed) > LIMIT_BYTES:
        raise NoData(
            "the reference would be too large", where=str(bundle), got=format_bytes(len(packed)),
            expected=f"at most {format_bytes(LIMIT_BYTES)}", mend="make it of fewer runs",
        )  # fmt: skip
    into.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".new")
    fresh.write_bytes(packed)
    fresh.replace(target)
    return target


def _counts(row: Result) -> bool:
    return not row.is_canary and row.status in HAS_VALUE and row.status != "invalid"


def _written(bundle: Path, runs: Mapping[str, BundleRun], words: Collection[str], target: Path) -> bytes:
    with BundleWriter(target, sync_lines=False) as writer:
        for run in runs.values():
            writer.begin_run(clean_run(run.info, words))
        for line in iter_bundle(bundle):
            if isinstance(line, CaseLine) and line.run in runs:
                rows = [clean_row(row, words) for row in line.results]
                writer.add_results(line.run, rows, line.position, committed_at=line.at)
        for uuid, run in runs.items():
            ended = run.info.finished_at
            if run.info.status == "running" or ended is None:
                writer.finish_run(uuid, "interrupted", run.info.started_at)
            else:
                writer.finish_run(uuid, run.info.status, ended)
    return target.read_bytes()


def _check(text: str, words: Collection[str], where: str) -> None:
    """Raise NoData when anything that should be hidden is still there: cleaning must not be its own judge."""
    for value in {value for line in text.splitlines() for value in _strings(json.loads(line))}:
        for word in words:
            if re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", value, re.IGNORECASE):
                raise NoData(
                    "the reference would still hold a name", where=where, got=word,
                    mend="it stands in a suite, an axis or a metric: rename that, or leave the run out",
                )  # fmt: skip
        if found := _HOME.search(value) or re.search(r"/root/", value):
            raise NoData("the reference would still hold a home folder", where=where, got=found[0])


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--into", type=Path, default=INTO, metavar="DIR")
    parser.add_argument("--hide", action="append", default=[], metavar="WORD")
    parser.add_argument("--replace", action="store_true")
    found = parser.parse_args(argv)
    try:
        target = make(found.bundle, found.into, hide=found.hide, overwrite=found.replace)
    except KvbenchError as error:
        print(f"kvbench: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"kvbench: error: {printable(str(error), 300)}", file=sys.stderr)
        return 2
    print(f"{target} ({format_bytes(target.stat().st_size)})")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
