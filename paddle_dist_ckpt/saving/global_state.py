"""Puts together what the ranks of a save have, and checks that it fits together.

It is what stays the same from save to save, so that a second save of the same state can do without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.boxes import Boxes
from ..core.columns import IntArray, places_within, unpack_column, unpack_signed
from ..core.dtypes import DTYPES, DType
from ..core.messages import decode
from ..core.shards import Kind
from ..errors import UnsupportedValueError
from ..planning.save_plan import HeldShards
from ..tree.paths import containers_of, flat_keys, mixed_containers, plain_key
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
        value_paths: For each rank the paths of its values.
        value_owner: Which rank's value is kept, by path.
        keys: Flat key of each path.
        compared: For each rank its plain tensors, whose digests it sends, in order: their numbers, ``[digests]``.
    """

    ranks: tuple[int, ...]
    coordinator: int
    paths: list[str]
    dtypes: list[DType]
    kinds: list[int]
    shapes: list[tuple[int, ...]]
    names: list[str | None]
    value_paths: list[list[str]]
    value_owner: dict[str, int]
    keys: dict[str, str]
    compared: list[IntArray]


def in_charge(ranks: int, coordinator: int) -> list[int]:
    """The ranks in the order in which they have the say where replicas differ: the coordinator's counts first."""
    return [coordinator, *(i for i in range(ranks) if i != coordinator)]


def merge_structures(structures: Mapping[int, bytes], coordinator: int) -> tuple[GlobalState, HeldShards]:
    """Put together what the ranks have, and check that it fits.

    Takes time in O(shards), and in O(tensors) for each different :class:`TensorList` among the ranks.

    Args:
        structures: Every rank's encoded :class:`Structure`, by global rank.
        coordinator: The coordinator's global rank.

    Returns:
        The tensors and values, and who holds what of the tensors.

    Raises:
        UnsupportedValueError: tensors or values of one key that contradict each other. Lists them all.
    """
    ranks = tuple(sorted(structures))
    decoded = [decode(structures[rank], Structure) for rank in ranks]
    order = in_charge(len(ranks), ranks.index(coordinator))
    owner, empty = _merge_values(decoded, order)
    tensors = _Merging(ranks, decoded, owner)
    problems = [*tensors.compare(order), *tensors.averages(), *_path_problems(tensors, owner, empty)]
    if problems:
        raise UnsupportedValueError("the ranks' state_dicts do not fit together:\n" + "\n".join(problems))
    return tensors.merged(order[0])


def _merge_values(structures: Sequence[Structure], order: Sequence[int]) -> tuple[dict[str, int], set[str]]:
    """Of each value keep the coordinator's, or else the lowest rank's that has it.

    Returns:
        Whose is kept, by path; and the paths of those that are empty containers on every rank that has them.
    """
    owner: dict[str, int] = {}
    filled: set[str] = set()
    for i in order:
        for path, is_empty in structures[i].values:
            owner.setdefault(path, i)
            if not is_empty:
                filled.add(path)
    return owner, owner.keys() - filled


@dataclass(frozen=True, slots=True, eq=False)
class _List:
    """A decoded :class:`TensorList`.

    Attributes:
        tensor: The number of each of its tensors among those of all lists, ``[listed]``.
        description: The number of its description among those of all lists, ``[listed]``.
        names: The framework's names, or nothing if no tensor has one.
    """

    tensor: IntArray
    description: IntArray
    names: list[str | None]


