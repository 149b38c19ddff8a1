"""Which pages a transfer moves: pools of both sides, page numbers, and how much fits one sample (Strata S1 to S5)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvbench.errors import KvbenchError, Unavailable, UsageError
from kvbench.model.geometry import KVGeometry, geometry
from kvbench.model.layout import Moves, Pool, moves
from kvbench.units import format_bytes

Pages = np.ndarray[Any, np.dtype[np.int64]]
Order = Literal["sorted", "shuffled"]
# Fragments a sample moves, and how many one page may have before it is not worth waiting for. Memory copies a fragment
# of 256 bytes in 20 ns; a file answers in some 50 us; a GPU's copy engine takes 3 us a call.
CAPS = {"dram": (1 << 19, 1 << 20), "file": (512, 8192), "pinned": (1 << 14, 1 << 16)}
MOST_OVER = 4  # times the bytes asked that one page may have: a row says what it moves, and stays near its label
USUAL_BYTES = 256 << 20  # of a pass, whose set-up the seconds a bench declares hold
SETUP_S_PER_BYTE = 5e-9  # of a pass: three pools of its size are filled, read back and compared at 1 to 2 GB/s
SPREAD = 2  # pages of the far pool per page moved: the set has holes, so that no two pages of it are neighbours


@dataclass(frozen=True, slots=True)
class Plan:
    """``near_pages[i]`` and ``far_pages[i]`` belong together; near pages ascend, far pages have gaps between them."""

    near: Pool
    far: Pool
    near_pages: Pages
    far_pages: Pages

    def moves(self, direction: str) -> Moves:
        """Return the fragments of ``direction`` (fetch | evict); inside a page in the order of the far side."""
        if direction == "fetch":
            return moves(self.far, self.near, self.far_pages, self.near_pages, follow="source")
        return moves(self.near, self.far, self.near_pages, self.far_pages, follow="target")


def far_name(pair: str) -> str:
    """Return the tier behind the colon without its node."""
    return pair.partition(":")[2].partition("@")[0]


def pages_for(shape: KVGeometry, layout: str, page_tokens: int, nbytes: int, far: str) -> int:
    """Return how many pages a sample moves: ``nbytes`` of them, fewer where fragments are many, at least one.

    Raises UsageError for a tier without a cap, Unavailable where one page alone has too many fragments or more than
    ``MOST_OVER`` times ``nbytes``.
    """
    if far not in CAPS:
        raise UsageError("no cap for this tier", where="transfer", got=far, expected=", ".join(CAPS))
    cap, limit = CAPS[far]
    fragments = shape.fragments_per_page(layout, page_tokens)
    if fragments > limit:
        raise Unavailable(
            "a page of too many fragments", where=f"{layout}, {page_tokens} tokens", got=f"{fragments} fragments",
            expected=f"at most {limit} a page to {far}",
        )  # fmt: skip
    check_page(shape, page_tokens, nbytes)
    return max(1, min(nbytes // shape.page_bytes(page_tokens), cap // fragments))


def check_page(shape: KVGeometry, page_tokens: int, nbytes: int) -> None:
    """Raise Unavailable where one page has more than ``MOST_OVER`` times the ``nbytes`` a pass was asked to move."""
    page = shape.page_bytes(page_tokens)
    if page > MOST_OVER * nbytes:
        raise Unavailable(
            "one page is larger than a pass", where=f"{page_tokens} tokens of {shape.name}",
            got=f"a page of {format_bytes(page)}", expected=f"at most {MOST_OVER} x the {format_bytes(nbytes)} asked",
            mend="choose more bytes or smaller pages",
        )  # fmt: skip


def pass_bytes(model: str, layout: str, page_tokens: Iterable[int], nbytes: int, far: str) -> int:
    """Return the bytes of the largest pass over pages of any of ``page_tokens``, 0 where the case will be skipped."""
    try:
        shape = geometry(model)
        return max(pages_for(shape, layout, page, nbytes, far) * shape.page_bytes(page) for page in page_tokens)
    except KvbenchError:
        return 0


def setup_seconds(moved: int) -> float:
    """Return what filling and checking the pools of a pass of ``moved`` bytes takes beyond those of ``USUAL_BYTES``."""
    return SETUP_S_PER_BYTE * max(0, moved - USUAL_BYTES)


def plan(shape: KVGeometry, layout: str, page_tokens: int, pages: int, order: str, seed: int) -> Plan:
    """Return the transfer of ``pages`` pages between a layer_first pool and one of ``layout`` with twice as many.

    ``order``: the far pages ascend (sorted) or come at random (shuffled). Raises UsageError for another order.
    """
    if order not in ("sorted", "shuffled"):
        raise UsageError("unknown order", where="order", got=order, expected="sorted or shuffled")
    numbers = np.arange(pages, dtype=np.int64)
    far_pages = SPREAD * (np.random.default_rng(seed).permutation(pages) if order == "shuffled" else numbers)
    near, far = Pool(shape, "layer_first", page_tokens, pages), Pool(shape, layout, page_tokens, SPREAD * pages)
    return Plan(near, far, numbers, far_pages.astype(np.int64))


def change(
    shape: KVGeometry, layouts: tuple[str, str], page_tokens: int, pages: int, seed: int
) -> tuple[Pool, Pool, Moves]:
    """Return both pools and the fragments of a change from the first layout to the second, pages in random order."""
    source = Pool(shape, layouts[0], page_tokens, SPREAD * pages)
    target = Pool(shape, layouts[1], page_tokens, pages)
    origins = SPREAD * np.random.default_rng(seed).permutation(pages)
    return source, target, moves(source, target, origins, np.arange(pages, dtype=np.int64))
