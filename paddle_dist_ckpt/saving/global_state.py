"""Puts together what the ranks of a save have, and checks that it fits together.

What stays the same from save to save (:func:`merge_structures`) is kept apart from what does not
(:func:`merge_contents`), so that a second save of the same state can skip the former.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.boxes import Boxes
from ..core.columns import IntArray, places_within, unpack_column, unpack_signed
from ..core.dtypes import DTYPES, DType
from ..core.messages import decode
from ..core.shards import Kind
from ..errors import UnsupportedValueError
from ..planning.save_plan import HeldShards
from ..tree.paths import containers_of, flat_keys, mixed_containers, plain_key
from .messages import Description, SaveRequest, Structure, TensorList, ValueRecord

__all__ = ["Contents", "GlobalState", "check_arguments", "merge_contents", "merge_structures"]

_KINDS = ("a tensor", "a numpy array", "a value")


@dataclass(slots=True)
class GlobalState:
    """What all ranks together have. Tensors are in ascending order of their paths.

    Attributes:
        ranks: The global ranks, ascending; everywhere else ranks are positions in it.
        paths, dtypes, kinds, shapes, names: The tensors.
        value_paths: For each rank the paths of its values.
        value_owner: Which rank's value is kept, by path.
        shards: All ranks' shards.
        keys: Flat key of each path.
        compared: For each rank its plain tensors, whose digests it sends, in order.
    """

    ranks: tuple[int, ...]
    coordinator: int
    paths: list[str] = field(default_factory=list)
    dtypes: list[DType] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    value_paths: list[list[str]] = field(default_factory=list)
    value_owner: dict[str, int] = field(default_factory=dict)
    shards: HeldShards | None = None
    keys: dict[str, str] = field(default_factory=dict)
    compared: list[IntArray] = field(default_factory=list)

    @property
    def coordinator_first(self) -> list[int]:
        """The ranks in the order in which they have the say where replicas differ."""
        return [self.coordinator, *(i for i in range(len(self.ranks)) if i != self.coordinator)]


@dataclass(frozen=True, slots=True)
class Contents:
    """What may be another in each save.

    Attributes:
        value_json: The small values that are kept, by path.
        differing: For each path whose replicas are not equal the ranks that differ from the one that is saved.
    """

    value_json: dict[str, bytes]
    differing: dict[str, list[int]]


def check_arguments(requests: Mapping[int, SaveRequest], coordinator: int) -> None:
    """All ranks must have passed the same arguments.

    Raises:
        ValueError: they did not.
    """
    ours = requests[coordinator]
    for rank, request in sorted(requests.items()):
        if request.unique_id != ours.unique_id:
            raise ValueError(
                f"rank {rank} passed unique_id={request.unique_id}, rank {coordinator} unique_id={ours.unique_id}; "
                "all ranks must pass the same"
            )
        if request.block_bytes != ours.block_bytes:
            raise ValueError(
                f"rank {rank} passed block_bytes={request.block_bytes}, rank {coordinator} {ours.block_bytes}; "
                "all ranks must pass the same"
            )


def merge_structures(structures: Mapping[int, bytes], coordinator: int) -> GlobalState:
    """Put together what the ranks have, and check that it fits.

    Takes time in O(shards), and in O(tensors) for each different :class:`TensorList` among the ranks.

    Args:
        structures: Every rank's encoded :class:`Structure`, by global rank.
        coordinator: The coordinator's global rank.

    Raises:
        UnsupportedValueError: tensors or values of one key that contradict each other. Lists them all.
    """
    ranks = tuple(sorted(structures))
    state = GlobalState(ranks, ranks.index(coordinator))
    decoded = [decode(structures[rank], Structure) for rank in ranks]
    empty = _merge_values(state, decoded)
    merging = _Merging(state, decoded)
    merging.compare()
    problems = merging.problems
    _check_paths(state, merging, empty, problems)
    if problems:
        raise UnsupportedValueError("the ranks' state_dicts do not fit together:\n" + "\n".join(problems))
    merging.finish()
    values = sorted(path for path in state.value_owner if path not in merging.index)
    paths = state.paths + values
    state.keys = dict(zip(paths, flat_keys(paths), strict=True))
    return state


def _merge_values(state: GlobalState, structures: Sequence[Structure]) -> set[str]:
    """Of each value keep the coordinator's, or else the lowest rank's that has it; returns those that are empty
    containers on every rank that has them."""
    state.value_paths = [[path for path, _ in structure.values] for structure in structures]
    empty: dict[str, bool] = {}
    for i in state.coordinator_first:
        for path, is_empty in structures[i].values:
            state.value_owner.setdefault(path, i)
            empty[path] = is_empty and empty.get(path, True)
    return {path for path, is_empty in empty.items() if is_empty}


@dataclass(frozen=True, slots=True, eq=False)
class _List:
    """A decoded :class:`TensorList`: the number of each tensor among all, and its description's number."""

    tensor: IntArray
    description: IntArray
    names: list[str | None]