class _Merging:
    """Gives every path and every description a number, and compares what the ranks say of a path.

    Numbers of paths and of descriptions are those of their first appearance.

    Args:
        ranks: The global ranks.
        structures: What each has.
        owner: Whose value is kept, by path.

    Attributes:
        ranks: The global ranks.
        index: The number of each path.
    """

    def __init__(self, ranks: tuple[int, ...], structures: Sequence[Structure], owner: dict[str, int]) -> None:
        self.ranks, self._structures, self._owner = ranks, structures, owner
        self.index: dict[str, int] = {}
        numbers: dict[Description, int] = {}
        known: dict[bytes, _List] = {}
        for structure in structures:
            if structure.tensors not in known:
                known[structure.tensors] = self._decoded(decode(structure.tensors, TensorList), numbers)
        self._lists = [known[structure.tensors] for structure in structures]
        self._descriptions = list(numbers)
        self._is_value = np.array([d.kind == Kind.VALUE for d in self._descriptions], bool)
        # By number of path: which rank's value is kept; what is said of it first, -1 for nothing, by whom.
        self._value_owner = np.array([owner.get(path, -1) for path in self.index], np.int64)
        self._description = np.full(len(self.index), -1, np.int64)
        self._first_rank = np.zeros(len(self.index), np.int64)
        self._names: list[str | None] = [None] * len(self.index)

    def _decoded(self, listed: TensorList, numbers: dict[Description, int]) -> _List:
        index = self.index
        tensor = np.array([index.setdefault(path, len(index)) for path in listed.paths], np.int64)
        described = [numbers.setdefault(d, len(numbers)) for d in listed.descriptions]
        description = unpack_column(listed.description, len(tensor), max(1, len(described)), "description")
        return _List(tensor, np.array(described, np.int64)[description], list(listed.names))

    def _mine(self, i: int) -> tuple[IntArray, IntArray]:
        """A rank's tensors without the values that another rank saves: their numbers, and their places in its list."""
        listed = self._lists[i]
        foreign = self._is_value[listed.description] & (self._value_owner[listed.tensor] != i)
        places = np.flatnonzero(~foreign)
        return listed.tensor[places], places

    def compare(self, order: Sequence[int]) -> Iterator[str]:
        """Compare all descriptions of each tensor with the first, of the rank that has the say; yields what differs."""
        for i in order:
            listed = self._lists[i]
            tensor, places = self._mine(i)
            description = listed.description[places]
            fresh = self._description[tensor] < 0
            if fresh.any():
                self._description[tensor[fresh]] = description[fresh]
                self._first_rank[tensor[fresh]] = i
                if listed.names:
                    for t, place in zip(tensor[fresh].tolist(), places[fresh].tolist(), strict=True):
                        self._names[t] = listed.names[place]
            for k in np.flatnonzero(self._description[tensor] != description).tolist():
                yield self._difference(int(tensor[k]), int(description[k]), i)

    def _difference(self, tensor: int, other: int, rank: int) -> str:
        path = next(path for path, t in self.index.items() if t == tensor)
        said = _comparable(self._descriptions[self._description[tensor]])
        what, ours, theirs = next(
            (what, ours, theirs)
            for (what, ours), (_, theirs) in zip(said, _comparable(self._descriptions[other]), strict=True)
            if ours != theirs
        )
        return f"{plain_key(path)}: {what} is {ours} on rank {self.rank_of(path)}, {theirs} on rank {self.ranks[rank]}"

    def averages(self) -> Iterator[str]:
        """Yields the averages that are not defined."""
        integers = [d.operation == "avg" and DTYPES[d.dtype].category in ("int", "bool") for d in self._descriptions]
        if any(integers):
            paths = list(self.index)
            for t in np.flatnonzero(np.array(integers)[self._description] & (self._description >= 0)).tolist():
                dtype = self._descriptions[self._description[t]].dtype
                yield f"{plain_key(paths[t])}: the average of {dtype} addends is not defined"

    def is_tensor(self, path: str) -> bool:
        """Whether a path is a tensor's on some rank."""
        t = self.index.get(path)
        return t is not None and self._description[t] >= 0 and not self._is_value[self._description[t]]

    def rank_of(self, path: str) -> int:
        """The global rank whose description of a tensor counts."""
        return self.ranks[self._first_rank[self.index[path]]]

    def merged(self, coordinator: int) -> tuple[GlobalState, HeldShards]:
        """The tensors in order, the values beside them, and all ranks' shards together."""
        order = [(path, t) for path, t in sorted(self.index.items()) if self._description[t] >= 0]
        paths, numbers = [path for path, _ in order], [t for _, t in order]
        place = np.full(len(self.index), -1, np.int64)  # of each path's number among the tensors, -1 for none
        place[numbers] = np.arange(len(order))
        described = [self._descriptions[n] for n in self._description[numbers].tolist()]
        is_plain = np.array([d.plain for d in self._descriptions], bool) & ~self._is_value
        keyed = paths + sorted(self._owner.keys() - set(paths))
        state = GlobalState(
            ranks=self.ranks,
            coordinator=coordinator,
            paths=paths,
            dtypes=[DTYPES[d.dtype] for d in described],
            kinds=[d.kind for d in described],
            shapes=[d.shape for d in described],
            names=[self._names[t] for t in numbers],
            value_paths=[[path for path, _ in structure.values] for structure in self._structures],
            value_owner=self._owner,
            keys=dict(zip(keyed, flat_keys(keyed), strict=True)),
            compared=[place[listed.tensor[is_plain[listed.description]]] for listed in self._lists],
        )
        return state, self._shards(place)

    def _shards(self, place: IntArray) -> HeldShards:
        """All ranks' shards; ``place`` has the number of each path's tensor, ``[paths]``."""
        dimensions = max([1, *(structure.dimensions for structure in self._structures)])
        plain = np.array([d.plain for d in self._descriptions], np.int64)
        addends = np.array([d.addends for d in self._descriptions], np.int64)
        parts = []
        for i, listed in enumerate(self._lists):
            tensor, places = self._mine(i)
            mine = np.full(len(listed.tensor), -1, np.int64)
            mine[places] = place[tensor]
            columns = plain[listed.description], addends[listed.description]
            parts.append(_shards_of(i, self._structures[i], mine, *columns, dimensions))
        return HeldShards.joined(parts)


