"""The coordinator's plan of a save, with all that follows from it and can be used again for an unchanged state."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..core.box import Box
from ..core.boxes import Mask
from ..core.columns import IntArray, pack_column, pack_signed
from ..core.grouping import group_blocks
from ..core.messages import encode
from ..core.shards import Layout, ShardTable
from ..planning.divide import WrittenBoxes
from ..planning.order import box_order
from ..planning.save_plan import GlobalTensors, HeldShards, SavePlan, plan_save
from ..tree.paths import plain_key
from .global_state import GlobalState, merge_structures
from .messages import RankPlan, Transfer

__all__ = ["PlannedSave", "make_plan"]


@dataclass(slots=True, eq=False)
class PlannedSave:
    """A plan, and the ranks' fingerprints for which it is right.

    Attributes:
        plan_id: By which coordinator and ranks know that they mean the same plan; never 0.
        fingerprints: Digest of each rank's structure, by global rank.
        state: What all ranks have, without the shards.
        plan: Who writes what.
        rank_plans: Each rank's encoded :class:`.messages.RankPlan`, by global rank.
        rank_items: How many items each rank writes, ``[ranks]``.
        rank_bytes: How many bytes, ``[ranks]``.
    """

    plan_id: int
    fingerprints: dict[int, bytes]
    state: GlobalState
    plan: SavePlan
    rank_plans: dict[int, bytes]
    rank_items: IntArray
    rank_bytes: IntArray
    _tables: dict[tuple[tuple[int, ...], ...], ShardTable] = field(default_factory=dict)

    def table(self, entries: tuple[tuple[int, ...], ...]) -> ShardTable:
        """The checkpoint's table, if the files of each rank have so many entries."""
        if entries not in self._tables:
            counts = [count for of_rank in entries for count in of_rank]
            self._tables = {entries: _table(self.state, self.plan, np.repeat(np.arange(len(counts)), counts))}
        return self._tables[entries]


def make_plan(structures: Mapping[int, bytes], fingerprints: dict[int, bytes], coordinator: int) -> PlannedSave:
    """Plan a save.

    Args:
        structures: Every rank's encoded :class:`.messages.Structure`, by global rank.
        fingerprints: Their digests.
        coordinator: The coordinator's global rank.

    Raises:
        UnsupportedValueError: what the ranks have does not fit together, or does not make up whole tensors.
    """
    state, shards = merge_structures(structures, coordinator)
    plan = plan_save(_tensors(state, shards.boxes.dimensions), shards, len(state.ranks), state.coordinator)
    itemsizes = np.array([dtype.itemsize for dtype in state.dtypes], np.int64)
    written = plan.written
    nbytes = written.boxes.volumes * itemsizes[written.tensor]
    bounds = np.searchsorted(written.rank, np.arange(len(state.ranks) + 1))
    ends = np.concatenate([[0], np.cumsum(nbytes)]).astype(np.int64)
    return PlannedSave(
        plan_id=secrets.randbits(62) + 1,
        fingerprints=fingerprints,
        state=state,
        plan=plan,
        rank_plans=_rank_plans(state, shards, plan, bounds, int(ends[-1])),
        rank_items=np.diff(bounds),
        rank_bytes=np.diff(ends[bounds]),
    )


def _tensors(state: GlobalState, dimensions: int) -> GlobalTensors:
    padded = {shape: (*shape, *(1,) * (dimensions - len(shape))) for shape in set(state.shapes)}
    return GlobalTensors(
        [state.keys[path] for path in state.paths],
        np.array([dtype.itemsize for dtype in state.dtypes], np.int64),
        np.array([len(shape) for shape in state.shapes], np.int64),
        np.array([padded[shape] for shape in state.shapes], np.int64).reshape(-1, dimensions),
    )


