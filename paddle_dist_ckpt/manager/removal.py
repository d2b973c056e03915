"""What goes from a folder of steps, and how: by one process, or on every host in a session of the ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..core.protocols import ControlSession
from ..errors import CheckpointError, DurabilityUnknownError
from ..files.names import metadata_name, parse_claim, parse_data_file
from ..folder.claims import is_abandoned
from ..folder.commit import remove_saves
from ..folder.delete import Deletion, begin_clearing, begin_deletion
from ..folder.other_claims import StuckClaimError
from ..saving.requests import leaders_of
from ..storage import Folders, Storage
from .steps import Steps, is_link, step_folder

__all__ = ["Going", "Removals", "remove_step", "remove_together"]

_logger = logging.getLogger("paddle_dist_ckpt")


@dataclass(frozen=True, slots=True)
class Going:
    """What is to be removed from a folder of steps.

    Attributes:
        doomed: Committed steps.
        abandoned: Steps that were never committed, or are half removed, and that nobody works on any more.
        littered: Committed steps that stay, in whose folders dead saves have left something, which goes.
    """

    doomed: list[int] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    littered: list[int] = field(default_factory=list)


class Removals:
    """Removes steps from a folder. Methods look into folders by what is passed as ``opened``.

    Attributes:
        refused: The steps that were to be removed, or tidied, and that the storage has refused to.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._claimed: set[int] | None = None  # steps in whose folders there were claims, if that is known
        self._told: set[int] = set()  # steps of which it was said that they have no `.metadata`
        self.refused: set[int] = set()

    def going(self, opened: Folders, doomed: Iterable[int] = (), now: float | None = None, anew: bool = True) -> Going:
        """Find out what is to go, as of the last look at the steps. Of links to folders elsewhere nothing is.

        Args:
            opened: See the class.
            doomed: Committed steps that the rules do not keep.
            now: The time. By default that of the folder's own clock, for which the folder is touched: whoever removes
                something asks that.
            anew: Whether to look for what dead saves have left in all folders of committed steps, and not only in those
                that had claims when that was done last.
        """
        steps = self._steps
        folders = steps.folders(opened)
        doomed = [step for step in doomed if not self._is_link(step, opened)]
        looked = set(folders if anew or self._claimed is None else self._claimed)
        self._claimed, littered, abandoned = set(), list[int](), dict[int, list[str]]()
        for step in sorted(looked.union(step for step in folders if step not in steps.metrics)):
            with suppress(OSError):  # one that cannot be listed is left alone
                names = self._storage(step, opened).names()
                has_claims = any(parse_claim(name) is not None for name in names)
                if has_claims:
                    self._claimed.add(step)
                # Whatever has a `.metadata`, of any id or format, can be of use.
                is_uncommitted = step not in steps.metrics and not any(name.endswith(".metadata") for name in names)
                is_littered = has_claims and metadata_name(step) in names and step not in doomed
                if not (is_uncommitted or is_littered) or self._is_link(step, opened):
                    continue
                if is_littered:
                    littered.append(step)
                else:
                    abandoned[step] = names
        if not (littered or abandoned):
            return Going(doomed)
        time = self._now(opened) if now is None else now

        def is_left(step: int) -> bool:
            return is_abandoned(self._storage(step, opened), time)

        useless = [step for step, names in abandoned.items() if is_left(step) and self._is_useless(step, names)]
        return Going(doomed, useless, list(filter(is_left, littered)))

    def _storage(self, step: int, opened: Folders) -> Storage:
        return opened(self._steps.folder(step))

    def _is_link(self, step: int, opened: Folders) -> bool:
        return is_link(self._steps.folder(step), opened)

    def _now(self, opened: Folders) -> float:
        """The time by the folder's own clock."""
        root = opened(self._steps.root)
        with suppress(PermissionError):  # then it is earlier by that clock, and fewer are abandoned
            root.touch(".")
        return root.modified(".")

    def _is_useless(self, step: int, names: Iterable[str]) -> bool:
        """Whether what an uncommitted step has can be of no use; data files of which no claim speaks may be a step."""
        data = next((name for name in names if parse_data_file(name) is not None), None)
        if data is None or any(parse_claim(name) is not None for name in names):
            return True
        if step not in self._told:
            self._told.add(step)
            _logger.warning(
                "step %d is left: %s has data files, such as %s, but no .metadata; if it was lost, rebuild_metadata "
                "may make it again, and if not, the folder can be removed",
                step,
                self._steps.folder(step),
                data,
            )
        return False

    def begin(self, going: Going, opened: Folders) -> dict[int, Deletion]:
        """Make steps uncommitted, or set out to remove what is left of those that never were.

        What was saved under a step since the last look stays, and so does a folder in which somebody is at work.

        Returns:
            Those of which something is removed, in this order. Doomed steps that are not among them, and are none of
            the steps any more, may come back with a crash of the machine.
        """
        begun: dict[int, Deletion] = {}
        try:
            for step in (*going.doomed, *going.abandoned):
                self._begin(step, False, begun, opened)
            for step in going.littered:
                self._begin(step, True, begun, opened)
        except BaseException:  # an interrupt
            for removal in begun.values():
                removal.leave()
            raise
        return begun

    def _begin(self, step: int, tidies: bool, begun: dict[int, Deletion], opened: Folders) -> None:
        """Begin one of them; if it ``tidies``, the step stays."""
        storage, save = self._storage(step, opened), self._steps.saves.get(step)
        what = f"what dead saves have left beside step {step}" if tidies else f"step {step}"
        try:
            if self._is_link(step, opened):
                raise CheckpointError(f"{storage.location} is a link now")
            if tidies or save is None:
                begun[step] = begin_clearing(storage, step, of_checkpoint=tidies)
            else:
                begun[step] = begin_deletion(storage, step, save)
        except DurabilityUnknownError as error:
            _logger.warning("%s", error)
        except (OSError, CheckpointError) as error:
            _logger.warning("%s is left for now: %s", what, error)
            if isinstance(error, (OSError, StuckClaimError)):
                self.refused.add(step)
            return
        else:
            _logger.info("removing %s: %s", what, storage.location)
        if not tidies:
            self._steps.metrics.pop(step, None)
            self._steps.saves.pop(step, None)


