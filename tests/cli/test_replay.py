"""`kvbench replay` as a user runs it: documents, digests, files, resuming, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.commands_replay import policies
from kvbench.cli.main import main
from kvbench.contract.discover import load_suites
from kvbench.contract.result import PlannedCase
from kvbench.errors import UsageError
from kvbench.machine.fingerprint import fingerprint
from kvbench.replay.generate.presets import PRESETS, preset
from kvbench.replay.job import DEFAULT, params_of, params_text, toggles
from kvbench.replay.machine import PRESETS as MACHINES
from kvbench.replay.models import MODELS
from kvbench.replay.policies import POLICIES, params_class
from kvbench.replay.traces.trace import open_trace
from kvbench.replay.traces.write import write_requests
from kvbench.report.replay_rows import replays
from kvbench.report.replay_text import _tables
from kvbench.store import open_store
from tests.cli.test_run import document
from tests.replay.traces.samples import requests, text
from tests.report.made import case
from tests.store.factories import make_run

SMALL = ["osc", "--requests", "30", "--machine", "a10g"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, with a database that is not there yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_DB", str(tmp_path / "r.db"))
    return tmp_path


def replayed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """Run ``replay --json`` in this process and return its document."""
    capsys.readouterr()
    assert main(["replay", *words, "--json"]) == code, capsys.readouterr().err
    return document(capsys.readouterr().out)


def test_the_words_of_the_bench_are_those_there_are() -> None:
    axes = load_suites().find("routes", "replay").axes
    assert axes["policy"].legal == tuple(POLICIES)
    assert axes["machine"].legal == (*MACHINES, "this")
    assert axes["workload"].legal == tuple(PRESETS)
    assert set(axes["model"].legal) == set(MODELS)


def test_one_document_with_a_digest_that_is_the_same_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--policy", "recompute", "--no-db"]
    one, again = replayed(capsys, *words), replayed(capsys, *words)
    assert one["digest"] == again["digest"] == one["replays"][0]["digest"]
    assert re.fullmatch("[0-9a-f]{64}", one["digest"])
    assert one["digest"] != replayed(capsys, *words, "--seed", "1")["digest"]
    found = one["replays"][0]
    assert (found["basis"], found["status"], found["detail"]["finished"]) == ("simulated", "ok", 30)
    values = {name: metric["value"] for name, metric in found["metrics"].items()}
    assert values["ttft_p50"] <= values["ttft_p90"] <= values["ttft_p99"]
    assert values["token_rate"] == pytest.approx(values["request_rate"] * found["detail"]["output_tokens"] / 30)
    assert not (here / "r.db").exists()


def test_the_digest_does_not_know_where_a_file_lies(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(preset("loogle").requests(20, seed=2))
    found = []
    for folder, name in (("a", "t.jsonl"), ("b", "other.jsonl.gz")):
        (here / folder).mkdir()
        write_requests(here / folder / name, rows)
        found.append(replayed(capsys, f"{folder}/{name}", "--policy", "lru,strata", "--no-db"))
    assert found[0]["digest"] == found[1]["digest"]
    assert [each["policy"] for each in found[0]["replays"]] == ["lru", "strata"]
    own = [each["digest"] for each in found[0]["replays"]]
    assert found[0]["digest"] not in own
    workload = found[0]["replays"][0]["workload"]
    assert re.fullmatch(r"t\.jsonl@[0-9a-f]{12}", workload)
    assert str(here) not in json.dumps(found)
    # the same requests as a preset are the same replay
    made = replayed(capsys, "loogle", "--requests", "20", "--seed", "2", "--policy", "lru,strata", "--no-db")
    assert made["digest"] == found[0]["digest"]


def test_what_is_stored_is_shown_and_exported_as_simulated(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = replayed(capsys, *SMALL, "--policy", "recompute", "--rate", "1,4", "--slo-ttft", "1", "--label", "mine")
    assert main(["show", "mine", "--json"]) == 0
    shown = document(capsys.readouterr().out)
    assert {row["basis"] for row in shown["results"]} == {"simulated"}
    assert shown["canaries"] == []
    rates = [row["value"] for row in shown["results"] if row["metric"] == "request_rate"]
    assert rates == [each["metrics"]["request_rate"]["value"] for each in printed["replays"]]
    assert [each["rate"] for each in printed["replays"]] == [1.0, 4.0]
    assert printed["goodput"] == [{"policy": "recompute", "params": "default", "rate": 4.0}]


def test_the_text_has_every_policy_and_says_what_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *SMALL, "--policy", "all", "--slo-tpot", "0.5"]) == 0
    out, err = capsys.readouterr()
    assert all(re.search(rf"^\W*{name}\b", out, re.M) for name in POLICIES)
    assert "basis simulated" in out
    assert "TPOT 500 ms" in out
    assert re.search(r"^digest [0-9a-f]{64}$", out, re.M)
    assert f"stored {len(POLICIES)}/{len(POLICIES)} " in err


@pytest.mark.parametrize("width", [80, 200])
def test_tables_fit_the_terminal(width: int) -> None:
    rows = []
    for name in ("request_rate", "token_rate", "ttft_mean", "tpot_p99", "stall_share", "link_in_bytes"):
        rows.append(("run", case("routes", "replay", {"policy": "ellm_isolated", "params": "default"}, 12345.678,
                                 metric=name, unit="1", low=None, high=None)))  # fmt: skip
    lines = _tables(replays(rows), width)
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("  policy") for line in lines) == (2 if width == 200 else 4)


def test_a_model_may_be_named_as_other_suites_do(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--policy", "recompute", "--no-db"]
    found = [replayed(capsys, *words, "--model", name) for name in ("llama-3-8b", "Llama-3.1-8B", "LLAMA-3-8B")]
    assert {each["replays"][0]["model"] for each in found} == {"llama-3-8b"}
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.parametrize(("where", "word"), [(["--no-db"], "done"), ([], "stored")])
def test_stored_is_said_of_what_is_stored(
    where: list[str], word: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *SMALL, "--policy", "recompute", *where]) == 0
    assert re.findall(r"(\w+) 1/1 ", capsys.readouterr().err) == [word]
    assert (here / "r.db").exists() is (word == "stored")


def test_switches_are_turned_one_at_a_time(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replayed(capsys, *SMALL, "--policy", "strata", "--ablate", "--no-db", "--param", "batch_tokens=4096")
    params = [each["params"] for each in found["replays"]]
    assert len(params) == 1 + len(toggles("strata")) > 3
    assert params[0] == "batch_tokens=4096"
    assert all("batch_tokens=4096" in each for each in params)
    assert all(each.count("=") == 2 for each in params[1:])
    twice = replayed(capsys, *SMALL, "--policy", "strata", "--no-chunked", "--no-db")
    assert twice["replays"][0]["params"] == "chunked=False"


def test_a_parameter_may_be_that_of_one_policy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--policy", "recompute", "--policy", "neo", "--no-db", "--param", "recompute.max_batch=2"]
    found = replayed(capsys, *words)
    assert [each["params"] for each in found["replays"]] == ["max_batch=2", DEFAULT]


@pytest.mark.parametrize("name", POLICIES)
def test_parameters_have_one_text_that_reads_back(name: str) -> None:
    assert params_text(name, []) == DEFAULT
    numbers = [f.name for f in fields(params_class(name)) if type(getattr(params_of(name, DEFAULT), f.name)) is int]
    for number in numbers:
        value = getattr(params_of(name, DEFAULT), number)
        with contextlib.suppress(UsageError):  # some numbers hang together
            changed = params_text(name, [f"{number}={value + 1}"])
            assert changed == f"{number}={value + 1}" == params_text(name, [changed])


def test_a_request_larger_than_memory_is_counted_and_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sharegpt", "--requests", "20", "--policy", "recompute", "--no-db", "--param", "near_tokens=800"]
    found = replayed(capsys, *words)["replays"][0]
    assert 0 < found["detail"]["rejected"] < 20
    assert found["detail"]["rejected"] + found["detail"]["finished"] == 20
    assert "rejected" in found["flags"]
    # when nothing is left there is no number, and no success
    all_gone = replayed(capsys, *words[:-1], "near_tokens=16", code=3)["replays"][0]
    assert (all_gone["status"], all_gone["digest"]) == ("skipped", None)
    assert "20 of 20 rejected" in all_gone["reason"]
    assert main(["replay", *words[:-1], "near_tokens=16"]) == 3


def test_each_format_is_replayed_from_its_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, block in (("mooncake", 512), ("burstgpt", None), ("azure", None), ("bailian", 16), ("kvbench", 64)):
        (here / name).write_text(text(name, requests(6, block)))
        found = replayed(capsys, f"./{name}", "--policy", "recompute", "--no-db", "--strict")["replays"][0]
        assert found["detail"]["finished"] == 6
        assert found["detail"]["trace_format"] == name
        assert len(found["detail"]["trace_sha256"]) == 64


def test_an_interrupted_sweep_is_kept_and_goes_on(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sharegpt", "--requests", "150", "--policy", "recompute", "--rate", "1,2,3,4,5,6,7,8", "--machine", "a10g"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvbench.cli.main", "replay", *words, "--label", "cut"], env=environment, cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("stored 1/"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    uuid = re.search(r"--resume ([0-9a-f]{8}) goes on", rest)
    assert uuid is not None, rest
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["replay", "loogle", "--resume", uuid[1]]) == 2
    assert "the run is of another trace" in capsys.readouterr().err
    resumed = replayed(capsys, "--resume", uuid[1])
    assert [each["rate"] for each in resumed["replays"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert resumed["runs"][0]["resumed"] is True
    assert resumed["digest"] == replayed(capsys, *words, "--no-db")["digest"]
    assert main(["replay", "--resume", uuid[1]]) == 2
    assert "finished" in capsys.readouterr().err


def test_a_resumed_run_of_a_file_needs_that_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_requests(here / "t.jsonl", requests(5))
    write_requests(here / "u.jsonl", requests(6))
    replayed(capsys, "t.jsonl", "--policy", "recompute")
    assert main(["replay", "u.jsonl", "--resume", "latest"]) == 2
    assert main(["replay", "--resume", "latest", "--policy", "neo"]) == 2
    assert "keeps its plan" in capsys.readouterr().err


def test_a_preset_is_written_as_a_trace_and_a_trace_is_sorted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "reviewmt:block=16", "--requests", "40", "--rate", "2", "--sorted-copy", "p.jsonl.gz"]) == 0
    assert list(open_trace(here / "p.jsonl.gz").requests()) == list(preset("reviewmt:block=16").requests(40, 2.0))
    lines = text("azure", requests(4)).splitlines()
    (here / "b.csv").write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    assert main(["replay", "b.csv", "--sorted-copy", "s.csv"]) == 0
    assert (here / "s.csv").read_text() == text("azure", requests(4))
    assert main(["replay", "b.csv", "--sorted-copy", "s.csv"]) == 2
    assert "there already" in capsys.readouterr().err


def test_this_machine_is_what_was_measured_here(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["osc", "--requests", "20", "--policy", "neo", "--machine", "this"]
    assert main(["replay", *words]) == 2
    assert "no database here" in capsys.readouterr().err
    # only what was measured on this hardware counts, and a replay is no such thing
    replayed(capsys, *SMALL, "--policy", "neo")
    assert main(["replay", *words]) == 2
    assert "nothing that costs are made of was measured" in capsys.readouterr().err
    axes = {"op": "read", "pages": "thp", "bytes": 256 << 20, "threads": "all"}
    for hw_class, value in (("another-box", 99e9), (fingerprint().hw_class, 25e9)):
        row = case("ladder", "host_bandwidth", axes, value, ceilings=(), fraction=None)
        plan = (PlannedCase(row.digest, row.suite, row.bench, 1, dict(row.axes)),)  # type: ignore[arg-type]
        run = make_run(hw_class=hw_class, plan=plan, status="running", host="elsewhere")
        with open_store(None) as store:
            store.begin_run(run)
            store.add_results(run.uuid, [row], 0)
            store.finish_run(run.uuid, "ok", run.started_at)
    found = replayed(capsys, *words, "--no-db")["replays"][0]
    assert re.fullmatch("this@[0-9a-f]{12}", found["machine"])
    assert found["detail"]["numbers_measured"] == "host_bandwidth"
    stored = replayed(capsys, *words)["replays"][0]
    assert stored["machine"] == found["machine"]


REFUSED = {
    "no trace": ([], ["a trace is needed", "loogle", "sharegpt"]),
    "no policy": (["osc"], ["a policy is needed", "strata neo"]),
    "unknown preset": (["lugle", "--policy", "lru"], ["unknown preset", "did you mean 'loogle'"]),
    "no file": (["gone.jsonl", "--policy", "lru"], ["gone.jsonl: no such trace file"]),
    "unknown policy": (["osc", "--policy", "strate"], ["unknown policy", "did you mean 'strata'?"]),
    "unknown machine": (["osc", "--policy", "lru", "--machine", "h300"], ["unknown machine", "h100", "this"]),
    "unknown model": (["osc", "--policy", "lru", "--model", "llama"], ["unknown model", "llama-3-8b"]),
    "unknown param": (["osc", "--policy", "lru", "--param", "bugdet=1"], ["unknown parameter", "'budget'"]),
    "param of none": (["osc", "--policy", "lru", "--param", "neo.page=1"], ["parameter of another policy"]),
    "no param": (["osc", "--policy", "lru", "--param", "budget"], ["not NAME=VALUE"]),
    "param value": (["osc", "--policy", "lru", "--param", "budget=x"], ["not a number"]),
    "param range": (["osc", "--policy", "lru", "--param", "budget=0"], ["out of range", "1.."]),
    "param twice": (["osc", "--policy", "lru", "--param", "budget=5", "--param", "lru.budget=6"], ["given twice"]),
    "rate 0": (["osc", "--policy", "lru", "--rate", "0"], ["--rate: not a rate", "'0'", "0.001 to"]),
    "rate word": (["osc", "--policy", "lru", "--rate", "fast"], ["not a rate"]),
    "rate nan": (["osc", "--policy", "lru", "--rate", "nan"], ["not a rate"]),
    "negative rate": (["osc", "--policy", "lru", "--rate=-1"], ["not a rate"]),
    "rate and sweep": (["osc", "--policy", "lru", "--rate", "1", "--sweep"], ["one of them"]),
    "no requests": (["osc", "--policy", "lru", "--requests", "0"], ["--requests: out of range"]),
    "many requests": (["osc", "--policy", "lru", "--requests", "99999999"], ["1..10000000"]),
    "seed": (["osc", "--policy", "lru", "--seed=-1"], ["seed", "0 or more"]),
    "in flight": (["osc", "--policy", "lru", "--in-flight", "0"], ["--in-flight: out of range"]),
    "slo": (["osc", "--policy", "lru", "--slo-ttft", "0"], ["--slo-ttft: not an objective"]),
    "chunked": (["osc", "--policy", "neo", "--chunked"], ["no such choice", "neo"]),
    "ablate": (["osc", "--policy", "neo", "--ablate", "--param", "extra_layer=maybe"], ["not a truth value"]),
    "format": (["osc", "--policy", "lru", "--format", "azure"], ["only a file has a format"]),
    "option": (["osc:far=1", "--policy", "lru"], ["not an option of the preset"]),
    "copy": (["--sorted-copy", "x"], ["a trace is needed"]),
    "copy rates": (["osc", "--rate", "1,2", "--sorted-copy", "x"], ["one rate a file"]),
    "strict preset": (["osc", "--policy", "lru", "--strict"], ["--strict: only a file can be odd", "'osc'"]),
    "seed of a file": (["gone.jsonl", "--policy", "lru", "--seed", "0"], ["--seed: a file is replayed as it is"]),
    "strict resume": (["--resume", "abcdef12", "--strict"], ["--strict: only a file"]),
    "format resume": (["--resume", "abcdef12", "--format", "azure"], ["--format: only a file"]),
    "a folder": ([".", "--policy", "lru"], [".: not a regular file", "a directory"]),
    "a device": (["/dev/null", "--policy", "lru"], ["null: not a regular file", "a device"]),
    "empty": (["", "--policy", "lru"], ["unknown preset"]),
    "copy of a folder": ([".", "--sorted-copy", "x"], ["not a regular file"]),
    "copy and policy": (["osc", "--sorted-copy", "x", "--policy", "lru"], ["--sorted-copy with --policy: nothing is"]),
    "copy and model": (["osc", "--sorted-copy", "x", "--model", "opt-13b"], ["--sorted-copy with --model"]),
    "copy and strict": (["osc", "--sorted-copy", "x", "--strict"], ["--sorted-copy with --strict"]),
    "copy and format": (["osc", "--sorted-copy", "x", "--format", "azure"], ["--format: only a file"]),
    "copy of none": (["osc", "--sorted-copy", "x", "--requests", "0"], ["--requests: out of range"]),
    "seed of a copy": (["gone.jsonl", "--sorted-copy", "x", "--seed", "1"], ["--sorted-copy with --seed"]),
    "no fit": (["osc", "--policy", "lru", "--machine", "t4", "--model", "llama-3-70b"], ["leaves no memory for KV"]),
    "resume": (["--resume", "abcdef12"], ["r.db"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_line_and_exit_2(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = REFUSED[name]
    began = time.monotonic()
    assert main(["replay", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert [word for word in expected if word not in err] == [], err
    assert time.monotonic() - began < 60
    assert os.listdir(here) == [] or name == "resume"


def test_policies_are_named_once_in_the_order_asked() -> None:
    assert policies(["lru,neo", "lru"]) == ["lru", "neo"]
    assert policies(["all"]) == list(POLICIES)
