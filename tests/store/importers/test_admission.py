"""Imported runs in a store: one file is one run, however often and under whatever name it comes, and never ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvbench.analysis.compare import Side, compare
from kvbench.cli.main import main
from kvbench.errors import UsageError
from kvbench.machine.fingerprint import Fingerprint, hw_class_of
from kvbench.schemas import schema_for
from kvbench.store.engine import Store, open_store
from kvbench.store.importers import TOOLS, admit, read_foreign
from kvbench.store.importers.admission import NOWHERE, TIME_UNKNOWN
from tests.store.factories import HOSTILE
from tests.store.importers.test_tools import DATA, FILES, changed, edited


def valid(document: Any) -> None:
    jsonschema.Draft202012Validator(schema_for(document["schema"])).validate(document)


def this_machine() -> Fingerprint:
    words = ("cpu_vendor", "cpu_family", "cpu_model", "cpu_stepping", "sockets", "numa_nodes", "cores")
    key: dict[str, Any] = {**dict.fromkeys(words), "cpu_model": "here", "gpus": []}
    return Fingerprint(hw_class_of(key), {"key": key}, "env", {"kernel": "6.8"}, (), ())


@pytest.mark.parametrize("tool", TOOLS)
def test_importing_again_changes_nothing(tool: str, any_store: Store, tmp_path: Path) -> None:
    foreign = read_foreign(DATA / FILES[tool])
    first = admit(any_store, foreign)
    total = sum(map(len, foreign.cases))
    assert (first.runs_new, first.rows_new, first.rows_known, first.notices) == (1, total, 0, ())
    before = any_store.results(foreign.run.uuid, with_samples=True)
    assert before == [row for case in foreign.cases for row in case]
    assert any_store.run(foreign.run.uuid).info == foreign.run
    renamed = tmp_path / f"copy{Path(FILES[tool]).suffix}"
    shutil.copy(DATA / FILES[tool], renamed)
    shutil.copytree(DATA / "nvbench.json-bin", tmp_path / "nvbench.json-bin")
    for path in (DATA / FILES[tool], renamed):
        again = admit(any_store, read_foreign(path))
        assert (again.runs_new, again.runs_known, again.rows_new, again.rows_known) == (0, 1, 0, total)
    assert any_store.results(foreign.run.uuid, with_samples=True) == before
    assert len(any_store.runs()) == 1


def test_an_imported_run_is_never_of_this_machine_unless_said(store: Store) -> None:
    foreign = read_foreign(DATA / "stream.txt")
    assert (foreign.run.host, foreign.run.started_at) == (NOWHERE, TIME_UNKNOWN)
    assert foreign.run.flags == ("imported", "time_unknown")
    admit(store, foreign)
    with pytest.raises(UsageError, match="0 groups of this host have a row with a value"):
        store.load("latest")
    here = this_machine()
    said = read_foreign(DATA / "stream.txt", here=here)
    assert (said.run.hw_class, said.run.machine["key"]) == (here.hw_class, here.machine["key"])
    assert said.run.uuid != foreign.run.uuid
    admit(store, said, here=here)
    assert admit(store, said, here=here).runs_new == 0
    with pytest.raises(UsageError, match="0 groups of this host"):
        store.load("latest")
    assert {run.info.hw_class for run in store.runs()} == {here.hw_class, foreign.run.hw_class}


def test_files_that_name_no_machine_are_never_of_one_class(tmp_path: Path) -> None:
    other = edited(tmp_path, "stream.txt", "0.012700", "0.012800")
    classes = {read_foreign(path).run.hw_class for path in (DATA / "stream.txt", other, DATA / "mlc.txt")}
    assert len(classes) == 3
    again = changed(tmp_path, "nvbandwidth", lambda d: d["nvbandwidth"]["testcases"].pop())
    named = [read_foreign(path).run for path in (DATA / "nvbandwidth.json", again)]
    assert named[0].uuid != named[1].uuid
    assert named[0].hw_class == named[1].hw_class  # both name the same GPUs of the same host


def test_compare_works_on_imports(store: Store, tmp_path: Path) -> None:
    slower = edited(tmp_path, "stream.txt", "200000.0     0.008100     0.008000", "160000.0     0.010100     0.010000")
    slower.write_text(slower.read_text().replace("0.008300", "0.010300"))
    sides = []
    for path in (DATA / "stream.txt", slower):
        foreign = read_foreign(path)
        admit(store, foreign)
        sides.append(Side(path.name, store.load(foreign.run.uuid)))
    found = {(row.bench, row.metric): row for row in compare(sides).rows}
    row = found["stream.copy", "best_bandwidth"]
    assert [row.a, row.b, row.ratio] == pytest.approx([200e9, 160e9, 0.8])
    assert row.verdict == "INCONCLUSIVE"  # one run a side
    assert "hw_class" in row.differs


def test_a_changed_side_file_is_another_story_and_refused(store: Store, tmp_path: Path) -> None:
    path = changed(tmp_path, "nvbench", lambda d: None)
    admit(store, read_foreign(path))
    uuid = read_foreign(path).run.uuid
    before = store.results(uuid, with_samples=True)
    side = tmp_path / "nvbench.json-bin" / "0.bin"
    data = side.read_bytes()
    side.write_bytes(data[4:8] + data[:4] + data[8:])  # the same mean, in another order
    with pytest.raises(UsageError, match=r"nvbench.json: .*is here with other content.*nothing was imported"):
        admit(store, read_foreign(path))
    assert store.results(uuid, with_samples=True) == before


@pytest.mark.parametrize("text", [text for text in HOSTILE if text.strip()])
def test_hostile_names_come_in_as_they_are(text: str, any_store: Store, tmp_path: Path) -> None:
    def rename(document: Any) -> None:
        document["benchmarks"][0].update(fullname=f"t::{text}", params={text: text})

    foreign = read_foreign(changed(tmp_path, "pytest-benchmark", rename))
    admit(any_store, foreign)
    row = any_store.results(foreign.run.uuid)[0]
    assert row.axes == {text: text}
    assert row.bench == f"pytest-benchmark.t::{text.partition('[')[0]}"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = str(tmp_path / "kv.db")
    files = [str(DATA / name) for name in FILES.values()]
    assert main(["import", *files, "--db", db, "--json"]) == 0
    out = capsys.readouterr()
    document = json.loads(out.out)
    valid(document)
    assert [file["from"] for file in document["files"]] == list(FILES)
    assert "recognised by its content" in out.err
    assert main(["import", *files, "--db", db]) == 0
    assert "0 new runs, 1 known" in capsys.readouterr().err
    uuid = document["files"][4]["run"]
    assert main(["show", uuid, "--db", db, "--no-charts"]) == 0
    shown = capsys.readouterr().out
    assert "200 GB/s" in shown
    assert "imported: another tool measured it" in shown
    assert main(["runs", "--db", db]) == 0
    assert "not told" in capsys.readouterr().out
    bundle = tmp_path / "out.jsonl"
    assert main(["export", uuid, str(bundle), "--db", db]) == 0
    assert main(["import", str(bundle), "--db", str(tmp_path / "other.db")]) == 0
    with open_store(tmp_path / "other.db") as store:
        assert [run.info.uuid for run in store.runs()] == [uuid]


def test_one_bad_file_among_good_ones_leaves_no_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = edited(tmp_path, "mlc.txt", "329.26", "nan")
    db = tmp_path / "kv.db"
    for arguments, text in (
        ([str(DATA / "stream.txt"), str(bad)], "is 'nan', expected a finite number"),
        ([str(DATA / "README.md")], "if another tool wrote it, say which with --from"),
        ([str(DATA / "stream.txt"), "--from", "iperf"], "unknown tool"),
        ([str(DATA / "stream.txt"), "--from", "mlc"], "it looks like stream output"),
    ):
        assert main(["import", *arguments, "--db", str(db)]) == 2
        err = capsys.readouterr().err
        assert text in err
        assert len(err.splitlines()) == 1
        assert not db.exists()


def test_hostile_files_in_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = "x\x1b[31m[bold]<b>|`'; DROP TABLE runs; --\u202e\n=1+1"

    def rename(document: Any) -> None:
        entry = document["benchmarks"][0]
        entry.update(fullname=f"t::{nasty.replace('[', '(')}", params={nasty: nasty}, extra_info={nasty: nasty})
        document["machine_info"]["node"] = document["version"] = nasty
        document[nasty] = 1

    path = changed(tmp_path, "pytest-benchmark", rename)
    db = str(tmp_path / "kv.db")
    assert main(["import", str(path), "--db", db]) == 0
    uuid = read_foreign(path).run.uuid
    outputs = [capsys.readouterr()]
    for command in (["runs"], ["show", uuid], ["show", uuid, "--json"], ["runs", "--json"]):
        assert main([*command, "--db", db]) == 0
        outputs.append(capsys.readouterr())
    for form in ("markdown", "openmetrics", "json"):
        target = tmp_path / f"out.{form}"
        assert main(["export", uuid, str(target), "--format", form, "--db", db, "--json"]) == 0
        written = capsys.readouterr()
        valid(json.loads(written.out))
        assert "\x1b" not in target.read_text(encoding="utf-8")
        outputs.append(written)
    assert all("\x1b" not in text for output in outputs for text in output)
    with open_store(db) as store:
        assert len(store.runs()) == 1
