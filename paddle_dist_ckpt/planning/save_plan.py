"""Who writes what: replicas once, large replicated boxes divided, bytes balanced, the whole tensor covered exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.box import Box, subtract, whole
from ..core.boxes import Boxes
from ..core.columns import IntArray, places_within, sums_by
from ..errors import UnsupportedValueError
from .cover import first_gap, tensors_covered
from .divide import HeldBoxes, divide
from .order import file_order, shard_order
from .overlap import overlapping_pairs

__all__ = ["GlobalTensors", "HeldShards", "SavePlan", "plan_save"]

_MOST_COPIES = 1 << 22  # that are compared with what is written


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
    """What every rank holds: a row for each local shard, rank by rank.

    Attributes:
        tensor: Which tensor it is a shard of, ``[n]``.
        rank: Position of the rank that holds it, ascending, ``[n]``.
        row: Its number among that rank's local shards, ``[n]``.
        boxes: Where it lies in the tensor.
        plain: Whether it is to be saved whole by one rank, as a plain tensor whose replicas may differ, ``[n]``.
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


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """What is written, ordered by rank and as each rank's files hold it.

    Attributes:
        tensor: The tensor of each box, ``[n]``.
        rank: Position of the rank that writes it, ``[n]``.
        shard: Which of the :class:`HeldShards` it is cut from, ``[n]``.
        boxes: The boxes.
        transfers: For partial tensors, (source, destination, box), the former two as rows of the :class:`HeldShards`:
            the rank that has the source sends its addend of the box to the other, which adds it to its own.
        copied: A box of which other ranks have copies that are not written, ``[copies]``.
        copies: Which of the :class:`HeldShards` has each such copy, ``[copies]``.
    """

    tensor: IntArray
    rank: IntArray
    shard: IntArray
    boxes: Boxes
    transfers: list[tuple[int, int, Box]]
    copied: IntArray
    copies: IntArray


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
    is_whole = (shards.plain != 0) | (tensors.shape == 0).any(axis=1)[shards.tensor]
    chosen = _chosen_whole(shards, np.flatnonzero(is_whole), coordinator)
    held = _different(tensors, shards, np.flatnonzero(~is_whole & shards.boxes.filled))
    held = _without_overlaps(tensors, shards, held, shards.tensor[chosen])
    saved_whole = shards.boxes.take(chosen)
    fixed = sums_by(shards.rank[chosen], saved_whole.volumes * tensors.itemsize[shards.tensor[chosen]], ranks)
    itemsize = tensors.itemsize[shards.tensor[held.shard[held.first]]]
    parts = [(chosen, saved_whole), *divide(held, held.boxes.volumes * itemsize, itemsize, fixed)]
    shard, boxes = np.concatenate([one for one, _ in parts]), Boxes.joined([part for _, part in parts])
    order = file_order(tensors.shape, tensors.itemsize, shards.tensor[shard], boxes, shards.rank[shard])
    shard, boxes = shard[order], boxes.take(order)
    transfers = _transfers(tensors, shards, shard, boxes)
    copied, copies = _copies(shards, held, shard)
    return SavePlan(shards.tensor[shard], shards.rank[shard], shard, boxes, transfers, copied, copies)


