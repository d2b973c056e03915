"""Ids, claims, clean-up and the commit: what the coordinator does to the folder.

A save's claim file is made before any other of its files and kept fresh while it lives. It says which save it replaces,
so that whoever finds it after a crash knows what may be removed. Whether a claim is fresh is judged by the folder's own
clock: by the modification times that the folder gives, never by a host's clock.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from ..errors import CheckpointCorruptedError, CheckpointError, CheckpointNotFoundError
from ..files.codec import MAX_HEAD_BYTES, decode_head, decode_metadata, encode_metadata
from ..files.metadata import FileInfo, Metadata
from ..files.names import (
    MOST_IDS,
    ClaimName,
    claim_name,
    metadata_id,
    metadata_name,
    parse_claim,
    parse_data_file,
    parse_foreign_id,
    temporary_name,
)
from ..storage.base import Storage
from ..tree.values import DECODE_ERRORS

__all__ = [
    "PICKLE",
    "Claim",
    "claimed_saves",
    "committed_ids",
    "committed_saves",
    "is_abandoned",
    "newest_id",
    "next_id",
    "nothing_text",
    "remove_saves",
    "save_of",
    "seal",
]

_logger = logging.getLogger("paddle_dist_ckpt")
_FRESH_EVERY = 10.0  # seconds
_EXPIRES_AFTER = 300.0  # seconds; thirty missed refreshes
PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class _ClaimRecord(msgspec.Struct):
    """What a claim file says: whose it is, which save it replaces, which saves' files it has set out to remove."""

    save: str
    replaces: str | None
    removes: list[str]


def save_of(storage: Storage, unique_id: int) -> str | None:
    """The save id of the checkpoint committed under an id; None if its `.metadata` is gone or of another format.

    Raises:
        CheckpointCorruptedError: the file is neither ours nor that of a format known to share the folder.
    """
    name = metadata_name(unique_id)
    try:
        data = storage.read(name, MAX_HEAD_BYTES)
    except (FileNotFoundError, IsADirectoryError):
        return None
    head = decode_head(data, name)
    if head is not None:
        return str(head["save"])
    if data.startswith(PICKLE):
        return None
    raise CheckpointCorruptedError(
        f"{storage.location}/{name} is no paddle_dist_ckpt .metadata file (it starts with {data[:16]!r}); if it was "
        "damaged, rebuild_metadata can make it again; to load an older checkpoint, give its unique_id"
    )


def _metadata_ids(storage: Storage) -> list[int]:
    """The ids of all `.metadata` files, ascending.

    Raises:
        CheckpointNotFoundError: the storage is no folder.
    """
    try:
        names = storage.names()
    except NotADirectoryError:
        raise CheckpointNotFoundError(f"{storage.location} is a file; pass the folder that it is in") from None
    return sorted(i for name in names if (i := metadata_id(name)) is not None)


def nothing_text(storage: Storage, unique_id: int | None = None) -> str:
    """Why there is nothing to load, in words."""
    try:
        storage.identity()
    except FileNotFoundError:
        return f"there is no folder {storage.location}"
    for i in reversed(_metadata_ids(storage)) if unique_id is None else [unique_id]:
        with suppress(FileNotFoundError, IsADirectoryError):
            if storage.read(metadata_name(i), 2) in PICKLE:
                return (
                    f"{storage.location}/{metadata_name(i)} was written by Paddle's own save_state_dict, as a pickle, "
                    "which is not read here; load it with the Paddle that has written it, and save it with this library"
                )
    which = "" if unique_id is None else f" with unique_id {unique_id}"
    others = committed_ids(storage)
    more = f"; there are {', '.join(map(str, others[-10:]))}" if others else ""
    return f"{storage.location} holds no committed checkpoint{which}{more}"


def committed_ids(storage: Storage) -> list[int]:
    """The ids of this format's committed checkpoints, ascending."""
    found = []
    for unique_id in _metadata_ids(storage):
        try:
            if save_of(storage, unique_id) is not None:
                found.append(unique_id)
        except CheckpointError as error:
            _logger.warning("not listed: %s", error)
    return found


def newest_id(storage: Storage) -> int:
    """The newest committed id of this format.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointCorruptedError: the newest `.metadata` is damaged. (An older one is not taken in its place silently.)
    """
    for unique_id in reversed(_metadata_ids(storage)):
        if save_of(storage, unique_id) is not None:
            return unique_id
        _logger.warning("%s/%s is of another format; skipped", storage.location, metadata_name(unique_id))
    raise CheckpointNotFoundError(nothing_text(storage))


def next_id(names: Iterable[str]) -> int:
    """The id that a save takes by itself: one more than any committed one, of whatever format."""
    used = [i for name in names for i in (metadata_id(name), parse_foreign_id(name)) if i is not None]
    following = max(used, default=-1) + 1
    if following >= MOST_IDS:
        raise ValueError(f"the folder has the largest possible unique_id, {following - 1}; pass a free one")
    return following


