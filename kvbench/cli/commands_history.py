"""``history`` and ``annotate``: one case over time, where its level changed, and accepting a new level."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.commands_run import parse_overrides
from kvbench.cli.options import Db, Json
from kvbench.cli.output import emit, emit_json
from kvbench.cli.reading import reading
from kvbench.errors import NoData, UsageError, printable

if TYPE_CHECKING:
    from kvbench.analysis.trend import Trend
    from kvbench.store import KnownCase, Store

HISTORY_SCHEMA = "kvbench.history/1"
ANNOTATE_SCHEMA = "kvbench.annotate/1"
MOST = 20  # series a call may print
_DIGEST = re.compile(r"[0-9a-f]{6,64}")
CaseWord = Annotated[
    str, typer.Argument(metavar="CASE", help="suite/bench with -a AXIS=VALUE to name one, or a case digest (prefix).")
]
Axis = Annotated[
    list[str] | None, typer.Option("-a", "--axis", metavar="AXIS=VALUE", help="Only cases with this value; repeatable.")
]
Hardware = Annotated[
    str | None, typer.Option("--hw", metavar="HW_CLASS", help="Only this hardware class; default: this machine's.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    app.command("history")(history)
    app.command("annotate")(annotate)


def history(
    case: CaseWord,
    axis: Axis = None,
    metric: Annotated[str | None, typer.Option("--metric", help="Only this metric; default: the primary one.")] = None,
    hw: Hardware = None,
    limit: Annotated[int, typer.Option("--limit", help="At most this many runs, the newest.")] = 200,
    db: Db = None,
    json: Json = False,
) -> None:
    """Show a case over time on one kind of hardware: its level, where that changed, and what else changed there."""
    from kvbench.analysis.trend import trend
    from kvbench.report.trend_text import trend_text

    if not 1 <= limit <= 100_000:
        raise UsageError("out of range", where="--limit", got=limit, expected="1..100000")
    with reading(db) as store:
        found: list[Trend] = []
        for known in find_cases(store, case, axis or [], MOST):
            keys = [key for key in store.series_keys(known.digest) if hw is None or key[1] == hw]
            primary = {hw_class: name for name, hw_class in reversed(keys)}
            for name, hw_class in keys:
                if name != (metric or primary[hw_class]) or (hw is None and not _here(hw_class, keys)):
                    continue
                points = store.history(known.digest, name, hw_class, limit=limit)
                notes = store.annotations(hw_class=hw_class, case_digest=known.digest)
                found.append(trend(known, name, hw_class, points, notes))
        where = store.describe()
    if not found:
        raise NoData(
            "no measured row of it here", where=where, got=f"{case} {metric or ''}".strip(),
            mend="leave out --metric or --hw; kvbench runs lists what is stored",
        )  # fmt: skip
    if json:
        emit_json({"schema": HISTORY_SCHEMA, "histories": [_document(each) for each in found]})
    else:
        emit("\n\n".join(trend_text(each) for each in found))


def _here(hw_class: str, keys: Sequence[tuple[str, str]]) -> bool:
    """Return whether ``hw_class`` is shown without --hw: this machine's, or all where this one has no row."""
    from kvbench.machine.fingerprint import fingerprint

    here = fingerprint().hw_class
    return hw_class == here or all(other != here for _, other in keys)


