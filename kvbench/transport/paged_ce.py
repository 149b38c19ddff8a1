"""Transport ``ce`` of an index set: one asynchronous copy a merged fragment, called from compiled code."""

from __future__ import annotations

from kvbench.errors import Unavailable
from kvbench.memory.cuda.device import Device, Stream
from kvbench.transport.gpu_ce import CopyEngine
from kvbench.transport.paged_set import Fragments

FRAGMENT_CAP = 1 << 16  # calls of one pass: at 3 us each a fifth of a second


class PagedEngine(CopyEngine):
    """A mover: one cuMemcpyAsync a fragment, in order. Sizes are 64-bit: a fragment of 3 GiB is one call.

    Raises Unavailable beyond ``cap`` fragments: a pass would take longer than a sample may.
    """

    def __init__(self, device: Device, fragments: Fragments, cap: int = FRAGMENT_CAP) -> None:
        require_fragments(fragments.count, cap, "ce")
        super().__init__(device, fragments)

    def submit(self, stream: Stream) -> None:
        """Queue the copies on ``stream``, which is never the default stream: errors as of CopyEngine."""
        super().submit(stream)


def require_fragments(count: int, cap: int, where: str) -> None:
    """Raise Unavailable for more than ``cap`` fragments a pass."""
    if count > cap:
        raise Unavailable(
            "more fragments than one pass takes", where=where, got=count, expected=f"at most {cap}",
            mend="move fewer tokens a pass, or larger pages",
        )  # fmt: skip
