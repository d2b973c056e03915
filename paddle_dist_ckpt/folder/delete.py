"""Removes a committed checkpoint from its folder."""

from __future__ import annotations

from ..errors import CheckpointError
from ..files.metadata import Metadata
from ..files.names import metadata_name
from ..storage.base import Storage
from .checkpoint import read_checkpoint
from .commit import remove_saves
from .ids import metadata_ids, save_of
from .lease import Lease

__all__ = ["check_native", "delete"]


def delete(storage: Storage, unique_id: int) -> Metadata:
    """See :func:`paddle_dist_ckpt.delete_checkpoint`."""
    found = read_checkpoint(storage, unique_id)
    check_native(found, storage.location)
    lease = Lease(storage, unique_id, automatic=False)
    try:
        lease.check_alone()
        metadata = read_checkpoint(storage, unique_id)
        needed = _needed_by_others(storage, unique_id)
        names = [info.name for info in metadata.files if info.name not in needed]
        if len(names) == len(metadata.files):
            lease.take_on(metadata.save_id)  # who finds the claim after a crash goes on with this
        lease.confirm()
        # IMPORTANT: `.metadata` is gone for good before any data file is, so that nobody finds a half of a checkpoint.
        storage.delete(metadata_name(unique_id))
        storage.sync()
    except BaseException:
        lease.withdraw(found.save_id)
        raise
    try:
        for name in names:
            storage.delete(name)
        remove_saves(storage, lease.doomed)
        storage.sync()
    except BaseException:
        lease.stop()  # a later save does what is left to do
        raise
    lease.end()
    return metadata


def check_native(metadata: Metadata, location: str) -> None:
    """Refuse a checkpoint of another format: its files are not ours to remove, or to put together anew.

    Raises:
        ValueError: it is of another format.
    """
    if metadata.format != "native":
        raise ValueError(
            f"the checkpoint in {location} is of the format {metadata.format}; only this library's own can be managed"
        )


def _needed_by_others(storage: Storage, unique_id: int) -> set[str]:
    """The data files of the folder's other checkpoints.

    Raises:
        CheckpointError: one cannot be read, so that it is not known which it needs.
    """
    needed: set[str] = set()
    for other in metadata_ids(storage):
        if other == unique_id:
            continue
        try:
            if save_of(storage, other) is not None:
                needed.update(info.name for info in read_checkpoint(storage, other).files)
        except CheckpointError as error:
            raise CheckpointError(
                f"nothing was deleted, for it is not known which files checkpoint {other} needs: {error}"
            ) from error
    return needed
