"""``costs``: what kvbench itself takes: a sample, a commit, ``--help`` and ``list``."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from kvbench.errors import printable
from kvbench.locks import acquire, machine_resources
from kvbench.timing import overhead
from kvbench.timing.clock import quantum

from .processes import Neighbours, command, database_folder, file_system, run
from .record import Figure, judge, lost

ROOT = Path(__file__).resolve().parents[2]
GROUP = "costs"
SAMPLE_S, COMMIT_S = 2e-6, 25e-3
COMMANDS = (("--help", 0.4), ("list", 0.8))
REPEATS = 9
HEAVY = ("numba", "torch", "pandas")
_ALONE = re.compile(
    r"^one case \((?P<what>.*)\) committed: median (?P<median>[\d.]+) ms, p99 (?P<p99>[\d.]+) ms",
    re.MULTILINE,
)
_IMPORT = re.compile(r"^import time: +\d+ \| +\d+ \| +(\S+)$", re.MULTILINE)


def figures() -> Iterator[Figure]:
    """Yield every figure of the group; the machine's lock is held, so that no measuring run is disturbed by it."""
    with acquire(machine_resources(), notify=lambda text: print(f"crosscheck: {text}", file=sys.stderr)):
        yield from sampler()
        yield from commit()
        for words, limit in COMMANDS:
            yield from start(words, limit)


def sampler(samples: int = overhead.SAMPLES, batches: int = overhead.BATCHES) -> Iterator[Figure]:
    """Yield the sampler's cost per sample beyond the timed call, without and with the run-queue gate.

    The gated one has no target: it is what looking after every sample would cost; real cases look once a block.
    """
    own = (threading.get_native_id(),)
    clock = f"clock step {quantum().step_ns} ns"
    for name, gate, high in (("sampler a sample, ungated", None, SAMPLE_S), ("sampler a sample, gated", "delay", None)):
        others = Neighbours()
        cost = overhead.measure("delay" if gate else None, own, samples, batches)
        if cost.gate_reason:
            yield lost(GROUP, name, "s", high, f"the gate does not work: {cost.gate_reason}")
            continue
        note = f"median of {batches} x {cost.samples} samples beyond an empty call, {clock}"
        verdict = judge(cost.seconds, None, high, disturbed=others.disturbing())
        yield Figure(GROUP, name, "s", cost.seconds, None, high, verdict, _join(note, others.note()))


def commit() -> Iterator[Figure]:
    """Yield median and 99th percentile of committing one case, as tests/store/stress.py measures it."""
    names = [f"one case committed, {which}" for which in ("median", "p99")]
    with database_folder() as folder:
        others = Neighbours()
        words = [sys.executable, "-m", "tests.store.stress", "--processes", "1", "--runs", "1", "--cases", "1"]
        done = run([*words, "--latency", "--db", folder], limit=300, folder=ROOT)
        found = parse_alone(done.stdout)
        if done.code != 0 or found is None:
            for name in names:
                yield lost(GROUP, name, "s", COMMIT_S, f"no result: {printable(done.last_words)}")
            return
        what, *values = found
        for name, value in zip(names, values, strict=True):
            note = _join(f"{what}, SQLite on {file_system(folder)}", others.note())
            verdict = judge(value, None, COMMIT_S, disturbed=others.disturbing())
            yield Figure(GROUP, name, "s", value, None, COMMIT_S, verdict, note)


def parse_alone(text: str) -> tuple[str, float, float] | None:
    """Return what one case was, and median and p99 seconds of its commit, from the stress program's output."""
    found = _ALONE.search(text)
    return None if found is None else (found["what"], float(found["median"]) / 1e3, float(found["p99"]) / 1e3)


def start(words: str, limit: float, repeats: int = REPEATS) -> Iterator[Figure]:
    """Yield the seconds of the whole process ``kvbench WORDS``, and how many heavy packages it imported."""
    name, imports = f"kvbench {words}, whole process", f"kvbench {words}, heavy imports"
    try:
        first = run(command(words), limit=60, extra={"PYTHONPROFILEIMPORTTIME": "1"})  # also fills the page cache
        others = Neighbours()
        timed = [run(command(words), limit=60) for _ in range(repeats)]
    except (OSError, subprocess.TimeoutExpired) as error:
        yield lost(GROUP, name, "s", limit, f"did not end: {printable(str(error))}")
        return
    bad = next((done for done in (first, *timed) if done.code != 0 or not done.stdout.strip()), None)
    if bad is not None:
        yield lost(GROUP, name, "s", limit, f"exit code {bad.code}: {printable(bad.last_words)}")
        return
    value = median(done.seconds for done in timed)
    spread = f"median of {repeats}, {min(d.seconds for d in timed):.2f}..{max(d.seconds for d in timed):.2f} s"
    verdict = judge(value, None, limit, disturbed=others.disturbing())
    yield Figure(GROUP, name, "s", value, None, limit, verdict, _join(spread, others.note()))
    loaded = imported(first.stderr)
    if "kvbench" not in loaded:
        yield lost(GROUP, imports, "count", 0, "the interpreter did not report what it imports")
        return
    heavy = sorted(loaded & set(HEAVY))
    note = " ".join(heavy) if heavy else f"neither {', '.join(HEAVY)} among {len(loaded)} top-level modules"
    yield Figure(
        GROUP, imports, "count", len(heavy), None, 0, judge(len(heavy), None, 0, disturbed=False), note
    )  # fmt: skip


def imported(text: str) -> set[str]:
    """Return the top-level modules in the output of ``python -X importtime``."""
    return {name.split(".")[0] for name in _IMPORT.findall(text)}


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
