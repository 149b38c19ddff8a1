"""``--machine this``: what the database holds about this machine, handed to the replay as one named set of costs."""

from __future__ import annotations

import json
from dataclasses import asdict

from kvbench.cli.output import say
from kvbench.cli.reading import reading
from kvbench.errors import NoData, UsageError

MOST_RUNS = 200  # newest runs that are read
SUITES = frozenset({"ladder", "strata", "neo", "ellm"})  # where costs are measured


def machine_axis(name: str, db: str | None) -> str:
    """Return the machine called ``name`` as an axis value: a preset's name, or ``this@`` and the digest of its numbers.

    Raises UsageError for an unknown name, and for ``this`` where nothing of it was measured.
    """
    from kvbench.replay.machine import THIS, preset

    if name == THIS:
        return this_machine(db)
    preset(name)
    return name


def this_machine(db: str | None) -> str:
    """Read what was measured on this hardware, say how much that is, and make it known under its name."""
    from kvbench.machine.fingerprint import fingerprint
    from kvbench.replay.here import FALLBACK, here
    from kvbench.replay.job import know_machine
    from kvbench.replay.machine import NUMBERS, THIS

    mine = fingerprint().hw_class
    rows, runs = [], {}
    with reading(db) as store:
        for run in store.runs(limit=MOST_RUNS):
            if run.info.hw_class != mine or not SUITES & {planned.suite for planned in run.info.plan}:
                continue
            runs[run.info.uuid] = run.info.started_at
            rows += [row.to_json(run.info.uuid) for row in store.results(run.info.uuid, canaries=False)]
    try:
        found = here(rows, runs)
    except NoData as error:  # a machine that cannot be had is a word that cannot be used
        raise UsageError(error.what, where=error.where, expected=error.expected, mend=error.mend) from None
    names = found.measured()
    say(
        f"kvbench: costs of this machine: {len(names)} of {len(NUMBERS)} numbers measured here ({', '.join(names)}), "
        f"the others are those of the preset {FALLBACK}"
    )
    tables = sorted(
        (row["run"], sorted(row["axes"].items()), row["metric"], row["value"])
        for row in found.rows if row["suite"] == "neo" and row["bench"] == "cost_tables"
    )  # fmt: skip
    contention = {name: value for name, value in asdict(found.contention).items() if name != "sources"}
    text = json.dumps([found.machine.to_json(), contention, tables], sort_keys=True, allow_nan=False)
    return know_machine(THIS, text, found.costs)
