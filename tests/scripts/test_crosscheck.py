"""scripts/crosscheck: verdict words, table, JSON, exit codes, what it parses, and one real kill."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from kvbench.contract.discover import load_suites
from kvbench.errors import KvbenchError
from scripts.figures import costs, ladder, processes, ratios, record, safety
from scripts.figures.record import Figure, judge, lost

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def crosscheck() -> ModuleType:
    loader = SourceFileLoader("crosscheck", str(ROOT / "scripts" / "crosscheck"))
    spec = spec_from_loader("crosscheck", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def figure(verdict: record.Verdict, value: float | None = 1.0) -> Figure:
    return Figure("costs", "something", "s", value, None, 2.0, verdict, "a note")


@pytest.mark.parametrize(
    ("value", "disturbed", "verdict"),
    [
        (1.0, False, "met"), (0.97, False, "met"), (1.03, True, "met"), (1.031, False, "missed"),
        (0.969, False, "missed"), (1.2, True, "disturbed"), (None, False, "missed"), (None, True, "disturbed"),
    ],
)  # fmt: skip
def test_verdict(value: float | None, disturbed: bool, verdict: str) -> None:
    assert judge(value, 0.97, 1.03, disturbed=disturbed) == verdict


def test_open_targets() -> None:
    assert judge(3.0, None, 2.0, disturbed=False) == "missed"
    assert judge(0.0, None, 2.0, disturbed=False) == "met"
    assert judge(1.0, 2.0, None, disturbed=False) == "missed"
    assert judge(1.0, None, None, disturbed=True) == "no target"


@pytest.mark.parametrize(
    ("figure", "value", "target"),
    [
        (Figure("stream", "n", "ratio", 1.0064, 0.97, 1.03, "met"), "1.006", "0.97..1.03"),
        (Figure("costs", "n", "s", 1.5e-6, None, 2e-6, "met"), "1.50 us", "<= 2.00 us"),
        (Figure("safety", "n", "count", 319, 320, 320, "missed", of=320), "319 of 320", "320"),
        (Figure("costs", "n", "s", None, None, None, "no target"), "-", "none"),
    ],
)
def test_value_and_target_stand_in_the_line(figure: Figure, value: str, target: str) -> None:
    assert (figure.value_text, figure.target_text) == (value, target)
    assert f" {value}  {target} " in record.line(figure)
    assert figure.verdict in record.line(figure)


def test_a_lost_figure_is_missed_and_has_no_value() -> None:
    found = lost("costs", "n", "s", 1.0, "broke")
    assert (found.value, found.verdict, found.note) == (None, "missed", "broke")


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["met", "met"], 0), (["met", "no target"], 0), (["met", "missed"], 3), (["met", "disturbed"], 3),
        ([], 3), (["no target"], 3),
    ],
)  # fmt: skip
def test_exit_code_is_0_only_when_every_target_is_met(
    crosscheck: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    verdicts: list[record.Verdict], code: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(costs, "figures", lambda: (figure(verdict) for verdict in verdicts))
    assert crosscheck.main(["costs"]) == code
    table = capsys.readouterr().out
    assert table.count("costs something") == len(verdicts)
    assert crosscheck.main(["costs", "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert (said["schema"], said["exit_code"]) == ("kvbench.crosscheck/1", code)
    assert [f["verdict"] for f in said["figures"]] == verdicts


def test_a_group_that_cannot_be_measured_is_a_missed_figure(
    crosscheck: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> Iterator[Figure]:
        raise KvbenchError("no C compiler", mend="install gcc")
        yield

    monkeypatch.setattr(ratios, "figures", fails)
    monkeypatch.setattr(costs, "figures", lambda: iter([figure("met")]))
    assert crosscheck.main(["chase", "costs"]) == 3
    out = capsys.readouterr().out
    assert "no C compiler; install gcc" in out
    assert "1 met, 1 missed, 0 disturbed" in out


def test_groups_and_their_order(crosscheck: ModuleType) -> None:
    assert crosscheck.arguments([])[0] == ("stream", "chase", "gather", "costs")
    assert crosscheck.arguments(["all"])[0] == crosscheck.GROUPS
    assert crosscheck.arguments(["safety", "stream"])[0] == ("stream", "safety")
    options = crosscheck.arguments(["--pages", "thp", "--threads", "all", "--mib", "8"])[1]
    assert options == ratios.Options(("thp",), ("all",), 40, 8 << 20)


@pytest.mark.parametrize(
    "words", [["nosuch"], ["--pages", "1g"], ["--threads", "3"], ["--pairs", "2"], ["--mib", "0"], ["--nosuch"]]
)
def test_a_mistake_is_exit_2(crosscheck: ModuleType, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        crosscheck.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_ratio_is_c_over_ours(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Both sides run and are verified on small arrays; the ratio is of the right way round."""
    options = ratios.Options(("4k",), ("1",), 3, 1 << 20)
    library = ratios.build(tmp_path)
    memory = ratios.Memory(options.nbytes, "4k")
    with ratios.Team(sorted(os.sched_getaffinity(0))[:1]) as team:
        found = [f for check in ratios.CHECKS.values() for f in check(library, memory, options, team, "4k")]
        fast, slow = {"a": lambda: 1.5, "b": lambda: 1.0}, {"a": lambda: 2.0, "b": lambda: 3.0}
        best = ratios.compare(fast, slow, team, 20)
    assert [f.name.split(",")[0] for f in found if f.group == "stream"] == list(ratios.stream.OPS)
    assert sum(f.group == "gather" for f in found) == 6
    for f in found:
        assert (f.value is None) == (f.verdict == "disturbed")
        assert (f.low, f.high) == ratios.TARGETS[f.group]
    assert best == ratios.Found(1.0, 2.0, 2.0, 20, 0.0, ("b", "a"))
    assert "no call of memcpy in copy_plain" in capsys.readouterr().err


