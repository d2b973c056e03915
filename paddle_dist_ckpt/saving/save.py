"""A save, as each of its ranks runs it.

    plan      every rank says what it has; the coordinator claims an id, plans, and orders each rank what to write. If a
              rank has something to be done first, all do that, and this round is held again
    describe  only if the plan of the save before does not fit: every rank describes its tensors
    clear     only if dead saves have left files: one rank for each folder removes them, before anything needs the room
    write     every rank writes its files and makes them durable
    commit    the coordinator publishes `.metadata`; only then has it been saved

Between the first and ``write`` every rank reduces partial tensors, the one step that takes collectives. A save in the
background then copies what it will write; everything after that goes on in a thread of its own, in the same session.

Where all ranks see one folder the coordinator commits at the end of round ``write``. Otherwise one rank for each folder
first checks that its files are there and syncs it, in round ``commit``. If a rank fails while writing, all ranks end
with round ``abort``, in which they remove their files and raise.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from ..control.rounds import Messages, only_on
from ..core.frames import with_room_for_frames
from ..core.log import warn_only
from ..core.messages import decode, encode
from ..core.protocols import ControlSession
from ..core.text import encodable
from ..errors import CheckpointError, CheckpointTimeoutError, UnsupportedValueError
from ..files.names import DEFAULT_SUFFIX
from ..folder.commit import in_folder, remove_saves, seal
from ..options import SaveOptions
from ..reports import SaveReport, Stopwatch, saved_line
from ..tree.values import encode_value
from .async_save import EARLIER, AsyncSave
from .describe import LocalState, describe, digests_of
from .messages import ClearRequest, CommitAnswer, PlanAnswer, SaveRequest, WriteAnswer
from .rank_files import RankFiles
from .save_coordinator import CATCH_UP, SaveCoordinator
from .save_memory import SaveContext

__all__ = ["After", "save"]

_logger = logging.getLogger("paddle_dist_ckpt")
_USER_METADATA_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class After:
    """What follows a save that is committed, and what makes up for it where there was none.

    Attributes:
        follow: Called on every rank when the save is committed, and may use the session for more rounds. What it raises
            does not undo the commit, and so is only logged.
        is_behind: Asked once, when the group's save before this one has ended: whether this rank knows of no save that
            went well since one failed.
        catch_up: Called on every rank before anything is planned, if one is behind; it may use the session as well.
    """

    follow: Callable[[ControlSession], None] = lambda session: None
    is_behind: Callable[[], bool] = lambda: False
    catch_up: Callable[[ControlSession], None] = lambda session: None


@with_room_for_frames
def save(
    state_dict: dict[Any, Any],
    opened: ExitStack,
    context: SaveContext,
    unique_id: int | None,
    options: SaveOptions,
    in_background: bool,
    after: After | None,
) -> SaveReport | AsyncSave:
    """Save a state_dict together with the session's other ranks. See :func:`paddle_dist_ckpt.save_state_dict`.

    Args:
        state_dict: This rank's.
        opened: Holds the session open; it also ends what the save begins. In the background it is taken over.
        context: This rank's surroundings.
        unique_id: The checkpoint's number, or None.
        options: How to save.
        in_background: Whether to return when what is to be written has been copied.
        after: What else to do in the session, if anything.
    """
    saving = _Saving(context, options, opened, in_background, after)
    state, order = saving.plan(state_dict, unique_id)
    files = saving.prepare(state, order)
    if not in_background:
        return saving.finish(files)  # from the memory of ``state``, which stays alive meanwhile
    rest = ExitStack()

    def finish() -> SaveReport:
        context.ticket.thread = threading.get_ident()
        with rest:
            return saving.finish(files)

    pending = AsyncSave(context.storage.location, finish)
    try:
        rest = opened.pop_all()
        context.memory.last = pending
        context.ticket.thread, context.ticket.goes_on = None, True
        context.session.end_collectives()
        pending.start()
    except BaseException:  # an interrupt, for one, which may come when the thread has begun
        if pending.forestall():
            context.ticket.goes_on = False
            context.memory.last = None
            opened.enter_context(rest)
        raise
    return pending


class _Saving:
    """The steps of one save on one rank, each of which takes what the one before has made; ``ending`` ends it all."""

    def __init__(
        self, context: SaveContext, options: SaveOptions, ending: ExitStack, in_background: bool, after: After | None
    ) -> None:
        self._context, self._options, self._ending = context, options, ending
        self._in_background, self._after = in_background, after or After()
        is_coordinator = context.is_coordinator
        self._coordinator = SaveCoordinator(context, options, ending, in_background) if is_coordinator else None
        self._watch = Stopwatch()

    def _round(
        self, name: str, local: Callable[[], bytes], answer: Callable[[SaveCoordinator, Messages], Messages]
    ) -> bytes:
        return self._context.session.gather_scatter(name, local, only_on(self._coordinator, answer))

    def plan(self, state_dict: dict[Any, Any], unique_id: int | None) -> tuple[LocalState, PlanAnswer]:
        """Round ``plan``, and ``describe`` if the coordinator asks for it: what this rank has, and what it is to do."""
        context, described, failures = self._context, list[LocalState](), list[Exception]()

        def begin() -> bytes:
            may_wait = self._options.when_busy == "wait"
            self._ending.enter_context(context.memory.take_turn(context.ticket, may_wait, context.session.check))
            is_behind = self._after.is_behind()
            try:  # on all ranks, behind or not: an object's state_dict() may wait for the others' in a collective
                described.append(describe(state_dict, context.adapter, context.session.rank, context.memory.known))
            except Exception as error:
                failures.append(error)
            return b"" if is_behind else request()

        def request() -> bytes:
            if failures:
                raise failures[0]
            return encode(self._request(described[0], unique_id))

        with self._watch.phase("plan"):
            try:
                answer = self._round("plan", begin, SaveCoordinator.plan)
            except CheckpointError as error:
                if EARLIER in str(error):  # another rank has raised it first, which tells all ranks
                    context.memory.last = None
                raise
            if answer == CATCH_UP:
                self._after.catch_up(context.session)
                answer = self._round("plan", request, SaveCoordinator.plan)
            (state,) = described
            if not answer:
                answer = self._round("describe", state.structure, SaveCoordinator.described)
            order = decode(answer, PlanAnswer)
            if order.dead is not None:
                self._round("clear", functools.partial(self._clear, order.dead), SaveCoordinator.cleared)
            return state, order

    def _clear(self, dead: list[str]) -> bytes:
        """Remove what dead saves have left in this rank's folder, and say how much room there is then."""
        storage, left = self._context.storage, False
        try:
            remove_saves(storage, dead, self._check_held)
        except CheckpointTimeoutError:
            raise
        except (OSError, CheckpointError) as error:
            _logger.warning("%s: files of dead saves are left to a later save: %s", storage.location, error)
            left = True
        return encode(ClearRequest(self._context.folder().free_bytes, left))

    def _check_held(self) -> None:
        """Before a removal: see that the claim is there, on the coordinator, whose folder has it."""
        if self._coordinator is not None:
            self._coordinator.check_held()

    def _request(self, state: LocalState, unique_id: int | None) -> SaveRequest:
        context, memory, block_bytes = self._context, self._context.memory, self._options.block_bytes
        folder = in_folder(context.storage, context.folder)
        fingerprint, structure, known = state.identified()
        memory.recall(known, fingerprint, block_bytes)
        compare = self._options.check_replicas != "off" and len(context.session.ranks) > 1
        return SaveRequest(
            unique_id=unique_id,
            folder=folder,
            location=encodable(context.storage.location),
            block_bytes=block_bytes,
            fingerprint=fingerprint,
            structure=structure,
            plan_id=memory.plan.plan_id,
            digests=digests_of(state) if compare else b"",
            values=state.records(),
            user_metadata=_user_metadata(self._options) if context.is_coordinator else None,
            data_suffix=self._options.data_suffix or DEFAULT_SUFFIX,
            on_device=state.devices is not None,
            check_replicas=self._options.check_replicas,
        )

    def prepare(self, state: LocalState, order: PlanAnswer) -> RankFiles:
        """This rank's files, ready to be written; in the background, from copies."""
        with self._watch.phase("snapshot" if self._in_background else "write"):
            files = RankFiles(self._context, self._options, order, self._in_background, self._watch.seconds)
            self._ending.enter_context(files)
            files.prepare(state)
            return files

    def finish(self, files: RankFiles) -> SaveReport:
        """Write, commit, clean up, report."""
        context = self._context
        result = self._write_and_commit(files)
        self._clean_up(result)
        report = self._report(result, files)
        level = logging.INFO if context.is_coordinator else logging.DEBUG
        with suppress(Exception):  # it is committed, and a handler of the log may raise what it likes
            self._follow()
            _logger.log(level, "%s", saved_line(report))
        return report

    def _follow(self) -> None:
        """Do what is to be done after the commit, which nothing that is raised there undoes."""
        try:
            self._after.follow(self._context.session)
        except Exception as error:
            location = self._context.storage.location
            _logger.warning("%s: saved, but not all that follows a save was done: %s", location, error)

    def _write_and_commit(self, files: RankFiles) -> CommitAnswer:
        """Rounds ``write`` and ``commit``, or ``abort``."""
        with self._watch.phase("write"):
            answer = decode(self._round("write", files.write, SaveCoordinator.written), WriteAnswer)
        if answer.abort:
            self._round("abort", files.give_up, SaveCoordinator.aborted)
        if answer.result is not None:
            return answer.result

        def seal_folder() -> bytes:
            if answer.files:
                seal(self._context.storage, answer.files)
            return b""

        with self._watch.phase("commit"):
            return decode(self._round("commit", seal_folder, SaveCoordinator.commit), CommitAnswer)

    def _clean_up(self, result: CommitAnswer) -> None:
        """Round ``clean``, after a commit to several folders. It cannot undo the commit, so it does not raise."""
        storage, replaced = self._context.storage, result.replaced
        if not replaced:
            return

        def remove() -> bytes:
            if self._context.session.rank in result.leaders:
                remove_saves(storage, replaced)
            return b""

        try:
            self._round("clean", remove, SaveCoordinator.cleaned)
        except Exception as error:
            warn_only("%s: files of the replaced save are left to a later one: %s", storage.location, error)

    def _report(self, result: CommitAnswer, files: RankFiles) -> SaveReport:
        return SaveReport(
            path=self._context.storage.location,
            unique_id=result.unique_id,
            total_bytes=result.total_bytes,
            bytes_written=files.nbytes,
            files=result.files,
            seconds=self._watch.seconds,
            warnings=tuple(result.warnings),
        )


def _user_metadata(options: SaveOptions) -> bytes | None:
    if options.user_metadata is None:
        return None
    user = encode_value(dict(options.user_metadata), "user_metadata")
    if len(user) > _USER_METADATA_BYTES:
        raise UnsupportedValueError(f"user_metadata takes {len(user)} bytes; {_USER_METADATA_BYTES} are allowed")
    return user
