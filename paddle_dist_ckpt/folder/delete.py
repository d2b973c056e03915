"""Removes a committed checkpoint from its folder, or what is left of saves where there is none."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ..errors import CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError, DurabilityUnknownError
from ..files.metadata import Metadata
from ..files.names import metadata_name
from ..storage.base import Storage, is_refusal
from .checkpoint import read_checkpoint
from .commit import has_files_of, remove_saves
from .ids import metadata_ids, note_of, save_of
from .lease import Lease

__all__ = [
    "Deletion",
    "begin_clearing",
    "begin_deletion",
    "check_native",
    "delete",
    "delete_with_files",
    "removing",
    "warn_of_files_elsewhere",
]

_logger = logging.getLogger("paddle_dist_ckpt")
_MOST_NAMED = 3  # files, in a warning


class Deletion:
    """Something on its way out of a folder: no `.metadata` speaks of it any more, but its data files are still there.

    Args:
        lease: Its own.
        saves: See below.
        claims: Names of other claims, of which nothing is left to do but what is removed here.

    Attributes:
        saves: The saves whose files are to be removed, from all folders.
    """

    def __init__(self, lease: Lease, saves: list[str], claims: Sequence[str] = ()) -> None:
        self._lease, self.saves, self._claims = lease, saves, claims

    def finish(self) -> bool:
        """Remove the files from this folder, and with the claim the last trace. Returns whether the files are gone.

        Nothing that goes wrong here undoes what was done before, so it is logged and left to a later save.
        """
        lease, storage, are_gone = self._lease, self._lease.storage, False
        try:
            lease.stop()
            remove_saves(storage, self.saves, lease.check_held)
            are_gone = True
            for name in self._claims:
                storage.delete(name)
            storage.sync()
            lease.end()
        except Exception as error:  # of a storage of its own kind, for one
            are_gone = are_gone or self._are_gone()
            if not are_gone:  # nor has a save done it that found the claim
                _logger.warning("%s: files of removed saves are left to a later save: %s", storage.location, error)
            self.leave()
        except BaseException:  # an interrupt
            self.leave()
            raise
        return are_gone

    def _are_gone(self) -> bool:
        try:
            return not has_files_of(self._lease.storage, self.saves)
        except Exception:
            return False

    def leave(self) -> None:
        """Leave the files to a later save, for which the claim stays, and let nobody wait."""
        self._lease.leave(self.saves)


def delete(storage: Storage, unique_id: int) -> Metadata:
    """See :func:`paddle_dist_ckpt.delete_checkpoint`."""
    return delete_with_files(storage, unique_id)[0]


def delete_with_files(storage: Storage, unique_id: int, save_id: str | None = None) -> tuple[Metadata, bool]:
    """The same; also whether the data files are gone, too, and not left to a later save.

    ``save_id`` is the save that is meant, if somebody was asked about it: another one that has the id by now stays.
    """
    found = read_checkpoint(storage, unique_id)
    check_native(found, storage.location)
    warn_of_files_elsewhere(storage, found)
    return found, begin_deletion(storage, unique_id, save_id or found.save_id).finish()


def warn_of_files_elsewhere(storage: Storage, metadata: Metadata) -> None:
    """Say so before a removal that leaves files: those that are in the folders of other hosts."""
    there = set(storage.names())
    elsewhere = [info.name for info in metadata.files if info.name not in there]
    if elsewhere:
        _logger.warning(
            "%s: %d of the %d data files of checkpoint %d are not in this folder; where they are in folders of other "
            "hosts, they are left there: %s%s",
            storage.location,
            len(elsewhere),
            len(metadata.files),
            metadata.unique_id,
            ", ".join(elsewhere[:_MOST_NAMED]),
            ", ..." if len(elsewhere) > _MOST_NAMED else "",
        )


def begin_deletion(storage: Storage, unique_id: int, save_id: str) -> Deletion:
    """Remove the `.metadata` of a checkpoint, for good.

    Nobody else is at work in the folder then: who saves has a claim before this looks for claims, or waits with its
    commit until this one's is gone. ``save_id`` is the save that is meant: another one that has the id by now stays.

    Raises:
        CheckpointError: it has been replaced, or the folder is being saved to, or it is not known what others need.
        DurabilityUnknownError: it is gone, but a crash of the machine might undo that, so its data files stay.
    """
    ours: list[str] = []  # what is to go, unless somebody has begun to remove it before
    with removing(storage, unique_id, automatic=False, gone=ours) as lease:
        lease.others.check_nobody_saves()
        # IMPORTANT: what these say is known; a save that ends from here on may leave another one, to others than this.
        others = lease.others.of_id(unique_id)
        over = {name: claim for name, claim in others.items() if claim.is_settled and not claim.deletes}
        theirs = {save for claim in over.values() for save in claim.mentioned}
        # IMPORTANT: looked at after the claims, as what one of them speaks of may be committed under another id by now.
        needed = _needed_by_others(storage, unique_id)
        ours += sorted({save_id, *theirs} - needed - {*lease.doomed})
        if ours:
            lease.take_on(*ours)  # who finds the claim after a crash goes on with this
        # IMPORTANT: only now it is looked who makes these saves. A copy that began before this claim named them has a
        # claim that is seen here; one that begins later sees this claim, and stops.
        needed_or_made = needed | lease.others.answered_for(over) - {save_id}
        lease.confirm()
        if lease.replaces != save_id:
            raise CheckpointError(
                f"checkpoint {unique_id} in {storage.location} has been replaced or removed meanwhile; nothing was "
                "deleted"
            )
        saves = [save for save in (*lease.doomed, *lease.inherited) if save not in needed_or_made]
    try:
        # IMPORTANT: `.metadata` is gone for good before any data file is, so that nobody finds a half of a checkpoint.
        storage.delete(metadata_name(unique_id))
        storage.sync()
        with suppress(Exception):  # nobody need wait while files are removed, or if this dies meanwhile
            lease.mark_done(passes_on=True)
    except BaseException as error:
        what = _end_failed(lease, save_id, ours, saves, error)
        if what is not None and isinstance(error, Exception):
            raise DurabilityUnknownError(
                f"checkpoint {unique_id} is {what} from {storage.location}, its durability unknown: a crash of the "
                f"machine might bring it back, so its data files are left to a later save; it ended with: {error}",
                storage.location,
                unique_id,
            ) from error
        raise
    return Deletion(lease, saves, list(over))


def _end_failed(
    lease: Lease, save_id: str, ours: Sequence[str], saves: Sequence[str], error: BaseException
) -> str | None:
    """End a deletion that has failed when it was about to remove the `.metadata`.

    Args:
        lease: Its own.
        save_id: The save that is meant.
        ours: What nobody removes if it is refused.
        saves: What a later save removes if it was done.
        error: What it has ended with.

    Returns:
        What became of it, in words; None if it was not done, or that is left to a later save to find out.
    """
    lease.stop()
    what = None
    if not isinstance(error, CheckpointError):  # which says itself what may have become of it
        with suppress(Exception):
            what = _what_became(lease.storage, lease.unique_id, save_id)
            if what is not None:
                lease.leave(saves)
            # Not what may happen late, as on a network.
            elif not isinstance(error, Exception) or (isinstance(error, OSError) and is_refusal(error)):
                lease.withdraw(*ours)
    return what


@contextmanager
def removing(storage: Storage, unique_id: int, automatic: bool, gone: Sequence[str] = ()) -> Iterator[Lease]:
    """A block with the lease of a removal. If that fails, nothing is to go, of these saves either."""
    lease = _removal_lease(storage, unique_id, automatic)
    try:
        yield lease
    except BaseException:
        with suppress(Exception):  # what has gone wrong before is to be heard of
            lease.withdraw(*gone)
        raise


def _removal_lease(storage: Storage, unique_id: int, automatic: bool, tries: int = 3) -> Lease:
    """The lease of a removal, for which no folder is made."""
    try:
        return Lease(storage, unique_id, automatic, deletes=True)
    except FileNotFoundError:
        try:
            storage.identity()
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"{storage.location} has been removed meanwhile") from None
        if tries == 1:
            raise
        # It was silent for so long that somebody has removed the temporary name of its claim before there was one.
        return _removal_lease(storage, unique_id, automatic, tries - 1)


def _what_became(storage: Storage, unique_id: int, save_id: str) -> str | None:
    """What became of a deletion that ended in an error, in words; None if it was not done."""
    try:
        return None if save_of(storage, unique_id) == save_id else "deleted"
    except Exception as error:
        return f"perhaps deleted (which cannot be seen: {error})"


def begin_clearing(storage: Storage, unique_id: int, of_checkpoint: bool) -> Deletion:
    """Set out to remove what dead saves have left in a folder, as far as their claims say that.

    Files of which no claim speaks may be all that is left of a checkpoint.

    Args:
        storage: The folder.
        unique_id: The number that the saves have set out for.
        of_checkpoint: Whether the folder may have a checkpoint of that number, which stays.

    Raises:
        CheckpointError: it has a checkpoint by now and may not, or is being saved to, or nothing can be removed.
    """
    with removing(storage, unique_id, automatic=of_checkpoint) as lease:
        lease.others.check_nobody_saves()
        if not lease.doomed:  # or it would be said that all is removed
            lease.others.check_none_stuck()
        if not of_checkpoint and any(name.endswith(".metadata") for name in storage.names()):
            raise CheckpointError(f"{storage.location} has a checkpoint by now")
        lease.confirm()
        lease.mark_done(passes_on=True)  # it removes no `.metadata`, so nobody need wait
    return Deletion(lease, lease.doomed)


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
    """The saves of the folder's other checkpoints.

    Raises:
        CheckpointError: one cannot be read, so that it is not known which it is of.
    """
    needed: set[str] = set()
    for other in metadata_ids(storage):
        if other == unique_id:
            continue
        try:
            note = note_of(storage, other)
        except CheckpointTimeoutError:
            raise
        except CheckpointError as error:
            raise CheckpointError(
                f"nothing was deleted, for it is not known which files checkpoint {other} needs: {error}"
            ) from error
        if note is not None:
            needed.add(note.save_id)
    return needed
