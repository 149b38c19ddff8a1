"""Host memory of exact size and known pages: asked for, written, read back, and refused before the machine runs out."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbench.errors import Unavailable, UsageError
from kvbench.machine.probe import ROOT
from kvbench.memory import libc, numa, payload
from kvbench.memory.limits import WATCH_FRACTION, available_memory
from kvbench.memory.region import Pages, Region, check_pages, page_bytes
from kvbench.units import format_bytes

TOUCH_CHUNK = 64 << 20  # bytes written between two looks at the memory left: about 10 ms
THP_WHOLE = 0.95  # share from which the buffer counts as made of huge pages
THP_LEAST = 0.5  # below this the row would say "thp" about a buffer of base pages
RESIDENT_LEAST = 0.99


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a buffer lies, read back after it was written.

    ``pages`` asked; ``page_bytes`` obtained (the huge size only from a share of ``THP_WHOLE`` on); ``huge_share``
    0..1 of the mapping in THP or hugetlb pages; ``resident`` bytes in memory; ``nodes`` node -> bytes. None is unknown.
    Flags: ``unbound`` (binding not permitted), ``misplaced`` (pages outside the asked node), ``thp_partial``,
    ``thp_in_4k``, ``base_page_N``, ``pages_unverified``, ``nodes_unknown``.
    """

    pages: Pages
    page_bytes: int | None
    huge_share: float | None
    resident: int | None
    nodes: Mapping[int, int] | None
    flags: tuple[str, ...] = ()


