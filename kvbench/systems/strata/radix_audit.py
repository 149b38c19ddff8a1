"""An audit of the radix tree: every rule, every count, and the order of eviction, by a walk of all nodes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from kvbench.errors import KvbenchError
from kvbench.systems.strata.radix_node import Node, misuse


class Audited(Protocol):
    """What is looked at of a tree."""

    near_pages: int
    far_pages: int
    transient_pages: int
    nodes: int
    spare_pages: int

    def walk(self) -> Iterator[Node]:
        """Yield every node but the root."""


def audit(near_order: OrderedDict[Node, None], far_order: OrderedDict[Node, None], tree: Audited) -> None:
    """Raise KvbenchError naming the first rule of ``tree`` that does not hold; the orders are those of eviction."""
    near = far = transient = nodes = spare = 0
    unlocked_near: set[Node] = set()
    unlocked_far: set[Node] = set()
    for node in tree.walk():
        parent = node.parent
        assert parent is not None
        nodes += 1
        near += len(node.key) * node.near
        far += len(node.key) * node.far
        transient += len(node.key) * (not node.cached)
        if not node.locks:
            spare += len(node.key) * node.near
            unlocked_near |= {node} if node.near else set()
            unlocked_far |= {node} if node.far else set()
        rules = {
            "an empty edge": bool(node.key),
            "an edge under a wrong id": parent.children.get(node.key[0]) is node,
            "a near node below one that is not": parent.near or not node.near,
            "KV below a node without": parent.cached or not node.cached,
            "a transient node nobody needs": node.cached or bool(node.waiting or node.locks or node.children),
            "a locked node below an unlocked one": parent.parent is None or parent.locks >= node.locks,
            "a wrong length": node.end == parent.end + len(node.key),
            "a negative count": min(node.locks, node.waiting) >= 0,
        }
        for rule, holds in rules.items():
            if not holds:
                raise misuse(rule, node)
    counted = (near, far, transient, nodes, spare)
    kept = (tree.near_pages, tree.far_pages, tree.transient_pages, tree.nodes, tree.spare_pages)
    if counted != kept:
        raise KvbenchError("pages do not add up", where="radix tree", got=kept, expected=f"{counted}")
    for order, members in ((near_order, unlocked_near), (far_order, unlocked_far)):
        if order.keys() != members:
            raise KvbenchError("the order of use misses nodes", where="radix tree", got=len(order))
    seen: set[Node] = set()
    for node in near_order:
        if node.parent in seen:
            raise misuse("evicted after its parent", node)
        seen.add(node)
