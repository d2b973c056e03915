"""Flat keys as the tree that their dots make: what is below a node are neighbours among the sorted keys."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["KeyNode", "KeyTree"]


class KeyNode(NamedTuple):
    """Neighbours among all tensors: those whose keys begin alike.

    Attributes:
        name: What the node is called.
        first: The first of the neighbours.
        end: The one behind the last.
        begin: Where in their keys the names of the nodes below begin.
        depth: How many parts of the keys are in front of that.
    """

    name: str
    first: int
    end: int
    begin: int
    depth: int

    @property
    def tensors(self) -> int:
        """How many tensors are below it, or are it."""
        return self.end - self.first


@dataclass(frozen=True, slots=True, eq=False)
class KeyTree:
    """All tensors, those below one node side by side. No node is kept: each is found when it is asked for.

    Attributes:
        keys: Their flat keys, sorted, with NUL for each dot.
        order: Which of the tensors given each of them is, ``[tensors]``.
        edges: The bytes of all that stand before each, and of all.
        most_depth: What follows so many parts of a key stays together.
    """

    keys: list[str]
    order: array[int]
    edges: list[int]
    most_depth: int

    @classmethod
    def of(cls, keys: Sequence[str], nbytes: Sequence[int], most_depth: int) -> KeyTree:
        """The tree of tensors' flat keys.

        Args:
            keys: The flat key of each.
            nbytes: The bytes of each.
            most_depth: How many parts of a key are taken apart.
        """
        names = [key.replace(".", "\0") for key in keys]
        order = sorted(range(len(names)), key=names.__getitem__)
        edges = [0, *itertools.accumulate(map(nbytes.__getitem__, order))]
        return cls(list(map(names.__getitem__, order)), array("q", order), edges, most_depth)

    @property
    def root(self) -> KeyNode:
        """All tensors."""
        return KeyNode("", 0, len(self.keys), 0, 0)

    def nbytes(self, node: KeyNode) -> int:
        """Bytes of a node's tensors."""
        return self.edges[node.end] - self.edges[node.first]

    def is_tensor(self, node: KeyNode) -> bool:
        """Whether the first of a node's tensors is the node itself, and not below it."""
        return node.first < node.end and node.begin > len(self.keys[node.first])

    def is_leaf(self, node: KeyNode) -> bool:
        """Whether a node is a tensor by itself."""
        return node.tensors == 1 and self.is_tensor(node)

    def below(self, node: KeyNode) -> Iterator[KeyNode]:
        """The nodes below a node; none below a tensor by itself."""
        at = node.first + self.is_tensor(node)
        while at < node.end:
            child = self.child(node, at)
            yield child
            at = child.end

    def child(self, node: KeyNode, first: int) -> KeyNode:
        """The node right below a node that begins with this tensor."""
        key = self.keys[first]
        stop, end = len(key), first + 1
        if node.depth < self.most_depth:
            dot = key.find("\0", node.begin)
            stop = stop if dot < 0 else dot
            if end < node.end and self.keys[end].startswith(key[:stop] + "\0"):
                end = bisect.bisect_left(self.keys, key[:stop] + "\1", end, node.end)
        return KeyNode(key[node.begin : stop].replace("\0", "."), first, end, stop + 1, node.depth + 1)

    def joined(self, node: KeyNode) -> KeyNode:
        """A node, with those names in its own that lead to one node only. A tensor keeps its own."""
        while not self.is_leaf(node):
            child = next(self.below(node), None)
            if child is None or child.tensors < node.tensors:
                break
            node = KeyNode(f"{node.name}.{child.name}", *child[1:])
        return node
