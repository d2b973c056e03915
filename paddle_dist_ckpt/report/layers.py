"""Bytes by layer: the tree that the dots in tensors' keys make, cut back to what can be drawn."""

from __future__ import annotations

import heapq
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..tree.key_tree import KeyNode, KeyTree
from ..visible import visible

__all__ = ["LayerColumns", "layers_of"]

_MOST_DEPTH = 16
_MOST_NODES = 4000  # but for those beside the last one that is taken apart
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


_Undivided = tuple[int, int, str, KeyNode, "array[int] | None"]
"""A node of the page's whose parts it does not show yet: less its bytes, its number, what its keys begin with, and the
tree's node; of a group its first tensors."""


def layers_of(keys: Sequence[str], nbytes: Sequence[int]) -> LayerColumns:
    """The tree of tensors' flat keys and bytes. Where it has too many nodes, the largest are taken apart first.

    Args:
        keys: The flat key of each.
        nbytes: The bytes of each.
    """
    known = KeyTree.of(keys, nbytes, _MOST_DEPTH)
    root = known.root
    columns = LayerColumns([], [], [], [], [])
    columns.add(-1, "all tensors", "", known.nbytes(root), root.tensors)
    heap: list[_Undivided] = [(0, 0, "", root, None)]
    while heap and len(columns.parent) < _MOST_NODES:
        _, number, prefix, node, some = heapq.heappop(heap)
        firsts = array("q", (child.first for child in known.below(node))) if some is None else some
        if len(firsts) > _MOST_CHILDREN:
            for size, name, group in sorted(_groups(known, node, firsts), key=lambda group: -group[0]):
                tensors = sum(known.child(node, first).tensors for first in group)
                place = columns.add(number, name, "", size, tensors)
                heapq.heappush(heap, (-size, place, prefix, node, group))
            continue
        joined = [known.joined(known.child(node, first)) for first in firsts]
        for child in sorted(joined, key=lambda child: (-known.nbytes(child), _natural(child.name))):
            key = f"{prefix}{child.name}"
            place = columns.add(number, child.name, key, known.nbytes(child), child.tensors)
            if not known.is_leaf(child):
                heapq.heappush(heap, (-known.nbytes(child), place, f"{key}.", child, None))
    return columns


def _groups(known: KeyTree, node: KeyNode, firsts: array[int]) -> Iterator[tuple[int, str, array[int]]]:
    """Many children of a node in groups of those whose names follow each other: bytes, name, first tensors."""
    ordered = sorted(firsts, key=lambda first: _natural(known.child(node, first).name))
    size = -(-len(ordered) // _GROUPS)
    for start in range(0, len(ordered), size):
        group = array("q", ordered[start : start + size])
        begin, end = (visible(known.child(node, first).name, 80) for first in (group[0], group[-1]))
        yield sum(known.nbytes(known.child(node, first)) for first in group), f"{begin} … {end}", group


def _natural(name: str) -> str:
    """A key that sorts ``layers.9`` before ``layers.10``."""
    if name.isdecimal():  # most are
        return name[:_MOST_DIGITS].zfill(_MOST_DIGITS)
    return re.sub(r"\d+", lambda digits: digits[0][:_MOST_DIGITS].zfill(_MOST_DIGITS), name)
