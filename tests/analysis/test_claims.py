"""The claims we ship: every file is well formed, every case exists, every command works; and the loader is strict."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvbench.analysis.claim_needs import FACTS, answer, machine_facts, parse_need
from kvbench.analysis.claim_rows import commands, wants
from kvbench.analysis.claim_rules import RULES
from kvbench.analysis.claims import SYSTEMS, Claim, Form, load_claims
from kvbench.errors import UsageError
from tests.analysis.claim_rows import suites
from tests.docs_check import check_selection

CLAIMS = load_claims()
FORMS = [(claim, form) for claim in CLAIMS for form in claim.forms if form.cases]
ON_GPU = ("hbm:", "cuda", "gpu")  # what an axis value of a case on a GPU begins with
GPU_BENCHES = {"ladder/link", "ladder/device_bandwidth", "ladder/device_latency", "ladder/launch", "ladder/pin",
               "strata/block_quota", "directkv/raster", "directkv/graph_replay"}  # fmt: skip

GOOD = """
[[claim]]
id = "neo-x"
kind = "number"
statement = "Something is twice
as much."
numbers = [{ name = "ratio", value = 2.0, unit = "1" }]
section = "1"
hardware = "one"
baseline = "other"
conditions = "always"
misquoted = ""
tolerance = 0.1
[[claim.form]]
on = "gpu"
needs = ["gpus >= 1"]
rule = "ratio"
case = [
  { name = "top", bench = "ladder/launch", metric = "round_trip", axes = { op = "kernel" } },
  { name = "bottom", bench = "ladder/launch", metric = "round_trip", axes = { op = "event" } },
]
""".replace("twice\nas", "twice as")


def names(pair: tuple[Claim, Form]) -> str:
    return f"{pair[0].id}-{pair[1].on}"


def test_there_are_enough_and_each_system_has_its_share() -> None:
    found = Counter(claim.system for claim in CLAIMS)
    assert len(CLAIMS) >= 45
    assert set(found) == set(SYSTEMS)
    assert min(found.values()) >= 10
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    assert {claim.kind for claim in CLAIMS} == {"number", "shape", "direction"}
    assert [claim.id for claim in load_claims("neo")] == [claim.id for claim in CLAIMS if claim.system == "neo"]


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ("directkv-naive-pcie", "17 times"), ("directkv-swap-pcie", "65 ms"), ("directkv-gpu-memory", "82.7"),
        ("directkv-fusion", "49 %"), ("directkv-link-traffic", "22.7 GB"), ("strata-gh200-sustained", "40.3 to 150.5"),
        ("strata-prefill-interference", "10 %"), ("strata-faster-io-stalls-less", "74 %"),
        ("strata-shared-prefixes", "delay"), ("strata-loading-bound-100", "between 13 and 63"),
        ("strata-page-size-ttft", "mean"), ("neo-t4-load", "864"), ("neo-bandwidth-gap", "200 GB/s"),
        ("ellm-ttft-295x", "queue"), ("ellm-reservation-2k", "MTP-30B"), ("ellm-slo-scaling", "v1"),
    ],
)  # fmt: skip
def test_the_common_misreadings_are_told(claim: str, words: str) -> None:
    (found,) = [each for each in CLAIMS if each.id == claim]
    assert words in found.misquoted


def test_numbers_that_contradict_each_other_are_told() -> None:
    told = {claim.id: claim.contradiction for claim in CLAIMS if claim.contradiction}
    assert "0.69 and 0.78" in told["directkv-warp-pipeline-bandwidth"]
    assert "on average" in told["directkv-end-to-end"]
    assert any(not claim.verified for claim in CLAIMS)


@pytest.mark.parametrize(("claim", "form"), FORMS, ids=map(names, FORMS))
def test_every_case_exists_and_its_command_measures_it(claim: Claim, form: Form) -> None:
    wanted = {want.digest for want in wants(form, suites())}
    measured: set[str] = set()
    for command in commands(form, suites()):
        first, second, select, *rest = command.split()
        assert (first, second) == ("kvbench", "run")
        axes = [word for word in rest if word != "-a"]
        assert list(check_selection([select], axes, suites())) == []
        bench = suites().find(*select.split("/"))
        chosen = {name: bench.axes[name].parse_list(text, "-a") for name, _, text in (a.partition("=") for a in axes)}
        measured |= {case.digest for case in bench.cases("quick", chosen)}
    assert wanted <= measured


@pytest.mark.parametrize(("claim", "form"), FORMS, ids=map(names, FORMS))
def test_a_form_on_a_gpu_measures_one_and_the_others_do_not(claim: Claim, form: Form) -> None:
    on_gpu = [
        want for want in wants(form, suites())
        if f"{want.bench.suite}/{want.bench.name}" in GPU_BENCHES
        or any(str(value).startswith(ON_GPU) for value in want.axes.values())
    ]  # fmt: skip
    assert bool(on_gpu) == (form.on == "gpu")
    if form.on == "gpu":
        assert answer(next(need for need in form.needs if need.fact == "gpus"), {"gpus": 0.0}).met is False


def test_every_rule_measures_some_claim() -> None:
    assert {form.rule for _, form in FORMS} == set(RULES)


def test_a_good_file_is_read_and_texts_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "neo.toml").write_text(
        GOOD.replace('"Something is', '"""Something\n   is').replace('much."', 'much."""')
    )
    (claim,) = load_claims("neo", tmp_path)
    assert claim.statement == "Something is twice as much."
    assert claim.forms[0].cases[1].axes == {"op": ("event",)}


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("misquoted", "misqouted", "a key is missing"), ('section = "1"', 'section = "1"\nextra = 1', "unknown key"),
        ('kind = "number"', 'kind = "numbers"', "unknown word"), ('id = "neo-x"', 'id = "ellm-x"', "not an id"),
        ('statement = "Something is twice as much."', 'statement = " "', "an empty text"),
        ("value = 2.0", 'value = "2"', "not what this key holds"), ("value = 2.0", "value = true", "not what"),
        ("value = 2.0", "value = 2.0, high = 1.0", "not a range"), ("tolerance = 0.1", "tolerance = 2", "tolerance"),
        ("tolerance = 0.1", "", "tolerance"), ("tolerance = 0.1", "tolerance = 0.1\nneutral = 1", "go together"),
        ('rule = "ratio"', 'rule = "ration"', "unknown rule"), ('rule = "ratio"', 'rule = "share"', "does not take"),
        ('rule = "ratio"', 'rule = "ratio"\nargs = { of = 1 }', "does not take"),
        ('"gpus >= 1"', '"gpu >= 1"', "is no need"), ('"gpus >= 1"', '"gpus >= one"', "is no number"),
        ('needs = ["gpus >= 1"]', "needs = []", "needs one"), ('on = "gpu"', 'on = "host"', "supports no number"),
        ('rule = "ratio"', 'rule = "ratio"\nplanned = "kvbench run x/y"', "either cases"),
        ('bench = "ladder/launch"', 'bench = "launch"', "not a bench"), ('op = "kernel"', "op = []", "axis value"),
        ('op = "kernel"', "op = 1.5", "axis value"), ("[[claim]]", "[claim]", "not what this key holds"),
        ("[[claim]]", "[[claim]", "cannot be read"), ("[[claim]]", "other = 1\n[[claim]]", "unknown key"),
        ("numbers = [{", "numbers = [1, {", "not a list of tables"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named(old: str, new: str, text: str, tmp_path: Path) -> None:
    assert old in GOOD
    (tmp_path / "neo.toml").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UsageError, match=r"neo\.toml") as caught:
        load_claims("neo", tmp_path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_same_id_twice_an_unknown_system_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "neo.toml").write_text(GOOD + GOOD)
    with pytest.raises(UsageError, match="two claims have this id"):
        load_claims("neo", tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_claims("ellm", tmp_path)
    with pytest.raises(UsageError, match="unknown system"):
        load_claims("vllm")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("ladder/launch", "ladder/lunch", "unknown bench"), ("round_trip", "bandwidth", "no such metric"),
        ("op =", "ops =", "no such axis"), ('op = "kernel"', 'op = "colonel"', "unknown value"),
        ('{ op = "kernel" }', "{ }", "several quick values"),
    ],
)  # fmt: skip
def test_a_case_that_does_not_exist_is_named(old: str, new: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "neo.toml").write_text(GOOD.replace(old, new))
    (claim,) = load_claims("neo", tmp_path)
    with pytest.raises(UsageError, match=text):
        wants(claim.forms[0], suites())


