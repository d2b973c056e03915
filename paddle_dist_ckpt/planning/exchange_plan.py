"""Who reads what for whom, when data go from rank to rank: each needed block once in the whole job."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.box import Box, cut_flat_range, intersect
from ..core.boxes import Boxes
from ..core.columns import IntArray
from .blocks import touched_blocks
from .exchange_packs import Pack, SmallNeeds, Traffic, plan_packs

__all__ = ["ALL", "ExchangeShard", "Need", "Parcel", "Unit", "plan_exchange"]

ALL = -1
_UNIT_BYTES = 4 << 20
_BROADCAST_BYTES = 32 << 20  # of a unit that all ranks need: each message costs gloo and Python about a millisecond
_UNITS_PER_RANK = 8  # so that what ranks read can be balanced
_ROUND_BYTES = 16 << 20  # of one round; the next one is read meanwhile


@dataclass(frozen=True, slots=True)
class ExchangeShard:
    """A stored shard of several blocks that somebody needs: its file, shape and item size."""

    file: int
    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True, slots=True)
class Need:
    """A box of a shard, in its coordinates, that a rank needs; ``row`` is that rank's own number for it."""

    rank: int
    row: int
    box: Box


@dataclass(frozen=True, slots=True)
class Parcel:
    """A box of a shard on its way to a rank (or to ``ALL``), for that rank's need ``row`` (for all: rank to row)."""

    destination: int
    row: int
    box: Box
    rows: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unit:
    """Something that one rank reads, and whom it is for."""

    shard: int
    reader: int
    parcels: tuple[Parcel, ...]


