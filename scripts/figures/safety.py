"""``safety``: what was acknowledged is kept, with many writers at once and with the runner killed at any moment."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.contract.discover import Suites, load_suites
from kvbench.contract.result import Result
from kvbench.errors import KvbenchError, printable
from kvbench.store import open_store

from .processes import command, database_folder, run
from .record import Figure, judge, lost

ROOT = Path(__file__).resolve().parents[2]
GROUP = "safety"
WRITERS, RUNS, KILLS = 8, 40, 25
# a real worker and real cases of about 0.3 s each, so that kills fall into measuring, committing and everything between
SELECTION = (
    "ladder/host_bandwidth", "-a", "op=read,write", "-a", "pages=4k", "-a", "bytes=64KiB,256KiB,1MiB",
    "-a", "threads=1", "--profile", "smoke",
)  # fmt: skip
START_S = 1.5  # from a first kill moment before the parent has imported anything to one after its worker has started
CASE_S = 0.3
WAIT_S = 15.0  # a worker that was just being started ends itself once its interpreter runs
_MANY = re.compile(
    r"^acknowledged (?P<runs>\d+)/(?P<of>\d+) runs, (?P<cases>\d+)/(?P<cases_of>\d+) cases", re.MULTILINE
)
_BEGUN = re.compile(r"^(?P<uuid>[0-9a-f]{8}): (?P<cases>\d+) cases, ", re.MULTILINE)
_STORED = re.compile(r"^stored (?P<k>\d+)/(?P<n>\d+) (?P<case>\S.*?)(?: \([a-z]+: .*\))?\n", re.MULTILINE)


def figures() -> Iterator[Figure]:
    """Yield the figures of the group."""
    yield writers(WRITERS, RUNS)
    yield from kills(KILLS)


def writers(processes: int, runs: int) -> Figure:
    """Let ``processes`` writers store ``runs`` prepared runs each at once; count those acknowledged and all there.

    tests/store/stress.py does it and looks for every acknowledged case in the file afterwards.
    """
    name, wanted = f"{processes} processes x {runs} runs stored", processes * runs
    with database_folder() as folder:
        words = [sys.executable, "-m", "tests.store.stress", "--processes", str(processes), "--runs", str(runs)]
        done = run([*words, "--db", folder], limit=600, folder=ROOT)
    found = _MANY.search(done.stdout)
    if found is None:
        return lost(GROUP, name, "count", wanted, f"no result: {printable(done.last_words)}", low=wanted)
    faults = [line.removeprefix("FAULT ") for line in done.stdout.splitlines() if line.startswith("FAULT ")]
    if done.code != 0 or faults or int(found["of"]) != wanted or found["cases"] != found["cases_of"]:
        note = "; ".join(faults) or f"exit code {done.code}, {found[0]}"
        return lost(GROUP, name, "count", wanted, printable(note), low=wanted)
    value = int(found["runs"])
    note = f"acknowledged and present, {found['cases']} cases, integrity ok"
    return Figure(
        GROUP, name, "count", value, wanted, wanted, judge(value, wanted, wanted, disturbed=False), note, of=wanted
    )


@dataclass(frozen=True, slots=True)
class Kill:
    """One killed run: its UUID's first digits (None before it began), the acknowledged ``(k, case)``, what is wrong."""

    run: str | None
    planned: int
    acknowledged: tuple[tuple[int, str], ...]
    measuring: bool
    faults: tuple[str, ...] = ()


