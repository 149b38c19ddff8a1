"""Stream operations: right to the last byte for any size, alignment and team, and every kind of lie is caught."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvbench.errors import UsageError, VerifyError
from kvbench.kernels.team import Team

CPU = min(os.sched_getaffinity(0))
OPS = ("read", "write", "copy_plain", "memcpy", "nt_copy", "triad")
SIZES = (1, 63, 64, 65, 255, 256, 513, 4096, 4096 + 64 + 13, 100_003)
GUARD = 64


@pytest.fixture(scope="module", params=[1, 3])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with Team([CPU] * request.param) as made:
        yield made


class Arrays:
    """``count`` arrays of ``nbytes`` at ``shift`` bytes off a line, in one allocation with guard bytes around each."""

    def __init__(self, count: int, nbytes: int, shift: int = 0) -> None:
        self.stride = (nbytes + shift + 2 * GUARD + 63) // 64 * 64
        self.memory = np.random.default_rng(nbytes).integers(0, 256, count * self.stride + 64, np.uint8)
        start = -self.memory.ctypes.data % 64 + GUARD + shift
        self.parts = [self.memory[start + k * self.stride : start + k * self.stride + nbytes] for k in range(count)]
        for part in self.parts:
            doubles = part[: nbytes // 8 * 8].view(np.float64)
            doubles[:] = 1.0 + np.random.default_rng(1).random(len(doubles))
        outside = np.ones(len(self.memory), bool)
        for k in range(count):
            outside[start + k * self.stride : start + k * self.stride + nbytes] = False
        self.outside = outside
        self.before = self.memory[outside].copy()

    @property
    def addresses(self) -> list[int]:
        return [int(part.ctypes.data) for part in self.parts]

    def guards_are_whole(self) -> bool:
        return bool(np.array_equal(self.memory[self.outside], self.before))


def stream(op: str, nbytes: int, team: Team, shift: int = 0) -> tuple[Any, Arrays]:
    from kvbench.kernels.stream import ARRAYS, Stream

    arrays = Arrays(ARRAYS[op], nbytes, shift)
    return Stream(op, arrays.addresses, nbytes, team), arrays


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shift", [0, 8, 3])
def test_every_size_is_covered_to_the_last_byte(op: str, shift: int, team: Team) -> None:
    for nbytes in SIZES:
        size = max(8, nbytes // 8 * 8) if op == "triad" else nbytes
        work, arrays = stream(op, size, team, shift)
        sources = [part.copy() for part in arrays.parts[1:]]
        for reps in (1, 3):
            assert work.run(reps) > 0
            work.verify()
        assert arrays.guards_are_whole()
        assert all(np.array_equal(a, b) for a, b in zip(arrays.parts[1:], sources, strict=True))
        if op in ("copy_plain", "memcpy", "nt_copy"):
            assert np.array_equal(arrays.parts[0], arrays.parts[1])


def test_link_bytes_follow_stream() -> None:
    with Team([CPU]) as team:
        counted = {op: stream(op, 4096, team)[0].link_bytes for op in OPS}
    assert counted == {
        "read": 4096, "write": 4096, "copy_plain": 8192, "memcpy": 8192, "nt_copy": 8192, "triad": 12288
    }  # fmt: skip


def test_triad_is_the_textbook_formula(team: Team) -> None:
    work, arrays = stream("triad", 8 * 1001, team)
    work.run(3)  # the scalar of pass r is 2^r
    a, b, c = (part.view(np.float64) for part in arrays.parts)
    assert np.array_equal(a, b + 4.0 * c)


def test_two_runs_of_write_leave_different_bytes(team: Team) -> None:
    work, arrays = stream("write", 4096, team)
    work.run()
    first = arrays.parts[0].copy()
    work.run()
    assert not np.array_equal(first, arrays.parts[0])
    words = arrays.parts[0].view(np.uint64)
    assert len(np.unique(words)) == len(words)


@pytest.mark.parametrize("op", OPS)
def test_one_wrong_byte_is_found(op: str, team: Team) -> None:
    work, arrays = stream(op, 70_000, team)
    for at in (0, 33_333, 69_999):
        work.run()
        arrays.parts[0][at] ^= 1
        with pytest.raises(VerifyError) as caught:
            work.verify()
        assert "\n" not in str(caught.value)
        arrays.parts[0][at] ^= 1
        work.verify()


@pytest.mark.parametrize("op", ["read", "write", "triad"])
def test_a_missing_pass_is_found(op: str, team: Team) -> None:
    work, _ = stream(op, 70_000, team)
    honest: Callable[..., int] = work.code

    def lazy(*args: Any) -> int:
        return honest(*args[:8], args[8] - 1, *args[9:])

    work.code = lazy
    work.run(3)
    with pytest.raises(VerifyError):
        work.verify()


@pytest.mark.parametrize("op", OPS)
def test_a_member_that_does_nothing_is_found(op: str) -> None:
    with Team([CPU] * 3) as team:
        work, _ = stream(op, 70_000, team)
        work.run()  # an honest run first: what it left must not cover for the next
        honest: Callable[..., int] = work.code

        def idle(control: int, member: int, *args: Any) -> int:
            passes = 0 if member == 1 else args[6]
            return honest(control, member, *args[:6], passes, *args[7:])

        work.code = idle
        work.run()
        with pytest.raises(VerifyError):
            work.verify()


def test_nothing_run_and_nothing_read_do_not_verify() -> None:
    with Team([CPU]) as team:
        work, arrays = stream("read", 4096, team)
        with pytest.raises(VerifyError, match="nothing was run"):
            work.verify()
        arrays.parts[0][:] = 0
        work.run()
        with pytest.raises(VerifyError, match="zero"):
            work.verify()


def test_bad_requests_say_what_is_wrong(team: Team) -> None:
    from kvbench.kernels.stream import Stream

    arrays = Arrays(2, 4096)
    one, two = arrays.addresses
    for op, buffers, nbytes, word in (
        ("copy", (one, two), 4096, "copy_plain"),
        ("read", (one, two), 4096, "buffers"),
        ("write", (one,), 0, "bytes"),
        ("memcpy", (one, one + 64), 4096, "overlap"),
    ):
        with pytest.raises(UsageError, match=word):
            Stream(op, buffers, nbytes, team)
    with pytest.raises(UsageError):
        Stream("triad", (one, two, two + 4096), 4092, team)
    with pytest.raises(UsageError):
        Stream("read", (one,), 4096, team).run(0)


def test_runs_compile_nothing(team: Team) -> None:
    from kvbench.kernels.compile_count import compile_count

    works = [stream(op, 4096, team)[0] for op in OPS]
    before = compile_count()
    for work in works:
        work.run(2)
    assert compile_count() == before


def test_plain_copy_is_a_loop_and_nt_copy_goes_past_the_caches() -> None:
    from kvbench.kernels import passes
    from kvbench.kernels.intrinsics import MACHINE
    from kvbench.kernels.jit import assembly

    plain = assembly(passes.copy_pass, "void(int64, int64, int64)")
    assert "copy_pass" in plain
    assert not any(call in plain for call in ("memcpy", "memmove"))
    written = assembly(passes.write_pass, "void(int64, int64, uint64)")
    assert "memset" not in written
    past = assembly(passes.copy_nt_pass, "void(int64, int64, int64)")
    store = {"x86_64": "vmovnt", "aarch64": "stnp"}.get(MACHINE)
    if store is not None:
        assert store in past.replace("movnt", "vmovnt")
        assert store not in plain


@pytest.mark.parametrize("op", ["write", "copy_plain", "memcpy", "nt_copy", "triad"])
@pytest.mark.parametrize("idle_runs", [1, 2, 3, 8])
def test_a_kernel_that_stops_working_is_noticed_after_any_number_of_runs(op: str, idle_runs: int) -> None:
    from kvbench.kernels.stream import ARRAYS, Stream

    arrays = [np.random.default_rng(k).random(4096) + 1.0 for k in range(ARRAYS[op])]
    with Team([min(os.sched_getaffinity(0))]) as team:
        work = Stream(op, [a.ctypes.data for a in arrays], arrays[0].nbytes, team)
        work.run(1)
        work.verify()
        work.code = lambda *args: 1000
        for _ in range(idle_runs):
            work.run(1)
        with pytest.raises(VerifyError):
            work.verify()
