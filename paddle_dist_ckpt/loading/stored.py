"""What a checkpoint has of what a rank wants: the columns of the coordinator's answer, checked."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from ..core.columns import IntArray, narrow, pieces_of, unpack_column
from ..core.shards import Kind, ShardTable
from ..core.text import kept_once
from ..errors import CheckpointCorruptedError
from ..files.metadata import FileInfo
from ..files.reader import StoredEntry
from ..files.runs import OpenFile
from ..files.tables import table_from_record
from ..tree.paths import plain_key
from .messages import LoadAnswer

__all__ = ["StoredShards"]

_MANY = 2**62
_TOGETHER = 1 << 14  # shards of which numbers are made together


class StoredShards:
    """The shards of the tensors, and of values stored as entries, that this rank may read.

    Args:
        answer: The coordinator's.
        wanted: The paths of the tensors that this rank wants.

    Attributes:
        table: The tensors and their shards.
        starts: Where each shard starts in the data section of its file, ``[shards]``.
        blocks: The number of its first block in that file, ``[shards]``.
        files: What `.metadata` says of each data file, with its number of blocks, by name.

    Raises:
        CheckpointCorruptedError: the answer contradicts itself.
    """

    def __init__(self, answer: LoadAnswer, wanted: list[str]) -> None:
        self._keys, self._files = answer.keys, answer.files
        record = answer.tensors
        record = msgspec.structs.replace(record, paths=kept_once(record.paths, wanted))
        self.table: ShardTable = table_from_record(record, len(answer.files))
        self._firsts = unpack_column(answer.firsts, len(self.table.paths), _MANY, "firsts")
        _check_values(self.table)
        shards = len(self.table.shard_file)
        self.starts: IntArray = narrow(unpack_column(answer.starts, shards, _MANY, "starts"))
        self.blocks: IntArray = narrow(unpack_column(answer.blocks, shards, _MANY, "blocks"))
        self.files: dict[str, tuple[FileInfo, int]] = {info.name: (info, count) for info, count in answer.files}

    def everywhere(self, shards: IntArray) -> IntArray:
        """The coordinator's numbers of shards, in which they come in the same order."""
        numbers = np.empty(len(shards), np.int64)
        shift = self._firsts - self.table.first_shard[:-1]
        for piece in pieces_of(len(shards), _TOGETHER):
            numbers[piece] = shards[piece] + shift[self.table.shard_tensor[shards[piece]]]
        return numbers

    def key(self, shard: int) -> str:
        """The flat key of a shard's tensor."""
        path = self.table.paths[int(self.table.shard_tensor[shard])]
        return self._keys.get(path) or plain_key(path)

    def file_name(self, file: int) -> str:
        """The name of a file of the table."""
        return self._files[file][0].name

    def entry(self, shard: int, shape: tuple[int, ...], opened: Mapping[str, OpenFile]) -> StoredEntry:
        """A shard of this shape as an entry of one of the opened files."""
        return StoredEntry(
            file=opened[self.file_name(self.table.shard_file[shard])],
            start=int(self.starts[shard]),
            first_block=int(self.blocks[shard]),
            shape=shape,
            dtype=self.table.dtypes[self.table.shard_tensor[shard]],
            key=self.key(shard),
        )


def _check_values(table: ShardTable) -> None:
    """Refuse values that a hostile file claims to be of another shape than bytes in a row."""
    for t in np.flatnonzero(table.kinds == Kind.VALUE).tolist():
        if table.dtypes[t].name != "uint8" or len(table.shape_of(t)) != 1:
            raise CheckpointCorruptedError(f"{plain_key(table.paths[t])}: a stored value that is not a row of bytes")
