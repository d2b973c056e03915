"""Which ids are taken in a folder, and by which saves."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..errors import CheckpointCorruptedError, CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError
from ..files.codec import Note, decode_head, decode_note
from ..files.names import MOST_IDS, metadata_id, metadata_name
from ..storage.base import Storage
from .foreign import Format, foreign_id, is_beside_paddles, look

__all__ = [
    "NO_FOLDER",
    "committed_ids",
    "committed_saves",
    "known_save_of",
    "metadata_ids",
    "newest_id",
    "next_id",
    "no_folder_text",
    "note_of",
    "replaceable_save_of",
    "save_of",
]

NO_FOLDER = "there is no folder"
"""How the text of an error begins that says so."""

_logger = logging.getLogger("paddle_dist_ckpt")
_MOST_NAMED = 100  # files that are not listed: a line of the log takes longer than a look at a small file


def save_of(storage: Storage, unique_id: int) -> str | None:
    """The save id of the checkpoint committed under an id; None if its `.metadata` is gone or of another format.

    Only the file's first line is looked at.

    Raises:
        CheckpointError: the file is of a newer version.
        CheckpointCorruptedError: it is damaged, or neither ours nor of a format known to share the folder.
    """
    return _head_of(storage, unique_id)[1]


def _head_of(storage: Storage, unique_id: int) -> tuple[Format, str | None]:
    """The same, with the file's format."""
    name = metadata_name(unique_id)
    found, data = _looked_at(storage, name, whole=False)
    head = decode_head(data, name) if found is Format.OURS else None
    return found, None if head is None else head.save


def note_of(storage: Storage, unique_id: int) -> Note | None:
    """What the `.metadata` of an id says beside tensors and values; None if it is gone or of another format.

    Raises:
        CheckpointError: see :func:`save_of`; the file is seen to be whole, as well.
    """
    name = metadata_name(unique_id)
    found, data = _looked_at(storage, name, whole=True)
    return decode_note(data, name, unique_id) if found is Format.OURS else None


def _looked_at(storage: Storage, name: str, whole: bool) -> tuple[Format, bytes]:
    """The format of a `.metadata` file, and what it begins with, or holds if it is ours.

    Raises:
        CheckpointCorruptedError: it is of no format that is known to share the folder.
    """
    found, data = look(storage, name, whole)
    if found is Format.UNKNOWN:
        begins = f"it starts with {data[:16]!r}"
        if is_beside_paddles(storage.names(), metadata_id(name)):
            raise CheckpointCorruptedError(
                f"{storage.location}/{name} is neither Paddle's .metadata, whose data files are beside it, nor one of "
                f"paddle_dist_ckpt ({begins}): copy it here again"
            )
        raise CheckpointCorruptedError(
            f"{storage.location}/{name} is no paddle_dist_ckpt .metadata file ({begins}); if it "
            "was damaged, rebuild_metadata can make it again; to load an older checkpoint, give its unique_id"
        )
    return found, data


def known_save_of(storage: Storage, unique_id: int) -> str | None:
    """The save id of the checkpoint committed under an id; None if there is none, or it cannot be told which."""
    try:
        return save_of(storage, unique_id)
    except CheckpointTimeoutError:
        raise
    except CheckpointError:  # damaged, or of a newer version
        return None


def replaceable_save_of(storage: Storage, unique_id: int) -> str | None:
    """The same, for who is to replace or remove it, and says so of one of which that cannot be told.

    Raises:
        CheckpointError: it is one of Paddle's, which is not ours to replace.
    """
    try:
        found, save = _head_of(storage, unique_id)
    except CheckpointTimeoutError:
        raise
    except CheckpointError:
        _logger.warning("%s: replacing a .metadata that cannot be read; its data files stay", storage.location)
        return None
    if found is Format.PADDLE:  # since the id was chosen
        name = metadata_name(unique_id)
        raise CheckpointError(f"{storage.location}/{name} is of another format now, and stays; use another id")
    return save


def metadata_ids(storage: Storage) -> list[int]:
    """The ids of all `.metadata` files, ascending.

    Raises:
        CheckpointNotFoundError: the storage is no folder.
    """
    try:
        names = storage.names()
    except NotADirectoryError:
        text = no_folder_text(storage) or f"{storage.location} is a file; pass the folder that it is in"
        raise CheckpointNotFoundError(text) from None
    return sorted(i for name in names if (i := metadata_id(name)) is not None)


def no_folder_text(storage: Storage) -> str | None:
    """That there is nothing at all at a folder's path; None if there is something."""
    try:
        storage.identity()
    except FileNotFoundError:
        return f"{NO_FOLDER} {storage.location}"
    except NotADirectoryError:
        return f"{NO_FOLDER} {storage.location}: a part of that path is a file"
    return None


def committed_ids(storage: Storage) -> list[int]:
    """The ids of this format's committed checkpoints, ascending."""
    found, left_out = [], 0
    for unique_id in metadata_ids(storage):
        try:
            if save_of(storage, unique_id) is not None:
                found.append(unique_id)
        except CheckpointTimeoutError:
            raise
        except (CheckpointError, OSError) as error:
            left_out += 1
            if left_out <= _MOST_NAMED:
                _logger.warning("not listed: %s", error)
    if left_out > _MOST_NAMED:
        _logger.warning("and not listed: %d more .metadata files of %s", left_out - _MOST_NAMED, storage.location)
    return found


def newest_id(storage: Storage) -> int | None:
    """The newest committed id of this format; None if there is none.

    Raises:
        CheckpointCorruptedError: the newest `.metadata` is damaged. (An older one is not taken in its place silently.)
    """
    for unique_id in reversed(metadata_ids(storage)):
        if save_of(storage, unique_id) is not None:
            return unique_id
    return None


def next_id(names: Iterable[str], others: Iterable[int] = ()) -> int:
    """The id that a save takes by itself: one more than any committed one of ours, of Paddle's, and of ``others``."""
    used = [*others, *(i for name in names for i in (metadata_id(name), foreign_id(name)) if i is not None)]
    following = max(used, default=-1) + 1
    if following >= MOST_IDS:
        raise ValueError(f"the folder has the largest possible unique_id, {following - 1}; pass a free one")
    return following


def committed_saves(storage: Storage) -> dict[str, int]:
    """The save id of every committed checkpoint of this format, with its unique_id. Every `.metadata` is read whole.

    Raises:
        CheckpointError: one cannot be read, so that it is not known which save's files it needs.
    """
    notes = (note_of(storage, unique_id) for unique_id in metadata_ids(storage))
    return {note.save_id: note.unique_id for note in notes if note is not None}