def _rank_plans(
    state: GlobalState, shards: HeldShards, plan: SavePlan, bounds: IntArray, total_bytes: int
) -> dict[int, bytes]:
    """Each rank's part of the plan.

    Args:
        state: What is saved.
        shards: Who holds what of it.
        plan: Who writes what, rank by rank.
        bounds: Where what each rank writes begins in the plan, and at last where it ends, ``[ranks + 1]``.
        total_bytes: What all write together.

    Returns:
        An encoded :class:`.messages.RankPlan` by global rank.
    """
    plain_keys = {path: key for path, key in state.keys.items() if key != plain_key(path)}
    transfers = [_transfer(state, shards, *transfer) for transfer in plan.transfers]
    values: dict[int, list[str]] = {}
    tensors = set(state.paths)
    for path in sorted(path for path in state.value_owner if path not in tensors):
        values.setdefault(state.value_owner[path], []).append(path)
    written = plan.written
    writers = sorted({*np.unique(written.rank).tolist(), state.coordinator, *values})
    is_cut = _is_cut(shards, written)
    plans = {}
    for i, (rank, start, stop) in enumerate(zip(state.ranks, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        cut = np.flatnonzero(is_cut[start:stop])
        plans[rank] = encode(
            RankPlan(
                row=pack_column(written.row[start:stop]),
                cut=pack_column(cut),
                dimensions=written.boxes.dimensions,
                boxes=pack_signed(written.boxes.take(start + cut).table),
                keys=plain_keys,
                values=values.get(i, []),
                transfers=transfers,
                total_bytes=total_bytes,
                writers=[state.ranks[w] for w in writers] if i == state.coordinator else None,
            )
        )
    return plans


def _is_cut(shards: HeldShards, written: WrittenBoxes) -> Mask:
    """Whether each written box is only a part of the local shard that it is from, ``[written]``."""
    ranks = int(max(shards.rank.max(initial=-1), written.rank.max(initial=-1))) + 1
    most = np.zeros(ranks, np.int64)
    np.maximum.at(most, shards.rank, shards.row + 1)
    base = np.cumsum(most) - most
    place = np.zeros(int(most.sum()), np.int64)
    place[base[shards.rank] + shards.row] = np.arange(len(shards.row))
    shard = place[base[written.rank] + written.row]
    cut: Mask = (shards.boxes.shape[shard] != written.boxes.shape).any(axis=1)
    return cut


def _transfer(
    state: GlobalState, shards: HeldShards, source: int, source_row: int, writer: int, writer_row: int, box: Box
) -> Transfer:
    held = (shards.rank == source) & (shards.row == source_row)
    itemsize = state.dtypes[shards.tensor[held][0]].itemsize
    return Transfer(state.ranks[source], source_row, state.ranks[writer], writer_row, box, box.size * itemsize)


def _table(state: GlobalState, plan: SavePlan, file: IntArray) -> ShardTable:
    """The checkpoint's table, ordered by tensor, then by offset; ``file`` has each written box's file, ``[written]``.

    Tensors that are cut alike share a layout.
    """
    order = box_order(_tensors(state, plan.written.boxes.dimensions).shape, plan.written.tensor, plan.written.boxes)
    tensor, boxes = plan.written.tensor[order], plan.written.boxes.take(order)
    bounds = np.searchsorted(tensor, np.arange(len(state.paths) + 1))
    shapes = {shape: i for i, shape in enumerate(dict.fromkeys(state.shapes))}
    heads = np.array([shapes[shape] for shape in state.shapes], np.int64).reshape(-1, 1)
    first, layout_of = group_blocks(bounds, boxes.table, heads)
    layouts = []
    for t in first.tolist():
        mine = boxes.take(slice(int(bounds[t]), int(bounds[t + 1])))
        layouts.append(Layout(state.shapes[t], mine.first(len(state.shapes[t]))))
    kinds = np.array(state.kinds, np.int64)
    return ShardTable(state.paths, state.dtypes, kinds, layouts, layout_of, file[order], state.names)
