"""Reading a committed checkpoint: its `.metadata`, and whether its files are there."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import CheckpointCorruptedError, CheckpointNotFoundError
from ..files.codec import decode_metadata
from ..files.metadata import Metadata
from ..files.names import metadata_name
from ..storage.base import Storage
from .foreign import Format, format_of
from .ids import newest_id, nothing_text

__all__ = ["check_sizes", "read_checkpoint"]

_ADVICE = "rebuild_metadata can make a damaged .metadata again; to load another checkpoint, give its unique_id"


def read_checkpoint(storage: Storage, unique_id: int | None) -> Metadata:
    """Read a `.metadata` file.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointCorruptedError: it is damaged.
    """
    chosen = newest_id(storage) if unique_id is None else unique_id
    name = metadata_name(chosen)
    try:
        data = storage.read(name)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(nothing_text(storage, chosen)) from None
    if format_of(data) is Format.PADDLE:
        raise CheckpointNotFoundError(nothing_text(storage, chosen))
    try:
        return decode_metadata(data, f"{storage.location}/{name}", chosen)
    except CheckpointCorruptedError as error:
        raise CheckpointCorruptedError(f"{error}. {_ADVICE}") from error


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
        if size != info.size:
            raise CheckpointCorruptedError(f"{storage.location}/{info.name} has {size} bytes; {info.size} were written")