def remove_step(root: Path, step: int, saves: Collection[str], opened: Folders) -> None:
    """Remove the files of these saves from a step's folder, and the folder unless there is something else in it."""
    folder = step_folder(root, step)
    if is_link(folder, opened):  # what it leads to was put there by somebody else
        return
    remove_saves(opened(folder), saves)
    with suppress(OSError):  # it is not there, or not empty
        opened.run("removing", folder, folder.rmdir)


def remove_together(
    session: ControlSession, root: Path, begin: Callable[[], dict[int, Deletion]], opened: Folders
) -> None:
    """Rounds ``retain`` and ``remove``: one rank of each folder removes the files of what the coordinator uncommits.

    The coordinator removes those of its own folder, where the claims are, when all others have removed theirs.

    Args:
        session: All ranks'.
        root: The folder of the steps' folders, on this rank.
        begin: Uncommits what is to go, on the coordinator.
        opened: Opens a folder.
    """
    removals: dict[int, Deletion] = {}

    def choose(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        removals.update(begin())
        if not removals:
            return dict.fromkeys(messages, b"")
        saves = json.dumps({step: removal.saves for step, removal in removals.items()}).encode()
        leaders = leaders_of(messages, session.coordinator) - {session.coordinator}
        return {rank: saves if folder and rank in leaders else b"{}" for rank, folder in messages.items()}

    def remove() -> bytes:
        for step, saves in json.loads(answer).items():
            remove_step(root, int(step), saves, opened)
        return b""

    def end(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        while removals:
            step = next(iter(removals))
            removals[step].finish()  # with it goes the claim, by which all this would be done after a crash
            del removals[step]
            remove_step(root, step, (), opened)
        return dict.fromkeys(messages, b"")

    try:
        answer = session.gather_scatter("retain", lambda: _identity(opened(root)), choose)
        if answer:
            session.gather_scatter("remove", remove, end)
    finally:
        for removal in list(removals.values()):  # a rank has failed
            removal.leave()


def _identity(storage: Storage) -> bytes:
    """Which folder this rank sees, as bytes to be compared; none if there is none, which is not made here."""
    try:
        return repr(storage.identity()).encode()
    except FileNotFoundError:
        return b""