class HostBuffer:
    """``nbytes`` of host memory at ``address``, written and placed as ``placement`` says, from :func:`host_buffer`.

    ``close()`` gives the memory back at once. A numpy view kept beyond it does not crash: it reads zeros, so every
    payload check on it fails.
    """

    def __init__(self, region: Region, nbytes: int, placement: Placement) -> None:
        self._region: Region | None = region
        self.nbytes = nbytes
        self.placement = placement

    def _open(self) -> Region:
        if self._region is None:
            raise ValueError("the buffer is closed")
        return self._region

    @property
    def address(self) -> int:
        """Address of the first byte. Raises ValueError once closed."""
        return self._open().address

    def array(self, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
        """Return the whole buffer as a writable 1-d view. Raises ValueError when closed or no multiple of ``dtype``."""
        item = np.dtype(dtype).itemsize
        if self.nbytes % item:
            raise ValueError(f"{self.nbytes} bytes are not a multiple of {np.dtype(dtype)} ({item} bytes)")
        view: npt.NDArray[Any] = np.asarray(self._open())[: self.nbytes].view(dtype)
        return view

    def close(self) -> None:
        """Give the memory back. Closing twice is fine."""
        if self._region is not None:
            self._region.drop()
            self._region = None

    def __enter__(self) -> HostBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def preflight(nbytes: int, root: Path = ROOT, *, node: int | None = None) -> int:
    """Raise Unavailable unless ``nbytes`` fit into the memory left; return the reserve in bytes that stays free.

    Looks at MemAvailable, the memory cgroups (v1, v2) and, on a machine with several nodes, at the asked node. It runs
    before anything is touched: on Linux the alternative is the OOM killer, which ends the run and its database with it.
    """
    reading = available_memory(root)
    if reading.value is None:
        raise Unavailable(
            "how much memory is free is unknown", where="host memory", got=reading.reason, mend="mount /proc"
        )
    room = reading.value
    if nbytes > room.nbytes:
        raise Unavailable(
            f"asked for {_size(nbytes)} of host memory", where="host memory",
            got=f"{_size(room.nbytes)} available by {room.source} (less {_size(room.reserve)} kept free)",
            mend="choose smaller sizes, end other programs or raise the limit",
        )  # fmt: skip
    listed = numa.nodes(root).value or ()
    if node is None or not listed:
        return room.reserve
    known = {n.number: n for n in listed}
    if node not in known:
        raise Unavailable("no such NUMA node", where="host memory", got=node, expected=f"one of {sorted(known)}")
    free = known[node].free
    # One node: its counters lag behind MemAvailable while the kernel still initialises memory, so they decide nothing.
    if len(known) > 1 and free is not None and nbytes > free - room.reserve:
        raise Unavailable(
            f"asked for {_size(nbytes)} on NUMA node {node}", where="host memory", got=f"{_size(free)} free there",
            mend="choose smaller sizes or drop the file cache: echo 1 | sudo tee /proc/sys/vm/drop_caches",
        )  # fmt: skip
    return room.reserve


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes % (1 << 20) == 0 else f"{nbytes / (1 << 20):.1f} MiB"


def host_buffer(
    nbytes: int,
    pages: Pages = "4k",
    node: int | None = None,
    threads: int = 1,
    *,
    kind: payload.Kind | None = "bits",
    seed: int = 1,
    root: Path = ROOT,
) -> HostBuffer:
    """Return exactly ``nbytes`` of host memory, every page written and its placement read back.

    ``pages``: "4k" base pages (huge ones refused), "thp" transparent huge pages, "huge" reserved huge pages; the last
    two are aligned to their page and the mapping is rounded up to it. ``node`` binds to a NUMA node; where binding is
    not permitted the buffer is made anyway with the flag ``unbound``. ``threads`` write contiguous parts, so without a
    node each part lies near the thread that wrote it. ``kind`` and ``seed`` choose the payload; None writes one byte
    per page only, and the caller fills the buffer.

    Raises UsageError for impossible arguments, Unavailable when memory, pages or the node are not to be had.
    """
    check_pages(pages)
    if nbytes < 1 or threads < 1:
        raise UsageError("a buffer needs at least one byte and one thread", where="host_buffer", got=(nbytes, threads))
    page = page_bytes(pages, root)
    mapped = -(-nbytes // page) * page
    # Huge pages were set aside before: taking them leaves MemAvailable as it is.
    reserve = 0 if pages == "huge" else preflight(mapped, root, node=node)
    region = Region(nbytes, pages, root)
    try:
        flags = _bind(region, node)
        if pages == "huge":
            _populate_huge(region)
        _touch(region, nbytes, threads, kind, seed, reserve, root)
        placement = _read_back(region, node, flags)
    except BaseException:
        region.drop()
        raise
    return HostBuffer(region, nbytes, placement)


def _bind(region: Region, node: int | None) -> list[str]:
    if node is None:
        return []
    accepted = numa.bind(region.address, region.mapped, node)
    if accepted.value is False:
        raise Unavailable(
            "memory cannot be bound to this NUMA node", where="host memory", got=f"node {node}: {accepted.reason}"
        )
    return [] if accepted.value else ["unbound"]


def _populate_huge(region: Region) -> None:
    """Fault huge pages in by a call that can fail: beyond a hugetlb cgroup's limit a plain write is a SIGBUS."""
    try:
        libc.madvise(region.address, region.mapped, libc.MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != 22:  # EINVAL: before Linux 5.14
            raise Unavailable(
                "reserved huge pages could not be taken", where="pages=huge", got=error.strerror,
                mend="reserve more, on the asked node, and raise the hugetlb cgroup limit",
            ) from error  # fmt: skip


def _touch(
    region: Region, nbytes: int, threads: int, kind: payload.Kind | None, seed: int, reserve: int, root: Path
) -> None:
    view: npt.NDArray[np.uint8] = np.asarray(region)
    unit = region.page_bytes
    part = -(-(region.mapped // unit) // threads) * unit

    def write(start: int) -> None:
        for low in range(start, min(start + part, region.mapped), TOUCH_CHUNK):
            high = min(low + TOUCH_CHUNK, start + part, region.mapped)
            if reserve and low > 0:
                _watch(reserve, root)
            view[low : high : region.base_page] = 1
            if kind is not None and low < nbytes:
                payload.fill(view[low : min(high, nbytes)], seed, kind, low)

    starts = range(0, region.mapped, part)
    if len(starts) == 1:
        write(0)
        return
    with ThreadPoolExecutor(len(starts)) as pool:
        for done in [pool.submit(write, start) for start in starts]:
            done.result()


def _watch(reserve: int, root: Path) -> None:
    room = available_memory(root).value
    if room is not None and room.free < reserve * WATCH_FRACTION:
        raise Unavailable(
            "memory ran low while a buffer was written", where="host memory",
            got=f"{_size(room.free)} left by {room.source}",
            mend="another program is taking memory: end it or choose smaller sizes",
        )  # fmt: skip


def _read_back(region: Region, node: int | None, flags: list[str]) -> Placement:
    state = region.residency().value
    if region.pages == "thp" and state is not None and state.thp < THP_WHOLE * region.mapped:
        try:
            libc.madvise(region.address, region.mapped, libc.MADV_COLLAPSE)
        except OSError:
            flags = [*flags, "collapse_refused"]  # fragmented memory, or a kernel before 6.1; the share below decides
        state = region.residency().value
    share = None
    if state is not None:
        share = (state.hugetlb if region.pages == "huge" else state.thp) / region.mapped
        if state.resident < RESIDENT_LEAST * region.mapped:
            raise Unavailable(
                "written memory did not stay in memory", where="host memory",
                got=f"{_size(state.resident)} resident of {_size(region.mapped)}",
                mend="turn swap off or use smaller sizes",
            )  # fmt: skip
        if region.pages != "4k" and share < THP_LEAST:
            raise Unavailable(
                "the kernel gave base pages", where=f"pages={region.pages}", got=f"{share:.0%} in huge pages",
                expected=f"at least {THP_LEAST:.0%}", mend="echo 1 | sudo tee /proc/sys/vm/compact_memory",
            )  # fmt: skip
    nodes = numa.histogram(region.address, region.mapped).value
    whole = share is not None and share >= THP_WHOLE
    flags = flags + [
        flag
        for flag, raised in (
            ("pages_unverified", share is None),
            ("thp_partial", region.pages == "thp" and share is not None and not whole),
            ("thp_in_4k", region.pages == "4k" and bool(share)),
            (f"base_page_{region.base_page}", region.pages == "4k" and region.base_page != 4096),
            ("nodes_unknown", nodes is None),
            ("misplaced", node is not None and nodes is not None and set(nodes) != {node}),
        )
        if raised
    ]
    # Base and hugetlb pages are what the mapping itself is made of; a THP is only a wish until smaps confirms it.
    obtained: int | None = region.page_bytes
    if region.pages == "thp" and not whole:
        obtained = None if share is None else region.base_page
    return Placement(region.pages, obtained, share, state.resident if state else None, nodes, tuple(flags))
