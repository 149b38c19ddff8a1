"""What both drivers promise: order of calls, refusals before memory is touched, undo of exactly the failing call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvbench.errors import UsageError
from kvbench.memory.vmm.protocol import Counters, Exhausted, Vmm, VmmError
from tests.memory.vmm.rigs import CHUNKS, Rig, host_rig, rig

__all__ = ["rig"]


def alive(rig: Rig) -> tuple[int, int, int, int]:
    found = rig.vmm.counters()
    if rig.fake is not None:
        live = rig.fake.live()
        assert (live.get("reservations", 0), live.get("handles", 0), live.get("mappings", 0)) == (
            found.reservations, found.chunks, found.mappings,
        )  # fmt: skip
    return found.reservations, found.chunks, found.mappings, found.lost


def test_bytes_written_through_one_place_are_read_through_its_alias(rig: Rig) -> None:
    vmm: Vmm = rig.vmm
    g = rig.grain
    place = vmm.reserve(8 * g)
    one, two = vmm.create_many(g, 1) + vmm.create_many(2 * g, 1)
    vmm.map_many(place, [0, 2 * g, 5 * g], [one, two, one])
    assert not rig.reachable(place.address)
    vmm.set_access(place, 0, g)
    vmm.set_access_many(place, [(2 * g, 2 * g), (5 * g, g)])
    rig.write(place.address, b"first")
    rig.write(place.address + 3 * g, b"second")
    assert rig.read(place.address + 5 * g, 5) == b"first"
    assert vmm.mapped_count(one) == 2
    vmm.unmap(place, 0, g)
    assert not rig.reachable(place.address)
    assert rig.read(place.address + 5 * g, 5) == b"first"
    vmm.map(place, 6 * g, two)
    vmm.set_access(place, 5 * g, 3 * g)
    assert rig.read(place.address + 7 * g, 6) == b"second"
    assert alive(rig) == (1, 2, 3, 0)


def test_everything_given_back_leaves_nothing(rig: Rig) -> None:
    vmm, g = rig.vmm, rig.grain
    for _ in range(3):
        place = vmm.reserve(4 * g)
        chunks = vmm.create_many(g, 4)
        vmm.map_many(place, [k * g for k in range(4)], chunks)
        vmm.set_access(place, 0, 4 * g)
        rig.write(place.address, b"x" * 4 * g)
        vmm.unmap(place, 0, 4 * g)
        vmm.release_many(chunks)
        vmm.free(place)
    assert alive(rig) == (0, 0, 0, 0)
    vmm.close()
    vmm.close()
    assert vmm.counters() == Counters(0, 0, 0, 0, 0, 0)
    with pytest.raises(UsageError, match="closed"):
        vmm.reserve(g)


def test_a_fresh_chunk_holds_nothing_of_an_old_one() -> None:
    with host_rig() as rig:  # a GPU clears nothing for its own process
        vmm, g = rig.vmm, rig.grain
        place = vmm.reserve(g)
        for _ in range(2):
            chunk = vmm.create(g)
            vmm.map(place, 0, chunk)
            vmm.set_access(place, 0, g)
            assert rig.read(place.address, g) == bytes(g)
            rig.write(place.address, b"y" * g)
            vmm.unmap(place, 0, g)
            vmm.release(chunk)
        vmm.free(place)


def test_refusals_before_memory_is_touched(rig: Rig) -> None:
    vmm, g = rig.vmm, rig.grain
    place, other = vmm.reserve(8 * g), vmm.reserve(2 * g)
    chunk, big = vmm.create(g), vmm.create(2 * g)
    vmm.map_many(place, [0, 2 * g], [chunk, big])
    gone, freed = vmm.create(g), vmm.reserve(g)
    vmm.release(gone)
    vmm.free(freed)
    before = alive(rig)
    calls = len(rig.fake.names()) if rig.fake else 0
    for words, request in (
        ("granularity", lambda: vmm.reserve(g + 1)),
        ("granularity", lambda: vmm.create(g // 2)),
        ("granularity", lambda: vmm.create(0)),
        ("granularity", lambda: vmm.map(place, g // 2, chunk)),
        ("granularity", lambda: vmm.map(place, -g, chunk)),
        ("granularity", lambda: vmm.set_access(place, 0, g + 1)),
        ("granularity", lambda: vmm.unmap(place, 0, 0)),
        ("beyond", lambda: vmm.map(place, 7 * g, big)),
        ("beyond", lambda: vmm.unmap(other, 2 * g, g)),
        ("mapped there already", lambda: vmm.map(place, 0, chunk)),
        ("mapped there already", lambda: vmm.map(place, 3 * g, chunk)),
        ("overlap", lambda: vmm.map_many(place, [5 * g, 5 * g], [chunk, chunk])),
        ("overlap", lambda: vmm.map_many(place, [5 * g, 6 * g], [big, chunk])),
        ("no such chunk", lambda: vmm.map(place, 5 * g, gone)),
        ("no such chunk", lambda: vmm.release(gone)),
        ("no such reservation", lambda: vmm.free(freed)),
        ("no such reservation", lambda: vmm.map(freed, 0, chunk)),
        ("cuts a mapping", lambda: vmm.unmap(place, 2 * g, g)),
        ("cuts a mapping", lambda: vmm.set_access(place, 3 * g, g)),
        ("not everything there is mapped", lambda: vmm.unmap(place, g, g)),
        ("not everything there is mapped", lambda: vmm.set_access(place, 0, 4 * g)),
        ("overlap", lambda: vmm.unmap_many(place, [(0, g), (0, g)])),
        ("still mapped", lambda: vmm.release(chunk)),
        ("twice in one call", lambda: vmm.release_many([chunk, chunk])),
        ("still hold mappings", lambda: vmm.free(place)),
        ("live objects", vmm.close),
        ("nothing", lambda: vmm.map_many(place, [], [])),
        ("nothing", lambda: vmm.create_many(g, 0)),
        ("differ", lambda: vmm.map_many(place, [0], [])),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            request()
        assert "\n" not in str(caught.value)
    assert alive(rig) == before
    if rig.fake:
        assert len(rig.fake.names()) == calls
    vmm.unmap_many(place, [(2 * g, 2 * g), (0, g)])
    with pytest.raises(UsageError, match="not everything there is mapped"):
        vmm.unmap(place, 0, g)


def test_a_chunk_of_another_driver_is_none_of_this() -> None:
    with host_rig() as a, host_rig() as b:
        foreign = a.vmm.create(a.grain)
        b.vmm.create(b.grain)
        place = b.vmm.reserve(b.grain)
        with pytest.raises(UsageError, match="no such chunk"):
            b.vmm.map(place, 0, foreign)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_failing_map_undoes_exactly_its_own_call(rig: Rig, k: int) -> None:
    vmm, g = rig.vmm, rig.grain
    place = vmm.reserve(16 * g)
    chunks = vmm.create_many(g, 6)
    vmm.map(place, 15 * g, chunks[5])
    vmm.set_access(place, 15 * g, g)
    rig.write(place.address + 15 * g, b"kept")
    before = alive(rig)
    rig.fail("map", k)
    offsets = [2 * n * g for n in range(5)]
    with pytest.raises(VmmError) as caught:
        vmm.map_many(place, offsets, chunks[:5])
    assert (caught.value.index, isinstance(caught.value, Exhausted)) == (k - 1, True)
    assert f"number {k - 1}" in str(caught.value)
    assert alive(rig) == before
    assert rig.read(place.address + 15 * g, 4) == b"kept"
    assert [vmm.mapped_count(chunk) for chunk in chunks] == [0] * 5 + [1]
    vmm.map_many(place, offsets, chunks[:5])
    vmm.set_access_many(place, [(at, g) for at in offsets])
    rig.write(place.address + 8 * g, b"works")


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_failing_set_access_takes_back_what_it_gave(rig: Rig, k: int) -> None:
    vmm, g = rig.vmm, rig.grain
    place = vmm.reserve(8 * g)
    vmm.map_many(place, [0, g, 4 * g, 6 * g], vmm.create_many(g, 4))
    vmm.set_access(place, 0, g)
    rig.write(place.address, b"kept")
    rig.fail("set_access", k)
    with pytest.raises(VmmError) as caught:
        vmm.set_access_many(place, [(0, 2 * g), (4 * g, g), (6 * g, g)])
    assert caught.value.index == k - 1
    assert [rig.reachable(place.address + n * g) for n in (0, 1, 4, 6)] == [True, False, False, False]
    assert rig.read(place.address, 4) == b"kept"
    vmm.set_access_many(place, [(0, 2 * g), (4 * g, g), (6 * g, g)])
    assert all(rig.reachable(place.address + n * g) for n in (0, 1, 4, 6))


@pytest.mark.parametrize("k", [1, 2])
def test_a_failing_unmap_leaves_what_comes_after_it(rig: Rig, k: int) -> None:
    vmm, g = rig.vmm, rig.grain
    place = vmm.reserve(8 * g)
    chunks = vmm.create_many(g, 3)
    vmm.map_many(place, [0, 2 * g, 4 * g], chunks)
    vmm.set_access_many(place, [(0, g), (2 * g, g), (4 * g, g)])
    rig.write(place.address + 4 * g, b"kept")
    rig.fail("unmap", k)
    with pytest.raises(VmmError) as caught:
        vmm.unmap_many(place, [(0, g), (2 * g, g), (4 * g, g)])
    assert caught.value.index == k - 1
    assert alive(rig) == (1, 3, 4 - k, 0)
    assert [rig.reachable(place.address + n * g) for n in (0, 2, 4)] == [k < 2, True, True]
    assert rig.read(place.address + 4 * g, 4) == b"kept"
    vmm.unmap_many(place, [(2 * n * g, g) for n in range(k - 1, 3)])
    vmm.release_many(chunks)


def test_a_used_up_pool_gives_none_of_a_call(rig: Rig) -> None:
    vmm, g = rig.vmm, rig.grain
    held = vmm.create_many(g, CHUNKS - 2)
    before = alive(rig)
    with pytest.raises(Exhausted) as caught:
        vmm.create_many(g, 3)
    assert caught.value.index == 2
    assert alive(rig) == before
    more = vmm.create_many(g, 2)
    vmm.release_many([*held, *more])
    assert alive(rig) == (0, 0, 0, 0)


def test_addresses_beyond_any_address_space(rig: Rig) -> None:
    for nbytes in (1 << 60, 1 << 64):
        with pytest.raises(Exhausted, match=r"addresses|OUT_OF_MEMORY"):
            rig.vmm.reserve(nbytes)
    assert alive(rig) == (0, 0, 0, 0)


def test_destroy_gives_back_all_that_lives_and_says_what(rig: Rig) -> None:
    vmm, g = rig.vmm, rig.grain
    place, empty = vmm.reserve(8 * g), vmm.reserve(g)
    vmm.map_many(place, [0, g, 4 * g], vmm.create_many(g, 3))
    vmm.create(2 * g)
    found = vmm.destroy()
    assert (found.reservations, found.chunks, found.mappings) == (2, 4, 3)
    left = vmm.counters()
    assert (left.reservations, left.chunks, left.mappings, left.fds, left.lost) == (0, 0, 0, 0, 0)
    assert empty.nbytes == g


def test_threads_with_ranges_of_their_own_do_not_disturb_each_other(rig: Rig) -> None:
    vmm, g = rig.vmm, rig.grain
    place = vmm.reserve(4 * g)
    chunks = vmm.create_many(g, 4)
    wrong: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for turn in range(30):
                vmm.map(place, k * g, chunks[k])
                vmm.set_access(place, k * g, g)
                rig.write(place.address + k * g, bytes([k, turn]))
                assert rig.read(place.address + k * g, 2) == bytes([k, turn])
                vmm.unmap(place, k * g, g)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert alive(rig) == (1, 4, 0, 0)


def test_what_is_no_size_offset_or_handle_is_refused_before_anything_changes(rig: Rig) -> None:
    vmm, g = rig.vmm, rig.grain
    place, chunks = vmm.reserve(4 * g), vmm.create_many(g, 2)
    vmm.map(place, 0, chunks[0])
    wrong: Any = vmm
    before = alive(rig)
    requests: list[Callable[[], object]] = [
        lambda: wrong.reserve(float(g)), lambda: wrong.reserve("x"), lambda: wrong.create("x"),
        lambda: wrong.create(float(g)), lambda: wrong.create_many(g, 1.0), lambda: vmm.map(place, 1 << 64, chunks[1]),
        lambda: vmm.map(place, -(1 << 64), chunks[1]), lambda: vmm.map(place, (1 << 63) - g, chunks[1]),
        lambda: wrong.map(place, float(g), chunks[1]), lambda: wrong.map(place, g, "x"),
        lambda: wrong.map("x", g, chunks[1]), lambda: wrong.map_many(place, [g, 2.0 * g], [chunks[1]] * 2),
        lambda: vmm.map_many(place, [g, 1 << 64], [chunks[1]] * 2),
        lambda: vmm.map_many(place, [g, (1 << 63) - g], [chunks[1]] * 2),
        lambda: wrong.map_many(place, [g, 2 * g], [chunks[1], None]), lambda: wrong.set_access_many(place, [(0,)]),
        lambda: wrong.set_access_many(place, [(0, g), (0,)]), lambda: wrong.set_access_many(place, [0]),
        lambda: wrong.set_access_many(place, [(0.0, g)]), lambda: wrong.unmap_many(place, [(0, g), (g, 1.0 * g)]),
        lambda: vmm.unmap(place, 0, 1 << 64), lambda: wrong.unmap(place, 0, float(g)), lambda: wrong.release("x"),
        lambda: wrong.free(None), lambda: wrong.mapped_count(7),
    ]  # fmt: skip
    for number, request in enumerate(requests):
        with pytest.raises(UsageError):
            request()
        assert alive(rig) == before, number
    vmm.map(place, np.int64(g), chunks[1])  # type: ignore[arg-type]
    vmm.unmap_many(place, np.array([(0, g), (g, g)]))  # type: ignore[arg-type]
