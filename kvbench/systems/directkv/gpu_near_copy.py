"""A copy inside GPU memory that takes a share of its bandwidth beside a product: how many blocks that needs.

DirectKV, OSDI 2026, pays for reading B once with partial sums in near memory (section 4) and measures it with nothing
beside it; what that costs shows when something else wants the memory. The kernel is the one of transport `sm`, between
two addresses of GPU memory.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbench.errors import Unavailable
from kvbench.memory.cuda.buffers import GpuBuffer, hbm
from kvbench.memory.cuda.device import Stream
from kvbench.memory.cuda.kernels import Kernels
from kvbench.memory.cuda.service import Service
from kvbench.systems.directkv.gpu_operands import Enter
from kvbench.systems.directkv.shapes import ceil_div
from kvbench.transport.gpu_lane import OTHER, same_content
from kvbench.transport.gpu_sm import ThreadCopy

L2_MULTIPLE = 4  # of what the slices hold together: one that comes again has left the L2
MOST_SLICES = 128
PLATEAU = 0.97  # of what all blocks copy: more blocks than reach that take multiprocessors for nothing
WORD = 16  # bytes of a load
NEAR_ENOUGH = 0.15  # of the share asked for: blocks are whole, and a pass ends before the next begins


class NearSlice:
    """One slice of a :class:`NearCopy`: a mover by as many blocks as that has now. Nothing of it crosses the link."""

    def __init__(self, whole: NearCopy, number: int) -> None:
        self._whole, self._number = whole, number
        self.operations, self.link_bytes = 1, 0
        self.kernel = whole.launches[number].kernel

    def submit(self, stream: Stream) -> None:
        """Queue the slice. Raises CudaError when the driver refuses it."""
        self._whole.launches[self._number].submit(stream)


class NearCopy:
    """``slices`` of ``slice_bytes`` each (rounded up to what keeps them few) from GPU memory to GPU memory.

    ``use(blocks)`` chooses the grid. ``spoil`` makes every byte of the target wrong, ``check`` raises VerifyError
    unless all slices were copied. Raises Unavailable without room.
    """

    def __init__(self, service: Service, kernels: Kernels, enter: Enter, slice_bytes: int, seed: int) -> None:
        least = L2_MULTIPLE * service.device.facts.l2_bytes
        self.slice_bytes = WORD * ceil_div(max(slice_bytes, ceil_div(least, MOST_SLICES), WORD), WORD)
        count = max(1, ceil_div(least, self.slice_bytes))
        self._kernels, self._count = kernels, count
        self._source: GpuBuffer = enter(hbm(service, count * self.slice_bytes, seed=seed))
        self._target: GpuBuffer = enter(hbm(service, count * self.slice_bytes, seed=seed + OTHER))
        self.launches: list[ThreadCopy] = []
        self.slices: list[NearSlice] = []
        self.use(1)
        self.slices = [NearSlice(self, number) for number in range(count)]

    def use(self, blocks: int) -> None:
        """Copy by ``blocks`` blocks from now on."""
        to, source, size = self._target.copy_address, self._source.copy_address, self.slice_bytes
        self.launches = [
            ThreadCopy(self._kernels, to + number * size, source + number * size, size, blocks)
            for number in range(self._count)
        ]
        for each, launch in zip(self.slices, self.launches, strict=False):  # there are none yet at first
            each.kernel = launch.kernel

    def spoil(self) -> None:
        """Make the target wrong everywhere."""
        self._target.refill(self._source.seed + OTHER)

    def check(self) -> None:
        """Raise VerifyError unless the target holds the source."""
        same_content(self._source, self._target, "near copy")


def blocks_for(wanted: float, rate_of: Callable[[int], float], most: int) -> tuple[int, float]:
    """Return the fewest blocks, 1 to ``most``, whose rate is nearest to ``wanted`` bytes a second, and that rate.

    ``rate_of`` measures; it is taken to rise with the blocks until it is flat. Raises Unavailable, with the nearest,
    where that is further off than 15 %.
    """
    low, high = 1, most
    seen = {most: rate_of(most)}
    target = min(wanted, PLATEAU * seen[most])
    while low < high:
        middle = (low + high) // 2
        seen[middle] = rate_of(middle)
        low, high = (low, middle) if seen[middle] >= target else (middle + 1, high)
    for blocks in (low - 1, low):
        if blocks >= 1 and blocks not in seen:
            seen[blocks] = rate_of(blocks)
    best = min((low - 1, low)[low == 1 :], key=lambda blocks: abs(seen[blocks] - wanted))
    if abs(seen[best] - wanted) > NEAR_ENOUGH * wanted:
        raise Unavailable(
            "no number of blocks copies at that rate", where="near copy",
            got=f"{seen[best] / 1e9:.4g} GB/s by {best} of up to {most}", expected=f"{wanted / 1e9:.4g} GB/s",
            mend="ask for another share",
        )  # fmt: skip
    return best, seen[best]
