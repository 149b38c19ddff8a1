"""Transport ``batch`` of an index set: merged fragments as descriptors of the batched copy call."""

from __future__ import annotations

from kvbench.errors import KvbenchError
from kvbench.memory.cuda.device import Stream
from kvbench.memory.cuda.service import Service
from kvbench.transport import gpu_batch
from kvbench.transport.gpu_batch import BatchCopy
from kvbench.transport.paged_ce import FRAGMENT_CAP, require_fragments
from kvbench.transport.paged_set import Fragments, part

DESCRIPTOR_CAP = 16384  # descriptors of one call; a pass with more makes several


class PagedBatch:
    """A mover: the fragments in batched calls of at most ``descriptors`` each, in order, on one stream.

    The call is resolved by version and tried on two items first. Raises Unavailable where the driver has it not or
    moves something else, and beyond ``cap`` fragments; CudaError where it refuses.
    """

    def __init__(
        self, service: Service, fragments: Fragments, *, descriptors: int = DESCRIPTOR_CAP, cap: int = FRAGMENT_CAP
    ) -> None:
        if descriptors < 1:
            raise KvbenchError("a batch needs descriptors", where="batch", got=descriptors)
        require_fragments(fragments.count, cap, "batch")
        gpu_batch.probe(service)
        starts = range(0, fragments.count, descriptors)
        self._calls = [
            BatchCopy(
                service.device,
                Fragments(fragments.target, fragments.source, part(fragments.moves, at, at + descriptors)),
            )
            for at in starts
        ]
        self.operations, self.link_bytes = fragments.count, fragments.nbytes
        name = self._calls[0].kernel.partition(" ")[0]
        self.kernel = f"{name} x {len(self._calls)}, {fragments.count} descriptors"

    def submit(self, stream: Stream) -> None:
        """Queue the batches on ``stream``; on the default stream drivers fall back to a copy at a time, and there is
        no such :class:`Stream`. Errors as of BatchCopy."""
        for call in self._calls:
            call.submit(stream)