def test_what_the_stress_program_says_is_understood() -> None:
    """The programs' own output, small: a change of their wording must not go unseen."""
    words = ["--processes", "1", "--runs", "2", "--cases", "1", "--latency"]
    done = processes.run([sys.executable, "-m", "tests.store.stress", *words], limit=60, folder=ROOT)
    assert done.code == 0, done.stderr
    found = costs.parse_alone(done.stdout)
    assert found is not None
    what, middle, p99 = found
    assert what == "2 rows, 1,000 samples each"
    assert 0 < middle <= p99
    assert costs.parse_alone("one case committed: soon") is None


def test_writers_at_once_are_counted() -> None:
    found = safety.writers(2, 3)
    assert (found.value, found.of, found.verdict) == (6, 6, "met")


@pytest.mark.parametrize(
    ("stdout", "code"),
    [
        ("acknowledged 5/6 runs, 25/30 cases in 0.1 s\nFAULT 5 of 6 runs acknowledged", 1),
        ("acknowledged 6/6 runs, 30/30 cases in 0.1 s\nFAULT integrity: broken", 1),
        ("acknowledged 6/6 runs, 30/30 cases in 0.1 s", 1), ("acknowledged 6/6 runs, 29/30 cases in 0.1 s", 0), ("", 0),
    ],
)  # fmt: skip
def test_writers_that_lose_something_are_missed(monkeypatch: pytest.MonkeyPatch, stdout: str, code: int) -> None:
    monkeypatch.setattr(safety, "run", lambda *_, **__: processes.Done(0.1, code, stdout, ""))
    found = safety.writers(2, 3)
    assert (found.value, found.verdict) == (None, "missed")
    assert found.note


def test_the_start_of_a_command_and_what_it_imports() -> None:
    seconds, heavy = costs.start("--help", 1000.0, repeats=1)
    assert (seconds.verdict, heavy.verdict, heavy.value) == ("met", "met", 0)
    assert seconds.value is not None
    assert seconds.value > 0
    (failed,) = costs.start("nosuchcommand", 1000.0, repeats=1)
    assert (failed.verdict, failed.value) == ("missed", None)
    assert "exit code 2" in failed.note


def test_a_heavy_import_is_seen() -> None:
    code = "import numba.core, json.decoder"
    done = processes.run([sys.executable, "-X", "importtime", "-c", code], limit=60)
    assert {"numba", "json"} <= costs.imported(done.stderr)
    assert "torch" not in costs.imported(done.stderr)


def test_the_sampler_has_a_target_only_without_the_gate() -> None:
    plain, gated = costs.sampler(samples=200, batches=1)
    assert (plain.high, gated.high, gated.verdict) == (2e-6, None, "no target")
    assert plain.value is not None


def test_neighbours_are_seen_and_own_children_are_not() -> None:
    burn = [sys.executable, "-c", "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"]
    before = processes._own_seconds()
    subprocess.run(burn, check=True)
    assert processes._own_seconds() - before > 0.3
    foreign = processes.Neighbours()
    foreign._own += 10.0  # as if 10 s of this process's own CPU time had been somebody else's
    assert foreign.cpus() is None or foreign.disturbing()


