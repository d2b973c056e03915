"""A checkpoint of this library's own format, of whole tensors: its data files, and its `.metadata` but for digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ..core.box import whole
from ..core.dtypes import DTYPES
from ..core.layouts import shared_layouts
from ..core.shards import Kind, ShardTable
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..files.codec import NO_DIGEST, VERSION, checked_cost
from ..files.datafile import FORMAT, DataFileInfo, EntryKind, FileLayout, FileTable, escaped_key, split_in_parts
from ..files.metadata import INLINE_BYTES, INLINE_TOTAL_BYTES, FileInfo, Metadata, SaveInfo, save_members
from ..files.names import DEFAULT_SUFFIX, data_file_name
from ..files.tables import table_to_record
from ..tree.paths import flat_keys
from .plan import ExportFile, ExportTensor, OwnHeader, divide_files, fill_files

__all__ = ["NewCheckpoint", "plan_native"]

_BYTE = DTYPES["uint8"]


class NewCheckpoint(NamedTuple):
    """What a checkpoint is like that is written.

    Attributes:
        most: The most bytes of tensors in a file, if it has more than one.
        ranks: How many ranks write. Each has files of its own, if there are enough tensors.
        save: What all files say of the checkpoint.
        user_tree: See :class:`Metadata`.
        suffix: How the names of data files end.
    """

    most: int
    ranks: int
    save: SaveInfo
    user_tree: Any
    suffix: str = DEFAULT_SUFFIX


def plan_native(
    tensors: Sequence[ExportTensor], values: Sequence[tuple[str, Any]], new: NewCheckpoint
) -> tuple[list[ExportFile], Metadata]:
    """The files of a checkpoint.

    Args:
        tensors: What to write, values that are stored like tensors among it.
        values: The other values: path, and tree of JSON types.
        new: What it is like.

    Returns:
        The data files, and what `.metadata` will say when the digests of their headers are known.

    Raises:
        UnsupportedValueError: what is selected makes up no checkpoint.
    """
    values, large = _small_and_large(tensors, sorted(values))
    files = _data_files([*tensors, *large], values, new)
    metadata = Metadata(
        **save_members(new.save),
        user_tree=new.user_tree,
        files=[FileInfo(file.name, file.nbytes, NO_DIGEST) for file in files],
        table=_table([(part, i) for i, file in enumerate(files) for part in file.parts]),
        value_records=values,
    )
    try:
        return files, msgspec.structs.replace(metadata, cost=checked_cost(metadata))
    except CheckpointCorruptedError as error:
        raise UnsupportedValueError(f"what is selected makes up no checkpoint: {error}") from error


def _data_files(
    tensors: Sequence[ExportTensor], values: Sequence[tuple[str, Any]], new: NewCheckpoint
) -> list[ExportFile]:
    """The data files, rank by rank. The first one's header has what belongs to none of the tensors."""
    most, ranks, save, user_tree, suffix = new
    limit = min(most, max(1, -(-sum(tensor.nbytes for tensor in tensors) // ranks)))
    in_order = sorted(tensors, key=lambda tensor: tensor.path)
    groups = [part for group in fill_files(in_order, limit) for part in _fitting(group, save.block_bytes)]
    shares = divide_files([sum(tensor.nbytes for tensor in group) for group, _ in groups], ranks)
    writers = [rank for rank, share in enumerate(shares) if share]
    files: list[ExportFile] = []
    own: Any = values  # encoded as they are
    for rank in writers:
        for part, (group, table) in enumerate(groups[number] for number in shares[rank]):
            info = DataFileInfo(
                **save_members(save),
                format=FORMAT,
                version=VERSION,
                rank=rank,
                part=part,
                parts=len(shares[rank]),
                tensors=table_to_record(_table([(tensor, 0) for tensor in group])),
                values=[] if files else own,
                writers=None if files else writers,
                user_metadata=None if files else user_tree,
            )
            name = data_file_name(rank, save.unique_id, save.save_id, part, suffix)
            files.append(ExportFile(name, group, OwnHeader(table, info, FileLayout(table, info).size)))
    return files


def _small_and_large(
    tensors: Sequence[ExportTensor], values: Sequence[tuple[str, Any]]
) -> tuple[list[tuple[str, Any]], list[ExportTensor]]:
    """The values that `.metadata` has room for, and those that become entries of data files."""
    small, large, total = list[tuple[str, Any]](), list[tuple[str, bytes]](), 0
    for path, tree in values:
        json = msgspec.json.encode(tree)
        if len(json) <= INLINE_BYTES and total + len(json) <= INLINE_TOTAL_BYTES:
            small.append((path, tree))
            total += len(json)
        else:
            large.append((path, json))
    paths = [*(tensor.path for tensor in tensors), *(path for path, _ in values)] if large else []
    keys = dict(zip(paths, flat_keys(paths), strict=True))
    entries = [ExportTensor(path, keys[path], (len(json),), _BYTE, kind=Kind.VALUE, data=json) for path, json in large]
    return small, entries


def _fitting(tensors: Sequence[ExportTensor], block_bytes: int) -> list[tuple[list[ExportTensor], FileTable]]:
    """Tensors as they stand in a file, and its entries; or of several, if one would need too long a header."""
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.path))
    numbers: dict[EntryKind, int] = {}
    kind = [numbers.setdefault(EntryKind(tensor.dtype, tensor.shape), len(numbers)) for tensor in ordered]
    names = [escaped_key(tensor.key) for tensor in ordered]
    found, start = [], 0
    for table in split_in_parts(FileTable(names, list(numbers), np.array(kind, np.int64), block_bytes)):
        found.append((ordered[start : start + len(table.names)], table))
        start += len(table.names)
    return found


def _table(tensors: Sequence[tuple[Any, int]]) -> ShardTable:
    """The table of whole tensors, each with the number of its file."""
    ordered = sorted(tensors, key=lambda pair: pair[0].path)
    layouts, layout_of = shared_layouts((tensor.shape, (whole(tensor.shape),)) for tensor, _ in ordered)
    return ShardTable(
        [tensor.path for tensor, _ in ordered],
        [tensor.dtype for tensor, _ in ordered],
        np.array([tensor.kind for tensor, _ in ordered], np.int64),
        layouts,
        layout_of,
        np.array([file for _, file in ordered], np.int64),
        [tensor.name for tensor, _ in ordered],
    )
