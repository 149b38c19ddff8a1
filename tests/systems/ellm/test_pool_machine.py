"""Any sequence of requests, with and without faults: nothing is lost, stolen or leaked (hypothesis, both drivers)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from kvbench.errors import KvbenchError
from kvbench.memory.vmm.protocol import VmmError
from kvbench.systems.ellm.backing import Policy, Sizes
from kvbench.systems.ellm.chunks import Owner, PoolExhausted
from kvbench.systems.ellm.mapping import PartlyDone, Stuck
from kvbench.systems.ellm.pool import ElasticPool
from tests.systems.ellm.rigs import CHUNK, RIGS, Rig, Stepwise

KV, ACT, CONTEXT = 10, 6, 8
REFUSED = (VmmError, PartlyDone, Stuck)


class PoolMachine(RuleBasedStateMachine):
    """Live slots carry a stamp in every chunk they need; whatever happens to others, it stays."""

    driver: ClassVar[str]
    kv_slots = Bundle("kv_slots")
    act_slots = Bundle("act_slots")

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.rig: Rig = self.stack.enter_context(RIGS[self.driver]())
        self.faults = 0
        self.stamp = 0
        self.stamps: dict[Any, list[int]] = {}

    @initialize(reuse=st.booleans(), alias=st.booleans(), lazy=st.booleans(), elastic=st.booleans())
    def build(self, reuse: bool, alias: bool, lazy: bool, elastic: bool) -> None:
        sizes = Sizes(CHUNK, KV, ACT, 5, CONTEXT * CHUNK, 40 * CHUNK)
        policy = Policy(reuse=reuse, alias=alias, lazy=lazy, elastic=elastic)
        self.background = Stepwise()
        self.pool = ElasticPool(self.rig.vmm, sizes, policy, self.background)

    def _write(self, slot: Any, chunks: int) -> None:
        """Stamp the chunks a slot got since it was stamped last."""
        held = self.stamps.setdefault(slot, [])
        base = self.pool.address(slot)
        for at in range(len(held), chunks):
            self.stamp += 1
            self.rig.write(base + at * CHUNK, self.stamp)
            held.append(self.stamp)

    def _fails(self, error: KvbenchError) -> None:
        """A refusal needs a reason: too little memory, or a fault that was armed."""
        assert isinstance(error, PoolExhausted) or (self.faults and isinstance(error, REFUSED)), repr(error)

    @rule(target=kv_slots, chunks=st.integers(1, CONTEXT))
    def open_kv(self, chunks: int) -> Any:
        try:
            slot = self.pool.open_kv(chunks * CHUNK - 3)
        except KvbenchError as error:
            self._fails(error)
            return multiple()
        self._write(slot, chunks)
        return slot

    @rule(slot=kv_slots, chunks=st.integers(1, CONTEXT))
    def grow(self, slot: Any, chunks: int) -> None:
        try:
            self.pool.grow(slot, chunks * CHUNK)
        except KvbenchError as error:
            self._fails(error)
            return
        self._write(slot, chunks)

    @rule(target=act_slots, pages=st.integers(1, 9))
    def open_act(self, pages: int) -> Any:
        try:
            slot = self.pool.open_act(pages * CHUNK)
        except KvbenchError as error:
            self._fails(error)
            return multiple()
        self._write(slot, pages)
        return slot

    @rule(target=kv_slots, old=kv_slots, chunks=st.integers(1, CONTEXT), pages=st.integers(1, 6))
    def iteration(self, old: Any, chunks: int, pages: int) -> Any:
        before = [self.pool.counts(owner).used for owner in Owner]
        try:
            granted = self.pool.grant(opens=[CHUNK], grows=[(old, chunks * CHUNK)], act=pages * CHUNK)
        except KvbenchError as error:
            self._fails(error)
            assert [self.pool.counts(owner).used for owner in Owner] == before, "a refused iteration holds something"
            return multiple()
        self._write(old, chunks)
        self._write(granted.kv[0], 1)
        assert granted.act is not None
        self._write(granted.act, pages)
        self._close(self.pool.close_act, granted.act)
        return granted.kv[0]

    def _close(self, close: Any, slot: Any) -> None:
        self.stamps.pop(slot)
        try:
            close(slot)
        except KvbenchError as error:
            self._fails(error)
        with pytest.raises(KvbenchError, match="double free"):
            close(slot)

    @rule(slot=consumes(kv_slots))
    def close_kv(self, slot: Any) -> None:
        self._close(self.pool.close_kv, slot)

    @rule(slot=consumes(act_slots))
    def close_act(self, slot: Any) -> None:
        self._close(self.pool.close_act, slot)

    @rule(slot=kv_slots, ahead=st.integers(1, 3))
    def premap(self, slot: Any, ahead: int) -> None:
        try:
            self.pool.premap([(slot, (slot.need + ahead) * CHUNK)])
        except KvbenchError as error:
            self._fails(error)

    @rule(chunks=st.integers(0, 8), out=st.booleans())
    def lend(self, chunks: int, out: bool) -> None:
        try:
            (self.pool.inflate if out else self.pool.deflate)(chunks)
        except KvbenchError as error:
            self._fails(error)

    @rule()
    def background_works(self) -> None:
        self.background.step()

    @rule()
    def settle(self) -> None:
        self.pool.settle()

    @rule(which=st.integers(0, 3), k=st.integers(1, 6))
    def arm(self, which: int, k: int) -> None:
        self.faults += 1
        self.rig.fail(self.rig.calls[which % len(self.rig.calls)], k)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert sum(self.pool.counts(owner).total for owner in Owner) == KV + ACT
        for slot, stamps in self.stamps.items():
            base = self.pool.address(slot)
            found = [self.rig.read(base + at * CHUNK) for at in range(len(stamps))]
            assert found == stamps, f"{slot} lost its contents"

    def teardown(self) -> None:
        try:
            if hasattr(self, "pool"):
                self.pool.settle()
                self.rig.heal()
                for slot in list(self.stamps):
                    close = self.pool.close_kv if hasattr(slot, "need") else self.pool.close_act
                    close(slot)
                self.pool.close()
                alive = self.rig.vmm.counters()
                assert (alive.reservations, alive.chunks, alive.mappings, alive.lost) == (0, 0, 0, 0), alive
        finally:
            self.stack.close()


@pytest.mark.parametrize("driver", RIGS)
def test_any_sequence_keeps_the_pool_whole(driver: str) -> None:
    machine = type("Machine", (PoolMachine,), {"driver": driver})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
