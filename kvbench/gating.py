"""Runs the regression gate: fresh runs of this code against a baseline, a second look at what the first one flags.

Both sides are measured by ``kvbench run`` in processes of their own and speak through bundles, so a baseline may be
another version in another environment. This process only judges (design 11).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench import children
from kvbench.analysis.compare import CLEAN, Loaded, Side, compare, margin_of
from kvbench.analysis.effect import LEAST_RUNS
from kvbench.analysis.gate import RUNS, Rule, halves, judge, look
from kvbench.analysis.gated import Gated, GateResult, Key, Word
from kvbench.errors import EXIT_OK, KvbenchError, NoData, UsageError, printable

if TYPE_CHECKING:
    from kvbench.contract.result import Result
    from kvbench.store.bundle import BundleRun
    from kvbench.store.decisions import Calibration

Tell = Callable[[str], None]
_EXITS_WITH_ROWS = (EXIT_OK, 3)  # 3: some case failed, which is a finding here and not an end


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured: the words after ``kvbench run``."""

    select: tuple[str, ...]
    axes: tuple[str, ...]
    profile: str
    scratch: str | None = None

    def words(self) -> list[str]:
        found = [*self.select, "--profile", self.profile]
        for axis in self.axes:
            found += ["-a", axis]
        return found + (["--scratch", self.scratch] if self.scratch else [])

    def narrowed(self, benches: Sequence[str]) -> Asked:
        """Return the same with only ``benches`` (suite/bench)."""
        return replace(self, select=tuple(benches))


class Fresh:
    """Measures fresh runs of one Python's kvbench. ``store``: its runs also go to ``db`` (None: the default)."""

    def __init__(
        self, python: str, name: str, folder: Path, tell: Tell, *, store: bool = False, db: str | None = None
    ) -> None:
        self.python, self.name, self._folder, self._tell, self._store = python, name, folder, tell, store
        self._made = 0
        self._env = dict(os.environ)
        if store and db is not None:
            self._env["KVBENCH_DB"] = db  # not a word of the command: everybody reads those, and it may hold a password
        # of another installation: suites and modules found by these would be measured on both sides
        for word in ("PYTHONPATH", "PYTHONHOME", "KVBENCH_SUITES"):
            if python != sys.executable:
                self._env.pop(word, None)

    def home(self) -> str:
        """Return the folder its kvbench package lies in. Raises UsageError when there is none."""
        code = "import kvbench, pathlib; print(pathlib.Path(kvbench.__file__).resolve().parent)"
        try:
            found = subprocess.run(
                [self.python, "-P", "-c", code], capture_output=True, text=True, env=self._env, check=False, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(
                "this Python cannot be run", where="--baseline-python", got=self.python, mend=str(error)
            ) from None
        if found.returncode:
            last = (found.stderr.strip().splitlines() or ["no output"])[-1]
            raise UsageError(
                "this Python has no kvbench", where="--baseline-python", got=f"{self.python}: {printable(last)}",
                expected="a Python 3.11 or newer in whose environment kvbench is installed",
            )  # fmt: skip
        where = found.stdout.strip()
        if not where or not Path(where).is_dir():
            raise UsageError(
                "this is no Python with kvbench", where="--baseline-python", got=f"{self.python}: {printable(where)!r}",
                expected="a Python 3.11 or newer in whose environment kvbench is installed",
            )  # fmt: skip
        return where

    def runs(self, asked: Asked, count: int) -> list[BundleRun]:
        """Return ``count`` fresh runs. Raises UsageError for what that kvbench refuses, KvbenchError when it ends."""
        from kvbench.store import read_bundle

        self._made += 1
        bundle = self._folder / f"{self.name}-{self._made}.jsonl"
        # -P: without it the current folder comes before the environment, and both sides would be one checkout
        words = [self.python, "-P", "-m", "kvbench.cli.main", "run", *asked.words(), "--runs", str(count)]
        words += ["--bundle", str(bundle), *([] if self._store else ["--no-db"])]
        child = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=self._env, errors="replace",
            # a gate that is killed takes its measurement with it; SIGTERM lets that store what it has
            preexec_fn=partial(children.signal_with_parent, signal.SIGTERM),
        )  # fmt: skip
        last = ""
        assert child.stderr is not None
        try:
            for line in child.stderr:
                last = line.strip() or last
                if line.strip():
                    self._tell(f"{self.name}: {printable(line.strip(), 300)}")
            code = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
        if code == 2:
            raise UsageError(
                f"the {self.name} refused to measure", got=printable(last.removeprefix("kvbench: error: "))
            )
        if code not in _EXITS_WITH_ROWS or not bundle.exists():
            raise KvbenchError(f"the {self.name} ended while measuring", got=f"exit code {code}: {printable(last)}")
        return list(read_bundle(bundle).runs)


