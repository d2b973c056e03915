"""Claims: files that say which saves are being written to a folder, or removed from it, and by whom.

What a claim says is read here, and whether it still counts; :mod:`.own_claim` makes them, and :mod:`.lease` acts on
those of the dead.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from contextlib import suppress

import msgspec

from ..errors import CheckpointTimeoutError
from ..files.names import ClaimName, parse_claim, parse_temporary
from ..storage.base import Storage
from ..tree.values import DECODE_ERRORS
from .ids import known_save_of

__all__ = [
    "EXPIRES_AFTER",
    "EXPIRY",
    "FRESH_EVERY",
    "MOST_CLAIM_BYTES",
    "TEMPORARY",
    "Claim",
    "Statement",
    "claimed_saves",
    "claims_in",
    "is_abandoned",
    "is_expired",
    "readable_record_of",
    "record_of",
    "records_of",
    "saves_of_claim",
]

_logger = logging.getLogger("paddle_dist_ckpt")
FRESH_EVERY = 10.0  # seconds
EXPIRES_AFTER = 300.0  # seconds; thirty missed refreshes
EXPIRY = f"try again when that is done (a claim of a save that was killed counts for {EXPIRES_AFTER / 60:.0f} minutes)"
_MOST_AHEAD = 3600.0  # seconds; hosts whose clocks are further apart cannot save to one folder
TEMPORARY = ".tmp"
MOST_CLAIM_BYTES = 1 << 20  # for more saves to remove than any folder has


class Statement(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a claim says of one save, or deletion.

    Attributes:
        save: Whose it is.
        replaces: The save that it replaces.
        removes: The saves whose files it has set out to remove.
        of_paddle: The id of the checkpoint of Paddle's that it stands for.
        automatic: Whether it cannot replace anything.
        deletes: Whether it removes the checkpoint under its id, and puts none in its place.
        done: Whether its save is committed, and waits only for what other saves under its id do; or whether what it
            deletes is committed no more, and only files are left.
        committed_as: The id of a save that is done, if that is not the one in the claim's name.
        passes_on: Whether there is no save or deletion of its own, and it only passes on what is to be removed.
        of_id: The id that it set out for, where that is not said by the name of a claim.
    """

    save: str
    replaces: str | None
    removes: list[str]
    of_paddle: int | None = None
    automatic: bool = False
    deletes: bool = False
    done: bool = False
    committed_as: int | None = None
    passes_on: bool = False
    of_id: int | None = None

    @property
    def may_replace(self) -> bool:
        """Whether its save may yet replace what another one has committed under its id, perhaps without knowing it."""
        return not (self.automatic or self.done or self.deletes)

    def may_replace_in(self, unique_id: int) -> bool:
        """The same of what has this id."""
        return self.may_replace and self.of_id in (None, unique_id)

    @property
    def is_of_use(self) -> bool:
        """Whether it says anything but that there was a claim that passed something on."""
        return not self.passes_on or bool(self.removes or self.replaces) or self.of_paddle is not None

    @property
    def own(self) -> list[str]:
        """The saves that it is answerable for whether it is committed or not."""
        return self.removes if self.passes_on else [self.save, *self.removes]

    @property
    def mentioned(self) -> list[str]:
        """All saves of which it speaks."""
        return self.own if self.replaces is None else [*self.own, self.replaces]

    def known(self, committed: Container[str | None]) -> Statement:
        """The same when it is known that these saves are committed."""
        return msgspec.structs.replace(self, done=self.done or self.save in committed)

    def without(self, saves: Container[str | None]) -> Statement:
        """The same but for files of these saves."""
        return msgspec.structs.replace(self, removes=[each for each in self.own if each not in saves], passes_on=True)


class Claim(Statement, frozen=True, omit_defaults=True):
    """What a claim file says.

    Attributes:
        taken: What claims of dead saves have said that are gone, or about to go. Such a save may yet be committed: one
            that was frozen just before its last step, as long as its temporary name is there.
        is_unread: Whether it may not be read, so that it may be of a save or of a deletion; never in a file.
        is_empty: Whether it says nothing, as a deletion's on a full disk; never in a file.
    """

    taken: list[Statement] = []
    is_unread: bool = False
    is_empty: bool = False

    @property
    def all(self) -> list[Statement]:
        """What it says of its own save, first, and of those that it has taken over."""
        return [Statement(**{name: getattr(self, name) for name in Statement.__struct_fields__}), *self.taken]

    @property
    def is_settled(self) -> bool:
        """Whether it is done, and certain what it speaks of."""
        return self.done and not self.taken

    @property
    def may_replace(self) -> bool:
        """See :attr:`Statement.may_replace`; one that may not be read may be of a save."""
        return not (self.automatic or self.done) and (self.is_unread or not self.deletes)

    def has_taken_for(self, unique_id: int) -> bool:
        """Whether it speaks of a save that was taken for dead, and may yet be committed under an id."""
        return any(said.may_replace_in(unique_id) for said in self.taken)

    def speaks_of(self, save: str) -> bool:
        """Whether it might come to remove files of a save."""
        return any(save in said.mentioned for said in self.all)


