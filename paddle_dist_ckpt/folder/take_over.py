"""The take-over: what dead saves have left becomes the business of a living one, without anything being forgotten."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from ..errors import CheckpointError
from .aside import put_aside
from .claims import Statement, saves_of_claim
from .dead_claims import DeadClaims
from .ids import committed_saves
from .other_claims import OtherClaims

if TYPE_CHECKING:
    from .lease import Lease

__all__ = ["take_over"]

_logger = logging.getLogger("paddle_dist_ckpt")


def take_over(heir: Lease, dead: DeadClaims) -> None:
    """Make the removal of dead saves' files the business of a lease.

    IMPORTANT: the dead saves' claims go before any of their files do, and the lease's says what they said before they
    go. A save that was only frozen then finds its claim gone, and does not commit; or its temporary name, if it was
    frozen just before its last step. So that goes next, and only then it is certain which are committed.
    """
    heir.others.stuck = dead.stuck
    if not dead.found:
        return
    committed: dict[str, int] = {}
    try:
        committed = committed_saves(heir.storage)
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
