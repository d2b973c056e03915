"""Who reads what for whom, when data go from rank to rank: each needed block once in the whole job."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

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
_UNITS_PER_READER = 8  # so that what ranks read can be balanced
_FEW = 8  # boxes that are cut one by one: for them columns take longer
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


class Parcel(NamedTuple):
    """A box of a shard on its way to a rank (or to ``ALL``), for that rank's need ``row`` (for all: rank to row).

    There may be a million, as each unit has something for each rank where these are cut by columns.
    """

    destination: int
    row: int
    box: Box
    rows: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Unit:
    """Something that one rank reads, and whom it is for."""

    shard: int
    reader: int
    parcels: tuple[Parcel, ...]

    @property
    def to_all(self) -> bool:
        """Whether the parcels are for all; else none is."""
        return self.parcels[0].destination == ALL


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
    files = {shards[number].file for number in needs}.union(np.unique(small.file).tolist())
    readers = len(set[int]().union(*(reach[file] for file in files)))
    most = max(block_bytes, total // (_UNITS_PER_READER * max(1, readers)))
    unit_bytes, broadcast_bytes = min(_UNIT_BYTES, most), min(_BROADCAST_BYTES, own_bytes, most)
    units: list[tuple[Unit | Pack, Traffic]] = []
    reaching = {file: set(able) for file, able in reach.items()}
    for number in sorted(needs):  # tensor by tensor, so that each is complete soon after it has been begun
        shard, able = shards[number], reaching[shards[number].file]
        blocks = touched_blocks(shard.shape, shard.itemsize, {need.box for need in needs[number]}, block_bytes)
        wanted = _wanted(needs[number], able, ranks)
        boxes = Boxes.of([parcel.box for parcel in wanted], len(shard.shape))
        spans = _spans(shard.shape, boxes)
        for_all = wanted[0].destination == ALL
        for start, stop in _unit_ranges(blocks, block_bytes, broadcast_bytes if for_all else unit_bytes):
            parcels = _parcels(shard, wanted, boxes, spans, start, stop)
            takers = wanted[0].rows.keys() if for_all else {parcel.destination for parcel in parcels}
            reader = min(sorted(takers & able or able), key=loads.__getitem__)
            loads[reader] += min(stop, math.prod(shard.shape) * shard.itemsize) - start
            unit = Unit(number, reader, tuple(parcels if for_all else _as_broadcast(parcels, reader, ranks)))
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


def _wanted(needs: Sequence[Need], able: Set[int], ranks: int) -> list[Parcel]:
    """A parcel for each need; if all ranks, but perhaps whichever reads, need the very same, one to all for each box.

    So it is found, and cut in units, once instead of for each rank.
    """
    takers = {need.rank for need in needs}
    return _as_broadcast([Parcel(need.rank, need.row, need.box) for need in needs], min(able & takers or able), ranks)


def _spans(shape: Sequence[int], boxes: Boxes) -> tuple[IntArray, IntArray]:
    """The first element of each box, and the one behind its last, counted in row-major order, ``[boxes]``."""
    steps = np.cumprod([1, *reversed(shape[1:])], dtype=np.int64)[::-1] if shape else np.zeros(0, np.int64)
    return boxes.offset @ steps, (boxes.offset + boxes.shape - 1) @ steps + 1


def _parcels(
    shard: ExchangeShard,
    wanted: Sequence[Parcel],
    boxes: Boxes,
    spans: tuple[IntArray, IntArray],
    start: int,
    stop: int,
) -> list[Parcel]:
    """The parts of what is wanted in the shard's bytes from ``start`` to ``stop``; ``boxes`` are those of ``wanted``,
    and ``spans`` is what :func:`_spans` returns."""
    first, last = start // shard.itemsize, min(stop // shard.itemsize, math.prod(shard.shape))
    region = cut_flat_range(shard.shape, first, last)
    met = np.flatnonzero((spans[0] < last) & (spans[1] > first))
    if len(met) <= _FEW:
        both = ((wanted[i], intersect(box, wanted[i].box)) for i in met.tolist() for box in region)
        return [Parcel(one.destination, one.row, box, one.rows) for one, box in both if box is not None]
    some = boxes.take(np.repeat(met, len(region)))
    common = some.common(Boxes.of(region, len(shard.shape)).take(np.tile(np.arange(len(region)), len(met))))
    filled = np.flatnonzero(common.filled)
    of_these = (wanted[i] for i in met[filled // len(region)].tolist())
    return [
        Parcel(one.destination, one.row, box, one.rows)
        for one, box in zip(of_these, common.take(filled).to_list(), strict=True)
    ]


def _as_broadcast(parcels: list[Parcel], reader: int, ranks: int) -> list[Parcel]:
    """One parcel to all for each box, where all ranks (but perhaps the reader) need the very same boxes once."""
    if ranks < 2:
        return parcels
    by_rank: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        by_rank.setdefault(parcel.destination, []).append(parcel)
    boxes = ([parcel.box for parcel in group] for group in by_rank.values())
    first = next(boxes)
    if len({*by_rank, reader}) < ranks or any(other != first for other in boxes):
        return parcels
    columns = zip(*by_rank.values(), strict=True)
    return [Parcel(ALL, 0, column[0].box, {p.destination: p.row for p in column}) for column in columns]


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
    moved, everyone, kept, sent = dict[int, int](), 0, 0, 0
    for parcel in unit.parcels:
        nbytes = parcel.box.size * itemsize
        if parcel.destination == unit.reader:
            kept += nbytes
        elif parcel.destination == ALL:
            everyone += nbytes
        else:
            sent += nbytes
            moved[parcel.destination] = moved.get(parcel.destination, 0) + nbytes
    return Traffic({**moved, unit.reader: sent} if sent else moved, everyone, kept)
