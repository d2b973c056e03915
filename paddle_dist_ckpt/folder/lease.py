"""Leases: a save's right to its files in a folder.

A save's claim file is made before any other of its files and kept fresh while it lives. It says which save it replaces,
so that whoever finds it after a crash knows what may be removed. Whether a claim is fresh is judged by the folder's own
clock: by the modification times that the folder gives, never by a host's clock.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Container

import msgspec

from ..errors import CheckpointError
from ..files.names import ClaimName, claim_name, parse_claim, temporary_name
from ..storage import LocalStorage
from ..storage.base import Storage
from ..tree.values import DECODE_ERRORS
from .ids import committed_saves, known_save_of

__all__ = ["Lease", "claimed_saves", "is_abandoned"]

_logger = logging.getLogger("paddle_dist_ckpt")
_FRESH_EVERY = 10.0  # seconds
_EXPIRES_AFTER = 300.0  # seconds; thirty missed refreshes
_MOST_CLAIM_BYTES = 1 << 20  # for more saves to remove than any folder has


class _ClaimRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a claim file says: whose it is, which save it replaces, which saves' files it has set out to remove; and the
    id of the checkpoint of Paddle's that it stands for."""

    save: str
    replaces: str | None
    removes: list[str]
    of_paddle: int | None = None


_CLAIM_DECODER = msgspec.json.Decoder(_ClaimRecord)  # made here, as threads must not make it at once


class Lease:
    """A save's lease, from before its first file until after its commit or clean-up.

    Args:
        storage: The coordinator's folder.
        unique_id: The id that the save sets out for.
        automatic: Whether the id was chosen by the save, so that another one will do as well.
        of_paddle: The id of a checkpoint of Paddle's that the save stands for when it is committed.

    Attributes:
        save_id: The save's random id.
        replaces: The save that has the id now, if it was given and is taken.
        doomed: Save ids whose files are to be removed: those of dead saves, and what these had replaced.
    """

    def __init__(self, storage: Storage, unique_id: int, automatic: bool, of_paddle: int | None = None) -> None:
        self.storage, self.unique_id, self.automatic, self.of_paddle = storage, unique_id, automatic, of_paddle
        self.save_id = secrets.token_hex(8)
        self.replaces = self._holder()
        self.doomed: list[str] = []
        self._write()
        self._take_over_dead()
        self._stopped = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="paddle_dist_ckpt claim", daemon=True)
        self._keeper.start()

    @property
    def name(self) -> str:
        """The claim file's name."""
        return claim_name(self.unique_id, self.save_id)

    @property
    def temporary(self) -> str:
        """The name that the save's `.metadata` has until it is published."""
        return temporary_name(self.unique_id, self.save_id)

    def _holder(self) -> str | None:
        """The save that has the id now and that a commit would replace."""
        return None if self.automatic else known_save_of(self.storage, self.unique_id)

    def _write(self) -> None:
        record = msgspec.json.encode(_ClaimRecord(self.save_id, self.replaces, self.doomed, self.of_paddle))
        self.storage.publish(self.name, record, self.name + ".tmp", replace=True)

    def _take_over_dead(self) -> None:
        """Make the removal of dead saves' files this save's business.

        IMPORTANT: the dead saves' claims go before any of their files do, and this claim has taken over what they said
        before they go. A save that was only frozen then finds its claim gone and does not commit.
        """
        dead = _expired_claims(self.storage, self.name)
        if not dead:
            return
        try:
            committed = committed_saves(self.storage)
            for name, parsed in list(dead.items()):
                try:
                    record = _record_of(self.storage, name, parsed)
                    self.doomed += _saves_of_claim(record, committed)
                    if record.save in committed and self.of_paddle is None:
                        self.of_paddle = record.of_paddle
                except FileNotFoundError:
                    _logger.debug("the claim %s is another save's to take over", name)
                    del dead[name]
            self._write()
            for name, parsed in dead.items():
                self.storage.delete(name)
                self.storage.delete(temporary_name(parsed.unique_id, parsed.save_id))
            # A save that was frozen just before its last step may have been committed until now, but not later.
            committed = committed_saves(self.storage)
            self.doomed = [save for save in self.doomed if save not in committed]
        except CheckpointError as error:
            self.doomed = []
            _logger.warning("files of dead saves are left, for it is not certain which they are: %s", error)

    def confirm(self) -> None:
        """Just before the commit: see that the claim is there, and which save the id has now.

        Raises:
            CheckpointError: the claim is gone: another save took this one for dead.
        """
        if self.name not in self.storage.names():
            raise CheckpointError(
                f"the claim {self.name} is gone: another save took this one, which was silent, for dead"
            )
        replaced = self._holder()
        if replaced != self.replaces:
            self.replaces = replaced
            self._write()

    def take_on(self, save: str) -> None:
        """Set out to remove a save's files. Whoever finds this claim expired does it, unless the save is committed."""
        self.doomed.append(save)
        self._write()

    def withdraw(self, save: str) -> None:
        """End before anything was done to a save's files; what is left of dead saves is left to a later save."""
        self.stop()
        if set(self.doomed) <= {save}:
            self.end()

    def check_alone(self) -> None:
        """See that nobody else is saving to the folder.

        Raises:
            CheckpointError: somebody is, or died less than a few minutes ago.
        """
        others = [name for name in _claims(self.storage) if name != self.name]
        if others:
            raise CheckpointError(
                f"{self.storage.location} is being saved to, as {others[0]} says; try again when that is done (a claim "
                f"of a save that was killed counts for {_EXPIRES_AFTER / 60:.0f} minutes)"
            )

    def _keep(self) -> None:
        """Touch the claim now and then, on a thread of its own."""
        while not self._stopped.wait(_FRESH_EVERY):
            try:
                self.storage.touch(self.name)
            except OSError as error:
                _logger.warning("the claim %s could not be refreshed: %s", self.name, error)

    def stop(self) -> None:
        """Keep it fresh no more. A later save does what is left to do when it has expired."""
        self._stopped.set()

    def end(self) -> None:
        """Remove the claim: nothing is left to do."""
        self._stopped.set()
        self._keeper.join()  # no touch is under way any more
        self.storage.delete(self.name)


