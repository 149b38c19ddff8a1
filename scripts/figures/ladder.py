"""``ladder``: how long the ladder takes on this machine, as a user runs it, once its kernels are compiled."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvbench.errors import printable
from kvbench.kernels import cache

from .processes import Done, Neighbours, command, database_folder, run
from .record import Figure, judge, lost

GROUP = "ladder"
TARGETS = (("smoke", 20.0), ("quick", 120.0))
LIMIT_S = 1200.0


def figures() -> Iterator[Figure]:
    """Yield the wall seconds of the ladder at smoke and at quick."""
    for profile, high in TARGETS:
        yield wall("ladder", profile, high)


def wall(select: str, profile: str, high: float) -> Figure:
    """Run ``kvbench run SELECT --profile PROFILE`` and return its seconds; a run that compiled kernels is repeated."""
    name = f"run {select} --profile {profile}"
    compiled = cache.prepare().path
    with database_folder() as folder:
        words = command("run", select, "--profile", profile, "--db", str(Path(folder) / "ladder.db"), "--json")
        for attempt in range(2):
            others, before = Neighbours(), entries(compiled)
            try:
                done = run(words, LIMIT_S)
            except subprocess.TimeoutExpired:
                return lost(GROUP, name, "s", high, f"did not end within {LIMIT_S:.0f} s")
            if entries(compiled) == before:
                break
            if attempt:
                return lost(GROUP, name, "s", high, "the kernel cache does not hold: it compiled twice")
        if done.code != 0:
            return lost(GROUP, name, "s", high, f"exit code {done.code}: {printable(done.last_words)}")
        try:
            counts = statuses(done)
        except (ValueError, KeyError, TypeError) as error:
            return lost(GROUP, name, "s", high, f"not a results document: {printable(str(error))}")
        waited = "waiting for" in done.stderr
        note = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        note = "; ".join(
            part for part in (note, "waited for another measurement" if waited else "", others.note()) if part
        )
        if not counts["ok"]:
            return lost(GROUP, name, "s", high, f"no ok row: {note}")
        verdict = judge(done.seconds, None, high, disturbed=waited or others.disturbing())
        return Figure(GROUP, name, "s", done.seconds, None, high, verdict, note)


def statuses(done: Done) -> Counter[str]:
    """Return how many rows of a ``run --json`` have each status."""
    return Counter(str(row["status"]) for row in json.loads(done.stdout)["results"])


def entries(folder: Path) -> int:
    """Return how many compiled functions the kernel cache holds."""
    return sum(1 for _ in folder.rglob("*.nbc"))
