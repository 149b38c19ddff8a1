"""A radix tree over page ids with two tiers and transient nodes: what Strata's scheduler asks and changes.

After Strata (OSDI 2026, section 4.3 and its Fig. 4): a node holds a run of pages (an edge of the compressed tree) and
where their KV lies: near, far, both, or nowhere yet. Nodes without KV are transient: a request that waits (in queue) or
is being computed (in flight) will produce them, so a second request that matches one would compute it again (a delay
hit). A path of ids names a prefix. Where each id alone names the whole prefix up to its page, as hash ids of traces do,
``named`` trees compare the last id of an edge instead of all.

Two rules hold after every call: the parent of a near node is near, and the parent of a node with KV has KV. Eviction is
leaf first and in order of last use: whenever a node is used, its ancestors are used right after it, so in an ordered
dictionary the oldest unlocked node never has a near child, and finding it costs the same at any size. Locks
take a path out of that order. Times of an operation grow with the pages of its key and the nodes on its path only.

Counts are pages. Nothing here knows capacities; :mod:`kvbench.systems.strata.tiers` does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from kvbench.systems.strata.radix_audit import audit
from kvbench.systems.strata.radix_node import Key, Match, Node, Spans, common, common_named, misuse


class RadixTree:
    """The tree. A handle is the node at which a key ends; it stays valid while the key waits or is locked."""

    def __init__(self, *, named: bool = False) -> None:
        self._common: Callable[[Key, Key, int], int] = common_named if named else common
        self.root = Node((), None, 0)
        self.root.near = True  # the empty prefix is everywhere, so that the rules on parents need no exception
        self.near_pages = self.far_pages = self.transient_pages = self.nodes = 0
        self.spare_pages = 0  # of the near ones, unlocked: what eviction can free
        self._serial = self._nameless = 0
        self._near: OrderedDict[Node, None] = OrderedDict()  # unlocked near nodes, the least recently used first
        self._far: OrderedDict[Node, None] = OrderedDict()  # unlocked far nodes, by last use or demotion

    # -- looking -------------------------------------------------------------------------------------------------

    def match(self, key: Sequence[int]) -> Match:
        """Return where the longest known prefix of ``key`` lies; nothing is used, moved or split by it."""
        key = tuple(key)
        near = far = transient = at = 0
        node = self.root
        while at < len(key):
            child = node.children.get(key[at])
            if child is None:
                break
            run = self._common(child.key, key, at)
            if child.near:
                near += run
            elif child.far:
                far += run
            else:
                transient += run
            at += run
            if run < len(child.key):
                break
            node = child
        return Match(near, far, transient)

    def held(self, leaf: Node) -> Match:
        """Return the same for the key that ends at ``leaf``, without comparing ids; its own nodes may be transient."""
        near = far = transient = 0
        node: Node | None = leaf
        while node is not None:
            if node.near:
                near += len(node.key)
            elif node.far:
                far += len(node.key)
            else:
                transient += len(node.key)
            node = node.parent
        return Match(near, far, transient)

    def survey(self, leaf: Node) -> tuple[int, Spans, Spans]:
        """Return what running the key that ends at ``leaf`` needs: pages that are near, what it would load, and pin.

        Both are (serial of the node, pages): nodes with KV only in the far tier, and near ones that are not locked yet.
        """
        loads: list[tuple[int, int]] = []
        node = leaf
        while not node.near:
            if node.far:
                loads.append((node.serial, len(node.key)))
            assert node.parent is not None
            node = node.parent
        near, pins = node.end, []
        while not node.locks and node.parent is not None:
            pins.append((node.serial, len(node.key)))
            node = node.parent
        return near, loads, pins

    # -- requests ------------------------------------------------------------------------------------------------

    def enqueue(self, key: Sequence[int]) -> Node:
        """Note that a request waits which needs ``key``: what is not in the tree becomes transient. Returns its handle.

        A node that loses its KV meanwhile becomes transient again: the request will compute it.
        """
        leaf = self._reach(tuple(key))
        node = leaf
        while node.parent is not None:
            node.waiting += 1
            node = node.parent
        self.use(leaf)
        return leaf

    def withdraw(self, leaf: Node) -> None:
        """The request of ``leaf`` waits no longer and will not run; transient nodes nobody else needs go."""
        node = leaf
        while node.parent is not None:
            if node.waiting < 1:
                raise misuse("no request waits for this key", leaf)
            node.waiting -= 1
            node = node.parent
        self._prune(leaf)

    def dispatch(self, leaf: Node) -> None:
        """The waiting request of ``leaf`` starts: its path is locked, its transient nodes are in flight."""
        node = leaf
        while node.parent is not None:
            if node.waiting < 1:
                raise misuse("no request waits for this key", leaf)
            node.waiting -= 1
            if node.locks == 0:
                if node.near:
                    del self._near[node]
                    self.spare_pages -= len(node.key)
                if node.far:
                    del self._far[node]
            node.locks += 1
            node = node.parent

    def arrive_near(self, leaf: Node) -> tuple[int, int]:
        """KV of the whole locked path has been computed and is near. Returns pages that (were transient, were far)."""
        made = loaded = 0
        node = leaf
        while node.parent is not None:
            if node.locks < 1:
                raise misuse("KV for a path that is not locked", leaf)
            if not node.near:
                pages = len(node.key)
                if node.far:
                    loaded += pages
                else:
                    made += pages
                    self.transient_pages -= pages
                node.near = True
                self.near_pages += pages
            node = node.parent
        return made, loaded

    def load(self, leaf: Node) -> int:
        """Bring what the locked path of ``leaf`` has only in the far tier near; the far copy stays. Returns pages."""
        loaded = 0
        node: Node | None = leaf
        while node is not None and not node.near:
            if node.far:
                if node.locks < 1:
                    raise misuse("a load into a path that is not locked", leaf)
                node.near = True
                loaded += len(node.key)
            node = node.parent
        self.near_pages += loaded
        return loaded

    def release(self, leaf: Node) -> None:
        """The running request of ``leaf`` is done: its path is unlocked and was used just now."""
        node = leaf
        while node.parent is not None:
            if node.locks < 1:
                raise misuse("released twice", leaf)
            node.locks -= 1
            if node.locks == 0:
                if node.near:
                    self._near[node] = None
                    self.spare_pages += len(node.key)
                if node.far:
                    self._far[node] = None
            node = node.parent
        self._prune(leaf)

    def use(self, leaf: Node) -> None:
        """Make the path of ``leaf`` the most recently used, leaf first."""
        node = leaf
        while node.parent is not None:
            if node.locks == 0:
                if node.near:
                    self._near.move_to_end(node)
                if node.far:
                    self._far.move_to_end(node)
            node = node.parent

    def hit(self, leaf: Node) -> list[Node]:
        """Count a use of each node of the path; returns its near nodes, root first (what write policies look at)."""
        path = []
        node = leaf
        while node.parent is not None:
            node.hits += 1
            if node.near:
                path.append(node)
            node = node.parent
        path.reverse()
        return path

    def append(self, leaf: Node, pages: int) -> Node:
        """The running request of ``leaf`` leaves ``pages`` pages of near KV behind its key: its output.

        No id is known for them until a prompt that repeats them does (:meth:`name`), so nothing matches them yet. Call
        it before :meth:`release`.
        """
        if pages < 1 or not (leaf.near and (leaf.locks or leaf.parent is None)):
            raise misuse("output behind a path that is not locked and near", leaf)
        first = self._nameless - 1
        self._nameless -= pages
        node = self._add(tuple(range(first, first - pages, -1)), leaf)
        node.near = True
        self.transient_pages -= pages
        self.near_pages += pages
        self.spare_pages += pages
        self._near[node] = None
        node.hits = 1
        return node

    def name(self, node: Node, key: Sequence[int]) -> int:
        """Give pages that :meth:`append` left the ids they have in ``key``, a prompt that repeats them.

        Returns how many got a name: none where ``node`` is gone, where ``key`` does not lead to it, or where those ids
        have come into the tree meanwhile.
        """
        parent = node.parent
        assert parent is not None
        if not node.cached or parent.children.get(node.key[0]) is not node or not self._leads(key, parent):
            return 0
        ids = tuple(key[parent.end : parent.end + len(node.key)])
        if not ids or ids[0] in parent.children:
            return 0
        if len(ids) < len(node.key):
            node = self._split(node, len(ids))
        del parent.children[node.key[0]]
        node.key = ids
        parent.children[ids[0]] = node
        self.use(node)
        return len(ids)

    def _leads(self, key: Sequence[int], target: Node) -> bool:
        """Return whether ``key`` runs through ``target``."""
        key = tuple(key)
        node = self.root
        while node is not target:
            child = node.children.get(key[node.end]) if node.end < target.end and node.end < len(key) else None
            if child is None or self._common(child.key, key, node.end) < len(child.key):
                return False
            node = child
        return True

    # -- tiers ---------------------------------------------------------------------------------------------------

    def oldest_near(self) -> Node | None:
        """Return the unlocked near node to evict next; it has no near child. None when all are locked."""
        return next(iter(self._near), None)

    def oldest_far(self) -> Node | None:
        """Return the unlocked far node to drop next. None when all are locked."""
        return next(iter(self._far), None)

    def back_up(self, node: Node) -> None:
        """KV of a near ``node`` is in the far tier too."""
        if not node.near or node.far:
            raise misuse("only a near node without a far copy is backed up", node)
        node.far = True
        self.far_pages += len(node.key)
        if node.locks == 0:
            self._far[node] = None

    def demote(self, node: Node) -> None:
        """Free the near copy of ``node``: it stays far where it has a copy there, else it and all below it are gone."""
        if not node.near or node.locks or node.parent is None:
            raise misuse("only an unlocked near node is evicted", node)
        if any(child.near for child in node.children.values()):
            raise misuse("evicted before its near children", node)
        node.near = False
        self.near_pages -= len(node.key)
        self.spare_pages -= len(node.key)
        del self._near[node]
        if node.far:
            self._far.move_to_end(node)  # after its children, which were demoted before it
        else:
            self._lost(node)

    def forget_far(self, node: Node) -> None:
        """Free the far copy of ``node``; without a near one it and all below it are gone."""
        if not node.far or node.locks:
            raise misuse("only an unlocked far node is dropped", node)
        node.far = False
        self.far_pages -= len(node.key)
        del self._far[node]
        if not node.near:
            self._lost(node)

    def _lost(self, node: Node) -> None:
        """KV of ``node`` exists nowhere: what lies below is of no use either; those waiting for it make it anew."""
        self.transient_pages += len(node.key)
        stack = [node]
        last = [node]
        while stack:
            for child in stack.pop().children.values():
                if child.cached:
                    # no near node below an evicted one, and a lock below would lock this one too
                    child.far = False
                    self.far_pages -= len(child.key)
                    del self._far[child]
                    self.transient_pages += len(child.key)
                stack.append(child)
                last.append(child)
        for gone in reversed(last):
            self._prune(gone)

    # -- structure -----------------------------------------------------------------------------------------------

    def _reach(self, key: Key) -> Node:
        """Return the node at which ``key`` ends; splits an edge and adds a transient node where needed."""
        at = 0
        node = self.root
        while at < len(key):
            child = node.children.get(key[at])
            if child is None:
                return self._add(key[at:], node)
            run = self._common(child.key, key, at)
            if run < len(child.key):
                child = self._split(child, run)
            at += run
            node = child
        return node

    def _add(self, key: Key, parent: Node) -> Node:
        self._serial += 1
        made = Node(key, parent, self._serial)
        parent.children[key[0]] = made
        self.nodes += 1
        self.transient_pages += len(key)
        return made

    def _split(self, node: Node, at: int) -> Node:
        """Return a new node for the first ``at`` pages of ``node``, which keeps the rest: handles of it stay valid."""
        parent = node.parent
        assert parent is not None
        self._serial += 1
        upper = Node(node.key[:at], parent, self._serial)
        upper.near, upper.far, upper.locks = node.near, node.far, node.locks
        upper.waiting, upper.hits = node.waiting, node.hits
        upper.children[node.key[at]] = node
        parent.children[node.key[0]] = upper
        node.key, node.parent = node.key[at:], upper
        self.nodes += 1
        if upper.locks == 0:
            # whoever split it uses the upper part next; it moves behind its child at once all the same
            if upper.near:
                self._near[upper] = None
            if upper.far:
                self._far[upper] = None
        return upper

    def _prune(self, node: Node) -> None:
        """Remove ``node`` and its ancestors as long as they are transient, childless and needed by nobody."""
        while node.parent is not None and not (node.near or node.far or node.waiting or node.locks or node.children):
            parent = node.parent
            if parent.children.get(node.key[0]) is not node:
                return  # removed before
            del parent.children[node.key[0]]
            self.nodes -= 1
            self.transient_pages -= len(node.key)
            node = parent

    def walk(self) -> Iterator[Node]:
        """Yield every node but the root, parents first."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Audit everything; see :func:`kvbench.systems.strata.radix_audit.audit`."""
        audit(self._near, self._far, self)
