"""OpenMetrics text, read back by a parser of its grammar: every sample unique, every text as it was."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.store.engine import Store
from kvbench.store.formats import export
from kvbench.store.openmetrics import labels, unit_name, visible
from tests.store.factories import make_row, make_run
from tests.store.test_markdown import NASTY

SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (\S+)')
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"')
NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?")

Sample = tuple[str, dict[str, str], float]


def unquoted(text: str) -> str:
    return re.sub(r'\\([\\"n])', lambda found: {"n": "\n"}.get(found[1], found[1]), text)


def parsed(text: str) -> Iterator[Sample]:
    """Yield the samples of an exposition. Fails on whatever OpenMetrics 1.0 forbids: order, names, repeats, the end."""
    assert text.endswith("# EOF\n")
    family, seen, keys = "", set(), set()
    for line in text.removesuffix("# EOF\n").split("\n")[:-1]:
        assert line.isprintable()
        if line.startswith("# "):
            _, word, name, rest = line.split(" ", 3)
            if word == "TYPE":
                assert name not in seen
                assert rest == "gauge"
                seen.add(name)
                family = name
            assert name == family
            assert word in ("TYPE", "UNIT", "HELP")
            assert word != "UNIT" or name.endswith(f"_{rest}")
            continue
        found = SAMPLE.fullmatch(line)
        assert found is not None, line
        assert found[1] == family
        assert NUMBER.fullmatch(found[3])
        names = {name: unquoted(value) for name, value in LABEL.findall(found[2])}
        key = (family, json.dumps(names, sort_keys=True))
        assert key not in keys
        keys.add(key)
        yield family, names, float(found[3])


def exported(store: Store, selector: str, path: Path) -> list[Sample]:
    export(store, selector, path, "openmetrics", force=True)
    return list(parsed(path.read_text(encoding="utf-8")))


def test_values_units_statuses(store: Store, tmp_path: Path) -> None:
    run = make_run(label="x")
    store.begin_run(run)
    second = make_row(0, "latency", value=1.5e-7, unit="s", better="lower")
    store.add_results(run.uuid, [make_row(0, value=2.5e10), second], 0)
    store.add_results(run.uuid, [make_row(1, value=9e99, status="invalid", reason="above the law")], 1)
    store.add_results(run.uuid, [make_row(2, value=None, status="skipped", samples=(), reason="no room")], 2)
    store.add_results(run.uuid, [make_row(3, axes={"n": 1}), make_row(3, "gain", axes={"n": 1}, unit="1")], 3)
    store.add_results(run.uuid, [make_row(3, axes={"n": "1"})], 4)
    found = exported(store, "x", tmp_path / "x.prom")
    assert export(store, "x", tmp_path / "y.prom").format == "openmetrics"
    values = [(name, label["case"], value) for name, label, value in found if "metric" in label]
    first = '{"bytes":4096,"op":"read"}'
    assert ("kvbench_result_bytes_per_second", first, 2.5e10) in values
    assert ("kvbench_result_seconds", first, 1.5e-7) in values
    assert {case for _, case, _ in values} == {first, '{"n":1}', '{"n":"1"}'}
    assert "kvbench_result_ratio" in {name for name, _, _ in values}
    counts = {label["status"]: value for name, label, value in found if name == "kvbench_rows"}
    assert counts == {"ok": 5, "invalid": 1, "skipped": 1}
    (start,) = [value for name, _, value in found if name == "kvbench_run_start_timestamp_seconds"]
    assert start == 1740787200.0
    assert all("run" not in label and len(label) <= 8 for _, label, _ in found)


def test_several_runs_are_told_apart(store: Store, tmp_path: Path) -> None:
    group = str(uuid.uuid4())
    runs = [make_run(label="both", group=group) for _ in range(2)]
    for run in runs:
        store.begin_run(run)
        store.add_results(run.uuid, [make_row(0)], 0)
    found = exported(store, "both", tmp_path / "x.prom")
    assert {label["run"] for _, label, _ in found} == {run.uuid for run in runs}


@pytest.mark.parametrize("text", NASTY)
def test_hostile_text_is_one_label(text: str, store: Store, tmp_path: Path) -> None:
    run = make_run()
    store.begin_run(run)
    row = make_row(0, suite=text, metric=text, axes={text: text, "n": 1})
    store.add_results(run.uuid, [row], 0)
    found = exported(store, run.uuid, tmp_path / "x.prom")
    label = next(label for name, label, _ in found if name == "kvbench_result_bytes_per_second")
    assert json.loads(label["case"]) == row.axes
    assert (label["suite"], label["metric"]) == (visible(text), visible(text))


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_two_texts_become_one(one: str, two: str) -> None:
    assert (visible(one) == visible(two)) == (one == two)
    assert visible(one).isprintable()
    ((_, back),) = LABEL.findall(labels({"x": one}))
    assert unquoted(back) == one or "\r" in one


@given(st.text(min_size=1, max_size=10))
def test_units_make_legal_names(unit: str) -> None:
    assert re.fullmatch(r"[a-zA-Z0-9_]+", unit_name(unit))
