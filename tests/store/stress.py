"""Many writers at once, and writers killed in mid-insert: ``python -m tests.store.stress --processes 8 --runs 40``.

Prints what was acknowledged against what is in the database, and how long one case took to commit; exit 1 when an
acknowledged row is missing, a case is half there, or the file is damaged.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.contract.result import RunInfo
from kvbench.machine import identity
from kvbench.store import admin
from kvbench.store.engine import open_store
from tests.store.factories import at, make_row, make_run

METRICS = ("bandwidth", "latency")


@dataclass(frozen=True, slots=True)
class Finding:
    """``lines`` to print; ``faults`` is empty when nothing was lost."""

    lines: tuple[str, ...]
    faults: tuple[str, ...]


def this_run() -> RunInfo:
    """Return a run of the calling process, as the runner would record it."""
    return make_run(
        host=identity.host_name(), boot_id=identity.boot_id(), pid=os.getpid(), pid_start=identity.process_start(),
        started_at=at(time.monotonic()),
    )  # fmt: skip


def write_runs(target: str, runs: int, cases: int, out: int) -> None:
    """Store ``runs`` runs; write ``UUID DIGEST SECONDS`` to ``out`` after each commit, ``UUID end 0`` after a run."""
    with open_store(target) as store:
        for _ in range(runs):
            run = this_run()
            store.begin_run(run)
            for position in range(cases):
                rows = [make_row(position, metric) for metric in METRICS]
                began = time.perf_counter()
                store.add_results(run.uuid, rows, position)
                took = time.perf_counter() - began
                os.write(out, f"{run.uuid} {rows[0].digest} {took:.6f}\n".encode())
            store.finish_run(run.uuid, "ok", at(1))
            os.write(out, f"{run.uuid} end 0\n".encode())


def _fork_writer(target: str, runs: int, cases: int) -> tuple[int, int]:
    """Return pid and the descriptor its acknowledgements arrive on. The parent holds no open store when it forks."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    os.close(reading)
    code = 1
    try:
        write_runs(target, runs, cases, writing)
        code = 0
    except BaseException as error:
        sys.stderr.write(f"writer: {type(error).__name__}: {error}\n")
    os._exit(code)


def _check(target: str, acknowledged: Sequence[tuple[str, str]], ended: Sequence[str]) -> list[str]:
    """Return what is wrong with the database, given what its writers were told."""
    faults = []
    facts = admin.check(target)
    if facts["integrity"] not in ("ok", None):
        faults.append(f"integrity: {facts['integrity']}")
    with open_store(target, readonly=True) as store:
        stored = {run.info.uuid: run for run in store.runs()}
        rows = {uuid: store.results(uuid, with_samples=True) for uuid in stored}
    there = {(uuid, row.digest) for uuid, found in rows.items() for row in found}
    lost = set(acknowledged) - there
    if lost:
        faults.append(f"{len(lost)} acknowledged cases are missing")
    for uuid, found in rows.items():
        whole = {(row.digest, row.metric) for row in found if row.samples}
        if any((digest, metric) not in whole for _, digest in {(uuid, r.digest) for r in found} for metric in METRICS):
            faults.append(f"run {uuid} has half a case")
    faults += [f"run {uuid} has no end" for uuid in ended if uuid not in stored or stored[uuid].info.status != "ok"]
    return faults


def many_writers(target: str, processes: int, runs: int, cases: int) -> Finding:
    """Let ``processes`` writers store ``runs`` runs each at the same time."""
    began = time.perf_counter()
    writers = [_fork_writer(target, runs, cases) for _ in range(processes)]
    lines = [line.split() for _, reading in writers for line in os.fdopen(reading).read().splitlines()]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in writers]
    took = time.perf_counter() - began
    ended = [uuid for uuid, word, _ in lines if word == "end"]
    acknowledged = [(uuid, word) for uuid, word, _ in lines if word != "end"]
    latencies = sorted(float(seconds) * 1e3 for _, word, seconds in lines if word != "end")
    faults = _check(target, acknowledged, ended)
    wanted = processes * runs
    if len(ended) != wanted or any(codes):
        faults.append(f"{len(ended)} of {wanted} runs acknowledged, exit codes {codes}")
    if not latencies:
        return Finding((), (*faults, "nothing was stored"))
    return Finding(
        (
            f"acknowledged {len(ended)}/{wanted} runs, {len(acknowledged)}/{wanted * cases} cases in {took:.1f} s",
            f"commit of one case under {processes} writers: median {statistics.median(latencies):.1f} ms, "
            f"p99 {latencies[int(len(latencies) * 0.99)]:.1f} ms, max {latencies[-1]:.1f} ms",
        ),
        tuple(faults),
    )


