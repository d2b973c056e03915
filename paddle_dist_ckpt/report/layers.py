"""Bytes by layer: the tree that the dots in tensors' keys make, cut back to what can be drawn."""

from __future__ import annotations

import bisect
import heapq
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..core.text import visible

__all__ = ["LayerColumns", "layers_of"]

_MOST_DEPTH = 16
_MOST_NODES = 4000
_MOST_CHILDREN = 150
_GROUPS = 60
_MOST_DIGITS = 15  # of a number by which names are sorted


@dataclass(frozen=True, slots=True)
class LayerColumns:
    """The tree's nodes, in columns. The first is the root, and a node comes after the one that it is in.

    Attributes:
        parent: Which node each is in; -1 for the root.
        name: Its part of the keys; of a group of many that stand side by side the first and the last.
        key: What the keys of its tensors begin with; of one tensor its key; empty for a group.
        nbytes: Bytes of its tensors.
        tensors: How many these are.
    """

    parent: list[int]
    name: list[str]
    key: list[str]
    nbytes: list[int]
    tensors: list[int]

    def add(self, parent: int, name: str, key: str, nbytes: int, tensors: int) -> int:
        """Add a node; returns its number."""
        for column, item in zip(
            (self.parent, self.name, self.key, self.nbytes, self.tensors),
            (parent, visible(name), visible(key), nbytes, tensors),
            strict=True,
        ):
            column.append(item)  # type: ignore[attr-defined]
        return len(self.parent) - 1


class _LayerNode(NamedTuple):
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
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class _SortedTensors:
    """All tensors, those below one node side by side.

    Attributes:
        keys: Their flat keys, sorted, with NUL for each dot.
        edges: The bytes of all that stand before each, and of all.
    """

    keys: list[str]
    edges: list[int]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, int]]) -> _SortedTensors:
        ordered = sorted((key.replace(".", "\0"), nbytes) for key, nbytes in tensors)
        return cls([key for key, _ in ordered], [0, *itertools.accumulate(nbytes for _, nbytes in ordered)])

    def nbytes(self, node: _LayerNode) -> int:
        """Bytes of a node's tensors."""
        return self.edges[node.end] - self.edges[node.first]

    def below(self, node: _LayerNode) -> Iterator[_LayerNode]:
        """The nodes below a node; none below a tensor by itself."""
        at, begin = node.first, node.begin
        if at < node.end and begin > len(self.keys[at]):  # the node is a tensor, too
            at += 1
        while at < node.end:
            key = self.keys[at]
            stop, last = len(key), at + 1
            if node.depth < _MOST_DEPTH:
                dot = key.find("\0", begin)
                stop = stop if dot < 0 else dot
                last = bisect.bisect_left(self.keys, key[:stop] + "\1", last, node.end)
            yield _LayerNode(key[begin:stop].replace("\0", "."), at, last, stop + 1, node.depth + 1)
            at = last

    def joined(self, node: _LayerNode) -> _LayerNode:
        """A node, with those names in its own that lead to one node only. A tensor keeps its own."""
        while len(found := list(itertools.islice(self.below(node), 2))) == 1 and found[0].tensors == node.tensors:
            node = found[0]._replace(name=f"{node.name}.{found[0].name}")
        return node


def layers_of(tensors: Iterable[tuple[str, int]], most: int = _MOST_NODES) -> LayerColumns:
    """The tree of tensors' flat keys and bytes. Where it has too many nodes, the largest are taken apart first.

    Args:
        tensors: The flat key and the bytes of each.
        most: How many nodes it may have, but for those that are beside the last one to be taken apart.
    """
    known = _SortedTensors.of(tensors)
    root = _LayerNode("all tensors", 0, len(known.keys), 0, 0)
    columns = LayerColumns([], [], [], [], [])
    columns.add(-1, root.name, "", known.nbytes(root), root.tensors)
    heap = [(0, 0, "", list(known.below(root)))]
    while heap and len(columns.parent) < most:
        _, number, prefix, nodes = heapq.heappop(heap)
        if len(nodes) > _MOST_CHILDREN:
            for some in sorted(_groups(nodes), key=lambda some: -sum(map(known.nbytes, some))):
                name = f"{visible(some[0].name, 80)} … {visible(some[-1].name, 80)}"
                nbytes = sum(map(known.nbytes, some))
                place = columns.add(number, name, "", nbytes, sum(node.tensors for node in some))
                heapq.heappush(heap, (-nbytes, place, prefix, some))
            continue
        joined = sorted(map(known.joined, nodes), key=lambda node: (-known.nbytes(node), _natural(node.name)))
        for node in joined:
            key = f"{prefix}{node.name}"
            place = columns.add(number, node.name, key, known.nbytes(node), node.tensors)
            if below := list(known.below(node)):
                heapq.heappush(heap, (-known.nbytes(node), place, f"{key}.", below))
    return columns


def _groups(nodes: Iterable[_LayerNode]) -> list[list[_LayerNode]]:
    """Many nodes in groups of those whose names follow each other."""
    ordered = sorted(nodes, key=lambda node: _natural(node.name))
    size = -(-len(ordered) // _GROUPS)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _natural(name: str) -> str:
    """A key that sorts ``layers.9`` before ``layers.10``."""
    if name.isdecimal():  # most are
        return name[:_MOST_DIGITS].zfill(_MOST_DIGITS)
    return re.sub(r"\d+", lambda digits: digits[0][:_MOST_DIGITS].zfill(_MOST_DIGITS), name)