class _Merging:
    """Gives every path and every description a number, and compares what the ranks say of a path.

    Attributes:
        index: The number of each path, in the order in which they are met.
        problems: What does not fit.
    """

    def __init__(self, state: GlobalState, structures: Sequence[Structure]) -> None:
        self._state, self._structures = state, structures
        self.index: dict[str, int] = {}
        self.problems: list[str] = []
        self._numbers: dict[Description, int] = {}
        known: dict[bytes, _List] = {}
        for structure in structures:
            if structure.tensors not in known:
                known[structure.tensors] = self._decoded(decode(structure.tensors, TensorList))
        self._lists = [known[structure.tensors] for structure in structures]
        self._descriptions = list(self._numbers)
        self._is_value = np.array([d.kind == Kind.VALUE for d in self._descriptions], bool)
        self._owner = np.full(len(self.index), -1, np.int64)
        for path, owner in state.value_owner.items():
            if path in self.index:
                self._owner[self.index[path]] = owner
        self._description = np.full(len(self.index), -1, np.int64)
        self._first_rank = np.zeros(len(self.index), np.int64)
        self._names: list[str | None] = [None] * len(self.index)

    def _decoded(self, listed: TensorList) -> _List:
        count = len(listed.paths)
        index = self.index
        tensor = np.array([index.setdefault(path, len(index)) for path in listed.paths], np.int64)
        numbers = [self._numbers.setdefault(d, len(self._numbers)) for d in listed.descriptions]
        description = unpack_column(listed.description, count, max(1, len(numbers)), "description")
        return _List(tensor, np.array(numbers, np.int64)[description], list(listed.names))

    def _mine(self, i: int) -> tuple[IntArray, IntArray]:
        """A rank's tensors without the values that another rank saves: their numbers, and their places in its list."""
        listed = self._lists[i]
        foreign = self._is_value[listed.description] & (self._owner[listed.tensor] != i)
        places = np.flatnonzero(~foreign)
        return listed.tensor[places], places

    def compare(self) -> None:
        """Compare all descriptions of each tensor with the first: the coordinator's, or else the lowest rank's."""
        for i in self._state.coordinator_first:
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
                self._explain(int(tensor[k]), int(description[k]), i)
        self._check_averages()

    def _explain(self, tensor: int, other: int, rank: int) -> None:
        path = next(path for path, t in self.index.items() if t == tensor)
        first, second = self._descriptions[self._description[tensor]], self._descriptions[other]
        ranks = self._state.ranks
        for what, mine, others in _comparable(first, second):
            if mine != others:
                where = ranks[self._first_rank[tensor]], ranks[rank]
                self.problems.append(
                    f"{plain_key(path)}: {what} is {mine} on rank {where[0]}, {others} on rank {where[1]}"
                )
                return

    def _check_averages(self) -> None:
        integers = [d.operation == "avg" and DTYPES[d.dtype].category in ("int", "bool") for d in self._descriptions]
        if any(integers):
            bad = np.flatnonzero(np.array(integers)[self._description] & (self._description >= 0)).tolist()
            paths = list(self.index)
            dtypes = [self._descriptions[self._description[t]].dtype for t in bad]
            self.problems += [
                f"{plain_key(paths[t])}: the average of {dtype} addends is not defined"
                for t, dtype in zip(bad, dtypes, strict=True)
            ]

    def is_tensor(self, path: str) -> bool:
        """Whether a path is a tensor's on some rank."""
        t = self.index.get(path)
        return t is not None and self._description[t] >= 0 and not self._is_value[self._description[t]]

    def rank_of(self, path: str) -> int:
        """The global rank whose description of a tensor counts."""
        return self._state.ranks[self._first_rank[self.index[path]]]

    def finish(self) -> None:
        """Put the tensors in order, and all ranks' shards together."""
        state = self._state
        kept = self._description >= 0
        order = [(path, t) for path, t in sorted(self.index.items()) if kept[t]]
        place = np.full(len(self.index), -1, np.int64)
        place[[t for _, t in order]] = np.arange(len(order))
        numbers = self._description[[t for _, t in order]].tolist()
        state.paths = [path for path, _ in order]
        state.names = [self._names[t] for _, t in order]
        state.dtypes = [DTYPES[self._descriptions[n].dtype] for n in numbers]
        state.kinds = [self._descriptions[n].kind for n in numbers]
        state.shapes = [self._descriptions[n].shape for n in numbers]
        self.index = {path: i for i, path in enumerate(state.paths)}
        is_plain = np.array([d.plain for d in self._descriptions], bool) & ~self._is_value
        state.compared = [place[listed.tensor[is_plain[listed.description]]] for listed in self._lists]
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
        state.shards = HeldShards.joined(parts)