def annotate(
    case: Annotated[
        str | None, typer.Argument(metavar="[CASE]", help="The case whose level is accepted; none: a note on the run.")
    ] = None,
    axis: Axis = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="From this run on; a run UUID (prefix).")
    ] = None,
    text: Annotated[str, typer.Option("--text", help="What happened.")] = "",
    db: Db = None,
    json: Json = False,
) -> None:
    """Accept a new level of a case from a run on, or leave a note on a run; `history` shows both."""
    from kvbench.store import open_store

    if run is None:
        raise UsageError("a run is needed", where="--run", expected="the first run of the new level")
    if not text.strip():
        raise UsageError("a text is needed", where="--text", expected="what happened, for whoever reads it later")
    with open_store(db, create=False) as store:
        runs = store.resolve(run)
        if len(runs) != 1:
            raise UsageError("several runs match", where="--run", got=run, expected="one run UUID or its prefix")
        digests: list[str | None] = [None]
        if case is not None:
            cases = find_cases(store, case, axis or [], MOST)
            digests = [known.digest for known in cases]
            if len(cases) > 1:
                raise UsageError(
                    f"{len(cases)} cases match, and a level is accepted for one", got=" ".join([case, *(axis or [])]),
                    mend=f"narrow it: -a {next(iter(cases[0].axes), 'AXIS')}=VALUE",
                )  # fmt: skip
            rows = [row for row in store.results(runs[0].uuid) if row.digest == cases[0].digest]
            if not any(row.value is not None for row in rows):
                raise UsageError("that run has no value for this case", where="--run", got=run)
        notes = [
            store.annotate(text, hw_class=runs[0].hw_class, run_uuid=runs[0].uuid, case_digest=digest)
            for digest in digests
        ]
        where = store.describe()
    if json:
        emit_json({"schema": ANNOTATE_SCHEMA, "annotations": [
            {"uuid": n.uuid, "run": n.run_uuid, "case": n.case_digest, "hw_class": n.hw_class, "text": n.text}
            for n in notes
        ]})  # fmt: skip
    else:
        what = f"level of {len(notes)} case{'s' if len(notes) != 1 else ''} accepted" if case else "noted"
        emit(f"{what} from run {runs[0].uuid[:8]} on, in {where}")


def find_cases(store: Store, word: str, axes: Sequence[str], most: int) -> list[KnownCase]:
    """Return the stored cases ``word`` and ``axes`` name. Raises UsageError for none and for more than ``most``."""
    if "/" in word:
        suite, _, bench = word.partition("/")
        known = store.known_cases(suite=suite, bench=bench)
    elif _DIGEST.fullmatch(word):
        known = store.known_cases(digest=word)
    else:
        raise UsageError("not a case", got=word, expected="suite/bench, or at least 6 digits of a case digest")
    wanted = parse_overrides(axes)
    found = [each for each in known if all(_same(each.axes.get(name), text) for name, text in wanted.items())]
    found = [each for each in found if each.suite != "canary"] or found
    if not found:
        names = sorted({name for each in known for name in each.axes})
        raise UsageError(
            "no such case is stored", where=store.describe(), got=" ".join([word, *axes]),
            expected=f"axes among {' '.join(names)}" if names else "a case some run has measured",
            mend="kvbench show lists the cases of a run",
        )  # fmt: skip
    if len(found) > most:
        raise UsageError(
            f"{len(found)} cases match", got=" ".join([word, *axes]), expected=f"at most {most}",
            mend=f"narrow it: -a {next(iter(found[0].axes), 'AXIS')}=VALUE",
        )  # fmt: skip
    return found


def _same(value: Any, text: str) -> bool:
    """Return whether the axis value reads ``text``, as typed or in bytes (256MiB)."""
    from kvbench.units import parse_bytes

    if str(value) == text.strip():
        return True
    if not isinstance(value, int):
        return False
    try:
        return value == parse_bytes(text)
    except UsageError:
        return False


def _document(found: Trend) -> dict[str, Any]:
    return {
        "suite": found.case.suite, "bench": found.case.bench, "bench_version": found.case.bench_version,
        "axes": dict(found.case.axes), "digest": found.case.digest, "metric": found.metric,
        "hw_class": found.hw_class, "unit": found.unit, "better": found.better,
        "points": [
            {
                "run": p.run, "label": printable(p.label) if p.label else None, "started_at": p.started_at,
                "env": p.env_digest, "git": p.git, "profile": p.profile, "value": p.figure.value,
                "low": p.figure.low, "high": p.figure.high, "status": p.figure.status, "counts": counts,
            } for p, counts in zip(found.points, found.counted, strict=True)
        ],
        "changes": [
            {
                "run": c.run, "before": c.before, "after": c.after, "ratio": c.ratio, "p": c.p, "verdict": c.verdict,
                "environment_changed": c.environment,
            } for c in found.changes
        ],
        "notes": [{"run": n.run_uuid, "at": n.created_at, "text": n.text, "accepts": n.case_digest is not None}
                  for n in found.notes],
        "reason": found.reason,
    }  # fmt: skip
