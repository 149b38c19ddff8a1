"""The list of traps: complete, documented, never ended by one of them, and honest in its exit code."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import IO

import jsonschema
import pytest

from kvbench.cli import doctor
from kvbench.errors import KvbenchError, Unavailable, VerifyError
from kvbench.schemas import schema_for
from kvbench.timing import traps
from kvbench.timing.traps import catalogue
from kvbench.timing.traps.catalogue_gpu import GPU_TRAPS
from kvbench.timing.traps.record import Finding, Number, Trap, check, not_applicable, unknown
from tests.timing.traps import test_order
from tests.timing.traps.test_faults import LOOKS

ROOT = Path(__file__).resolve().parents[3]
HOST = (1, 2, 4, 5, 6, 12, 13, 14, 16, 19, 21, 22, 23, 24, 25, 28, 29, 30, 31, 32, 33, 34, 53, 55, 57, 58)
GPU = (7, 8, 9, 10, 11, 15, 17, 18, 20, 26, 27, *range(35, 49), 54, 56, 62)
ASKED = [f"T{n}" for n in sorted((*HOST, *GPU))]
A, B = Number("left", 1.5e9, "B/s"), Number("right", 3, "pages")
GOOD = Trap("T1", "good", "nothing", "nothing to do", lambda: check(True, A, B, "equal", "differs", "a note"))
BAD = Trap("T2", "bad", "numbers lie", "mend it", lambda: check(False, A, B, "equal", "differs"))
ABSENT = Trap("T7", "absent", "nothing", "mend it", lambda: not_applicable("no GPU here"))
BLIND = Trap("T3", "blind", "who knows", "look again", lambda: unknown("no eyes", "seen"))


def raising(error: Exception) -> Trap:
    def look() -> Finding:
        raise error

    return Trap("T4", "raises", "m", "f", look)


def test_the_traps_asked_for_are_there_and_tested() -> None:
    assert [trap.id for trap in catalogue.TRAPS] == ASKED
    assert [trap.id for trap in GPU_TRAPS] == [f"T{n}" for n in GPU]
    assert set(LOOKS) | set(test_order.LOOKS) | set(test_order.NODES) == {f"T{n}" for n in HOST}


def test_the_document_tells_of_every_trap() -> None:
    text = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8")
    for trap in catalogue.TRAPS:
        assert f"| {trap.id} |" in text
    assert "kvbench.traps/1" in text


@pytest.mark.parametrize(
    ("error", "verdict", "reason"),
    [
        (Unavailable("no memory", mend="buy some"), "unknown", "no memory"),
        (VerifyError("wrong bytes"), "fail", "payload check failed: wrong bytes"),
        (KvbenchError("no number"), "fail", "no number"),
        (ZeroDivisionError("oops"), "fail", "it broke: ZeroDivisionError: oops"),
    ],
)
def test_whatever_a_trap_raises_is_a_verdict(error: Exception, verdict: str, reason: str) -> None:
    result = catalogue.examine(raising(error))
    assert result.verdict == verdict
    assert reason in result.finding.reason


@pytest.mark.parametrize(
    ("listed", "code"),
    [
        ((GOOD,), 0),
        ((GOOD, BLIND), 0),
        ((GOOD, BAD), 3),
        ((BLIND,), 3),
        ((GOOD, BLIND, BAD), 3),
        ((GOOD, ABSENT), 0),
        ((ABSENT,), 3),
        ((ABSENT, BLIND), 3),
    ],
)
def test_exit_code_and_document(
    listed: tuple[Trap, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalogue, "TRAPS", listed)
    assert doctor.run(traps=True, json=True) == code
    out, err = capsys.readouterr()
    document = json.loads(out)
    jsonschema.validate(document, schema_for("kvbench.traps/1"))
    assert document["exit_code"] == code
    assert [entry["id"] for entry in document["traps"]] == [trap.id for trap in listed]
    # another measurement of this machine may be waited for, and that is a line too
    assert sum(line.startswith("trap ") for line in err.splitlines()) == sum(trap is not ABSENT for trap in listed)


def test_both_numbers_are_printed_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalogue, "TRAPS", (GOOD, BAD, BLIND))
    assert traps.run() == 3
    out = capsys.readouterr().out
    assert out.isascii()
    good, rest = out.split("T2  ")
    for block in (good, rest):
        assert "left: 1.50 GB/s" in block
        assert "right: 3 pages" in block
    assert "because" not in good
    for words in ("because: differs", "for results: numbers lie", "mend: mend it", "because: no eyes"):
        assert words in rest
    assert out.splitlines()[-1] == "1 passed, 1 failed, 1 unknown, 0 not applicable"


def test_what_does_not_apply_is_one_line_each_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalogue, "TRAPS", (ABSENT, GOOD, replace(ABSENT, id="T8")))
    assert traps.run() == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-4:] == [
        "not applicable: no GPU here",
        "  T7   absent",
        "  T8   absent",
        "1 passed, 0 failed, 0 unknown, 2 not applicable",
    ]
    assert "mend it" not in out
    assert "T7" not in err


def test_a_verdict_needs_what_it_stands_on() -> None:
    with pytest.raises(ValueError, match="has no numbers"):
        Finding("not applicable", A, B, "equal", "no GPU")
    with pytest.raises(ValueError, match="compared nothing"):
        Finding("pass", A, None, "equal")
    with pytest.raises(ValueError, match="needs a reason"):
        Finding("unknown", A, B, "equal")


class Refusing:
    """A stdout whose writes fail with ``code``; its descriptor is a file of the test's own."""

    def __init__(self, code: int, file: IO[str]) -> None:
        self.code, self.file = code, file

    def write(self, text: str) -> int:
        raise OSError(self.code, os.strerror(self.code))

    def flush(self) -> None: ...

    def fileno(self) -> int:
        return self.file.fileno()


def test_a_full_disk_is_an_error_and_a_reader_that_left_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(catalogue, "TRAPS", (GOOD,))
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        monkeypatch.setattr("sys.stdout", Refusing(errno.ENOSPC, file))
        with pytest.raises(KvbenchError, match="could not be written"):
            traps.run()
        monkeypatch.setattr("sys.stdout", Refusing(errno.EPIPE, file))
        assert traps.run() == 0
