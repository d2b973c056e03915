"""Who writes what: replicas once, large replicated boxes divided, bytes balanced, the whole tensor covered exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..core.box import Box, subtract, whole
from ..core.columns import IntArray
from ..errors import UnsupportedValueError
from .cover import first_gap, tensors_covered
from .divide import HeldBoxes, divide
from .order import file_order, shard_order
from .overlap import overlapping_pairs

Mask = npt.NDArray[np.bool_]

__all__ = ["LocalShards", "SavePlan", "Tensors", "plan_save"]


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
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
class LocalShards:
    """What every rank holds: a row for each local shard, in columns of equal length.

    Attributes:
        tensor: Which tensor it is a shard of.
        rank: Position of the rank that holds it.
        row: Its number among that rank's local shards.
        offset: Where it starts, ``[n, d]``, padded with 0.
        shape: Its shape, ``[n, d]``, padded with 1.
        plain: Whether it is a plain tensor, which is whole and saved by one rank, not divided.
        addend: For a partial tensor its position among the addends, otherwise -1.
        addends: How many addends there are, 0 if the tensor is not partial.
    """

    tensor: IntArray
    rank: IntArray
    row: IntArray
    offset: IntArray
    shape: IntArray
    plain: IntArray
    addend: IntArray
    addends: IntArray

    def take(self, rows: IntArray) -> LocalShards:
        """Some of the rows."""
        return LocalShards(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """What is written: a row for each box, ordered by rank and as each rank's files hold them.

    Attributes:
        tensor: The tensor, ``[n]``.
        rank: Position of the rank that writes it.
        row: Which of that rank's local shards it is cut from.
        offset: Where it starts in the global tensor, ``[n, d]``.
        shape: Its shape, ``[n, d]``.
        transfers: For partial tensors, (source rank, source row, destination rank, destination row, box): the source
            sends its addend of the box to the destination, which adds it to its own. Ranks are positions.
    """

    tensor: IntArray
    rank: IntArray
    row: IntArray
    offset: IntArray
    shape: IntArray
    transfers: list[tuple[int, int, int, int, Box]]


def plan_save(tensors: Tensors, shards: LocalShards, ranks: int, coordinator: int) -> SavePlan:
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
    divided = _without_overlaps(tensors, divided, shards, chosen)
    fixed = np.zeros(ranks, np.int64)
    np.add.at(fixed, shards.rank[chosen], _bytes(tensors, shards.tensor[chosen], shards.shape[chosen]))
    nbytes = _bytes(tensors, divided.tensor, divided.shape)
    parts = [_whole_columns(shards, chosen), *divide(divided, nbytes, tensors.itemsize[divided.tensor], fixed)]
    tensor, rank, row, offset, shape = (np.concatenate([p[i] for p in parts]) for i in range(5))
    order = file_order(tensors.shape, tensors.itemsize, tensor, offset, rank)
    tensor, rank, row, offset, shape = (column[order] for column in (tensor, rank, row, offset, shape))
    transfers = _reductions(tensors, shards, tensor, rank, row, offset, shape)
    return SavePlan(tensor, rank, row, offset, shape, transfers)


def _bytes(tensors: Tensors, tensor: IntArray, shape: IntArray) -> IntArray:
    elements: IntArray = np.prod(shape, axis=1, dtype=np.int64)
    return elements * tensors.itemsize[tensor]


def _is_whole_kind(tensors: Tensors, shards: LocalShards) -> Mask:
    empty: Mask = (tensors.shape == 0).any(axis=1)
    whole_kind: Mask = (shards.plain != 0) | empty[shards.tensor]
    return whole_kind


def _divisible(tensors: Tensors, shards: LocalShards) -> IntArray:
    return np.flatnonzero(~_is_whole_kind(tensors, shards) & (shards.shape > 0).all(axis=1))


def _chosen_whole(tensors: Tensors, shards: LocalShards, coordinator: int) -> IntArray:
    """Rows that are saved whole: of each plain (or empty) tensor the coordinator's, else the lowest rank's."""
    rows = np.flatnonzero(_is_whole_kind(tensors, shards))
    preference = np.where(shards.rank[rows] == coordinator, -1, shards.rank[rows])
    rows = rows[np.lexsort((preference, shards.tensor[rows]))]
    first = np.concatenate([[True], shards.tensor[rows[1:]] != shards.tensor[rows[:-1]]]) if len(rows) else rows > 0
    chosen: IntArray = rows[first]
    return chosen


def _whole_columns(shards: LocalShards, rows: IntArray) -> tuple[IntArray, ...]:
    return shards.tensor[rows], shards.rank[rows], shards.row[rows], shards.offset[rows], shards.shape[rows]


def _different(tensors: Tensors, shards: LocalShards) -> HeldBoxes:
    """The different boxes of the shards, by tensor, offset and shape, each with its holders by rank."""
    order = shard_order(tensors.shape, shards.tensor, shards.offset, shards.shape, shards.rank)
    columns = (shards.tensor, shards.offset, shards.shape, shards.rank, shards.row)
    tensor, offset, shape, rank, row = (column[order] for column in columns)
    same = tensor[1:] == tensor[:-1]
    for column in (offset, shape):
        same &= (column[1:] == column[:-1]).all(axis=1)
    twice = same & (rank[1:] == rank[:-1])
    if twice.any():
        kept = np.flatnonzero(~np.concatenate([[False], twice]))
        tensor, offset, shape, rank, row = (column[kept] for column in (tensor, offset, shape, rank, row))
        same = same[~twice]
    starts = np.flatnonzero(np.concatenate([[True], ~same])) if len(tensor) else np.zeros(0, np.int64)
    first = np.append(starts, len(tensor))
    if len(starts) < len(tensor):
        tensor, offset, shape = tensor[starts], offset[starts], shape[starts]
    return HeldBoxes(tensor, offset, shape, np.arange(len(starts)), first, rank, row)


def _without_overlaps(tensors: Tensors, boxes: HeldBoxes, shards: LocalShards, chosen: IntArray) -> HeldBoxes:
    """The boxes, cut where they overlap, after checking that they cover every tensor."""
    count = len(tensors.names)
    exact = tensors_covered(boxes.tensor, boxes.offset, boxes.shape, tensors.shape)
    exact[shards.tensor[chosen]] = True
    if exact.all():
        return boxes
    problems: list[str] = []
    pieces: list[tuple[int, Box, int]] = []
    for t in np.flatnonzero(~exact).tolist():
        rows = np.flatnonzero(boxes.tensor == t)
        pieces += [(t, box, i) for box, i in _cut_tensor(tensors, t, boxes, rows, problems)]
    if problems:
        raise UnsupportedValueError("the shards do not make up their tensors:\n" + "\n".join(problems))
    return _replaced(boxes, exact[boxes.tensor], pieces, count)


def _cut_tensor(
    tensors: Tensors, t: int, boxes: HeldBoxes, rows: IntArray, problems: list[str]
) -> list[tuple[Box, int]]:
    """One tensor's boxes without their overlaps, the larger boxes kept whole; each with the row that it is from."""
    shape = tuple(tensors.shape[t].tolist())
    rows = rows[np.argsort(-np.prod(boxes.shape[rows], axis=1), kind="stable")]
    low, high = boxes.offset[rows], boxes.offset[rows] + boxes.shape[rows]
    name, ndim = tensors.names[t], int(tensors.ndim[t])
    if (low < 0).any() or (high > tensors.shape[t]).any():
        row = rows[((low < 0) | (high > tensors.shape[t])).any(axis=1)][0]
        where = Box(tuple(boxes.offset[row, :ndim].tolist()), tuple(boxes.shape[row, :ndim].tolist()))
        problems.append(f"{name}: the shard {where} reaches outside of the global shape {list(shape[:ndim])}")
        return []
    as_boxes = [Box(tuple(o), tuple(s)) for o, s in zip(low.tolist(), boxes.shape[rows].tolist(), strict=True)]
    earlier: list[list[int]] = [[] for _ in rows]
    for i, j in zip(*overlapping_pairs(low, high, low, high), strict=True):
        if j < i:
            earlier[i].append(int(j))
    kept: list[tuple[Box, int]] = []
    for i, box in enumerate(as_boxes):
        left = [box]
        for j in earlier[i]:
            left = [piece for part in left for piece in subtract(part, as_boxes[j])]
        kept += [(piece, int(rows[i])) for piece in left]
    missing = whole(shape).size - sum(box.size for box, _ in kept)
    gap = first_gap(whole(shape), [box for box, _ in kept]) if missing else None
    if gap is not None:
        where = Box(gap.offset[:ndim], gap.shape[:ndim])
        problems.append(f"{name}: no rank has the region {where} of the global shape {list(shape[:ndim])}")
    return kept


