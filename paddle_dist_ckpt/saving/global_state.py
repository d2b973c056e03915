"""Puts together what the ranks of a save have, and checks that it fits together.

It is what stays the same from save to save, so that a second save of the same state can do without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..core.boxes import Boxes
from ..core.columns import IntArray, all_of, places_within, unpack_column, unpack_signed
from ..core.dtypes import DTYPES, DType
from ..core.messages import decode
from ..core.shards import Kind
from ..errors import UnsupportedValueError
from ..planning.save_plan import GlobalTensors, HeldShards
from ..tree.paths import Containers, flat_keys, plain_key
from ..visible import each_visible
from .messages import Description, Structure, TensorList

__all__ = ["GlobalState", "in_charge", "merge_structures"]

_KINDS = ("a tensor", "a numpy array", "a value")


@dataclass(frozen=True, slots=True, eq=False)
class GlobalState:
    """What all ranks together have, without who holds what of it. Tensors are in ascending order of their paths.

    Attributes:
        ranks: The global ranks, ascending; everywhere else ranks are positions in it.
        coordinator: The coordinator's position.
        paths, dtypes, kinds, shapes, names: The tensors, a list each.
        tensors: The same tensors, in columns.
        value_paths: For each rank the paths of its values.
        value_owner: Which rank's value is kept, by path.
        keys: Flat key of each path.
        compared: For each rank its plain tensors, whose digests it sends, in order: their numbers, ``[digests]``.
        holders: How many ranks have each as a plain tensor, ``[tensors]``.
    """

    ranks: tuple[int, ...]
    coordinator: int
    paths: list[str]
    dtypes: list[DType]
    kinds: list[int]
    shapes: list[tuple[int, ...]]
    names: list[str | None]
    tensors: GlobalTensors
    value_paths: list[list[str]]
    value_owner: dict[str, int]
    keys: dict[str, str]
    compared: list[IntArray]
    holders: IntArray


def in_charge(ranks: int, coordinator: int) -> list[int]:
    """The ranks in the order in which they have the say where replicas differ: the coordinator's counts first."""
    return [coordinator, *(i for i in range(ranks) if i != coordinator)]


def merge_structures(structures: Mapping[int, bytes], coordinator: int) -> tuple[GlobalState, HeldShards]:
    """Put together every rank's encoded :class:`Structure`, by global rank, and check that it fits.

    Takes time in O(shards), and in O(tensors) for each different :class:`TensorList` among the ranks.

    Returns:
        The tensors and values; and who holds what of the tensors, by rank and row.

    Raises:
        UnsupportedValueError: tensors or values of one key that contradict each other. Lists them all.
    """
    ranks = tuple(sorted(structures))
    merging = _Merging(ranks, ranks.index(coordinator), [decode(structures[rank], Structure) for rank in ranks])
    problems = [*merging.differences(), *merging.averages(), *merging.path_problems()]
    if problems:
        raise UnsupportedValueError("\n".join(["the ranks' state_dicts do not fit together:", *each_visible(problems)]))
    return merging.merged()


class _List(NamedTuple):
    """A decoded :class:`TensorList`: numbers of its paths and descriptions among those of all lists, ``[listed]``."""

    path: IntArray
    description: IntArray
    names: list[str | None]


