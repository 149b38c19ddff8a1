"""Transport ``torch`` of an index set: index_select, one pinned copy, index_copy_, as users of a framework write it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvbench.errors import Unavailable
from kvbench.memory.cuda.device import Device, Stream
from kvbench.model.layout import Moves
from kvbench.transport.paged_set import granule, granules

if TYPE_CHECKING:
    import torch

ELEMENTS = {1: "uint8", 2: "int16", 4: "int32"}  # a copy changes no bits, so any type of that size does
MEND = "pip install 'kvbench[torch]'"


class _Memory:
    """``nbytes`` at a device address as what torch makes a tensor of without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def require_torch() -> None:
    """Raise Unavailable unless torch is installed and sees a GPU."""
    if importlib.util.find_spec("torch") is None:
        raise Unavailable("torch is not installed", where="torch", mend=MEND)
    import torch

    if not torch.cuda.is_available():
        raise Unavailable("torch sees no GPU", where="torch", got=f"torch {torch.__version__}",
                          mend="install a build of torch with CUDA")  # fmt: skip


def rows_of(flat: torch.Tensor, piece: int, element: int) -> torch.Tensor:
    """Return uint8 memory as [rows, elements] with rows of ``piece`` bytes; what is left at the end is dropped."""
    import torch

    whole = flat[: flat.numel() // piece * piece]
    return whole.view(getattr(torch, ELEMENTS[element])).view(-1, piece // element)


class IndexCopy:
    """The index copy itself, on tensors: source rows into target rows through a near and a far staging tensor.

    ``near``: the device of the pool in GPU memory; on the CPU (tests) both sides are. ``fetch``: the source is far.
    """

    def __init__(
        self, source: torch.Tensor, target: torch.Tensor, index: tuple[Any, Any], near: torch.device, *, fetch: bool,
        pin: bool,
    ) -> None:  # fmt: skip
        import torch

        self._source, self._target, self._fetch = source, target, fetch
        far = torch.device("cpu")
        from_index, to_index = (torch.from_numpy(np.ascontiguousarray(i, np.int64)) for i in index)
        self._from = from_index.to(far if fetch else near)
        self._to = to_index.to(near if fetch else far)
        shape = (len(from_index), source.shape[1])
        self._far = torch.empty(shape, dtype=source.dtype, pin_memory=pin)
        self._near = torch.empty(shape, dtype=source.dtype, device=near)

    def run(self) -> None:
        """Move the rows. Evicting waits for the copy before the CPU scatters it; fetching only queues the scatter."""
        import torch

        if self._fetch:
            torch.index_select(self._source, 0, self._from, out=self._far)
            self._near.copy_(self._far, non_blocking=True)
            self._target.index_copy_(0, self._to, self._near)
            return
        torch.index_select(self._source, 0, self._from, out=self._near)
        self._far.copy_(self._near, non_blocking=True)
        if self._near.is_cuda:
            torch.cuda.current_stream().synchronize()
        self._target.index_copy_(0, self._to, self._far)


class TorchPages:
    """A mover: the pools as tensors of ``element``-byte elements over the memory that is there, torch on our stream.

    Three operations a pass are counted, whatever kernels torch makes of them. ``waits``: a pass waits for the device
    in between, so it cannot be queued behind a blocker. Raises Unavailable without torch or
    where it sees no GPU.
    """

    def __init__(
        self,
        device: Device,
        moves: Moves,
        way: Literal["fetch", "evict"],
        near: tuple[int, int],
        far: Any,
        element: int,
    ) -> None:
        require_torch()
        import torch

        fetch = way == "fetch"
        self._device = device
        piece = granule(moves)
        size = element if piece % element == 0 and element in ELEMENTS else 1
        gpu = torch.device("cuda", device.ordinal)
        pools = [torch.from_numpy(far), torch.as_tensor(_Memory(*near), device=gpu)]
        source, target = (rows_of(pool, piece, size) for pool in (pools if fetch else pools[::-1]))
        self._copy = IndexCopy(source, target, granules(moves, piece), gpu, fetch=fetch, pin=True)
        self._streams: dict[int, Any] = {}
        self.operations, self.link_bytes, self.waits = 3, moves.total, not fetch
        self.kernel = f"torch {torch.__version__} index_select + copy_ + index_copy_, rows of {piece} B"

    def submit(self, stream: Stream) -> None:
        """Run the copy with ``stream`` as torch's current stream. Evicting returns when all is done."""
        import torch

        handle = 0 if stream.handle is None else stream.handle.value or 0
        known = self._streams.setdefault(handle, torch.cuda.ExternalStream(handle))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(known):
            self._copy.run()
        self._device.bind()  # torch makes its own context current, which is the same one only by default
        stream.count(self.operations)
