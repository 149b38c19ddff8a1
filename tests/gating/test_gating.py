"""The gate from runs to verdict: what is looked at again, and what is never a pass."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from kvbench.analysis.gated import GateResult
from kvbench.cli.commands_gate import gate_document
from kvbench.contract.result import Result
from kvbench.errors import NoData
from kvbench.gating import Asked, against_stored, decided, interleaved, primaries
from kvbench.report.gate_text import SUMMARY_BYTES, gate_text, junit, summary
from kvbench.schemas import schema_for
from kvbench.store.decisions import Calibration
from tests.analysis.sides import Run, around, each, row, side
from tests.store.factories import HOSTILE, make_run

ASKED = Asked(("ladder",), (), "smoke")


class Measured:
    """Stands for ``kvbench run`` of one side: hands out prepared looks and notes what it was asked."""

    def __init__(self, name: str, *looks: Sequence[Sequence[Result]], single: bool = False) -> None:
        self.name, self.asked, self._single = name, list[tuple[str, ...]](), single
        self._looks = [[Run(make_run(), tuple(rows)) for rows in look] for look in looks]

    def runs(self, asked: Asked, count: int) -> list[Any]:
        self.asked.append(asked.select)
        if self._single:
            found, self._looks[0] = self._looks[0][:count], self._looks[0][count:]
            if not self._looks[0]:
                self._looks.pop(0)
            return list(found)
        return list(self._looks.pop(0))


def tell(_line: str) -> None:
    pass


def known(keys: Mapping[tuple[str, str], Result], run_sd: float = 0.005) -> dict[tuple[str, str], Calibration]:
    return {
        key: Calibration(key[0], key[1], "cpu-a", "env", "2026-01-01T00:00:00.000000+00:00", 10, run_sd, 0.02, {})
        for key in keys
    }


COMMON = known({key: rows[0] for key, rows in primaries(side("a", around(1.0)).runs).items()})


def stored(
    base: list[list[Result]], *looks: list[list[Result]], run_sd: float = 0.005, **calibrated: Any
) -> tuple[GateResult, Measured]:
    baseline = side("base", base)
    keys = {key: rows[0] for key, rows in primaries(baseline.runs).items()}
    fresh = Measured("candidate", *looks)
    found = against_stored(baseline, fresh, ASKED, keys, known(keys, run_sd), tell, **calibrated)  # type: ignore[arg-type]
    return found, fresh


def test_unchanged_code_passes_and_is_looked_at_once() -> None:
    found, fresh = stored(around(1.0, cases=3, runs=10), around(1.0, cases=3))
    assert (found.word, len(found.cases)) == ("PASS", 3)
    assert len(fresh.asked) == 1


def test_a_loss_is_confirmed_by_fresh_runs_of_its_bench_only() -> None:
    def planted(rows: list[list[Result]]) -> list[list[Result]]:
        return [[r.with_(value=(r.value or 0) * (0.8 if i == 1 else 1.0)) for i, r in enumerate(run)] for run in rows]

    found, fresh = stored(around(1.0, 3, 10), planted(around(1.0, 3)), planted(around(1.0, 3)))
    assert found.word == "REGRESSION"
    assert [case.outcome for case in found.cases] == ["pass", "regression", "pass"]
    assert fresh.asked == [("ladder",), ("ladder/host_bandwidth",)]
    assert found.cases[1].looks == 2


def test_what_the_second_look_does_not_find_passes() -> None:
    found, _ = stored(around(1.0, 1, 10), around(0.8), around(1.0))
    assert (found.word, found.cases[0].outcome) == ("PASS", "pass")


@pytest.mark.parametrize("runs", [5, 9])
def test_a_short_baseline_confirms_nothing(runs: int) -> None:
    found, fresh = stored(around(1.0, 1, runs), around(0.8))
    assert (found.word, found.cases[0].outcome) == ("INCONCLUSIVE", "unknown")
    assert "10 are needed" in found.cases[0].reason
    assert len(fresh.asked) == 1


def test_the_looks_share_no_run_of_the_baseline() -> None:
    base = around(1.0, 1, 10)
    found, _ = stored(base, around(0.8), around(0.8))
    assert len(found.sides[0].runs) == 5
    assert found.word == "REGRESSION"


@pytest.mark.parametrize("status", ["failed", "skipped", "tainted", "invalid"])
def test_a_candidate_without_clean_runs_never_passes(status: Any) -> None:
    value = None if status in ("failed", "skipped") else 1e10
    lost = each(around(1.0), lambda r: r.with_(status=status, value=value, reason="it died"))
    found, _ = stored(around(1.0, 1, 10), lost)
    assert found.word in ("NO_DATA", "INCONCLUSIVE")
    assert found.cases[0].outcome == "unknown"
    assert status in found.cases[0].reason


def test_a_case_that_vanished_never_passes() -> None:
    found, _ = stored(around(1.0, 2, 10), [rows[:1] for rows in around(1.0, 2)])
    assert found.word == "INCONCLUSIVE"
    assert "not measured" in found.cases[1].reason


def test_numbers_nobody_measured_and_resumed_runs_gate_nothing() -> None:
    rows = [row(0, 1e10, basis="modelled"), row(1, 1e10), row(1, 2e10, metric="further")]
    assert [key[1] for key in primaries(side("a", [rows]).runs)] == ["bandwidth"]
    assert primaries(side("a", [rows], resumed=True).runs) == {}


def test_a_noisy_case_is_inconclusive_below_three_times_its_noise() -> None:
    assert stored(around(1.0, 1, 10), around(0.9), run_sd=0.05)[0].word == "INCONCLUSIVE"
    assert stored(around(1.0, 1, 10), around(0.7), around(0.7), run_sd=0.05)[0].word == "REGRESSION"


def test_canaries_that_moved_taint_the_gate_whatever_the_cases_say() -> None:
    def guarded(rows: list[list[Result]], factor: float) -> list[list[Result]]:
        return [[*run, row(0, 1e9 * factor, suite="canary", metric="rate")] for run in rows]

    found, _ = stored(guarded(around(1.0, 1, 10), 1.0), guarded(around(0.8), 0.7), guarded(around(0.8), 0.7))
    assert found.word == "TAINTED"


def test_both_sides_are_measured_in_turns() -> None:
    order: list[str] = []

    class Noting(Measured):
        def runs(self, asked: Asked, count: int) -> list[Any]:
            order.append(self.name)
            return super().runs(asked, count)

    a, b = Noting("baseline", around(1.0), single=True), Noting("candidate", around(1.0), single=True)
    found = interleaved(a, b, ASKED, COMMON, tell)  # type: ignore[arg-type]
    assert found.word == "PASS"
    assert order == ["baseline", "candidate", "candidate", "baseline"] * 2 + ["baseline", "candidate"]


def test_sides_without_a_common_case_are_no_data() -> None:
    a, b = (
        Measured("baseline", [[row(1, 1e10)]] * 5, single=True),
        Measured("candidate", [[row(2, 1e10)]] * 5, single=True),
    )
    with pytest.raises(NoData):
        interleaved(a, b, ASKED, COMMON, tell)  # type: ignore[arg-type]


def test_without_a_calibration_it_is_a_report() -> None:
    found, _ = stored(around(1.0, 1, 10), around(0.8), around(0.8))
    assert decided(found, None).word == "REGRESSION"
    told = decided(found, {"cases": 0, "reason": "never calibrated"})
    assert told.word == "REPORT_ONLY"
    assert "never calibrated" in told.reason
    assert "REGRESSION" in told.reason


def test_a_case_without_a_calibration_is_unknown_among_calibrated_ones() -> None:
    baseline = side("base", around(1.0, 2, 10))
    keys = {key: rows[0] for key, rows in primaries(baseline.runs).items()}
    first = dict([next(iter(known(keys).items()))])
    fresh = Measured("candidate", around(1.0, 2))
    found = decided(against_stored(baseline, fresh, ASKED, keys, first, tell), {"cases": 1})  # type: ignore[arg-type]
    assert found.word == "INCONCLUSIVE"
    assert [case.outcome for case in found.cases] == ["pass", "unknown"]


def rich() -> GateResult:
    words = [w for w in HOSTILE if w]
    rows = [row(i, 1e10, axes={"op": word, "n": i}) for i, word in enumerate(words)]
    base = [[r.with_(value=1e10 * (1 + 0.001 * run)) for r in rows] for run in range(10)]
    bad = [[r.with_(value=(r.value or 0.0) * 0.8) for r in run] for run in base[:5]]
    return stored(base, bad, bad)[0]


def test_every_output_is_well_formed_whatever_the_words() -> None:
    found = rich()
    assert found.word == "REGRESSION"
    document = json.loads(json.dumps(gate_document(found, None), allow_nan=False))
    jsonschema.Draft202012Validator(schema_for("kvbench.verdicts/1")).validate(document)
    suite = ElementTree.fromstring(junit(found))
    assert suite.get("failures") == str(len(found.cases)) == str(len(list(suite.iter("failure"))))
    table = [line for line in summary(found).splitlines() if line.startswith("| ladder")]
    assert len(table) == len(found.cases)
    assert all(line.replace("\\|", "").count("|") == 7 for line in table)
    assert "\x1b" not in gate_text(found, everything=True) + junit(found) + summary(found)


def test_a_summary_stays_below_what_is_dropped_whole_and_keeps_the_worst() -> None:
    name = "x" * 600
    rows = [row(i, 1e10, axes={"name": name, "n": i}) for i in range(2500)]
    base = [[r.with_(value=1e10 * (1 + 0.001 * run)) for r in rows] for run in range(5)]
    worst = [[r.with_(value=(r.value or 0.0) * (0.5 if i == 1999 else 1.0)) for i, r in enumerate(run)] for run in base]
    found, _ = stored(base, worst)
    text = summary(found)
    assert len(text.encode()) < SUMMARY_BYTES
    assert "n=1999" in text.splitlines()[6]
    assert "more cases are not shown" in text


def test_the_text_shows_the_worst_first(tmp_path: Path) -> None:
    text = gate_text(rich(), everything=False)
    assert "regression" in text.splitlines()[3]
    assert text.splitlines()[-1].startswith("gate: REGRESSION")
