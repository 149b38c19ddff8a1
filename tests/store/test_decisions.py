"""Calibrations and notes: kept on both kinds of database, the newest counts."""

from __future__ import annotations

import pytest

from kvbench.errors import UsageError
from kvbench.store.decisions import Calibration
from kvbench.store.engine import Store
from tests.store.factories import at, make_row, make_run


def measured(store: Store) -> tuple[str, str]:
    """Store one run with two cases; return its UUID and the digest of the first."""
    run = make_run(env={"gpu": {"driver": "550.1"}})
    store.begin_run(run)
    rows = [make_row(n) for n in range(2)]
    for position, row in enumerate(rows):
        store.add_results(run.uuid, [row], position)
    store.finish_run(run.uuid, "ok", at(9))
    return run.uuid, rows[0].digest


def calibration(digest: str, run_sd: float = 0.01, hw_class: str = "cpu-a") -> Calibration:
    return Calibration(digest, "bandwidth", hw_class, "env-a", "", 10, run_sd, 0.02, {})


def test_the_newest_calibration_of_a_case_counts_with_the_facts_of_its_environment(any_store: Store) -> None:
    _, digest = measured(any_store)
    any_store.add_calibrations([calibration(digest, 0.01)])
    later = any_store.add_calibrations([calibration(digest, 0.03), calibration(digest, 0.5, "cpu-b")])
    (found,) = any_store.calibrations("cpu-a").values()
    assert (found.run_sd, found.created_at, found.runs) == (0.03, later, 10)
    assert found.env == {"gpu": {"driver": "550.1"}}
    assert any_store.calibrations("cpu-c") == {}


def test_a_calibration_of_an_unknown_case_stores_nothing(any_store: Store) -> None:
    _, digest = measured(any_store)
    with pytest.raises(UsageError, match="not in the database"):
        any_store.add_calibrations([calibration(digest), calibration("f" * 64)])
    assert any_store.calibrations("cpu-a") == {}


def test_notes_are_read_back_for_their_case_and_hardware(any_store: Store) -> None:
    run, digest = measured(any_store)
    mine = any_store.annotate(" new level ", hw_class="cpu-a", run_uuid=run, case_digest=digest)
    any_store.annotate("about the run", hw_class="cpu-a", run_uuid=run)
    any_store.annotate("elsewhere", hw_class="cpu-b", run_uuid=run, case_digest=digest)
    any_store.annotate("another case", hw_class="cpu-a", run_uuid=run, case_digest="e" * 64)
    found = any_store.annotations(hw_class="cpu-a", case_digest=digest)
    assert [note.text for note in found] == ["new level", "about the run"]
    assert found[0] == mine
    every = any_store.annotations(hw_class="cpu-a")
    assert [note.text for note in every] == ["new level", "about the run", "another case"]
    assert [note for note in every if note.case_digest in (None, digest)] == found


@pytest.mark.parametrize("text", ["", "  ", "x" * 2001])
def test_a_note_has_a_text_of_sensible_length(store: Store, text: str) -> None:
    run, _ = measured(store)
    with pytest.raises(UsageError, match="a note"):
        store.annotate(text, run_uuid=run)


def test_a_note_on_a_run_that_is_not_here_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="no run has this UUID"):
        store.annotate("x", run_uuid="0" * 36)


def test_cases_and_their_series_are_found(any_store: Store) -> None:
    _, digest = measured(any_store)
    assert [known.digest for known in any_store.known_cases(digest=digest[:8])] == [digest]
    assert len(any_store.known_cases(suite="ladder", bench="host_bandwidth")) == 2
    assert any_store.known_cases(suite="ladder", bench="none") == []
    assert any_store.series_keys(digest) == [("bandwidth", "cpu-a")]
