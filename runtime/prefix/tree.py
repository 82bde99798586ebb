"""A compressed radix tree over token ids: the longest usable prefix in one walk.

``index.py`` owns one tree per namespace and calls it from whatever task runs the cache; the tree
knows nothing of budgets, leases or recency beyond the order of ``Entry.used``.

Ids are packed four bytes each, so that a whole edge is compared by one ``memcmp`` and 10,000
prompts cost a twentieth of what tuples would. Every node names the most recently used *cuttable*
entry at or below it: a walk that stops anywhere, even inside an edge, finds there a state that
can be cut to the point where the ids part, without looking at the branches below.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from .entries import Entry

_WIDTH = array("I").itemsize


class _Node:
    """The end of an edge, ``depth`` ids below the root."""

    __slots__ = ("children", "depth", "edge", "entry", "latest", "parent")

    def __init__(self, edge: bytes, depth: int, parent: _Node | None) -> None:
        self.edge = edge
        self.depth = depth
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.entry: Entry | None = None
        self.latest: Entry | None = None

    def upward(self) -> Iterator[_Node]:
        """This node and its ancestors, the root last."""
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def find_latest(self) -> Entry | None:
        """The most recently used cuttable entry at or just below, by the children's word."""
        found = [child.latest for child in self.children.values() if child.latest is not None]
        if self.entry is not None and self.entry.cuttable:
            found.append(self.entry)
        return max(found, key=lambda entry: entry.used, default=None)

    def serves_without(self, entry: Entry) -> bool:
        """Whether a cuttable entry other than this one is at or below."""
        if self.latest is not entry:
            return self.latest is not None
        return any(child.latest not in (None, entry) for child in self.children.values()) or (
            self.entry is not None and self.entry is not entry and self.entry.cuttable
        )


