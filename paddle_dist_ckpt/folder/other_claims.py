"""The claims of others, as a save or removal that has one itself sees them: what they make, remove, or may replace."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ..errors import CheckpointError
from .claims import EXPIRY, TEMPORARY, Claim, is_expired, records_of
from .own_claim import OwnClaim

__all__ = ["OtherClaims", "StuckClaimError"]


class StuckClaimError(CheckpointError):
    """The claim of a dead save is in the way, and cannot be read, removed or taken over by this process."""


class _Other(NamedTuple):
    """A claim of another: the id that its save has now, or sets out for, the one in its name, and what it says."""

    id_now: int
    id_in_name: int
    claim: Claim


class OtherClaims:
    """The claims in a folder beside one's own.

    Args:
        own: The claim of this process, which tells the time.
        unique_id: The id that it is of.
        save_id: The save that it is of.

    Attributes:
        ids: The saves of the claims that this process has made.
        stuck: The claims of dead saves that this process could not read, remove or take over.
        why_stuck: Why they could not be taken over, if that is it.
        awaited: Those of dead committed saves that others may yet replace, which it leaves for that.
    """

    def __init__(self, own: OwnClaim, unique_id: int, save_id: str) -> None:
        self._storage, self._own, self._unique_id, self._save_id = own.storage, own, unique_id, save_id
        self.ids = {save_id}
        self.stuck, self.awaited, self.why_stuck = set[str](), set[str](), ""

    def all(self) -> dict[str, _Other]:
        """All of them, by name."""
        found = {}
        records = records_of(self._storage)
        for name, (parsed, record) in records.items():
            rewritten = name.endswith(TEMPORARY) and name.removesuffix(TEMPORARY) in records
            if not (parsed.save_id == self._save_id or rewritten):
                id_now = parsed.unique_id if record.committed_as is None else record.committed_as
                found[name] = _Other(id_now, parsed.unique_id, record)
        return found

    def of_id(self, unique_id: int) -> dict[str, Claim]:
        """Those of an id, by name: of saves that set out for it and are under no other, or that are."""
        return self.rivals(unique_id)[0]

    def rivals(self, unique_id: int) -> tuple[dict[str, Claim], bool]:
        """The same, and whether a save may yet replace what is committed under the id, perhaps without knowing it."""
        beside = self.all()
        others = {
            name: other.claim
            for name, other in beside.items()
            if other.id_now == unique_id and other.claim.save not in self.ids
        }
        may_replace = any(claim.may_replace for claim in others.values())
        return others, may_replace or any(other.claim.has_taken_for(unique_id) for other in beside.values())

    def answered_for(self, but: Collection[str] = ()) -> set[str]:
        """The saves whose files other claims, but for these, alone have removed: those that they make.

        A copy's are those that it is to remove if it fails. What a save that chose its id has taken over is among them
        as well; it does that, or its claim stays. What others are to remove several may try to.
        """
        found: set[str] = set()
        for name, other in self.all().items():
            claim = other.claim
            makes = claim.automatic and not (claim.done or claim.deletes)
            if name not in but and not claim.passes_on:
                found.update(claim.own if makes else [claim.save])
        return found

    def speaking_of(self, save: str) -> str | None:
        """The claim of somebody, not known to be dead, who makes or removes files of this save, or is about to.

        On a full disk it cannot be said what is deleted: deletions count that are of the id, or have an empty claim.
        """
        now = self._own.now()
        for name, (parsed, record) in records_of(self._storage).items():
            deletes = record.deletes and not record.done
            deletes &= parsed.unique_id == self._unique_id or record.is_empty
            if parsed.save_id == self._save_id or not (deletes or record.speaks_of(save)):
                continue
            if not is_expired(self._storage, name, now):
                return name
        return None

    def deleters(self) -> dict[str, Claim]:
        """The claims, by name, of those who may still remove the `.metadata` under the id."""
        claims = self.of_id(self._unique_id).items()
        return {name: claim for name, claim in claims if claim.deletes and not claim.done}

    def check_nobody_saves(self, everywhere: bool = True) -> None:
        """See that nobody else is saving to the folder, or to the id in it.

        Args:
            everywhere: Whether nobody must be saving to any id.

        Raises:
            CheckpointError: somebody is, or died less than a few minutes ago.
        """
        beside = self.all()
        if replacing := [name for name, other in beside.items() if other.claim.has_taken_for(self._unique_id)]:
            raise CheckpointError(
                f"checkpoint {self._unique_id} in {self._storage.location} may yet be replaced by a save that was "
                f"taken for dead, as {replacing[0]} says; {EXPIRY}"
            )
        others: list[str] = []
        for name, (id_now, id_in_name, claim) in beside.items():
            is_of_id = self._unique_id == id_now or (everywhere and self._unique_id == id_in_name)
            if not (everywhere or is_of_id) or (claim.done and claim.passes_on):  # what this has left itself, too
                continue
            is_left = name in self.stuck or name in self.awaited
            # A save taken for dead that nothing stops, as its claim could not be removed, may still commit.
            if not (claim.done or (name in self.stuck and claim.automatic) if is_of_id else is_left):
                others.append(name)
        hindering = [name for name in others if name in self.stuck]
        if hindering and (self.stuck | self.awaited).issuperset(others):
            raise self._stuck_error(hindering[0])
        if others:
            raise CheckpointError(f"{self._storage.location} is being saved to, as {others[0]} says; {EXPIRY}")

    def check_none_stuck(self) -> None:
        """See that no claim of a dead save is left that this process could not read, remove or take over.

        Raises:
            StuckClaimError: one is.
        """
        if self.stuck:
            raise self._stuck_error(min(self.stuck))

    def _stuck_error(self, name: str) -> StuckClaimError:
        what = f"cannot be taken over, for {self.why_stuck}" if self.why_stuck else "cannot be read or removed here"
        return StuckClaimError(
            f"{self._storage.location} has the claim of a dead save, {name}, which {what}: if nobody is at work there, "
            "remove that file"
        )