def claimed_saves(storage: Storage) -> dict[str, str]:
    """The saves that some claim speaks of, being written or to be removed, with the claim's name."""
    claimed: dict[str, str] = {}
    for name, parsed in _claims(storage).items():
        saves = _saves_of_claim(_record_of(storage, name, parsed), [known_save_of(storage, parsed.unique_id)])
        claimed.update(dict.fromkeys(saves, name))
    return claimed


def _claims(storage: Storage) -> dict[str, ClaimName]:
    """The claim files in a folder, and those that are being written."""
    return {name: parsed for name in storage.names() if (parsed := parse_claim(name)) is not None}


def _record_of(storage: Storage, name: str, parsed: ClaimName) -> _ClaimRecord:
    """What a claim says; if it is torn, what its name does."""
    try:
        return msgspec.structs.replace(
            _CLAIM_DECODER.decode(storage.read(name, _MOST_CLAIM_BYTES)), save=parsed.save_id
        )
    except (*DECODE_ERRORS, IsADirectoryError) as error:
        _logger.debug("the claim %s is torn: %s", name, error)
        return _ClaimRecord(parsed.save_id, None, [])


def _saves_of_claim(record: _ClaimRecord, committed: Container[str | None]) -> list[str]:
    """The saves whose files a claim is about: its own, those it has to remove, and the one it has replaced.

    A save that is not committed has replaced nothing, whatever it set out for.
    """
    replaced = [record.replaces] if record.replaces and record.save in committed else []
    return [record.save, *replaced, *record.removes]


def _expired_claims(storage: Storage, ours: str) -> dict[str, ClaimName]:
    """The claims of dead saves, beside our own claim, which tells the time."""
    now = storage.modified(ours)
    others = {name: parsed for name, parsed in _claims(storage).items() if name != ours}
    fresh = {parsed.save_id for name, parsed in others.items() if not _is_expired(storage, name, now)}
    return {name: parsed for name, parsed in others.items() if parsed.save_id not in fresh}


def _is_expired(storage: Storage, name: str, now: float) -> bool:
    try:
        return now - storage.modified(name) > _EXPIRES_AFTER
    except FileNotFoundError:
        return False


def is_abandoned(storage: LocalStorage, now: float) -> bool:
    """Whether nobody is saving to a folder any more, judged by the claims in it.

    Args:
        storage: The folder, whose own time of change counts too; other storages have none.
        now: The time by the folder's own clock: when a file near it was changed just now.
    """
    # The folder itself counts as well: one that is about to be claimed has changed.
    return all(_is_expired(storage, name, now) for name in [*_claims(storage), "."])
