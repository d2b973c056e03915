"""Leases: a save's right to its files in a folder, which its claim tells to all others (:mod:`.claims`).

A save's claim file is made before any other of its files and kept fresh while it lives. It says which save it replaces,
so that whoever finds it after a crash knows what may be removed. Whether a claim is fresh is judged by the folder's own
clock: by the modification times that the folder gives, never by a host's clock. One that is dated far ahead, by a clock
that was wrong or by a stranger, is dated anew by who finds it: if its save lives, that does so as well, every few
seconds, and if not, it counts as long as any other from then on.
"""

from __future__ import annotations

import errno
import logging
import math
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from ..errors import CheckpointError, CheckpointTimeoutError
from ..files.names import claim_name, temporary_name
from ..storage.base import Storage
from .aside import put_aside
from .claims import (
    EXPIRES_AFTER,
    EXPIRY,
    FRESH_EVERY,
    TEMPORARY,
    Claim,
    Statement,
    is_expired,
    records_of,
    saves_of_claim,
)
from .dead_claims import DeadClaims
from .ids import committed_saves, known_save_of
from .own_claim import OwnClaim

__all__ = ["Lease", "StuckClaimError"]

_logger = logging.getLogger("paddle_dist_ckpt")
_LOOK_AGAIN = 0.1  # seconds
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class StuckClaimError(CheckpointError):
    """The claim of a dead save is in the way, and cannot be read or removed by this process."""


