"""The radix tree: what it answers, what it refuses, and any sequence of operations against prefixes kept one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from kvbench.errors import KvbenchError
from kvbench.systems.strata.radix import RadixTree
from kvbench.systems.strata.radix_node import Match, Node


def cached(tree: RadixTree, *keys: tuple[int, ...]) -> list[Node]:
    """Let one request a key run from begin to end."""
    leaves = []
    for key in keys:
        leaf = tree.enqueue(key)
        tree.dispatch(leaf)
        tree.load(leaf)
        tree.arrive_near(leaf)
        tree.release(leaf)
        leaves.append(leaf)
    return leaves


def test_a_prefix_is_found_wherever_it_lies() -> None:
    tree = RadixTree()
    assert tree.match((1, 2)) == Match(0, 0, 0)
    (abcd,) = cached(tree, (1, 2, 3, 4))
    assert tree.match((1, 2, 3, 4, 5)) == Match(4, 0, 0)
    assert tree.match((1, 2, 9)) == Match(2, 0, 0)
    assert tree.nodes == 1, "looking splits nothing"
    cached(tree, (1, 2, 9, 9))
    assert (tree.nodes, tree.near_pages) == (3, 6)
    assert (abcd.key, tree.held(abcd)) == ((3, 4), Match(4, 0, 0))
    tree.back_up(abcd)
    tree.demote(abcd)
    assert tree.match((1, 2, 3, 4)) == Match(2, 2, 0)
    assert tree.survey(abcd) == (2, [(abcd.serial, 2)], [(abcd.parent.serial, 2)])  # type: ignore[union-attr]
    tree.check()


def test_transient_nodes_go_from_queue_to_flight_to_kv() -> None:
    tree = RadixTree()
    first = tree.enqueue((1, 2, 3))
    assert (tree.match((1, 2, 7)), first.state) == (Match(0, 0, 2), "in_queue")
    second = tree.enqueue((1, 2, 7))
    tree.dispatch(first)
    assert (first.state, second.state) == ("in_flight", "in_queue")
    assert tree.arrive_near(first) == (3, 0)
    assert tree.held(second) == Match(2, 0, 1)
    tree.dispatch(second)
    assert tree.arrive_near(second) == (1, 0), "what the first one made is not made twice"
    tree.release(second)
    tree.release(first)
    tree.check()
    assert tree.transient_pages == 0


def test_who_does_not_run_leaves_nothing_behind() -> None:
    tree = RadixTree()
    cached(tree, (1, 2))
    waiting, aborted = tree.enqueue((1, 2, 3, 4)), tree.enqueue((1, 2, 3, 5))
    tree.withdraw(waiting)
    assert tree.match((1, 2, 3, 4)) == Match(2, 0, 1)
    tree.dispatch(aborted)
    tree.release(aborted)
    assert (tree.nodes, tree.transient_pages) == (1, 0)
    tree.check()


def test_eviction_goes_leaf_first_in_order_of_use() -> None:
    tree = RadixTree()
    _, b, c = cached(tree, (1, 2), (1, 3), (4,))
    tree.use(b)
    order = []
    while (node := tree.oldest_near()) is not None:
        order.append(node.key)
        tree.demote(node)
        tree.check()
    assert order == [(2,), (4,), (3,), (1,)]
    assert c.parent is not None
    assert (tree.nodes, tree.near_pages) == (0, 0)


def test_locked_paths_stay() -> None:
    tree = RadixTree()
    leaf = tree.enqueue((1, 2))
    tree.dispatch(leaf)
    tree.arrive_near(leaf)
    assert (tree.oldest_near(), tree.spare_pages) == (None, 0)
    other = tree.enqueue((1, 9))
    assert tree.survey(other) == (1, [], [])
    tree.release(leaf)
    assert tree.survey(leaf) == (2, [], [(leaf.serial, 1), (leaf.parent.serial, 1)])  # type: ignore[union-attr]
    tree.check()


def test_kv_lost_under_a_waiting_request_is_transient_again() -> None:
    tree = RadixTree()
    (leaf,) = cached(tree, (1, 2, 3))
    waiting = tree.enqueue((1, 2, 3, 4))
    tree.demote(leaf)
    assert (leaf.state, tree.held(waiting)) == ("in_queue", Match(0, 0, 4))
    tree.check()
    tree.withdraw(waiting)
    assert tree.nodes == 0


def test_far_kv_below_what_is_lost_goes_too() -> None:
    tree = RadixTree()
    parent, child = cached(tree, (1, 2), (1, 2, 3))
    tree.back_up(child)
    tree.demote(child)
    assert tree.match((1, 2, 3)) == Match(2, 1, 0)
    tree.demote(parent)
    assert (tree.nodes, tree.far_pages) == (0, 0)


def test_misuse_is_named() -> None:
    tree = RadixTree()
    parent, child = cached(tree, (1,), (1, 2))
    with pytest.raises(KvbenchError, match="evicted before its near children"):
        tree.demote(parent)
    with pytest.raises(KvbenchError, match="released twice"):
        tree.release(child)
    with pytest.raises(KvbenchError, match="no request waits"):
        tree.dispatch(child)
    with pytest.raises(KvbenchError, match="not locked"):
        tree.arrive_near(child)
    with pytest.raises(KvbenchError, match="only an unlocked far node"):
        tree.forget_far(child)
    tree.back_up(child)
    with pytest.raises(KvbenchError, match="without a far copy"):
        tree.back_up(child)
    child.waiting += 1
    tree.near_pages += 1
    with pytest.raises(KvbenchError, match="pages do not add up"):
        tree.check()


Prefix = tuple[int, ...]


class RadixMachine(RuleBasedStateMachine):
    """Naive side: a dict a property, keyed by the prefix that ends with a page. Keys are short and over three ids, so
    that they share, split and collide all the time."""

    named = False
    waiting = Bundle("waiting")
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(named=self.named)
        self.near: dict[Prefix, int] = {}  # prefix: time of its last use
        self.far: set[Prefix] = set()
        self.waits: dict[Prefix, int] = {}
        self.locks: dict[Prefix, int] = {}
        self.now = 0

    def prefixes(self, key: Prefix) -> list[Prefix]:
        return [key[: n + 1] for n in range(len(key))]

    def touch(self, key: Prefix) -> None:
        self.now += 1
        for prefix in self.prefixes(key):
            if prefix in self.near and not self.locks.get(prefix):
                self.near[prefix] = self.now

    def add(self, counts: dict[Prefix, int], key: Prefix, by: int) -> None:
        for prefix in self.prefixes(key):
            counts[prefix] = counts.get(prefix, 0) + by
            if not counts[prefix]:
                del counts[prefix]

    @rule(target=waiting, key=st.lists(st.integers(0, 2), min_size=1, max_size=7))
    def enqueue_any(self, key: list[int]) -> Any:
        return self.enqueue(key)

    def ids(self, key: Sequence[int]) -> Prefix:
        """Return the ids of a key: its own, or where they name whole prefixes, one number a prefix."""
        return tuple(int("1" + "".join(map(str, key[: n + 1]))) for n in range(len(key))) if self.named else tuple(key)

    def enqueue(self, key: list[int]) -> tuple[Prefix, Node]:
        leaf = self.tree.enqueue(self.ids(key))
        self.add(self.waits, tuple(key), 1)
        self.touch(tuple(key))
        return tuple(key), leaf

    @rule(one=consumes(waiting))
    def withdraw(self, one: tuple[Prefix, Node]) -> None:
        key, leaf = one
        self.tree.withdraw(leaf)
        self.add(self.waits, key, -1)

    @rule(target=running, one=consumes(waiting), load=st.booleans())
    def dispatch_one(self, one: tuple[Prefix, Node], load: bool) -> Any:
        return self.dispatch(one, load)

    def dispatch(self, one: tuple[Prefix, Node], load: bool) -> tuple[Prefix, Node]:
        key, leaf = one
        self.tree.dispatch(leaf)
        self.add(self.waits, key, -1)
        self.add(self.locks, key, 1)
        if load:
            there = [p for p in self.prefixes(key) if p in self.far and p not in self.near]
            near, loads, pins = self.tree.survey(leaf)
            assert (near, pins) == (sum(p in self.near for p in self.prefixes(key)), [])
            assert sum(pages for _, pages in loads) == len(there)
            assert self.tree.load(leaf) == len(there)
            self.near.update(dict.fromkeys(there, self.now))
        return key, leaf

    @rule(one=running)
    def arrive_one(self, one: tuple[Prefix, Node]) -> None:
        self.arrive(one)

    def arrive(self, one: tuple[Prefix, Node]) -> None:
        key, leaf = one
        missing = [p for p in self.prefixes(key) if p not in self.near]
        again = sum(p in self.far for p in missing)
        assert self.tree.arrive_near(leaf) == (len(missing) - again, again)
        self.near.update(dict.fromkeys(missing, self.now))

    @rule(one=consumes(running))
    def release_one(self, one: tuple[Prefix, Node]) -> None:
        self.release(one)

    def release(self, one: tuple[Prefix, Node]) -> None:
        key, leaf = one
        self.tree.release(leaf)
        self.add(self.locks, key, -1)
        self.touch(key)

    @rule(key=st.lists(st.integers(0, 2), min_size=1, max_size=4), load=st.booleans())
    def run_through(self, key: list[int], load: bool) -> None:
        running = self.dispatch(self.enqueue(key), load)
        self.arrive(running)
        self.release(running)

    @rule(target=waiting, data=st.data())
    def enqueue_cached(self, data: st.DataObject) -> Any:
        if not self.near:
            return multiple()
        return self.enqueue(list(data.draw(st.sampled_from(sorted(self.near)))))

    @rule(key=st.lists(st.integers(0, 2), max_size=9))
    def look(self, key: list[int]) -> None:
        seen = [self.state(prefix) for prefix in self.prefixes(tuple(key))]
        known = seen[: seen.index("")] if "" in seen else seen
        counts = (known.count("near"), known.count("far"), known.count("transient"))
        assert self.tree.match(self.ids(key)) == Match(*counts)
        assert known == ["near"] * counts[0] + ["far"] * counts[1] + ["transient"] * counts[2]

    def state(self, prefix: Prefix) -> str:
        if prefix in self.near:
            return "near"
        if prefix in self.far:
            return "far"
        return "transient" if prefix in self.waits or prefix in self.locks else ""

    @rule(which=st.integers(0, 50))
    def back_up(self, which: int) -> None:
        able = [node for node in self.tree.walk() if node.near and not node.far]
        if able:
            node = able[which % len(able)]
            self.tree.back_up(node)
            self.far.update(self.pages_of(node))

    @rule()
    def evict(self) -> None:
        node = self.tree.oldest_near()
        able = {p: used for p, used in self.near.items() if not self.locks.get(p)}
        if node is None:
            assert not able
            return
        pages = self.pages_of(node)
        leaves = [p for p in able if not any(q[: len(p)] == p and q != p for q in self.near)]
        assert pages[-1] in leaves, "a page with near pages behind it was evicted"
        assert able[pages[-1]] == min(able[p] for p in leaves), "something else was used longer ago"
        assert all(p in able for p in pages)
        self.tree.demote(node)
        for prefix in pages:
            del self.near[prefix]
        self.cut()

    @rule()
    def drop_far(self) -> None:
        node = self.tree.oldest_far()
        if node is None:
            assert all(self.locks.get(p) for p in self.far)
            return
        self.far.difference_update(self.pages_of(node))
        self.tree.forget_far(node)
        self.cut()

    def cut(self) -> None:
        """Far KV behind a prefix that has none is of no use."""
        self.far = {p for p in self.far if all(q in self.near or q in self.far for q in self.prefixes(p))}

    def pages_of(self, node: Node) -> list[Prefix]:
        above: Prefix = ()
        parent = node.parent
        while parent is not None:
            above = parent.key + above
            parent = parent.parent
        whole = above + node.key
        if self.named:
            whole = tuple(page % 10 for page in whole)
        return [whole[: len(above) + n + 1] for n in range(len(node.key))]

    @invariant()
    def same(self) -> None:
        self.tree.check()
        found = {"near": set(), "far": set(), "transient": set()}  # type: dict[str, set[Prefix]]
        for node in self.tree.walk():
            pages = self.pages_of(node)
            found["near"].update(pages if node.near else [])
            found["far"].update(pages if node.far else [])
            found["transient"].update([] if node.cached else pages)
            for page in pages:
                assert (node.waiting, node.locks) == (self.waits.get(page, 0), self.locks.get(page, 0))
        asked = self.waits.keys() | self.locks.keys()
        assert found["near"] == self.near.keys()
        assert found["far"] == self.far
        assert found["transient"] == asked - self.near.keys() - self.far
        assert self.tree.spare_pages == sum(not self.locks.get(p) for p in self.near)


@pytest.mark.parametrize("named", [False, True])
def test_any_sequence_agrees_with_prefixes_kept_one_by_one(named: bool) -> None:
    run_machine(
        type("Machine", (RadixMachine,), {"named": named}),
        settings=settings(
            max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_the_machine_finds_a_tree_that_forgets_who_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadixTree, "use", lambda self, leaf: None)
    quick = settings(
        max_examples=500, stateful_step_count=40, deadline=None, database=None, phases=[Phase.generate],
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with pytest.raises((AssertionError, KvbenchError)):
        run_machine(RadixMachine, settings=quick)
