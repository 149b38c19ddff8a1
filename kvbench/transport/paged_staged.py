"""Transport ``staged`` of an index set: the GPU gathers or scatters in its own memory, and large copies cross the link.

The buffer in GPU memory holds the moved bytes in the order of their far addresses, so that each contiguous run of the
far pool is one copy: one in all where the far pages follow each other, one a fragment where they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np

from kvbench.errors import UsageError
from kvbench.kernels.gpu.catalogue import pages_kernel
from kvbench.memory.cuda.buffers import GpuBuffer, hbm
from kvbench.memory.cuda.device import Launch, Stream
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.model.layout import Moves
from kvbench.transport.gpu_ce import COPY, StreamCalls
from kvbench.transport.gpu_pieces import Words
from kvbench.transport.paged_ce import FRAGMENT_CAP, require_fragments
from kvbench.transport.paged_set import granule, granules, width_of
from kvbench.transport.paged_sm import NARROW, ROWS_LIMIT, device_table, tile

Enter = Callable[[AbstractContextManager[Any]], Any]
THREADS = 1024


def far_runs(far: Words, sizes: Words) -> tuple[Words, Words, Words]:
    """Return (far offset, stage offset, bytes) of each run of fragments that follow each other in the far pool."""
    order = np.argsort(far, kind="stable")
    start, size = far[order], sizes[order]
    stage = np.cumsum(size) - size
    first = np.flatnonzero(np.concatenate(([True], start[1:] != start[:-1] + size[:-1])))
    ends = np.append(stage[first[1:]], stage[-1] + size[-1])
    return start[first], stage[first], ends - stage[first]


def stage_offsets(far: Words, sizes: Words) -> Words:
    """Return where each fragment lies in the buffer: its bytes stand in the order of their far addresses."""
    order = np.argsort(far, kind="stable")
    found = np.empty(len(far), np.int64)
    found[order] = np.cumsum(sizes[order]) - sizes[order]
    return found


class StagedPages:
    """A mover: ``way`` evict gathers fragments into a device buffer and copies its far runs out; fetch is the reverse.

    ``near`` and ``far`` are the addresses of the pools for kernels and for copies; ``moves`` goes from the source pool
    to the target pool of that way. All on one stream, so each part waits for the one before.

    Raises Unavailable without triton, without memory for the buffer or beyond ``cap`` far runs, UsageError for more
    than 2^30 pieces, CudaError where the driver refuses.
    """

    def __init__(
        self, service: Service, kernels: Kernels, enter: Enter, moves: Moves, way: Literal["fetch", "evict"],
        near: int, far: int, *, seed: int = 1, cap: int = FRAGMENT_CAP,
    ) -> None:  # fmt: skip
        device = service.device
        fetch = way == "fetch"
        far_at, near_at = (moves.src_offset, moves.dst_offset) if fetch else (moves.dst_offset, moves.src_offset)
        runs, places, sizes = far_runs(far_at, moves.bytes)
        require_fragments(len(runs), cap, "staged")
        stage: GpuBuffer = enter(hbm(service, moves.total, seed=seed))
        self.link_bytes = moves.total
        rows = np.zeros((len(runs), 4), np.int64)
        ends = (stage.copy_address + places, far + runs)
        rows[:, 0], rows[:, 1], rows[:, 2] = *(ends if fetch else ends[::-1]), sizes
        self._copies = StreamCalls(device, COPY, rows)
        self._fetch = fetch
        staged = Moves(near_at, stage_offsets(far_at, moves.bytes), moves.bytes, moves.pages, moves.skipped)
        piece = granule(staged)
        width = width_of(piece, near, stage.copy_address)
        at_near, at_stage = (numbers * (piece // width) for numbers in granules(staged, piece))
        if len(at_near) >= ROWS_LIMIT:
            raise UsageError("more pieces than one launch numbers", where="staged", got=f"{len(at_near)} of {piece} B",
                             expected=f"fewer than {ROWS_LIMIT}")  # fmt: skip
        tables = [device_table(service, t, "i64", enter, seed + 1).copy_address for t in (at_near, at_stage)]
        kernel = pages_kernel(piece, False, "i64", THREADS, width)
        per, across = tile(kernel)
        units = -(-len(at_near) // per) * -(-piece // across)
        # Inside the device nothing else runs meanwhile: as many blocks as there are multiprocessors, not a quota.
        grid = max(1, min(units, device.facts.sms))
        pools = (near, stage.copy_address) if fetch else (stage.copy_address, near)
        index = tables if fetch else tables[::-1]
        self._launch: Launch = kernels.portable(
            kernel, grid, pools[0], pools[0], pools[1], pools[1], *index, len(at_near), 1,
            piece // width, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0,
        )  # fmt: skip
        self.operations, self.copies = 1 + len(runs), len(runs)
        self.flags = () if width == 16 else (NARROW,)
        words = ("scatter" if fetch else "gather", f"{grid} x {THREADS}, pieces of {piece} B by {width}-byte accesses")
        copied = f"{COPY} x {len(runs)}"
        self.kernel = f"{copied} + {' '.join(words)}" if fetch else f"{' '.join(words)} + {copied}"

    def submit(self, stream: Stream) -> None:
        """Queue both parts. Raises CudaError when the driver refuses a call."""
        if self._fetch:
            self._copies(stream)
            stream.launch(self._launch)
        else:
            stream.launch(self._launch)
            self._copies(stream)