def kills(count: int, chance: random.Random | None = None, selection: Sequence[str] = SELECTION) -> Iterator[Figure]:
    """Kill the parent of a real run ``count`` times, look at what is left, and let every interrupted run go on."""
    chance = chance or random.Random(1)
    name, again = f"{count} x kill -9 of a running run, nothing lost", "killed runs that resume to their end"
    with database_folder() as folder:
        database = str(Path(folder) / "killed.db")
        suites = load_suites()
        cases = sum(1 for _ in selected(suites, selection))
        found: list[Kill] = []
        try:
            for _ in range(4 * count):
                kill = kill_once(database, selection, chance, cases)
                if kill is None:
                    continue  # it had ended before its moment came: no kill
                kill = replace(kill, faults=(*kill.faults, *missing(database, suites, kill)))
                whole = kill.run is not None and status_of(database, kill.run) == "ok"
                if kill.faults or not whole:  # a run already whole was no longer running
                    found.append(kill)
                if len(found) == count:
                    break
            else:
                raise KvbenchError(f"only {len(found)} of {4 * count} kills found the run running")
            cut = [kill for kill in found if kill.run is not None and status_of(database, kill.run) == "interrupted"]
            resumed = [resume(database, suites, kill) for kill in cut]
        except KvbenchError as error:
            yield lost(GROUP, name, "count", count, str(error), low=count)
            return
    yield summary(name, found)
    bad = [reason for reason in resumed if reason]
    note = printable(bad[0]) if bad else "acknowledged rows kept as they were, no case missing"
    value, wanted = len(resumed) - len(bad), max(1, len(resumed))
    verdict = judge(value, wanted, wanted, disturbed=False)
    yield Figure(GROUP, again, "count", value, wanted, wanted, verdict, note, of=len(resumed))


def summary(name: str, found: Sequence[Kill]) -> Figure:
    """Return the figure over all kills; without one that hit a worker and one after a stored case it proves nothing."""
    count, clean = len(found), sum(not kill.faults for kill in found)
    lines, measuring = sum(len(kill.acknowledged) for kill in found), sum(kill.measuring for kill in found)
    note = f"{lines} stored lines all in the database, integrity ok, {measuring} workers hit, none left"
    faults = [fault for kill in found for fault in kill.faults]
    if faults:
        note = printable(f"{len(faults)} faults: {faults[0]}")
    elif not lines or not measuring:
        return lost(
            GROUP, name, "count", count, f"proves nothing: {lines} stored lines, {measuring} workers", low=count
        )
    return Figure(
        GROUP, name, "count", clean, count, count, judge(clean, count, count, disturbed=False), note, of=count
    )


def kill_once(database: str, selection: Sequence[str], chance: random.Random, cases: int) -> Kill | None:
    """Start a run, kill its parent alone at a random moment, return what it had said; None when it ended before.

    The moment: a number of stored cases, 0 to all but one, and a random part of a case (of the start) later.
    """
    after = chance.randrange(cases)
    delay = chance.uniform(0.0, CASE_S if after else START_S)
    words = command("run", *selection, "--db", database)
    # its own session: whatever it starts is in there, also what changed its process group or lost its parent
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stderr is not None
        said = b""
        while said.count(b"\nstored ") < after and (line := process.stderr.readline()):
            said += line
        time.sleep(delay)
        before = members(process.pid) - {process.pid}
        ended = process.poll()
        process.kill()
        said += process.stderr.read()  # what it wrote before the kill is in the pipe; the worker holds no end of it
    finally:
        process.kill()
        code = process.wait()
        if process.stderr is not None:
            process.stderr.close()
    text = said.decode(errors="replace")
    if ended is not None or code != -signal.SIGKILL:
        if code not in (0, -signal.SIGKILL):
            raise KvbenchError(f"the run to kill ended by itself with exit code {code}", got=text.strip()[-200:])
        return None
    left = survivors(process.pid)
    faults = [f"processes {sorted(left)} of the killed run are alive"] if left else []
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    begun = _BEGUN.search(text)
    acknowledged = tuple((int(m["k"]), m["case"]) for m in _STORED.finditer(text))
    return Kill(
        begun["uuid"] if begun else None, int(begun["cases"]) if begun else 0, acknowledged, bool(before), tuple(faults)
    )


def members(session: int) -> set[int]:
    """Return the processes of a session that run (zombies, which a container's init may never reap, do not)."""
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # after the name, which may hold anything: state, parent, process group, session
                state, _, _, sid = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:4]
                if int(sid) == session and state not in "ZX":
                    found.add(int(entry.name))
    return found


