"""A commit, from the choice of an id to the clean-up: what the coordinator does to the folder."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from ..errors import CheckpointError
from ..files.codec import encode_metadata
from ..files.metadata import FileInfo, Metadata
from ..files.names import metadata_name, parse_data_file
from ..storage.base import Storage
from .foreign import Format, look
from .ids import committed_saves, metadata_ids, newest_id, next_id
from .lease import Lease

__all__ = ["begin", "finish", "give_up", "publish", "remove_saves", "replaced_save", "seal"]

_logger = logging.getLogger("paddle_dist_ckpt")
_MOST_PUT_ASIDE = 1 << 30


def begin(storage: Storage, unique_id: int | None, replace_newest: bool = False) -> Lease:
    """Choose an id (unless one is given), take a lease, and find out which files dead saves have left."""
    storage.prepare()
    of_paddle = None
    if unique_id is None and replace_newest:
        of_paddle = _newest_of_paddle(storage)
        with suppress(CheckpointError):  # it is damaged, and had better stay for a repair
            unique_id = newest_id(storage) if of_paddle is None else None
    if unique_id is None:
        return Lease(storage, next_id(storage.names()), automatic=True, of_paddle=of_paddle)
    name = metadata_name(unique_id)
    if look(storage, name)[0] in (Format.PADDLE, Format.FOLDER):
        raise ValueError(
            f"unique_id {unique_id} is taken: {storage.location}/{name} is of another format; use another id"
        )
    return Lease(storage, unique_id, automatic=False)


def _newest_of_paddle(storage: Storage) -> int | None:
    """The folder's newest id, if that checkpoint is one of Paddle's own."""
    newest = max(metadata_ids(storage), default=None)
    return newest if newest is not None and look(storage, metadata_name(newest))[0] is Format.PADDLE else None


def seal(storage: Storage, files: Sequence[FileInfo]) -> None:
    """Check that a folder still has these files in their sizes, and make its names durable.

    Raises:
        CheckpointError: a file is gone or has another size.
    """
    for info in files:
        try:
            size = storage.size(info.name)
        except FileNotFoundError:
            raise CheckpointError(f"{storage.location}/{info.name} is gone before it could be committed") from None
        if size != info.size:
            raise CheckpointError(f"{storage.location}/{info.name} has {size} bytes; {info.size} were written")
    # IMPORTANT: names of data files are durable before `.metadata` names them.
    storage.sync()


def publish(lease: Lease, metadata: Metadata) -> int:
    """Commit. Returns the id under which it was done; an automatic one may be later than the one planned.

    Raises:
        CheckpointError: the lease is lost: another save took this one for dead.
    """
    storage, unique_id = lease.storage, lease.unique_id
    while True:
        data = encode_metadata(msgspec.structs.replace(metadata, unique_id=unique_id))
        # IMPORTANT: the claim is looked at when the content has its temporary name, and not before. Who takes this
        # save for dead removes first the claim and then that name, so one of the two stops the commit.
        replace = not lease.automatic
        if storage.publish(metadata_name(unique_id), data, lease.temporary, replace, lease.confirm):
            return unique_id
        unique_id = max(unique_id + 1, next_id(storage.names()))


def replaced_save(lease: Lease) -> str | None:
    """The save that the commit has replaced, whose files may be removed now."""
    if lease.replaces is None or lease.replaces in committed_saves(lease.storage):  # it may have another id as well
        return None
    return lease.replaces


def finish(lease: Lease) -> None:
    """Clean up after the commit. Nothing that goes wrong here undoes it, so it is logged and left to a later save."""
    lease.stop()
    try:
        replaced = replaced_save(lease)
        remove_saves(lease.storage, [replaced] if replaced is not None else [])
        if lease.of_paddle is not None:
            _put_aside(lease, lease.of_paddle)
        lease.end()
    except (OSError, CheckpointError) as error:
        _logger.warning("%s: files of replaced or dead saves are left: %s", lease.storage.location, error)


def _put_aside(lease: Lease, unique_id: int) -> None:
    """Have a checkpoint of Paddle's found no more, since this save stands for it. Its `.metadata` gets another name.

    Trainers insist on one `.metadata` a folder; Paddle's own functions would have overwritten this one.
    """
    storage, name = lease.storage, metadata_name(unique_id)
    if look(storage, name)[0] is not Format.PADDLE:
        return  # somebody has removed it meanwhile, or saved under its id
    if storage.size(name) > _MOST_PUT_ASIDE:
        raise CheckpointError(f"{name} is too large to be one of Paddle's")
    storage.publish(f"{name}.replaced", storage.read(name), lease.temporary, replace=True)
    storage.delete(name)
    storage.sync()
    _logger.info("%s: %s is called %s.replaced now", storage.location, name, name)


def give_up(lease: Lease, settled: bool) -> None:
    """Clean up after a failure.

    Args:
        lease: The save's.
        settled: Whether nobody is writing any more, and all files of this save are in this folder or are removed by
            those who wrote them. If not, the claim stays and expires, and a later save removes the files.
    """
    lease.stop()
    try:
        if settled and lease.save_id not in committed_saves(lease.storage):
            remove_saves(lease.storage, [lease.save_id])
            lease.storage.delete(lease.temporary)
            if not lease.doomed:  # otherwise the claim says what else is to be removed
                lease.end()
    except (OSError, CheckpointError) as error:
        _logger.warning("%s: files of a failed save are left: %s", lease.storage.location, error)


def remove_saves(storage: Storage, saves: Iterable[str]) -> None:
    """Remove the data files of these saves from a folder."""
    doomed = set(saves)
    for name in storage.names() if doomed else ():
        parsed = parse_data_file(name)
        if parsed is not None and parsed.save_id in doomed:
            storage.delete(name)
