"""Which links between GPU memory and a far tier there are. Light enough to be asked by a listing of cases."""

from __future__ import annotations

from typing import Literal

Far = Literal["pinned", "pageable", "managed", "file"]
# What each far tier can be moved by; other combinations have no meaning or no driver path that does what they say.
TRANSPORTS: dict[str, tuple[str, ...]] = {
    "pinned": ("ce", "batch", "sm", "direct"), "pageable": ("ce",), "managed": ("ce", "direct"), "file": ("staged",),
}  # fmt: skip
# A pageable copy blocks the thread that asks for it, so one thread never has both directions under way; the same holds
# for a file. Pages of managed memory move to whoever touches them, so writing in place leaves nothing on the host.
WAYS: dict[tuple[str, str], tuple[str, ...]] = {
    ("pageable", "ce"): ("fetch", "evict"), ("managed", "ce"): ("fetch", "evict"), ("managed", "direct"): ("fetch",),
    ("file", "staged"): ("fetch", "evict"),
}  # fmt: skip


def makes_sense(far: str, transport: str, direction: str, nbytes: int, pieces: int) -> bool:
    """Return whether there is such a link: the transports of the tier, whole fragments, scattering only by copies."""
    if transport not in TRANSPORTS.get(far, ()) or direction not in WAYS.get((far, transport), (direction,)):
        return False
    if pieces == 1:
        return True
    whole = nbytes % pieces == 0 and nbytes // pieces % 8 == 0
    return far == "pinned" and transport in ("ce", "batch") and pieces >= 4 and whole