def _replaced(boxes: HeldBoxes, keep: Mask, pieces: list[tuple[int, Box, int]], count: int) -> HeldBoxes:
    rows = np.flatnonzero(keep)
    dimensions = boxes.offset.shape[1]
    offsets = np.array([box.offset for _, box, _ in pieces], np.int64).reshape(-1, dimensions)
    extents = np.array([box.shape for _, box, _ in pieces], np.int64).reshape(-1, dimensions)
    return HeldBoxes(
        np.concatenate([boxes.tensor[rows], np.array([t for t, _, _ in pieces], np.int64)]),
        np.concatenate([boxes.offset[rows], offsets]),
        np.concatenate([boxes.shape[rows], extents]),
        np.concatenate([boxes.source[rows], np.array([i for _, _, i in pieces], np.int64)]),
        boxes.first,
        boxes.member_rank,
        boxes.member_row,
    )


def _check_addends(
    tensors: Tensors, shards: LocalShards, holders: dict[tuple[int, ...], dict[int, list[tuple[int, int]]]]
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
    tensors: Tensors,
    shards: LocalShards,
    tensor: IntArray,
    rank: IntArray,
    row: IntArray,
    offset: IntArray,
    shape: IntArray,
) -> list[tuple[int, int, int, int, Box]]:
    """What the writers of partial tensors need from the ranks that hold the other addends."""
    partial = set(shards.tensor[shards.addend >= 0].tolist())
    if not partial:
        return []
    holders: dict[tuple[int, ...], dict[int, list[tuple[int, int]]]] = {}
    own: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
    for i in np.flatnonzero(shards.addend >= 0).tolist():
        key = (int(shards.tensor[i]), *shards.offset[i].tolist(), *shards.shape[i].tolist())
        addend, holder = int(shards.addend[i]), (int(shards.rank[i]), int(shards.row[i]))
        holders.setdefault(key, {}).setdefault(addend, []).append(holder)
        own[holder] = (key, addend)
    _check_addends(tensors, shards, holders)
    transfers = []
    for i in [i for i, t in enumerate(tensor.tolist()) if t in partial]:
        writer = (int(rank[i]), int(row[i]))
        key, mine = own[writer]
        ndim = int(tensors.ndim[tensor[i]])
        box = Box(tuple(offset[i, :ndim].tolist()), tuple(shape[i, :ndim].tolist()))
        for addend, candidates in sorted(holders[key].items()):
            if addend != mine:
                transfers.append((*min(candidates), *writer, box))
    return transfers
