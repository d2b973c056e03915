"""A save, as each of its ranks runs it.

    plan    every rank says what it has; the coordinator claims an id, plans, and orders each rank what to write
    write   every rank reduces partial tensors, writes its files and makes them durable
    commit  the coordinator publishes `.metadata`; only then does anyone return

Where all ranks see one folder the coordinator commits at the end of round ``write``. Otherwise one rank for each folder
first checks that its files are there and syncs it, in round ``commit``. If a rank fails while writing, all ranks end
with round ``abort``, in which they remove their files and raise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..core.box import Box
from ..core.ports import CollectiveWatch
from ..core.reports import SaveReport
from ..core.values import encode_value
from ..errors import CheckpointError, UnsupportedValueError
from ..formats.datafile import FileLayout
from ..formats.names import data_file_name
from ..options import SaveOptions
from .commit import remove_saves
from .context import Context
from .describe import LocalState, describe, digests_of
from .messages import RankPlan, SaveOrder, SaveRequest, SaveResult, WriteAnswer, Written, decode, encode
from .part import make_parts
from .progress import Progress
from .reduce import reduce_partials
from .save_coordinator import SaveCoordinator, seal
from .threads import io_threads
from .watched import WatchedTransport
from .writer import write_file

__all__ = ["save"]

_logger = logging.getLogger("paddle_dist_ckpt")
_USER_METADATA_BYTES = 1 << 20


def save(state_dict: dict[Any, Any], context: Context, unique_id: int | None, options: SaveOptions) -> SaveReport:
    """Save a state_dict together with the session's other ranks. See :func:`paddle_dist_ckpt.save_state_dict`."""
    saving = _Saving(context, options)
    with saving.coordinator.ended_by_failure():
        saving.plan(state_dict, unique_id)
        result = saving.write_and_commit()
        saving.clean_up(result)
    report = saving.report(result)
    level = logging.INFO if context.is_coordinator else logging.DEBUG
    _logger.log(level, "saved id %d to %s: %s", report.unique_id, report.path, report)
    return report


class _Saving:
    """One rank's part in one save."""

    def __init__(self, context: Context, options: SaveOptions) -> None:
        self._context, self._options = context, options
        self._storage, self._session = context.storage, context.session
        self.coordinator = SaveCoordinator(
            context.storage, context.session, context.adapter.version, options, context.memory
        )
        self._memory = context.memory
        self._state: LocalState | None = None
        self._order: SaveOrder | None = None
        self._written = Written([], [], 0)
        self._reported = False
        self._failure: BaseException | None = None
        self._seconds: dict[str, float] = {}

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] = time.perf_counter() - start

    def plan(self, state_dict: dict[Any, Any], unique_id: int | None) -> None:
        """Round ``plan``, and ``describe`` if the coordinator asks for it."""
        with self._timed("plan"):
            answer = self._session.gather_scatter(
                "plan", lambda: self._request(state_dict, unique_id), self.coordinator.plan
            )
            order = decode(answer, SaveOrder)
            if not order.save_id:
                answer = self._session.gather_scatter("describe", self._structure, self.coordinator.described)
                order = decode(answer, SaveOrder)
            self._order = order

    def _request(self, state_dict: dict[Any, Any], unique_id: int | None) -> bytes:
        memory, adapter = self._memory, self._context.adapter
        state = self._state = describe(state_dict, adapter, memory.known)
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

    def _structure(self) -> bytes:
        assert self._state is not None
        return self._state.structure()

    def write_and_commit(self) -> SaveResult:
        """Rounds ``write`` and ``commit``, or ``abort``."""
        assert self._order is not None
        try:
            with self._timed("write"):
                answer = self._session.gather_scatter("write", self._try_to_write, self.coordinator.written)
            decision = decode(answer, WriteAnswer)
            if decision.abort:
                self._session.gather_scatter("abort", self._give_up, self.coordinator.aborted)
            if decision.result is not None:
                return decision.result
            with self._timed("commit"):
                sealed = self._session.gather_scatter("commit", lambda: self._seal(decision), self.coordinator.commit)
            return decode(sealed, SaveResult)
        except BaseException:
            # IMPORTANT: once this rank has reported its files they may be committed at any moment, known to it or not.
            if not self._reported:
                self._remove_files()
            raise

    def clean_up(self, result: SaveResult) -> None:
        """Round ``clean``, after a commit to several folders. It cannot undo the commit, so it does not raise."""

        def remove() -> bytes:
            if self._session.rank in result.leaders and result.replaced is not None:
                remove_saves(self._storage, [result.replaced])
            return b""

        if result.replaced is None:
            return
        try:
            self._session.gather_scatter("clean", remove, self.coordinator.cleaned)
        except CheckpointError as error:
            _logger.warning("%s: files of the replaced save are left to a later one: %s", self._storage.location, error)
            self.coordinator.leave()

    def _try_to_write(self) -> bytes:
        try:
            message = encode(self._write())
        except Exception as error:
            self._failure = error  # raised in round "abort", when every rank has stopped writing
            return b""
        self._reported = True
        return message

    def _give_up(self) -> bytes:
        self._remove_files()
        if self._failure is not None:
            raise self._failure
        return b""

    def _remove_files(self) -> None:
        if self._order is not None:
            for part in range(len(self._written.files) + 1):
                name = data_file_name(self._session.rank, self._order.unique_id, self._order.save_id, part)
                self._storage.delete(name)

    def _seal(self, answer: WriteAnswer) -> bytes:
        if answer.files:
            seal(self._storage, answer.files)
        return b""

    def _write(self) -> Written:
        order, state, memory = self._order, self._state, self._memory
        assert order is not None
        assert state is not None
        reduced = self._prepare(order, state)
        remove_saves(self._storage, order.clean)  # after what other ranks may wait for
        threads = io_threads(order.ranks_on_host, waits=True)
        is_coordinator = self._context.is_coordinator
        with Progress("save", memory.total_bytes, self._options.progress, is_coordinator) as progress:
            for part in memory.parts:
                info = part.info(state, order, self._session, self._context.adapter.version, self._options)
                name = data_file_name(self._session.rank, order.unique_id, order.save_id, part.number)
                layout = FileLayout.of(part.table, info)
                sources = part.sources(state, reduced)
                file = write_file(self._storage, name, layout, sources, threads, self._session.check, progress)
                written = self._written
                self._written = Written(
                    [*written.files, file],
                    [*written.entries, len(part.table.entries.names)],
                    written.nbytes + part.table.nbytes,
                )
        return self._written

    def _prepare(self, order: SaveOrder, state: LocalState) -> dict[tuple[int, Box], Any]:
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

    def report(self, result: SaveResult) -> SaveReport:
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
