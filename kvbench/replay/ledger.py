"""Who holds how much of each tier, so that nothing is ever held twice, lost, or held beyond capacity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvbench.errors import KvbenchError, UsageError
from kvbench.replay.protocol import Holding

Owner = int | str


class ConservationError(KvbenchError):
    """Tokens, blocks, bytes or time do not add up: a fault of the engine or of a policy, never of a trace."""


@dataclass(frozen=True, slots=True)
class TierSize:
    """Capacity of tier ``name`` in units (tokens, blocks or chunks) of ``unit_bytes``; UsageError below one unit."""

    name: str
    capacity: int
    unit_bytes: int

    def __post_init__(self) -> None:
        if self.capacity < 0 or self.unit_bytes < 1:
            raise UsageError(
                "not a tier", where=f"ledger {self.name}", got=f"{self.capacity} units of {self.unit_bytes} B",
                expected="0 or more units of one byte or more",
            )  # fmt: skip


class Ledger:
    """Units by tier and owner. Every method raises ConservationError for what cannot be (a negative amount, more than
    is free, more than the owner has), and leaves the books as they were. All are O(1), :meth:`audit` is not.
    """

    __slots__ = ("_given", "_held", "_least", "_moved", "_taken", "_used", "sizes")

    def __init__(self, sizes: Iterable[TierSize]) -> None:
        self.sizes: dict[str, TierSize] = {size.name: size for size in sizes}
        self._held: dict[str, dict[Owner, int]] = {name: {} for name in self.sizes}
        self._used: dict[str, int] = dict.fromkeys(self.sizes, 0)
        self._taken: dict[str, int] = dict.fromkeys(self.sizes, 0)
        self._given: dict[str, int] = dict.fromkeys(self.sizes, 0)
        self._moved: dict[tuple[str, str], int] = {}
        self._least: dict[tuple[str, str], int] = {}  # without the last unit of each move, which may be partly filled

    def capacity(self, tier: str) -> int:
        """Return the units of ``tier``."""
        return self.sizes[tier].capacity

    def used(self, tier: str) -> int:
        """Return the units held in ``tier``."""
        return self._used[tier]

    def free(self, tier: str) -> int:
        """Return the units of ``tier`` that nobody holds."""
        return self.sizes[tier].capacity - self._used[tier]

    def held(self, tier: str, owner: Owner) -> int:
        """Return the units ``owner`` holds in ``tier``."""
        return self._held[tier].get(owner, 0)

    def take(self, tier: str, owner: Owner, units: int) -> None:
        """Give ``owner`` ``units`` more of ``tier``."""
        if units < 0 or units > self.sizes[tier].capacity - self._used[tier]:
            self._refuse("take", tier, owner, units, f"0..{self.free(tier)} free")
        held = self._held[tier]
        held[owner] = held.get(owner, 0) + units
        self._used[tier] += units
        self._taken[tier] += units

    def give(self, tier: str, owner: Owner, units: int | None = None) -> int:
        """Take ``units`` of ``tier`` (None: all) back from ``owner``; return how many."""
        held = self._held[tier]
        has = held.get(owner, 0)
        back = has if units is None else units
        if not 0 <= back <= has:
            self._refuse("give", tier, owner, back, f"0..{has} held")
        if back == has:
            held.pop(owner, None)
        else:
            held[owner] = has - back
        self._used[tier] -= back
        self._given[tier] += back
        return back

    def move(self, owner: Owner, source: str, target: str, units: int) -> None:
        """Move ``units`` of ``owner`` from tier ``source`` to ``target``, whose units must be as large."""
        if self.sizes[source].unit_bytes != self.sizes[target].unit_bytes:
            self._refuse("move", f"{source} to {target}", owner, units, "units of one size")
        if not 0 <= units <= self.held(source, owner) or units > self.free(target):
            limits = f"0..{self.held(source, owner)} held, {self.free(target)} free"
            self._refuse("move", f"{source} to {target}", owner, units, limits)
        self.give(source, owner, units)
        self.take(target, owner, units)
        self._moved[source, target] = self._moved.get((source, target), 0) + units
        self._least[source, target] = self._least.get((source, target), 0) + max(0, units - 1)

    def hand(self, tier: str, owner: Owner, heir: Owner, units: int) -> None:
        """Let ``heir`` have ``units`` that ``owner`` holds in ``tier`` (a request's KV becomes the cache's)."""
        if not 0 <= units <= self.held(tier, owner):
            self._refuse("hand on", tier, owner, units, f"0..{self.held(tier, owner)} held")
        held = self._held[tier]
        if held.get(owner, 0) == units:
            held.pop(owner, None)
        else:
            held[owner] -= units
        if units:
            held[heir] = held.get(heir, 0) + units

    def moved_bytes(self, source: str, target: str) -> int:
        """Return the bytes that :meth:`move` has carried from ``source`` to ``target``; 0 without such tiers."""
        units = self._moved.get((source, target), 0)
        return units * self.sizes[source].unit_bytes if units else 0

    def least_moved_bytes(self, source: str, target: str) -> int:
        """Return the bytes that must have crossed: as :meth:`moved_bytes`, the last unit of each move left out."""
        units = self._least.get((source, target), 0)
        return units * self.sizes[source].unit_bytes if units else 0

    def check(self) -> None:
        """Compare what is used with what was taken and given, and with the capacity. O(tiers)."""
        for name, size in self.sizes.items():
            used = self._used[name]
            if used != self._taken[name] - self._given[name] or not 0 <= used <= size.capacity:
                raise ConservationError(
                    "units do not add up", where=f"ledger {name}",
                    got=f"{used} used, {self._taken[name]} taken, {self._given[name]} given",
                    expected=f"used = taken - given, within 0..{size.capacity}",
                )  # fmt: skip

    def audit(self, holdings: Iterable[Holding]) -> None:
        """Check every owner: against the sums, and against what a policy's own structures hold."""
        self.check()
        seen: dict[str, Mapping[Owner, int]] = {holding.tier: holding.by_owner for holding in holdings}
        if set(seen) != set(self.sizes):
            raise ConservationError("tiers", where="audit", got=sorted(seen), expected=", ".join(sorted(self.sizes)))
        for name, held in self._held.items():
            if any(units < 0 for units in held.values()) or sum(held.values()) != self._used[name]:
                raise ConservationError(
                    "owners do not add up", where=f"ledger {name}", got=sum(held.values()),
                    expected=f"{self._used[name]} used",
                )  # fmt: skip
            mine = {owner: units for owner, units in held.items() if units}
            theirs = {owner: units for owner, units in seen[name].items() if units}
            if mine != theirs:
                odd = next(o for o in (*mine, *theirs) if mine.get(o, 0) != theirs.get(o, 0))
                raise ConservationError(
                    "the policy holds something else than the ledger says", where=f"{name}, owner {odd}",
                    got=theirs.get(odd, 0), expected=f"{mine.get(odd, 0)} units",
                )  # fmt: skip

    def _refuse(self, verb: str, tier: str, owner: Owner, units: int, expected: str) -> None:
        raise ConservationError(f"cannot {verb}", where=f"ledger {tier}, owner {owner}", got=units, expected=expected)
