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


class _ClaimRecord(msgspec.Struct, frozen=True):
    """What a claim file says: whose it is, which save it replaces, which saves' files it has set out to remove."""

    save: str
    replaces: str | None
    removes: list[str]


_CLAIM_DECODER = msgspec.json.Decoder(_ClaimRecord)  # made here, as threads must not make it at once


class Lease:
    """A save's lease, from before its first file until after its commit or clean-up.

    Args:
        storage: The coordinator's folder.
        unique_id: The id that the save sets out for.
        automatic: Whether the id was chosen by the save, so that another one will do as well.

    Attributes:
        save_id: The save's random id.
        replaces: The save that has the id now, if it was given and is taken.
        doomed: Save ids whose files are to be removed: those of dead saves, and what these had replaced.
    """

    def __init__(self, storage: Storage, unique_id: int, automatic: bool) -> None:
        self.storage, self.unique_id, self.automatic = storage, unique_id, automatic
        self.save_id = secrets.token_hex(8)
        self.replaces = self._holder()
        self.doomed: list[str] = []
        self._write()
        self._take_over_dead()
        self._keeper = _Keeper(storage, self.name)

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
        record = msgspec.json.encode(_ClaimRecord(self.save_id, self.replaces, self.doomed))
        self.storage.publish(self.name, record, self.name + ".tmp", replace=True)

    def _take_over_dead(self) -> None:
        """Make the removal of dead saves' files this save's business.

        IMPORTANT: the dead saves' claims go before any of their files do, and this claim has taken over what they said
        before they go. A save that was only frozen then finds its claim gone and does not commit.
        """
        dead = _expired_claims(self.storage, self.name)
        committed = self._committed() if dead else None
        if committed is None:
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
        committed = self._committed()
        self.doomed = [save for save in self.doomed if committed is not None and save not in committed]

    def _committed(self) -> Container[str] | None:
        """The committed saves; None if they cannot all be told."""
        try:
            return committed_saves(self.storage)
        except CheckpointError as error:
            _logger.warning("files of dead saves are left, for it is not certain which they are: %s", error)
            return None

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

    def stop(self) -> None:
        """Keep it fresh no more. A later save does what is left to do when it has expired."""
        self._keeper.stop()

    def end(self) -> None:
        """Remove the claim: nothing is left to do."""
        self._keeper.join()
        self.storage.delete(self.name)


class _Keeper:
    """Touches a claim file now and then, on a thread of its own."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self._name = storage, name
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paddle_dist_ckpt claim", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(_FRESH_EVERY):
            try:
                self._storage.touch(self._name)
            except OSError as error:
                _logger.warning("the claim %s could not be refreshed: %s", self._name, error)

    def stop(self) -> None:
        self._stopped.set()

    def join(self) -> None:
        """Stop, and wait until no touch is under way: the file can be removed then."""
        self._stopped.set()
        self._thread.join()


def claimed_saves(storage: Storage) -> dict[str, str]:
    """The saves that some claim speaks of, being written or to be removed, with the claim's name."""
    claimed: dict[str, str] = {}
    for name in storage.names():
        parsed = parse_claim(name)
        if parsed is not None:
            committed = known_save_of(storage, parsed.unique_id)
            saves = _saves_of_claim(storage, name, parsed, [] if committed is None else [committed])
            claimed.update(dict.fromkeys(saves, name))
    return claimed


def _saves_of_claim(storage: Storage, name: str, parsed: ClaimName, committed: Container[str]) -> list[str]:
    """The saves whose files a claim is about: its own, those it has to remove, and the one it has replaced.

    A save that is not committed has replaced nothing, whatever it set out for.
    """
    try:
        record = _CLAIM_DECODER.decode(storage.read(name))
    except DECODE_ERRORS as error:
        _logger.debug("the claim %s is torn: %s", name, error)
        return [parsed.save_id]
    replaced = [record.replaces] if record.replaces and parsed.save_id in committed else []
    return [parsed.save_id, *replaced, *record.removes]


def _expired_claims(storage: Storage, ours: str) -> list[tuple[str, ClaimName]]:
    """The claims of dead saves, beside our own claim, which tells the time."""
    now = storage.modified(ours)
    others = [(name, parsed) for name in storage.names() if (parsed := parse_claim(name)) and name != ours]
    fresh = {parsed.save_id for name, parsed in others if not _is_expired(storage, name, now)}
    return [(name, parsed) for name, parsed in others if parsed.save_id not in fresh]


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
    try:
        claims = [name for name in storage.names() if parse_claim(name) is not None]
        changed = [storage.modified(name) for name in [*claims, "."]]  # one that is about to be claimed has changed
    except FileNotFoundError:
        return False
    return all(now - then > _EXPIRES_AFTER for then in changed)
