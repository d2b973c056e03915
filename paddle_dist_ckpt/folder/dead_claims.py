"""The claims of dead saves: found, read, and removed, with the names that the saves' `.metadata` had until then."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterable
from contextlib import suppress

import msgspec

from ..files.names import parse_temporary
from .claims import (
    MOST_CLAIM_BYTES,
    TEMPORARY,
    Claim,
    Statement,
    expired_claims,
    is_expired,
    readable_record_of,
    saves_with_claims,
)
from .own_claim import OwnClaim

__all__ = ["DeadClaims"]

_logger = logging.getLogger("paddle_dist_ckpt")
_REMOVALS = 4  # of a claim, and a look each


class DeadClaims:
    """The claims in a folder that are too old to count.

    Args:
        own: The claim of this process, which tells the time.
        given_up: Saves that are known to be dead, whatever their claims look like.

    Attributes:
        found: Their names, with what these say.
        records: What they say, by name: those that are read.
        gone: Those that this has removed.
        stuck: Those that cannot be read or removed here.
    """

    def __init__(self, own: OwnClaim, given_up: Collection[str] = ()) -> None:
        self._storage, self._own, self._given_up = own.storage, own, given_up
        self.found = expired_claims(own.storage, own.name, own.now(), given_up)
        self.records: dict[str, Claim] = {}
        self.gone: list[str] = []
        self.stuck: set[str] = set()

    def keep(self, saves: Container[str]) -> None:
        """Look at the claims of these saves only."""
        self.found = {name: parsed for name, parsed in self.found.items() if parsed.save_id in saves}

    def read(self) -> None:
        """Read those that are still there, and may be read by this process: no more than one claim has room for."""
        room = MOST_CLAIM_BYTES // 2
        for name, parsed in self.found.items():
            try:
                record = readable_record_of(self._storage, name, parsed)
            except FileNotFoundError:
                _logger.debug("the claim %s is another save's to take over", name)
                continue
            except PermissionError as error:  # it alone says what is to be removed, to whoever may read it
                self._leave_stuck(name, error)
                continue
            room -= len(msgspec.json.encode(record))
            if room > 0 or not self.records:  # the others are a later save's to take over
                self.records[name] = record
        self.leave({self.found[name].save_id for name in self.stuck})

    def leave(self, saves: Container[str]) -> None:
        """Leave the claims of these saves alone."""
        self.records = {name: record for name, record in self.records.items() if record.save not in saves}

    def said(self, names: Iterable[str], committed: Container[str | None]) -> list[Statement]:
        """What claims say, and what they have taken over of claims that are gone, when these saves are committed."""
        claimed = saves_with_claims(self._storage)
        found: list[Statement] = []
        for name in names:
            own, *taken = self.records[name].all
            found.append(msgspec.structs.replace(own, of_id=self.found[name].unique_id))
            found += [said for said in taken if said.save not in claimed]  # the others' claims say it themselves
        return list({msgspec.json.encode(said): said.known(committed) for said in found}.values())

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of these names.

        A save whose claim cannot be removed may still commit, if it was only frozen: its files are left to whoever can.
        """
        for name in list(names):
            if self._remove(name):
                self.gone.append(name)

    def _remove(self, name: str) -> bool:
        """Remove one; returns whether that was done.

        If it has been refreshed or rewritten since it was read, it says what there is to say, to who reads it next.
        """
        claim = name.removesuffix(TEMPORARY)
        why = f"{self._storage.location}/{claim} is there again"
        for _ in range(_REMOVALS):  # it may come back, rewritten for the last time just before it was removed
            # The claim last: as long as one of them cannot be removed, it is there, and says all that it has said.
            names = self._storage.names()
            there = [each for each in (claim + TEMPORARY, claim) if each in names]
            if not there:
                return True
            if not all(map(self._is_as_read, there)):
                return False
            try:
                for each in there:
                    self._storage.delete(each)
            except OSError as error:  # it may be gone for all that
                why = str(error)
        self._leave_stuck(name, why)
        return False

    def _is_as_read(self, name: str) -> bool:
        """Whether a claim says what it has said, and is still too old to count."""
        parsed = self.found.get(name)
        if parsed is None or name not in self.records:
            return False
        if parsed.save_id not in self._given_up and not is_expired(self._storage, name, self._own.now()):
            return False
        with suppress(FileNotFoundError, PermissionError):
            return readable_record_of(self._storage, name, parsed) == self.records[name]
        return False

    def remove_temporaries(self, saves: Collection[str]) -> set[str]:
        """Remove the names that `.metadata` of saves have until they are published: none of these is any more.

        Returns:
            The saves of which that could not be done, and which may yet be committed.
        """
        failed: set[str] = set()
        for name in self._storage.names():
            parsed = parse_temporary(name)
            if parsed is not None and parsed.save_id in saves:
                try:
                    self._storage.delete(name)
                except OSError as error:
                    _logger.warning("files of a dead save are left, for it may yet be committed: %s", error)
                    failed.add(parsed.save_id)
        return failed

    def _leave_stuck(self, name: str, why: object) -> None:
        """Leave a claim to whoever may read and remove it."""
        _logger.warning("the claim of a dead save is left, and with it the save's files: %s", why)
        self.stuck.add(name)
