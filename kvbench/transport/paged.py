"""Pages of a KV cache between GPU memory and page-locked host memory: every transport on one index set.

All of them move the same bytes to the same places, and one check says so for each: the whole target, what must not have
changed included, against the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import numpy as np

from kvbench.errors import UsageError, VerifyError
from kvbench.memory import payload
from kvbench.memory.cuda.buffers import GpuBuffer, How, hbm, pinned
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.memory.host import preflight
from kvbench.memory.region import Pages
from kvbench.model.layout import Moves, Pool
from kvbench.transport.gpu_lane import CHUNK, OTHER, Lane, Way
from kvbench.transport.gpu_pieces import Mover
from kvbench.transport.paged_batch import PagedBatch
from kvbench.transport.paged_ce import PagedEngine
from kvbench.transport.paged_set import Box, Fragments, box, check_moves, granule, granules
from kvbench.transport.paged_sm import Index, PageThreads, device_table
from kvbench.transport.paged_staged import StagedPages
from kvbench.transport.paged_torch import TorchPages, require_torch

Enter = Callable[[AbstractContextManager[Any]], Any]
Transport = Literal["ce", "batch", "sm", "staged", "torch"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
GUARD = 4096  # bytes on either side of a pool that nobody may touch; keeps every alignment of the pool
QUOTA, THREADS = 2, 1024  # Strata's blocks for a load; strata/block_quota sweeps them, as devices differ


def open_paged(
    transport: str, service: Service, kernels: Kernels, moves: Moves, direction: str, near_pool: Pool, far_pool: Pool,
    enter: Enter, seed: int, *, quota: int = QUOTA, threads: int = THREADS, index: Index = "i64",
    how: How = "register", pages: Pages = "4k", node: int | None = None, touch: int = 1,
) -> Lane:  # fmt: skip
    """Return the lane that makes ``moves`` by ``transport`` between hbm (``near_pool``) and pinned (``far_pool``).

    ``direction``: fetch, ``moves`` from the far pool to the near one, or evict, the reverse. Both pools get buffers of
    their own with canaries at both ends; the target is spoilt. ``quota`` blocks of ``threads`` and tables of type
    ``index`` are for ``sm``; ``how``, ``pages``, ``node`` (None: the GPU's) and ``touch`` threads make pinned memory.

    Raises UsageError for an unknown transport or direction, and for moves that leave their pool, write a byte twice,
    are none, or (``sm``) are no whole pages, all before memory is touched; Unavailable where memory, the batched
    call, triton or torch cannot be had or a pass would be too long; VerifyError when a buffer is not what it should
    be; CudaError when the driver refuses.
    """
    way = _checked(transport, direction, moves, near_pool, far_pool)
    if transport == "sm":
        return open_quotas(
            service, kernels, moves, direction, near_pool, far_pool, enter, seed, [quota], threads=threads,
            index=index, how=how, pages=pages, node=node, touch=touch,
        )[0]  # fmt: skip
    near, far = _buffers(service, near_pool, far_pool, way, enter, seed, how, pages, node, touch)
    near_at, far_at = near.copy_address + GUARD, far.copy_address + GUARD
    mover: Mover
    if transport == "staged":
        mover = StagedPages(service, kernels, enter, moves, way, near_at, far_at, seed=seed + 3)
    elif transport == "torch":
        inside = far.array()[GUARD : GUARD + far_pool.nbytes]
        element = near_pool.geometry.kv_bytes_per_element
        mover = TorchPages(service.device, moves, way, (near_at, near_pool.nbytes), inside, element)
    else:
        target, source = (near_at, far_at) if way == "fetch" else (far_at, near_at)
        fragments = Fragments(target, source, moves)
        mover = PagedEngine(service.device, fragments) if transport == "ce" else PagedBatch(service, fragments)
    return _lane(transport, service, moves, way, near, far, mover)


def open_quotas(
    service: Service, kernels: Kernels, moves: Moves, direction: str, near_pool: Pool, far_pool: Pool, enter: Enter,
    seed: int, quotas: Sequence[int], *, threads: int = THREADS, index: Index = "i64", how: How = "register",
    pages: Pages = "4k", node: int | None = None, touch: int = 1,
) -> tuple[Lane, list[PageThreads]]:  # fmt: skip
    """Return one ``sm`` lane and a mover for each of ``quotas``, all on the buffers of the lane, whose mover is the
    first. Otherwise like :func:`open_paged`."""
    if not quotas:
        raise UsageError("no quota of blocks", where="paged sm")
    way = _checked("sm", direction, moves, near_pool, far_pool)
    near, far = _buffers(service, near_pool, far_pool, way, enter, seed, how, pages, node, touch)
    pools = (far_pool, near_pool) if way == "fetch" else (near_pool, far_pool)
    movers = _threads(
        service, kernels, enter, box(moves, *pools), way, near, far, quotas, threads, index, seed
    )  # fmt: skip
    return _lane("sm", service, moves, way, near, far, movers[0]), movers


def _checked(transport: str, direction: str, moves: Moves, near_pool: Pool, far_pool: Pool) -> Way:
    """Return the way; raise UsageError for what cannot be made, before memory is touched."""
    if transport not in TRANSPORTS:
        raise UsageError("unknown transport", where="paged", got=transport, expected=" ".join(TRANSPORTS))
    if direction not in ("fetch", "evict"):
        raise UsageError("unknown direction", where=f"paged {transport}", got=direction, expected="fetch or evict")
    way: Way = "fetch" if direction == "fetch" else "evict"
    source, target = (far_pool, near_pool) if way == "fetch" else (near_pool, far_pool)
    check_moves(moves, source.nbytes, target.nbytes, f"{transport} {way}")
    if transport == "sm":
        box(moves, source, target)
    elif transport == "torch":
        require_torch()
    return way


def _buffers(
    service: Service, near_pool: Pool, far_pool: Pool, way: Way, enter: Enter, seed: int, how: How, pages: Pages,
    node: int | None, touch: int,
) -> tuple[GpuBuffer, GpuBuffer]:  # fmt: skip
    near, far = (pool.nbytes + 2 * GUARD for pool in (near_pool, far_pool))
    preflight((far if way == "fetch" else near) + CHUNK)  # what the check holds of the source
    return (
        enter(hbm(service, near, seed=seed)),
        enter(pinned(service, far, how=how, pages=pages, node=node, threads=touch, seed=seed + 1)),
    )


def _lane(
    transport: str, service: Service, moves: Moves, way: Way, near: GpuBuffer, far: GpuBuffer, mover: Mover
) -> Lane:
    source, target = (far, near) if way == "fetch" else (near, far)
    flags = tuple(dict.fromkeys((*far.flags, *getattr(mover, "flags", ()))))
    check = Check(service, moves, source, target, f"{transport} {way}")
    check.spoil()
    return Lane(way, mover, check, check.spoil, source.tier, target.tier, flags=flags, placement=far.placement)


def _threads(
    service: Service, kernels: Kernels, enter: Enter, chosen: Box, way: Way, near: GpuBuffer, far: GpuBuffer,
    quotas: Sequence[int], threads: int, index: Index, seed: int,
) -> list[PageThreads]:  # fmt: skip
    # The device's own alias of pinned memory: equal to the host's address only where the driver says so.
    alias = far.device_address
    if alias is None:
        raise UsageError("the device has no address for this memory", where="paged sm", got=far.tier)
    source, target = (alias, near.copy_address) if way == "fetch" else (near.copy_address, alias)
    tables = [device_table(service, t, index, enter, seed + 2).copy_address
              for t in (chosen.dst_pages, chosen.src_pages)]  # fmt: skip
    return [
        PageThreads(
            service.device, kernels, chosen, target + GUARD, source + GUARD, (tables[0], tables[1]), quota=quota,
            threads=threads, index=index,
        )
        for quota in quotas
    ]  # fmt: skip


class Check:
    """Called, it raises VerifyError unless the target is exactly what ``moves`` make of it and the source is intact.

    Every byte is looked at, on the host: the fragments, what lies between them, and the canaries at both ends.
    """

    def __init__(self, service: Service, moves: Moves, source: GpuBuffer, target: GpuBuffer, where: str) -> None:
        self._service, self._source, self._target, self._where = service, source, target, where
        self._size = granule(moves, GUARD)
        sources, targets = (numbers + GUARD // self._size for numbers in granules(moves, self._size))
        self._origin = np.full(-(-target.nbytes // self._size), -1, np.int64)
        self._origin[targets] = sources

    def spoil(self) -> None:
        """Make the check fail until the next pass."""
        self._target.refill(self._source.seed + OTHER)

    def __call__(self) -> None:
        source, target, size = self._source, self._target, self._size
        whole = payload.expected(source.nbytes, source.seed, source.kind)
        if source.checksum() != payload.checksum(whole):
            raise VerifyError("the source changed", where=self._where, got="another checksum than that of its payload")
        rows = whole[: source.nbytes // size * size].reshape(-1, size)
        step = CHUNK // 8 // size * 8 * size  # whole granules, and whole words of the payload
        for start in range(0, target.nbytes, step):
            want = payload.expected(min(step, target.nbytes - start), target.seed, target.kind, start)
            inside = want[: want.size // size * size].reshape(-1, size)
            origin = self._origin[start // size :][: len(inside)]
            inside[origin >= 0] = rows[origin[origin >= 0]]
            wrong = np.flatnonzero(self._part(start, want.size) != want)
            if len(wrong):
                self._refuse(start + int(wrong[0]), len(wrong))

    def _part(self, start: int, nbytes: int) -> payload.Bytes:
        if self._target.host_address is None:
            return self._service.read(self._target.copy_address + start, nbytes)
        view: payload.Bytes = self._target.array()[start : start + nbytes]
        return view

    def _refuse(self, at: int, count: int) -> None:
        moved = self._origin[at // self._size] >= 0
        place = "in front of the pool" if at < GUARD else f"at byte {at - GUARD} of the pool"
        if at >= self._target.nbytes - GUARD:
            place = "behind the pool"
        raise VerifyError(
            "a fragment did not arrive" if moved else "bytes changed that no fragment goes to", where=self._where,
            got=f"{count} wrong bytes from {place} on",
        )  # fmt: skip
