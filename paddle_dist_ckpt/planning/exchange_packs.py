"""Who reads what of small shards for whom: in columns, many shards of one file and for the same ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.columns import IntArray, Mask, places_of_equals, places_within, run_edges
from ..core.grouping import group_blocks

__all__ = ["Pack", "SmallNeeds", "Traffic", "plan_packs"]


@dataclass(frozen=True, slots=True, eq=False)
class SmallNeeds:
    """What ranks need of shards of one block at most, each need a row of the columns.

    They are ordered by file, by the place of the shard in it, by rank and by box.

    Attributes:
        shard: The shard's number, ``[needs]``.
        file: The file that it is in, ``[needs]``.
        entry_bytes: Its size, ``[needs]``.
        rank: Who needs it, ``[needs]``.
        box: Which box of it, a number that equal boxes have in common, ``[needs]``.
        nbytes: The box's size, ``[needs]``.
    """

    shard: IntArray
    file: IntArray
    entry_bytes: IntArray
    rank: IntArray
    box: IntArray
    nbytes: IntArray

    @property
    def total(self) -> int:
        """Bytes of all the shards."""
        return int(self.entry_bytes[run_edges(self.shard)[:-1]].sum())


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Whole small shards that one rank reads for the same ranks.

    Attributes:
        reader: The rank.
        needs: The needs that this meets, in their order.
        to_all: Whether all ranks but perhaps the reader need the very same boxes; they are broadcast.
    """

    reader: int
    needs: IntArray
    to_all: bool


@dataclass(frozen=True, slots=True)
class Traffic:
    """What moves, in bytes, so that some ranks have what one has read.

    Attributes:
        moved: What ranks send and receive, by rank.
        everyone: What all of them send or receive beside that.
        kept: What the reader needs itself.
    """

    moved: Mapping[int, int]
    everyone: int
    kept: int


def plan_packs(
    needs: SmallNeeds, reach: Mapping[int, Sequence[int]], ranks: int, most: int, most_sent: int, loads: list[int]
) -> Iterator[tuple[Pack, Traffic]]:
    """Divide the shards into packs of about ``most`` bytes, and give each a reader as :func:`.plan_exchange` does.

    Args:
        needs: The needs.
        reach: For each file the ranks that can read it.
        ranks: How many ranks there are.
        most: Bytes of a pack; one shard may be more.
        most_sent: Bytes that a pack is for all ranks together, a copy for each need unless it is broadcast; and at most
            what one shard is more.
        loads: What each rank has to read so far, to which this adds.

    Returns:
        Each pack, with what moves for it.
    """
    edges = run_edges(needs.shard)
    first = edges[:-1]
    same = _same_for_all(needs, first)
    _, group = group_blocks(edges, needs.rank[:, None], np.column_stack([needs.file[first], same]))
    sizes, wanted = needs.entry_bytes[first], np.add.reduceat(needs.nbytes, first) if len(first) else first
    for shards in places_of_equals(group):
        one = int(shards[0])
        takers = set(needs.rank[edges[one] : edges[one + 1]].tolist())
        readers = reach[int(needs.file[edges[one]])]
        readers = [r for r in readers if r in takers] or readers
        to_all = ranks > 1 and bool(same[one]) and len({*takers, readers[0]}) == ranks  # whichever of them reads
        sent = wanted[shards] // (len(takers) if to_all else 1)
        turn = _turns(sizes[shards], most) + _turns(sent, most_sent)
        for part in np.split(shards, np.flatnonzero(np.diff(turn)) + 1):
            reader = min(readers, key=lambda r: (loads[r], r))
            loads[reader] += int(sizes[part].sum())
            rows = places_within(edges[part + 1] - edges[part], edges[part])
            pack = Pack(reader, rows, to_all)
            yield pack, _traffic(pack, needs)


def _turns(sizes: IntArray, most: int) -> IntArray:
    """A number for each size, ascending; those of one number are together at most ``most`` and one of them."""
    turns: IntArray = (np.cumsum(sizes) - 1) // most
    return turns


def _same_for_all(needs: SmallNeeds, first: IntArray) -> Mask:
    """Whether all who need some of a shard need the very same boxes of it, ``[shards]``."""
    runs = run_edges(needs.shard, needs.rank)
    _, group = group_blocks(runs, needs.box[:, None], np.zeros((len(runs) - 1, 1), np.int64))
    starts = np.searchsorted(runs, first)
    if not len(starts):
        return np.zeros(0, bool)
    same: Mask = np.minimum.reduceat(group, starts) == np.maximum.reduceat(group, starts)
    return same


def _traffic(pack: Pack, needs: SmallNeeds) -> Traffic:
    ranks, rank = np.unique(needs.rank[pack.needs], return_inverse=True)
    sums = np.bincount(rank.reshape(-1), needs.nbytes[pack.needs]).astype(np.int64)
    moved = dict(zip(ranks.tolist(), sums.tolist(), strict=True))
    kept = moved.pop(pack.reader, 0)
    if pack.to_all:
        return Traffic({}, max(moved.values()), 0)
    return Traffic({**moved, pack.reader: sum(moved.values())}, 0, kept)
