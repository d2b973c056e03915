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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..core.box import Box
from ..core.paths import plain_key
from ..core.ports import CollectiveWatch
from ..core.reports import SaveReport
from ..core.shards import unpack_column
from ..errors import CheckpointError
from ..formats.datafile import Entry, FileLayout, escaped_key, slice_suffix, split_in_parts
from ..formats.names import data_file_name
from ..options import SaveOptions
from .commit import remove_saves
from .context import Context
from .describe import LocalState, describe, save_request
from .fileinfo import data_file_info
from .messages import SaveOrder, SaveResult, WriteAnswer, Written, decode, encode, unpack_signed
from .progress import Progress
from .reduce import reduce_partials
from .save_coordinator import SaveCoordinator, seal
from .threads import io_threads
from .watched import WatchedTransport
from .writer import write_file

__all__ = ["save"]

_logger = logging.getLogger("paddle_dist_ckpt")


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
        self.coordinator = SaveCoordinator(context.storage, context.session, context.adapter.version, options)
        self._state = LocalState()
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
        """Round ``plan``."""

        def request() -> bytes:
            self._state = describe(state_dict, self._context.adapter)
            self._storage.prepare()
            compare = self._options.check_replicas != "off" and len(self._session.ranks) > 1
            folder, is_coordinator = self._context.folder(), self._context.is_coordinator
            return encode(save_request(self._state, unique_id, folder, self._options, compare, is_coordinator))

        with self._timed("plan"):
            answer = self._session.gather_scatter("plan", request, self.coordinator.plan)
            self._order = decode(answer, SaveOrder)

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
        order = self._order
        assert order is not None
        items = self._items(order)
        entries = self._entries(order, items)
        remove_saves(self._storage, order.clean)  # after what other ranks may wait for
        is_coordinator = self._context.is_coordinator
        parts = split_in_parts(entries, self._options.block_bytes)
        if parts == [[]] and not is_coordinator and not order.values:
            return self._written
        threads = io_threads(order.ranks_on_host)
        first = 0
        with Progress("save", order.total_bytes, self._options.progress, is_coordinator) as progress:
            for part, part_entries in enumerate(parts):
                rows = items[first : first + len(part_entries)]
                first += len(part_entries)
                info = data_file_info(self._state, rows, order, self._context, part, len(parts), self._options)
                name = data_file_name(self._session.rank, order.unique_id, order.save_id, part)
                layout = FileLayout.of(part_entries, info)
                check = self._session.check
                file = write_file(self._storage, name, layout, threads, check, progress)
                nbytes = self._written.nbytes + sum(entry.nbytes for entry in part_entries)
                self._written = Written(
                    [*self._written.files, file], [*self._written.entries, len(part_entries)], nbytes
                )
        return self._written

    def _items(self, order: SaveOrder) -> list[tuple[int, Box]]:
        """What to write: the number of the local shard, and the box in global coordinates."""
        boxes = unpack_signed(order.boxes, 2 * order.dimensions).tolist()
        rows = unpack_column(order.row, len(boxes), max(1, len(self._state.shards)), "row").tolist()
        known: dict[tuple[int, tuple[int, ...]], Box] = {}  # tensors that are cut alike share their boxes
        items = []
        for row, corners in zip(rows, map(tuple, boxes), strict=True):
            ndim = len(self._state.shards[row].offset)
            if (ndim, corners) not in known:
                known[ndim, corners] = Box(corners[:ndim], corners[order.dimensions : order.dimensions + ndim])
            items.append((row, known[ndim, corners]))
        return items

    def _entries(self, order: SaveOrder, items: Sequence[tuple[int, Box]]) -> list[Entry]:
        state = self._state
        views = [state.views[owner] for owner in state.owners]
        reduced: dict[tuple[int, Box], Any] = {}
        if order.transfers or any(views[row].reduction is not None for row, _ in items):

            def reduce(watch: CollectiveWatch) -> dict[tuple[int, Box], Any]:
                transport = WatchedTransport(self._context.transport, watch)
                return reduce_partials(order.transfers, self._session.rank, state.shards, views, items, transport)

            reduced = self._session.run_collectives(reduce)
        entries = []
        suffixes: dict[tuple[Box, tuple[int, ...]], str] = {}
        for row, box in items:
            shard, view, path = state.shards[row], views[row], state.paths[state.owners[row]]
            array = reduced.get((row, box)) if reduced else None
            if array is None:
                whole = box.shape == shard.array.shape
                array = shard.array if whole else np.asarray(shard.array[box.relative_to(shard.offset).slices])
            suffix = suffixes.get((box, view.shape))
            if suffix is None:
                suffix = suffixes[box, view.shape] = slice_suffix(box, view.shape)
            name = escaped_key(order.keys.get(path) or plain_key(path)) + suffix
            entries.append(Entry(name, view.dtype, box.shape, array))
        return entries

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
