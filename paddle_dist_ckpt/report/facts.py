"""What the page shows, as plain values: taken from a checkpoint's metadata in columns, and bounded in size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.columns import IntArray, sums_by
from ..core.shards import Kind, ShardTable
from ..files.metadata import Metadata
from ..files.names import parse_data_file
from ..visible import MOST_KEY, visible
from .layers import LayerColumns, layers_of
from .regions import RegionColumns, regions_of
from .values import ValueColumns, unread_keys, user_values, values_of

__all__ = ["Facts", "facts_of", "rank_of"]

MOST_TENSORS = 20_000
_MOST_LETTERS = 4_000_000  # of their keys
_MOST_RANKS = 100_000
_MOST_TIMES = 300_000  # of phases on ranks
_OTHER_NAMES = (
    re.compile(r"(?:__)?(\d{1,9})_\d{1,18}\.(?:distcp|safetensors)"),  # Paddle's own, torch's
    re.compile(r".*_dist(\d{1,9})\.(?:pdparams|pdopt)", re.DOTALL),  # of ranks of a static program
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Which checkpoint it is, and who wrote it."""

    location: str
    format: str
    unique_id: int
    save_id: str
    world_size: int
    block_bytes: int
    created: str
    library: str
    paddle_version: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all of it. ``nbytes`` are those of tensors' data, ``file_bytes`` those of files, with headers.

    Values in data files count as tensors of bytes, too, which they are stored like: so many, and so many bytes of them.
    """

    nbytes: int
    file_bytes: int
    elements: int
    tensors: int
    shards: int
    values: int
    stored_values: int
    stored_value_bytes: int


@dataclass(frozen=True, slots=True)
class FileColumns:
    """The data files. ``state`` is empty for one that is as it was written, ``rank`` -1 where names do not tell it."""

    name: list[str]
    size: list[int]
    nbytes: list[int]
    shards: list[int]
    rank: list[int]
    state: list[str]


@dataclass(frozen=True, slots=True)
class RankColumns:
    """The ranks that saved: their bytes of tensors' data, and files. Empty where nothing tells ranks."""

    rank: list[int]
    nbytes: list[int]
    files: list[int]


@dataclass(frozen=True, slots=True)
class TypeColumns:
    """The element types, by their bytes: the largest first."""

    name: list[str]
    nbytes: list[int]
    elements: list[int]
    tensors: list[int]


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """Tensors by their keys: all, or the largest. ``dtype``, ``layout`` and ``cut`` are numbers in other columns.

    Attributes:
        key: Flat keys.
        name: The framework's variable names, empty where there is none.
        kind: See :class:`Kind`.
        dtype: Number of the element type.
        layout: Number of the layout, which has the shape.
        nbytes: Bytes of each.
        shards: How many each is cut in.
        cut: Number of how it lies in the files; -1 where the page does not say it.
        start: Where each of its shards starts in its file's data; empty where the page does not say it.
    """

    key: list[str]
    name: list[str]
    kind: list[int]
    dtype: list[int]
    layout: list[int]
    nbytes: list[int]
    shards: list[int]
    cut: list[int]
    start: list[list[int]]


@dataclass(frozen=True, slots=True)
class TimeColumns:
    """Milliseconds of each phase, in order, on each rank; both empty where nobody has kept them. ``left_out`` says how
    many more ranks there are."""

    rank: list[int]
    phases: list[str]
    milliseconds: list[list[int]]
    left_out: int


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the page shows."""

    origin: Origin
    totals: Totals
    files: FileColumns
    ranks: RankColumns
    dtypes: TypeColumns
    tensors: TensorColumns
    regions: RegionColumns
    layers: LayerColumns
    values: ValueColumns
    user: ValueColumns
    unread: ValueColumns
    times: TimeColumns


def facts_of(
    metadata: Metadata, location: str, sizes: Sequence[int | str] | None = None, most: int = MOST_TENSORS
) -> Facts:
    """What a page shows of a checkpoint.

    Args:
        metadata: What the checkpoint says of itself.
        location: Where it is.
        sizes: How large its files are now, or why one has no size; None if nobody has looked.
        most: How many tensors are named, the largest first. Sums are over all tensors.
    """
    table = metadata.table
    tensor_bytes = sums_by(table.shard_tensor, table.shard_bytes, len(table.paths))
    keys = [metadata.key(path) for path in table.paths]
    layers = layers_of(keys, tensor_bytes.tolist())  # first, since it takes the most memory meanwhile
    largest = np.argsort(-tensor_bytes, kind="stable")[:most]
    letters = np.cumsum([min(len(keys[t]), MOST_KEY) for t in largest])
    named = np.sort(largest[letters <= _MOST_LETTERS])
    dtypes, dtype_place = _types(table, tensor_bytes)
    tensors, regions = _tensors(table, keys, tensor_bytes, named, dtype_place)
    times = _times(metadata)
    files = _files(metadata, sizes)
    values = values_of(metadata, keys)
    are_values = table.kinds == Kind.VALUE
    return Facts(
        origin=_origin(metadata, location),
        totals=Totals(
            nbytes=int(tensor_bytes.sum()),
            file_bytes=sum(info.size for info in metadata.files),
            elements=sum(dtypes.elements),
            tensors=len(table.paths),
            shards=len(table.shard_file),
            values=len(values.key) + values.left_out,
            stored_values=int(are_values.sum()),
            stored_value_bytes=int(tensor_bytes[are_values].sum()),
        ),
        files=files,
        ranks=_ranks(files, times, metadata.world_size),
        dtypes=dtypes,
        tensors=tensors,
        regions=regions,
        layers=layers,
        values=values,
        user=user_values(metadata),
        unread=unread_keys(metadata),
        times=times,
    )


def rank_of(name: str) -> int:
    """The rank that wrote a file, by the file's name; -1 if that does not tell it."""
    own = parse_data_file(name)
    if own is not None:
        return own.rank
    others = (pattern.fullmatch(name) for pattern in _OTHER_NAMES)
    return next((int(other[1]) for other in others if other), -1)