def _copies(shards: HeldShards, held: HeldBoxes, written: IntArray) -> tuple[IntArray, IntArray]:
    """The copies that others than the writers have of what is written of some shards, by the copies' ranks.

    Only shards of one box are copies of each other, and no addends. If there are very many copies, some are left out.

    Returns:
        The numbers of what is written, and which shards have a copy of each.
    """
    start, row = np.unique(held.first, return_index=True)
    several = held.count[row] > 1
    start, many = start[several], held.count[row][several]
    if not len(start):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    holder = held.shard[np.repeat(start, many) + places_within(many)]
    first, count = np.zeros(len(shards.tensor), np.int64), np.zeros(len(shards.tensor), np.int64)
    first[holder], count[holder] = np.repeat(start, many), np.repeat(many, many)
    count[shards.addend >= 0] = 0
    holders = count[written]
    some = np.minimum(holders, max(2, _MOST_COPIES // len(written)))
    copied = np.repeat(np.arange(len(written)), some)
    place = (places_within(some) + copied * some[copied]) % holders[copied]  # of other holders for each that is written
    copies = held.shard[first[written][copied] + place]
    others = np.flatnonzero(copies != written[copied])
    others = others[np.argsort(shards.rank[copies[others]], kind="stable")]
    return copied[others], copies[others]


def _chosen_whole(shards: HeldShards, rows: IntArray, coordinator: int) -> IntArray:
    """Of the rows one for each tensor: the coordinator's, else the lowest rank's."""
    rows = rows[np.argsort(shards.rank[rows] != coordinator, kind="stable")]
    chosen: IntArray = rows[np.unique(shards.tensor[rows], return_index=True)[1]]
    return chosen


def _different(tensors: GlobalTensors, shards: HeldShards, rows: IntArray) -> HeldBoxes:
    """The different boxes of some shards, by tensor, offset and shape, each with its holders by rank."""
    mine = shards.boxes.take(rows) if len(rows) < len(shards.tensor) else shards.boxes
    shard = rows[shard_order(tensors.shape, shards.tensor[rows], mine)]
    tensor, rank, boxes = shards.tensor[shard], shards.rank[shard], shards.boxes.take(shard)
    fresh = np.ones(len(shard), bool)
    fresh[1:] = (tensor[1:] != tensor[:-1]) | ~boxes.same_as_before()
    kept = fresh.copy()
    kept[1:] |= rank[1:] != rank[:-1]  # else one rank has a box twice
    first = np.flatnonzero(fresh[kept])
    count = np.diff(first, append=np.count_nonzero(kept))
    return HeldBoxes(boxes.take(np.flatnonzero(fresh)), first, count, shard[kept], rank[kept])


def _without_overlaps(tensors: GlobalTensors, shards: HeldShards, held: HeldBoxes, saved_whole: IntArray) -> HeldBoxes:
    """The boxes, cut where they overlap, after checking that they cover every tensor but those that are saved whole."""
    tensor = shards.tensor[held.shard[held.first]]
    exact = tensors_covered(tensor, held.boxes, tensors.shape)
    exact[saved_whole] = True
    if exact.all():
        return held
    problems: list[str] = []
    cut: list[tuple[Box, int]] = []
    for t in np.flatnonzero(~exact).tolist():
        cut += _cut_tensor(tensors, t, held.boxes, np.flatnonzero(tensor == t), problems)
    if problems:
        raise UnsupportedValueError("the shards do not make up their tensors:\n" + "\n".join(problems))
    kept = np.flatnonzero(exact[tensor])
    pieces = Boxes.of([box for box, _ in cut], held.boxes.dimensions)
    rows = np.concatenate([kept, np.array([row for _, row in cut], np.int64)])
    boxes = Boxes.joined([held.boxes.take(kept), pieces])
    return replace(held, boxes=boxes, first=held.first[rows], count=held.count[rows])


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


def _transfers(
    tensors: GlobalTensors, shards: HeldShards, written: IntArray, boxes: Boxes
) -> list[tuple[int, int, Box]]:
    """What the writers of partial tensors need from the ranks that hold the other addends.

    Args:
        tensors: The global tensors.
        shards: All ranks' local shards.
        written: The shards that written boxes are cut from, ``[n]``.
        boxes: These boxes.
    """
    holders: dict[tuple[int, Box], dict[int, int]] = {}  # by addend
    for i in np.flatnonzero(shards.addend >= 0).tolist():
        addends = holders.setdefault((int(shards.tensor[i]), shards.boxes.box(i)), {})
        addends.setdefault(int(shards.addend[i]), i)
    problems = [
        f"{tensors.names[t]}: is partial over {count} addends, of which only {sorted(addends)} are here"
        for (t, _), addends in holders.items()
        if (count := int(shards.addends[min(addends.values())])) != len(addends)
    ]
    if problems:
        raise UnsupportedValueError("partial tensors are not complete in this group:\n" + "\n".join(problems))
    transfers = []
    for i in np.flatnonzero(shards.addend[written] >= 0).tolist():
        writer = int(written[i])
        t, mine = int(shards.tensor[writer]), int(shards.addend[writer])
        box = boxes.box(i, int(tensors.ndim[t]))
        sources = sorted(holders[t, shards.boxes.box(writer)].items())
        transfers += [(source, writer, box) for addend, source in sources if addend != mine]
    return transfers
