"""The table of tensors and shards as it is stored and sent, and what is checked before any of it is believed."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import msgspec
import numpy as np

from ..core.columns import Column, IntArray, column_size, narrow, pack_column, unpack_column
from ..core.dtypes import DTYPES
from ..core.layouts import Layout, LayoutRecord
from ..core.shards import Kind, ShardTable
from ..errors import CheckpointCorruptedError
from ..tree.paths import Containers, ListIndex, TupleIndex, occurs, parse_path
from .metadata import FileInfo

__all__ = ["TableRecord", "check_leaves", "check_room", "table_from_record", "table_to_record"]

_MAX_PARTS = 256  # more than a state_dict that can be saved has levels
_LEAST_ENTRY = 48  # bytes that a shard needs in the header of its file, whatever its name and shape
_FEW_EDGES = 1 << 21  # offsets of shards, one a dimension
_EDGES = 4  # and for each shard
_INT64 = range(-(2**63), 2**63)
_MAX_TOTAL_BYTES = 2**60


class TableRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A :class:`ShardTable` as it is stored or sent. ``names`` is empty where no tensor has one."""

    paths: list[str]
    dtypes: list[str]
    dtype: Column
    kind: Column
    layouts: list[LayoutRecord]
    layout: Column
    shard_file: Column
    names: list[str | None] = []


def table_to_record(table: ShardTable) -> TableRecord:
    """A table in the form in which it is stored."""
    used = [dtype.name for dtype in table.dtype_list]
    names = sorted(used)
    place = np.array([names.index(name) for name in used], np.int64)
    return TableRecord(
        paths=table.paths,
        dtypes=names,
        dtype=pack_column(place[table.dtype_of]),
        kind=pack_column(table.kinds),
        layouts=[layout.to_record() for layout in table.layouts],
        layout=pack_column(table.layout_of),
        shard_file=pack_column(table.shard_file),
        names=table.names if table.names.count(None) < len(table.names) else [],
    )


def table_from_record(record: TableRecord, files: int) -> ShardTable:
    """The table that was stored. The record has no layouts any more then, and cannot be used again.

    Raises:
        CheckpointCorruptedError: it contradicts itself.
    """
    tensors = len(record.paths)
    unknown = [name for name in record.dtypes if name not in DTYPES]
    if unknown or len(record.names) not in (0, tensors):
        raise CheckpointCorruptedError(f"the tensor table is not well-formed (unknown dtypes: {unknown[:5]})")
    _check_paths(record.paths)
    dtype = unpack_column(record.dtype, tensors, len(record.dtypes), "column dtype")
    kinds = narrow(unpack_column(record.kind, tensors, len(Kind), "column kind"))
    layout_of = narrow(unpack_column(record.layout, tensors, len(record.layouts), "column layout"))
    shards = column_size(record.shard_file, "column shard_file")
    layouts = _bounded_layouts(record.layouts, layout_of, shards)
    shard_file = narrow(unpack_column(record.shard_file, shards, files, "column shard_file"))
    known = [DTYPES[name] for name in record.dtypes]
    names: list[str | None] = list(record.names) or [None] * tensors
    table = ShardTable(record.paths, [known[i] for i in dtype.tolist()], kinds, layouts, layout_of, shard_file, names)
    if float(table.shard_bytes.sum(dtype=np.float64)) > _MAX_TOTAL_BYTES:
        raise CheckpointCorruptedError("the tensor table claims more bytes than any storage has")
    return table


def check_room(table: ShardTable, files: Sequence[FileInfo]) -> None:
    """Refuse a table of more shards, or larger ones, than its files have room for."""
    shards = np.bincount(table.shard_file, minlength=len(files)).tolist()
    for info, data_bytes, count in zip(files, table.file_bytes(len(files)).tolist(), shards, strict=True):
        if info.size < 8 + data_bytes + _LEAST_ENTRY * count:
            raise CheckpointCorruptedError(
                f"{info.name}: {info.size} bytes, too few for {count} shards of {data_bytes}"
            )


def check_leaves(paths: Sequence[str]) -> None:
    """Refuse leaves that are twice there or below each other, and list places that whole lists do not have."""
    _check_paths(sorted(paths))
    containers = Containers.of(paths)
    if containers.too_many:
        raise CheckpointCorruptedError("more containers than paths of that length lead through")
    if containers.leaves:
        raise CheckpointCorruptedError("a path is a leaf and a container")
    if containers.mixed:
        raise CheckpointCorruptedError("a path is a dict and a list")
    if containers.too_long:
        raise CheckpointCorruptedError("lists with far more places than are stored")
    listed = occurs("~l", paths) or occurs("~t", paths)
    for path in [p for p in paths if "~l" in p or "~t" in p] if listed else []:
        if any(isinstance(part, (ListIndex, TupleIndex)) and part.at >= len(paths) for part in parse_path(path)):
            raise CheckpointCorruptedError(f"{path[:100]}: an index in a list that is larger than all that is stored")


def _check_paths(paths: Sequence[str]) -> None:
    if _are_plain(paths):
        return
    try:
        for path in paths:
            if path.count("/") > _MAX_PARTS:
                raise ValueError(f"a path of more than {_MAX_PARTS} parts: {path[:80]}")
            plain = "~" not in path and path.startswith("/")
            if not plain and any(type(part) is int and part not in _INT64 for part in parse_path(path)):
                raise ValueError(f"a key of more than 64 bits: {path[:80]}")
    except ValueError as error:
        raise CheckpointCorruptedError(str(error)[:200]) from error
    if any(a >= b for a, b in itertools.pairwise(paths)):
        raise CheckpointCorruptedError("the paths of the tensor table are not in ascending order")


def _are_plain(paths: Sequence[str]) -> bool:
    """A quick test for paths in ascending order that need no closer look; False says nothing."""
    return not paths or (
        paths[0] >= "/"
        and paths[-1] < "0"  # the character after "/"; so all between begin with "/"
        and all(map(operator.lt, paths, itertools.islice(paths, 1, None)))
        and max(map(len, paths)) <= _MAX_PARTS
        and not occurs("~", paths)
    )


def _bounded_layouts(records: list[LayoutRecord], layout_of: IntArray, shards: int) -> list[Layout]:
    """The layouts, if together they have just ``shards`` shards; no layout may be larger than what is left of them.

    Records are taken from the list one by one: with very many, there would not be memory for them and the layouts.
    """
    uses = np.bincount(layout_of, minlength=len(records)).tolist()
    if 0 in uses:
        raise CheckpointCorruptedError("the tensor table has a layout that no tensor uses")
    layouts, left = [], shards
    records.reverse()
    for count in uses:
        layout = Layout.from_record(records.pop(), left // count)
        left -= len(layout.parts) * count
        layouts.append(layout)
    if sum(len(layout.parts) * len(layout.shape) for layout in layouts) > _FEW_EDGES + _EDGES * shards:
        raise CheckpointCorruptedError("the tensor table has shards of more dimensions than tensors are cut in")
    if left:
        raise CheckpointCorruptedError(f"the tensor table has {shards} shards, its layouts {shards - left}")
    return layouts
