"""What crosses the link: the bytes of NEO's table, and sets of pages that merge or do not."""

from __future__ import annotations

import pytest

from kvbench.errors import UsageError
from kvbench.systems.neo.shipping import Leg, Request, Transfer, in_order, record

KIB = 1 << 10


@pytest.mark.parametrize(
    ("model", "qkv", "o", "thousand", "crossover"),
    [
        ("Llama-2-7B", 24, 16, 16_000, 2.5),
        ("Llama-3-8B", 12, 16, 4_000, 7.0),
        ("Llama-3-70B", 20, 32, 4_000, 13.0),
    ],
)
def test_bytes_a_request_and_layer(model: str, qkv: int, o: int, thousand: int, crossover: float) -> None:
    """Section 2.3 of the facts, from NEO's block_swapper.py: KiB to the host, back, and of 1,000 tokens of KV."""
    one = Request(model)
    assert (one.qkv, one.o) == (qkv * KIB, o * KIB)
    assert 1000 * one.token == thousand * KIB
    assert one.crossover() == crossover
    assert one.layers(8).page_bytes(16) == 8 * 16 * one.token


def test_coalesced_pages_are_one_piece_a_plane_and_scattered_ones_are_not() -> None:
    layer = Request("Llama-3-8B").layer
    together = Transfer(layer, 16, 6, "coalesced", 1)
    apart = Transfer(layer, 16, 6, "scattered", 1)
    for way in ("fetch", "evict"):
        joined = together.moves(way)
        assert joined.total == apart.moves(way).total == 6 * layer.page_bytes(16)
        assert len(joined) == 1  # keys and values of whole pools follow each other
        assert len(apart.moves(way)) == 2 * 6
    assert apart.far.pages == 12
    there, back = apart.moves("fetch"), apart.moves("evict")
    assert sorted(there.src_offset.tolist()) == sorted(back.dst_offset.tolist())
    records = Transfer(record("qkv", 12 * KIB), 1, 16, "coalesced", 1).moves("evict")
    assert (len(records), records.total) == (1, 16 * 12 * KIB)


def test_layers_move_one_by_one_and_make_the_whole() -> None:
    shape = Request("Llama-3-8B").layers(4)
    moved = Transfer(shape, 16, 3, "scattered", 2)
    single = [moved.moves("evict", range(n, n + 1)) for n in range(4)]
    whole = moved.moves("evict")
    assert sum(m.total for m in single) == whole.total
    assert sorted(o for m in single for o in m.dst_offset.tolist()) == sorted(whole.dst_offset.tolist())


def test_legs_run_in_order_and_are_all_checked() -> None:
    said: list[str] = []

    def leg(name: str, seconds: float) -> Leg:
        def run(reps: int) -> float:
            said.append(f"{name}{reps}")
            return seconds

        return Leg(run, 10, 2, lambda: said.append(f"check {name}"), "copy")

    both = in_order([leg("a", 1.0), leg("b", 2.0)])
    assert both.run(2) == 6.0
    both.verify()
    assert said == ["a1", "b1", "a1", "b1", "check a", "check b"]
    assert (both.nbytes, both.fragments, both.kernel) == (20, 4, "copy")


def test_unknown_words_are_mistakes() -> None:
    with pytest.raises(UsageError, match="unknown model, got 'GPT-5'"):
        Request("GPT-5")
    with pytest.raises(UsageError, match="unknown copies, got 'some'"):
        Transfer(Request("Llama-3-8B").layer, 16, 1, "some", 1)