def against_stored(
    baseline: Side, fresh: Fresh, asked: Asked, keys: Mapping[Key, Result], calibrations: Mapping[Key, Calibration],
    tell: Tell,
) -> GateResult:  # fmt: skip
    """Gate ``fresh`` against stored runs; ``keys`` are the cases both have. Only the candidate can be run again."""
    tell(f"gate: {RUNS} runs of the candidate, {len(keys)} cases")
    candidate = Side("candidate", tuple(fresh.runs(asked, RUNS)))
    first, second = halves(baseline.runs)
    one = _look(first, candidate.runs, keys)
    again: Mapping[Key, _Values] = {}
    wanted = _doubtful(one, keys, calibrations)
    if wanted and second is not None:
        benches = _benches(wanted, keys)
        tell(f"gate: {len(wanted)} cases look slower, {RUNS} fresh runs of {' '.join(benches)}")
        again = _look(second, fresh.runs(asked.narrowed(benches), RUNS), {key: keys[key] for key in wanted})
    why = "" if second is not None else (
        f"flagged, but a baseline of {len(baseline.runs)} runs has none left to confirm with; 10 are needed"
    )  # fmt: skip
    return _result(Side("baseline", tuple(first)), candidate, one, again, keys, calibrations, why)


def interleaved(
    base: Fresh, fresh: Fresh, asked: Asked, calibrations: Mapping[Key, Calibration], tell: Tell
) -> GateResult:
    """Gate ``fresh`` against ``base``, both measured now in turns A B B A. Raises NoData when no case is on both."""
    a, b = _turns(base, fresh, asked, tell)
    keys = valued(a)
    if not keys.keys() & primaries(b).keys():
        raise NoData("no case has a value on both sides", where="kvbench gate", mend="see what `kvbench run` says")
    one = _look(a, b, keys)
    wanted = _doubtful(one, keys, calibrations)
    again: Mapping[Key, _Values] = {}
    if wanted:
        benches = _benches(wanted, keys)
        tell(f"gate: {len(wanted)} cases look slower, looking again at {' '.join(benches)}")
        again = _look(*_turns(base, fresh, asked.narrowed(benches), tell), {key: keys[key] for key in wanted})
    return _result(Side("baseline", tuple(a)), Side("candidate", tuple(b)), one, again, keys, calibrations, "")


def decided(found: GateResult, calibration: Mapping[str, object] | None) -> GateResult:
    """Return ``found`` as its calibration allows: without one it is a report, and a case without one is not known."""
    if calibration is None or found.word == "NO_DATA":
        return found
    if not calibration.get("cases"):
        text = f"{calibration.get('reason')}; it would be {found.word}: {found.reason}"
        return replace(found, word="REPORT_ONLY", reason=text)
    cases = tuple(
        case if case.rule.run_sd is not None or case.outcome == "unknown"
        else replace(case, outcome="unknown", reason="; ".join(filter(None, ("not calibrated", case.reason))))
        for case in found.cases
    )  # fmt: skip
    word, reason = _word(cases, found.moved)
    return replace(found, cases=cases, word=word, reason=reason)


def _turns(base: Fresh, fresh: Fresh, asked: Asked, tell: Tell) -> tuple[list[BundleRun], list[BundleRun]]:
    found: dict[str, list[BundleRun]] = {base.name: [], fresh.name: []}
    for turn in range(RUNS):
        for side in (base, fresh) if turn % 2 == 0 else (fresh, base):
            tell(f"gate: {side.name} {turn + 1}/{RUNS}")
            found[side.name] += side.runs(asked, 1)
    return found[base.name], found[fresh.name]


@dataclass(frozen=True, slots=True)
class _Values:
    """The clean run medians of a case on both sides of one look, with a row of each."""

    a: tuple[float, ...]
    b: tuple[float, ...]
    row_a: Result | None
    row_b: Result | None


def primaries(runs: Sequence[Loaded]) -> dict[Key, list[Result]]:
    """Return the primary rows of every case, one a run; canaries, computed numbers and resumed runs are none."""
    found: dict[Key, list[Result]] = {}
    for run in runs:
        seen: set[str] = set()
        for row in run.results if not run.info.resumed else ():
            if row.is_canary or row.digest in seen:
                continue
            seen.add(row.digest)
            if row.basis == "measured":
                found.setdefault((row.digest, row.metric), []).append(row)
    return found


