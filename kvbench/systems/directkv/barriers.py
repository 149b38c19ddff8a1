"""The full/empty barrier protocol of the three groups (kernels/gpu/gemm_groups.py), and a checker of all interleavings.

A model of what the groups do, not of their code: producer, copy unit, consumer and storer take steps in any order; a
barrier has a phase and waits look at the phase's parity, as mbarriers do (PTX ISA, mbarrier.try_wait.parity).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from kvbench.errors import KvbenchError, UsageError

Verb = Literal["wait", "load", "look", "use", "put", "take", "arrive"]
Group = tuple["Step", ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a group: ``verb`` on barrier or buffer ``on``.

    ``wait`` for the phase of ``parity`` of a barrier; ``load`` tile ``tile`` into a buffer, by the copy unit, which
    then arrives at barrier ``then``; ``look`` into a buffer that must hold ``tile``, ``use`` it for the last time;
    ``put`` a result into one; ``take`` it out; ``arrive`` at a barrier.
    """

    verb: Verb
    on: str
    parity: int = 0
    tile: int = 0
    then: str = ""


@dataclass(frozen=True, slots=True)
class Protocol:
    """The steps of each group and the buffers they share; every barrier is complete after one arrival."""

    groups: tuple[Group, ...]
    tiles: int


class Broken(KvbenchError):
    """A protocol that can go wrong; ``what`` names how, ``got`` where each group stood."""


def three_groups(depth: int, tiles: int, results: int = 1) -> Protocol:
    """Return the protocol of producer, consumer and storer with ``depth`` input buffers and ``results`` output buffers.

    Raises UsageError for no buffers or no tiles.
    """
    if min(depth, tiles, results) < 1:
        raise UsageError(
            "nothing to check", where="barriers", got=(depth, tiles, results), expected="1 or more of each"
        )
    producer: list[Step] = []
    consumer: list[Step] = []
    storer: list[Step] = []
    for tile in range(tiles):
        slot, turn = tile % depth, tile // depth % 2
        out, out_turn = tile % results, tile // results % 2
        producer += [
            Step("wait", f"empty{slot}", turn ^ 1),
            Step("load", f"in{slot}", tile=tile, then=f"full{slot}"),
        ]
        consumer += [
            Step("wait", f"full{slot}", turn),
            Step("use", f"in{slot}", tile=tile),
            Step("arrive", f"empty{slot}"),
            Step("wait", f"drained{out}", out_turn ^ 1),
            Step("put", f"out{out}", tile=tile),
            Step("arrive", f"ready{out}"),
        ]
        storer += [
            Step("wait", f"ready{out}", out_turn),
            Step("take", f"out{out}", tile=tile),
            Step("arrive", f"drained{out}"),
        ]
    return Protocol((tuple(producer), tuple(consumer), tuple(storer)), tiles)


def far_and_near(depth: int, steps: int, rows: int, near: int) -> Protocol:
    """Return the kernel's own protocol: ``depth`` far buffers, each held through ``rows`` tiles of A in ``near`` ones.

    One output buffer; steps x rows results. Raises UsageError for none of anything.
    """
    if min(depth, steps, rows, near) < 1:
        raise UsageError("nothing to check", where="barriers", got=(depth, steps, rows, near), expected="1 or more")
    producer: list[Step] = []
    consumer: list[Step] = []
    storer: list[Step] = []
    for step in range(steps):
        slot, turn = step % depth, step // depth % 2
        far = f"far{slot}"
        producer += [Step("wait", f"empty {far}", turn ^ 1), Step("load", far, tile=step, then=f"full {far}")]
        consumer.append(Step("wait", f"full {far}", turn))
        for tile in range(step * rows, (step + 1) * rows):
            place, again = f"near{tile % near}", tile // near % 2
            producer += [
                Step("wait", f"empty {place}", again ^ 1),
                Step("load", place, tile=tile, then=f"full {place}"),
            ]
            consumer += [
                Step("wait", f"full {place}", again), Step("look", far, tile=step), Step("use", place, tile=tile),
                Step("arrive", f"empty {place}"), Step("wait", "drained", tile % 2 ^ 1), Step("put", "out", tile=tile),
                Step("arrive", "ready"),
            ]  # fmt: skip
            storer += [Step("wait", "ready", tile % 2), Step("take", "out", tile=tile), Step("arrive", "drained")]
        consumer += [Step("use", far, tile=step), Step("arrive", f"empty {far}")]
    return Protocol((tuple(producer), tuple(consumer), tuple(storer)), steps * rows)


FAULTS: dict[str, tuple[int, Callable[[Step], bool]]] = {
    # group, which of its steps is left out
    "producer does not wait for empty": (0, lambda s: s.verb == "wait"),
    "consumer does not wait for full": (1, lambda s: s.verb == "wait" and s.on.startswith("full")),
    "consumer does not wait for drained": (1, lambda s: s.verb == "wait" and s.on.startswith("drained")),
    "consumer does not give back": (1, lambda s: s.verb == "arrive" and s.on.startswith("empty")),
    "storer does not wait for ready": (2, lambda s: s.verb == "wait"),
    "storer does not give back": (2, lambda s: s.verb == "arrive"),
    "a tile is never stored": (2, lambda s: s.verb == "take" and s.tile == 0),
}


