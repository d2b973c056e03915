"""A save, as each of its ranks runs it.

    plan      every rank says what it has; the coordinator claims an id, plans, and orders each rank what to write
    describe  only if the plan of the save before does not fit: every rank describes its tensors
    write     every rank writes its files and makes them durable
    commit    the coordinator publishes `.metadata`; only then has it been saved

Between the first and ``write`` every rank reduces partial tensors, the one step that takes collectives. A save in the
background then copies what it will write; everything after that goes on in a thread of its own, in the same session.

Where all ranks see one folder the coordinator commits at the end of round ``write``. Otherwise one rank for each folder
first checks that its files are there and syncs it, in round ``commit``. If a rank fails while writing, all ranks end
with round ``abort``, in which they remove their files and raise.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from ..control.transports import WatchedTransport
from ..core.box import Box
from ..core.messages import decode, encode
from ..core.progress import Progress
from ..core.protocols import CollectiveWatch, ControlSession
from ..core.threads import io_threads
from ..errors import CheckpointError, UnsupportedValueError
from ..files.contents import AHEAD, Tensors
from ..files.names import data_file_name
from ..files.writer import FileSave, bytes_ahead
from ..folder.commit import remove_saves, seal
from ..options import SaveOptions
from ..reports import SaveReport
from ..tree.values import encode_value
from .async_save import AsyncSave
from .context import SaveContext
from .describe import LocalState, describe, digests_of
from .messages import RankPlan, SaveOrder, SaveRequest, SaveResult, WriteAnswer, Written
from .part import make_parts
from .reduce import reduce_partials
from .save_coordinator import SaveCoordinator

__all__ = ["After", "save", "save_in_background"]

_logger = logging.getLogger("paddle_dist_ckpt")
After = Callable[[ControlSession], None]
"""What to do when a save is committed."""
_USER_METADATA_BYTES = 1 << 20
_POLL_SECONDS = 0.2
_PAGE = 4096


def save(
    state_dict: dict[Any, Any],
    context: SaveContext,
    unique_id: int | None,
    options: SaveOptions,
    after: After | None = None,
) -> SaveReport:
    """Save a state_dict together with the session's other ranks. See :func:`paddle_dist_ckpt.save_state_dict`.

    ``after`` is called on every rank when the save is committed, and may use the session for more rounds. What it
    raises does not undo the commit, and so is only logged.
    """
    with _Saving(context, options, after) as saving:
        saving.plan(state_dict, unique_id)
        saving.prepare(in_background=False)
        return saving.finish()


def save_in_background(
    state_dict: dict[Any, Any],
    opened: ExitStack,
    context: SaveContext,
    unique_id: int | None,
    options: SaveOptions,
    after: After | None = None,
) -> AsyncSave:
    """Like :func:`save`, but return when what is to be written has been copied.

    Args:
        state_dict: The state, which may be changed afterwards.
        opened: Holds the session open; it is taken over.
        context: This rank's surroundings.
        unique_id: The checkpoint's number, or None.
        options: How to save.
        after: See :func:`save`; called in the background.
    """
    saving = opened.enter_context(_Saving(context, options, after))
    saving.plan(state_dict, unique_id)
    saving.prepare(in_background=True)
    rest = opened.pop_all()

    def finish() -> SaveReport:
        with rest:
            return saving.finish()

    pending = AsyncSave(context.storage.location, finish)
    context.memory.last = pending
    try:
        pending.start()
    except BaseException:
        if not pending.started:
            context.memory.last = None
            rest.__exit__(*sys.exc_info())
        raise
    return pending


class _Saving:
    """One rank's part in one save; a context manager, which ends the save if it fails."""

    def __init__(self, context: SaveContext, options: SaveOptions, after: After | None) -> None:
        self._context, self._options, self._after = context, options, after
        self._storage, self._session = context.storage, context.session
        self._coordinator = SaveCoordinator(
            context.storage, context.session, context.adapter.version, options, context.memory, context.replace_newest
        )
        self._memory = context.memory
        self._stack = ExitStack()
        self._state: LocalState | None = None
        self._order: SaveOrder | None = None
        self._files: list[FileSave] = []
        self._in_background = False
        self._written = Written([], [], 0)
        self._reported = False
        self._failure: BaseException | None = None
        self._seconds: dict[str, float] = {}

    def __enter__(self) -> _Saving:
        self._stack.enter_context(self._coordinator.ended_by_failure())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # IMPORTANT: once this rank has reported its files they may be committed at any moment, known to it or not.
        if error is not None and not self._reported:
            self._stack.callback(self._remove_files)
        self._stack.__exit__(kind, error, traceback)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def plan(self, state_dict: dict[Any, Any], unique_id: int | None) -> None:
        """Round ``plan``, and ``describe`` if the coordinator asks for it."""
        with self._timed("plan"):
            answer = self._session.gather_scatter(
                "plan", lambda: self._request(state_dict, unique_id), self._coordinator.plan
            )
            order = decode(answer, SaveOrder)
            if not order.save_id:
                answer = self._session.gather_scatter("describe", self._structure, self._coordinator.described)
                order = decode(answer, SaveOrder)
            self._order = order

    def _request(self, state_dict: dict[Any, Any], unique_id: int | None) -> bytes:
        self._take_turn()
        memory, adapter = self._memory, self._context.adapter
        state = self._state = describe(state_dict, adapter, self._session.rank, memory.known)
        self._storage.prepare()
        fingerprint, structure = state.fingerprint()
        if memory.known is None or state.known is None or fingerprint != memory.known.fingerprint:
            memory.known = state.remembered(adapter, fingerprint)
        compare = self._options.check_replicas != "off" and len(self._session.ranks) > 1
        return encode(
            SaveRequest(
                unique_id=unique_id,
                folder=self._context.folder(),
                block_bytes=self._options.block_bytes,
                fingerprint=fingerprint,
                structure=structure,
                plan_id=memory.plan_id if memory.block_bytes == self._options.block_bytes else 0,
                digests=digests_of(state) if compare else b"",
                values=state.records(),
                user_metadata=_user_metadata(self._options) if self._context.is_coordinator else None,
            )
        )

    def _take_turn(self) -> None:
        """Wait for the group's save before this one, if it still goes on in the background.

        Raises:
            CheckpointError: it goes on, and this save is not to wait; or it failed, and nobody has noticed.
        """
        turn = self._memory.turn
        if not turn.acquire(blocking=False):
            if self._options.when_busy == "raise":
                raise CheckpointError("an earlier save still goes on in the background, and when_busy is 'raise'")
            while not turn.acquire(timeout=_POLL_SECONDS):
                self._session.check()
        self._stack.callback(turn.release)
        last, self._memory.last = self._memory.last, None
        if last is not None:
            last.raise_unobserved()

    def _structure(self) -> bytes:
        assert self._state is not None
        return self._state.structure()

    def prepare(self, in_background: bool) -> None:
        """Do what has to be done before the caller may change its tensors, but for writing them.

        An error is kept for round ``write``: only then have all ranks left the collectives.
        """
        self._in_background = in_background
        try:
            with self._timed("snapshot" if in_background else "write"):
                self._make_files()
                if in_background:
                    self._take_snapshot()
        except Exception as error:
            self._failure = error

    def _make_files(self) -> None:
        order, state, memory = self._order, self._state, self._memory
        assert order is not None
        assert state is not None
        reduced = self._follow_plan(order, state)
        allocate = self._context.adapter.host_memory if state.has_devices else None
        ahead, copies = (AHEAD, state.copies) if state.has_devices else (0, None)
        buffers = memory.window_buffers(self._foreground_threads + ahead, allocate)
        for part in memory.parts:
            name = data_file_name(self._session.rank, order.unique_id, order.save_id, part.number)
            info = part.info(state, order, self._session, self._context.adapter.version, self._options)
            contents = Tensors(part.table, part.sources(state, reduced), buffers, copies)
            self._files.append(FileSave(self._storage, name, part.table, info, contents))

    @property
    def _foreground_threads(self) -> int:
        assert self._order is not None
        return io_threads(self._order.ranks_on_host, waits=True)

    @property
    def _threads(self) -> int:
        # In the background one thread will do, and no more can be started when the interpreter is about to end.
        return 1 if self._in_background else self._foreground_threads

    def _follow_plan(self, order: SaveOrder, state: LocalState) -> dict[tuple[int, Box], Any]:
        """Make this rank's parts by a new plan; reduce partial tensors. Returns the reduced boxes, by piece and box."""
        memory = self._memory
        if order.plan is not None:
            plan = decode(order.plan, RankPlan)
            memory.plan_id = 0  # until all of it is known
            memory.parts = make_parts(state, plan, self._options.block_bytes, self._context.is_coordinator)
            memory.total_bytes, memory.transfers = plan.total_bytes, plan.transfers
            memory.block_bytes, memory.plan_id = self._options.block_bytes, order.plan_id
        boxes = [pair for part in memory.parts for pair in part.boxes(state)]
        if not memory.transfers and not boxes:
            return {}

        def reduce(watch: CollectiveWatch) -> dict[tuple[int, Box], Any]:
            transport = WatchedTransport(self._context.transport, watch)
            return reduce_partials(memory.transfers, self._session.rank, state, boxes, transport)

        return self._session.run_collectives(reduce)

    def _take_snapshot(self) -> None:
        """Copy what will be written; write at once what the snapshot has no room for."""
        bound = self._options.snapshot_bytes
        surplus = 0 if bound is None else max(0, sum(file.table.nbytes for file in self._files) - bound)
        kept = []
        for file in self._files:
            ahead = bytes_ahead(file.table.nbytes, surplus)
            if ahead:
                file.write_ahead(ahead, self._foreground_threads, self._session.check)
            surplus = max(0, surplus - ahead)
            kept.append(file.table.nbytes - ahead)
        rooms = [-(-nbytes // _PAGE) * _PAGE for nbytes in kept]
        assert self._state is not None
        allocate = self._context.adapter.host_memory if self._state.has_devices else None
        buffer, start = self._memory.snapshot_buffer(sum(rooms), allocate), 0
        for file, nbytes, room in zip(self._files, kept, rooms, strict=True):
            file.take_snapshot(buffer[start : start + nbytes])
            start += room
        self._state = None

    def finish(self) -> SaveReport:
        """Write, commit, clean up, report."""
        result = self._write_and_commit()
        self._clean_up(result)
        if self._after is not None:
            try:
                self._after(self._session)
            except (OSError, CheckpointError) as error:
                _logger.warning(
                    "%s: saved, but not all that follows a save was done: %s", self._storage.location, error
                )
        report = self._report(result)
        level = logging.INFO if self._context.is_coordinator else logging.DEBUG
        _logger.log(level, "saved id %d to %s: %s", report.unique_id, report.path, report)
        return report

    def _write_and_commit(self) -> SaveResult:
        """Rounds ``write`` and ``commit``, or ``abort``."""
        with self._timed("write"):
            answer = self._session.gather_scatter("write", self._try_to_write, self._coordinator.written)
        decision = decode(answer, WriteAnswer)
        if decision.abort:
            self._session.gather_scatter("abort", self._give_up, self._coordinator.aborted)
        if decision.result is not None:
            return decision.result
        with self._timed("commit"):
            sealed = self._session.gather_scatter("commit", lambda: self._seal(decision), self._coordinator.commit)
        return decode(sealed, SaveResult)

    def _try_to_write(self) -> bytes:
        try:
            if self._failure is not None:
                raise self._failure
            message = encode(self._write())
        except Exception as error:
            self._failure = error  # raised in round "abort", when every rank has stopped writing
            return b""
        self._reported = True
        return message

    def _write(self) -> Written:
        assert self._order is not None
        remove_saves(self._storage, self._order.clean)
        is_coordinator = self._context.is_coordinator
        shown = self._options.progress
        if shown is None and self._in_background:
            shown = False
        with Progress("save", self._memory.total_bytes, shown, is_coordinator) as progress:
            for file in self._files:
                info = file.finish(self._threads, self._session.check, progress)
                written = self._written
                self._written = Written(
                    [*written.files, info],
                    [*written.entries, len(file.table.entries.names)],
                    written.nbytes + file.table.nbytes,
                )
        return self._written

    def _give_up(self) -> bytes:
        self._remove_files()
        if self._failure is not None:
            raise self._failure
        return b""

    def _remove_files(self) -> None:
        for file in self._files:
            try:
                file.close()
                self._storage.delete(file.name)
            except OSError as error:  # what made the save fail is what the caller has to hear of
                _logger.warning("%s/%s is left to a later save: %s", self._storage.location, file.name, error)

    def _seal(self, answer: WriteAnswer) -> bytes:
        if answer.files:
            seal(self._storage, answer.files)
        return b""

    def _clean_up(self, result: SaveResult) -> None:
        """Round ``clean``, after a commit to several folders. It cannot undo the commit, so it does not raise."""

        def remove() -> bytes:
            if self._session.rank in result.leaders and result.replaced is not None:
                remove_saves(self._storage, [result.replaced])
            return b""

        if result.replaced is None:
            return
        try:
            self._session.gather_scatter("clean", remove, self._coordinator.cleaned)
        except CheckpointError as error:
            _logger.warning("%s: files of the replaced save are left to a later one: %s", self._storage.location, error)
            self._coordinator.leave()

    def _report(self, result: SaveResult) -> SaveReport:
        """What this rank tells its caller."""
        return SaveReport(
            path=self._storage.location,
            unique_id=result.unique_id,
            total_bytes=result.total_bytes,
            bytes_written=self._written.nbytes,
            files=result.files,
            seconds=self._seconds,
            warnings=tuple(result.warnings),
        )


def _user_metadata(options: SaveOptions) -> bytes | None:
    if options.user_metadata is None:
        return None
    user = encode_value(dict(options.user_metadata), "user_metadata")
    if len(user) > _USER_METADATA_BYTES:
        raise UnsupportedValueError(f"user_metadata takes {len(user)} bytes; {_USER_METADATA_BYTES} are allowed")
    return user