def has_value(row: Result) -> bool:
    return row.status in CLEAN and row.value is not None and row.value > 0.0


def valued(runs: Sequence[Loaded]) -> dict[Key, Result]:
    """Return the cases of the baseline at least one run has a value for; one the candidate lacks is not known."""
    return {key: rows[0] for key, rows in primaries(runs).items() if any(row.value is not None for row in rows)}


def _look(a: Sequence[Loaded], b: Sequence[Loaded], keys: Mapping[Key, Result]) -> dict[Key, _Values]:
    ours, theirs = primaries(a), primaries(b)
    found: dict[Key, _Values] = {}
    for key in keys:
        rows = [side.get(key, []) for side in (ours, theirs)]
        clean = [tuple(row.value for row in side if has_value(row) and row.value) for side in rows]
        firsts = [next(filter(has_value, side), side[0] if side else None) for side in rows]
        found[key] = _Values(clean[0], clean[1], firsts[0], firsts[1])
    return found


def _rule(key: Key, values: _Values, calibrations: Mapping[Key, Calibration]) -> Rule:
    rows = [row for row in (values.row_a, values.row_b) if row is not None]
    known = calibrations.get(key)
    return Rule(margin_of(rows), None if known is None else known.run_sd)


def _doubtful(looked: Mapping[Key, _Values], keys: Mapping[Key, Result], known: Mapping[Key, Calibration]) -> list[Key]:
    """Return the cases whose loss is beyond what counts, by ranks or not: they are looked at again."""

    def doubtful(key: Key, values: _Values) -> bool:
        found = look(values.a, values.b, keys[key].better)
        return found.loss > _rule(key, values, known).threshold

    return [key for key, values in looked.items() if values.a and values.b and doubtful(key, values)]


def _benches(wanted: Sequence[Key], keys: Mapping[Key, Result]) -> list[str]:
    return list(dict.fromkeys(f"{keys[key].suite}/{keys[key].bench}" for key in wanted))


def _result(
    baseline: Side, candidate: Side, one: Mapping[Key, _Values], again: Mapping[Key, _Values],
    keys: Mapping[Key, Result], calibrations: Mapping[Key, Calibration], why: str,
) -> GateResult:  # fmt: skip
    cases = tuple(
        _gated(key, one[key], again.get(key), keys[key], _rule(key, one[key], calibrations), why) for key in keys
    )
    left_out = sum(key not in keys for key in primaries(candidate.runs))
    found = compare([baseline, candidate]).against[0]
    word, reason = _word(cases, found.moved)
    return GateResult(word, reason, cases, (baseline, candidate), found.moved, left_out)


def _word(cases: Sequence[Gated], moved: Sequence[str]) -> tuple[Word, str]:
    """Return the one word for all cases, and why."""
    slower, unknown = (sum(case.outcome == word for case in cases) for word in ("regression", "unknown"))
    if not any(case.judged for case in cases):
        return "NO_DATA", "no case has a value on both sides"
    if moved:
        return "TAINTED", f"the machine changed between the sides: {', '.join(moved)}"
    if slower:
        return "REGRESSION", f"{slower} of {len(cases)} cases are slower, confirmed"
    if unknown:
        return "INCONCLUSIVE", f"{unknown} of {len(cases)} cases could not be decided"
    return "PASS", f"{len(cases)} cases, none slower"


def _gated(key: Key, first: _Values, second: _Values | None, row: Result, rule: Rule, why: str) -> Gated:
    missing = [
        f"{name}: {_without(found, values)}" for name, values, found in (
            ("baseline", first.a, first.row_a), ("candidate", first.b, first.row_b)
        ) if len(values) < LEAST_RUNS
    ]  # fmt: skip
    if not first.a or not first.b:
        return Gated(key, first.row_a, first.row_b, None, rule, 1, "unknown", "; ".join(missing))
    one = look(first.a, first.b, row.better)
    two = None
    if second is not None and second.a and second.b:
        two = look(second.a, second.b, row.better)
    elif second is not None:
        why = "flagged, and the fresh runs gave no value"
    found = judge(one, rule, two, why_no_second=why)
    reason = "; ".join(missing) or found.reason
    return Gated(key, first.row_a, first.row_b, found, rule, 1 if two is None else 2, found.outcome, reason)


def _without(row: Result | None, values: Sequence[float]) -> str:
    if row is None:
        return "not measured"
    if has_value(row):
        return f"{len(values)} clean runs, {LEAST_RUNS} are needed"
    return f"{row.status}{f' ({row.reason})' if row.reason else ''}"
