"""The folder of steps as all ranks use it: the coordinator says what is there, and what goes, for all of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..arguments import as_integer
from ..control.ranks import Ranks
from ..core.protocols import ControlSession
from ..core.threads import after_fork
from ..errors import CheckpointError, CheckpointNotFoundError, CheckpointTimeoutError
from ..folder.delete import Deletion
from ..folder.nothing import steps_text
from ..options import SaveOptions
from ..saving.save import After
from ..storage import Folders, bounded_folders
from .held_log import held_back
from .removal import Going, Removals, remove_together
from .retention import Retention
from .steps import Steps

__all__ = ["SharedSteps"]

_logger = logging.getLogger("paddle_dist_ckpt")


class SharedSteps:
    """One rank's side. Methods that take a session are for all ranks to call.

    Args:
        root: The folder.
        retention: Which steps are kept.
        options: How to save there.
        rank: This rank.

    Raises:
        ValueError: see :meth:`.steps.Steps.check_root`.

    Attributes:
        known: What this rank knows of them.
        is_behind: Whether no save was committed since this was made, or since one has failed.
    """

    def __init__(self, root: Path, retention: Retention, options: SaveOptions, rank: int) -> None:
        self._retention, self._options = retention, options
        self._reading: int | None = None  # on the coordinator, the step that is being restored
        self.known, self.is_behind = Steps(root), True
        self._removals = Removals(self.known)
        self._folders = functools.partial(bounded_folders, options.progress_timeout, rank)
        self._told: set[str] = set()  # what was warned of, which is said once
        self._renew_lock()
        after_fork(self._renew_lock)  # one that a thread has held, which is not there, would stay so for ever
        with self._folders() as opened:  # ranks may have folders of their own
            self.known.check_root(opened)

    def _renew_lock(self) -> None:
        # Guards what is being read against the removal of steps in the background. A handler of a signal may ask, or
        # save, while the same thread asks.
        self._lock = threading.RLock()

    def check_same(self) -> None:
        """See :meth:`.steps.Steps.check_same`."""
        with self._folders() as opened:
            self.known.check_same(opened)

    def meet(self, step: int) -> None:
        """See :meth:`.steps.Steps.meet`."""
        with self._folders() as opened, suppress(OSError, CheckpointError):  # the step is saved, or restored
            self.known.meet(step, opened)

    def latest_seen(self) -> int | None:
        """The latest step of which this rank has the `.metadata`, if ranks may have roots of their own."""
        if not self._options.separate_folders:
            return None
        with self._folders() as opened:
            return self.known.highest(opened)

    def ask(
        self,
        session: ControlSession,
        what: str,
        choose: Callable[[Steps], Any],
        seen: Callable[[], int | None] = lambda: None,
    ) -> Any:
        """A round in which the coordinator chooses something from the steps that there are.

        Args:
            session: The session of all ranks.
            what: What is chosen.
            choose: Chooses it, on the coordinator: a step, or what begins with one.
            seen: A step that this rank knows of, where no earlier one may be chosen.

        Raises:
            CheckpointError: a rank has seen a later step.
        """

        def tell() -> bytes:
            return json.dumps((seen(), str(self.known.root))).encode()

        def answer(messages: Mapping[int, bytes]) -> dict[int, bytes]:
            with held_back(_logger), self._lock, self._folders() as opened:
                self.known.look(opened)
                found = choose(self.known)
            chosen = found[0] if isinstance(found, tuple) else found
            for rank, data in sorted(messages.items()):
                step, root = json.loads(data)
                if rank != session.rank and step is not None and (chosen is None or step > chosen):
                    raise CheckpointError(
                        f"{root} on rank {rank} has step {step}, and {self.known.root} on the coordinator, rank "
                        f"{session.rank}, has {'none' if chosen is None else f'step {chosen} as its latest'}: do "
                        f"the ranks run on other hosts than before? coordinator_rank={rank} goes on from step {step}; "
                        "restore(state, step=...) takes what the coordinator has"
                    )
            return dict.fromkeys(messages, json.dumps(found).encode())

        return json.loads(session.gather_scatter(what, tell, answer))

    def restore(
        self,
        ranks: Ranks,
        step: int | None,
        timeout: float,
        check: Callable[[], None],
        load: Callable[[Ranks, int], None],
    ) -> int | None:
        """Load a step, or the latest one; returns which that was, None if there is none and none was asked for.

        ``check`` raises what is wrong with this rank's arguments; ``load`` loads a step with ranks, who are in a
        session.

        Raises:
            CheckpointNotFoundError: the step is not there.
        """
        number = as_integer(step)  # Python's, as the other ranks are told of it

        def choose(steps: Steps) -> tuple[int | None, list[int]]:
            self._reading = steps.latest() if step is None else number
            return self._reading, [] if step is None else sorted(steps.metrics)

        def seen() -> int | None:
            check()
            return self.latest_seen() if step is None else None

        what = "restore" if step is None else f"restore step {step if number is None else number!r:.50}"
        gone: CheckpointNotFoundError | None = None
        before: int | None = None
        try:
            # One session, for of a rank that is interrupted between two the others would not hear.
            with ranks.session(what, timeout) as made, made as session:
                while True:
                    chosen, there = self.ask(session, what, choose, seen)
                    if chosen in (None, before):
                        break
                    if gone is not None:
                        _logger.warning("step %d is gone, so step %d is restored", before, chosen)
                    try:
                        load(dataclasses.replace(ranks, within=session), chosen)
                        return chosen
                    except CheckpointNotFoundError as error:  # perhaps removed just now; nothing is touched
                        if step is not None:
                            there_are = f"{self.known.root} has {steps_text(there)}"
                            raise CheckpointNotFoundError(f"{error}; {there_are}") from None
                        gone, before = error, chosen
                if gone is not None:
                    raise gone
                return None
        finally:
            self._reading = None

    def after_save(self, step: int) -> After:
        """What follows the commit of a step, and what makes up for that before a save that none came before."""
        return After(functools.partial(self._retain, step), self._was_behind, self._remove_abandoned)

    def _was_behind(self) -> bool:
        """Whether a save begins that no committed one came before. Until it is committed, the next one is behind.

        Asked when no other save of the group goes on, and so when it is known how the last one ended.
        """
        was_behind, self.is_behind = self.is_behind, True
        return was_behind

    def _remove_abandoned(self, session: ControlSession) -> None:
        """Remove steps that a run before has not finished: a first save may need their room, or one after a failure."""

        def choose(opened: Folders) -> Going:
            try:
                self.known.check_same(opened)
                return self._removals.going(opened)
            except CheckpointTimeoutError:
                raise
            except (OSError, CheckpointError) as error:  # which prevents the save as well, or nothing
                _logger.warning("%s: steps that were never committed are left for now: %s", self.known.root, error)
                return Going()

        self._remove(session, choose)

    def _retain(self, step: int, session: ControlSession) -> None:
        """After the commit of a step: remove the steps that are not to be kept, on every host."""
        self.is_behind = False

        def choose(opened: Folders) -> Going:
            self.known.look(opened)
            self._retention.warn(self.known.root, self.known.metrics, step, self._told)
            doomed = self._retention.doomed(self.known.metrics, step, [self._reading])
            return self._removals.going(opened, doomed, anew=False)

        self._remove(session, choose)

    def _remove(self, session: ControlSession, choose: Callable[[Folders], Going]) -> None:
        def begin() -> dict[int, Deletion]:
            with held_back(_logger), self._lock:
                return self._removals.begin(choose(opened), opened)

        with self._folders() as opened:
            remove_together(session, self.known.root, begin, opened)
