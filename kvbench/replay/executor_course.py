"""The course of a replay as an executor needs it: iteration by iteration, with the blocks each one touches.

What a policy planned is taken down while it is replayed (:class:`Taker`); :func:`place` then gives every request's KV
in the far tier real blocks, as an allocator would, so that all tables and copies can be made before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.errors import UsageError
from kvbench.replay.engine import Executed
from kvbench.replay.policies.neo import Part
from kvbench.replay.protocol import Phase


@dataclass(frozen=True, slots=True)
class Turn:
    """One iteration as simulated: its phases with what each moves and attends to; when it could begin at the earliest
    because a request had to arrive, seconds on the trace's clock; who ended with it, whose KV was dropped before it.
    """

    phases: tuple[Phase, ...]
    parts: tuple[Part, ...]
    gate: float
    begin: float
    end: float
    ended: tuple[int, ...]
    dropped: tuple[int, ...]
    note: str


class Taker:
    """Takes down every iteration: give :meth:`take` to the engine as ``watch``, with ``single_steps``.

    Raises UsageError for a plan whose policy does not say what its phases move, or that waits for a transfer begun
    earlier: neither could be carried out.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def take(self, executed: Executed) -> None:
        plan = executed.plan
        parts = plan.own
        if not isinstance(parts, tuple) or len(parts) != len(plan.phases) or not all(
            isinstance(part, Part) for part in parts
        ):  # fmt: skip
            raise UsageError(
                "a plan that cannot be carried out", where="executor", got=f"own = {type(parts).__name__}",
                expected="what each phase moves (Part)", mend="take the policy neo",
            )  # fmt: skip
        if executed.steps != 1 or any(phase.until for phase in plan.phases):
            raise UsageError(
                "a plan that cannot be carried out", where="executor", got=f"{executed.steps} steps",
                expected="single steps without transfers begun earlier",
            )  # fmt: skip
        lives = [*(chunk.live for chunk in plan.prefill), *plan.decode]
        self.turns.append(
            Turn(
                plan.phases, parts, max((chunk.live.request.arrival for chunk in plan.prefill), default=0.0),
                executed.begin, executed.end, tuple(live.request.id for live in lives if live.stage == "finished"),
                tuple(live.request.id for live in plan.drop), plan.note,
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Copied:
    """KV that crosses the link: far ``blocks`` of a request in the order of its tokens; ``out``: near to far."""

    key: int
    blocks: tuple[int, ...]
    out: bool


@dataclass(frozen=True, slots=True)
class Attended:
    """A CPU decode: the far ``blocks`` of its ``tokens`` tokens, the new one, which is appended, among them."""

    key: int
    tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """What one phase does, with real blocks."""

    copies: tuple[Copied, ...] = ()
    decodes: tuple[Attended, ...] = ()


@dataclass(slots=True)
class _Far:
    """The far tier's blocks: who has which, which are free."""

    free: list[int]
    held: dict[int, list[int]] = field(default_factory=dict)

    def reach(self, key: int, count: int) -> tuple[int, ...]:
        """Let ``key`` have ``count`` blocks."""
        mine = self.held.setdefault(key, [])
        while len(mine) < count:
            if not self.free:
                raise UsageError(
                    "far blocks", where="executor", got="none left", expected="what the policy's ledger has"
                )
            mine.append(self.free.pop())
        return tuple(mine[:count])

    def give(self, key: int) -> None:
        """Take all blocks of ``key`` back."""
        self.free += reversed(self.held.pop(key, []))


def place(turns: Sequence[Turn], blocks: int, page: int) -> list[tuple[Placed, ...]]:
    """Return what each phase of each turn does in a far tier of ``blocks`` blocks of ``page`` tokens.

    Raises UsageError where they do not suffice, and for KV that is read without having been there.
    """
    far = _Far(list(range(blocks - 1, -1, -1)))
    found: list[tuple[Placed, ...]] = []
    for turn in turns:
        for key in turn.dropped:
            far.give(key)
        placed: list[Placed] = []
        left: list[int] = []
        for part in turn.parts:
            copies = [Copied(key, far.reach(key, -(-tokens // page)), True) for key, tokens in part.out]
            for key, tokens in part.into:
                if len(far.held.get(key, ())) < -(-tokens // page):
                    raise UsageError(
                        "KV that is not there", where=f"executor, request {key}", got="nothing to bring in"
                    )
                copies.append(Copied(key, far.reach(key, -(-tokens // page)), False))
                left.append(key)
            decodes = []
            for key, tokens in part.decodes:
                if key not in far.held:
                    raise UsageError("KV that is not there", where=f"executor, request {key}", got="nothing to read")
                decodes.append(Attended(key, tokens, far.reach(key, -(-tokens // page))))
            placed.append(Placed(tuple(copies), tuple(decodes)))
        for key in (*left, *turn.ended):
            far.give(key)
        found.append(tuple(placed))
    return found