def test_ladder_seconds_count_only_with_ok_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that fails, and a run without an ok row, are never success."""
    found = ladder.wall("ladder/nosuch", "smoke", 20.0)
    assert (found.value, found.verdict) == (None, "missed")
    assert "exit code 2" in found.note
    answer = processes.Done(1.5, 0, json.dumps({"results": [{"status": "ok"}, {"status": "skipped"}]}), "")
    monkeypatch.setattr(ladder, "run", lambda *_, **__: answer)
    assert ladder.wall("ladder", "smoke", 20.0).verdict == "met"
    assert ladder.wall("ladder", "smoke", 20.0).note.startswith("1 ok, 1 skipped")
    assert ladder.wall("ladder", "smoke", 1.0).verdict in ("missed", "disturbed")
    nothing = processes.Done(1.5, 0, json.dumps({"results": [{"status": "skipped"}]}), "")
    monkeypatch.setattr(ladder, "run", lambda *_, **__: nothing)
    assert ladder.wall("ladder", "smoke", 20.0).verdict == "missed"


SELECTION = ("ladder/host_latency", "-a", "pages=4k", "-a", "bytes=4KiB,8KiB,16KiB", "--profile", "smoke")


class AfterFirstCase(random.Random):
    """The moment at which the first case has just been acknowledged and the second has begun."""

    def randrange(self, *_: object) -> int:  # type: ignore[override]
        return 1

    def uniform(self, *_: object) -> float:
        return 0.0


def test_one_kill_of_a_real_run() -> None:
    lost_nothing, resumed = safety.kills(1, AfterFirstCase(), SELECTION)
    assert (lost_nothing.value, lost_nothing.of, lost_nothing.verdict) == (1, 1, "met"), lost_nothing.note
    assert "1 workers hit" in lost_nothing.note
    assert (resumed.value, resumed.of, resumed.verdict) == (1, 1, "met"), resumed.note


def test_what_a_kill_must_not_lose_is_looked_for(tmp_path: Path) -> None:
    """A case acknowledged but not in the file, a run that reads as finished, and a resume that is refused are seen."""
    database, suites = str(tmp_path / "k.db"), load_suites()
    assert len(list(safety.selected(suites, SELECTION))) == 3
    kill = safety.kill_once(database, SELECTION, AfterFirstCase(), 3)
    assert kill is not None
    assert (kill.planned, kill.measuring, kill.faults) == (3, True, ())
    assert safety.missing(database, suites, kill) == []
    assert "acknowledged cases are missing" in safety.missing(database, suites, record_lies(kill))[0]
    with sqlite3.connect(database) as raw:
        raw.execute("UPDATE runs SET status = 'ok'")
    raw.close()
    assert "reads as ok with 1 of 3 cases" in safety.missing(database, suites, kill)[0]
    assert "finished" in safety.resume(database, suites, kill)


def record_lies(kill: safety.Kill) -> safety.Kill:
    """Return ``kill`` as if one more case had been acknowledged."""
    more = (len(kill.acknowledged) + 1, "ladder/host_latency pages=4k bytes=1GiB")
    return safety.Kill(kill.run, kill.planned, (*kill.acknowledged, more), kill.measuring)


def test_a_process_left_in_the_session_is_seen() -> None:
    child = [sys.executable, "-c", "import subprocess, sys; subprocess.Popen(['sleep', '30']); print(flush=True)"]
    process = subprocess.Popen(child, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.wait()
    left = safety.members(process.pid)
    assert len(left) == 1
    os.kill(left.pop(), signal.SIGKILL)
    assert safety.survivors(process.pid) == set()


def kill_of(acknowledged: int, measuring: bool = True, faults: tuple[str, ...] = ()) -> safety.Kill:
    return safety.Kill("0123abcd", 8, tuple((k + 1, f"case {k}") for k in range(acknowledged)), measuring, faults)


def test_kills_prove_something_or_are_missed() -> None:
    good = safety.summary("n", [kill_of(3), kill_of(0, measuring=False)])
    assert (good.value, good.of, good.verdict) == (2, 2, "met")
    bad = safety.summary("n", [kill_of(3), kill_of(1, faults=("integrity: broken",))])
    assert (bad.value, bad.verdict) == (1, "missed")
    assert "integrity: broken" in bad.note
    for nothing in ([kill_of(0)], [kill_of(2, measuring=False)], []):
        assert safety.summary("n", nothing).verdict == "missed"


def test_stored_lines_are_read_with_and_without_a_status() -> None:
    text = (
        "0123abcd: 3 cases, profile smoke, about 1.0 s\nstored 1/3 ladder/x a=1\n"
        "stored 2/3 ladder/x a=2 (tainted: other load)\nstored 3/3 ladder/x a=3"
    )
    begun = safety._BEGUN.search(text)
    assert begun is not None
    assert (begun["uuid"], begun["cases"]) == ("0123abcd", "3")
    # the last line was cut by the kill: it was not printed
    assert [(m["k"], m["case"]) for m in safety._STORED.finditer(text)] == [
        ("1", "ladder/x a=1"),
        ("2", "ladder/x a=2"),
    ]