def committed_saves(storage: Storage) -> dict[str, int]:
    """The save id of every committed checkpoint of this format, with its unique_id. Reads every `.metadata` whole.

    Raises:
        CheckpointError: one cannot be read, so that it is not known which save's files it needs.
    """
    saves = {}
    for unique_id in _metadata_ids(storage):
        if save_of(storage, unique_id) is not None:
            name = metadata_name(unique_id)
            saves[decode_metadata(storage.read(name), name, unique_id).save_id] = unique_id
    return saves


def claimed_saves(storage: Storage) -> dict[str, str]:
    """The saves that some claim speaks of, being written or to be removed, with the claim's name."""
    claimed: dict[str, str] = {}
    for name in storage.names():
        parsed = parse_claim(name)
        if parsed is not None:
            saves = _saves_of_claim(storage, name, parsed, _committed_now(storage, parsed))
            claimed.update(dict.fromkeys(saves, name))
    return claimed


def _committed_now(storage: Storage, parsed: ClaimName) -> set[str]:
    """The save that has the id of a claim, as a set."""
    save = _replaced_save(storage, parsed.unique_id)
    return set() if save is None else {save}


def _saves_of_claim(storage: Storage, name: str, parsed: ClaimName, committed: Container[str]) -> list[str]:
    """The saves whose files a claim is about: its own, those it has to remove, and the one it has replaced.

    A save that is not committed has replaced nothing, whatever it set out for.
    """
    try:
        record = msgspec.json.decode(storage.read(name), type=_ClaimRecord)
    except DECODE_ERRORS as error:
        _logger.debug("the claim %s is torn: %s", name, error)
        return [parsed.save_id]
    has_replaced = record.replaces is not None and parsed.save_id in committed
    return [parsed.save_id, *([record.replaces] if has_replaced and record.replaces else []), *record.removes]


def is_abandoned(storage: Storage, now: float) -> bool:
    """Whether nobody is saving to a folder any more, judged by the claims in it.

    Args:
        storage: The folder.
        now: The time by the folder's own clock: when a file near it was changed just now.
    """
    try:
        claims = [name for name in storage.names() if parse_claim(name) is not None]
        changed = [storage.modified(name) for name in [*claims, "."]]  # one that is about to be claimed has changed
    except FileNotFoundError:
        return False
    return all(now - then > _EXPIRES_AFTER for then in changed)


def remove_saves(storage: Storage, saves: Iterable[str]) -> int:
    """Remove the data files of these saves from a folder; returns how many there were."""
    doomed = set(saves)
    removed = 0
    for name in storage.names() if doomed else ():
        parsed = parse_data_file(name)
        if parsed is not None and parsed.save_id in doomed:
            storage.delete(name)
            removed += 1
    return removed