def without(protocol: Protocol, group: int, left_out: Callable[[Step], bool]) -> Protocol:
    """Return ``protocol`` with some steps of one group left out."""
    groups = list(protocol.groups)
    groups[group] = tuple(step for step in groups[group] if not left_out(step))
    return replace(protocol, groups=tuple(groups))


def early_release(protocol: Protocol) -> Protocol:
    """Return ``protocol`` with the consumer giving a buffer back before it has used it."""
    steps = list(protocol.groups[1])
    for place in range(len(steps) - 1):
        if steps[place].verb == "use" and steps[place + 1].verb == "arrive":
            steps[place], steps[place + 1] = steps[place + 1], steps[place]
    return replace(protocol, groups=(protocol.groups[0], tuple(steps), protocol.groups[2]))


def wrong_parity(protocol: Protocol) -> Protocol:
    """Return ``protocol`` with a consumer that never turns the parity it waits for."""
    steps = tuple(replace(s, parity=0) if s.on.startswith("full") else s for s in protocol.groups[1])
    return replace(protocol, groups=(protocol.groups[0], steps, protocol.groups[2]))


# places of the groups, phase of each barrier, tile in each buffer (None: nothing or being written), loads under way,
# and the buffers that hold a tile nobody has used or taken
State = tuple[
    tuple[int, ...], tuple[tuple[str, int], ...], tuple[tuple[str, int | None], ...], tuple[Step, ...],
    tuple[tuple[str, int], ...], tuple[int, ...],
]  # fmt: skip


def check(protocol: Protocol) -> int:
    """Return how many states there are, after a look at every one that any interleaving reaches.

    Raises Broken for a deadlock, a read of a buffer that is not full, a write into one that is not empty, a tile that
    is stored twice or not at all.
    """
    start: State = ((0,) * len(protocol.groups), (), (), (), (), ())
    seen = {start}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        followers = list(_after(protocol, state))
        if not followers:
            _ended(protocol, state)
        for following in followers:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return len(seen)


def _ended(protocol: Protocol, state: State) -> None:
    places, _, _, _, _, stored = state
    stuck = [
        f"group {g} at {group[place].verb} {group[place].on}"
        for g, (group, place) in enumerate(zip(protocol.groups, places, strict=True))
        if place < len(group)
    ]
    if stuck:
        raise Broken("deadlock", where="barriers", got="; ".join(stuck))
    if sorted(stored) != list(range(protocol.tiles)):
        raise Broken("not every tile was stored once", where="barriers", got=list(stored))


def _after(protocol: Protocol, state: State) -> Iterable[State]:
    """Yield the state after each step that can be taken next."""
    places, phases, held, under_way, fresh, stored = state
    phase, holds, unread = dict(phases), dict(held), dict(fresh)

    def made(
        group: int | None, phase: dict[str, int] = phase, holds: dict[str, int | None] = holds,
        under_way: tuple[Step, ...] = under_way, unread: dict[str, int] = unread, stored: tuple[int, ...] = stored,
    ) -> State:  # fmt: skip
        moved = tuple(p + (g == group) for g, p in enumerate(places))
        return (
            moved, tuple(sorted(phase.items())), tuple(sorted(holds.items(), key=lambda item: item[0])), under_way,
            tuple(sorted(unread.items())), tuple(sorted(stored)),
        )  # fmt: skip

    for load in under_way:  # the copy unit may finish any of them
        left = tuple(other for other in under_way if other != load)
        yield made(
            None, phase=phase | {load.then: phase.get(load.then, 0) + 1}, holds=holds | {load.on: load.tile},
            under_way=left, unread=unread | {load.on: load.tile},
        )  # fmt: skip
    for number, (group, place) in enumerate(zip(protocol.groups, places, strict=True)):
        if place == len(group):
            continue
        step = group[place]
        where = f"group {number}, tile {step.tile}"
        if step.verb == "wait":
            if phase.get(step.on, 0) % 2 != step.parity:
                yield made(number)
        elif step.verb == "load":
            if step.on in unread or any(load.on == step.on for load in under_way):
                raise Broken("a buffer is written before it is empty", where=where, got=step.on)
            yield made(number, holds=holds | {step.on: None}, under_way=(*under_way, step))
        elif step.verb in ("use", "look"):
            if holds.get(step.on) != step.tile or step.on not in unread:
                raise Broken("a buffer is read before it is full", where=where, got=f"{step.on}: {holds.get(step.on)}")
            kept = step.verb == "look"
            yield made(number, unread={k: v for k, v in unread.items() if kept or k != step.on})
        elif step.verb == "put":
            if step.on in unread:
                raise Broken("a buffer is written before it is empty", where=where, got=step.on)
            yield made(number, holds=holds | {step.on: step.tile}, unread=unread | {step.on: step.tile})
        elif step.verb == "take":
            if holds.get(step.on) != step.tile or step.on not in unread:
                raise Broken("a buffer is read before it is full", where=where, got=f"{step.on}: {holds.get(step.on)}")
            yield made(number, unread={k: v for k, v in unread.items() if k != step.on}, stored=(*stored, step.tile))
        else:
            yield made(number, phase=phase | {step.on: phase.get(step.on, 0) + 1})
