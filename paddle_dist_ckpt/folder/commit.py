"""A commit, from the choice of an id to the clean-up: what the coordinator does to the folder."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from ..core.log import warn_only
from ..errors import CheckpointError, CheckpointTimeoutError, DurabilityUnknownError
from ..files.codec import encode_metadata
from ..files.metadata import FileInfo, Metadata
from ..files.names import metadata_name, parse_data_file, parse_temporary, step_of
from ..storage.base import Storage, is_refusal
from ..storage.capabilities import is_published
from .aside import put_aside
from .catalogs import ids_beside
from .checkpoint import read_checkpoint
from .foreign import Format, look
from .ids import committed_saves, metadata_ids, newest_id, next_id, save_of
from .lease import Lease
from .nothing import managers_text

__all__ = [
    "Aftermath",
    "aftermath",
    "begin",
    "finish",
    "give_up",
    "has_files_of",
    "in_folder",
    "publish",
    "publish_under",
    "remove_saves",
    "seal",
    "warn_of_others",
]

_logger = logging.getLogger("paddle_dist_ckpt")
_TRIES = 5  # to do something in a folder that others remove when it is empty
T = TypeVar("T")


def in_folder(storage: Storage, work: Callable[[], T]) -> T:
    """Make a folder, and do this in it: again, if somebody has removed the folder before there was a claim in it."""
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError, FileExistsError):  # the latter if it goes while it is made
            storage.prepare()
            return work()
    storage.prepare()
    return work()


def begin(
    storage: Storage,
    unique_id: int | None,
    replace_newest: bool = False,
    given_up: Collection[str] = (),
    patience: float = math.inf,
    made: list[Lease] | None = None,
) -> Lease:
    """Choose an id (unless one is given), take a lease, and find out which files dead saves have left.

    ``given_up`` are saves that are known to be dead; for ``patience`` and ``made`` see :class:`.lease.Lease`.
    """

    def take() -> Lease:
        chosen, of_paddle = unique_id, None
        if chosen is None and replace_newest:
            of_paddle = _newest_of_paddle(storage)
            with suppress(CheckpointError):  # it is damaged, and had better stay for a repair
                chosen = newest_id(storage) if of_paddle is None else None
        names = storage.names()
        warn_of_others(storage, names, chosen)
        if chosen is None:
            # Who replaces the newest does as Paddle, to which only its own checkpoints count.
            others = () if replace_newest else ids_beside(names)
            return Lease(storage, next_id(names, others), True, of_paddle, given_up, made=made)
        name = metadata_name(chosen)
        if look(storage, name)[0] in (Format.PADDLE, Format.FOLDER):
            raise ValueError(
                f"unique_id {chosen} is taken: {storage.location}/{name} is of another format; use another id"
            )
        return Lease(storage, chosen, automatic=False, given_up=given_up, patience=patience, made=made)

    return in_folder(storage, take)


def warn_of_others(storage: Storage, names: Collection[str], unique_id: int | None) -> None:
    """Say so if a save, or a copy of one, will stand in the place of what others have in the folder.

    Args:
        storage: The folder.
        names: The names in it.
        unique_id: The save's number; None for one that is free.
    """
    if any(step_of(name) is not None for name in names) and managers_text(storage):
        _logger.warning(
            "%s: the folder has the steps of a CheckpointManager as well; loads from it will find this save in their "
            "place: save to another folder",
            storage.location,
        )
    if unique_id is not None and metadata_name(unique_id) not in names and unique_id in ids_beside(names):
        _logger.warning(
            "%s: the folder has a checkpoint of another format as well, with the id %d; loads will find this save in "
            "its place",
            storage.location,
            unique_id,
        )


def _newest_of_paddle(storage: Storage) -> int | None:
    """The folder's newest id, if that checkpoint is one of Paddle's own."""
    newest = max(metadata_ids(storage), default=None)
    return newest if newest is not None and look(storage, metadata_name(newest))[0] is Format.PADDLE else None


def seal(storage: Storage, files: Sequence[FileInfo]) -> None:
    """Check that a folder still has these files in their sizes, and make its names durable.

    Raises:
        CheckpointError: a file is gone or has another size, or the folder is gone.
    """
    for info in files:
        try:
            size = storage.size(info.name)
        except FileNotFoundError:
            raise CheckpointError(f"{storage.location}/{info.name} is gone before it could be committed") from None
        if size != info.size:
            raise CheckpointError(f"{storage.location}/{info.name} has {size} bytes; {info.size} were written")
    # IMPORTANT: names of data files are durable before `.metadata` names them.
    try:
        storage.sync()
    except FileNotFoundError:  # somebody has taken this save for dead, and removed it
        raise CheckpointError(f"{storage.location} is gone before it could be committed") from None


def publish(lease: Lease, metadata: Metadata, value_cost: int) -> int:
    """Commit. Returns the id under which it was done; an automatic one may be later than the one planned.

    ``value_cost``: see :func:`.files.codec.encode_metadata`.

    Raises:
        CheckpointError: the lease is lost: another save or export took this one for dead.
        DurabilityUnknownError: see :func:`publish_under`.
    """
    storage, unique_id = lease.storage, lease.unique_id
    while True:
        data = encode_metadata(msgspec.structs.replace(metadata, unique_id=unique_id), value_cost)
        # IMPORTANT: the claim is looked at when the content has its temporary name, and not before. Who takes this
        # save for dead removes first the claim and then that name, so one of the two stops the commit.
        if publish_under(lease, unique_id, data, not lease.automatic, lease.confirm):
            return unique_id
        storage.delete(lease.temporary)  # it may have been impossible to remove
        unique_id = max(unique_id + 1, next_id(storage.names()))


def publish_under(lease: Lease, unique_id: int, data: bytes, replace: bool, confirm: Callable[[], None]) -> bool:
    """Publish a `.metadata` under a lease; returns False if its name is taken and it may not replace anything.

    Raises:
        CheckpointError: the lease is lost; or ``confirm`` raised it.
        DurabilityUnknownError: it is published, or may be, but a crash of the machine might undo that.
        OSError: it is not published.
    """
    storage, begun = lease.storage, list[bool]()

    def confirm_and_begin() -> None:
        confirm()
        begun.append(True)

    try:
        return storage.publish(metadata_name(unique_id), data, lease.temporary, replace, confirm_and_begin)
    except CheckpointTimeoutError as error:  # says itself what may have become of it, if that cannot be seen
        if not (begun and is_published(storage, metadata_name(unique_id), data)):
            raise
        why = "the disk has not answered since within progress_timeout"
        raise _unknown("committed", storage, unique_id, why) from error
    except Exception as error:  # of memory that is used up, for one, or of a storage of its own kind
        what = _what_became(storage, unique_id, data) if begun else None
        if what is None:
            if isinstance(error, FileNotFoundError):  # the name under which it was complete
                lease.check_held()
            raise
        raise _unknown(what, storage, unique_id, f"it ended with: {_said(error)}") from error


def _unknown(what: str, storage: Storage, unique_id: int, why: str) -> DurabilityUnknownError:
    location, text = storage.location, f"its durability unknown: a crash of the machine might undo it, for {why}"
    return DurabilityUnknownError(f"{what} as id {unique_id} to {location}, {text}", location, unique_id)


def _what_became(storage: Storage, unique_id: int, data: bytes) -> str | None:
    """What became of a commit that ended in an error, in words; None if it was not done."""
    try:
        return "committed" if storage.read(metadata_name(unique_id), len(data) + 1) == data else None
    except FileNotFoundError:
        return None
    except CheckpointTimeoutError:
        raise
    except Exception as error:
        return f"perhaps committed (which cannot be seen: {_said(error)})"


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


class Aftermath(msgspec.Struct, frozen=True):
    """What is to be cleaned up after a commit.

    Attributes:
        saves: The saves whose files may be removed now, from all folders.
        claims: The claims of others that have nothing left to do.
        waits: Whether another save may replace this one without knowing it, so that this one's claim has to stay.
    """

    saves: list[str]
    claims: list[str]
    waits: bool


def aftermath(lease: Lease, unique_id: int, save_id: str) -> Aftermath:
    """Find out, after a commit, what the commit has replaced, and whether it was replaced itself.

    What goes wrong here does not undo the commit, so it is logged, and everything left to a later save.

    Args:
        lease: The save's.
        unique_id: The id under which it was committed.
        save_id: What was committed under it.
    """
    try:
        return _aftermath(lease, unique_id, save_id)
    except Exception as error:
        saves = [save for save in (lease.replaces, *lease.inherited) if save is not None]
        warn_only("%s: files of replaced saves are left to a later one: %s", lease.storage.location, error)
        _speak_again(lease, saves)
        return Aftermath([], [], True)


def _aftermath(lease: Lease, unique_id: int, save_id: str) -> Aftermath:
    """See :func:`aftermath`.

    A save that has confirmed what it replaces before this one was published, and is published after it, replaces this
    one and does not know. It has a claim until it is done, or another one says that it has taken it over. So who finds
    no such claims, and after that its own save under the id, has seen the last of those; and who finds one leaves its
    own claim, marked, to the other save, or if that dies, to whoever comes when both have expired.
    """
    storage, (others, rivals) = lease.storage, lease.others.rivals(unique_id)
    if rivals:
        lease.mark_done(unique_id)
        others, rivals = lease.others.rivals(unique_id)  # IMPORTANT: of two that end at once, one sees the other's mark
    over = {name: claim for name, claim in others.items() if claim.is_settled}
    theirs = {*lease.inherited, *(save for claim in over.values() for save in claim.mentioned)}
    if new := theirs.difference([lease.replaces, *lease.inherited]):
        try:
            lease.take_on(*sorted(new))
        except OSError as error:  # a full disk; what can be removed makes room
            _logger.debug("what ended saves have left stays: %s", error)
            theirs, over = theirs - new, {}
    # IMPORTANT: only now it is looked who makes these saves. A copy that began before this claim named them has a claim
    # that is seen here; one that begins later sees this claim, and stops.
    if theirs:
        theirs -= lease.others.answered_for(over)
    doubtful = {lease.replaces, *theirs} - {None}
    # IMPORTANT: looked at after the claims.
    if save_of(storage, unique_id) != save_id:
        doubtful.add(save_id)
    committed = committed_saves(storage) if doubtful else {}
    saves = sorted(save for save in doubtful if save is not None and save not in committed)
    claims = [name for name, claim in over.items() if not rivals or not any(save in committed for save in claim.own)]
    return Aftermath(saves, claims, rivals and save_id not in saves)


def finish(lease: Lease, left: Aftermath) -> None:
    """Clean up after the commit. Nothing that goes wrong here undoes it, so it is logged and left to a later save."""
    lease.stop()
    try:
        remove_saves(lease.storage, left.saves, lease.check_held)
        if lease.of_paddle is not None:
            put_aside(lease.storage, lease.of_paddle, lease.temporary)
        for name in left.claims:
            lease.storage.delete(name)
        if left.waits:
            lease.storage.delete(lease.temporary)  # whoever removes the claim does not look for it
        else:
            lease.end()
    except Exception as error:
        warn_only("%s: files of replaced or dead saves are left: %s", lease.storage.location, error)
        _speak_again(lease, left.saves)


def _speak_again(lease: Lease, saves: Sequence[str]) -> None:
    """See to it that some claim speaks of saves whose files are left. Who has taken this one for dead, and its claim,
    may have done so before it had replaced them."""
    with suppress(Exception):
        lease.speak_again(saves)


def give_up(lease: Lease, settled: bool) -> None:
    """Clean up after a failure.

    Args:
        lease: The save's.
        settled: Whether nobody is writing any more, and all files of this save are in this folder or are removed by
            those who wrote them. If not, the claim stays and expires, and a later save removes the files; but if the
            claim is gone, nobody else knows of files that were made since.
    """
    lease.stop()
    if lease.is_ended:  # it is committed, and a rank was lost after that
        return
    try:
        committed_as = committed_saves(lease.storage).get(lease.save_id)
        if committed_as is not None:
            lease.mark_done(committed_as)  # what it has replaced stays until the claim has expired
        elif settled or not lease.is_held():
            remove_saves(lease.storage, [lease.save_id])
            if not settled:  # nor does anybody know of files in other folders
                lease.speak_again([lease.save_id])
            elif not lease.doomed:  # otherwise the claim says what else is to be removed
                lease.end()
    except Exception as error:  # the caller has to hear of what made the save fail
        warn_only("%s: files of a failed save are left: %s", lease.storage.location, error)
        _speak_again(lease, [lease.save_id])


def remove_saves(storage: Storage, saves: Iterable[str], check: Callable[[], object] = lambda: None) -> None:
    """Remove the data files of these saves from a folder, and what has the temporary names of their `.metadata`.

    Those that are committed in this very folder and have all their files in it stay: they may have been copied to it
    since, or collected in it. ``check`` is called before each removal: it raises if the saves are somebody else's to
    remove, or may have come back.

    Raises:
        CheckpointError: it is not known what is committed, as a `.metadata` cannot be read.
        OSError: a file could not be removed. If that was refused, the others are gone: it is the first one's then.
    """
    doomed = set(saves)
    for save, unique_id in committed_saves(storage).items() if doomed else ():
        if save in doomed and _is_whole(storage, unique_id):
            _logger.warning("%s: checkpoint %d stays, for it is committed there", storage.location, unique_id)
            doomed.remove(save)
    failure: OSError | None = None
    for name in storage.names() if doomed else ():
        parsed = parse_data_file(name) or parse_temporary(name)
        if parsed is not None and parsed.save_id in doomed:
            check()
            try:
                storage.delete(name)
            except OSError as error:
                if not is_refusal(error):  # nor would the disk answer for the others
                    raise
                failure = failure or error
    if failure is not None:
        raise failure


def has_files_of(storage: Storage, saves: Collection[str]) -> bool:
    """Whether a folder has data files of some of these saves."""
    return any(file is not None and file.save_id in saves for file in map(parse_data_file, storage.names()))


def _is_whole(storage: Storage, unique_id: int) -> bool:
    """Whether a folder has all data files of a checkpoint that is committed in it."""
    files = read_checkpoint(storage, unique_id).files
    return {info.name for info in files}.issubset(storage.names())