class _Merging:
    """All that the ranks list, in columns: a row for each tensor of each rank, rank by rank, in the order of its list.

    Numbers of paths and of descriptions are those of their first appearance.
    """

    def __init__(self, ranks: tuple[int, ...], coordinator: int, structures: Sequence[Structure]) -> None:
        self._ranks, self._coordinator, self._structures = ranks, coordinator, structures
        self._merge_values()
        self._index: dict[str, int] = {}
        numbers: dict[Description, int] = {}
        known: dict[bytes, _List] = {}
        for structure in structures:
            if structure.tensors not in known:
                known[structure.tensors] = self._decoded(decode(structure.tensors, TensorList), numbers)
        self._different, self._lists = list(known.values()), [known[structure.tensors] for structure in structures]
        self._paths, self._descriptions = list(self._index), list(numbers)
        self._is_value = np.array([d.kind == Kind.VALUE for d in self._descriptions], bool)
        self._rank = np.repeat(np.arange(len(ranks)), [len(listed.path) for listed in self._lists])
        self._path = np.concatenate([listed.path for listed in self._lists])
        self._description = np.concatenate([listed.description for listed in self._lists])
        owner = np.array([self._owner.get(path, -1) for path in self._index], np.int64)
        # Which rows count: not those of values that another rank saves.
        self._counts = ~self._is_value[self._description] | (owner[self._path] == self._rank)
        # By number of path: the row of the rank that has the say, and what it says; -1 for nothing.
        rows = np.flatnonzero(self._counts)
        self._first = np.full(len(owner), len(self._rank), np.int64)
        np.minimum.at(self._first, self._path[rows], rows)
        ours = rows[self._rank[rows] == coordinator]
        self._first[self._path[ours]] = ours
        self._said = np.append(self._description, -1)[self._first]

    def _merge_values(self) -> None:
        """Of each value keep the coordinator's, or else the lowest rank's that has it."""
        self._owner: dict[str, int] = {}
        filled: set[str] = set()
        for i in in_charge(len(self._ranks), self._coordinator):
            for path, is_empty in self._structures[i].values:
                self._owner.setdefault(path, i)
                if not is_empty:
                    filled.add(path)
        self._empty = self._owner.keys() - filled  # the empty containers on every rank that has them

    def _decoded(self, listed: TensorList, numbers: dict[Description, int]) -> _List:
        index = self._index
        path = np.array([index.setdefault(path, len(index)) for path in listed.paths], np.int64)
        described = [numbers.setdefault(d, len(numbers)) for d in listed.descriptions]
        description = unpack_column(listed.description, len(path), max(1, len(described)), "description")
        return _List(path, np.array(described, np.int64)[description], listed.names)

    def differences(self) -> Iterator[str]:
        """Compares what is said of each tensor with what the rank says that has the say; yields what differs."""
        differs = self._counts & (self._description != self._said[self._path])
        for row in np.flatnonzero(differs).tolist():
            t = self._path[row]
            path = self._paths[t]
            said = (_comparable(self._descriptions[d]) for d in (self._said[t], self._description[row]))
            what, ours, theirs = next((what, a, b) for (what, a), (_, b) in zip(*said, strict=True) if a != b)
            ranks = self._rank_of(path), self._ranks[self._rank[row]]
            yield f"{plain_key(path)}: {what} is {ours} on rank {ranks[0]}, {theirs} on rank {ranks[1]}"

    def averages(self) -> Iterator[str]:
        """Yields the averages that are not defined."""
        integers = [d.operation == "avg" and DTYPES[d.dtype].category in ("int", "bool") for d in self._descriptions]
        if any(integers):
            for t in np.flatnonzero(np.array(integers)[self._said] & (self._said >= 0)).tolist():
                dtype = self._descriptions[self._said[t]].dtype
                yield f"{plain_key(self._paths[t])}: the average of {dtype} addends is not defined"

    def path_problems(self) -> Iterator[str]:
        """Yields the paths that are a tensor here and a value there, or a leaf here and a container there.

        A container that is empty on one rank and filled on another is no such; its value is not kept.
        """
        for path, i in self._owner.items():
            said = self._said[self._index[path]] if path in self._index else -1
            if said >= 0 and not self._is_value[said]:
                ranks = self._rank_of(path), self._ranks[i]
                yield f"{plain_key(path)}: a tensor on rank {ranks[0]}, a value on rank {ranks[1]}"
        leaves = self._index.keys() | self._owner.keys()
        containers = Containers.of(leaves)
        if containers.too_many:
            yield f"{len(leaves)} tensors and values are in far more dicts or lists of short keys; nest them less"
        for path in sorted(containers.mixed):
            yield f"{plain_key(path)}: a dict on one rank, and on another a list, a tuple or ranks' own values"
        for container in sorted(containers.leaves):
            if container in self._empty:
                del self._owner[container]
            else:
                yield f"{plain_key(container)}: a value or tensor on one rank, a container on another"

    def _rank_of(self, path: str) -> int:
        """The global rank whose description of a tensor counts."""
        return self._ranks[self._rank[self._first[self._index[path]]]]

    def merged(self) -> tuple[GlobalState, HeldShards]:
        """The tensors in order, the values beside them, and all ranks' shards together."""
        order = [(path, t) for path, t in sorted(self._index.items()) if self._said[t] >= 0]
        paths, numbers = [path for path, _ in order], [t for _, t in order]
        place = np.full(len(self._index), -1, np.int64)  # of each path's number among the tensors, -1 for none
        place[numbers] = np.arange(len(order))
        said = self._said[numbers]
        described = [self._descriptions[n] for n in said.tolist()]
        dtypes, shapes = [DTYPES[d.dtype] for d in described], [d.shape for d in described]
        is_plain = np.array([d.plain for d in self._descriptions], bool) & ~self._is_value
        compared = {id(listed): place[listed.path[is_plain[listed.description]]] for listed in self._different}
        in_order = [compared[id(listed)] for listed in self._lists]
        keyed = paths + sorted(self._owner.keys() - set(paths))
        keys = dict(zip(keyed, flat_keys(keyed), strict=True))
        dimensions = max([1, *(structure.dimensions for structure in self._structures)])
        padded = [(*d.shape, *(1,) * (dimensions - len(d.shape))) for d in self._descriptions]
        state = GlobalState(
            ranks=self._ranks,
            coordinator=self._coordinator,
            paths=paths,
            dtypes=dtypes,
            kinds=[d.kind for d in described],
            shapes=shapes,
            names=self._names(numbers),
            tensors=GlobalTensors(
                names=[keys[path] for path in paths],
                itemsize=np.array([dtype.itemsize for dtype in dtypes], np.int64),
                ndim=np.array([len(shape) for shape in shapes], np.int64),
                shape=np.array(padded, np.int64).reshape(-1, dimensions)[said],
            ),
            value_paths=[[path for path, _ in structure.values] for structure in self._structures],
            value_owner=self._owner,
            keys=keys,
            compared=in_order,
            holders=np.bincount(np.concatenate(in_order), minlength=len(order)),
        )
        return state, self._shards(place, dimensions)

    def _names(self, numbers: list[int]) -> list[str | None]:
        """The framework's names of tensors, given by the numbers of their paths."""
        rows = self._first[numbers]
        ranks = self._rank[rows]
        places = rows - np.searchsorted(self._rank, ranks)
        pairs = zip(ranks.tolist(), places.tolist(), strict=True)
        return [names[place] if (names := self._lists[i].names) else None for i, place in pairs]

    def _shards(self, place: IntArray, dimensions: int) -> HeldShards:
        """All ranks' shards; ``place`` has the number of each path's tensor, ``[paths]``."""
        cells = [unpack_signed(s.cells, 2 * s.dimensions + 1) for s in self._structures]
        counts = [all_of(s.shards) for s in self._structures]
        bases = np.cumsum([0, *map(len, counts)]).tolist()  # where each rank's geometries start among all
        columns = [
            unpack_column(s.geometry, len(listed.path), max(1, len(count)), "geometry") + base
            for s, listed, count, base in zip(self._structures, self._lists, counts, bases, strict=False)
        ]
        geometry, shards = np.concatenate(columns), np.concatenate(counts)
        per_row = shards[geometry]
        row = np.repeat(np.arange(len(geometry)), per_row)
        cell = np.repeat((np.cumsum(shards) - shards)[geometry], per_row) + places_within(per_row)
        number = places_within(np.bincount(self._rank[row], minlength=len(self._ranks)))  # among the rank's shards
        if not self._counts.all():
            kept = np.flatnonzero(self._counts[row])
            row, cell, number = row[kept], cell[kept], number[kept]
        said = self._description[row]
        corners = [Boxes(c[:, : c.shape[1] // 2], c[:, c.shape[1] // 2 : -1]) for c in cells]
        return HeldShards(
            tensor=place[self._path[row]],
            rank=self._rank[row],
            row=number,
            boxes=Boxes.joined(corners, dimensions).take(cell),
            plain=np.array([d.plain for d in self._descriptions], np.int64)[said],
            addend=np.concatenate([c[:, -1] for c in cells])[cell],
            addends=np.array([d.addends for d in self._descriptions], np.int64)[said],
        )


def _comparable(said: Description) -> list[tuple[str, object]]:
    """What must be the same on all ranks, in the order in which a difference is worth telling."""
    return [
        ("shape", said.shape),
        ("dtype", said.dtype),
        ("it", ("a distributed tensor", "a plain tensor")[said.plain]),
        ("kind", _KINDS[said.kind]),
        ("reduction", (said.operation, said.addends)),
    ]
