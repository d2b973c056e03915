"""The take-over: what dead saves have left becomes the business of a living one, without anything being forgotten."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from ..errors import CheckpointError
from ..storage.base import Storage
from .aside import put_aside
from .claims import Statement, saves_of_claim
from .dead_claims import DeadClaims
from .ids import committed_saves
from .other_claims import OtherClaims

__all__ = ["TakeOver"]

_logger = logging.getLogger("paddle_dist_ckpt")


class TakeOver:
    """How a lease takes over what the claims of dead saves speak of.

    Args:
        storage: The folder.
        others: The claims beside the lease's; gets to know which of them are in the way.
        temporary: The temporary name of the lease's `.metadata`.
        say: Has the lease's claim say what is taken, and that files of these saves are to be removed.
        pass_on: Leaves these statements to a later save, by a claim of its own.

    Attributes:
        taken: What dead saves' claims have said, until it is certain what follows.
    """

    def __init__(
        self,
        storage: Storage,
        others: OtherClaims,
        temporary: str,
        say: Callable[[Sequence[str]], None],
        pass_on: Callable[[Sequence[Statement]], None],
    ) -> None:
        self._storage, self._others, self._temporary = storage, others, temporary
        self._say, self._pass_on = say, pass_on
        self.taken: list[Statement] = []

    def run(self, dead: DeadClaims) -> None:
        """Make the removal of dead saves' files the lease's business.

        IMPORTANT: the dead saves' claims go before any of their files do, and the lease's says what they said before
        they go. A save that was only frozen then finds its claim gone, and does not commit; or its temporary name, if
        it was frozen just before its last step. So that goes next, and only then it is certain which are committed.
        """
        self._others.stuck = dead.stuck
        if not dead.found:
            return
        committed: dict[str, int] = {}
        try:
            committed = committed_saves(self._storage)
            dead.read()
            self.taken = dead.said(dead.records, committed)
            self._say([])
            # Those of committed saves last: it is known by then which others cannot be stopped, and may replace them.
            dead.remove(name for name, record in dead.records.items() if record.save not in committed)
            left = dead.remove_temporaries({said.save for said in dead.said(dead.gone, committed)})
            awaited = self._awaited(dead, committed, [said for said in self.taken if said.save in left])
            self._others.awaited = {name for name, record in dead.records.items() if record.save in awaited}
            dead.leave(awaited)
            dead.remove(name for name, record in dead.records.items() if record.save in committed)
            self.taken = dead.said(dead.gone, committed)
            left |= dead.remove_temporaries({said.save for said in self.taken})
            self._leave([said for said in self.taken if said.save in left], committed)
            self.taken = [said for said in self.taken if said.save not in left]
            self._settle()
        except CheckpointError as error:
            _logger.warning("files of dead saves are left, for it is not certain which they are: %s", error)
            self._leave([said for said in dead.said(dead.gone, committed) if said.is_of_use], committed)
            self.taken = []
            with suppress(OSError, CheckpointError):  # it says what it has said then
                self._say([])

    def _awaited(self, dead: DeadClaims, committed: Mapping[str, int], left: Sequence[Statement]) -> set[str]:
        """The committed saves that others, which live or cannot be stopped, may yet replace without knowing it.

        Args:
            dead: The claims of dead saves, of which those of such that are not committed are removed by now.
            committed: All committed saves, with their ids.
            left: What was taken of saves whose temporary names could not be removed.
        """
        beside = self._others.all()
        passed_on = [said for name, one in beside.items() if name not in dead.records for said in one.claim.taken]

        def is_awaited(save: str) -> bool:
            unique_id = committed[save]
            of_id = [one.claim for one in beside.values() if one.id_now == unique_id and one.claim.save != save]
            return any(claim.may_replace for claim in of_id) or any(
                said.may_replace_in(unique_id) for said in (*left, *passed_on)
            )

        return set(filter(is_awaited, {record.save for record in dead.records.values() if record.save in committed}))

    def _settle(self) -> None:
        """Find out which files nobody needs any more, of those that dead saves' claims have spoken of."""
        # IMPORTANT: what another claim answers for is that one's, and it may be of somebody who lives. Looked at before
        # it is looked at what is committed: who has committed something ends its claim after that.
        kept = self._others.answered_for()
        committed = committed_saves(self._storage)
        late = [said for said in self.taken if not self._put_aside(said, committed)]
        found = dict.fromkeys(save for said in self.taken for save in saves_of_claim(said, committed))
        self._leave(
            [msgspec.structs.replace(said, replaces=None, removes=[], passes_on=True) for said in late], committed
        )
        self.taken = []
        self._say([save for save in found if not (save in committed or save in kept)])

    def _put_aside(self, said: Statement, committed: Collection[str]) -> bool:
        """Do what a dead save has not done for a checkpoint of Paddle's; returns whether that could be done."""
        if said.of_paddle is not None and said.save in committed:
            try:
                put_aside(self._storage, said.of_paddle, self._temporary)
            except (OSError, CheckpointError) as error:
                _logger.warning("%s: a checkpoint of Paddle's is not put aside yet: %s", self._storage.location, error)
                return False
        return True

    def _leave(self, taken: Sequence[Statement], committed: Collection[str]) -> None:
        """Leave what is not certain to a later save: the lease's claim speaks of its save, too."""
        if taken:
            self._pass_on([said.without(committed) for said in taken])