def plan_exchange(
    shards: Mapping[int, ExchangeShard],
    needs: Mapping[int, Sequence[Need]],
    reach: Mapping[int, Sequence[int]],
    ranks: int,
    block_bytes: int,
    small: SmallNeeds,
    own_bytes: int,
    loads: list[int],
) -> list[list[Unit | Pack]]:
    """Divide what is needed into units of whole blocks, give each a reader, and order them in rounds.

    Of shards of one block many make a unit together, a :class:`Pack`: an object for each would cost more than to move
    it.

    A unit's reader is a rank that reaches the file, one that needs the unit itself if there is one, and among those the
    one with the least to read so far. The rounds bound how much any rank sends and receives at once, and how much it
    reads for itself: of tensors for a device that is in host memory as well.

    Args:
        shards: The shards of several blocks, by number.
        needs: Who needs which boxes of each.
        reach: For each file the ranks that can read it; none may be empty for a file that is needed.
        ranks: How many ranks there are.
        block_bytes: Bytes that share a checksum.
        small: Who needs what of all other shards.
        own_bytes: The most that a rank may read for itself in a round, if that is not a single unit; what all need is
            not in larger units either.
        loads: What each rank has to read so far, to which this adds.

    Returns:
        Rounds of units, the same for all ranks.
    """
    total = sum(math.prod(shards[number].shape) * shards[number].itemsize for number in needs)
    total += small.total
    most = max(block_bytes, total // (_UNITS_PER_RANK * ranks))
    unit_bytes, broadcast_bytes = min(_UNIT_BYTES, most), min(_BROADCAST_BYTES, own_bytes, most)
    units: list[tuple[Unit | Pack, Traffic]] = []
    reaching = {file: set(able) for file, able in reach.items()}
    for number in sorted(needs):  # tensor by tensor, so that each is complete soon after it has been begun
        shard, wanted = shards[number], needs[number]
        blocks = touched_blocks(shard.shape, shard.itemsize, [need.box for need in wanted], block_bytes)
        nbytes = broadcast_bytes if _is_for_all(wanted, reach[shard.file], ranks) else unit_bytes
        spans = _spans(shard.shape, wanted)
        for start, stop in _unit_ranges(blocks, block_bytes, nbytes):
            parcels = _parcels(shard, wanted, spans, start, stop)
            takers = {parcel.destination for parcel in parcels}
            reader = min(takers & reaching[shard.file] or reaching[shard.file], key=lambda r: (loads[r], r))
            loads[reader] += min(stop, math.prod(shard.shape) * shard.itemsize) - start
            unit = Unit(number, reader, _as_broadcast(parcels, reader, ranks))
            units.append((unit, _traffic(unit, shard.itemsize)))
    units += plan_packs(small, reach, ranks, unit_bytes, _ROUND_BYTES // 2, loads)
    return _in_rounds(units, own_bytes)


def _unit_ranges(blocks: Sequence[tuple[int, int]], block_bytes: int, unit_bytes: int) -> list[tuple[int, int]]:
    step = max(1, unit_bytes // block_bytes)
    return [
        (block * block_bytes, min(block + step, stop) * block_bytes)
        for start, stop in blocks
        for block in range(start, stop, step)
    ]


def _spans(shape: Sequence[int], needs: Sequence[Need]) -> tuple[IntArray, IntArray]:
    """The first element of each need, and the one behind its last, counted in row-major order, ``[needs]``."""
    boxes = Boxes.of([need.box for need in needs], len(shape))
    steps = np.cumprod([1, *reversed(shape[1:])], dtype=np.int64)[::-1] if shape else np.zeros(0, np.int64)
    return boxes.offset @ steps, (boxes.offset + boxes.shape - 1) @ steps + 1


def _parcels(
    shard: ExchangeShard, needs: Sequence[Need], spans: tuple[IntArray, IntArray], start: int, stop: int
) -> list[Parcel]:
    """The needs' parts in the shard's bytes from ``start`` to ``stop``; ``spans`` is what :func:`_spans` returns."""
    first, last = start // shard.itemsize, min(stop // shard.itemsize, math.prod(shard.shape))
    region = cut_flat_range(shard.shape, first, last)
    return [
        Parcel(need.rank, need.row, common)
        for need in (needs[i] for i in np.flatnonzero((spans[0] < last) & (spans[1] > first)).tolist())
        for box in region
        if (common := intersect(box, need.box)) is not None
    ]


def _is_for_all(needs: Sequence[Need], reach: Sequence[int], ranks: int) -> bool:
    """Whether all ranks, but perhaps whichever reads, need the very same boxes."""
    boxes: dict[int, list[Box]] = {}
    for need in needs:
        boxes.setdefault(need.rank, []).append(need.box)
    readers = [rank for rank in reach if rank in boxes] or reach
    first, *others = boxes.values()
    return len({*boxes, readers[0]}) == ranks and all(one == first for one in others)


def _as_broadcast(parcels: list[Parcel], reader: int, ranks: int) -> tuple[Parcel, ...]:
    """One parcel to all for each box, where all ranks (but perhaps the reader) need the very same boxes once."""
    if ranks < 2:
        return tuple(parcels)
    by_rank: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        by_rank.setdefault(parcel.destination, []).append(parcel)
    boxes = {tuple(parcel.box for parcel in group) for group in by_rank.values()}
    if len(boxes) != 1 or {*by_rank, reader} != set(range(ranks)):
        return tuple(parcels)
    columns = zip(*by_rank.values(), strict=True)
    return tuple(Parcel(ALL, 0, column[0].box, {p.destination: p.row for p in column}) for column in columns)


def _in_rounds(units: Sequence[tuple[Unit | Pack, Traffic]], own_bytes: int) -> list[list[Unit | Pack]]:
    """Take the readers' units in turn, and start a new round before a rank would send and receive more than
    ``_ROUND_BYTES`` in one, or read more than ``own_bytes`` for itself."""
    queues: dict[int, list[tuple[Unit | Pack, Traffic]]] = {}
    for pair in units:
        queues.setdefault(pair[0].reader, []).append(pair)
    turns = itertools.zip_longest(*(queue for _, queue in sorted(queues.items())))
    rounds: list[list[Unit | Pack]] = []
    so_far = _RoundTraffic()
    for unit, traffic in filter(None, itertools.chain.from_iterable(turns)):
        so_far.add(unit.reader, traffic)
        if not rounds or so_far.moved > _ROUND_BYTES or so_far.kept > own_bytes:
            rounds.append([])
            so_far = _RoundTraffic()
            so_far.add(unit.reader, traffic)
        rounds[-1].append(unit)
    return rounds


class _RoundTraffic:
    """What the units of a round come to."""

    def __init__(self) -> None:
        self._moved, self._kept = Counter[int](), Counter[int]()  # by rank
        self._everyone = self._most = self.kept = 0

    def add(self, reader: int, traffic: Traffic) -> None:
        """Add a unit's."""
        for rank, nbytes in traffic.moved.items():
            self._moved[rank] += nbytes
            self._most = max(self._most, self._moved[rank])
        self._everyone += traffic.everyone
        self._kept[reader] += traffic.kept
        self.kept = max(self.kept, self._kept[reader])

    @property
    def moved(self) -> int:
        """The most that a rank sends and receives; ``kept`` is the most that one reads for itself."""
        return self._most + self._everyone


def _traffic(unit: Unit, itemsize: int) -> Traffic:
    moved, everyone, kept = Counter[int](), 0, 0
    for parcel in unit.parcels:
        nbytes = parcel.box.size * itemsize
        if parcel.destination == unit.reader:
            kept += nbytes
        elif parcel.destination == ALL:
            everyone += nbytes
        else:
            moved.update({unit.reader: nbytes, parcel.destination: nbytes})
    return Traffic(moved, everyone, kept)
