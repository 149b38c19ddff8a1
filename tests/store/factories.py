"""Records for the store's tests, and hypothesis strategies for all of what a record may hold."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

from hypothesis import strategies as st

from kvbench.contract.axis import PROFILES
from kvbench.contract.result import (
    RUN_STATUSES,
    Basis,
    Better,
    Bytes,
    Ceiling,
    PlannedCase,
    Result,
    RunInfo,
    Status,
    Stop,
)
from kvbench.store.liveness import Here

EPOCH = datetime(2025, 3, 1, tzinfo=UTC)
HOSTILE = (
    "[bold]markup[/]",
    "\x1b[31mred\x1b[0m",
    "'); DROP TABLE results; --",
    "",
    "naïve ☃ 𝕂",
    "a\nb\tc",
    "=1+1",
    "%_",
)


def at(seconds: float) -> str:
    """Return a time ``seconds`` after a fixed start."""
    return (EPOCH + timedelta(seconds=seconds)).isoformat(timespec="microseconds")


def now() -> str:
    """Return the time now: the end of a run whose rows a sink has just dated itself."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def digest_of(suite: str, bench: str, version: int, axes: dict[str, Any]) -> str:
    text = json.dumps(
        {"suite": suite, "bench": bench, "version": version, "axes": axes}, sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def make_run(**changes: Any) -> RunInfo:
    values: dict[str, Any] = {
        "uuid": str(uuid.uuid4()), "group": str(uuid.uuid4()), "label": None, "started_at": at(0),
        "hw_class": "cpu-a", "env_digest": "env-a", "machine": {"sockets": 1}, "env": {"kernel": "6.1"}, "git": None,
        "profile": "smoke", "seed": 7, "plan": (), "host": "here", "boot_id": "boot-1", "pid": 41,
        "pid_start": "1000", "kvbench_version": "0.1.0",
    }  # fmt: skip
    return RunInfo(**(values | changes))


def make_row(number: int = 0, metric: str = "bandwidth", suite: str = "ladder", **changes: Any) -> Result:
    if changes.get("status") in ("skipped", "failed"):
        changes.setdefault("reason", "it died")
    axes = changes.pop("axes", {"bytes": 4096 * (number + 1), "op": "read"})
    values: dict[str, Any] = {
        "suite": suite, "bench": "host_bandwidth", "bench_version": 1, "axes": axes, "metric": metric, "unit": "B/s",
        "better": "higher", "digest": digest_of(suite, "host_bandwidth", 1, axes), "status": "ok",
        "value": 1e10 + number, "n": 6, "kept": 3, "samples": (1e-3, 1.1e-3, 0.9e-3),
    }  # fmt: skip
    return Result(**(values | changes))


def here(*, host: str = "here", alive: bool = True) -> Here:
    """Return a machine on which the recorded processes of boot-1 live or do not; another boot never does."""
    return Here(host, lambda boot, pid, start: alive and boot == "boot-1")


finite = st.floats(allow_nan=False, allow_infinity=False)
# columns: SQLite keeps a REAL that is a whole number as an integer, which has no negative zero
column = finite.map(lambda number: number + 0.0)
int64 = st.integers(-(2**63), 2**63 - 1)
text = st.sampled_from(HOSTILE) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12
)
scalar = st.none() | st.booleans() | int64 | finite | text
scalars = st.dictionaries(text, scalar, max_size=4)
settings = st.dictionaries(text, text | int64, max_size=4)
name = text.filter(str.strip)
positive = column.map(abs).filter(bool)
nested = st.recursive(
    scalar, lambda s: st.lists(s, max_size=3) | st.dictionaries(text, s, max_size=3), max_leaves=6
)  # fmt: skip
facts = st.dictionaries(text, nested, max_size=3)
count = st.none() | st.integers(0, 2**63 - 1)
times = st.integers(0, 10**12).map(lambda us: at(us / 1e6))


def share_of(row: Result, ceiling: Ceiling) -> float:
    """Return how much of a ceiling (for "lower": a floor) a row reaches; NaN without both."""
    if row.value is None or ceiling.value is None:
        return math.nan
    if row.better == "lower":
        return ceiling.value / row.value if row.value else math.inf
    return row.value / ceiling.value


def with_ceilings(row: Result, ceilings: list[Ceiling], *, told: bool) -> Result:
    """Return ``row`` held against ``ceilings``: none of them a law that it breaks, the fraction ``told`` or not."""
    kept = tuple(replace(c, kind="measured") if share_of(row, c) > 1.02 else c for c in ceilings)
    share = share_of(row, kept[0]) if kept else math.nan
    return row.with_(ceilings=kept, fraction=share if told and 0 <= share < math.inf else None)