def _comparable(first: Description, second: Description) -> list[tuple[str, object, object]]:
    words = ("distributed", "plain")
    return [
        ("shape", first.shape, second.shape),
        ("dtype", first.dtype, second.dtype),
        ("plain", words[first.plain], words[second.plain]),
        ("kind", _KINDS[first.kind], _KINDS[second.kind]),
        ("reduction", (first.operation, first.addends), (second.operation, second.addends)),
    ]


def _shards_of(
    rank: int, structure: Structure, tensor: IntArray, plain: IntArray, addends: IntArray, dimensions: int
) -> HeldShards:
    """One rank's pieces as shards; ``tensor`` has the number of each of its tensors, -1 for those it does not save."""
    width = structure.dimensions
    cells = unpack_signed(structure.cells, 2 * width + 1)
    counts = np.frombuffer(structure.pieces.data, structure.pieces.dtype).astype(np.int64)
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


def _check_paths(state: GlobalState, merging: _Merging, empty: Collection[str], problems: list[str]) -> None:
    """No path may be a tensor here and a value there, or a leaf here and a container there."""
    problems += [
        f"{plain_key(path)}: a tensor on rank {merging.rank_of(path)}, a value on rank {state.ranks[owner]}"
        for path, owner in state.value_owner.items()
        if merging.is_tensor(path)
    ]
    leaves = set(merging.index) | set(state.value_owner)
    problems += [
        f"{plain_key(path)}: a dict on one rank, and on another a list, a tuple or ranks' own values"
        for path in sorted(mixed_containers(leaves))
    ]
    for container in sorted(containers_of(leaves) & leaves):
        if container in empty:  # an empty container on one rank, a filled one on another
            del state.value_owner[container]
        else:
            problems.append(f"{plain_key(container)}: a value or tensor on one rank, a container on another")


def merge_contents(state: GlobalState, requests: Mapping[int, SaveRequest]) -> Contents:
    """The values that are kept, and the replicas that differ."""
    ordered = [requests[rank] for rank in state.ranks]
    value_json: dict[str, bytes] = {}
    differing: dict[str, list[int]] = {}
    kept: dict[str, ValueRecord] = {}
    seen = np.zeros(len(state.paths), np.uint64)
    for i in state.coordinator_first:
        for path, value in zip(state.value_paths[i], ordered[i].values, strict=True):
            first = kept.setdefault(path, value)
            if first is value:
                if value.json is not None and path in state.value_owner:
                    value_json[path] = value.json
            elif value.digest != first.digest:
                differing.setdefault(path, []).append(state.ranks[i])
        digests = np.frombuffer(ordered[i].digests, "<u8")
        if len(digests):  # none: that rank was not to compare
            tensor = state.compared[i]
            fresh = seen[tensor] == 0
            seen[tensor[fresh]] = digests[fresh]
            for t in tensor[seen[tensor] != digests].tolist():
                differing.setdefault(state.paths[t], []).append(state.ranks[i])
    return Contents(value_json, differing)
