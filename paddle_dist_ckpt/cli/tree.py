"""The tensors of a checkpoint as a tree of their keys' parts, in lines that are aligned in columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.garbage import no_collections
from .inspection import TensorFacts
from .output import count, human_bytes, shape_text

__all__ = ["tree_rows"]

_MOST_ROWS = 60
_MOST_DEPTH = 32  # parts of a key; what follows stays together
_MOST_DIGITS = 18


class _Branch(NamedTuple):
    """A line of the tree: what to call a node, and for how many siblings with equal content it stands."""

    label: str
    node: _Node
    alike: int


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """What is below a part of keys. What is equal is one node, however often it is there.

    Attributes:
        tensor: The tensor whose key ends there, if there is one, or one like it.
        branches: What is below.
        tensors: How many tensors there are.
        bytes: Their size.
    """

    tensor: TensorFacts | None
    branches: list[_Branch]
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _TreeRows:
    """The rows of a tree, made anew whenever they are asked for.

    Attributes:
        root: What they show.
        depth: How many levels.
    """

    root: _Node
    depth: int

    def __iter__(self) -> Iterator[list[str]]:
        return _rows(self.root, "", self.depth)


def tree_rows(tensors: Sequence[TensorFacts], depth: int | None, everything: bool) -> Iterable[list[str]]:
    """Rows of columns, as often as they are asked for: name, shape, dtype, size, how it is cut.

    Args:
        tensors: What to show.
        depth: How many levels; without it as many as make about a screenful.
        everything: Show every tensor by itself; otherwise numbered siblings of equal content are shown once.
    """
    with no_collections():
        root = _grown(tensors, everything)
    if depth is None:
        depth = _MOST_DEPTH + 1 if everything else _fitting_depth(root)
    return _TreeRows(root, depth)


def _cut_text(tensor: TensorFacts) -> str:
    """How a tensor is cut: ``whole``, ``4 rows``, ``2x4 grid``, ``7 pieces``."""
    if tensor.pieces == 1:
        return "whole"
    if tensor.grid is None:
        return f"{tensor.pieces} pieces"
    cut = [dimension for dimension, parts in enumerate(tensor.grid) if parts > 1]
    if cut == [0]:
        return f"{tensor.pieces} rows" if len(tensor.shape) > 1 else f"{tensor.pieces} parts"
    if cut == [1] and len(tensor.shape) == 2:
        return f"{tensor.pieces} columns"
    return "x".join(map(str, tensor.grid)) + " grid"


@dataclass(slots=True)
class _Growing:
    """A node to which more may come."""

    tensor: TensorFacts | None = None
    pairs: list[tuple[str, _Node]] = field(default_factory=list)


def _grown(tensors: Sequence[TensorFacts], everything: bool) -> _Node:
    """The whole tree. Tensors come in such an order that each node is whole before another one begins."""
    known: dict[object, _Node] = {}
    path = [_Growing()]
    ended: list[str] = []  # the parts that lead through it

    def close(depth: int) -> None:
        while len(ended) > depth:
            node = _closed(path.pop(), everything, known)
            path[-1].pairs.append((ended.pop(), node))

    for tensor in sorted(tensors, key=lambda tensor: tensor.key.replace(".", "\0")):
        parts, common = tensor.key.split(".", _MOST_DEPTH), 0
        for part, before in zip(parts, ended, strict=False):
            if part != before:
                break
            common += 1
        close(common)
        for part in parts[common:]:
            path.append(_Growing())
            ended.append(part)
        path[-1].tensor = tensor
    close(0)
    return _closed(path[0], everything, known)


def _closed(growing: _Growing, everything: bool, known: dict[object, _Node]) -> _Node:
    """The node that has grown, or the known one that is equal."""
    own, pairs = growing.tensor, growing.pairs
    content = None if own is None else (own.shape, own.dtype, own.kind, own.pieces, own.grid)
    place = content, tuple(pairs)
    node = known.get(place)
    if node is None:
        found = (_Branch(label, node, 1) for label, node in pairs) if everything else _joined_alike(pairs)
        branches = list(map(_joined_chain, found))
        number = (own is not None) + sum(branch.alike * branch.node.tensors for branch in branches)
        size = (own.bytes if own is not None else 0) + sum(branch.alike * branch.node.bytes for branch in branches)
        node = known[place] = _Node(own, branches, number, size)
    return node


def _joined_alike(pairs: Sequence[tuple[str, _Node]]) -> Iterator[_Branch]:
    """Siblings, with runs of numbered ones of equal content as one each."""
    yield from (_Branch(label, node, 1) for label, node in pairs if not _is_number(label))
    numbered = sorted((int(label), i) for i, (label, _) in enumerate(pairs) if _is_number(label))
    for _, run in itertools.groupby(enumerate(numbered), lambda each: (each[1][0] - each[0], id(pairs[each[1][1]][1]))):
        found = [i for _, (_, i) in run]
        (first, node), (last, _) = pairs[found[0]], pairs[found[-1]]
        yield _Branch(first if len(found) == 1 else f"{first}…{last}", node, len(found))


def _is_number(label: str) -> bool:
    return label.isascii() and label.isdecimal() and len(label) <= _MOST_DIGITS


def _joined_chain(branch: _Branch) -> _Branch:
    """A part that has one child only and that child as one."""
    label, node, alike = branch
    if alike == len(node.branches) == 1 and node.tensor is None and node.branches[0].alike == 1:
        return _Branch(f"{label}.{node.branches[0].label}", node.branches[0].node, 1)
    return branch


def _fitting_depth(root: _Node) -> int:
    """The most levels that make no more than a screenful; one at least."""
    depth, level, rows = 0, root.branches, 0
    while level and (rows + len(level) <= _MOST_ROWS or depth == 0):
        rows += len(level)
        depth += 1
        level = [child for branch in level for child in branch.node.branches]
    return depth


def _rows(node: _Node, indent: str, depth: int) -> Iterator[list[str]]:
    if depth < 1:
        return
    for i, (label, child, alike) in enumerate(node.branches, 1):
        last = i == len(node.branches)
        name = indent + ("└─ " if last else "├─ ") + label
        if child.tensor is not None:
            tensor = child.tensor
            each = f"{alike} of {human_bytes(tensor.bytes)}" if alike > 1 else human_bytes(tensor.bytes)
            yield [name, shape_text(tensor.shape), tensor.dtype, each, _cut_text(tensor)]
        else:
            says = f"{alike} alike, " if alike > 1 else ""
            yield [name, f"{says}{count(alike * child.tensors, 'tensor')}", "", human_bytes(alike * child.bytes), ""]
        yield from _rows(child, indent + ("   " if last else "│  "), depth - 1)
