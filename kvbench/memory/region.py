"""Anonymous mappings whose pages can be counted: alone between guard pages, so that no neighbour merges with them."""

from __future__ import annotations

import errno
import re
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kvbench.errors import Unavailable, UsageError
from kvbench.machine.probe import ROOT, Fact
from kvbench.memory import libc
from kvbench.memory.limits import huge_pools, meminfo, read_text, thp
from kvbench.units import format_bytes

Pages = Literal["4k", "thp", "huge"]
PAGES: tuple[Pages, ...] = get_args(Pages)


@dataclass(frozen=True, slots=True)
class Residency:
    """What /proc/self/smaps says of one range, in bytes: in memory, in THPs, in hugetlb pages, and its page size."""

    resident: int
    thp: int
    hugetlb: int
    page_bytes: int


def check_pages(pages: str) -> None:
    """Raise UsageError unless ``pages`` is one of ``PAGES``."""
    if pages not in PAGES:
        raise UsageError("unknown page type", where="pages", got=pages, expected=f"one of {', '.join(PAGES)}")


def page_bytes(pages: Pages, root: Path = ROOT) -> int:
    """Return the bytes of one page of the asked type: base page, THP size from /sys, or the default huge page.

    "4k" means the base page, which is 64 KiB on some arm64 kernels. Raises Unavailable, naming the mending command,
    when this kernel has no THP (or its mode is ``never``) or no huge pages.
    """
    check_pages(pages)
    if pages == "4k":
        return libc.base_page_bytes()
    if pages == "thp":
        state = thp(root)
        if state.page_bytes.value is None:
            raise Unavailable(
                "no transparent huge pages", where="pages=thp", got=state.page_bytes.reason, mend="use pages=4k"
            )
        if state.enabled.value == "never":
            raise Unavailable(
                "transparent huge pages are off", where="pages=thp", got="never", expected="madvise or always",
                mend="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            )  # fmt: skip
        return state.page_bytes.value
    size = (meminfo(root).value or {}).get("Hugepagesize")
    if not size:
        raise Unavailable("this kernel has no huge pages", where="pages=huge", mend="use pages=thp or 4k")
    return size


def check_huge_pool(mapped: int, page: int, root: Path = ROOT) -> None:
    """Raise Unavailable, naming the command that reserves pages, unless ``mapped`` bytes of huge pages are free."""
    pools = {p.page_bytes: p for p in huge_pools(root).value or ()}
    need, free = mapped // page, pools[page].free if page in pools else 0
    if free < need:
        pool_file = f"/sys/kernel/mm/hugepages/hugepages-{page // 1024}kB/nr_hugepages"
        reserved = pools[page].reserved if page in pools else 0
        raise Unavailable(
            "not enough reserved huge pages", where="pages=huge", got=f"{free} free of {format_bytes(page)}",
            expected=f"{need}",
            mend=f"echo {reserved - free + need} | sudo tee {pool_file}",
        )  # fmt: skip


class Region:
    """``mapped`` bytes of anonymous memory at ``address``, nothing touched, aligned to its page size.

    ``mapped`` is ``nbytes`` rounded up to the page size. Inaccessible pages on both sides turn an overrun into a crash
    and keep the kernel from merging this mapping with another one, which would mix their counts in smaps. The address
    range is given back when the region and every numpy view made from it are gone.
    """

    def __init__(self, nbytes: int, pages: Pages = "4k", root: Path = ROOT) -> None:
        if nbytes < 1:
            raise UsageError("a buffer has at least one byte", where="nbytes", got=nbytes)
        self.pages: Pages = pages
        self.page_bytes = page_bytes(pages, root)
        self.base_page = libc.base_page_bytes()
        self.mapped = -(-nbytes // self.page_bytes) * self.page_bytes
        if pages == "huge":
            check_huge_pool(self.mapped, self.page_bytes, root)
        reserved = self.mapped + self.page_bytes + 2 * self.base_page
        quiet = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
        try:
            start = libc.mmap(0, reserved, libc.PROT_NONE, quiet)
        except OSError as error:
            raise self._refused(error) from error
        self._start, self._end = start, start + reserved
        self._own(start, reserved)
        self.address = -(-(start + self.base_page) // self.page_bytes) * self.page_bytes
        self.map()

    def _refused(self, error: OSError) -> Unavailable:
        mend = (
            "huge pages were taken meanwhile: reserve more"
            if self.pages == "huge"
            else "see ulimit -v and vm.overcommit_memory"
        )
        return Unavailable(
            f"no mapping of {format_bytes(self.mapped)}", where=f"pages={self.pages}", got=error.strerror, mend=mend
        )

    def map(self) -> None:
        """Put fresh, untouched pages of the asked type over the range, dropping what was there."""
        flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_FIXED
        flags |= libc.MAP_HUGETLB if self.pages == "huge" else 0
        try:
            libc.mmap(self.address, self.mapped, libc.PROT_READ | libc.PROT_WRITE, flags)
        except OSError as error:
            raise self._refused(error) from error
        if self.pages != "huge":
            try:
                libc.madvise(
                    self.address, self.mapped, libc.MADV_HUGEPAGE if self.pages == "thp" else libc.MADV_NOHUGEPAGE
                )
            except OSError as error:
                # A kernel without THP answers EINVAL: for base pages that is what was asked.
                if self.pages == "thp" or error.errno != errno.EINVAL:
                    raise Unavailable("madvise was refused", where=f"pages={self.pages}", got=error.strerror) from error

    def drop(self) -> None:
        """Give the memory back; the addresses stay usable and read as zeros until the region itself goes."""
        flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_FIXED | libc.MAP_NORESERVE
        libc.mmap(self.address, self.mapped, libc.PROT_READ | libc.PROT_WRITE, flags)

    def _own(self, start: int, nbytes: int) -> None:
        self._release = weakref.finalize(self, libc.munmap, start, nbytes)
        self._release.atexit = False

    def give_back_guards(self) -> None:
        """Unmap the guard pages: what stays is one mapping, so timing its munmap times nothing else."""
        self._release.detach()
        self._own(self.address, self.mapped)
        libc.munmap(self._start, self.address - self._start)
        libc.munmap(self.address + self.mapped, self._end - self.address - self.mapped)

    def disown(self) -> None:
        """Leave unmapping to the caller, who must do it once and then never touch the range again."""
        self._release.detach()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.mapped,), "typestr": "|u1", "version": 3}

    def residency(self) -> Fact[Residency]:
        """Return what smaps says of exactly this mapping; None with the reason when it cannot tell."""
        return residency(self.address, self.mapped)

    def mincore_bytes(self) -> Fact[int]:
        """Return bytes ``mincore`` reports present: cheap, but a page that was only read counts too."""
        try:
            return Fact(libc.resident_pages(self.address, self.mapped) * self.base_page)
        except OSError as error:
            return Fact(None, error.strerror or str(error))


def residency(address: int, nbytes: int, root: Path = ROOT) -> Fact[Residency]:
    """Sum /proc/self/smaps over the mappings that make up ``[address, address + nbytes)``.

    None with the reason when smaps is missing, the range is not wholly mapped, or a mapping reaches beyond it (its
    counts would include a neighbour).
    """
    text = read_text(root / "proc/self/smaps")
    if text.value is None:
        return Fact(None, text.reason)
    end, covered = address + nbytes, 0
    totals: dict[str, int] = {}
    page = 0
    for block in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text.value):
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", block)
        if not head:
            continue
        low, high = int(head[1], 16), int(head[2], 16)
        if high <= address or low >= end:
            continue
        if low < address or high > end:
            return Fact(None, "the mapping reaches beyond the buffer")
        covered += high - low
        fields = {m[1]: int(m[2]) * 1024 for m in re.finditer(r"(?m)^(\w+):\s+(\d+) kB", block)}
        page = fields.pop("KernelPageSize", page)
        for name, value in fields.items():
            totals[name] = totals.get(name, 0) + value
    if covered != nbytes:
        return Fact(None, f"smaps lists {covered} of {nbytes} bytes")
    # Hugetlb pages are left out of Rss and listed on their own.
    hugetlb = totals.get("Private_Hugetlb", 0) + totals.get("Shared_Hugetlb", 0)
    return Fact(Residency(totals.get("Rss", 0) + hugetlb, totals.get("AnonHugePages", 0), hugetlb, page))
