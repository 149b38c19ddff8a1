"""``kvbench compare`` as a user runs it: selectors, both outputs, exit codes, and words nobody wrote for a terminal."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvbench.cli.main import main
from kvbench.contract.result import PlannedCase, Result
from kvbench.schemas import schema_for
from kvbench.store.bundle import BundleWriter
from tests.analysis.sides import around, row
from tests.store.factories import HOSTILE, at, make_run

GROUPS = ("a" * 8 + "-1111-4111-8111-111111111111", "b" * 8 + "-1111-4111-8111-111111111111")


def write(path: Path, runs: Sequence[Sequence[Result]], **info: Any) -> Path:
    """Write a bundle of one group of runs, finished."""
    with BundleWriter(path) as writer:
        for rows in runs:
            plan = tuple(
                PlannedCase(r.digest, r.suite, r.bench, r.bench_version, dict(r.axes))  # type: ignore[arg-type]
                for r in rows
            )
            run = make_run(plan=plan, **info)
            writer.begin_run(run)
            for position, found in enumerate(rows):
                writer.add_results(run.uuid, [found], position)
            writer.finish_run(run.uuid, "ok", at(60))
    return path


def said(*words: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def document(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator(schema_for(found["schema"])).validate(found)
    return found


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    a = write(tmp_path / "a.jsonl", around(1.0, cases=12), group=GROUPS[0])
    b = write(tmp_path / "b.jsonl", around(0.9, cases=11), group=GROUPS[1])
    return a, b


def test_both_outputs_say_the_same(sides: tuple[Path, Path]) -> None:
    code, text, _ = said("compare", *sides)
    assert code == 0
    assert "verdicts: 11 SLOWER" in text
    assert "1 only in the first" in text
    assert "verdict: SLOWER" in text
    code, out, _ = said("compare", *sides, "--json")
    found = document(out)
    assert (code, found["exit_code"], found["verdict"]) == (0, 0, "SLOWER")
    assert len(found["rows"]) == 11
    assert found["rows"][0]["ratio"] == pytest.approx(0.9)
    assert len(found["against"][0]["missing"]) == 1
    assert found["sides"][0]["runs"] != found["sides"][1]["runs"]


def test_the_short_form_is_short_and_all_is_all(tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, around(f, cases=60)) for name, f in (("a.jsonl", 1.0), ("b.jsonl", 0.9)))
    short, long = said("compare", a, b)[1], said("compare", a, b, "--all")[1]
    assert "50 rows more: --all shows them" in short
    assert short.count("SLOWER") < 15 < 60 <= long.count("SLOWER")


def test_nothing_in_common_is_exit_3_and_never_a_pass(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", [[row(1, 1e10)]]), write(tmp_path / "b.jsonl", [[row(2, 1e10)]])
    code, out, err = said("compare", a, b, "--json")
    assert (code, document(out)["verdict"]) == (3, "NO_DATA")
    code, _, err = said("compare", a, b)
    assert code == 3
    assert "nothing to compare" in err


def test_stored_runs_and_bundles_compare_alike(sides: tuple[Path, Path], tmp_path: Path) -> None:
    db = tmp_path / "k.db"
    assert said("import", *sides, "--db", db)[0] == 0
    stored = document(said("compare", GROUPS[0][:8], GROUPS[1][:8], "--db", db, "--json")[1])
    files = document(said("compare", *sides, "--json")[1])
    assert stored["rows"] == files["rows"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["a.jsonl"], "nothing to compare with"), (["a.jsonl", "a.jsonl"], "compared with itself"),
        (["a.jsonl", "none.jsonl"], "no such"), ([], "Missing argument"), (["a.jsonl", "mixed.jsonl"], "one machine"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_2(
    words: list[str], text: str, sides: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two = [write(tmp_path / f"{kind}.jsonl", [[row(0, 1e10)]], hw_class=kind) for kind in ("cpu-a", "cpu-b")]
    (tmp_path / "mixed.jsonl").write_bytes(b"".join(path.read_bytes() for path in two))
    code, out, err = said("compare", *words, "--db", tmp_path / "k.db")
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert text.lower() in err.lower()
    assert not (tmp_path / "k.db").exists()


@pytest.mark.parametrize("word", [w for w in HOSTILE if w])
def test_hostile_words_reach_no_terminal(word: str, tmp_path: Path) -> None:
    rows = [row(0, 1e10, axes={"op": word, "n": 1}, resolved={"x": word}, kernel=word)]
    a = write(tmp_path / "a.jsonl", [rows], label=word if word.isprintable() else None)
    b = write(tmp_path / "b.jsonl", [rows], hw_class=word)
    code, text, _ = said("compare", a, b, "--all")
    assert code == 0
    assert "\x1b" not in text
    assert all(line.isprintable() for line in text.splitlines())
    document(said("compare", a, b, "--json")[1])
