"""The claims of dead saves: found, read, removed, and taken over by a living one, without anything being forgotten."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from ..errors import CheckpointError
from ..files.names import parse_temporary
from .aside import put_aside
from .claims import (
    MOST_CLAIM_BYTES,
    TEMPORARY,
    Claim,
    Statement,
    claims_in,
    is_expired,
    readable_record_of,
    saves_of_claim,
)
from .ids import committed_saves
from .other_claims import OtherClaims
from .own_claim import OwnClaim

if TYPE_CHECKING:
    from .lease import Lease

__all__ = ["DeadClaims", "take_over"]

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
        now = own.now()
        others = {name: parsed for name, parsed in claims_in(own.storage).items() if name != own.name}
        fresh = {parsed.save_id for name, parsed in others.items() if not is_expired(own.storage, name, now)}
        fresh.difference_update(given_up)
        self.found = {name: parsed for name, parsed in others.items() if parsed.save_id not in fresh}
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
        claimed = {parsed.save_id for parsed in claims_in(self._storage).values()}
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


def take_over(heir: Lease, dead: DeadClaims) -> None:
    """Make the removal of dead saves' files the business of a lease.

    IMPORTANT: the dead saves' claims go before any of their files do, and the lease's says what they said before they
    go. A save that was only frozen then finds its claim gone, and does not commit; or its temporary name, if it was
    frozen just before its last step. So that goes next, and only then it is certain which are committed.
    """
    heir.others.stuck = dead.stuck
    if not dead.found:
        return
    try:
        committed = committed_saves(heir.storage)
    except CheckpointError as error:
        _logger.warning("files of dead saves are left, for it is not certain which they are: %s", error)
        dead.stuck.update(dead.found)
        heir.others.why_stuck = f"it is not certain what is committed ({error})"
        return
    try:
        dead.read()
        taken = dead.said(dead.records, committed)
        heir.say(taken, [])
        # Those of committed saves last: it is known by then which others cannot be stopped, and may replace them.
        dead.remove(name for name, record in dead.records.items() if record.save not in committed)
        left = dead.remove_temporaries({said.save for said in dead.said(dead.gone, committed)})
        replaced = _replaced_yet(heir.others, dead, committed, [said for said in taken if said.save in left])
        heir.others.awaited = {name for name, record in dead.records.items() if record.save in replaced}
        dead.leave(replaced)
        dead.remove(name for name, record in dead.records.items() if record.save in committed)
        taken = dead.said(dead.gone, committed)
        left |= dead.remove_temporaries({said.save for said in taken})
        _leave(heir, [said for said in taken if said.save in left], committed)
        _settle(heir, [said for said in taken if said.save not in left])
    except CheckpointError as error:
        _logger.warning("files of dead saves are left, for it is not certain which they are: %s", error)
        _leave(heir, [said for said in dead.said(dead.gone, committed) if said.is_of_use], committed)
        with suppress(OSError, CheckpointError):  # it says what it has said then
            heir.say([], [])


def _replaced_yet(
    others: OtherClaims, dead: DeadClaims, committed: Mapping[str, int], left: Sequence[Statement]
) -> set[str]:
    """The committed saves that others, which live or cannot be stopped, may yet replace without knowing it.

    Args:
        others: The claims beside the lease's.
        dead: The claims of dead saves, of which those of such that are not committed are removed by now.
        committed: All committed saves, with their ids.
        left: What was taken of saves whose temporary names could not be removed.
    """
    beside = others.all()
    passed_on = [said for name, one in beside.items() if name not in dead.records for said in one.claim.taken]

    def is_replaced_yet(save: str) -> bool:
        unique_id = committed[save]
        of_id = [one.claim for one in beside.values() if one.id_now == unique_id and one.claim.save != save]
        return any(claim.may_replace for claim in of_id) or any(
            said.may_replace_in(unique_id) for said in (*left, *passed_on)
        )

    return set(filter(is_replaced_yet, {record.save for record in dead.records.values() if record.save in committed}))


def _settle(heir: Lease, taken: Sequence[Statement]) -> None:
    """Find out which files nobody needs any more, of those that dead saves' claims have spoken of."""
    # IMPORTANT: what another claim answers for is that one's, and it may be of somebody who lives. Looked at before it
    # is looked at what is committed: who has committed something ends its claim after that.
    kept = heir.others.answered_for()
    committed = committed_saves(heir.storage)
    late = [said for said in taken if not _put_aside(heir, said, committed)]
    found = dict.fromkeys(save for said in taken for save in saves_of_claim(said, committed))
    _leave(heir, [msgspec.structs.replace(said, replaces=None, removes=[], passes_on=True) for said in late], committed)
    heir.say([], [save for save in found if not (save in committed or save in kept)])


def _put_aside(heir: Lease, said: Statement, committed: Collection[str]) -> bool:
    """Do what a dead save has not done for a checkpoint of Paddle's; returns whether that could be done."""
    if said.of_paddle is not None and said.save in committed:
        try:
            put_aside(heir.storage, said.of_paddle, heir.temporary)
        except (OSError, CheckpointError) as error:
            _logger.warning("%s: a checkpoint of Paddle's is not put aside yet: %s", heir.storage.location, error)
            return False
    return True


def _leave(heir: Lease, taken: Sequence[Statement], committed: Collection[str]) -> None:
    """Leave what is not certain to a later save: the lease's claim speaks of its save, too."""
    if taken:
        heir.pass_on([said.without(committed) for said in taken])
