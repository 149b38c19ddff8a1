"""The directkv_attention figures at small sizes: what they are made of, and what a failure says; no ratio asserted."""

from __future__ import annotations

import pytest

from kvbench.errors import Unavailable, VerifyError
from kvbench.systems.directkv import prefill
from scripts.figures import directkv_attention as group


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "CONTEXT", 256)
    monkeypatch.setattr(group, "MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(group, "BYTES_SHAPES", {"ragged": (50, 201, 16, 32)})


def needs_a_disk(note: str) -> None:
    if "file" in note and "memory" in note:
        pytest.skip(note)


def test_decode_in_place_is_held_to_the_gather() -> None:
    found = list(group.against_gather(2))
    assert [figure.low for figure in found] == [0.85, 0.85]
    assert all(figure.value is not None and figure.value > 0 and "GB/s" in figure.note for figure in found)


def test_decode_streamed_is_held_to_a_swap_and_to_its_reads() -> None:
    found = list(group.against_swap(2))
    needs_a_disk(found[0].note)
    assert [(figure.low, figure.high) for figure in found] == [(None, 1.10), (None, 0.10), (0.85, None)]
    assert all(figure.value is not None for figure in found)


def test_bytes_are_held_to_the_algebra() -> None:
    link, near = group.prefill_bytes("ragged")
    needs_a_disk(link.note)
    assert near.value == 1.0
    assert link.value is not None
    assert "q_outer" in link.note
    assert "kv_outer" in link.note


def test_bytes_of_a_wrong_result_are_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: prefill.Prefill) -> None:
        raise VerifyError("attention is wrong")

    monkeypatch.setattr(prefill.Prefill, "verify", wrong)
    found = list(group.prefill_bytes("ragged"))
    assert [(figure.value, figure.verdict) for figure in found] == [(None, "missed")] * 2


def test_winners_lists_its_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = group.winners(1, [(16, 16, 32)], keys=128)
    needs_a_disk(figure.note)
    assert figure.value in (0.0, 1.0)
    seen = {"q_outer": 3.0, "kv_outer": 1.0, "swap": 2.0}
    monkeypatch.setattr(group, "decided", lambda plan, rounds: (seen, {**seen, "q_outer": 0.5}))
    figure = group.winners(1, [(16, 16, 32), (32, 16, 32)], keys=128)
    assert (figure.value, figure.low) == (0.0, 0.9)
    assert "16 queries, tiles 16 x 32: q_outer for kv_outer (3.00 x)" in figure.note
    monkeypatch.setattr(group, "decided", lambda plan, rounds: (seen, {**seen, "swap": 2.5}))
    assert group.winners(1, [(16, 16, 32)], keys=128).value == 1.0


def test_the_gain_of_fusing_is_held_to_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = group.fused_gain(8, 2)
    needs_a_disk(figure.note)
    assert figure.value is not None
    assert figure.value > 0
    assert "predicted" in figure.note

    def none(*args: object) -> object:
        raise Unavailable("no far tier", where="file")

    monkeypatch.setattr(group, "far_of", none)
    lost = group.fused_gain(8, 2)
    assert (lost.value, lost.verdict) == (None, "missed")
    assert "no far tier" in lost.note
