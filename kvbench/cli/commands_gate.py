"""``gate``: whether this code is slower than a baseline."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.commands_decide import VERDICTS_SCHEMA, side, side_document
from kvbench.cli.commands_run import parse_overrides
from kvbench.cli.options import Db, Json, Selects
from kvbench.cli.output import emit, emit_json, say
from kvbench.cli.reading import reading
from kvbench.contract.axis import PROFILES
from kvbench.errors import (
    EXIT_INCONCLUSIVE,
    EXIT_NO_DATA,
    EXIT_OK,
    EXIT_REGRESSION,
    KvbenchError,
    NoData,
    UsageError,
    printable,
)

if TYPE_CHECKING:
    from kvbench.analysis.gated import Gated, GateResult, Key
    from kvbench.contract.result import RunInfo
    from kvbench.gating import Fresh
    from kvbench.store.decisions import Calibration

EXITS = {
    "PASS": EXIT_OK, "REGRESSION": EXIT_REGRESSION, "INCONCLUSIVE": EXIT_INCONCLUSIVE, "TAINTED": EXIT_INCONCLUSIVE,
    "REPORT_ONLY": EXIT_INCONCLUSIVE, "NO_DATA": EXIT_NO_DATA,
}  # fmt: skip
Axis = Annotated[
    list[str] | None,
    typer.Option("-a", "--axis", metavar="AXIS=V1,V2", help="Replace the profile's values of an axis; repeatable."),
]
Scratch = Annotated[str | None, typer.Option("--scratch", metavar="DIR", help="Directory for file tiers.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    app.command("gate")(gate)


def gate(
    select: Selects = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="SELECTOR", help="Stored runs of this hardware, at least 5.")
    ] = None,
    baseline_python: Annotated[
        str | None, typer.Option("--baseline-python", metavar="PATH", help="Python with the other kvbench installed.")
    ] = None,
    axis: Axis = None,
    profile: Annotated[
        str | None, typer.Option("--profile", metavar="smoke|quick|full", help="Default: the baseline's, else quick.")
    ] = None,
    no_calibration: Annotated[
        bool, typer.Option("--no-calibration", help="Judge by the margin alone, without knowing each case's noise.")
    ] = False,
    bundles: Annotated[Path | None, typer.Option("--bundles", metavar="DIR", help="Keep both sides' bundles.")] = None,
    verdict: Annotated[Path | None, typer.Option("--verdict", metavar="FILE", help="Write the JSON verdict.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write a JUnit report.")] = None,
    summary: Annotated[
        Path | None, typer.Option("--summary", metavar="FILE", help="Append Markdown; default $GITHUB_STEP_SUMMARY.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Print every case.")] = False,
    scratch: Scratch = None,
    db: Db = None,
    no_db: Annotated[bool, typer.Option("--no-db", help="Store no run; needs --no-calibration.")] = False,
    json: Json = False,
) -> None:
    """Measure this code and say whether it is slower than a baseline: 0 pass, 1 regression, 4 cannot know.

    What looks slower in the first five runs a side is looked at again by five fresh runs a side; only what both show is
    a regression. Exit code 2: the command or baseline cannot be used, 3: nothing matched.
    """
    if (baseline is None) == (baseline_python is None):
        raise UsageError("one baseline is needed", where="kvbench gate", expected="--baseline or --baseline-python")
    if no_db and not no_calibration:
        raise UsageError("the calibration lies in the database", where="--no-db", mend="add --no-calibration")
    if no_db and baseline is not None and not Path(baseline).is_file():
        raise UsageError("stored runs lie in the database", where="--no-db", got=baseline, expected="a bundle file")
    outputs = _outputs(verdict, junit, summary)
    with _told(outputs), _terminated():
        found, calibration = _measured(
            baseline, baseline_python, select or [], axis or [], profile, scratch, bundles, no_calibration, db, no_db
        )  # fmt: skip
        _report(found, calibration, outputs, everything=everything, json=json)


def _measured(
    baseline: str | None, baseline_python: str | None, select: Sequence[str], axis: Sequence[str], profile: str | None,
    scratch: str | None, bundles: Path | None, no_calibration: bool, db: str | None, no_db: bool,
) -> tuple[GateResult, dict[str, Any] | None]:  # fmt: skip
    from kvbench.gating import Asked

    if not no_db:
        check_store(db)
    chosen = None if profile is None else known_profile(profile)
    asked = Asked(tuple(select), tuple(axis), chosen or "quick", scratch)
    if baseline is not None:
        return _stored(baseline, asked, chosen, bundles, no_calibration, db, no_db)
    assert baseline_python is not None
    return _interleaved(baseline_python, asked, bundles, no_calibration, db, no_db)


def _stored(
    baseline: str, asked: Any, profile: str | None, bundles: Path | None, bare: bool, db: str | None, no_db: bool
) -> tuple[GateResult, dict[str, Any] | None]:
    from dataclasses import replace

    from kvbench import runner
    from kvbench.analysis.compare import Side
    from kvbench.analysis.gate import RUNS
    from kvbench.gating import Fresh, against_stored, valued

    found = side(baseline, db)
    kept = Side(found.name, tuple(run for run in found.runs if not run.info.resumed))
    here = runner.here()
    if found.hw_class != here.hw_class:
        raise UsageError(
            "the baseline is of other hardware", where=f"--baseline {baseline}", got=found.hw_class,
            expected=here.hw_class, mend="kvbench compare holds machines against each other",
        )  # fmt: skip
    if len(kept.runs) < RUNS:
        raise UsageError(
            "too few runs for a baseline", where=f"--baseline {baseline}",
            got=f"{len(kept.runs)} that were not resumed", expected=f"at least {RUNS}, 10 to confirm a finding",
            mend="kvbench run --runs 10 --label NAME",
        )  # fmt: skip
    profiles = sorted({run.info.profile for run in kept.runs})
    if len(profiles) > 1 or (profile is not None and profile != profiles[0]):
        raise UsageError(
            "the baseline was measured otherwise", where=f"--baseline {baseline}", got=" ".join(profiles),
            expected=profile or "one profile",
        )  # fmt: skip
    asked = replace(asked, profile=profiles[0])
    planned = planned_digests(asked)
    has = valued(kept.runs)
    keys = {key: row for key, row in has.items() if key[0] in planned}
    if not keys:
        bases = sorted({
            row.basis for run in kept.runs for row in run.results
            if row.value is not None and row.basis != "measured" and row.digest in planned
        })  # fmt: skip
        if bases:
            raise NoData(
                f"what the baseline has of the selected cases is {' or '.join(bases)}, and only measured rows gate",
                where=f"--baseline {baseline}", mend="select benches that measure",
            )  # fmt: skip
        raise NoData(
            "the baseline has a value for none of the selected cases", where=f"--baseline {baseline}",
            mend=f"kvbench show {printable(baseline)} lists what it has",
        )  # fmt: skip
    if not asked.axes:  # a case that was removed, renamed or given a new version is not known, and never a pass
        words = asked.select
        keys |= {
            key: row for key, row in has.items()
            if not words or row.suite in words or f"{row.suite}/{row.bench}" in words
        }  # fmt: skip
    if not asked.select:  # what the baseline does not have need not be measured
        asked = asked.narrowed(sorted({f"{row.suite}/{row.bench}" for key, row in keys.items() if key[0] in planned}))
    known, left_out = _calibrations(here, bare, db)
    with bundle_folder(bundles) as folder:
        fresh = Fresh(sys.executable, "candidate", folder, say, store=not no_db, db=db)
        gated = against_stored(kept, fresh, asked, keys, known, say)
    return gated, None if bare else _calibration(known, left_out, gated)


def _interleaved(
    python: str, asked: Any, bundles: Path | None, bare: bool, db: str | None, no_db: bool
) -> tuple[GateResult, dict[str, Any] | None]:
    from kvbench import runner
    from kvbench.gating import Fresh, interleaved

    planned_digests(asked)
    with bundle_folder(bundles) as folder:
        base = Fresh(python, "baseline", folder, say)
        fresh = Fresh(sys.executable, "candidate", folder, say, store=not no_db, db=db)
        _check_other(base, fresh, python)
        known, left_out = _calibrations(runner.here(), bare, db)
        gated = interleaved(base, fresh, asked, known, say)
    return gated, None if bare else _calibration(known, left_out, gated)


def _check_other(base: Fresh, fresh: Fresh, python: str) -> None:
    if base.home() == fresh.home():
        raise UsageError(
            "both sides are the same code", where="--baseline-python", got=python,
            expected="an environment with the other kvbench", mend="pip install the other version into its own venv",
        )  # fmt: skip


def _calibrations(here: RunInfo, bare: bool, db: str | None) -> tuple[Mapping[Key, Calibration], str]:
    """Return the calibrations that hold here, and why others do not; says before anything is measured if none does."""
    from kvbench.analysis.calibration import usable

    if bare:
        return {}, ""
    try:
        with reading(db) as store:
            kept, left_out = usable(store.calibrations(here.hw_class), here.env)
    except KvbenchError as error:
        kept, left_out = {}, str(error)
    if not kept:
        text = printable(_uncalibrated(left_out), 400)
        say(f"kvbench: {text}: report only, exit code 4; kvbench calibrate, or --no-calibration")
    return kept, left_out


def _uncalibrated(left_out: str) -> str:
    return f"no usable calibration ({left_out})" if left_out else "this hardware was never calibrated"


def _calibration(known: Mapping[Key, Calibration], left_out: str, found: GateResult) -> dict[str, Any]:
    """Return what the verdict says about the calibration of its cases."""
    missing = sum(case.key not in known for case in found.cases)
    reason = f"{missing} of {len(found.cases)} cases have no calibration" if missing else ""
    if not known:
        reason = _uncalibrated(left_out)
    newest = max((each.created_at for each in known.values()), default=None)
    return {"created_at": newest, "cases": len(found.cases) - missing, "reason": reason}


def _report(
    found: GateResult, calibration: dict[str, Any] | None, outputs: Mapping[str, Path], *, everything: bool, json: bool
) -> None:
    from kvbench.gating import decided
    from kvbench.report import gate_text

    found = decided(found, calibration)
    document = gate_document(found, calibration)
    texts = {
        "verdict": lambda: _json_text(document), "junit": lambda: gate_text.junit(found),
        "summary": lambda: gate_text.summary(found),
    }  # fmt: skip
    for name, path in outputs.items():
        try:
            with path.open("a" if name == "summary" else "w", encoding="utf-8") as file:
                file.write(texts[name]())
        except OSError as error:  # the verdict itself must not be lost to a full disk
            say(f"kvbench: --{name} {printable(str(path))} could not be written: {error.strerror}")
    if json:
        emit_json(document)
    else:
        emit(gate_text.gate_text(found, everything=everything))
    raise typer.Exit(EXITS[found.word])


def _json_text(document: Mapping[str, Any]) -> str:
    import json as codec

    return codec.dumps(document, allow_nan=False, indent=1) + "\n"


def gate_document(found: GateResult, calibration: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the ``kvbench.verdicts/1`` document of a gate, worst case first."""
    from kvbench.report.gate_text import ordered

    return {
        "schema": VERDICTS_SCHEMA, "command": "gate", "verdict": found.word, "exit_code": EXITS[found.word],
        "reason": found.reason, "calibration": None if calibration is None else dict(calibration),
        "sides": [side_document(each) for each in found.sides],
        "rows": [_gate_row(case) for case in ordered(found.cases)], "against": [],
    }  # fmt: skip


