"""``kvbench claims`` as a user runs it: both outputs, where rows come from, what is stored, exit codes, mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.analysis.claims import Claim, Form, load_claims
from kvbench.contract.result import Result
from kvbench.machine.fingerprint import env_digest_of, fingerprint, hw_class_of
from kvbench.store import open_store
from tests.analysis.claim_rows import rows_for
from tests.cli.test_compare import document, said, write
from tests.store.factories import HOSTILE, at, make_run

CLAIMS = {claim.id: claim for claim in load_claims()}
LENDING = CLAIMS["ellm-lending-moves-no-bytes"]
GROWS = CLAIMS["ellm-gain-grows-with-context"]


def h200(**board: object) -> dict[str, Any]:
    """Return what a run record says of a machine with one such board."""
    first = {"name": "NVIDIA H200", "count": 1, "memory_gib": 140, "max_gen": 5, "max_width": 16, "nvlink": True,
             "c2c": None, **board}  # fmt: skip
    cpu = {"cpu_vendor": "intel", "cpu_family": "6", "cpu_model": "143", "cpu_stepping": "8", "sockets": 2}
    key: dict[str, Any] = {**cpu, "numa_nodes": 2, "cores": 48, "gpus": [first]}
    env: dict[str, Any] = {"kernel": "6.1"}
    return {"hw_class": hw_class_of(key), "machine": {"key": key}, "env": env, "env_digest": env_digest_of(env)}


def form_of(claim: Claim, on: str) -> Form:
    return next(form for form in claim.forms if form.on == on)


def host_rows() -> list[Result]:
    """Rows that reproduce two claims of eLLM on a host: no byte copied, and a ratio that grows with the context."""
    rows = rows_for(form_of(LENDING, "host"), lambda _: 0.0, unit="B")
    return rows + rows_for(
        form_of(GROWS, "model"), lambda want: 1.0 + int(want.axes["context"]) / 5e5, basis="simulated"
    )


def fill(db: Path, rows: list[Result], **info: Any) -> str:
    """Store one run of this machine with ``rows`` and return its UUID."""
    run = make_run(**{"hw_class": fingerprint().hw_class, **info})
    with open_store(db) as store:
        store.begin_run(run)
        for position, row in enumerate(rows):
            store.add_results(run.uuid, [row], position)
        store.finish_run(run.uuid, "ok", at(60))
    return run.uuid


def claims(*words: object) -> dict[str, dict[str, Any]]:
    code, out, err = said("claims", *words, "--json")
    assert code in (0, 3), err
    return {each["id"]: each for each in document(out)["claims"]}


def test_without_a_row_every_claim_says_what_would_measure_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    code, out, err = said("claims")
    assert code == 3
    assert "no claim was judged" in err
    for claim in CLAIMS.values():
        assert f"  {claim.id}: " in out
    assert "kvbench run strata/layout_change -a source=layer_first -a target=page_first" in out
    found = claims()
    assert len(found) == len(CLAIMS)
    assert {each["verdict"] for each in found.values()} <= {"NOT MEASURED", "CONDITIONS NOT MET"}
    for each in found.values():
        assert bool(each["commands"]) == (each["verdict"] == "NOT MEASURED")
        assert bool(each["needs"]) == (each["verdict"] == "CONDITIONS NOT MET")
    assert not (tmp_path / "kvbench").exists()


def test_both_outputs_say_the_same_and_the_checks_are_stored_once(tmp_path: Path) -> None:
    db = tmp_path / "k.db"
    uuid = fill(db, host_rows())
    found = claims("ellm", "--db", db)
    lending, grows = found[LENDING.id], found[GROWS.id]
    assert (lending["verdict"], lending["label"], lending["basis"]) == ("REPRODUCED", "host form", "measured")
    assert (grows["verdict"], grows["label"], grows["basis"]) == ("REPRODUCED", "simulated", "simulated")
    assert lending["runs"] == [uuid]
    assert {row["axes"]["unmap"] for row in lending["rows"]} == {"sync", "alias"}
    code, out, _ = said("claims", "ellm", "--db", db)
    assert code == 0
    assert f"{LENDING.id}: REPRODUCED as a shape (host form)" in out
    assert f"run {uuid[:8]} smoke" in out
    with open_store(db, readonly=True) as store:
        (check,) = store.claim_checks(LENDING.id)
        assert len(store.claim_checks()) == 3  # one of the rows also tells on ellm-isolation-costs-20-percent
    assert (check.verdict, check.basis, check.value, check.unit) == ("REPRODUCED", "measured", 0.0, "B")
    assert check.detail["conditions"] == LENDING.conditions
    other = [row.with_(value=4096.0) if row.unit == "B" else row for row in host_rows()]
    fill(db, other, started_at=at(3600))
    assert claims("ellm", "--db", db)[LENDING.id]["verdict"] == "NOT REPRODUCED"
    with open_store(db, readonly=True) as store:
        assert [check.verdict for check in store.claim_checks(LENDING.id)] == ["NOT REPRODUCED", "REPRODUCED"]


def test_all_adds_baselines_misreadings_needs_and_rows(tmp_path: Path) -> None:
    fill(tmp_path / "k.db", host_rows())
    short = said("claims", "ellm", "--db", tmp_path / "k.db")[1]
    long = said("claims", "ellm", "--db", tmp_path / "k.db", "--all")[1]
    assert "misread" not in short
    for words in ("against ", "misread ", "needs   gpus >= 1 (here", "row     ellm/inflate driver=host chunks=64"):
        assert words in long
    assert "beware" in said("claims", "directkv", "--db", tmp_path / "k.db")[1]
    assert max(map(len, short.splitlines())) < 200
    folded = [line for line in short.splitlines() if "kvbench run" not in line and "kvbench replay" not in line]
    assert max(map(len, folded)) <= 100


def test_a_database_that_takes_no_writes_still_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.errors import StoreError
    from kvbench.store.checks import Checks

    fill(tmp_path / "k.db", host_rows())

    def refuse(*_: object) -> None:
        raise StoreError("the database is read-only", where="k.db")

    monkeypatch.setattr(Checks, "add_claim_checks", refuse)
    code, out, err = said("claims", "ellm", "--db", tmp_path / "k.db")
    assert code == 0
    assert LENDING.id in out
    assert "shown and not stored" in err


def test_a_bundle_of_another_machine_is_judged_by_that_machine(tmp_path: Path) -> None:
    claim = CLAIMS["strata-memcpy-share-pcie5"]
    rows = rows_for(claim.forms[0], lambda _: 14.2e9, unit="B/s")
    bundle = write(tmp_path / "a.jsonl", [rows], **h200())
    code, out, err = said("claims", "strata", "--run", bundle, "--json")
    assert code == 0, err
    assert document(out)["hw_class"] == h200()["hw_class"]
    found = claims("strata", "--run", bundle)
    assert found[claim.id]["verdict"] == "REPRODUCED"
    assert found[claim.id]["value"] == pytest.approx(14.2 / 64)
    assert found["strata-memcpy-share-c2c"]["verdict"] == "CONDITIONS NOT MET"
    assert found["strata-memcpy-share-c2c"]["needs"] == [{"need": "c2c == 1", "met": False, "found": "0"}]
    bundle = write(tmp_path / "b.jsonl", [rows], **h200(max_gen=4))
    found = claims("strata", "--run", bundle)
    assert found[claim.id]["needs"] == [{"need": "pcie_gen == 5", "met": False, "found": "4"}]
    bare = write(tmp_path / "c.jsonl", [rows], hw_class="bare", machine={"sockets": 1})
    assert claims("strata", "--run", bare)[claim.id]["needs"][0]["met"] is None


def test_a_run_of_the_database_by_its_uuid(tmp_path: Path) -> None:
    db = tmp_path / "k.db"
    good = fill(db, host_rows())
    fill(db, [row.with_(status="tainted", reason="busy") for row in host_rows()], started_at=at(3600))
    assert claims("ellm", "--db", db, "--run", good)[LENDING.id]["verdict"] == "REPRODUCED"
    assert claims("ellm", "--db", db)[LENDING.id]["runs"] == [good]  # the newest rows that count


def test_rows_of_other_hardware_are_not_this_machines(tmp_path: Path) -> None:
    fill(tmp_path / "k.db", host_rows(), hw_class="another")
    code, _, err = said("claims", "ellm", "--db", tmp_path / "k.db")
    assert code == 3
    assert "no claim was judged" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["vllm"], "unknown system"), (["--run", "ffffffff"], "no run matches"),
        (["--run", "none.jsonl"], "none.jsonl"),
        (["--nothing"], "No such option"), (["strata", "neo"], "unexpected extra argument"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_2(words: list[str], text: str, tmp_path: Path) -> None:
    fill(tmp_path / "k.db", host_rows())
    code, out, err = said("claims", *words, "--db", tmp_path / "k.db")
    assert (code, out) == (2, "")
    assert text in err
    assert len(err.strip().splitlines()) == 1


def test_a_database_that_is_named_and_not_there_is_a_mistake(tmp_path: Path) -> None:
    code, _, err = said("claims", "--db", tmp_path / "none.db")
    assert code == 2
    assert "no database here" in err


def test_words_nobody_wrote_for_a_terminal(tmp_path: Path) -> None:
    (row, *_) = rows_for(form_of(LENDING, "host"), lambda _: 0.0, unit="B")
    rows = [row.with_(status="tainted", reason=" ".join(HOSTILE))]
    bundle = write(tmp_path / "a.jsonl", [rows], hw_class="[b]hw[/b]")
    code, out, _ = said("claims", "ellm", "--run", bundle, "--all")
    assert code == 3
    assert "\x1b" not in out
    assert "DROP TABLE" in out
    assert "'); DROP TABLE" in claims("ellm", "--run", bundle)[LENDING.id]["reason"]
