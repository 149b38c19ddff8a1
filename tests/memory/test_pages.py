"""Page operations do what their name says: counted by the pages present around each one."""

from __future__ import annotations

import errno

import pytest

from kvbench.errors import Unavailable, UsageError, VerifyError
from kvbench.machine.probe import Fact
from kvbench.memory import libc
from kvbench.memory.pages import OPERATIONS, Operation, PageOperation
from kvbench.memory.region import Region, Residency, page_bytes
from tests.memory.test_host import thp_or_skip

PAGE = libc.base_page_bytes()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("count", [1, 48])
def test_base_pages(operation: Operation, count: int) -> None:
    with PageOperation(operation, count * PAGE) as work:
        assert work.pages == count
        assert work.run(3) > 0
        work.verify()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_thp(operation: Operation) -> None:
    thp_or_skip()
    with PageOperation(operation, 2 * page_bytes("thp"), "thp") as work:
        assert work.pages == 2
        assert work.run(2) > 0
        work.verify()


@pytest.mark.hugepages
@pytest.mark.parametrize("operation", OPERATIONS)
def test_huge(operation: Operation) -> None:
    with PageOperation(operation, page_bytes("huge"), "huge") as work:
        assert work.run(2) > 0
        work.verify()


def test_nothing_timed_is_not_verified() -> None:
    with PageOperation("first_touch", PAGE) as work, pytest.raises(VerifyError, match="no operation"):
        work.verify()


@pytest.mark.parametrize("operation", ["populate", "drop"])
def test_a_call_that_does_nothing_fails(monkeypatch: pytest.MonkeyPatch, operation: Operation) -> None:
    with PageOperation(operation, 4 * PAGE) as work:
        real = libc.madvise
        skipped = (libc.MADV_POPULATE_WRITE, libc.MADV_DONTNEED)
        monkeypatch.setattr(libc, "madvise", lambda a, n, advice: None if advice in skipped else real(a, n, advice))
        with pytest.raises(VerifyError, match="resident bytes after"):
            work.run()


def test_an_unmap_that_leaves_the_pages_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with PageOperation("unmap", 4 * PAGE) as work:
        real, kept = libc.munmap, list[int]()

        def munmap(address: int, nbytes: int) -> None:
            if nbytes == 4 * PAGE:
                kept.append(address)
            else:
                real(address, nbytes)

        monkeypatch.setattr(libc, "munmap", munmap)
        with pytest.raises(VerifyError, match="still there"):
            work.run()
        for address in kept:
            real(address, 4 * PAGE)


def test_base_pages_are_never_counted_as_thp(monkeypatch: pytest.MonkeyPatch) -> None:
    thp_or_skip()
    size = page_bytes("thp")
    with PageOperation("populate", size, "thp") as work:
        work.run()
        monkeypatch.setattr(Region, "residency", lambda _self: Fact(Residency(size, 0, 0, PAGE)))
        with pytest.raises(Unavailable, match="base pages"):
            work.verify()


def test_a_touch_the_kernel_served_with_base_pages_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    thp_or_skip()
    real = libc.madvise
    monkeypatch.setattr(
        libc,
        "madvise",
        lambda a, n, advice: real(a, n, libc.MADV_NOHUGEPAGE if advice == libc.MADV_HUGEPAGE else advice),
    )
    with pytest.raises(Unavailable, match="base pages"):
        PageOperation("first_touch", page_bytes("thp"), "thp")


def test_an_old_kernel_has_no_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(libc, "madvise", refuse)
    with pytest.raises(Unavailable, match=r"before Linux 5\.14"):
        PageOperation("populate", PAGE)


def test_the_unmapped_region_is_gone_and_the_guards_too() -> None:
    region = Region(4 * PAGE)
    start, address = region._start, region.address
    region.give_back_guards()
    with pytest.raises(OSError, match="mincore"):
        libc.resident_pages(start, PAGE)
    assert libc.resident_pages(address, 4 * PAGE) == 0
    del region
    with pytest.raises(OSError, match="mincore"):
        libc.resident_pages(address, 4 * PAGE)


def test_impossible_arguments() -> None:
    with pytest.raises(UsageError):
        PageOperation("remap", PAGE)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        PageOperation("drop", PAGE, "1g")  # type: ignore[arg-type]
    for nbytes in (0, PAGE - 1, PAGE + 1):
        with pytest.raises(Unavailable, match="multiple"):
            PageOperation("drop", nbytes)
    with PageOperation("drop", PAGE) as work, pytest.raises(UsageError):
        work.run(0)
    with pytest.raises(ValueError, match="closed"):
        work.run(1)