def _gate_row(case: Gated) -> dict[str, Any]:
    row = case.row_a or case.row_b
    assert row is not None
    effect = case.judged.effect if case.judged else None
    return {
        "side": 1, "suite": row.suite, "bench": row.bench, "axes": dict(row.axes), "metric": row.metric,
        "unit": row.unit, "better": row.better, "a": effect.a if effect else None, "b": effect.b if effect else None,
        "runs_a": effect.runs_a if effect else 0, "runs_b": effect.runs_b if effect else 0,
        "fraction_a": case.row_a.fraction if case.row_a else None,
        "fraction_b": case.row_b.fraction if case.row_b else None, "compares": "value",
        "ratio": effect.ratio if effect else None, "low": effect.low if effect else None,
        "high": effect.high if effect else None, "margin": case.rule.threshold,
        "verdict": case.judged.verdict if case.judged else "NO_DATA", "comparable": "comparable", "differs": [],
        "reason": case.reason, "outcome": case.outcome, "run_sd": case.rule.run_sd, "looks": case.looks,
    }  # fmt: skip


@contextlib.contextmanager
def _told(outputs: Mapping[str, Path]) -> Iterator[None]:
    """Keep the verdict file true however the gate ends: it says at once that there is no verdict yet."""
    _no_verdict(outputs, "the gate has not ended", EXIT_NO_DATA)
    try:
        yield
    except KvbenchError as error:
        _no_verdict(outputs, str(error), error.exit_code)
        raise
    except KeyboardInterrupt:
        _no_verdict(outputs, "the gate was stopped", EXIT_NO_DATA)
        raise


