"""The tensors of a checkpoint as a tree of their keys' parts, in lines that are aligned in columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .inspection import TensorFacts
from .output import count, human_bytes, shape_text

__all__ = ["tree_rows"]

_MOST_ROWS = 60
_MOST_DEPTH = 32  # parts of a key; what follows stays together
_MOST_DIGITS = 18


@dataclass(slots=True)
class _Node:
    """A part of keys.

    Attributes:
        label: How it is called.
        tensor: The tensor that has this key, if there is one.
        children: What is below it, by label.
        alike: How many siblings with equal content this stands for.
        shape: What two nodes of equal content have in common.
    """

    label: str
    tensor: TensorFacts | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    alike: int = 1
    shape: object = None
    tensors: int = 0
    bytes: int = 0


def tree_rows(tensors: Sequence[TensorFacts], depth: int | None, everything: bool) -> list[list[str]]:
    """Rows of columns: name, shape, dtype, size, how it is cut.

    Args:
        tensors: What to show.
        depth: How many levels; without it as many as make about a screenful.
        everything: Show every tensor by itself; otherwise numbered siblings of equal content are shown once.
    """
    root = _Node("")
    for tensor in tensors:
        node = root
        for part in tensor.key.split(".", _MOST_DEPTH):
            node = node.children.setdefault(part, _Node(part))
        node.tensor = tensor
    _sum_up(root)
    if not everything:
        _join_alike(root)
    _join_chains(root)
    if depth is None:
        most = _height(root) if everything else _fitting_depth(root)
    else:
        most = depth
    return list(_rows(root, "", most))


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


def _sum_up(node: _Node) -> None:
    for child in node.children.values():
        _sum_up(child)
    own = node.tensor
    node.tensors = (own is not None) + sum(child.tensors for child in node.children.values())
    node.bytes = (own.bytes if own is not None else 0) + sum(child.bytes for child in node.children.values())
    leaf = None if own is None else (own.shape, own.dtype, own.kind, own.pieces, own.grid)
    node.shape = (leaf, tuple((label, child.shape) for label, child in node.children.items()))


def _join_alike(node: _Node) -> None:
    """Replace runs of numbered siblings of equal content by one."""
    pairs = [(int(label), child) for label, child in node.children.items() if _is_number(label)]
    numbered = sorted(pairs, key=lambda pair: pair[0])
    joined: dict[str, _Node] = {label: child for label, child in node.children.items() if not _is_number(label)}
    for _, run in itertools.groupby(enumerate(numbered), lambda each: (each[1][0] - each[0], each[1][1].shape)):
        found = [child for _, (_, child) in run]
        first = found[0]
        if len(found) > 1:
            first.label, first.alike = f"{found[0].label}…{found[-1].label}", len(found)
            first.tensors, first.bytes = first.tensors * len(found), first.bytes * len(found)
        joined[first.label] = first
    node.children = joined
    for child in joined.values():
        _join_alike(child)


def _is_number(label: str) -> bool:
    return label.isascii() and label.isdecimal() and len(label) <= _MOST_DIGITS


def _join_chains(node: _Node) -> None:
    """Write a part that has one child only and that child as one."""
    for child in node.children.values():
        while len(child.children) == 1 and child.tensor is None:
            (only,) = child.children.values()
            if child.alike > 1 or only.alike > 1:
                break
            child.label, child.tensor, child.children = f"{child.label}.{only.label}", only.tensor, only.children
        _join_chains(child)


def _height(node: _Node) -> int:
    return max((1 + _height(child) for child in node.children.values()), default=0)


def _fitting_depth(root: _Node) -> int:
    """The most levels that make no more than a screenful; one at least."""
    depth, level, rows = 0, list(root.children.values()), 0
    while level and (rows + len(level) <= _MOST_ROWS or depth == 0):
        rows += len(level)
        depth += 1
        level = [child for node in level for child in node.children.values()]
    return depth


def _rows(node: _Node, indent: str, depth: int) -> Iterator[list[str]]:
    if depth < 1:
        return
    children = list(node.children.values())
    for child in children:
        last = child is children[-1]
        name = indent + ("└─ " if last else "├─ ") + child.label
        if child.tensor is not None:
            tensor = child.tensor
            each = f"{child.alike} of " if child.alike > 1 else ""
            yield [name, shape_text(tensor.shape), tensor.dtype, each + human_bytes(tensor.bytes), _cut_text(tensor)]
        else:
            alike = f"{child.alike} alike, " if child.alike > 1 else ""
            yield [name, f"{alike}{count(child.tensors, 'tensor')}", "", human_bytes(child.bytes), ""]
        yield from _rows(child, indent + ("   " if last else "│  "), depth - 1)