def _comparable(said: Description) -> list[tuple[str, object]]:
    """What must be the same on all ranks, in the order in which a difference is worth telling."""
    return [
        ("shape", said.shape),
        ("dtype", said.dtype),
        ("plain", ("distributed", "plain")[said.plain]),
        ("kind", _KINDS[said.kind]),
        ("reduction", (said.operation, said.addends)),
    ]


def _shards_of(
    rank: int, structure: Structure, tensor: IntArray, plain: IntArray, addends: IntArray, dimensions: int
) -> HeldShards:
    """What one rank holds.

    Args:
        rank: Its position.
        structure: What it has said.
        tensor: The number of each of its tensors, -1 for those that it does not save, ``[listed]``.
        plain: Whether each is plain, ``[listed]``.
        addends: How many addends each has, ``[listed]``.
        dimensions: Of the boxes that come out.
    """
    width = structure.dimensions
    cells = unpack_signed(structure.cells, 2 * width + 1)
    counts = np.frombuffer(structure.shards.data, structure.shards.dtype).astype(np.int64)
    geometry = unpack_column(structure.geometry, len(tensor), max(1, len(counts)), "geometry")
    first = np.cumsum(counts) - counts
    per_tensor = counts[geometry]
    owner = np.repeat(np.arange(len(tensor)), per_tensor)
    cell = np.repeat(first[geometry], per_tensor) + places_within(per_tensor)
    rows = np.flatnonzero(tensor[owner] >= 0)
    owner, cell = owner[rows], cell[rows]
    return HeldShards(
        tensor=tensor[owner],
        rank=np.full(len(rows), rank, np.int64),
        row=rows,
        boxes=Boxes.joined([Boxes(cells[:, :width], cells[:, width:-1])], dimensions).take(cell),
        plain=plain[owner],
        addend=cells[cell, -1],
        addends=addends[owner],
    )


def _path_problems(tensors: _Merging, owner: dict[str, int], empty: set[str]) -> Iterator[str]:
    """Yields the paths that are a tensor here and a value there, or a leaf here and a container there.

    A container that is empty on one rank and filled on another is no such; its value is dropped from ``owner``.
    """
    for path, i in owner.items():
        if tensors.is_tensor(path):
            ranks = tensors.rank_of(path), tensors.ranks[i]
            yield f"{plain_key(path)}: a tensor on rank {ranks[0]}, a value on rank {ranks[1]}"
    leaves = tensors.index.keys() | owner.keys()
    for path in sorted(mixed_containers(leaves)):
        yield f"{plain_key(path)}: a dict on one rank, and on another a list, a tuple or ranks' own values"
    for container in sorted(containers_of(leaves) & leaves):
        if container in empty:
            del owner[container]
        else:
            yield f"{plain_key(container)}: a value or tensor on one rank, a container on another"
