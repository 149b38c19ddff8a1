"""``calibrate``: how noisy each case is on this machine, measured by running the same code several times."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.commands_gate import Axis, Scratch, bundle_folder, check_store, known_profile, planned_digests
from kvbench.cli.options import Db, Json, Selects
from kvbench.cli.output import emit, emit_json, say
from kvbench.errors import NoData, UsageError, printable

if TYPE_CHECKING:
    from kvbench.analysis.calibration import Replay
    from kvbench.contract.result import Result
    from kvbench.store.decisions import Calibration

    Noise = list[tuple[Calibration, Result]]
    Missed = list[tuple[Result, int]]

CALIBRATE_SCHEMA = "kvbench.calibrate/1"
MAX_RUNS = 100


def register(app: typer.Typer) -> None:
    """Add the command of this module to ``app``."""
    app.command("calibrate")(calibrate)


def calibrate(
    select: Selects = None,
    axis: Axis = None,
    profile: Annotated[
        str, typer.Option("--profile", metavar="smoke|quick|full", help="How long to measure.")
    ] = "quick",
    runs: Annotated[int, typer.Option("--runs", help="Fresh runs of the same code; 20 replay both looks.")] = 10,
    scratch: Scratch = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Measure the same code several times, store each case's noise, and say how often the gate would be wrong here."""
    from kvbench.analysis import calibration
    from kvbench.gating import Asked, Fresh
    from kvbench.store import open_store

    if not calibration.LEAST_RUNS <= runs <= MAX_RUNS:
        raise UsageError("out of range", where="--runs", got=runs, expected=f"{calibration.LEAST_RUNS}..{MAX_RUNS}")
    asked = Asked(tuple(select or ()), tuple(axis or ()), known_profile(profile), scratch)
    planned_digests(asked)
    check_store(db)
    with bundle_folder(None) as folder:
        measured = Fresh(sys.executable, "calibration", folder, say, store=True, db=db).runs(asked, runs)
    found, bad, replayed = _noise(measured)
    if not found:
        raise NoData("no case has ten clean runs", where="kvbench calibrate", mend="calibrate on a quiet machine")
    with open_store(db) as store:
        at = store.add_calibrations([each for each, _ in found])
    if json:
        emit_json(_document(at, found, bad, replayed))
    else:
        emit(_text(found, bad, replayed, runs))


def _noise(runs: Sequence[Any]) -> tuple[Noise, Missed, Replay]:
    """Return the calibrations with a row of each, the cases too few runs are clean of, and the gate's replay."""
    from kvbench.analysis.calibration import LEAST_RUNS, replay, run_sd
    from kvbench.analysis.compare import margin_of
    from kvbench.analysis.gate import Rule
    from kvbench.gating import has_value, primaries
    from kvbench.store import Calibration

    info = runs[0].info
    found: Noise = []
    bad: Missed = []
    medians: list[list[float]] = []
    rules: list[Rule] = []
    for (digest, metric), rows in primaries(runs).items():
        clean = [row.value for row in rows if has_value(row) and row.value]
        if len(clean) < LEAST_RUNS:
            if any(row.value is not None for row in rows):
                bad.append((rows[0], len(clean)))
            continue
        deviation = run_sd(clean)
        rule = Rule(margin_of(rows), deviation)
        medians.append(clean)
        rules.append(rule)
        found.append((
            Calibration(
                digest, metric, info.hw_class, info.env_digest, "", len(clean), deviation, rule.threshold, info.env
            ), rows[0],
        ))  # fmt: skip
    return found, bad, replay(medians, rules, [row.better for _, row in found], seed=info.seed)


def _text(found: Noise, bad: Missed, replayed: Replay, runs: int) -> str:
    from kvbench.report.table import axes_text, plain_table
    from kvbench.units import counted

    lines = [
        (
            f"{row.suite}/{row.bench} {axes_text(row)}", row.metric, f"{each.run_sd:.2%}", f"{each.margin:.1%}",
            "noisy: gates beyond 3 x its noise only" if each.run_sd > 0.025 else "",
        ) for each, row in sorted(found, key=lambda pair: -pair[0].run_sd)
    ]  # fmt: skip
    text = [plain_table(("case", "metric", "run sd", "counts from", ""), lines)]
    text += [
        printable(f"  not calibrated: {row.suite}/{row.bench} {axes_text(row)}: {count} of {runs} runs clean", 300)
        for row, count in bad
    ]
    once = replayed.one_look * replayed.cases
    text.append(
        f"gate replayed on these runs: one look flags {replayed.one_look:.2%} of unchanged cases, "
        f"{once:.2f} of {counted(replayed.cases, 'case')} a gate"
    )
    if replayed.both_looks is None:
        text.append("  both looks must flag; --runs 20 replays that too")
    else:
        text.append(f"  both looks flag {replayed.both_looks:.3%}: {replayed.both_looks * replayed.cases:.3f} a gate")
    return "\n".join(text)


def _document(at: str, found: Noise, bad: Missed, replayed: Replay) -> dict[str, Any]:
    return {
        "schema": CALIBRATE_SCHEMA,
        "calibrations": [
            {
                "suite": row.suite, "bench": row.bench, "axes": dict(row.axes), "metric": row.metric,
                "runs": each.runs, "run_sd": each.run_sd, "margin": each.margin,
            } for each, row in found
        ],
        "not_calibrated": [
            {"suite": row.suite, "bench": row.bench, "axes": dict(row.axes), "metric": row.metric, "clean_runs": count}
            for row, count in bad
        ],
        "created_at": at, "hw_class": found[0][0].hw_class, "env": found[0][0].env_digest,
        "replay": {
            "cases": replayed.cases, "splits": replayed.splits, "one_look": replayed.one_look,
            "both_looks": replayed.both_looks,
        },
    }  # fmt: skip
