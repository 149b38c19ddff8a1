"""Each format reads back what was written into it, and says precisely what it cannot read."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.errors import KvbenchError, NoData, UsageError
from kvbench.replay.request import Request, blocks_of
from kvbench.replay.traces import trace as reading
from kvbench.replay.traces.trace import Trace, describe, open_trace
from kvbench.replay.traces.write import write_requests
from tests.replay.traces.samples import BLOCKS, SAMPLES, requests, text

Make = Callable[[str], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def write(content: str, name: str = "t.trace") -> Path:
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return path

    return write


def expected(name: str, rows: list[Request]) -> list[Request]:
    """Return what is left of ``rows`` when the format has no field for everything."""
    keep = {
        "mooncake": {"session": None, "parent": None}, "bailian": {}, "kvbench": {},
        "burstgpt": {"parent": None, "block_tokens": None, "hash_ids": None},
        "azure": {"session": None, "parent": None, "block_tokens": None, "hash_ids": None},
    }[name]  # fmt: skip
    return [replace(row, **keep) for row in rows]  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_each_format_is_recognised_and_read(name: str, packed: bool, tmp_path: Path) -> None:
    rows = requests(8, BLOCKS.get(name))
    path = tmp_path / "sample"
    content = text(name, rows).encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    for asked in (None, name):
        found = open_trace(path, asked, strict=True)
        assert found.format.name == name
        assert found.notices == ()
        assert list(found.requests()) == expected(name, rows)
        assert list(found.requests()) == expected(name, rows)
    assert found.facts.requests == found.facts.rows == 8
    assert found.facts.rate == pytest.approx(2.0)
    if name in BLOCKS:
        names = [each for row in rows for each in row.hash_ids or ()]
        assert (found.facts.blocks, found.facts.unique_blocks) == (len(names), len(set(names)))
        assert "blocks of" in describe(found)


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    block = draw(st.sampled_from([None, 1, 16, 512]))
    rows, at = [], 0.0
    for i in range(draw(st.integers(1, 12))):
        at = round(at + draw(st.integers(0, 10**7)) / 1e6, 6)
        tokens = draw(st.integers(1, 200))
        names = None if block is None else tuple(range(i * 1000, i * 1000 + blocks_of(tokens, block)))
        session = draw(st.none() | st.integers(0, 5))
        parent = None if i == 0 or session is None else draw(st.none() | st.integers(0, i - 1))
        rows.append(
            Request(i, at, tokens, draw(st.integers(1, 9999)), session, parent, block if names else None, names)
        )
    return rows


@given(rows=traces(), suffix=st.sampled_from([".jsonl", ".jsonl.gz"]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_reads_back_as_it_was(rows: list[Request], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"round{suffix}"
    path.unlink(missing_ok=True)
    assert write_requests(path, rows) == len(rows)
    assert list(open_trace(path).requests()) == rows


def test_a_rate_stretches_all_times_and_a_limit_takes_the_first(make: Make) -> None:
    found = open_trace(make(text("mooncake", requests(5, 512, gap=2.0))))
    assert [each.arrival for each in found.requests(rate=1.0)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [each.id for each in found.requests(limit=2)] == [0, 1]
    for limit, rate in ((0, None), (None, 0.0), (None, -1.0), (None, float("nan"))):
        with pytest.raises(UsageError):
            found.requests(limit, rate)
    at_once = open_trace(make(text("mooncake", requests(3, 512, gap=0.0))), strict=True)
    assert [each.arrival for each in at_once.requests()] == [0.0, 0.0, 0.0]
    with pytest.raises(UsageError, match="at once"):
        at_once.requests(rate=1.0)


@pytest.mark.parametrize(("gap", "name"), [(100.0, "bailian"), (0.0004, "bailian"), (500.0, "mooncake")])
def test_times_that_look_like_another_unit_are_said(gap: float, name: str, make: Make) -> None:
    path = make(text(name, requests(5, BLOCKS[name], gap=gap)))
    unit = open_trace(path).format.unit
    (notice,) = open_trace(path).notices
    assert unit in notice
    with pytest.raises(UsageError, match=unit):
        open_trace(path, strict=True)


def test_failed_and_empty_rows_are_counted(make: Make) -> None:
    lines = text("burstgpt", requests(4)).splitlines()
    lines[2:2] = ["5.1,GPT-4,77,0,77,API log,s9", "5.2,GPT-4,0,9,9,API log,s9"]
    path = make("\n".join(lines) + "\n")
    found = open_trace(path)
    assert (found.facts.rows, found.facts.requests, found.facts.failed, found.facts.empty) == (6, 4, 1, 1)
    assert [each.id for each in found.requests()] == [0, 3, 4, 5]
    assert any("1 row without output" in notice for notice in found.notices)
    assert any("1 row without input" in notice for notice in found.notices)
    with pytest.raises(UsageError, match=r"t\.trace:4: a request without input"):
        open_trace(path, strict=True)


def test_rows_out_of_order_within_the_window_are_put_right(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = requests(40, gap=1.0)
    mixed = [rows[i] for i in (*range(1, 30), 0, *range(30, 40))]
    path = make(text("azure", mixed))
    found = open_trace(path)
    assert found.facts.late == 1
    assert "out of order" in found.notices[0]
    assert [each.input_tokens for each in found.requests()] == [row.input_tokens for row in rows]
    assert [each.arrival for each in found.requests()] == [row.arrival for row in rows]
    monkeypatch.setattr(reading, "WINDOW", 29)
    assert [each.arrival for each in open_trace(path).requests()] == [row.arrival for row in rows]
    monkeypatch.setattr(reading, "WINDOW", 28)
    with pytest.raises(UsageError, match=r"t\.trace:31: .*--sorted-copy"):
        open_trace(path)


def test_equal_times_keep_the_order_of_the_file(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = requests(20, gap=0.0)
    late = [replace(rows[0], arrival=3.0), *rows[1:]]
    found = open_trace(make(text("azure", late)))
    assert [each.id for each in found.requests()] == [*range(1, 20), 0]


def test_hash_ids_of_the_wrong_number(make: Make) -> None:
    rows = requests(200, 512)
    lines = text("mooncake", rows).splitlines()
    lines[7] = json.dumps({**json.loads(lines[7]), "hash_ids": [1]})
    path = make("\n".join(lines) + "\n")
    found = open_trace(path)
    assert (found.facts.bad_ids, found.facts.bad_line) == (1, 8)
    assert list(found.requests())[7].hash_ids is None
    assert list(found.requests())[8].hash_ids == rows[8].hash_ids
    assert any("line 8" in notice for notice in found.notices)
    with pytest.raises(UsageError, match=r"t\.trace:8: number of hash ids, got 1, expected 5 = ceil"):
        open_trace(path, strict=True)


def test_another_block_size_is_told_from_a_faulty_row(make: Make) -> None:
    rows = requests(10, 16)
    content = "\n".join(
        json.dumps({
            "timestamp": i, "input_length": r.input_tokens, "output_length": 1, "hash_ids": list(r.hash_ids or ()),
        }) for i, r in enumerate(rows)
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"t\.trace:1: .*10 such rows.*another block size"):
        open_trace(make(content + "\n"))


def test_block_sizes_are_never_mixed(make: Make) -> None:
    path = make(text("kvbench", requests(2, 64)) + text("kvbench", requests(4, 16)[2:]))
    with pytest.raises(UsageError, match=r"t\.trace:3: another block size than before, got 16, expected 64"):
        open_trace(path)


def test_an_id_that_names_two_prefixes_is_counted(make: Make) -> None:
    rows = requests(4, 512)
    swapped = replace(rows[3], hash_ids=tuple(reversed(rows[3].hash_ids or ())))
    path = make(text("mooncake", [*rows[:3], swapped]))
    assert open_trace(path).facts.broken > 0
    with pytest.raises(UsageError, match=r"t\.trace:4: hash id 10000 follows 10001, got 'it followed -1 before'"):
        open_trace(path, strict=True)


def test_a_parent_outside_the_file_begins_a_session(make: Make) -> None:
    found = open_trace(make(text("bailian", requests(6, 16)[2:])), strict=True)
    assert found.facts.orphans == 2
    assert [(each.id, each.parent) for each in found.requests()] == [(0, None), (1, None), (2, 0), (3, 1)]


def test_names_other_replayers_use(make: Make) -> None:
    rows = [
        {"created_time": 1000, "session_id": "x", "input_tokens": 600, "output_tokens": 2, "hash_ids": [1, 2]},
        {"created_time": 1500, "session_id": "y", "prompt_tokens": 10, "completion_tokens": 2},
        {"delay": 400, "session_id": "x", "input_tokens": 700, "output_tokens": 2, "hash_ids": [1, 3]},
        {"delay_ms": 900, "session_id": "x", "input_tokens": 700, "output_tokens": 2, "hash_ids": [1, 3]},
    ]
    found = list(open_trace(make("".join(json.dumps(row) + "\n" for row in rows))).requests())
    assert [(each.id, each.arrival, each.session) for each in found] == [
        (0, 0.0, 0), (2, 0.4, 0), (1, 0.5, 1), (3, 1.3, 0),
    ]  # fmt: skip
    del rows[0]
    with pytest.raises(UsageError, match=r"t\.trace:2: delay without a turn before it"):
        open_trace(make("".join(json.dumps(row) + "\n" for row in rows)))


OWN = '{"id":%d,"arrival":%d,"input_tokens":1,"output_tokens":%d,"parent":%s}\n'
MOONCAKE = '{"timestamp":1,"input_length":5,"output_length":5%s}\n'
BURSTGPT = "Timestamp,Request tokens,Response tokens"
BAD = {
    "empty": ("", ["the trace is empty"]),
    "blank": ("\n \n", ["the trace is empty"]),
    "prose": ("hello, world\n", ["t.trace:1", "no trace format known", "mooncake burstgpt azure bailian kvbench"]),
    "fields": ('{"a": 1}\n', ["no trace format known", "JSON with a"]),
    "list": ("[1, 2]\n", ["no trace format known"]),
    "cut": (text("mooncake", requests(3, 512))[:-20], ["t.trace:3", "the file ends within a line"]),
    "cut csv": (text("azure", requests(3))[:-8], ["t.trace:4", "the file ends within a line"]),
    "not json": ('{"timestamp": 1, "input_length": 5, "output_length": 5}\n{oops\n', ["t.trace:2", "not JSON"]),
    "mixed": (
        text("mooncake", requests(2, 512)) + text("bailian", requests(2, 16)),
        ["t.trace:3", "a row of bailian in a file of mooncake", "chat_id"],
    ),
    "mixed own": (
        text("kvbench", requests(2)) + text("mooncake", requests(2, 512)),
        ["t.trace:3", "a row of mooncake or bailian in a file of kvbench", "timestamp"],
    ),
    "json in csv": (text("azure", requests(2)) + text("kvbench", requests(1)), ["t.trace:4", "not CSV"]),
    "row of another": (text("azure", requests(2)) + text("burstgpt", requests(1)), ["t.trace:4", "fields of the row"]),
    "csv in json": (text("kvbench", requests(1)) + text("azure", requests(1)), ["t.trace:2", "not JSON"]),
    "two headers": (text("azure", requests(2)) * 2, ["t.trace:4", "a second header"]),
    "header only": ("TIMESTAMP,ContextTokens,GeneratedTokens\n", ["no request to replay", "0 rows"]),
    "all failed": ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,5,0\n", ["no request to replay", "1 row"]),
    "negative time": (text("burstgpt", requests(2)).replace("5.5,", "-5.5,"), ["t.trace:3", "negative Timestamp"]),
    "nan time": (text("burstgpt", requests(2)).replace("5.5,", "nan,"), ["t.trace:3", "expected a number"]),
    "huge time": ('{"timestamp": 1' + "0" * 400 + ', "input_length": 5, "output_length": 5}\n', ["a number"]),
    "late time": ('{"timestamp": 1e15, "input_length": 5, "output_length": 5}\n', ["t.trace:1", "another unit"]),
    "parent": (text("kvbench", requests(4)[2:]), ["t.trace:1", "parent", "an earlier row of the file"]),
    "no time": (text("azure", requests(2)).replace("2023-11-16 18:15:46.5", "soon"), ["t.trace:3", "TIMESTAMP"]),
    "zones": (text("azure", requests(2)).replace("46.5000000", "46.5+00:00"), ["t.trace:3", "without a zone"]),
    "tokens": (text("burstgpt", requests(2)).replace(",100,", ",1e2,"), ["t.trace:2", "Request tokens", "whole"]),
    "negative tokens": (text("kvbench", requests(2)).replace(":101", ":-1"), ["t.trace:2", "input_tokens", "-1"]),
    "huge tokens": (text("kvbench", requests(2)).replace(":101", ":" + "9" * 30), ["t.trace:2", "input_tokens"]),
    "true tokens": (text("kvbench", requests(2)).replace(":101", ":true"), ["t.trace:2", "input_tokens"]),
    "id word": (text("mooncake", requests(2, 512)).replace("[0]", '["a"]'), ["t.trace:1", "hash id"]),
    "ids no list": (text("mooncake", requests(2, 512)).replace("[0]", "7"), ["t.trace:1", "hash_ids"]),
    "ids alone": ('{"id":0,"arrival":0,"input_tokens":1,"output_tokens":1,"hash_ids":[1]}\n', ["both or neither"]),
    "twice": (text("kvbench", requests(2)) * 2, ["t.trace:3", "the id comes twice"]),
    "chat twice": (text("bailian", requests(2, 16)) * 2, ["t.trace:3", "chat_id comes twice"]),
    "own parent": (OWN % (0, 0, 1, 0), ["t.trace:1", "its own parent"]),
    "own parent that failed": (OWN % (0, 0, 0, 0), ["t.trace:1", "its own parent"]),
    "chat's own parent": (text("bailian", requests(1, 16)).replace(": -1", ": 1000"), ["t.trace:1", "its own parent"]),
    "cycle": (OWN % (0, 0, 1, 1) + OWN % (1, 0, 1, 0), ["t.trace:1", "parent, got 1", "an earlier row"]),
    "cycle of three": (
        OWN % (0, 0, 1, "null") + OWN % (1, 1, 1, 3) + OWN % (2, 2, 1, 1) + OWN % (3, 3, 1, 2),
        ["t.trace:2", "parent, got 3", "an earlier row"],
    ),
    "parent that failed later": (OWN % (0, 0, 1, 1) + OWN % (1, 1, 0, "null"), ["t.trace:1", "parent, got 1"]),
    "no parent": (OWN % (0, 0, 1, 7), ["t.trace:1", "parent, got 7", "an earlier row"]),
    "chat row": (MOONCAKE % "" + MOONCAKE % ',"chat_id":4', ["t.trace:2", "a row of bailian", "chat_id"]),
    "root chat row": (MOONCAKE % "" + MOONCAKE % ',"parent_chat_id":-1', ["t.trace:2", "parent_chat_id"]),
    "own row": (MOONCAKE % "" + MOONCAKE % ',"arrival":4', ["t.trace:2", "a row of kvbench", "arrival"]),
    "delay in bailian": (
        text("bailian", requests(1, 16)).replace('"type"', '"session_id"'),
        ["t.trace:1", "a row of mooncake in a file of bailian", "session_id"],
    ),
    "arrival and chat": (MOONCAKE % ',"arrival":4,"chat_id":4', ["t.trace:1", "a row of bailian in a file of kvbench"]),
    "two names": (MOONCAKE % ',"input_tokens":6', ["t.trace:1", "input_length and input_tokens are one", "5 and 6"]),
    "two outputs": (MOONCAKE % ',"completion_tokens":6', ["t.trace:1", "output_length and completion_tokens"]),
    "two times": (MOONCAKE % ',"created_time":2', ["t.trace:1", "timestamp and created_time are one field"]),
    "field twice": (MOONCAKE % ',"timestamp":2', ["t.trace:1", "a field is there twice", "timestamp"]),
    "column twice": (BURSTGPT + ",Request tokens\n1,5,5,6\n", ["t.trace:1", "column is there twice", "request tok"]),
    "quoted twice": (BURSTGPT + ',"Request tokens"\n1,5,5,6\n', ["t.trace:1", "a column is there twice"]),
    "two headers in one": (
        BURSTGPT + ",ContextTokens,GeneratedTokens\n1,5,5,6,6\n", ["t.trace:1", "columns of two formats", "azure"],
    ),
    "deep": ('{"timestamp": ' + "[" * 100_000 + "\n", ["t.trace:1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_file_is_one_precise_line(name: str, make: Make) -> None:
    content, words = BAD[name]
    with pytest.raises(KvbenchError) as caught:
        list(open_trace(make(content), strict=True).requests())
    line = str(caught.value)
    assert "\n" not in line
    assert [word for word in words if word not in line] == [], line
    assert isinstance(caught.value, UsageError | NoData)


def test_names_that_agree_and_fields_without_a_value_are_taken(make: Make) -> None:
    path = make(MOONCAKE % ',"created_time":1,"prompt_tokens":5,"chat_id":null')
    (found,) = open_trace(path).requests()
    assert (found.input_tokens, found.output_tokens) == (5, 5)


@pytest.mark.parametrize("name", ["mooncake", "bailian", "kvbench"])
def test_naming_a_format_makes_no_other_row_of_it(name: str, make: Make) -> None:
    for other in ("mooncake", "bailian", "kvbench"):
        path = make(text(other, requests(4, BLOCKS[other])))
        if other == name:
            assert open_trace(path, name).facts.requests == 4
        else:
            with pytest.raises(UsageError, match=r"t\.trace:1: "):
                open_trace(path, name)


def test_a_parent_may_stand_later_in_the_file_when_it_comes_earlier(make: Make) -> None:
    lines = text("kvbench", requests(6)).splitlines()
    found = open_trace(make("\n".join([*lines[2:4], *lines[:2], *lines[4:]]) + "\n"))
    assert [(each.id, each.parent) for each in found.requests()] == [
        (0, None),
        (1, None),
        (2, 0),
        (3, 1),
        (4, 2),
        (5, 3),
    ]
    # of a parent that failed too
    path = make(OWN % (1, 5, 1, 0) + OWN % (0, 2, 0, "null"))
    assert [each.id for each in open_trace(path).requests()] == [1]


def test_bytes_that_are_no_text_and_damaged_archives(tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    path.write_bytes(text("azure", requests(2)).encode() + b"\xff\xfe\x00\n")
    with pytest.raises(UsageError, match=r"t\.trace:4: not UTF-8"):
        open_trace(path)
    path.write_bytes(gzip.compress(text("azure", requests(400)).encode())[:-50])
    with pytest.raises(UsageError, match="compressed file ends early"):
        open_trace(path)
    with pytest.raises(UsageError, match="no such trace file"):
        open_trace(tmp_path / "gone")
    with pytest.raises(UsageError, match="not a regular file, got 'a directory'"):
        open_trace(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="fifo: not a regular file, got 'a pipe'"):
        open_trace(tmp_path / "fifo")
    with pytest.raises(UsageError, match="null: not a regular file, got 'a device'"):
        open_trace(Path("/dev/null"))
    with pytest.raises(UsageError, match=r"unknown trace format.*mooncake"):
        open_trace(path, "parquet")


def test_a_file_that_changes_is_not_replayed_as_what_it_was(make: Make) -> None:
    found = open_trace(make(text("kvbench", requests(4))))
    make(text("kvbench", requests(5)))
    with pytest.raises(UsageError, match="has changed since"):
        next(found.requests())


def test_totals_that_do_not_add_up(make: Make) -> None:
    path = make(text("burstgpt", requests(3)).replace(",110,", ",111,"))
    assert open_trace(path).facts.totals == 1
    with pytest.raises(UsageError, match=r"t\.trace:2: total tokens, got 111, expected 110"):
        open_trace(path, strict=True)


def test_a_last_line_without_its_end_is_said(make: Make) -> None:
    path = make(text("azure", requests(3))[:-1])
    assert any("may be cut" in notice for notice in open_trace(path).notices)
    with pytest.raises(UsageError, match="may be cut"):
        open_trace(path, strict=True)


def test_a_trace_is_streamed(make: Make) -> None:
    found: Trace = open_trace(make(text("kvbench", requests(50))))
    first = found.requests()
    assert [next(first).id, next(first).id] == [0, 1]
    # the file may go while it is read: what was opened stays, and a second reading says so
    found.path.unlink()
    assert next(first).id == 2
    with pytest.raises(UsageError, match="no such trace file"):
        next(found.requests())
