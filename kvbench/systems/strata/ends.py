"""The two ends of a host transfer, and the measured ceilings of what runs between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from kvbench.memory.file import ScratchFile, scratch_dir
from kvbench.memory.host import preflight
from kvbench.memory.readers import CACHED_LEAST
from kvbench.memory.tiers import Tier, parse_pair, require_tier
from kvbench.model.layout import Moves, Pool
from kvbench.transport.host_batch import open_batch
from kvbench.transport.host_cpu import open_cpu
from kvbench.transport.host_file import FileEnd
from kvbench.transport.host_job import End, HostJob, HostTransport, MemoryEnd

if TYPE_CHECKING:
    from kvbench.kernels.gather import Gather
    from kvbench.memory.host import HostBuffer
    from kvbench.memory.region import Pages

# Names the fastest of candidates by name; Measure.best does.
Best = Callable[[Mapping[str, Callable[[int], float]]], str]
LARGE = 1 << 20  # bytes of a call that is large for a file


class Buffers(Protocol):
    """Who gives and keeps memory: a bench's ``measure``, or a script's own."""

    def sources(self, count: int, nbytes: int, pages: Pages, *, node: int | None = None) -> list[HostBuffer]:
        """Return buffers of seeded payload that nobody writes to."""
        ...

    def target(self, nbytes: int, pages: Pages, *, node: int | None = None) -> HostBuffer:
        """Return a buffer to write to."""
        ...

    def enter(self, resource: AbstractContextManager[Any]) -> Any:
        """Keep ``resource`` open."""
        ...


def ends(
    pair: str, near: Pool, far: Pool, direction: Literal["fetch", "evict"], buffers: Buffers, scratch: Path | None,
    seed: int,
) -> tuple[End, End]:  # fmt: skip
    """Return (source, target) of ``direction`` between the tiers of ``pair``, ``near:far``.

    ``seed`` is that of the sources' payload, the one ``buffers`` fills memory with.
    Raises UsageError for what is no pair, Unavailable where a tier, memory or file cannot be had.
    """
    tiers = parse_pair(pair)
    for tier in (tiers.near, tiers.far):
        require_tier(tier)
    if direction == "fetch":
        return (
            end(tiers.far, far.nbytes, True, buffers, scratch, seed),
            end(tiers.near, near.nbytes, False, buffers, scratch, seed),
        )
    return (
        end(tiers.near, near.nbytes, True, buffers, scratch, seed),
        end(tiers.far, far.nbytes, False, buffers, scratch, seed),
    )


def require_room(near: Pool, far: Pool, held: int) -> None:
    """Raise Unavailable unless memory holds both pools, before either is touched; of a file the copy that checks it.

    ``held`` bytes are kept from earlier cases and may serve again.
    """
    need = MemoryEnd.needs(near.nbytes) + MemoryEnd.needs(far.nbytes)
    preflight(max(0, need - held))


def end(tier: Tier, nbytes: int, reads: bool, buffers: Buffers, scratch: Path | None, seed: int) -> End:
    """Return a pool of ``nbytes`` in ``tier``, which is read (``reads``) or written; errors as of :func:`ends`."""
    if tier.name == "file":
        file = buffers.enter(ScratchFile(FileEnd.needs(nbytes), scratch_dir(scratch), seed))
        opened: FileEnd = buffers.enter(FileEnd(file, nbytes))
        return opened
    size = MemoryEnd.needs(nbytes)
    if reads:
        return MemoryEnd(buffers.sources(1, size, "thp", node=tier.node)[0].address, nbytes, seed)
    return MemoryEnd(buffers.target(size, "thp", node=tier.node).address, nbytes, seed)


def plain_copies(job: HostJob) -> dict[str, Gather]:
    """Return the variants of a plain copy of the fragments of ``job`` between memory, packed, in the same order.

    The ceiling of a transfer in memory: the same source fragments, targets one after the other. Empty where fragments
    are not all of one size that is whole cache lines and divides their places.
    """
    from kvbench.kernels.gather import Gather, variants

    source, target, moves = job.source, job.target, job.moves
    size = moves.fragment
    if not isinstance(source, MemoryEnd) or not isinstance(target, MemoryEnd) or size is None or size % 64:
        return {}
    if bool((moves.src_offset % size).any()):
        return {}
    index = np.ascontiguousarray(moves.src_offset // size)
    return {
        name: Gather(name, source.address, source.nbytes, size, index, job.team, dst=target.address)
        for name in variants("copy", size)
    }


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a transfer is held against: ``run(reps)`` moves ``amount`` bytes a pass, ``verify`` checks it."""

    name: str
    run: Callable[[int], float]
    amount: int
    verify: Callable[[], None]


def ceiling(job: HostJob, best: Best, seed: int) -> Ceiling | None:
    """Return the measured ceiling of ``job`` in the variant ``best`` chooses; None where no plain copy is possible."""
    if isinstance(job.source, MemoryEnd) and isinstance(job.target, MemoryEnd):
        copies = plain_copies(job)
        if not copies:
            return None
        copy = copies[best({name: each.run for name, each in copies.items()})]
        name = f"plain gather copy of the same fragments, {copy.variant.name}"
        return Ceiling(name, copy.run, job.total, copy.verify)
    other, ways = large_calls(job, seed)
    way = fastest(ways, best)
    name = f"{way.kernel} of {other.moves.fragment} B in order"
    return Ceiling(name, way.submit, other.total, lambda: other.verify(way.submit))


def fastest(ways: Mapping[str, HostTransport], best: Best) -> HostTransport:
    """Return the way ``best`` names, the only one without asking."""
    if len(ways) == 1:
        return next(iter(ways.values()))
    return ways[best({name: each.submit for name, each in ways.items()})]


@dataclass(frozen=True, slots=True)
class Delivered:
    """What storage delivered a pass: ``counted`` bytes, None with the ``reason``; ``flags`` a row about it carries."""

    counted: int | None
    reason: str
    flags: tuple[str, ...]


def delivered(way: HostTransport, unique: int, direction: str) -> Delivered | None:
    """Return what storage delivered to the passes of ``way``, made by now; None where its bytes are known.

    Flags: ``link_unmeasured`` for a fetch without a counter, ``link_below_unique`` where a cache served part of it.
    """
    if not callable(way.link):
        return None
    counted, fetch = way.link(), direction == "fetch"
    if counted is None:
        return Delivered(None, way.link_reason(), ("link_unmeasured",) if fetch else ())
    short = fetch and counted < (1 - CACHED_LEAST) * unique
    return Delivered(counted, "", ("link_below_unique",) if short else ())


def large_calls(job: HostJob, seed: int) -> tuple[HostJob, dict[str, HostTransport]]:
    """Return the ways to move as many bytes between ``job``'s ends in order and large calls, and their own job.

    The ceiling of a transfer to or from a file: what its storage gives when nothing is scattered.
    """
    size = min(LARGE, job.total // 4096 * 4096 or job.total)
    count = max(1, job.total // size)
    offsets = np.arange(count, dtype=np.int64) * size
    whole = Moves(offsets, offsets.copy(), np.full(count, size, np.int64), count, 0)
    again = HostJob(whole, job.source, job.target, job.team, job.enter, seed)
    return again, {**open_cpu(again), **open_batch(again)}