@dataclass(slots=True)
class Claim:
    """A save's presence in the folder, from before its first file until after its commit or clean-up.

    Attributes:
        storage: The coordinator's folder.
        unique_id: The id that the save sets out for.
        save_id: Its random id.
        automatic: Whether the id was chosen by the save, so that another one will do as well.
        doomed: Save ids whose files are to be removed: those of dead saves, and what these had replaced.
        replaces: The save that has the id now, if it was given and is taken.
    """

    storage: Storage
    unique_id: int
    save_id: str
    automatic: bool
    doomed: list[str] = field(default_factory=list)
    replaces: str | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @classmethod
    def make(cls, storage: Storage, unique_id: int | None, replace_newest: bool = False) -> Claim:
        """Choose an id (unless one is given), claim it, and find out which files dead saves have left."""
        storage.prepare()
        if unique_id is None and replace_newest:
            with suppress(CheckpointError):  # there is none; or it is damaged, and had better stay for a repair
                unique_id = newest_id(storage)
        automatic = unique_id is None
        chosen = next_id(storage.names()) if unique_id is None else unique_id
        if unique_id is not None:
            _refuse_foreign(storage, unique_id)
        claim = cls(storage, chosen, secrets.token_hex(8), automatic)
        claim.replaces = None if automatic else _replaced_save(storage, chosen)
        claim._write()
        claim._take_over_dead()
        claim._thread = threading.Thread(target=claim._keep_fresh, name="paddle_dist_ckpt claim", daemon=True)
        claim._thread.start()
        return claim

    @property
    def name(self) -> str:
        """The claim file's name."""
        return claim_name(self.unique_id, self.save_id)

    def _write(self) -> None:
        record = msgspec.json.encode(_ClaimRecord(self.save_id, self.replaces, self.doomed))
        self.storage.publish(self.name, record, self.name + ".tmp", replace=True)

    def _keep_fresh(self) -> None:
        while not self._stop.wait(_FRESH_EVERY):
            try:
                self.storage.touch(self.name)
            except OSError as error:
                _logger.warning("the claim %s could not be refreshed: %s", self.name, error)

    def _take_over_dead(self) -> None:
        """Make the removal of dead saves' files this save's business.

        IMPORTANT: the dead saves' claims go before any of their files do, and this claim has taken over what they said
        before they go. A save that was only frozen then finds its claim gone and does not commit.
        """
        dead = self._expired_claims()
        if not dead:
            return
        try:
            committed = committed_saves(self.storage)
        except CheckpointError as error:
            _logger.warning("files of dead saves are left, for it is not certain which they are: %s", error)
            return
        known = []
        for name, parsed in dead:
            try:
                self.doomed += _saves_of_claim(self.storage, name, parsed, committed)
                known.append((name, parsed))
            except FileNotFoundError:
                _logger.debug("the claim %s is another save's to take over", name)
        self._write()
        for name, parsed in known:
            self.storage.delete(name)
            self.storage.delete(temporary_name(parsed.unique_id, parsed.save_id))
        # A save that was frozen just before its last step may have been committed until now, but not later.
        try:
            committed = committed_saves(self.storage)
        except CheckpointError as error:
            _logger.warning("files of dead saves are left, for it is not certain which they are: %s", error)
            committed = dict.fromkeys(self.doomed, 0)
        self.doomed = [save for save in self.doomed if save not in committed]

    def _expired_claims(self) -> list[tuple[str, ClaimName]]:
        now = self.storage.modified(self.name)
        others = [(n, parsed) for n in self.storage.names() if (parsed := parse_claim(n)) and n != self.name]
        fresh = {parsed.save_id for name, parsed in others if not self._is_expired(name, now)}
        return [(name, parsed) for name, parsed in others if parsed.save_id not in fresh]

    def _is_expired(self, name: str, now: float) -> bool:
        try:
            return now - self.storage.modified(name) > _EXPIRES_AFTER
        except FileNotFoundError:
            return False

    def publish(self, metadata: Metadata) -> int:
        """Commit. Returns the id under which it was done; an automatic one may be later than the one planned.

        Raises:
            CheckpointError: the claim is gone: another save took this one for dead.
        """
        unique_id = self.unique_id
        while True:
            save = msgspec.structs.replace(metadata.save, unique_id=unique_id)
            data = encode_metadata(dataclasses.replace(metadata, save=save))
            temporary = temporary_name(self.unique_id, self.save_id)
            # IMPORTANT: the claim is looked at when the content has its temporary name, and not before. Who takes this
            # save for dead removes first the claim and then that name, so one of the two stops the commit.
            if self.storage.publish(metadata_name(unique_id), data, temporary, not self.automatic, self._confirm):
                return unique_id
            unique_id = max(unique_id + 1, next_id(self.storage.names()))

    def _confirm(self) -> None:
        """Just before the commit: see that the claim is there, and which save the id has now."""
        if self.name not in self.storage.names():
            raise CheckpointError(
                f"the claim {self.name} is gone: another save took this one, which was silent, for dead"
            )

        replaced = None if self.automatic else _replaced_save(self.storage, self.unique_id)
        if replaced != self.replaces:
            self.replaces = replaced
            self._write()

    def replaced_save(self) -> str | None:
        """The save that the commit has replaced, whose files may be removed now."""
        if self.replaces is None or self.replaces in committed_saves(self.storage):  # it may have another id as well
            return None
        return self.replaces

    def end(self) -> None:
        """End after the commit. Nothing that goes wrong here undoes it, so it is logged and left to a later save."""
        self._stop.set()
        try:
            replaced = self.replaced_save()
            remove_saves(self.storage, [replaced] if replaced is not None else [])
            self._remove()
        except (OSError, CheckpointError) as error:
            _logger.warning("%s: files of replaced or dead saves are left: %s", self.storage.location, error)

    def failed(self, settled: bool) -> None:
        """End after a failure.

        Args:
            settled: Whether nobody is writing any more, and all files of this save are in this folder or are removed by
                those who wrote them. If not, the claim stays and expires, and a later save removes the files.
        """
        self._stop.set()
        try:
            if settled and self.save_id not in committed_saves(self.storage):
                remove_saves(self.storage, [self.save_id])
                self.storage.delete(temporary_name(self.unique_id, self.save_id))
                if not self.doomed:  # otherwise the claim says what else is to be removed
                    self._remove()
        except (OSError, CheckpointError) as error:
            _logger.warning("%s: files of a failed save are left: %s", self.storage.location, error)

    def leave(self) -> None:
        """Stop refreshing; a later save does what is left to do when the claim has expired."""
        self._stop.set()

    def _remove(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self.storage.delete(self.name)


def _refuse_foreign(storage: Storage, unique_id: int) -> None:
    name = metadata_name(unique_id)
    try:
        is_foreign = name in storage.names() and storage.read(name, 2) in PICKLE
    except IsADirectoryError:
        is_foreign = True
    if is_foreign:
        raise ValueError(
            f"unique_id {unique_id} is taken: {storage.location}/{name} is of another format; use another id"
        )


def _replaced_save(storage: Storage, unique_id: int) -> str | None:
    try:
        return save_of(storage, unique_id)
    except CheckpointError:  # damaged, or of a newer version: its files cannot be told, so they stay
        _logger.warning("%s: replacing a .metadata that cannot be read; its data files stay", storage.location)
        return None


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
