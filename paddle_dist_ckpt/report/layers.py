"""Bytes by layer: the tree that the dots in tensors' keys make, cut back to what can be drawn."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..core.text import visible

__all__ = ["LayerColumns", "layers_of"]

_MOST_DEPTH = 16
_MOST_NODES = 4000
_MOST_CHILDREN = 150
_GROUPS = 60


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


@dataclass(slots=True)
class _LayerNode:
    nbytes: int = 0
    tensors: int = 0
    children: dict[str, _LayerNode] = field(default_factory=dict)


def layers_of(tensors: Iterable[tuple[str, int]], most: int = _MOST_NODES) -> LayerColumns:
    """The tree of tensors' flat keys and bytes. Where it has too many nodes, the largest are taken apart first.

    Args:
        tensors: The flat key and the bytes of each.
        most: How many nodes it may have, but for those that are beside the last one to be taken apart.
    """
    root = _grown(tensors)
    columns = LayerColumns([], [], [], [], [])
    columns.add(-1, "all tensors", "", root.nbytes, root.tensors)
    heap = [(-root.nbytes, 0, "", root)]
    while heap and len(columns.parent) < most:
        _, number, prefix, node = heapq.heappop(heap)
        groups = _groups(node.children)
        if groups is not None:
            for name, group in groups:
                place = columns.add(number, name, "", group.nbytes, group.tensors)
                heapq.heappush(heap, (-group.nbytes, place, prefix, group))
            continue
        joined = [_joined(name, child) for name, child in node.children.items()]
        for name, child in sorted(joined, key=lambda item: (-item[1].nbytes, _natural(item[0]))):
            key = f"{prefix}{name}"
            place = columns.add(number, name, key, child.nbytes, child.tensors)
            if child.children:
                heapq.heappush(heap, (-child.nbytes, place, f"{key}.", child))
    return columns


def _grown(tensors: Iterable[tuple[str, int]]) -> _LayerNode:
    """The whole tree."""
    root = _LayerNode()
    for key, nbytes in tensors:
        node = root
        node.nbytes, node.tensors = node.nbytes + nbytes, node.tensors + 1
        for part in key.split(".", _MOST_DEPTH):
            node = node.children.setdefault(part, _LayerNode())
            node.nbytes, node.tensors = node.nbytes + nbytes, node.tensors + 1
    return root


def _groups(children: dict[str, _LayerNode]) -> list[tuple[str, _LayerNode]] | None:
    """Many nodes in groups of those whose names follow each other, the group of the most bytes first; None of few."""
    if len(children) <= _MOST_CHILDREN:
        return None
    names = sorted(children, key=_natural)
    size = -(-len(names) // _GROUPS)
    groups = []
    for start in range(0, len(names), size):
        some = names[start : start + size]
        nodes = {name: children[name] for name in some}
        nbytes, tensors = (sum(getattr(node, what) for node in nodes.values()) for what in ("nbytes", "tensors"))
        groups.append((f"{visible(some[0], 80)} … {visible(some[-1], 80)}", _LayerNode(nbytes, tensors, nodes)))
    return sorted(groups, key=lambda group: -group[1].nbytes)


def _joined(name: str, node: _LayerNode) -> tuple[str, _LayerNode]:
    """A node, with those names in its own that lead to one node only. A tensor keeps its own."""
    while len(node.children) == 1:
        ((part, child),) = node.children.items()
        if child.tensors != node.tensors:  # the node is a tensor, too
            break
        name, node = f"{name}.{part}", child
    return name, node


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``layers.9`` before ``layers.10``."""
    return [(int(digits[:15]), "") if digits else (-1, other) for digits, other in re.findall(r"(\d+)|(\D+)", name)]
