"""The tensors of a checkpoint as a tree of their keys' parts, in lines that are aligned in columns."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..tree.key_tree import KeyNode, KeyTree
from .inspection import TensorFacts
from .output import count, human_bytes, shape_text

__all__ = ["tree_rows"]

_MOST_ROWS = 60
_MOST_DEPTH = 32  # parts of a key; what follows stays together
_MOST_DIGITS = 18


def tree_rows(tensors: Sequence[TensorFacts], depth: int | None, everything: bool) -> Iterable[list[str]]:
    """Rows of columns, as often as they are asked for: name, shape, dtype, size, how it is cut.

    Args:
        tensors: What to show.
        depth: How many levels; without it as many as make about a screenful.
        everything: Show every tensor by itself; otherwise numbered siblings of equal content are shown once.
    """
    shown = _ShownTree.of(tensors, everything)
    if depth is None:
        depth = _MOST_DEPTH + 1 if everything else shown.fitting_depth()
    return _TreeRows(shown, depth)


@dataclass(frozen=True, slots=True)
class _TreeRows:
    """The rows of a tree, made anew whenever they are asked for, of so many levels."""

    shown: _ShownTree
    depth: int

    def __iter__(self) -> Iterator[list[str]]:
        return self.shown.rows(self.shown.tree.root, "", self.depth)


class _Branch(NamedTuple):
    """A line of the tree: a node, and for how many siblings with equal content it stands, up to ``last``."""

    node: KeyNode
    alike: int = 1
    last: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _ShownTree:
    """The tree, in which numbered siblings of equal content are one, unless ``everything`` is shown by itself."""

    tensors: Sequence[TensorFacts]
    tree: KeyTree
    contents: array[int]  # the same number for what is shown as one
    everything: bool
    few: dict[KeyNode, list[_Branch]] = field(default_factory=dict)  # of some nodes those that are not many

    @classmethod
    def of(cls, tensors: Sequence[TensorFacts], everything: bool) -> _ShownTree:
        """The tree of tensors."""
        keys, sizes = [tensor.key for tensor in tensors], [tensor.bytes for tensor in tensors]
        tree, known = KeyTree.of(keys, sizes, _MOST_DEPTH), dict[tuple[object, ...], int]()
        ordered = (tensors[i] for i in tree.order)
        contents = array("q", (known.setdefault(_content(tensor), len(known)) for tensor in ordered))
        return cls(tensors, tree, contents, everything)

    def branches(self, node: KeyNode) -> Iterable[_Branch]:
        """The lines right below a node. A part that has one child only and that child are one line."""
        if self.everything:
            return (_Branch(self.tree.joined(child)) for child in self.tree.below(node))
        if node not in self.few:
            found = (
                _Branch(self.tree.joined(branch.node)) if branch.alike == 1 else branch
                for branch in self._joined_alike(node)
            )
            some = list(itertools.islice(found, _MOST_ROWS + 1))
            if len(some) > _MOST_ROWS or len(self.few) == _MOST_ROWS:
                return itertools.chain(some, found)
            self.few[node] = some
        return self.few[node]

    def _joined_alike(self, node: KeyNode) -> Iterator[_Branch]:
        """What is below a node, with runs of numbered siblings of equal content as one each, behind all others.

        There may be very many, so they are made anew where they are looked at.
        """
        numbers, firsts = array("q"), array("q")
        for child in self.tree.below(node):
            if _is_number(child.name):
                numbers.append(int(child.name))
                firsts.append(child.first)
            else:
                yield _Branch(child)
        order = np.argsort(numbers, kind="stable")
        run = None
        for number, first in zip(np.array(numbers)[order].tolist(), np.array(firsts)[order].tolist(), strict=True):
            child = self.tree.child(node, first)
            if run is not None and number == int(run.node.name) + run.alike and self._are_alike(run.node, child):
                run = _Branch(run.node, run.alike + 1, child.name)
                continue
            if run is not None:
                yield run
            run = _Branch(child)
        if run is not None:
            yield run

    def _are_alike(self, node: KeyNode, other: KeyNode) -> bool:
        """Whether two nodes have equal tensors below, under equal keys."""
        if self.contents[node.first : node.end] != self.contents[other.first : other.end]:
            return False
        cuts, others = slice(node.begin - 1, None), slice(other.begin - 1, None)
        keys, tensors = self.tree.keys, zip(range(node.first, node.end), range(other.first, other.end), strict=True)
        return all(keys[i][cuts] == keys[j][others] for i, j in tensors)

    def tensor(self, number: int) -> TensorFacts:
        """One of the tree's tensors."""
        return self.tensors[self.tree.order[number]]

    def fitting_depth(self) -> int:
        """The most levels that make no more than a screenful; one at least."""
        depth, rows, level = 0, 0, [self.tree.root]
        while level:
            found = (branch.node for node in level for branch in self.branches(node))
            level = list(itertools.islice(found, _MOST_ROWS + 1 - rows))
            rows += len(level)
            if rows > _MOST_ROWS:
                break
            depth += 1
        return max(1, depth)

    def rows(self, node: KeyNode, indent: str, depth: int) -> Iterator[list[str]]:
        """The rows of so many levels below a node."""
        if depth < 1:
            return
        branches = iter(self.branches(node))
        branch = next(branches, None)
        while branch is not None:
            (child, alike, last), following = branch, next(branches, None)
            name = indent + ("├─ " if following else "└─ ") + (f"{child.name}…{last}" if alike > 1 else child.name)
            if self.tree.is_tensor(child):
                tensor = self.tensor(child.first)
                each = f"{alike} of {human_bytes(tensor.bytes)}" if alike > 1 else human_bytes(tensor.bytes)
                yield [name, shape_text(tensor.shape), tensor.dtype, each, _cut_text(tensor)]
            else:
                says = f"{alike} alike, " if alike > 1 else ""
                yield [
                    name,
                    f"{says}{count(alike * child.tensors, 'tensor')}",
                    "",
                    human_bytes(alike * self.tree.nbytes(child)),
                    "",
                ]
            if not self.tree.is_leaf(child):
                yield from self.rows(child, indent + ("│  " if following else "   "), depth - 1)
            branch = following


def _content(tensor: TensorFacts) -> tuple[object, ...]:
    """What tensors have in common that are shown as one."""
    shapes = str((tensor.shape, tensor.grid))  # see hash_of
    return shapes, tensor.dtype, tensor.kind, tensor.pieces


def _is_number(label: str) -> bool:
    return label.isascii() and label.isdecimal() and len(label) <= _MOST_DIGITS


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
