"""What a checkpoint holds, of whatever format, and whether its files are there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from ..core.decoding import lacks_memory
from ..core.frames import with_room_for_frames
from ..errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    UnsupportedValueError,
)
from ..files.codec import decode_metadata
from ..files.metadata import Metadata
from ..files.names import metadata_name, parse_data_file
from ..files.room import bytes_on_disk
from ..storage.base import Storage
from ..storage.capabilities import is_part
from .catalogs import foreign_ids, read_foreign
from .foreign import Format, foreign_id, look
from .ids import committed_ids, metadata_ids, newest_id, save_of
from .nothing import nothing_text, warn_of_folders

__all__ = ["Restarts", "check_sizes", "read_checkpoint", "read_with_text", "unless_replaced", "why_unknown"]

_MOST_RESTARTS = 3
_logger = logging.getLogger("paddle_dist_ckpt")

_ADVICE = "rebuild_metadata can make a damaged .metadata again; to load another checkpoint, give its unique_id"


def read_checkpoint(storage: Storage, unique_id: int | None) -> Metadata:
    """Read what a checkpoint holds. One of another format is taken where there is none of ours (of this number).

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointCorruptedError: it is damaged.
        UnsupportedValueError: it is of another format, and holds something that cannot be read.
    """
    return read_with_text(storage, unique_id)[0]


@with_room_for_frames
def read_with_text(storage: Storage, unique_id: int | None) -> tuple[Metadata, bytes]:
    """The same, and what the `.metadata` file holds, if it is of this format."""
    try:
        return _read(storage, unique_id)
    except NotADirectoryError:
        raise CheckpointNotFoundError(nothing_text(storage, unique_id)) from None


def _read(storage: Storage, unique_id: int | None) -> tuple[Metadata, bytes]:
    chosen = newest_id(storage) if unique_id is None else unique_id
    if is_part(storage) and chosen not in {*metadata_ids(storage), *_data_ids(storage)}:  # another's may be beside it
        chosen = None
    found, data = (Format.MISSING, b"") if chosen is None else look(storage, metadata_name(chosen), whole=True)
    if chosen is None or found in (Format.MISSING, Format.PADDLE, Format.FOLDER):
        metadata = read_foreign(storage, unique_id)
        if metadata is None:
            raise CheckpointNotFoundError(nothing_text(storage, unique_id))
        if metadata.format == "pdparams":  # which may hold anything, such as a scheduler's state
            warn_of_folders(storage, [info.name for info in metadata.files])
        return metadata, b""
    name = metadata_name(chosen)
    try:
        on_disk = partial(bytes_on_disk, storage)
        metadata = decode_metadata(data, f"{storage.location}/{name}", chosen, on_disk)
    except CheckpointCorruptedError as error:
        raise CheckpointCorruptedError(str(error) if lacks_memory(error) else f"{error}. {_ADVICE}") from None
    _warn_of_paddles(storage, chosen)
    return metadata, data


def _data_ids(storage: Storage) -> list[int]:
    """Of which checkpoints there are data files."""
    return [parsed.unique_id for name in storage.names() if (parsed := parse_data_file(name)) is not None]


def _warn_of_paddles(storage: Storage, unique_id: int) -> None:
    """Say so if Paddle's own function has saved over a checkpoint: it leaves a `.metadata` that it finds.

    Where ours has replaced Paddle's, older data files of Paddle's are left.
    """
    theirs = [name for name in storage.names() if foreign_id(name) == unique_id]
    with suppress(OSError):  # it is gone by now
        if theirs and storage.modified(max(theirs)) > storage.modified(metadata_name(unique_id)):
            _logger.warning(
                "%s: Paddle's own save_state_dict has written %s to this folder after checkpoint %d was saved; that is "
                "not loaded, for Paddle leaves a .metadata that it finds. Save by one of the two, or to another folder",
                storage.location,
                max(theirs),
                unique_id,
            )


def why_unknown(storage: Storage, unique_id: int | None) -> str | None:
    """Why no reader can read what a folder holds; None if one can, or if it is known what is wrong.

    Args:
        storage: The folder.
        unique_id: Which checkpoint; one that is not among those of the folder is known not to be there.
    """
    try:
        read_checkpoint(storage, unique_id)
    except CheckpointNotFoundError as error:
        try:
            return None if committed_ids(storage) or foreign_ids(storage) else str(error)
        except (CheckpointNotFoundError, NotADirectoryError):
            return str(error)
    except UnsupportedValueError as error:
        return str(error)
    except CheckpointError:
        return None
    return None


class Restarts:
    """Whether reading starts again: when the checkpoint was replaced meanwhile, a few times at most.

    Who finds a file missing, or not as ``.metadata`` has it, asks :meth:`due`: if so, it is no damage, and everything
    is to be read again, ``.metadata`` first.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._count = storage, 0

    def due(self, metadata: Metadata, begun: bool = False) -> bool:
        """Whether the checkpoint is of another save by now, so that it is no wonder if files of this one are missing.

        Args:
            metadata: What has been read.
            begun: Whether some of it is where it was to go, so that it is too late to read another one.

        Raises:
            CheckpointReplacedError: that is so, and it is too late, or has been so too often.
        """
        if metadata.format != "native" or save_of(self._storage, metadata.unique_id) == metadata.save_id:
            return False  # other formats replace nothing in one step
        self._count += 1
        if begun or self._count > _MOST_RESTARTS:
            times = "" if self._count == 1 else f" {self._count} times"
            raise CheckpointReplacedError(
                f"checkpoint {metadata.unique_id} in {self._storage.location} was replaced{times} while it was being "
                "read; try again when nobody saves to this id"
            )
        return True


@contextmanager
def unless_replaced(storage: Storage, metadata: Metadata) -> Iterator[None]:
    """Reading that does not start again: whoever saves under the same id meanwhile has not damaged anything.

    Raises:
        CheckpointReplacedError: a file was missing, or not as ``.metadata`` had it, and the checkpoint is of another
            save by now.
    """
    try:
        yield
    except (CheckpointCorruptedError, FileNotFoundError) as error:
        if Restarts(storage).due(metadata):
            raise CheckpointReplacedError(
                f"checkpoint {metadata.unique_id} in {storage.location} was replaced while it was being read"
            ) from error
        raise


def check_sizes(storage: Storage, metadata: Metadata, files: Iterable[int], all_here: bool = True) -> None:
    """Refuse a `.metadata` whose files are not as large as it says, before anything of that size is allocated.

    Args:
        storage: The folder.
        metadata: What it says.
        files: Numbers of the files to look at.
        all_here: Whether a file that is not there is an error, or may be in another rank's folder.

    Raises:
        CheckpointCorruptedError: a file is missing or has another size.
    """
    for info in (metadata.files[i] for i in files):
        try:
            size = storage.size(info.name)
        except FileNotFoundError:
            if all_here:
                raise CheckpointCorruptedError(f"{storage.location}/{info.name} is missing") from None
            continue
        except IsADirectoryError as error:
            reason = error.strerror or "it is no file"
            raise CheckpointCorruptedError(f"{storage.location}/{info.name}: {reason}") from None
        if size != info.size:
            raise CheckpointCorruptedError(f"{storage.location}/{info.name} has {size} bytes; {info.size} were written")