def machine(**board: object) -> dict[str, object]:
    boards = [
        {"name": "NVIDIA H200", "count": 8, "memory_gib": 140, "max_gen": 5, "max_width": 16, "c2c": None, **board}
    ]
    return {"key": {"gpus": boards if board.get("count", 8) else [], "numa_nodes": 2, "cores": 96}}


def test_facts_of_a_machine_and_what_it_does_not_tell() -> None:
    facts = machine_facts(machine())
    assert (facts["gpus"], facts["pcie_gen"], facts["c2c"], facts["numa_nodes"]) == (8.0, 5.0, 0.0, 2.0)
    assert machine_facts(machine(name="NVIDIA GH200 480GB"))["c2c"] == 1.0
    assert machine_facts(machine(c2c=True))["c2c"] == 1.0
    assert machine_facts(machine(count=0))["gpus"] == 0.0
    for hostile in ({}, {"key": 3}, {"key": {"gpus": "x"}}, {"key": {"gpus": [3]}}, {"key": {"gpus": [{"name": 1}]}}):
        found = machine_facts(hostile)
        assert set(found) == set(FACTS)
        assert found["pcie_gen"] is None


@pytest.mark.parametrize(
    ("need", "facts", "met", "found"),
    [
        ("pcie_gen == 5", {"pcie_gen": 5.0}, True, "5"), ("pcie_gen == 5", {"pcie_gen": 4.0}, False, "4"),
        ("pcie_gen == 5", {"pcie_gen": None, "gpus": 1.0}, None, "not known"), ("gpus >= 2", {"gpus": 1.0}, False, "1"),
        ("pcie_gen == 5", {"pcie_gen": None, "gpus": 0.0}, False, "no GPU"), ("cores <= 4", {"cores": 4.0}, True, "4"),
        ("gpu_name has t4", {"gpu_name": "Tesla T4"}, True, "Tesla T4"), ("gpu_name has T4", {}, None, "not known"),
        ("gpu_name has T4", {"gpu_name": "A10G"}, False, "A10G"),
        ("gpu_name >= 4", {"gpu_name": "x"}, None, "not known"),
    ],
)  # fmt: skip
def test_needs_have_three_answers(need: str, facts: dict[str, float | str | None], met: bool, found: str) -> None:
    got = answer(parse_need(need), facts)
    assert (got.met, got.found) == (met, found)
