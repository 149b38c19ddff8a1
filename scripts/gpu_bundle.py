"""The one bundle of ``scripts/gpu``: the parts that its runs wrote, put together below a size, and what is in it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from kvbench.contract.result import HAS_VALUE, Result
from kvbench.errors import NoData, UsageError
from kvbench.store.bundle import BrokenTail, BundleWriter, CaseLine, EndLine, RunLine, iter_bundle

LIMIT_BYTES = 16 << 20
THINNED = (None, 200, 50, 0)  # samples a row, tried in this order until the file is small enough

GOOD = HAS_VALUE - {"invalid"}

Case = tuple[str, str, str]  # suite, bench, digest


@dataclass(slots=True)
class Contents:
    """What a bundle holds. ``cases`` maps a case to every status its primary row had, canaries apart; ``gpu`` are those
    that need a GPU."""

    runs: int = 0
    cases: dict[Case, set[str]] = field(default_factory=dict)
    gpu: set[Case] = field(default_factory=set)
    samples_a_row: int | None = None

    def having(self, *statuses: str) -> int:
        """Return how many cases had one of ``statuses`` in some run."""
        return sum(bool(found & set(statuses)) for found in self.cases.values())

    @property
    def with_value(self) -> int:
        return self.having(*GOOD)

    @property
    def gpu_with_value(self) -> int:
        return sum(bool(self.cases[case] & GOOD) for case in self.gpu)


def thin(row: Result, keep: int | None) -> Result:
    """Return ``row`` with at most ``keep`` of its samples, drawn evenly and the same ones every time; None: all.

    The row's value, interval and ``n`` stay: they come of all of them.
    """
    if keep is None or len(row.samples) <= keep:
        return row
    if not keep:
        return row.with_(samples=())
    places = sorted(random.Random(row.digest + row.metric).sample(range(len(row.samples)), keep))
    return row.with_(samples=tuple(row.samples[place] for place in places), kept=keep)


def collect(
    parts: Sequence[Path], target: Path, is_gpu: Callable[[Result], bool], limit: int = LIMIT_BYTES
) -> Contents:
    """Write all runs of ``parts`` to ``target``, replacing it in one step, and return what is in it.

    A run without an end is given one, ``interrupted``: its process is known to be gone. Where the file would be larger
    than ``limit``, rows carry fewer samples. Raises NoData when no part holds a run, or when even rows without samples
    are too large; ``target`` is then left as it was.
    """
    whole = [part for part in parts if part.is_file() and _readable(part)]
    if not whole:
        raise NoData("no run was written", where=str(target), mend="the log says why")
    fresh = target.with_name(target.name + ".new")
    for keep in THINNED:
        fresh.unlink(missing_ok=True)
        contents = _write(whole, fresh, is_gpu, keep)
        if fresh.stat().st_size <= limit:
            with fresh.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(fresh, target)
            return contents
    size = fresh.stat().st_size
    fresh.unlink()
    raise NoData(
        "the bundle is too large without any sample", where=str(target), got=f"{size} B", expected=f"{limit} B"
    )


def _readable(part: Path) -> bool:
    try:
        next(iter(iter_bundle(part)))
    except (UsageError, StopIteration):
        return False  # cut before its first line was whole
    return True


def _write(parts: Iterable[Path], target: Path, is_gpu: Callable[[Result], bool], keep: int | None) -> Contents:
    contents = Contents(samples_a_row=keep)
    with BundleWriter(target, sync_lines=False) as writer:
        for part in parts:
            current = ""
            for line in iter_bundle(part):
                match line:
                    case RunLine(run):
                        current = run.uuid
                        writer.begin_run(run)
                        contents.runs += 1
                    case CaseLine():
                        rows = [thin(row, keep) for row in line.results]
                        writer.add_results(line.run, rows, line.position, committed_at=line.at)
                        _count(contents, rows[0], is_gpu)
                    case EndLine():
                        writer.finish_run(line.run, line.status, line.finished_at)
                        current = ""
                    case BrokenTail():
                        pass  # the line that kill -9 cut; all before it is whole
            if current:
                writer.finish_run(current, "interrupted", datetime.now(UTC).isoformat(timespec="microseconds"))
    return contents


def _count(contents: Contents, row: Result, is_gpu: Callable[[Result], bool]) -> None:
    if row.is_canary:
        return
    case = (row.suite, row.bench, row.digest)
    contents.cases.setdefault(case, set()).add(row.status)
    if is_gpu(row):
        contents.gpu.add(case)
