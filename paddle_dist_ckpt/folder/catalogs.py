"""Checkpoints of other formats, as what whoever reads our own knows."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import xxhash

from ..core.garbage import no_collections
from ..core.layouts import shared_layouts
from ..core.shards import Kind, ShardTable
from ..errors import CheckpointCorruptedError, CheckpointError, CheckpointNotFoundError, UnsupportedValueError
from ..files.metadata import FileInfo, Metadata
from ..files.names import is_ours, metadata_id
from ..files.tables import table_to_record
from ..readers import READERS
from ..readers.catalog import Catalog, Reader
from ..readers.checks import is_text
from ..storage.base import Storage
from ..tree.paths import format_path
from ..tree.values import to_jsonable
from ..visible import visible
from .foreign import Format, look, part_text

__all__ = ["foreign_ids", "ids_beside", "read_foreign"]

_logger = logging.getLogger("paddle_dist_ckpt")
_BLOCK_BYTES = 1 << 20  # nothing is verified by blocks, but what is read is rounded to them, as of our own files
_NOTHING: Any = {"dict": []}  # the tagged form of user metadata that has nothing


def foreign_ids(storage: Storage) -> list[int]:
    """The ids of the checkpoints of another format in a folder, ascending. If there are several formats, of the first.

    Raises:
        OSError: the folder cannot be read; NotADirectoryError if it is no folder.
    """
    return next((ids for _, ids in _seen(_names(storage))), [])


def ids_beside(names: Collection[str]) -> set[int]:
    """The ids of the checkpoints of all other formats among the names in a folder, but for those whose `.metadata` has
    the name that one of ours would have.
    """
    theirs = [name for name in names if is_text(name) and (not is_ours(name) or metadata_id(name) is not None)]
    return {number for _, ids in _seen(theirs) for number in ids}


def read_foreign(storage: Storage, unique_id: int | None) -> Metadata | None:
    """A checkpoint of another format, the newest or that of an id; None if the folder has none, or none of that.

    Raises:
        CheckpointNotFoundError: it is a file, which is not enough.
        CheckpointCorruptedError: it is damaged, or contradicts itself.
        UnsupportedValueError: it holds something that cannot be read.
        OSError: the folder cannot be read; NotADirectoryError if it is no folder.
    """
    names = _names(storage)
    if (part := part_text(storage, names)) is not None:
        raise CheckpointNotFoundError(part)
    seen = _seen(names)
    for reader, ids in seen:
        if unique_id is None or unique_id in ids:
            if len(seen) > 1:
                titles = ", ".join(other.title for other, _ in seen)
                _logger.warning("%s holds several formats: %s; %s is taken", storage.location, titles, reader.title)
            number = ids[-1] if unique_id is None else unique_id
            with _only_our_errors(storage.location, reader.title), no_collections():
                return _as_metadata(reader.read(storage, names, number), reader.title)
    return None


@contextmanager
def _only_our_errors(folder: str, title: str) -> Iterator[None]:
    """A block in which whatever a file's contents bring about says that the file is damaged, and in which folder.

    Readers check what they read, and name the file. This is for what nobody has thought of as well.

    Raises:
        CheckpointCorruptedError: anything was raised but other errors of this library and of the storage.
        UnsupportedValueError: it was raised.
    """
    where = f"{folder}: {title}"
    try:
        yield
    except (CheckpointCorruptedError, UnsupportedValueError) as error:
        if visible(folder, None) in str(error):
            raise
        raise type(error)(f"{folder}: {error}") from error
    except (CheckpointError, OSError):
        raise
    except MemoryError as error:
        raise CheckpointCorruptedError(f"{where}: there is not enough memory to find out what it holds") from error
    except Exception as error:
        kind = type(error).__name__
        raise CheckpointCorruptedError(f"{where}, which cannot be read ({kind}: {str(error)[:200]})") from error


def _names(storage: Storage) -> list[str]:
    """The names in a folder but for those of our own files, of which some could be taken for those of others.

    A `.metadata` of ours has the name that Paddle's has. Names that are no text cannot be kept, and no format has them.
    """
    return [
        name
        for name in storage.names()
        if is_text(name) and (not is_ours(name) or (metadata_id(name) is not None and _is_of_paddle(storage, name)))
    ]


def _is_of_paddle(storage: Storage, name: str) -> bool:
    try:
        return look(storage, name)[0] is Format.PADDLE
    except OSError as error:
        _logger.warning("%s/%s cannot be looked at: %s", storage.location, name, error)
        return False


def _seen(names: Collection[str]) -> list[tuple[Reader, list[int]]]:
    """What finds something among these names, with the ids, in the order in which readers are asked."""
    return [(reader, ids) for reader in READERS if (ids := reader.found(names))]


def _as_metadata(catalog: Catalog, title: str) -> Metadata:
    """A catalog in the columns in which loads know checkpoints.

    Args:
        catalog: What the checkpoint holds.
        title: What its format is called, where the catalog does not say who has written it.
    """
    tensors = sorted(((format_path(tensor.path), tensor) for tensor in catalog.tensors), key=lambda pair: pair[0])
    pieces = [sorted(tensor.pieces) for _, tensor in tensors]  # by offset
    boxes = (tuple(piece.box for piece in ordered) for ordered in pieces)
    layouts, layout_of = shared_layouts((tensor.shape, cut) for (_, tensor), cut in zip(tensors, boxes, strict=True))
    files = [piece.file for ordered in pieces for piece in ordered]
    positions = [piece.position for ordered in pieces for piece in ordered]
    table = ShardTable(
        paths=[path for path, _ in tensors],
        dtypes=[tensor.dtype for _, tensor in tensors],
        kinds=np.full(len(tensors), Kind.TENSOR, np.int64),
        layouts=layouts,
        layout_of=layout_of,
        shard_file=np.array(files, np.int64),
        names=[tensor.name for _, tensor in tensors],
        positions=np.array(positions, np.int64),
    )
    values = sorted(
        ((format_path(path), to_jsonable(value, ".".join(map(str, path)))) for path, value in catalog.values),
        key=lambda pair: pair[0],
    )
    # It stands for all that was read, types, shapes and boxes too, which others of as many bytes may have in the same
    # places: another one means that the files have been replaced.
    seen = msgspec.msgpack.encode((catalog.format, catalog.files, table_to_record(table), positions, values))
    return Metadata(
        save_id=f"{xxhash.xxh3_64_intdigest(seen):016x}",
        unique_id=catalog.unique_id,
        world_size=catalog.world_size,
        block_bytes=_BLOCK_BYTES,
        created="",
        library=catalog.version or title,
        paddle_version=None,
        user_tree=_NOTHING,
        files=[FileInfo(name, size, "") for name, size in catalog.files],
        table=table,
        value_records=values,
        format=catalog.format,
        checksums=catalog.checksums,
        left_out={format_path(path): reason for path, reason in catalog.left_out},
        lost=list(map(format_path, catalog.lost)),
        job_offsets={path: tensor.offsets for path, tensor in tensors if tensor.offsets is not None},
    )
