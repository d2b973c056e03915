"""The coordinator's plan of a save, with all that follows from it and can be used again for an unchanged state."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.box import Box
from ..core.columns import IntArray, Mask, any_in_row, pack_column, pack_signed
from ..core.grouping import group_blocks
from ..core.layouts import Layout
from ..core.messages import encode
from ..core.shards import ShardTable
from ..planning.order import box_order
from ..planning.save_plan import HeldShards, SavePlan, plan_save
from ..tree.paths import plain_key
from .global_state import GlobalState
from .messages import ItemList, RankPlan, Transfer

__all__ = ["PlannedSave", "make_plan"]


@dataclass(slots=True, eq=False)
class PlannedSave:
    """A plan, and what it is right for: the ranks' fingerprints, and which of their plain tensors are equal.

    Attributes:
        plan_id: By which coordinator and ranks know that they mean the same plan; never 0.
        fingerprints: Digest of each rank's structure, by global rank.
        alike: Which plain tensors are divided among the ranks that have them, since they are equal, ``[tensors]``.
        state: What all ranks have, without the shards.
        plan: Who writes what.
        rank_plans: Each rank's encoded :class:`.messages.RankPlan`, by global rank.
        rank_items: How many items each rank writes, ``[ranks]``.
        rank_bytes: How many bytes, ``[ranks]``.
        shared: What is written of which others have copies, as numbers of the plan, ascending.
        copied: Of each of these copies which of ``shared`` it is of, rank by rank, ``[copies]``.
        copy_rank: The position of its rank, ``[copies]``.
        sampled: Counts the saves in which a part of the copies is compared: of this plan alone, so that states which
            are saved in turns each go through all parts; and from anywhere, so that those whose plans do not last do.
    """

    plan_id: int
    fingerprints: dict[int, bytes]
    alike: npt.NDArray[np.bool_]
    state: GlobalState
    plan: SavePlan
    rank_plans: dict[int, bytes]
    rank_items: IntArray
    rank_bytes: IntArray
    shared: IntArray
    copied: IntArray
    copy_rank: IntArray
    sampled: int = field(default_factory=lambda: secrets.randbits(16))
    _tables: dict[tuple[tuple[int, ...], ...], ShardTable] = field(default_factory=dict)

    def table(self, entries: tuple[tuple[int, ...], ...]) -> ShardTable:
        """The checkpoint's table, if the files of each rank have so many entries."""
        if entries not in self._tables:
            counts = [count for of_rank in entries for count in of_rank]
            self._tables = {entries: _table(self.state, self.plan, np.repeat(np.arange(len(counts)), counts))}
        return self._tables[entries]


def make_plan(
    state: GlobalState, shards: HeldShards, fingerprints: dict[int, bytes], alike: npt.NDArray[np.bool_]
) -> PlannedSave:
    """Plan a save.

    Args:
        state: What all ranks have.
        shards: Who has what of it.
        fingerprints: Digest of each rank's structure, by global rank.
        alike: Which plain tensors are equal on all ranks that have them, ``[tensors]``.

    Raises:
        UnsupportedValueError: what the ranks have does not make up whole tensors.
    """
    shards = replace(shards, plain=np.where(alike[shards.tensor], 0, shards.plain))
    plan = plan_save(state.tensors, shards, len(state.ranks), state.coordinator)
    kept = ~alike[plan.tensor[plan.copied]]  # the others are compared before
    plan = replace(plan, copied=plan.copied[kept], copies=plan.copies[kept])
    shared, copied = np.unique(plan.copied, return_inverse=True)
    bounds = np.searchsorted(plan.rank, np.arange(len(state.ranks) + 1))
    nbytes = plan.boxes.volumes * state.tensors.itemsize[plan.tensor]
    ends = np.concatenate([[0], np.cumsum(nbytes)]).astype(np.int64)
    return PlannedSave(
        plan_id=secrets.randbits(62) + 1,
        fingerprints=fingerprints,
        alike=alike,
        state=state,
        plan=plan,
        rank_plans=_rank_plans(state, shards, plan, bounds, shared, int(ends[-1])),
        rank_items=np.diff(bounds),
        rank_bytes=np.diff(ends[bounds]),
        shared=shared,
        copied=copied.reshape(-1).astype(np.int64),
        copy_rank=shards.rank[plan.copies],
    )


