"""Rows of a host product that several benches have: link bytes counted, over the algebra's, why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol

if TYPE_CHECKING:
    from kvbench.systems.directkv.host_gemm import HostGemm
    from kvbench.systems.directkv.host_store import FarStore

Scalar = str | int | float | bool | None
Better = Literal["higher", "lower"]
Status = Literal["ok", "suspect", "invalid", "tainted", "skipped", "failed"]
COUNTER = "read_bytes of the process around each product"
PASSES = 3


class Pad(Protocol):
    """Who takes rows: a bench's ``measure``."""

    def flag(self, word: str) -> None: ...
    def note(self, name: str, value: Scalar) -> None: ...
    def skip(self, reason: str) -> NoReturn: ...
    def counted(
        self, value: float, *, n: int, source: str, kernel: str | None = None, seconds: float | None = None
    ) -> object: ...
    def extra(
        self, metric: str, value: float | None, *, unit: str, better: Better, n: int = 0,
        status: Status | None = None, reason: str = "", detail: Mapping[str, Scalar] | None = None,
    ) -> object: ...  # fmt: skip


def unmeasured(pad: Pad, reason: str) -> None:
    """Say on every row of the case that its link bytes are not measured, and why."""
    pad.flag("link_unmeasured")
    pad.note("link_reason", reason)


def link_bytes(pad: Pad, store: FarStore | None) -> int | None:
    """Return the link bytes of a pass counted so far and count anew; 0 where B lies near.

    None, with the flag ``link_unmeasured`` and ``link_reason`` on the row, where nothing counts them.
    """
    if store is None:
        return 0
    link = store.link
    if link is None:
        unmeasured(pad, store.link_reason)
    store.forget()
    return link


def warmed(pad: Pad, work: HostGemm, passes: int = PASSES) -> int | None:
    """Multiply once, for what only a first pass reads (pages of code), then return :func:`link_bytes` of ``passes``."""
    work.run()
    if work.store is not None:
        work.store.forget()
        work.run(passes)
    return link_bytes(pad, work.store)


def link_ratio(pad: Pad, work: HostGemm, n: int) -> None:
    """Add the row of link bytes measured over those of the algebra, of the ``n`` passes counted."""
    store, predicted = work.store, work.plan.traffic.link
    if store is None or store.link is None:
        reason = "B lies near: nothing crosses" if store is None else store.link_reason
        pad.extra("link_ratio", None, unit="1", better="lower", status="skipped", reason=reason)
        return
    pad.extra(
        "link_ratio", store.link / predicted, unit="1", better="lower", n=n,
        detail={"measured": store.link, "predicted": predicted, "counted_by": "read_bytes of the process"},
    )  # fmt: skip


def counted(pad: Pad, work: HostGemm, *, over: int = 1) -> int:
    """Add the primary row, link bytes over ``over`` of some proved passes, and return the bytes; skips without them."""
    store = work.store
    assert store is not None
    work.run()
    store.forget()
    seconds = work.run(PASSES) / PASSES
    work.verify()
    link = store.link
    if link is None:
        unmeasured(pad, store.link_reason)
        pad.skip(f"link bytes are not measured here: {store.link_reason}; asked for {work.asked_bytes} bytes")
    pad.note("asked_bytes", work.asked_bytes)
    pad.note("file_system", store.system)
    pad.counted(link / over, n=PASSES, source=COUNTER, kernel=work.kernel, seconds=seconds)
    return link
