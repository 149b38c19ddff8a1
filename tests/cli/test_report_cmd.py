"""``kvbench report`` as a user runs it: what it writes, what it never overwrites, exit codes, and what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvbench.report.html import HEAD
from kvbench.store import open_store
from tests.cli.test_compare import document, said, write
from tests.needs import missing_module, require
from tests.report.made import MACHINE, case
from tests.store.factories import HOSTILE, at, make_run

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def the_extra() -> None:
    require("report", missing_module("vl_convert") or missing_module("jinja2"))


def bundle(path: Path, factor: float = 1.0, runs: int = 1, **info: object) -> Path:
    rows = [case("ladder", "host_bandwidth", {"op": "read", "bytes": 4096 << i}, factor * 1e10 + i) for i in range(4)]
    return write(path, [rows for _ in range(runs)], machine=MACHINE, **info)


def test_a_bundle_becomes_a_page_and_figures(tmp_path: Path) -> None:
    page, folder = tmp_path / "r.html", tmp_path / "figures"
    source = bundle(tmp_path / "a.jsonl")
    code, out, err = said("report", source, "-o", page, "--figures", folder, "--json")
    assert code == 0, err
    (made,) = document(out)["reports"]
    assert page.read_text(encoding="utf-8").startswith(HEAD)
    assert (made["path"], made["bytes"], made["cases"]) == (str(page), page.stat().st_size, 4)
    assert sorted(map(str, folder.iterdir())) == sorted(made["files"])
    names = [each["name"] for each in json.loads((folder / "kvbench-figures.json").read_text())["figures"]]
    assert len(names) == made["figures"] == 2
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(PNG)
        assert (folder / f"{name}.svg").read_text().startswith("<svg")
        assert "vega-lite" in json.loads((folder / f"{name}.vl.json").read_text())["$schema"]
    assert "bundles have no history" in page.read_text()
    assert "directkv-" in page.read_text()  # the claims are listed with the command that would measure them


def test_the_same_selection_gives_the_same_figures(tmp_path: Path) -> None:
    source = bundle(tmp_path / "a.jsonl")
    for name in ("one", "two"):
        assert said("report", source, "-o", tmp_path / f"{name}.html", "--figures", tmp_path / name)[0] == 0
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_two_selections_are_compared_the_first_is_the_base(tmp_path: Path) -> None:
    a, b = bundle(tmp_path / "a.jsonl", runs=5), bundle(tmp_path / "b.jsonl", 0.5, runs=5)
    assert said("report", a, b, "-o", tmp_path / "1.html")[0] == 0
    assert said("report", b, "--compare", a, "-o", tmp_path / "2.html")[0] == 0
    pages = [(tmp_path / name).read_text() for name in ("1.html", "2.html")]
    for page in pages:
        assert '<section id="compare">' in page
        assert page.count('<tr class="SLOWER">') == 4
    assert said("report", a, "-o", tmp_path / "3.html")[0] == 0
    assert '<section id="compare">' not in (tmp_path / "3.html").read_text()


def test_history_comes_from_the_database_with_three_runs(tmp_path: Path) -> None:
    db, page = tmp_path / "k.db", tmp_path / "r.html"
    with open_store(db) as store:
        for i in range(3):
            run = make_run(started_at=at(3600 * i), machine=MACHINE, label=f"run-{i}")
            store.begin_run(run)
            store.add_results(run.uuid, [case("ladder", "host_gather", {"op": "read"}, 1e10 + i)], 0)
            if i:
                store.add_results(run.uuid, [case("ladder", "host_gather", {"op": "copy"}, 1e10 + i)], 1)
            store.finish_run(run.uuid, "ok", at(3600 * i + 60))
    code, _, err = said("report", "run-2", "-o", page, "--db", db, "--json")
    assert code == 0, err
    text = page.read_text()
    assert "3 runs count; 10 are needed to tell levels apart" in text
    history = text[text.index('<section id="history">') : text.index('<section id="notes">')]
    assert history.count("<tr>") == 2  # its head, and one series: the other has two runs
    assert said("report", "run-2", "-o", page, "--db", db)[0] == 0  # a report may be overwritten


def test_only_a_report_is_overwritten_unless_forced(tmp_path: Path) -> None:
    source, page = bundle(tmp_path / "a.jsonl"), tmp_path / "thesis.html"
    page.write_text("<!doctype html>my thesis")
    code, out, err = said("report", source, "-o", page)
    assert (code, out) == (2, "")
    assert "there is a file that is no report" in err
    assert page.read_text() == "<!doctype html>my thesis"
    assert said("report", source, "-o", page, "--force")[0] == 0
    assert page.read_text().startswith(HEAD)
    link = tmp_path / "link.html"
    link.symlink_to(page)
    assert said("report", source, "-o", link, "--force")[0] == 2
    assert link.is_symlink()


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    source, folder = bundle(tmp_path / "a.jsonl"), tmp_path / "photos"
    folder.mkdir()
    (folder / "cat.png").write_bytes(b"cat")
    code, _, err = said("report", source, "-o", tmp_path / "r.html", "--figures", folder)
    assert code == 2
    assert "the folder holds other files" in err
    assert [path.name for path in folder.iterdir()] == ["cat.png"]
    assert not (tmp_path / "r.html").exists()
    assert said("report", source, "-o", tmp_path / "r.html", "--figures", folder, "--force")[0] == 0
    assert (folder / "cat.png").read_bytes() == b"cat"
    assert said("report", source, "-o", tmp_path / "r.html", "--figures", folder)[0] == 0


def test_nothing_measured_is_exit_3_and_the_page_says_so(tmp_path: Path) -> None:
    rows = [case("ladder", "host_gather", {"op": "read"}, None, status="skipped", reason="no such tier")]
    source, page = write(tmp_path / "a.jsonl", [rows]), tmp_path / "r.html"
    code, _, err = said("report", source, "-o", page)
    assert code == 3
    assert "no row has a value" in err
    assert "1 case skipped: no such tier" in page.read_text()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["a.jsonl"], "a file is needed"), (["none.jsonl", "-o", "r.html"], "No such"),
        (["a.jsonl", "-o", "no/such/r.html"], "the folder is not there"),
        (["a.jsonl", "-o", "."], "not a regular file"),
        (["a.jsonl", "a.jsonl", "-o", "r.html"], "compared with itself"),
        (["a.jsonl", "-o", "r.html", "--figures", "a.jsonl"], "not a folder"),
        (["nothing-like-it", "-o", "r.html"], "no database"), (["mixed.jsonl", "-o", "r.html"], "no side"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_exit_2_and_no_file(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parts = [bundle(tmp_path / name, hw_class=name) for name in ("a.jsonl", "b.jsonl")]
    (tmp_path / "mixed.jsonl").write_bytes(b"".join(path.read_bytes() for path in parts))
    before = sorted(tmp_path.iterdir())
    code, out, err = said("report", *words, "--db", tmp_path / "k.db")
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert text in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["vl_convert", "jinja2"])
def test_a_missing_package_is_one_line_that_names_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    code, out, err = said("report", bundle(tmp_path / "a.jsonl"), "-o", tmp_path / "r.html")
    assert (code, out) == (2, "")
    assert "kvbench[report]" in err
    assert not (tmp_path / "r.html").exists()


def test_hostile_words_reach_neither_terminal_nor_markup(tmp_path: Path) -> None:
    words = [word for word in HOSTILE if word] + ["<script>x</script>"]
    rows = [case("ladder", "host_gather", {"op": word}, 1e10, kernel=word, reason=word) for word in words]
    source = write(tmp_path / "a.jsonl", [rows], label="<b>[red]", hw_class="\x1b[31m<i>", machine=MACHINE)
    page = tmp_path / "\x1b[31m<x>.html"
    code, out, err = said("report", source, "-o", page)
    assert code == 0
    assert "\x1b" not in out + err
    text = page.read_text()
    assert "\x1b" not in text
    assert "<script>x</script>" not in text
    assert "&lt;script&gt;x&lt;/script&gt;" in text