def _no_verdict(outputs: Mapping[str, Path], reason: str, code: int) -> None:
    from kvbench.report.gate_text import junit_error

    document = {
        "schema": VERDICTS_SCHEMA, "command": "gate", "verdict": "NO_DATA", "exit_code": code,
        "reason": printable(reason, 2_000), "calibration": None, "sides": [], "rows": [], "against": [],
    }  # fmt: skip
    for name, text in (("verdict", _json_text(document)), ("junit", junit_error(reason))):
        if name in outputs:
            with contextlib.suppress(OSError):
                outputs[name].write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """End on SIGTERM as on Ctrl-C: the measuring process is stopped, temporary files go, the verdict file says so."""

    def handler(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def known_profile(word: str) -> str:
    if word not in PROFILES:
        raise UsageError("unknown profile", where="--profile", got=word, expected=" ".join(PROFILES))
    return word


def planned_digests(asked: Any) -> set[str]:
    """Return the digests of the cases asked for here. Raises UsageError or NoData before anything is measured, also
    where none of them is a measurement."""
    from kvbench import runner
    from kvbench.contract.discover import load_suites

    profile = next(p for p in PROFILES if p == asked.profile)
    plan = runner.make_plan(load_suites(), asked.select, parse_overrides(asked.axes), profile)
    bases = {member.basis_of(case.axes) for member, case in plan.pairs}
    if "measured" not in bases:
        raise NoData(
            f"the selected cases are {' or '.join(sorted(bases))}, and only measured rows gate",
            where=" ".join(asked.select) or "all suites", mend="select benches that measure",
        )  # fmt: skip
    return {case.digest for _, case in plan.pairs}


def check_store(db: str | None) -> None:
    """Raise UsageError unless rows can be written; the database is made if it is not there."""
    from kvbench.store import open_store

    with open_store(db) as store:
        store.check_writable()


def _outputs(verdict: Path | None, junit: Path | None, summary: Path | None) -> dict[str, Path]:
    """Return the files to write, each checked to be writable before anything is measured."""
    if summary is None and os.environ.get("GITHUB_STEP_SUMMARY"):
        summary = Path(os.environ["GITHUB_STEP_SUMMARY"])
    found = {name: path for name, path in (("verdict", verdict), ("junit", junit), ("summary", summary)) if path}
    places = {name: path.absolute() for name, path in found.items()}
    for name, path in places.items():
        if twin := next((other for other in places if other < name and places[other] == path), None):
            raise UsageError("one file for two outputs", where=f"--{twin} and --{name}", got=str(path))
    from kvbench.store.opened import refuse_database

    for name, path in found.items():
        refuse_database(path, "a file of its own for the gate")
        try:
            with path.open("a"):
                pass
        except OSError as error:
            raise UsageError(f"cannot be written ({error.strerror})", where=f"--{name}", got=str(path)) from None
    return found


@contextlib.contextmanager
def bundle_folder(kept: Path | None) -> Iterator[Path]:
    """Give the folder for bundles: the user's, which must hold none of ours yet, or one that goes away."""
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="kvbench-gate-") as name:
            yield Path(name)
        return
    try:
        kept.mkdir(parents=True, exist_ok=True)
        taken = [path.name for path in kept.glob("*.jsonl")]
    except OSError as error:
        raise UsageError(f"cannot be used ({error.strerror})", where="--bundles", got=str(kept)) from None
    if taken:
        raise UsageError("there are bundles in it already", where=f"--bundles {kept}", got=taken[0], mend="empty it")
    yield kept