def _rank_plans(
    state: GlobalState, shards: HeldShards, plan: SavePlan, bounds: IntArray, shared: IntArray, total_bytes: int
) -> dict[int, bytes]:
    """Each rank's encoded :class:`.messages.RankPlan`, by global rank.

    What the ranks write begins in the plan at ``bounds``, ``[ranks + 1]``; of ``shared`` there are copies.
    """
    plain_keys = {path: key for path, key in state.keys.items() if key != plain_key(path)}
    values: dict[int, list[str]] = {}
    for path in sorted(state.value_owner.keys() - set(state.paths)):
        values.setdefault(state.value_owner[path], []).append(path)
    writers = sorted({*np.unique(plan.rank).tolist(), state.coordinator, *values})
    ends = np.searchsorted(shared, bounds).tolist()
    items = _WrittenItems.of(shards, plan, plan.shard, np.arange(len(plan.shard)))
    copied = _WrittenItems.of(shards, plan, plan.copies, plan.copied)
    of_copies = np.searchsorted(shards.rank[plan.copies], np.arange(len(state.ranks) + 1)).tolist()
    transfers = [_transfer(state, shards, *transfer) for transfer in plan.transfers]
    plans = {}
    for i, (rank, start, stop) in enumerate(zip(state.ranks, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        plans[rank] = encode(
            RankPlan(
                items=items.listed(start, stop),
                copied=pack_column(shared[ends[i] : ends[i + 1]] - start),
                copies=copied.listed(of_copies[i], of_copies[i + 1]),
                keys=plain_keys,
                values=values.get(i, []),
                transfers=transfers,
                total_bytes=total_bytes,
                writers=[state.ranks[w] for w in writers] if i == state.coordinator else None,
            )
        )
    return plans


class _WrittenItems(NamedTuple):
    """What is written, as it lies in shards of all ranks, rank by rank.

    ``row`` are the numbers of these shards among their ranks'; ``is_cut`` says of which a box is written that is not
    all of it, ``[n]`` both; ``written`` are the numbers of what is written.
    """

    row: IntArray
    is_cut: Mask
    written: IntArray
    plan: SavePlan

    @classmethod
    def of(cls, shards: HeldShards, plan: SavePlan, held: IntArray, written: IntArray) -> _WrittenItems:
        """What is ``written``, as it lies in the shards ``held``, ``[n]`` both."""
        shapes = shards.boxes.shape.take(held, axis=0), plan.boxes.shape.take(written, axis=0)
        return cls(shards.row[held], any_in_row(shapes[0] != shapes[1]), written, plan)

    def listed(self, start: int, stop: int) -> ItemList:
        """Those from ``start`` to ``stop``, which are one rank's."""
        cut = np.flatnonzero(self.is_cut[start:stop])
        return ItemList(
            row=pack_column(self.row[start:stop]),
            cut=pack_column(cut),
            dimensions=self.plan.boxes.dimensions,
            boxes=pack_signed(self.plan.boxes.take(self.written[start:stop][cut]).table if len(cut) else ()),
        )


def _transfer(state: GlobalState, shards: HeldShards, source: int, writer: int, box: Box) -> Transfer:
    ranks, rows = (column[[source, writer]].tolist() for column in (shards.rank, shards.row))
    nbytes = box.size * int(state.tensors.itemsize[shards.tensor[source]])
    return Transfer(state.ranks[ranks[0]], rows[0], state.ranks[ranks[1]], rows[1], box, nbytes)


def _table(state: GlobalState, plan: SavePlan, file: IntArray) -> ShardTable:
    """The checkpoint's table, ordered by tensor, then by offset; ``file`` has each written box's file, ``[written]``.

    Tensors that are cut alike share a layout.
    """
    order = box_order(state.tensors.shape, plan.tensor, plan.boxes)
    tensor, boxes = plan.tensor[order], plan.boxes.take(order)
    bounds = np.searchsorted(tensor, np.arange(len(state.paths) + 1))
    heads = np.column_stack([state.tensors.ndim, state.tensors.shape])
    first, layout_of = group_blocks(bounds, boxes.table, heads)
    layouts = []
    for t in first.tolist():
        mine = boxes.take(slice(int(bounds[t]), int(bounds[t + 1])))
        layouts.append(Layout(state.shapes[t], mine.first(len(state.shapes[t]))))
    kinds = np.array(state.kinds, np.int64)
    return ShardTable(state.paths, state.dtypes, kinds, layouts, layout_of, file[order], state.names)