def survivors(session: int) -> set[int]:
    """Return what still runs in a killed run's session after giving it ``WAIT_S`` seconds to end."""
    deadline = time.monotonic() + WAIT_S
    while (left := members(session)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def missing(database: str, suites: Suites, kill: Kill) -> list[str]:
    """Return what is wrong with the database after ``kill``."""
    if not Path(database).exists():
        return [f"no database, but {len(kill.acknowledged)} stored lines"] if kill.acknowledged else []
    with contextlib.closing(sqlite3.connect(database)) as raw:
        integrity = raw.execute("PRAGMA integrity_check(1)").fetchone()[0]
    faults = [] if integrity == "ok" else [f"integrity: {integrity}"]
    if kill.run is None:
        return faults + (["stored lines before the run began"] if kill.acknowledged else [])
    there, status = stored(database, suites, kill.run), status_of(database, kill.run)
    # killed between the end of the run and that of the process, it is whole
    if status != "interrupted" and (status, len(there)) != ("ok", kill.planned):
        faults.append(f"run {kill.run} reads as {status} with {len(there)} of {kill.planned} cases")
    lost_cases = [case for _, case in kill.acknowledged if case not in there]
    if lost_cases:
        faults.append(f"run {kill.run}: {len(lost_cases)} acknowledged cases are missing, {lost_cases[0]}")
    if [k for k, _ in kill.acknowledged] != list(range(1, len(kill.acknowledged) + 1)):
        faults.append(f"run {kill.run}: stored lines are numbered {[k for k, _ in kill.acknowledged]}")
    return faults


def status_of(database: str, uuid: str) -> str:
    """Return how the run whose UUID begins with ``uuid`` reads here and now."""
    with open_store(database, readonly=True) as store:
        (info,) = store.resolve(uuid)
        return store.effective_status(info)


def stored(database: str, suites: Suites, uuid: str) -> dict[str, list[Result]]:
    """Return the rows of a run by the text of their case, canaries apart."""
    rows: dict[str, list[Result]] = {}
    with open_store(database, readonly=True) as store:
        (run_info,) = store.resolve(uuid)
        for row in store.results(run_info.uuid, with_samples=True, canaries=False):
            bench = suites.find(row.suite, row.bench)
            axes: dict[str, Any] = dict(row.axes)
            rows.setdefault(bench.case(axes).text(bench.axes), []).append(row)
    return rows


def resume(database: str, suites: Suites, kill: Kill) -> str:
    """Let a killed run go on; return what is wrong, empty when it ended whole with its acknowledged rows untouched."""
    assert kill.run is not None
    before = stored(database, suites, kill.run)
    done = run(command("run", "--resume", kill.run, "--db", database), limit=300)
    if done.code != 0:
        return f"--resume {kill.run}: exit code {done.code}: {done.last_words}"
    after = stored(database, suites, kill.run)
    with open_store(database, readonly=True) as store:
        (info,) = store.resolve(kill.run)
        status = store.effective_status(info)
    if status != "ok" or not info.resumed or len(after) != kill.planned:
        return f"--resume {kill.run}: {status}, resumed {info.resumed}, {len(after)} of {kill.planned} cases"
    changed = [case for case, rows in before.items() if after.get(case) != rows]
    return f"--resume {kill.run}: {changed[0]} was measured again" if changed else ""


def selected(suites: Suites, selection: Sequence[str]) -> Iterator[str]:
    """Yield the text of each case that ``kvbench run SELECTION`` measures."""
    from kvbench.cli.commands_run import parse_overrides
    from kvbench.runner import make_plan

    chosen = [selection[k + 1] for k, word in enumerate(selection) if word == "-a"]
    for bench, case in make_plan(suites, selection[:1], parse_overrides(chosen), "smoke").pairs:
        yield case.text(bench.axes)