def agreeing(row: Result) -> Result:
    """Return ``row`` with such a value, seconds, bytes and samples as one clock can have given."""
    if row.value is None or row.value <= 0 or row.basis not in ("measured", "emulated"):
        return row
    if row.stop is not None:
        taken = tuple(s for s in row.samples if s > 0)
        taken = taken[: len(taken) - (len(taken) + 1) % 2]  # the median of an even number is a mean, and may overflow
        row = row.with_(samples=taken, kept=len(taken))
        if taken:
            row = row.with_(low=None, high=None, seconds=statistics.median(taken))
        if row.unit == "s":
            row = row.with_(low=None, high=None, value=row.seconds or row.value)
        elif taken and not row.unit.endswith("/s"):
            row = row.with_(seconds=min(taken))
    counted = None if row.rate_of is None else getattr(row.bytes, row.rate_of)
    if row.unit == "B/s" and row.basis == "measured" and counted is not None and row.seconds is not None:
        rate = counted / row.seconds
        told = 0 < rate < math.inf
        row = row.with_(value=rate, low=None, high=None) if told else row.with_(rate_of=None)
    return row


@st.composite
def results(draw: st.DrawFn, axes: dict[str, Any] | None = None, metric: str | None = None) -> Result:
    status = draw(st.sampled_from(get_args(Status)))
    axes = dict(draw(settings)) if axes is None else axes
    suite, bench, version = "ladder", "bench", 3
    unit, basis = draw(st.sampled_from(["s", "B/s", "FLOP/s", "1"]) | name), draw(st.sampled_from(get_args(Basis)))
    value = low = high = None
    if status not in ("skipped", "failed"):
        three = sorted(
            draw(st.tuples(positive, positive, positive) if unit != "1" else st.tuples(column, column, column))
        )
        low, value, high = draw(st.sampled_from([three[0], None])), three[1], draw(st.sampled_from([three[2], None]))
    kept = draw(st.lists(finite.map(abs), max_size=5))
    better: Better = draw(st.sampled_from(get_args(Better)))
    ceilings = draw(st.lists(st.builds(
        Ceiling, text, st.none() | positive, st.sampled_from(["physical", "measured"]), text), max_size=2))  # fmt: skip
    stops = [stop for stop in get_args(Stop) if value is None or stop != "no_samples"]
    row = Result(
        suite=suite, bench=bench, bench_version=version, axes=axes, metric=draw(name) if metric is None else metric,
        unit=unit, better=better, digest=digest_of(suite, bench, version, axes),
        status=status, value=value, low=low, high=high,
        n=draw(st.integers(max(1, len(kept)), 2**63 - 1)), kept=len(kept),
        reason=draw(text if value is not None else name),
        stop=draw(st.none() | st.sampled_from(stops)), basis=basis,
        kernel=draw(st.none() | text), transport=draw(st.none() | text), resolved=draw(scalars),
        bytes=Bytes(draw(count), draw(count), draw(count), draw(count)),
        rate_of=draw(st.sampled_from([None, "unique", "link", "demand", "near"])), seconds=draw(st.none() | positive),
        flags=tuple(draw(st.lists(text, max_size=2))), detail=draw(scalars), samples=tuple(kept),
    )  # fmt: skip
    return with_ceilings(agreeing(row), ceilings, told=draw(st.booleans()))


@st.composite
def runs(draw: st.DrawFn) -> RunInfo:
    """Runs under a fresh UUID each: hypothesis replays examples, and a replayed run has ended."""
    status = draw(st.sampled_from(RUN_STATUSES))
    plan = draw(st.lists(st.dictionaries(text, text | int64, max_size=3), max_size=2))
    cases = [PlannedCase(digest_of("s", "b", 1, axes), "s", "b", 1, axes) for axes in plan]
    started = draw(times)
    return make_run(
        label=draw(st.none() | text.map(lambda word: f"l{word}")), started_at=started,
        hw_class=draw(text), env_digest=draw(text), machine=draw(facts), env=draw(facts), git=draw(st.none() | text),
        profile=draw(st.sampled_from(PROFILES)), seed=draw(st.integers(0, 2**64 - 1)), host=draw(text),
        boot_id=draw(text), pid=draw(st.integers(1, 2**22)), pid_start=draw(text), kvbench_version=draw(text),
        status=status, resumed=draw(st.booleans()), flags=tuple(draw(st.lists(text, max_size=2))),
        finished_at=None if status == "running" else max(started, draw(times)),
        plan=tuple({c.digest: c for c in cases}.values()),
    )  # fmt: skip
