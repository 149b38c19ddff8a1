"""Which physical chunk answers at an address: each carries its own number, so a copy cannot pass for a remapping."""

from __future__ import annotations

from kvbench.memory.vmm.touch import Touch
from kvbench.systems.ellm.act_slots import ActSlot
from kvbench.systems.ellm.chunks import Owner
from kvbench.systems.ellm.kv_slots import KvSlot
from kvbench.systems.ellm.pool import ElasticPool

STAMP = 0x6B76_0000_0000_0000
WORD = 8


def _word(chunk: int) -> bytes:
    return (STAMP + chunk).to_bytes(WORD, "little")


def stamp(pool: ElasticPool, slot: KvSlot | ActSlot, touch: Touch) -> None:
    """Write each chunk's number into its first word, through the addresses of ``slot``."""
    base, size = pool.address(slot), pool.sizes.chunk_bytes
    for at, chunk in enumerate(pool.chunks_of(slot)):
        touch.write(base + at * size, _word(chunk))


def moved_bytes(pool: ElasticPool, slot: KvSlot | ActSlot, touch: Touch) -> int:
    """Return the bytes of ``slot`` that do not lie in the chunks they were stamped in: what was copied, not remapped.

    Every chunk of the slot was stamped before and its first word left alone since.
    """
    base, size = pool.address(slot), pool.sizes.chunk_bytes
    numbers = pool.chunks_of(slot)
    return size * sum(touch.read(base + at * size, WORD) != _word(chunk) for at, chunk in enumerate(numbers))


def stamp_all(pool: ElasticPool, touch: Touch) -> None:
    """Stamp every chunk once, through slots that are given back; all of them are mapped-available then.

    The pool has no live slot, and slots and addresses enough to map everything on its own side.
    """
    size = pool.sizes.chunk_bytes
    left, context = pool.counts(Owner.KV).total, pool.sizes.context_bytes // size
    slots: list[KvSlot] = []
    while left > 0:
        part = min(left, context)
        slots.append(pool.open_kv(part * size))
        left -= part
    pages = pool.counts(Owner.ACT).total
    act = pool.open_act(pages * size) if pages else None
    for slot in slots:
        stamp(pool, slot, touch)
        pool.close_kv(slot)
    if act is not None:
        stamp(pool, act, touch)
        pool.close_act(act)
