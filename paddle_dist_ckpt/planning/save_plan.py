"""Who writes what: replicas once, large replicated boxes divided, bytes balanced, the whole tensor covered exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.box import Box, subtract, whole
from ..core.boxes import Boxes, Mask
from ..core.columns import IntArray
from ..errors import UnsupportedValueError
from .cover import first_gap, tensors_covered
from .divide import HeldBoxes, WrittenBoxes, divide
from .order import file_order, shard_order
from .overlap import overlapping_pairs

__all__ = ["GlobalTensors", "HeldShards", "SavePlan", "plan_save"]


@dataclass(frozen=True, slots=True, eq=False)
class GlobalTensors:
    """The global tensors, in ascending order of their paths.

    Attributes:
        names: What to call each in an error.
        itemsize: Bytes of an element, ``[tensors]``.
        ndim: Dimensions, ``[tensors]``.
        shape: Global shapes, ``[tensors, d]``, padded with 1 behind.
    """

    names: Sequence[str]
    itemsize: IntArray
    ndim: IntArray
    shape: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class HeldShards:
    """What every rank holds: a row for each local shard.

    Attributes:
        tensor: Which tensor it is a shard of, ``[n]``.
        rank: Position of the rank that holds it, ``[n]``.
        row: Its number among that rank's local shards, ``[n]``.
        boxes: Where it lies in the tensor.
        plain: Whether it is a plain tensor, which is whole and saved by one rank, not divided, ``[n]``.
        addend: For a partial tensor its position among the addends, otherwise -1, ``[n]``.
        addends: How many addends there are, 0 if the tensor is not partial, ``[n]``.
    """

    tensor: IntArray
    rank: IntArray
    row: IntArray
    boxes: Boxes
    plain: IntArray
    addend: IntArray
    addends: IntArray

    def take(self, rows: IntArray) -> HeldShards:
        """Some of the rows."""
        return HeldShards(
            self.tensor[rows],
            self.rank[rows],
            self.row[rows],
            self.boxes.take(rows),
            self.plain[rows],
            self.addend[rows],
            self.addends[rows],
        )

    @classmethod
    def joined(cls, parts: Sequence[HeldShards]) -> HeldShards:
        """Several, one behind the other."""
        columns = {name: np.concatenate([getattr(p, name) for p in parts]) for name in cls.__slots__ if name != "boxes"}
        return cls(boxes=Boxes.joined([part.boxes for part in parts]), **columns)


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """What is written, ordered by rank and as each rank's files hold it.

    Attributes:
        written: The boxes, and who writes them.
        transfers: For partial tensors, (source rank, source row, destination rank, destination row, box): the source
            sends its addend of the box to the destination, which adds it to its own. Ranks are positions.
    """

    written: WrittenBoxes
    transfers: list[tuple[int, int, int, int, Box]]


def plan_save(tensors: GlobalTensors, shards: HeldShards, ranks: int, coordinator: int) -> SavePlan:
    """Decide which rank writes which box, so that every byte of every tensor is written exactly once.

    Args:
        tensors: The global tensors.
        shards: All ranks' local shards.
        ranks: How many ranks there are.
        coordinator: The coordinator's position among them.

    Raises:
        UnsupportedValueError: shards that reach outside their tensor or leave a part of it uncovered. Lists them all.
    """
    chosen = _chosen_whole(tensors, shards, coordinator)
    kept = _divisible(tensors, shards)
    divided = _different(tensors, shards if len(kept) == len(shards.tensor) else shards.take(kept))
    divided = _without_overlaps(tensors, divided, shards.tensor[chosen])
    saved_whole = WrittenBoxes(
        shards.tensor[chosen], shards.rank[chosen], shards.row[chosen], shards.boxes.take(chosen)
    )
    fixed = np.zeros(ranks, np.int64)
    np.add.at(fixed, saved_whole.rank, saved_whole.boxes.volumes * tensors.itemsize[saved_whole.tensor])
    itemsize = tensors.itemsize[divided.tensor]
    written = WrittenBoxes.joined([saved_whole, *divide(divided, divided.boxes.volumes * itemsize, itemsize, fixed)])
    written = written.take(file_order(tensors.shape, tensors.itemsize, written.tensor, written.boxes, written.rank))
    return SavePlan(written, _reductions(tensors, shards, written))


def _is_whole_kind(tensors: GlobalTensors, shards: HeldShards) -> Mask:
    empty: Mask = (tensors.shape == 0).any(axis=1)
    whole_kind: Mask = (shards.plain != 0) | empty[shards.tensor]
    return whole_kind


def _divisible(tensors: GlobalTensors, shards: HeldShards) -> IntArray:
    return np.flatnonzero(~_is_whole_kind(tensors, shards) & shards.boxes.filled)


def _chosen_whole(tensors: GlobalTensors, shards: HeldShards, coordinator: int) -> IntArray:
    """Rows that are saved whole: of each plain (or empty) tensor the coordinator's, else the lowest rank's."""
    rows = np.flatnonzero(_is_whole_kind(tensors, shards))
    preference = np.where(shards.rank[rows] == coordinator, -1, shards.rank[rows])
    rows = rows[np.lexsort((preference, shards.tensor[rows]))]
    first = np.concatenate([[True], shards.tensor[rows[1:]] != shards.tensor[rows[:-1]]]) if len(rows) else rows > 0
    chosen: IntArray = rows[first]
    return chosen


def _different(tensors: GlobalTensors, shards: HeldShards) -> HeldBoxes:
    """The different boxes of the shards, by tensor, offset and shape, each with its holders by rank."""
    order = shard_order(tensors.shape, shards.tensor, shards.boxes, shards.rank)
    tensor, rank, row, boxes = shards.tensor[order], shards.rank[order], shards.row[order], shards.boxes.take(order)
    same = (tensor[1:] == tensor[:-1]) & boxes.same_as_before()
    twice = same & (rank[1:] == rank[:-1])  # one rank has a box twice
    if twice.any():
        kept = np.flatnonzero(~np.concatenate([[False], twice]))
        tensor, rank, row, boxes = tensor[kept], rank[kept], row[kept], boxes.take(kept)
        same = same[~twice]
    starts = np.flatnonzero(np.concatenate([[True], ~same])) if len(tensor) else np.zeros(0, np.int64)
    first = np.append(starts, len(tensor))
    if len(starts) < len(tensor):
        tensor, boxes = tensor[starts], boxes.take(starts)
    return HeldBoxes(tensor, boxes, np.arange(len(starts)), first, rank, row)


def _without_overlaps(tensors: GlobalTensors, held: HeldBoxes, saved_whole: IntArray) -> HeldBoxes:
    """The boxes, cut where they overlap, after checking that they cover every tensor but those that are saved whole."""
    exact = tensors_covered(held.tensor, held.boxes, tensors.shape)
    exact[saved_whole] = True
    if exact.all():
        return held
    problems: list[str] = []
    cut: list[tuple[int, Box, int]] = []
    for t in np.flatnonzero(~exact).tolist():
        rows = np.flatnonzero(held.tensor == t)
        cut += [(t, box, i) for box, i in _cut_tensor(tensors, t, held.boxes, rows, problems)]
    if problems:
        raise UnsupportedValueError("the shards do not make up their tensors:\n" + "\n".join(problems))
    return _replaced(held, np.flatnonzero(exact[held.tensor]), cut)


def _cut_tensor(
    tensors: GlobalTensors, t: int, boxes: Boxes, rows: IntArray, problems: list[str]
) -> list[tuple[Box, int]]:
    """One tensor's boxes without their overlaps, the larger boxes kept whole; each with the row that it is from."""
    region, name, ndim = whole(tensors.shape[t].tolist()), tensors.names[t], int(tensors.ndim[t])
    rows = rows[np.argsort(-boxes.take(rows).volumes, kind="stable")]
    mine = boxes.take(rows)
    outside = ((mine.offset < 0) | (mine.high > tensors.shape[t])).any(axis=1)
    if outside.any():
        where = mine.box(int(np.argmax(outside)), ndim)
        problems.append(f"{name}: the shard {where} reaches outside of the global shape {list(region.shape[:ndim])}")
        return []
    as_boxes = mine.to_list()
    earlier: list[list[int]] = [[] for _ in as_boxes]
    for i, j in zip(*overlapping_pairs(mine, mine), strict=True):
        if j < i:
            earlier[i].append(int(j))
    kept: list[tuple[Box, int]] = []
    for i, box in enumerate(as_boxes):
        left = [box]
        for j in earlier[i]:
            left = [rest for part in left for rest in subtract(part, as_boxes[j])]
        kept += [(rest, int(rows[i])) for rest in left]
    missing = region.size - sum(box.size for box, _ in kept)
    gap = first_gap(region, [box for box, _ in kept]) if missing else None
    if gap is not None:
        where = Box(gap.offset[:ndim], gap.shape[:ndim])
        problems.append(f"{name}: no rank has the region {where} of the global shape {list(region.shape[:ndim])}")
    return kept


