"""Makes a lost `.metadata` again from the data files, which carry all that it held."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

import msgspec
import numpy as np

from ..core.boxes import Boxes
from ..core.columns import IntArray
from ..core.decoding import lacks_memory
from ..core.dtypes import DType
from ..core.frames import with_room_for_frames
from ..core.layouts import Layout
from ..core.shards import ShardTable
from ..errors import CheckpointCorruptedError, CheckpointError, CheckpointNotFoundError
from ..files.codec import decode_metadata, decode_note, encode_metadata
from ..files.datafile import DataFileInfo, read_info
from ..files.metadata import FileInfo, Metadata, save_members
from ..files.names import metadata_name, parse_data_file
from ..files.room import Room, bytes_on_disk
from ..files.tables import check_room, table_from_record, table_to_record
from ..storage.base import Storage
from .catalogs import ids_beside
from .claims import EXPIRY, claimed_saves
from .commit import publish_under
from .delete import Deletion, removing
from .foreign import Format, look
from .ids import metadata_ids, next_id, no_folder_text, save_of
from .nothing import managers_text, numbers_text
from .verify import problems_of

__all__ = ["rebuild"]

_logger = logging.getLogger("paddle_dist_ckpt")


class _DataFile(NamedTuple):
    """A data file: what it says of itself, its record for `.metadata`, its tensors."""

    info: DataFileInfo
    known: FileInfo
    table: ShardTable


@with_room_for_frames
def rebuild(storage: Storage, save: str | None, progress: bool | None) -> Metadata:
    """See :func:`paddle_dist_ckpt.rebuild_metadata`."""
    saves = _uncommitted(storage)
    found, refused = _complete_saves(storage, {name: files for name, files in saves.items() if save in (None, name)})
    if not found:
        which = "" if save is None else f" {save!r}"
        reasons = "\n".join(f"  save {name}: {reason}" for name, reason in refused.items())
        there = "" if reasons else _there_text(storage, saves)
        raise CheckpointNotFoundError(
            no_folder_text(storage)
            or f"{storage.location} has no complete save{which} without a .metadata{':' if reasons else ''}"
            + (f"; {there}" if there else f"\n{reasons}".rstrip())
        )
    if len(found) > 1:
        raise CheckpointError(
            f"{storage.location} has several complete saves without a .metadata; say which: "
            + ", ".join(f"save={n!r} (id {p[0].info.unique_id}, {p[0].info.created})" for n, p in found.items())
        )
    files = next(iter(found.values()))
    metadata = _merge(files, _free_id(storage, files[0].info))
    del found, files
    name = metadata_name(metadata.unique_id)
    data = encode_metadata(metadata)
    # Or else nobody could read it.
    metadata = decode_metadata(data, name, metadata.unique_id, functools.partial(bytes_on_disk, storage))
    problems = problems_of(storage, metadata, progress)
    if problems:
        raise CheckpointCorruptedError("the data files cannot be trusted:\n" + "\n".join(problems[:50]))
    _publish(storage, metadata, data)
    return metadata


def _there_text(storage: Storage, saves: Collection[str]) -> str:
    """What there is in place of the save that is to be rebuilt."""
    if saves:
        return f"there are files of save {', '.join(itertools.islice(saves, 10))}{', ...' if len(saves) > 10 else ''}"
    ids = metadata_ids(storage)
    return managers_text(storage) or (f"there is one with each of these ids: {numbers_text(ids)}" if ids else "")


def _publish(storage: Storage, metadata: Metadata, data: bytes) -> None:
    """Give the `.metadata` its name, while nobody saves to the id: who begins to waits with the commit.

    Raises:
        CheckpointError: somebody is, or has been.
    """
    name = metadata_name(metadata.unique_id)
    with removing(storage, metadata.unique_id, automatic=False) as lease:
        lease.others.check_nobody_saves(everywhere=False)
        _check_there(storage, metadata, lease.doomed)
        replace = _is_damaged(storage, metadata.unique_id)

        def confirm() -> None:
            lease.confirm()
            if metadata.save_id in _committed(storage):
                raise CheckpointError(f"{storage.location}: save {metadata.save_id} has its .metadata again meanwhile")
            # IMPORTANT: in this order. Who had its claim until just now has removed by then what it has removed.
            if (claim := lease.others.speaking_of(metadata.save_id)) is not None:
                what = f"save {metadata.save_id} is being removed, put there or rebuilt"
                raise CheckpointError(f"{storage.location}: {what}, as {claim} says; {EXPIRY}")
            _check_there(storage, metadata, [])
            if replace and not _is_damaged(storage, metadata.unique_id):  # a backup has been put there, say
                raise CheckpointError(f"{storage.location}/{name} was damaged, and is not any more; try again")

        # The temporary name is this claim's own: whoever finds the claim expired removes that, too.
        if not publish_under(lease, metadata.unique_id, data, replace, confirm):
            raise CheckpointError(f"{storage.location}/{name} appeared meanwhile; try again")
        Deletion(lease, lease.doomed).finish()


def _check_there(storage: Storage, metadata: Metadata, doomed: Collection[str]) -> None:
    """Refuse a save of which files are gone, or about to be."""
    if metadata.save_id in doomed or not set(storage.names()).issuperset(file.name for file in metadata.files):
        raise CheckpointError(f"{storage.location}: save {metadata.save_id} has been removed meanwhile")


def _uncommitted(storage: Storage) -> dict[str, list[str]]:
    """The names of data files, by saves that no `.metadata` names."""
    committed = _committed(storage)
    saves: dict[str, list[str]] = {}
    for name in storage.names():
        parsed = parse_data_file(name)
        if parsed is not None and parsed.save_id not in committed:
            saves.setdefault(parsed.save_id, []).append(name)
    return dict(sorted(saves.items()))


def _complete_saves(
    storage: Storage, saves: Mapping[str, list[str]]
) -> tuple[dict[str, list[_DataFile]], dict[str, str]]:
    """The saves of which every file is there; and why others are not among them."""
    complete: dict[str, list[_DataFile]] = {}
    refused: dict[str, str] = {}
    claimed = claimed_saves(storage)
    room = Room(lambda: sum(bytes_on_disk(storage, save_id) for save_id in saves))
    for save_id, files in saves.items():
        if save_id in claimed:
            refused[save_id] = (
                f"the claim {claimed[save_id]} says that it is being written, or to be removed; "
                "if nobody is at work there any more, remove that file"
            )
            continue
        try:
            found = _read_files(storage, files, room)
            _check_complete([file.info for file in found])
            complete[save_id] = found
        except (OSError, CheckpointCorruptedError) as error:
            refused[save_id] = str(error)
    return complete, refused


def _committed(storage: Storage) -> set[str | None]:
    """The saves that a `.metadata` names which can be read."""
    committed: set[str | None] = set()
    for unique_id in metadata_ids(storage):
        with suppress(CheckpointError):  # damaged, or of a newer version
            committed.add(_save_of(storage, unique_id))
    return committed


def _is_damaged(storage: Storage, unique_id: int) -> bool:
    """Whether a `.metadata` is there but of no format; one of a newer version of ours is not damaged.

    Raises:
        CheckpointCorruptedError: there is not enough memory to tell.
    """
    try:
        _save_of(storage, unique_id)
    except CheckpointError as error:
        if lacks_memory(error):
            raise
        return isinstance(error, CheckpointCorruptedError)
    return False


def _save_of(storage: Storage, unique_id: int) -> str | None:
    """See :func:`.ids.save_of`; all of the `.metadata` is read here."""
    name = metadata_name(unique_id)
    found, data = look(storage, name, whole=True)
    if found is not Format.OURS:
        return save_of(storage, unique_id)
    decode_note(data, name, unique_id)  # at once, if it is another id's, of which there may be any number of links
    return decode_metadata(data, name, unique_id, functools.partial(bytes_on_disk, storage)).save_id


def _read_files(storage: Storage, names: Sequence[str], room: Room) -> list[_DataFile]:
    found = []
    for name in names:
        with closing(storage.open(name)) as file:
            info, _, known, _ = read_info(file, name, room)
        parsed = parse_data_file(name)
        if parsed is None or (parsed.rank, parsed.save_id, parsed.part) != (info.rank, info.save_id, info.part):
            raise CheckpointCorruptedError(f"{name} says inside that it is another file; was it renamed?")
        try:
            table = table_from_record(info.tensors, 1)
            check_room(table, [known])
            info = msgspec.structs.replace(info, tensors=table_to_record(table.select([])[0]))  # it is large
            found.append(_DataFile(info, known, table))
        except CheckpointCorruptedError as error:
            raise CheckpointCorruptedError(f"{name}: {error}") from error
    return sorted(found, key=lambda file: (file.info.rank, file.info.part))


def _check_complete(infos: Sequence[DataFileInfo]) -> None:
    """Refuse a save of which a file is missing."""
    writers = next((info.writers for info in infos if info.writers is not None), None)
    if writers is None:
        raise CheckpointCorruptedError("the coordinator's first file is missing")
    there = {(info.rank, info.part) for info in infos}
    counts = {info.rank: info.parts for info in infos}
    missing = (
        f"rank {rank} part {part}"
        for rank in writers
        for part in range(counts.get(rank, 1))
        if (rank, part) not in there
    )
    if named := list(itertools.islice(missing, 10)):
        raise CheckpointCorruptedError(f"files are missing: {', '.join(named)}")


def _free_id(storage: Storage, info: DataFileInfo) -> int:
    """The id that the save had, or a later one if another checkpoint has it now."""
    if metadata_name(info.unique_id) not in storage.names() or _is_damaged(storage, info.unique_id):
        return info.unique_id
    names = storage.names()
    chosen = next_id(names, ids_beside(names))
    _logger.warning("id %d belongs to another checkpoint now; this one becomes %d", info.unique_id, chosen)
    return chosen


def _merge(files: Sequence[_DataFile], unique_id: int) -> Metadata:
    """What `.metadata` has said of these files; its values are still JSON."""
    infos = [file.info for file in files]
    first = next(info for info in infos if info.writers is not None)
    values = sorted((value for info in infos for value in info.values), key=lambda value: value[0])
    return Metadata(
        **(save_members(first) | {"unique_id": unique_id}),
        user_tree=first.user_metadata,
        files=[file.known for file in files],
        table=_merge_tables([file.table for file in files]),
        value_records=values,
    )


def _merge_tables(tables: Sequence[ShardTable]) -> ShardTable:
    """One table of all files' shards."""
    found: dict[str, tuple[tuple[DType, int, tuple[int, ...]], str | None, list[tuple[Layout, int]]]] = {}
    for file, table in enumerate(tables):
        for t, path in enumerate(table.paths):
            layout = table.layouts[table.layout_of[t]]
            tensor = table.dtypes[t], int(table.kinds[t]), layout.shape
            known, _, parts = found.setdefault(path, (tensor, table.names[t], []))
            if known != tensor:
                raise CheckpointCorruptedError(f"{path}: the data files do not agree on what it is")
            parts.append((layout, file))
    layouts: dict[bytes, tuple[int, Layout]] = {}
    layout_of, shard_file, paths = [], [], sorted(found)
    for path in paths:
        _, _, parts = found[path]
        layout, files = _merged(parts)
        key = msgspec.msgpack.encode(layout.to_record())  # the same whatever type its columns have in memory
        layout_of.append(layouts.setdefault(key, (len(layouts), layout))[0])
        shard_file.append(files)
    tensors = [found[path][0] for path in paths]
    return ShardTable(
        paths=paths,
        dtypes=[dtype for dtype, _, _ in tensors],
        kinds=np.array([kind for _, kind, _ in tensors], np.int64),
        layouts=[layout for _, layout in layouts.values()],
        layout_of=np.array(layout_of, np.int64),
        shard_file=np.concatenate([np.zeros(0, np.int64), *shard_file]),
        names=[found[path][1] for path in paths],
    )


def _merged(parts: Sequence[tuple[Layout, int]]) -> tuple[Layout, IntArray]:
    """The boxes of a tensor that several files hold, in order, and which file each is in."""
    files = np.repeat(np.array([file for _, file in parts]), [len(layout.parts) for layout, _ in parts])
    first = parts[0][0]
    if len(parts) == 1:
        return first, files
    boxes = Boxes.joined([layout.boxes for layout, _ in parts])
    order = np.lexsort(boxes.offset.T[::-1]) if first.shape else np.arange(len(files))
    return Layout(first.shape, boxes.take(order)), files[order]