_CLAIM_DECODER = msgspec.json.Decoder(Claim)  # made here, as threads must not make it at once


def claimed_saves(storage: Storage) -> dict[str, str]:
    """The saves that some claim speaks of, being written or to be removed, with the claim's name."""
    claimed: dict[str, str] = {}
    names = storage.names()
    for name, (parsed, record) in records_of(storage).items():
        claimed.update(dict.fromkeys(saves_of_claim(record, [known_save_of(storage, parsed.unique_id)]), name))
        for said in record.taken:
            may_commit = any(other.save_id == said.save for other in map(parse_temporary, names) if other is not None)
            claimed.update(dict.fromkeys(saves_of_claim(said, [said.save] if may_commit else []), name))
    return claimed


def records_of(storage: Storage) -> dict[str, tuple[ClaimName, Claim]]:
    """What all claims say.

    IMPORTANT: they are read anew when one vanishes meanwhile, for what it said may be in another one by now.
    """
    vanished: set[str] = set()
    while True:
        found, before = dict[str, tuple[ClaimName, Claim]](), len(vanished)
        for name, parsed in claims_in(storage).items():
            try:
                found[name] = parsed, record_of(storage, name, parsed)
            except FileNotFoundError:  # each counts once: a link to nowhere is always listed
                vanished.add(name)
        if len(vanished) == before:
            return found


def claims_in(storage: Storage) -> dict[str, ClaimName]:
    """The claim files in a folder, and those that are being written."""
    return {name: parsed for name in storage.names() if (parsed := parse_claim(name)) is not None}


def record_of(storage: Storage, name: str, parsed: ClaimName) -> Claim:
    """What a claim says; if it is torn, what its name does.

    An empty one is of somebody who deletes on a full disk. One that may not be read may be of anybody.
    """
    try:
        return readable_record_of(storage, name, parsed)
    except PermissionError as error:
        _logger.debug("the claim %s may not be read: %s", name, error)
        return Claim(parsed.save_id, None, [], deletes=True, is_unread=True)


def readable_record_of(storage: Storage, name: str, parsed: ClaimName) -> Claim:
    """The same of a claim that may be read.

    Raises:
        PermissionError: it may not, as another user's may be: what it says is not known, nor whether it says anything.
    """
    try:
        data = storage.read(name, MOST_CLAIM_BYTES)
        if not data and not name.endswith(TEMPORARY):
            return Claim(parsed.save_id, None, [], deletes=True, is_empty=True)
        found = _CLAIM_DECODER.decode(data)
        return msgspec.structs.replace(found, save=parsed.save_id, is_unread=False, is_empty=False)
    except (*DECODE_ERRORS, IsADirectoryError) as error:
        _logger.debug("the claim %s is torn: %s", name, error)
        return Claim(parsed.save_id, None, [])


def saves_of_claim(record: Statement, committed: Container[str | None]) -> list[str]:
    """The saves whose files a claim is about: its own, those it has to remove, and the one it has replaced.

    A save that is not committed has replaced nothing, whatever it set out for. What a claim has taken is not looked at.
    """
    replaced = [record.replaces] if record.replaces and (record.done or record.save in committed) else []
    return [*record.own, *replaced]


def is_expired(storage: Storage, name: str, now: float) -> bool:
    """Whether a claim, or what else tells that somebody works, is too old. One dated far ahead is dated anew."""
    try:
        age = now - storage.modified(name)
        if age < -_MOST_AHEAD:
            with suppress(OSError, CheckpointTimeoutError):  # then it counts until its date
                storage.touch(name)
    except FileNotFoundError:
        return False
    return age > EXPIRES_AFTER


def is_abandoned(storage: Storage, now: float) -> bool:
    """Whether nobody is saving to a folder any more, judged by the claims in it; not if that cannot be seen.

    Args:
        storage: A local folder, whose own time of change counts too; other storages have none.
        now: The time by the folder's own clock: when a file near it was changed just now.
    """
    try:
        # The folder itself counts as well: one that is about to be claimed has changed.
        expired = [is_expired(storage, name, now) for name in [*claims_in(storage), "."]]  # each may be dated anew
    except OSError:
        return False
    return all(expired)