def _replaced(held: HeldBoxes, kept: IntArray, cut: list[tuple[int, Box, int]]) -> HeldBoxes:
    """Some of the boxes, and others: (tensor, box, the row that it was cut from) of each."""
    tensor, source = (np.array([one[i] for one in cut], np.int64) for i in (0, 2))
    return replace(
        held,
        tensor=np.concatenate([held.tensor[kept], tensor]),
        boxes=Boxes.joined([held.boxes.take(kept), Boxes.of([box for _, box, _ in cut], held.boxes.dimensions)]),
        source=np.concatenate([held.source[kept], source]),
    )


def _check_addends(
    tensors: GlobalTensors, shards: HeldShards, holders: dict[tuple[int, Box], dict[int, list[tuple[int, int]]]]
) -> None:
    counts = dict(zip(shards.tensor.tolist(), shards.addends.tolist(), strict=True))
    problems = [
        f"{tensors.names[key[0]]}: is partial over {counts[key[0]]} addends, of which only {sorted(addends)} are here"
        for key, addends in holders.items()
        if len(addends) != counts[key[0]]
    ]
    if problems:
        raise UnsupportedValueError("partial tensors are not complete in this group:\n" + "\n".join(problems))


def _reductions(
    tensors: GlobalTensors, shards: HeldShards, written: WrittenBoxes
) -> list[tuple[int, int, int, int, Box]]:
    """What the writers of partial tensors need from the ranks that hold the other addends."""
    partial = set(shards.tensor[shards.addend >= 0].tolist())
    if not partial:
        return []
    holders: dict[tuple[int, Box], dict[int, list[tuple[int, int]]]] = {}
    own: dict[tuple[int, int], tuple[tuple[int, Box], int]] = {}
    for i in np.flatnonzero(shards.addend >= 0).tolist():
        key = (int(shards.tensor[i]), shards.boxes.box(i))
        addend, holder = int(shards.addend[i]), (int(shards.rank[i]), int(shards.row[i]))
        holders.setdefault(key, {}).setdefault(addend, []).append(holder)
        own[holder] = (key, addend)
    _check_addends(tensors, shards, holders)
    transfers = []
    for i in [i for i, t in enumerate(written.tensor.tolist()) if t in partial]:
        writer = (int(written.rank[i]), int(written.row[i]))
        key, mine = own[writer]
        box = written.boxes.box(i, int(tensors.ndim[key[0]]))
        for addend, candidates in sorted(holders[key].items()):
            if addend != mine:
                transfers.append((*min(candidates), *writer, box))
    return transfers
