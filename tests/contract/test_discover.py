"""Finding suites: names, nearest matches, plug-ins that break."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.contract.discover import load_suites
from kvbench.errors import UsageError

GOOD = '''
from kvbench import axis, bench
@bench(version=1, metric="m", unit="s", better="lower", op=axis.choice("a", "b"))
def thing(case, measure):
    """A thing."""
'''


def test_the_shipped_suites_load_without_a_problem() -> None:
    suites = load_suites()
    assert suites.problems == ()
    assert "host_bandwidth" in suites.benches["ladder"]
    for members in suites.benches.values():
        for member in members.values():
            for profile in ("smoke", "quick", "full"):
                assert list(member.cases(profile)), f"{member.name} measures nothing at {profile}"
            assert set(member.seconds) == {"smoke", "quick", "full"}, f"{member.name} gives no estimate"


def test_digests_of_all_shipped_cases_differ() -> None:
    digests = [c.digest for s in load_suites().benches.values() for b in s.values() for c in b.cases("full")]
    assert len(digests) == len(set(digests))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("laddr", "did you mean 'ladder'"),
        ("ladder/host_bandwith", "did you mean 'host_bandwidth'"),
        ("host_bandwidth", "did you mean ladder/host_bandwidth"),
        ("ladder/", "no bench after the slash"),
        ("", "unknown suite"),
        ("ladder/host_bandwidth/x", "unknown bench"),
        ("canary", "unknown suite"),
    ],
)
def test_an_unknown_name_is_a_usage_error_with_the_nearest(word: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_suites().select([word])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_selecting_the_same_bench_twice_measures_it_once() -> None:
    chosen = load_suites().select(["ladder/host_bandwidth", "ladder"])
    assert len({b.name for b in chosen}) == len(chosen)


@pytest.mark.parametrize("text", ["raise RuntimeError('no')", "import sys; sys.exit(3)", "def x(:", "1/0"])
def test_a_broken_file_is_reported_and_the_rest_goes_on(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "mine"
    suite.mkdir()
    (suite / "bench_bad.py").write_text(text)
    (suite / "bench_good.py").write_text(GOOD)
    monkeypatch.setenv("KVBENCH_SUITES", str(suite))
    suites = load_suites()
    assert list(suites.benches["mine"]) == ["thing"]
    assert len(suites.problems) == 1
    assert "mine/bench_bad.py was skipped" in suites.problems[0]
    assert "\n" not in suites.problems[0]


def test_a_name_taken_twice_keeps_the_first_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for suite in ("ladder", "canary"):
        (tmp_path / suite).mkdir()
        (tmp_path / suite / "bench_x.py").write_text(GOOD.replace("thing", "host_bandwidth"))
    monkeypatch.setenv("KVBENCH_SUITES", str(tmp_path))
    suites = load_suites()
    assert suites.find("ladder", "host_bandwidth").metric == "bandwidth"
    assert "canary" not in suites.benches
    assert len([p for p in suites.problems if "already taken" in p]) == 2


def test_a_missing_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_SUITES", str(tmp_path / "gone"))
    assert "is not a folder" in load_suites().problems[0]


class Point:
    """An installed entry point of group ``kvbench.suites``."""

    def __init__(self, name: str, given: object) -> None:
        self.name, self._given = name, given

    def load(self) -> object:
        if isinstance(self._given, BaseException):
            raise self._given
        return self._given


def test_plug_ins_bring_folders_and_a_broken_one_is_reported_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for suite in ("one", "two", "three"):
        (tmp_path / suite).mkdir()
        (tmp_path / suite / "bench_x.py").write_text(GOOD)

    def fails() -> object:
        raise SystemExit(3)

    points = [
        Point("folder", tmp_path / "one"), Point("broken", ImportError("no module\nnamed x")), Point("exits", fails),
        Point("function", lambda: [str(tmp_path / "two"), tmp_path / "three"]), Point("nonsense", 7),
    ]  # fmt: skip
    monkeypatch.setattr("kvbench.contract.discover.entry_points", lambda group: points)
    suites = load_suites()
    assert {"one", "two", "three", "ladder"} <= set(suites.benches)
    assert [line.split(" was skipped")[0] for line in suites.problems] == [
        "plug-in broken", "plug-in exits", "plug-in nonsense",
    ]  # fmt: skip
    assert not any("\n" in line for line in suites.problems)