def killed_writers(target: str, kills: int, seed: int = 1) -> Finding:
    """Kill a writer with SIGKILL in the middle of its inserts, ``kills`` times, and look at what is left."""
    chance = random.Random(seed)
    acknowledged: list[tuple[str, str]] = []
    for _ in range(kills):
        pid, reading = _fork_writer(target, 1, 100_000)
        with os.fdopen(reading) as pipe:
            first = pipe.readline()
            time.sleep(chance.uniform(0.0, 0.15))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            lines = [line.split() for line in [first, *pipe] if line.endswith("\n")]
        acknowledged += [(words[0], words[1]) for words in lines if len(words) == 3]
    faults = _check(target, acknowledged, ())
    mine = {uuid for uuid, _ in acknowledged}
    with open_store(target, readonly=True) as store:
        runs = [run for run in store.runs() if run.info.uuid in mine]
        states = [run.info.status for run in runs]
        cases = sum(run.done for run in runs)
    if states != ["interrupted"] * kills:
        faults.append(f"{kills} killed runs read as {states}")
    if len(acknowledged) < kills:
        faults.append("a writer was killed before its first case")
    extra = cases - len(acknowledged)
    if not 0 <= extra <= kills:
        faults.append(f"{cases} cases stored, {len(acknowledged)} acknowledged")
    return Finding(
        (f"{kills} kills: {len(acknowledged)} cases acknowledged, {extra} committed but not acknowledged",),
        tuple(faults),
    )


def one_writer(target: str, cases: int = 200) -> Finding:
    """Time the commit of a case of two rows with 1,000 samples each, alone on the database."""
    run = this_run()
    samples = tuple(1e-3 + k * 1e-9 for k in range(1000))
    took = []
    with open_store(target) as store:
        store.begin_run(run)
        for position in range(cases):
            rows = [make_row(position, metric, samples=samples, n=1000, kept=1000) for metric in METRICS]
            began = time.perf_counter()
            store.add_results(run.uuid, rows, position)
            took.append((time.perf_counter() - began) * 1e3)
        store.finish_run(run.uuid, "ok", at(1))
    took.sort()
    line = (
        f"one case (2 rows, 1,000 samples each) committed: median {statistics.median(took):.1f} ms, "
        f"p99 {took[int(cases * 0.99)]:.1f} ms, max {took[-1]:.1f} ms (target 25 ms)"
    )
    return Finding((line,), ())


def _place(base: str, name: str) -> str:
    return base if "://" in base else str(Path(base) / f"{name}.db")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--cases", type=int, default=5)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--latency", action="store_true", help="also time commits of one writer alone")
    parser.add_argument("--db", help="directory to make the databases in, or an URL; default: a temporary directory")
    given = parser.parse_args()
    if min(given.processes, given.runs, given.cases) < 1 or given.kills < 0:
        parser.error("counts are 1 or more")
    with tempfile.TemporaryDirectory(prefix="kvbench-stress-") as folder:
        base = given.db or folder
        open_store(_place(base, "many")).close()
        findings = [many_writers(_place(base, "many"), given.processes, given.runs, given.cases)]
        if given.kills:
            findings.append(killed_writers(_place(base, "kills"), given.kills))
        if given.latency:
            findings.append(one_writer(_place(base, "alone")))
    faults = [fault for finding in findings for fault in finding.faults]
    print(*(line for finding in findings for line in finding.lines), *(f"FAULT {f}" for f in faults), sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