def _origin(metadata: Metadata, location: str) -> Origin:
    return Origin(
        location=visible(location),
        format=visible(metadata.format),
        unique_id=metadata.unique_id,
        save_id=visible(metadata.save_id),
        world_size=metadata.world_size,
        block_bytes=metadata.block_bytes,
        created=visible(metadata.created),
        library=visible(metadata.library),
        paddle_version=visible(metadata.paddle_version or ""),
    )


def _types(table: ShardTable, tensor_bytes: IntArray) -> tuple[TypeColumns, IntArray]:
    """The element types, and the place that each of the table's has among them."""
    count = len(table.dtype_list)
    nbytes = sums_by(table.dtype_of, tensor_bytes, count)
    order = np.argsort(-nbytes, kind="stable")
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    tensors = np.bincount(table.dtype_of, minlength=count)
    columns = TypeColumns(
        name=[table.dtype_list[i].name for i in order],
        nbytes=nbytes[order].tolist(),
        elements=[int(nbytes[i]) // table.dtype_list[i].itemsize for i in order],
        tensors=tensors[order].tolist(),
    )
    return columns, place


def _tensors(
    table: ShardTable, keys: Sequence[str], tensor_bytes: IntArray, named: IntArray, dtype_place: IntArray
) -> tuple[TensorColumns, RegionColumns]:
    regions, layout, cut, start = regions_of(table, named, tensor_bytes)
    columns = TensorColumns(
        key=[visible(keys[t]) for t in named],
        name=[visible(table.names[t] or "") for t in named],
        kind=table.kinds[named].tolist(),
        dtype=dtype_place[table.dtype_of[named]].tolist(),
        layout=layout,
        nbytes=tensor_bytes[named].tolist(),
        shards=np.diff(table.first_shard)[named].tolist(),
        cut=cut,
        start=start,
    )
    return columns, regions


def _files(metadata: Metadata, sizes: Sequence[int | str] | None) -> FileColumns:
    table, infos = metadata.table, metadata.files
    written = [info.size for info in infos]
    found: Sequence[int | str] = written if sizes is None else sizes
    return FileColumns(
        name=[visible(info.name) for info in infos],
        size=written,
        nbytes=sums_by(table.shard_file, table.shard_bytes, len(infos)).tolist(),
        shards=np.bincount(table.shard_file, minlength=len(infos)).tolist(),
        rank=[rank_of(info.name) for info in infos],
        state=[
            "" if now == size else now if isinstance(now, str) else f"{now} bytes now"
            for now, size in zip(found, written, strict=True)
        ],
    )


def _ranks(files: FileColumns, times: TimeColumns, world_size: int) -> RankColumns:
    """The ranks, those included that wrote nothing, if it is known who they are."""
    if not files.rank or -1 in files.rank:
        return RankColumns([], [], [])
    known = set(files.rank) | set(times.rank)
    if max(known) < world_size <= _MOST_RANKS:
        known |= set(range(world_size))
    nbytes, count = dict.fromkeys(sorted(known), 0), dict.fromkeys(known, 0)
    for rank, size in zip(files.rank, files.nbytes, strict=True):
        nbytes[rank], count[rank] = nbytes[rank] + size, count[rank] + 1
    return RankColumns(list(nbytes), list(nbytes.values()), [count[rank] for rank in nbytes])


def _times(metadata: Metadata) -> TimeColumns:
    """How long the save took; of more ranks than the page has room for, on the first of them."""
    if metadata.times is None:
        return TimeColumns([], [], [], 0)
    ranks, phases = metadata.times.columns()
    most = min(_MOST_RANKS, _MOST_TIMES // max(1, len(phases)))
    return TimeColumns(
        rank=ranks[:most].tolist(),
        phases=[visible(phase) for phase in phases],
        milliseconds=[column[:most].tolist() for column in phases.values()],
        left_out=max(0, len(ranks) - most),
    )
