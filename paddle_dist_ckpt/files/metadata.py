"""What a checkpoint holds: :class:`Metadata` and what it is made of."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from ..core.cached import cached_property
from ..core.columns import IntArray
from ..core.layouts import Layout
from ..core.shards import Kind, ShardTable
from ..tree.paths import Part, parse_path, plain_key, special_keys
from ..tree.values import from_jsonable, values_of
from ..version import __version__
from .times import SaveTimes

__all__ = [
    "INLINE_BYTES",
    "INLINE_TOTAL_BYTES",
    "FileInfo",
    "LocalTensorIndex",
    "LocalTensorMetadata",
    "Metadata",
    "SaveInfo",
    "StorageInfo",
    "save_members",
]

INLINE_BYTES = 4096
"""A larger value becomes an entry of a data file."""
INLINE_TOTAL_BYTES = 8 << 20
"""So do all further ones when those of one rank are this large together."""


@dataclass(frozen=True, slots=True)
class LocalTensorMetadata:
    """Where a local tensor lies in its global tensor.

    Attributes:
        global_offset: Where it starts, in elements, one integer a dimension.
        local_shape: Its own shape.
        dtype: Name of its element type, such as ``"float32"``.
        global_shape: Shape of the global tensor.
        is_flattened, flattened_range: What Paddle's own have for ranges of elements, which are boxes here.
    """

    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    global_shape: tuple[int, ...]
    is_flattened: ClassVar[bool] = False
    flattened_range: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class LocalTensorIndex:
    """Identifies one stored shard: the tensor's flat key and where in the tensor the shard starts.

    The key is also there under the name that Paddle's own have for it, and so is what else these have, for trainers
    that go through the shards: see :class:`LocalTensorMetadata`, and each is stored once.
    """

    tensor_id: str
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...] | None = None
    is_flattened: ClassVar[bool] = False
    flattened_range: ClassVar[None] = None
    replica_id: ClassVar[None] = None

    @property
    def tensor_key(self) -> str:
        """The tensor's flat key."""
        return self.tensor_id


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """Where a shard's bytes are: ``nbytes`` of them from ``data_offset`` in the data section of file ``file_name``."""

    file_name: str
    data_offset: int
    nbytes: int


class FileInfo(msgspec.Struct, frozen=True, array_like=True):
    """A data file: its name, its size in bytes, the xxh3_64 of its header in hexadecimal.

    A file of another format, which has no header of ours, has an empty digest.
    """

    name: str
    size: int
    digest: str


class SaveInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `.metadata` and every data file of a save say of it. The order is that of the members in `.metadata`.

    Attributes:
        save_id: The save's random id.
        unique_id: The checkpoint's number in its folder.
        world_size: How many ranks save.
        block_bytes: How many bytes share a checksum.
        created: When, in UTC, as ISO 8601.
        library: Name and version of the writer.
        paddle_version: Version of Paddle that the writer runs under, or None.
    """

    save_id: str = msgspec.field(name="save")
    unique_id: int
    world_size: int
    block_bytes: int
    created: str
    library: str
    paddle_version: str | None = msgspec.field(name="paddle")

    @classmethod
    def of_now(
        cls, save_id: str, world_size: int, block_bytes: int, paddle_version: str | None, unique_id: int = 0
    ) -> SaveInfo:
        """That of a save which this library makes just now."""
        return SaveInfo(
            save_id=save_id,
            unique_id=unique_id,
            world_size=world_size,
            block_bytes=block_bytes,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            library=f"paddle_dist_ckpt {__version__}",
            paddle_version=paddle_version,
        )


def save_members(record: msgspec.Struct) -> dict[str, Any]:
    """What a record that has the members of :class:`SaveInfo`, among others, says of its save, by their names."""
    return {name: getattr(record, name) for name in SaveInfo.__struct_fields__}


class Metadata(SaveInfo, frozen=True, kw_only=True, eq=False, dict=True):
    """What a checkpoint holds and where, and which save wrote it.

    Attributes:
        save_id, unique_id, world_size, block_bytes, created, library, paddle_version: See :class:`SaveInfo`.
        user_tree: What ``SaveOptions.user_metadata`` held, in tagged JSON form.
        files: The data files.
        table: Tensors and shards, in columns.
        value_records: The non-tensor values, path by path, still in their tagged JSON form.
        format: ``"native"``, or which other format it is read from; such a checkpoint has no checksums of blocks.
        checksums: What that format has to verify ranges of bytes by: the number of the file, the range's first byte,
            how many there are, and their CRC-32.
        left_out: What it has beside that and is not read, by path, with the reason.
        lost: Those of them that are not there, though the checkpoint speaks of them.
        times: How long the save took on each rank; None if that is not known.
        cost: Bytes of memory that the objects of `.metadata` take at the most, more than it has itself, see
            :mod:`.room`.
        job_offsets: Where the boxes start that ranks had of a tensor, by path, where that format tells it and the
            boxes that are stored do not.
    """

    user_tree: Any
    files: list[FileInfo]
    table: ShardTable
    value_records: list[tuple[str, Any]]
    format: str = "native"
    checksums: Sequence[tuple[int, int, int, int]] = ()
    left_out: dict[str, str] = {}
    lost: Sequence[str] = ()
    times: SaveTimes | None = None
    cost: int = 0
    job_offsets: dict[str, list[tuple[int, ...]]] = {}

    def __repr__(self) -> str:
        """Which checkpoint it is: all that it holds may be megabytes."""
        sizes = f"tensors={len(self.table.paths)}, values={len(self.value_records)}, files={len(self.files)}"
        about = f"unique_id={self.unique_id}, save_id={self.save_id!r}, format={self.format!r}"
        return f"<Metadata: {about}, world_size={self.world_size}, created={self.created!r}, {sizes}>"

    @cached_property
    def user_metadata(self) -> dict[str, Any]:
        """What ``SaveOptions.user_metadata`` held; empty if it held nothing."""
        user = from_jsonable(self.user_tree)
        return user if isinstance(user, dict) else {}

    @cached_property
    def file_checksums(self) -> dict[int, list[tuple[int, int, int, int]]]:
        """The checksums by the number of the file."""
        found: dict[int, list[tuple[int, int, int, int]]] = {}
        for checksum in self.checksums:
            found.setdefault(checksum[0], []).append(checksum)
        return found

    @cached_property
    def blocks(self) -> tuple[IntArray, IntArray]:
        """For each shard the number of its first block in its file, and for each file how many blocks it has."""
        return self.table.blocks(self.block_bytes, len(self.files))

    @property
    def paths(self) -> list[str]:
        """The paths of all tensors and values."""
        return self.table.paths + [path for path, _ in self.value_records]

    def key(self, path: str) -> str:
        """The flat key (tensor_id) of a path. It is made each time, for those of all take as much memory as paths."""
        return self.special_keys.get(path) or plain_key(path)

    @cached_property
    def special_keys(self) -> dict[str, str]:
        """The flat keys that are not just the parts of their path with dots between them, by path."""
        return special_keys(self.paths)

    @cached_property
    def path_of(self) -> dict[str, str]:
        """Flat key to path, tensors first, in the order of :attr:`paths`."""
        return {self.key(path): path for path in self.paths}

    @cached_property
    def flat_mapping(self) -> dict[str, tuple[Part, ...]]:
        """Flat key to nested path, tensors and values alike."""
        return {self.key(path): parse_path(path) for path in self.paths}

    @cached_property
    def values(self) -> dict[str, Any]:
        """Flat key to value, for the values kept in `.metadata` itself (those of up to 4 KiB)."""
        return {self.key(path): value for path, value in values_of(self.value_records).items()}

    @cached_property
    def state_dict_metadata(self) -> dict[str, list[LocalTensorMetadata]]:
        """Flat key to where its shards lie."""
        result: dict[str, list[LocalTensorMetadata]] = {}
        for t, (key, dtype, layout) in enumerate(self._tensors()):
            if self.table.kinds[t] != Kind.VALUE:
                corners = zip(*layout.boxes.corners(), strict=True)
                result[key] = [LocalTensorMetadata(offset, shape, dtype, layout.shape) for offset, shape in corners]
        return result

    @cached_property
    def storage_metadata(self) -> dict[LocalTensorIndex, StorageInfo]:
        """Which file, and which of its bytes, each shard is."""
        table = self.table
        names = [info.name for info in self.files]
        result: dict[LocalTensorIndex, StorageInfo] = {}
        for t, (key, _, layout) in enumerate(self._tensors()):
            mine = slice(int(table.first_shard[t]), int(table.first_shard[t + 1]))
            places = table.shard_file[mine].tolist(), table.data_offsets[mine].tolist()
            itemsize = table.dtypes[t].itemsize
            for offset, shape, file, start in zip(*layout.boxes.corners(), *places, strict=True):
                info = StorageInfo(names[file], start, math.prod(shape) * itemsize)
                result[LocalTensorIndex(key, offset, shape)] = info
        return result

    def _tensors(self) -> list[tuple[str, str, Layout]]:
        table = self.table
        columns = zip(table.paths, table.dtypes, table.layout_of.tolist(), strict=True)
        return [(self.key(path), dtype.name, table.layouts[i]) for path, dtype, i in columns]

    @cached_property
    def variable_names(self) -> dict[str, str]:
        """Flat key to the framework's variable name, for the tensors that had one."""
        pairs = zip(self.table.paths, self.table.names, strict=True)
        return {self.key(path): name for path, name in pairs if name is not None}
