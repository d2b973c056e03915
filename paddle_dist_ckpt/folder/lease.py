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
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from ..errors import CheckpointError, CheckpointTimeoutError
from ..files.names import claim_name, temporary_name
from ..storage.base import Storage
from .claims import EXPIRES_AFTER, FRESH_EVERY, TEMPORARY, Claim, Statement, records_of
from .dead_claims import DeadClaims, take_over
from .ids import replaceable_save_of
from .other_claims import OtherClaims
from .own_claim import OwnClaim

__all__ = ["Lease"]

_logger = logging.getLogger("paddle_dist_ckpt")
_LOOK_AGAIN = 0.1  # seconds
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


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
        inherited: What the save that it replaces has set out to remove in its turn, and had not done when they met.
        doomed: Save ids whose files are to be removed: those of dead saves, and what these had replaced.
        is_said: Whether the claim says all of this, for which a full disk may have no room.
        is_ended: Whether nothing was left to do, and the claim has been removed.
        others: The claims beside it.
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
        self.storage, self.unique_id, self.automatic, self._patience = storage, unique_id, automatic, patience
        self.save_id = secrets.token_hex(8)
        self._says = Claim(self.save_id, None, [], of_paddle=of_paddle, automatic=automatic, deletes=deletes)
        self.inherited: list[str] = []
        self.doomed: list[str] = []
        self.is_said = self.is_ended = False
        self._claim = OwnClaim(storage, claim_name(unique_id, self.save_id))
        self.others = OtherClaims(self._claim, unique_id, self.save_id)
        self._look()
        try:
            self._write()
            if not deletes:
                self._claim.keep_fresh(lambda: self.speak_again([self.save_id]))
            take_over(self, DeadClaims(self._claim, given_up))
            if made is not None:
                made.append(self)
        except BaseException:
            with suppress(Exception):  # it expires then
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

    @property
    def replaces(self) -> str | None:
        """The save that has the id now, if it was given and is taken."""
        return self._says.replaces

    @property
    def of_paddle(self) -> int | None:
        """The id of a checkpoint of Paddle's that it stands for, as it was asked to, or as what it replaces did."""
        return self._says.of_paddle

    def _look(self) -> bool:
        """Find the save that has the id now and that a commit would replace; returns whether it is another by now."""
        replaces = None if self.automatic else replaceable_save_of(self.storage, self.unique_id)
        if replaces == self.replaces:
            return False
        of_paddle = self.of_paddle
        # What that has replaced in its turn is known from its claim alone, and from here on from this one.
        for _, record in records_of(self.storage).values():
            for said in record.all:
                if said.save == replaces:
                    self.inherited += [save for save in (said.replaces, *said.removes) if save is not None]
                    of_paddle = said.of_paddle if of_paddle is None else of_paddle
        self._says = msgspec.structs.replace(self._says, replaces=replaces, of_paddle=of_paddle)
        return True

    def _write(self, **changes: Any) -> None:
        """Have the claim say what has changed of what it says, and what is to be removed by now."""
        removes = list(dict.fromkeys([*self.doomed, *self.inherited]))  # each once, or claims grow with every save
        self._says = msgspec.structs.replace(self._says, removes=removes, **changes)
        self.is_said = False
        try:
            self._claim.publish(msgspec.json.encode(self._says))
            self.is_said = True
        except OSError as error:
            if not self._says.deletes or error.errno not in _NO_ROOM:
                raise
            # Deleting must be possible on a full disk. What the claim does not say is left if this dies half-way.
            _logger.debug("there is no room for what the claim %s says: %s", self.name, error)
            if not self._claim.is_published:
                self._publish_empty()

    def _publish_empty(self) -> None:
        try:
            self._claim.publish(b"")
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            why = f"{error.strerror}, not even for a removal's empty claim: remove any other file there first"
            raise OSError(error.errno, why, error.filename) from error

    def say(self, taken: Sequence[Statement], doomed: Sequence[str]) -> None:
        """Have the claim say what is taken over, and that files of these saves are to be removed."""
        self.doomed = list(doomed)
        self._write(taken=list(taken))

    def pass_on(self, taken: Sequence[Statement]) -> None:
        """Leave statements to a later save. A full disk may have no room for them, which must not stop a deletion."""
        try:
            self._leave([], taken)
        except OSError as error:
            if not self._says.deletes or error.errno not in _NO_ROOM:
                raise
            _logger.debug("there is no room to pass on what dead saves have left: %s", error)

    def confirm(self) -> None:
        """Just before the commit: see that the claim is there, and which save the id has now.

        Raises:
            CheckpointError: the claim is gone: another save or export took this one for dead.
            CheckpointTimeoutError: somebody is deleting the checkpoint under the id, and does not come to an end.
        """
        # IMPORTANT: who deletes has looked for other claims after it had made its own, and has not found this one, or
        # has given up. So after this wait nobody removes what is about to be published.
        if not self.automatic and not self._says.deletes:
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
        stopped: set[str] = set()
        while alive := self._living_deleters(stopped):
            name, claim = next(iter(alive.items()))
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

    def _living_deleters(self, stopped: set[str]) -> dict[str, Claim]:
        """The claims of those who may still remove the checkpoint under the id.

        Args:
            stopped: The claims of dead ones that this has tried to remove, which are passed over if they are there yet.
        """
        deleters = self.others.deleters()
        if not deleters:
            return {}
        dead = DeadClaims(self._claim)
        dead.keep({claim.save for claim in deleters.values()})
        if not stopped.issuperset(dead.found):
            stopped.update(dead.found)
            self._stop_deletions(dead)
            return self._living_deleters(stopped)
        return {name: claim for name, claim in deleters.items() if name not in dead.found}

    def _stop_deletions(self, dead: DeadClaims) -> None:
        """Remove the claims of dead deletions. What they say is left to a later save, by a claim of its own.

        IMPORTANT: one that was only silent may go on at any moment. It does not if its claim is gone.
        """
        try:
            dead.read()
            if dead.records:
                left = self._leave([], dead.said(dead.records, ()))
                dead.remove(dead.records)
                if not dead.gone:
                    self.storage.delete(left)
        except (OSError, CheckpointError) as error:
            _logger.debug("the claim of a dead deletion is left: %s", error)

    def mark_done(self, committed_as: int | None = None, passes_on: bool = False) -> None:
        """Say that the save is committed, under this id if not under the one that it has set out for; or that what it
        deletes is committed no more, and it has made no files itself if it only ``passes_on`` what is to be removed.

        Raises:
            CheckpointError: the claim is gone, and what it said is somebody else's to do.
        """
        committed_as = committed_as if committed_as != self.unique_id else None
        self._write(done=True, committed_as=committed_as, passes_on=self._says.passes_on or passes_on)

    def take_on(self, *saves: str) -> None:
        """Set out to remove saves' files. Whoever finds this claim expired does, but for saves that are committed.

        Raises:
            CheckpointError: the claim is gone, and what it said is somebody else's to do.
        """
        doomed, is_said = list(self.doomed), self.is_said
        self.doomed += [save for save in saves if save not in doomed]
        try:
            self._write()
        except CheckpointError:  # whoever has removed it has read all that it said
            self.doomed, self.is_said = doomed, is_said
            raise

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
        self.others.ids.add(other)
        claim = Claim(other, None, list(saves), deletes=True, done=True, passes_on=True, taken=list(taken))
        name = claim_name(self.unique_id, other)
        self.storage.publish(name, msgspec.json.encode(claim), name + TEMPORARY, replace=True)
        return name

    def speak_again(self, saves: Sequence[str]) -> str | None:
        """Leave saves' files to a later save if this one's claim is gone, by another one, whose name is returned.

        Whoever has taken it for dead may have looked too early to know of them. Not so if it has said that it is done.
        """
        if not saves or (self._says.done and self.is_said) or self.is_held():
            return None
        return self._leave(saves)

    def withdraw(self, *saves: str) -> None:
        """End when nothing of these saves is to be removed; what is left of dead saves is left to a later save."""
        self.stop()
        self.doomed = [save for save in self.doomed if save not in saves]
        if self.doomed or self._says.taken:
            self._hold_nobody_up()
            return
        try:
            self.end()
        except OSError:
            self._hold_nobody_up()
            raise

    def _hold_nobody_up(self) -> None:
        """Say of a deletion that it removes no checkpoint after all, so that nobody waits."""
        if self._says.deletes:
            self._write(replaces=None, done=True)

    def leave(self, saves: Sequence[str]) -> None:
        """End when what it was for is done, as far as others wait for it; files of saves are left to a later save."""
        self.stop()
        with suppress(Exception):
            self.speak_again(saves)
            self.mark_done()

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
        self.is_ended = True