class Lease:
    """A save's lease, from before its first file until after its commit or clean-up.

    Args:
        storage: The coordinator's folder.
        unique_id: The id that the save sets out for.
        automatic: Whether it gets the id only if that is free, as a save does that has chosen it by itself.
        of_paddle: The id of a checkpoint of Paddle's that the save stands for when it is committed.
        given_up: Saves of this job that are known to have ended, whatever their claims look like.
        deletes: Whether it is no save, but removes the checkpoint under the id. It needs no refreshing: once the
            `.metadata` is gone, anybody may do the rest.
        patience: How many seconds it waits for somebody who removes the checkpoint under the id, or longer, as long as
            the claim of one that has died counts.
        made: Gets the lease before anything can come between that and its return, to be ended by whoever passes this.

    Attributes:
        save_id: The save's random id.
        replaces: The save that has the id now, if it was given and is taken.
        inherited: What that has set out to remove in its turn, and had not done when this save met its claim.
        doomed: Save ids whose files are to be removed: those of dead saves, and what these had replaced.
        is_said: Whether the claim says all of this, for which a full disk may have no room.
    """

    def __init__(
        self,
        storage: Storage,
        unique_id: int,
        automatic: bool,
        of_paddle: int | None = None,
        given_up: Collection[str] = (),
        deletes: bool = False,
        patience: float = math.inf,
        made: list[Lease] | None = None,
    ) -> None:
        self.storage, self.unique_id, self.automatic, self.of_paddle = storage, unique_id, automatic, of_paddle
        self._deletes, self._is_done, self._patience = deletes, False, patience
        self._passes_on = False
        self._committed_as: int | None = None
        self.save_id = secrets.token_hex(8)
        self._ids = {self.save_id}  # of the claims that it has made
        self.replaces: str | None = None
        self.inherited: list[str] = []
        self.doomed: list[str] = []
        self.is_said = False
        self._claim = OwnClaim(storage, claim_name(unique_id, self.save_id))
        self._taken: list[Statement] = []  # what dead saves' claims have said, until it is certain what follows
        self._awaited: set[str] = set()  # those of dead committed saves that others may yet replace
        self._stuck: set[str] = set()  # the claims of dead saves that could not be read or removed
        self._look()
        try:
            self._write()
            if not deletes:
                self._claim.keep_fresh(lambda: self.speak_again([self.save_id]))
            self._take_over_dead(given_up)
            if made is not None:
                made.append(self)
        except BaseException:
            with suppress(OSError, CheckpointError):  # it expires then
                self.withdraw()
            raise

    @property
    def name(self) -> str:
        """The claim file's name."""
        return self._claim.name

    @property
    def temporary(self) -> str:
        """The name that the save's `.metadata` has until it is published."""
        return temporary_name(self.unique_id, self.save_id)

    def _look(self) -> bool:
        """Find the save that has the id now and that a commit would replace; returns whether it is another by now."""
        before, self.replaces = self.replaces, None if self.automatic else known_save_of(self.storage, self.unique_id)
        if self.replaces is None or self.replaces == before:
            return self.replaces != before
        # What that has replaced in its turn is known from its claim alone, and from here on from this one.
        for _, record in records_of(self.storage).values():
            for said in record.all:
                if said.save == self.replaces:
                    self.inherited += [save for save in (said.replaces, *said.removes) if save is not None]
                    self.of_paddle = said.of_paddle if self.of_paddle is None else self.of_paddle
        return True

    def _write(self) -> None:
        removes = list(dict.fromkeys([*self.doomed, *self.inherited]))  # each once, or claims grow with every save
        claim = Claim(
            save=self.save_id,
            replaces=self.replaces,
            removes=removes,
            of_paddle=self.of_paddle,
            automatic=self.automatic,
            deletes=self._deletes,
            done=self._is_done,
            committed_as=self._committed_as,
            passes_on=self._passes_on,
            taken=self._taken,
        )
        self.is_said = False
        try:
            self._claim.publish(msgspec.json.encode(claim))
            self.is_said = True
        except OSError as error:
            if not self._deletes or error.errno not in _NO_ROOM:
                raise
            # Deleting must be possible on a full disk. What the claim does not say is left if this dies half-way.
            _logger.debug("there is no room for what the claim %s says: %s", self.name, error)
            if not self._claim.is_published:
                self._claim.publish(b"")

    def _take_over_dead(self, given_up: Collection[str]) -> None:
        """Make the removal of dead saves' files this save's business.

        IMPORTANT: the dead saves' claims go before any of their files do, and this claim says what they said before
        they go. A save that was only frozen then finds its claim gone, and does not commit; or its temporary name, if
        it was frozen just before its last step. So that goes next, and only then it is certain which are committed.
        """
        dead = DeadClaims(self.storage, self._claim, given_up)
        self._stuck = dead.stuck
        if not dead.found:
            return
        committed: dict[str, int] = {}
        try:
            committed = committed_saves(self.storage)
            dead.read()
            self._taken = dead.said(dead.records, committed)
            self._write()
            # Those of committed saves last: it is known by then which others cannot be stopped, and may replace them.
            dead.remove(name for name, record in dead.records.items() if record.save not in committed)
            left = dead.remove_temporaries({said.save for said in dead.said(dead.gone, committed)})
            awaited = self._awaited_by_others(dead, committed, [said for said in self._taken if said.save in left])
            self._awaited = {name for name, record in dead.records.items() if record.save in awaited}
            dead.leave(awaited)
            dead.remove(name for name, record in dead.records.items() if record.save in committed)
            self._taken = dead.said(dead.gone, committed)
            left |= dead.remove_temporaries({said.save for said in self._taken})
            self._pass_on([said for said in self._taken if said.save in left], committed)
            self._taken = [said for said in self._taken if said.save not in left]
            self._settle()
        except CheckpointError as error:
            _logger.warning("files of dead saves are left, for it is not certain which they are: %s", error)
            self._pass_on([said for said in dead.said(dead.gone, committed) if said.is_of_use], committed)
            self._taken = []
            with suppress(OSError, CheckpointError):  # it says what it has said then
                self._write()

    def _pass_on(self, taken: Sequence[Statement], committed: Collection[str]) -> None:
        """Leave what is not certain to a later save, by a claim of its own, as this one speaks of its save, too."""
        if not taken:
            return
        try:
            self._leave([], [said.without(committed) for said in taken])
        except OSError as error:
            if not self._deletes or error.errno not in _NO_ROOM:
                raise
            _logger.debug("there is no room to pass on what dead saves have left: %s", error)

    def _awaited_by_others(self, dead: DeadClaims, committed: Mapping[str, int], left: Sequence[Statement]) -> set[str]:
        """The committed saves that others, which live or cannot be stopped, may yet replace without knowing it.

        Args:
            dead: The claims of dead saves, of which those of such that are not committed are removed by now.
            committed: All committed saves, with their ids.
            left: What was taken of saves whose temporary names could not be removed.
        """
        beside = self._beside()
        passed_on = [said for name, (_, _, claim) in beside.items() if name not in dead.records for said in claim.taken]

        def is_awaited(save: str) -> bool:
            unique_id = committed[save]
            of_id = [claim for id_now, _, claim in beside.values() if id_now == unique_id and claim.save != save]
            return any(claim.may_replace for claim in of_id) or any(
                said.may_replace_in(unique_id) for said in (*left, *passed_on)
            )

        return set(filter(is_awaited, {record.save for record in dead.records.values() if record.save in committed}))

    def _settle(self) -> None:
        """Find out which files nobody needs any more, of those that dead saves' claims have spoken of."""
        # IMPORTANT: what another claim answers for is that one's, and it may be of somebody who lives. Looked at before
        # it is looked at what is committed: who has committed something ends its claim after that.
        kept = self.answered_for()
        committed = committed_saves(self.storage)
        late = [said for said in self._taken if not self._put_aside(said, committed)]
        found = [*self.doomed, *(save for said in self._taken for save in saves_of_claim(said, committed))]
        self.doomed = [save for save in dict.fromkeys(found) if not (save in committed or save in kept)]
        of_paddle = [msgspec.structs.replace(said, replaces=None, removes=[], passes_on=True) for said in late]
        self._pass_on(of_paddle, committed)
        self._taken = []
        self._write()

    def _put_aside(self, record: Statement, committed: Collection[str]) -> bool:
        """Do what a dead save has not done for a checkpoint of Paddle's; returns whether that could be done."""
        if record.of_paddle is not None and record.save in committed:
            try:
                put_aside(self.storage, record.of_paddle, self.temporary)
            except (OSError, CheckpointError) as error:
                _logger.warning("%s: a checkpoint of Paddle's is not put aside yet: %s", self.storage.location, error)
                return False
        return True

    def confirm(self) -> None:
        """Just before the commit: see that the claim is there, and which save the id has now.

        Raises:
            CheckpointError: the claim is gone: another save took this one for dead.
            CheckpointTimeoutError: somebody is deleting the checkpoint under the id, and does not come to an end.
        """
        # IMPORTANT: who deletes has looked for other claims after it had made its own, and has not found this one, or
        # has given up. So after this wait nobody removes what is about to be published.
        if not self.automatic and not self._deletes:
            self._wait_for_deletion()
        self._claim.touch()  # who has found it too old looks once more before it is removed
        self.check_held()
        if self._look():
            self._write()

    def check_held(self) -> None:
        """See that the claim is there; see :meth:`.own_claim.OwnClaim.check_held`."""
        self._claim.check_held()

    def is_held(self) -> bool:
        """Whether the claim is there."""
        return self._claim.is_held()

    def _wait_for_deletion(self) -> None:
        # At least as long as the claim of one that has died may count.
        started, said, most = time.monotonic(), False, max(self._patience, EXPIRES_AFTER + 2 * FRESH_EVERY)
        while (found := self._deleter()) is not None:
            name, claim = found
            which, claimed = f"checkpoint {self.unique_id}", f"{self.storage.location}/{name}"
            text = f"{which} is being deleted, as {claimed} says"
            if claim.is_unread:
                text = f"{which} may be being deleted: {claimed} may not be read"
            if not said:
                _logger.warning("%s; the save waits for that", text)
                said = True
            if time.monotonic() - started > most:
                raise CheckpointTimeoutError(
                    f"{text}, for {most:g} s; nothing was saved. If nobody is at work there, remove that file, or save "
                    "to another id"
                )
            time.sleep(_LOOK_AGAIN)

    def _deleter(self) -> tuple[str, Claim] | None:
        """The claim of somebody who may still remove the `.metadata` under the id, with its name."""
        claims, now = self.others(self.unique_id), self._claim.now()
        deleters = ((name, claim) for name, claim in claims.items() if claim.deletes and not claim.done)
        return next((found for found in deleters if not is_expired(self.storage, found[0], now)), None)

    def others(self, unique_id: int) -> dict[str, Claim]:
        """The other claims of an id, by name: of saves that set out for it and are under no other, or that are."""
        return self.rivals(unique_id)[0]

    def rivals(self, unique_id: int) -> tuple[dict[str, Claim], bool]:
        """The same, and whether a save may yet replace what is committed under the id, perhaps without knowing it."""
        beside = self._beside()
        others = {
            name: claim
            for name, (id_now, _, claim) in beside.items()
            if id_now == unique_id and claim.save not in self._ids
        }
        may_replace = any(claim.may_replace for claim in others.values())
        return others, may_replace or any(claim.has_taken_for(unique_id) for _, _, claim in beside.values())

    def answered_for(self, but: Collection[str] = ()) -> set[str]:
        """The saves whose files other claims, but for these, alone have removed: those that they make.

        A copy's are those that it is to remove if it fails. What a save that chose its id has taken over is among them
        as well; it does that, or its claim stays. What others are to remove several may try to.
        """
        found: set[str] = set()
        for name, (_, _, claim) in self._beside().items():
            makes = claim.automatic and not (claim.done or claim.deletes)
            if name not in but and not claim.passes_on:
                found.update(claim.own if makes else [claim.save])
        return found

    def _beside(self) -> dict[str, tuple[int, int, Claim]]:
        """The claims beside this one's: the id that each is of, the one in its name, and what it says."""
        found = {}
        records = records_of(self.storage)
        for name, (parsed, record) in records.items():
            rewritten = name.endswith(TEMPORARY) and name.removesuffix(TEMPORARY) in records
            if not (parsed.save_id == self.save_id or rewritten):
                id_now = parsed.unique_id if record.committed_as is None else record.committed_as
                found[name] = id_now, parsed.unique_id, record
        return found

    def rival(self, save: str) -> str | None:
        """The claim of somebody else, not known to be dead, who makes or removes files of this save, or is about to.

        On a full disk it cannot be said what is deleted: deletions count that are of the id, or have an empty claim.
        """
        now = self._claim.now()
        for name, (parsed, record) in records_of(self.storage).items():
            deletes = record.deletes and not record.done
            deletes &= parsed.unique_id == self.unique_id or record.is_empty
            if parsed.save_id == self.save_id or not (deletes or record.speaks_of(save)):
                continue
            if not is_expired(self.storage, name, now):
                return name
        return None

    def mark_done(self, committed_as: int | None = None, passes_on: bool = False) -> None:
        """Say that the save is committed, under this id if not under the one that it has set out for; or that what it
        deletes is committed no more, and it has made no files itself if it only ``passes_on`` what is to be removed.

        Raises:
            CheckpointError: the claim is gone, and what it said is somebody else's to do.
        """
        self._is_done = True
        self._passes_on |= passes_on
        self._committed_as = committed_as if committed_as != self.unique_id else None
        self._write()

    def take_on(self, *saves: str) -> None:
        """Set out to remove saves' files. Whoever finds this claim expired does, but for saves that are committed.

        Raises:
            CheckpointError: the claim is gone.
        """
        self.doomed += [save for save in saves if save not in self.doomed]
        self._write()

    def leave_doomed(self) -> None:
        """Leave the files of dead saves to a later save, by a claim of their own: this one speaks of its save, too."""
        self._leave(self.doomed)

    def cleared(self) -> None:
        """The files of dead saves are gone, or left: say so, for others leave to this claim what it says."""
        if self.doomed:
            self.doomed = []
            self._write()

    def _leave(self, saves: Sequence[str], taken: Sequence[Statement] = ()) -> str:
        other = secrets.token_hex(8)
        self._ids.add(other)
        claim = Claim(other, None, list(saves), deletes=True, done=True, passes_on=True, taken=list(taken))
        name = claim_name(self.unique_id, other)
        self.storage.publish(name, msgspec.json.encode(claim), name + TEMPORARY, replace=True)
        return name

    def speak_again(self, saves: Sequence[str]) -> str | None:
        """Leave saves' files to a later save if this one's claim is gone, by another one, whose name is returned.

        Whoever has taken it for dead may have looked too early to know of them. Not so if it has said that it is done.
        """
        if not saves or (self._is_done and self.is_said) or self.is_held():
            return None
        return self._leave(saves)

    def withdraw(self, *saves: str) -> None:
        """End when nothing of these saves is to be removed; what is left of dead saves is left to a later save."""
        self.stop()
        self.doomed = [save for save in self.doomed if save not in saves]
        if self.doomed or self._taken:
            self._hold_nobody_up()
            return
        try:
            self.end()
        except OSError:
            self._hold_nobody_up()
            raise

    def _hold_nobody_up(self) -> None:
        """Say of a deletion that it removes no checkpoint after all, so that nobody waits."""
        if self._deletes:
            self.replaces = None
            self.mark_done()

    def check_alone(self, everywhere: bool = True) -> None:
        """See that nobody else is saving to the folder, or to this id in it.

        Raises:
            CheckpointError: somebody is, or died less than a few minutes ago.
        """
        beside = self._beside()
        if awaited := [name for name, (_, _, claim) in beside.items() if claim.has_taken_for(self.unique_id)]:
            raise CheckpointError(
                f"checkpoint {self.unique_id} in {self.storage.location} may yet be replaced by a save that was taken "
                f"for dead, as {awaited[0]} says; {EXPIRY}"
            )
        others: list[str] = []
        for name, (id_now, id_then, claim) in beside.items():
            is_of_id = self.unique_id == id_now or (everywhere and self.unique_id == id_then)
            if claim.save in self._ids or not (everywhere or is_of_id) or (claim.done and claim.passes_on):
                continue
            if not self._is_harmless(name, claim if is_of_id else None):
                others.append(name)
        stuck = [name for name in others if name in self._stuck]
        if stuck and self._stuck.union(self._awaited).issuperset(others):
            raise StuckClaimError(
                f"{self.storage.location} has the claim of a dead save, {stuck[0]}, which cannot be read or removed "
                "here: if nobody is at work there, remove that file"
            )
        if others:
            raise CheckpointError(f"{self.storage.location} is being saved to, as {others[0]} says; {EXPIRY}")

    def _is_harmless(self, name: str, of_id: Claim | None) -> bool:
        """Whether another claim, perhaps one of this id, lets nobody replace what has the id now.

        A save that is taken for dead, and that nothing stops, as its claim could not be removed, may still commit.
        """
        if of_id is None:
            return name in self._stuck or name in self._awaited
        return of_id.done or (name in self._stuck and of_id.automatic)

    def stop(self) -> None:
        """Keep the claim fresh no more. A later save does what is left to do when it has expired."""
        self._claim.stop()

    def end(self) -> None:
        """Remove the claim: nothing is left to do.

        Raises:
            OSError: it could not be removed, or the name that the save's `.metadata` had, of which it alone speaks.
        """
        self.storage.delete(self.temporary)  # it may have been impossible to remove
        self._claim.remove()
