"""Sorting a trace file, also one larger than what is sorted at once."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.errors import UsageError
from kvbench.replay.request import Request
from kvbench.replay.traces import trace as reading
from kvbench.replay.traces import write
from kvbench.replay.traces.lines import lines as lines_of
from kvbench.replay.traces.trace import open_trace
from kvbench.replay.traces.write import sorted_copy, write_requests
from tests.replay.traces.samples import BLOCKS, SAMPLES, requests, text


@pytest.mark.parametrize("chunk", [1 << 30, 2000])
@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "bailian"])
def test_every_line_comes_out_in_the_order_of_its_time(
    name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(write, "MOST_PARTS", 3)
    monkeypatch.setattr(reading, "WINDOW", 4)
    rows = requests(60, BLOCKS.get(name))
    lines = text(name, rows).splitlines()
    head, body = (lines[:1], lines[1:]) if len(lines) > 60 else ([], lines)
    mixed = random.Random(1).sample(body, len(body))
    path, out = tmp_path / "in", tmp_path / "out.gz"
    path.write_text("\n".join([*head, *mixed]) + "\n")
    with pytest.raises(UsageError, match="--sorted-copy"):
        open_trace(path)
    assert sorted_copy(path, out) == 60
    assert [text for _, text, _ in lines_of(out)] == lines
    assert open_trace(out, strict=True).facts.late == 0
    assert sorted(os.listdir(tmp_path)) == ["in", "out.gz"]


def test_a_row_that_cannot_be_read_leaves_no_file(tmp_path: Path) -> None:
    path, out = tmp_path / "in", tmp_path / "out"
    path.write_text(text("azure", requests(3)) + "oops\n")
    with pytest.raises(UsageError, match="in:5"):
        sorted_copy(path, out)
    assert not out.exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(UsageError, match="there already"):
        write_requests(out, requests(2))
    assert out.read_text() == "mine"
    with pytest.raises(UsageError, match="cannot be written"):
        write_requests(tmp_path / "no" / "out", requests(2))


def test_compressed_copies_of_one_trace_are_equal(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        write_requests(tmp_path / name, requests(5))
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


@pytest.mark.parametrize("name", ["out", "out.gz"])
@pytest.mark.parametrize("chunk", [1 << 30, 20_000])
def test_a_folder_that_takes_no_more_is_named_and_nothing_is_left(
    name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of a file refuses writes just as a full disk does."""
    monkeypatch.setattr(write, "CHUNK_BYTES", chunk)
    path = tmp_path / "in"
    rows = [replace(each, output_tokens=random.Random(each.id).randrange(1, 1 << 31)) for each in requests(3000)]
    path.write_text(text("kvbench", rows))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    descriptors = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(UsageError) as sorting:
            sorted_copy(path, tmp_path / name)
        with pytest.raises(UsageError) as writing:
            write_requests(tmp_path / name, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for each in (sorting, writing):
        assert str(each.value) == f"{name} in {tmp_path}: cannot be written (File too large)"
    assert os.listdir(tmp_path) == ["in"]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_full_disk_says_how_to_mend_it(tmp_path: Path) -> None:
    def rows() -> Iterator[Request]:
        yield from requests(2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UsageError, match=r"a in .*: cannot be written \(No space left on device\); free space there"):
        write_requests(tmp_path / "a", rows())
    assert os.listdir(tmp_path) == []
