"""Reads the Python values of a checkpoint that are entries of its data files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.box import whole
from ..core.decoding import decoding
from ..core.memory import Bytes1D, zeros_of
from ..errors import CheckpointCorruptedError
from ..files.metadata import Metadata
from ..files.room import Room, bytes_on_disk
from ..storage.base import Storage
from ..tree.values import decode_jsonable, from_jsonable
from .boxes import BoxReader

__all__ = ["read_json", "read_values"]

_TOGETHER, _BYTES_TOGETHER = 1024, 1 << 20  # values that are read together at the most, and their bytes
_MANY_DAMAGED = 64  # values


def read_values(
    storage: Storage,
    metadata: Metadata,
    rows: Sequence[int],
    as_trees: bool = False,
) -> Iterator[Any]:
    """The values that are stored as entries, for these places in the table, as they are decoded; or the trees that
    :func:`..tree.values.to_jsonable` made of them.

    In place of a value that is damaged, or no value, comes the CheckpointCorruptedError that says so.

    Raises:
        CheckpointCorruptedError: not all of them are stored, or a file is not there.
        OSError: reading failed.
    """
    table, room = metadata.table, Room(partial(bytes_on_disk, storage, metadata.save_id), metadata.cost)
    found = read_json(storage, metadata, rows)
    for row in rows:
        data = next(found)  # of which nobody else has the memory: zip would keep it
        if isinstance(data, CheckpointCorruptedError):
            yield data
            continue
        try:
            with decoding(metadata.key(table.paths[row])):
                room.take(data.data)
                value = decode_jsonable(data)
                del data
                value = value if as_trees else from_jsonable(value, kept=False)
        except CheckpointCorruptedError as error:
            yield error
        else:
            yield value


def read_json(
    storage: Storage, metadata: Metadata, rows: Sequence[int]
) -> Iterator[Bytes1D | CheckpointCorruptedError]:
    """The same, as JSON.

    Small ones are read many at a time, and by halves if some of them are damaged. Where a great many are damaged, those
    that were read with them count as damaged, too.
    """
    if not rows:
        return
    table, damaged = metadata.table, 0
    shapes = [table.shape_of(row) for row in rows]

    def read(places: range) -> list[Bytes1D | CheckpointCorruptedError]:
        nonlocal damaged
        data = []
        try:
            for place in places:
                key, dtype = metadata.key(table.paths[rows[place]]), table.dtypes[rows[place]]
                if dtype.name != "uint8" or len(shapes[place]) != 1:
                    raise CheckpointCorruptedError(f"{key}: a stored value that is not a row of bytes")
                data.append(zeros_of(shapes[place], dtype.raw, key))
            reader.read(places, data)
        except CheckpointCorruptedError as error:
            if len(places) == 1 or damaged > _MANY_DAMAGED:
                damaged += len(places)
                return [error] * len(places)
            half = len(places) // 2
            return read(places[:half]) + read(places[half:])
        return list(data)

    stops = np.cumsum(list(map(math.prod, shapes)))
    with BoxReader(storage, metadata, rows, list(map(whole, shapes))) as reader:
        first = 0
        while first < len(rows):
            before = int(stops[first - 1]) if first else 0
            end = int(np.searchsorted(stops, before + _BYTES_TOGETHER, side="right"))
            last = min(max(end, first + 1), first + _TOGETHER)
            some = read(range(first, last))[::-1]
            while some:
                yield some.pop()
            first = last
