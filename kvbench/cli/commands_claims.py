"""``claims``: the papers' numbers and conditions beside what was measured here, and a verdict on each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.options import Db, Json
from kvbench.cli.output import emit, emit_json, say
from kvbench.errors import EXIT_NO_DATA, EXIT_OK, KvbenchError, UsageError, printable

if TYPE_CHECKING:
    from kvbench.analysis.claim_check import Check, Machine
    from kvbench.analysis.claims import Claim
    from kvbench.analysis.compare import Loaded
    from kvbench.contract.discover import Suites
    from kvbench.store.checks import ClaimCheck

CLAIMS_SCHEMA = "kvbench.claims/1"


def register(app: typer.Typer) -> None:
    """Add the command of this module to ``app``."""
    app.command("claims")(claims)


def claims(
    system: Annotated[
        str | None, typer.Argument(metavar="[SYSTEM]", help="directkv, neo, ellm or strata; none means all.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="SELECTOR", help="Judge by these runs only; default: this machine's newest."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also print baselines, common misreadings and the rows behind a verdict.")
    ] = False,
    db: Db = None,
    json: Json = False,
) -> None:
    """Check the papers' claims: their number and conditions, ours and ours, and a verdict.

    Exit code 0 when at least one claim was judged, 3 when none was: no row it needs is there, or no machine for it.
    """
    from kvbench.analysis.claim_check import JUDGED, check
    from kvbench.analysis.claims import load_claims
    from kvbench.contract.discover import load_suites
    from kvbench.report.claims_text import claims_text

    asked = load_claims(system)
    suites = load_suites()
    for problem in suites.problems:
        say(f"kvbench: {problem}")
    machine, runs, kept_in = _rows(asked, suites, run, db)
    checks = [check(claim, suites, machine, runs) for claim in asked]
    judged = [each for each in checks if each.verdict in JUDGED]
    if kept_in and judged:
        _keep(judged, machine, db)
    if json:
        emit_json({
            "schema": CLAIMS_SCHEMA, "hw_class": machine.hw_class, "claims": [claim_document(each) for each in checks]
        })  # fmt: skip
    else:
        emit(claims_text(checks, machine.hw_class, everything=everything))
        if not judged:
            say("kvbench: no claim was judged: nothing that they need was measured here")
    raise typer.Exit(EXIT_OK if judged else EXIT_NO_DATA)


def _rows(
    asked: Sequence[Claim], suites: Suites, selector: str | None, db: str | None
) -> tuple[Machine, Sequence[Loaded], bool]:
    """Return the machine that is judged, the runs to judge it by, and whether they come from the database."""
    from kvbench.analysis.claim_check import Machine
    from kvbench.analysis.claim_rows import wants
    from kvbench.cli.commands_decide import side
    from kvbench.cli.reading import is_bundle, reading

    if selector is not None:
        found = side(selector, db)
        info = found.runs[-1].info
        return Machine.of(info.hw_class, info.machine), found.runs, not is_bundle(selector)
    from kvbench.machine.fingerprint import fingerprint
    from kvbench.store.target import parse_target

    here = fingerprint()
    machine = Machine.of(here.hw_class, here.machine)
    target = parse_target(db)
    if target.is_default and target.path is not None and not target.path.exists():
        return machine, (), False  # nobody named a database, and there is none yet: no rows, not a mistake
    digests: dict[str, None] = {}
    for form in (form for claim in asked for form in claim.forms):
        try:
            digests |= dict.fromkeys(want.digest for want in wants(form, suites))
        except UsageError:
            continue  # check() tells it with the claim
    with reading(db) as store:
        for notice in store.notices:
            say(f"kvbench: {notice}")
        return machine, store.rows_of_cases(list(digests), here.hw_class), True


def _keep(judged: Sequence[Check], machine: Machine, db: str | None) -> None:
    """Store the checks; a database that takes no writes keeps none, and a line says so."""
    from kvbench.store import open_store

    try:
        with open_store(db, create=False) as store:
            store.add_claim_checks([_record(each, machine) for each in judged])
    except KvbenchError as error:
        say(f"kvbench: the checks are shown and not stored: {error}")


def _record(check: Check, machine: Machine) -> ClaimCheck:
    from kvbench.store.checks import ClaimCheck

    found, seen = check.finding, check.seen
    assert found is not None  # a claim is judged by a finding
    assert seen is not None
    detail = claim_document(check)
    detail["hw_class"] = machine.hw_class
    return ClaimCheck(
        claim=check.claim.id, checked_at="", group=seen.runs[0].group, verdict=check.verdict, basis=seen.basis,
        value=found.value, low=found.low, high=found.high, unit=found.unit, detail=detail,
    )  # fmt: skip


def claim_document(check: Check) -> dict[str, Any]:
    """Return a claim of ``kvbench.claims/1``."""
    claim, found, seen = check.claim, check.finding, check.seen
    return {
        "id": claim.id, "system": claim.system, "kind": claim.kind, "statement": claim.statement,
        "numbers": [
            {"name": n.name, "value": n.value, "high": n.high, "bound": n.bound, "unit": n.unit} for n in claim.numbers
        ],
        "section": claim.section, "hardware": claim.hardware, "baseline": claim.baseline,
        "conditions": claim.conditions, "misquoted": claim.misquoted, "contradiction": claim.contradiction,
        "verified": claim.verified, "tolerance": claim.tolerance, "verdict": check.verdict, "reason": check.reason,
        "form": check.form.on, "label": check.label, "rule": check.form.rule or None,
        "value": None if found is None else found.value, "low": None if found is None else found.low,
        "high": None if found is None else found.high, "unit": None if found is None else found.unit,
        "found": None if found is None else printable(found.text, 2_000),
        "basis": None if seen is None else seen.basis,
        "needs": [
            {"need": str(each.need), "met": each.met, "found": printable(each.found)} for each in check.unmet
        ],
        "commands": list(check.commands), "available": check.bench_is_here,
        "runs": [] if seen is None else [info.uuid for info in seen.runs],
        "rows": [] if seen is None else [
            {
                "suite": p.row.suite, "bench": p.row.bench, "axes": dict(p.row.axes), "metric": p.row.metric,
                "value": p.value, "low": p.low, "high": p.high, "unit": p.row.unit, "basis": p.row.basis,
                "runs": list(p.runs),
            } for p in seen.points
        ],
    }  # fmt: skip