class RadixTree:
    """Entries of one namespace by their token ids; at most one entry for the same ids."""

    def __init__(self, trim_window: int | None) -> None:
        """``trim_window``: the longest state that can be cut; None = any, 0 = none."""
        self.trim_window = trim_window
        self._root = _Node(b"", 0, None)
        self._nodes: dict[Entry, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._nodes

    def can_cut(self, length: int) -> bool:
        """Whether a state of ``length`` tokens can be cut to a shorter prefix."""
        return self.trim_window is None or length <= self.trim_window

    def longest(self, ids: Sequence[int]) -> tuple[Entry, int] | None:
        """The entry usable for most of ``ids``, and for how many of them (at least one).

        An entry that ends on the way is usable as it is, a cuttable one up to where it parts from
        ``ids``. Among equally long ones the most recently used is taken.
        """
        node, child, shared = self._descend(pack_ids(ids))
        if child is not None and child.latest is not None:
            return child.latest, node.depth + shared
        for step in node.upward():
            entry = step.entry or step.latest
            if entry is not None and step.depth > 0:
                return entry, step.depth
        return None

    def exact(self, ids: Sequence[int]) -> Entry | None:
        """The entry with exactly these ids."""
        key = pack_ids(ids)
        node, _, _ = self._descend(key)
        return node.entry if node.depth == len(ids) else None

    def covering(self, ids: Sequence[int]) -> Entry | None:
        """A cuttable entry that starts with ``ids``: whatever ``ids`` could serve, it can."""
        node, child, shared = self._descend(pack_ids(ids))
        if node.depth == len(ids):
            return node.latest
        return child.latest if child is not None and node.depth + shared == len(ids) else None

    def prefixes(self, ids: Sequence[int]) -> tuple[Entry, ...]:
        """All entries whose ids are a proper prefix of ``ids``, the longest first."""
        node, _, _ = self._descend(pack_ids(ids))
        way = (step for step in node.upward() if step.depth < len(ids))
        return tuple(step.entry for step in way if step.entry is not None)

    def lost_without(self, entry: Entry) -> int:
        """How many of the entry's tokens no other entry could serve."""
        node = self._nodes[entry]
        for step in node.upward():
            own = step.entry is not None and step.entry is not entry
            if own or step.serves_without(entry):
                return node.depth - step.depth
        return node.depth

    def ids_of(self, entry: Entry) -> tuple[int, ...]:
        """The ids that an entry was put with."""
        edges = [step.edge for step in self._nodes[entry].upward()]
        return unpack_ids(b"".join(reversed(edges)))

    def nearest(self, ids: Sequence[int]) -> tuple[Entry, int] | None:
        """An entry that shares most of ``ids``, usable or not, and how many; None for none."""
        node, child, shared = self._descend(pack_ids(ids))
        shared += node.depth
        if not shared:
            return None
        node = node if child is None else child
        while node.entry is None:
            # A branch without an entry at its end is never left standing.
            node = next(iter(node.children.values()))
        return node.entry, shared

    def insert(self, ids: Sequence[int], entry: Entry) -> None:
        """Add an entry whose ids are not in the tree yet; it must be the most recently used."""
        key = pack_ids(ids)
        node, child, shared = self._descend(key)
        if child is not None:
            node = self._split(child, shared)
        if node.depth < len(ids):
            node = self._attach(node, key[node.depth * _WIDTH :])
        node.entry = entry
        self._nodes[entry] = node
        self.touch(entry)

    def touch(self, entry: Entry) -> None:
        """Note that ``entry`` is now the most recently used of all."""
        if entry.cuttable:
            for step in self._nodes[entry].upward():
                step.latest = entry

    def remove(self, entry: Entry) -> None:
        """Take an entry out and close the gap, so that the tree stays compressed."""
        node = self._nodes.pop(entry)
        node.entry = None
        node = self._close(node)
        for step in node.upward():
            if step.latest is entry:
                step.latest = step.find_latest()

    def _descend(self, key: bytes) -> tuple[_Node, _Node | None, int]:
        """Follow ``key``: the last node reached, the edge it stops in, and ids shared with that.

        A walk that stops inside an edge shares at least one of its ids.
        """
        node = self._root
        at = 0
        while at < len(key):
            child = node.children.get(key[at : at + _WIDTH])
            if child is None:
                return node, None, 0
            if not key.startswith(child.edge, at):
                return node, child, shared_ids(child.edge, key[at : at + len(child.edge)])
            node = child
            at += len(child.edge)
        return node, None, 0

    def _attach(self, parent: _Node, edge: bytes) -> _Node:
        node = _Node(edge, parent.depth + len(edge) // _WIDTH, parent)
        parent.children[edge[:_WIDTH]] = node
        return node

    def _split(self, child: _Node, shared: int) -> _Node:
        """Put a node ``shared`` ids into the edge of ``child``; returns it."""
        parent = child.parent
        assert parent is not None, "the root has no edge to split"
        middle = self._attach(parent, child.edge[: shared * _WIDTH])
        middle.latest = child.latest
        self._adopt(middle, child, child.edge[shared * _WIDTH :])
        return middle

    def _adopt(self, parent: _Node, child: _Node, edge: bytes) -> None:
        child.edge = edge
        child.parent = parent
        parent.children[edge[:_WIDTH]] = child

    def _close(self, node: _Node) -> _Node:
        """Unlink ``node`` and its parent where nothing needs them; returns what is left there."""
        if node.parent is not None and not node.children:
            parent = node.parent
            del parent.children[node.edge[:_WIDTH]]
            node = parent
        if node.parent is not None and node.entry is None and len(node.children) == 1:
            (child,) = node.children.values()
            self._adopt(node.parent, child, node.edge + child.edge)
            node = child
        return node

    def check_integrity(self) -> None:
        """Raise AssertionError, in words, where the tree is not what it promises."""
        self.check_links()
        for entry, node in self._nodes.items():
            cuttable = self.can_cut(node.depth)
            assert entry.cuttable == cuttable, "an entry is wrong about being cut"
            covered = any(child.latest for child in node.children.values())
            assert not covered, "an entry is kept beside a longer one that serves the same"

    def check_links(self) -> None:
        """Raise AssertionError where nodes and entries do not hang together, whatever is kept."""
        found: dict[Entry, _Node] = {}
        pending = [self._root]
        while pending:
            node = pending.pop()
            self._check_node(node)
            if node.entry is not None:
                found[node.entry] = node
            pending.extend(node.children.values())
        assert found == self._nodes, "the tree's entries and its list of them differ"

    def _check_node(self, node: _Node) -> None:
        if node is not self._root:
            assert node.edge, "a node below the root has an empty edge"
            assert node.entry or len(node.children) > 1, "a node without a purpose was left behind"
        if node.entry is not None:
            assert node.entry.length == node.depth, "an entry's length is not that of its ids"
        for first, child in node.children.items():
            assert child.edge.startswith(first), "a child is filed under another id than its first"
            assert child.parent is node, "a child names another parent"
            ids = len(child.edge) // _WIDTH
            assert child.depth == node.depth + ids, "a depth is not the sum of the edges above"
        assert node.latest is node.find_latest(), "a node names the wrong most recent entry"


def pack_ids(ids: Sequence[int]) -> bytes:
    """Ids as the tree holds them."""
    return array("I", ids).tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """The ids that were packed."""
    return tuple(array("I", packed))


def shared_ids(left: bytes, right: bytes) -> int:
    """How many leading ids two packed strings have in common."""
    low, high = 0, min(len(left), len(right)) // _WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        if left[low * _WIDTH : middle * _WIDTH] == right[low * _WIDTH : middle * _WIDTH]:
            low = middle
        else:
            high = middle - 1
    return low
