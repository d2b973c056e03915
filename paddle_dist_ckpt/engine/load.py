"""A load, as each of its ranks runs it.

    request   every rank says what it wants; the coordinator reads `.metadata` and tells each what there is of it
    decide    every rank plans and opens the files that it needs; what does not fit is raised on all, nothing touched
    exchange  if not everyone can read for itself: who reads what for whom
    open      ... and whether the readers have their files
    staged    values stored as entries, and tied tensors, are read to buffers and looked at
    read      everything else is read to where it belongs

If files are gone because a save has replaced the checkpoint meanwhile, the load starts again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ..core.box import Box
from ..core.metadata import FileInfo, table_from_record
from ..core.paths import plain_key
from ..core.ports import ControlSession, Transport
from ..core.reports import LoadReport
from ..core.shards import IntArray, Kind, ShardTable, unpack_column
from ..core.state_dict import Leaf, assign, build_tree, flatten
from ..core.tensors import TensorAdapter, TensorView
from ..core.values import decode_value, from_jsonable
from ..errors import CheckpointCorruptedError, CheckpointError
from ..formats.datafile import read_header
from ..options import LoadOptions
from ..planning.load_plan import ReadItems, WantedBoxes, plan_load
from ..storage.base import Storage
from .exchange import Exchange
from .load_coordinator import LoadCoordinator
from .messages import (
    Decision,
    ExchangeOrder,
    LoadAnswer,
    LoadRequest,
    LoadResult,
    Needs,
    Opened,
    Problems,
    Reach,
    Round,
    ShardNeed,
    Wanted,
    decode,
    encode,
)
from .progress import Progress
from .reader import Consumer, OpenFile, StoredEntry, read_entries
from .save import folder_of
from .targets import Target, Targets, check_value_rows, collect
from .threads import io_threads
from .watched import WatchedTransport

__all__ = ["load", "load_leaves"]

_logger = logging.getLogger("paddle_dist_ckpt")
_MANY = 2**62


def load(
    state_dict: dict[Any, Any],
    storage: Storage,
    session: ControlSession,
    transport: Transport,
    adapter: TensorAdapter,
    unique_id: int | None,
    options: LoadOptions,
) -> LoadReport:
    """Fill a state_dict together with the session's other ranks. See :func:`paddle_dist_ckpt.load_state_dict`."""
    leaves: list[Leaf] = []

    def scan() -> list[Leaf]:
        leaves.extend(flatten(state_dict, adapter.is_tensor))
        return leaves

    values, report = load_leaves(scan, storage, session, transport, adapter, unique_id, options)
    assign(state_dict, values)
    return report


def load_leaves(
    scan: Callable[[], list[Leaf]],
    storage: Storage,
    session: ControlSession,
    transport: Transport,
    adapter: TensorAdapter,
    unique_id: int | None,
    options: LoadOptions,
) -> tuple[dict[str, Any], LoadReport]:
    """Fill the tensors among the leaves that ``scan`` finds; returns the values for the others, by path."""
    loading = _Loading(storage, session, transport, adapter, unique_id, options)
    coordinator = LoadCoordinator(storage, session, options)
    loading.scan = scan
    while True:
        with ExitStack() as files:
            result = loading.attempt(coordinator, files)
        if result is not None:
            report = loading.report(result)
            level = logging.INFO if session.rank == session.coordinator else logging.DEBUG
            _logger.log(level, "loaded id %d from %s: %s", report.unique_id, report.path, report)
            return loading.values, report


class _Loading:
    """One rank's part in one load."""

    scan: Callable[[], list[Leaf]]

    def __init__(
        self,
        storage: Storage,
        session: ControlSession,
        transport: Transport,
        adapter: TensorAdapter,
        unique_id: int | None,
        options: LoadOptions,
    ) -> None:
        self._storage, self._session, self._transport = storage, session, transport
        self._adapter, self._unique_id, self._options = adapter, unique_id, options
        self._views: dict[str, TensorView] | None = None
        self._wanted_values: list[tuple[str, str]] = []
        self._scan_problems: list[str] = []
        self._seconds: dict[str, float] = {}
        self._bytes_read = self._received = self._opened_count = 0
        self._opened: dict[str, OpenFile] = {}
        self._skipped: list[str] = []
        self.values: dict[str, Any] = {}

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def attempt(self, coordinator: LoadCoordinator, files: ExitStack) -> LoadResult | None:
        """One try; None if the checkpoint was replaced meanwhile."""
        with self._timed("plan"):
            self._answer = decode(
                self._session.gather_scatter("request", self._request, coordinator.request), LoadAnswer
            )
            decision = decode(
                self._session.gather_scatter("decide", lambda: self._plan(files), coordinator.decide), Decision
            )
        if decision.restart:
            return None
        order: ExchangeOrder | None = None
        if decision.exchange:
            with self._timed("open"):
                order = self._agree_on_exchange(decision, coordinator, files)
            if order is None:
                return None
        if decision.staged:
            self._session.gather_scatter("staged", lambda: self._read_staged(order), coordinator.staged)
        try:
            with self._timed("read"):
                done = self._session.gather_scatter("read", lambda: self._read(order), coordinator.done)
        except CheckpointError as error:
            error.args = (f"{error.args[0]}\nTargets are partly written: load again, or do not use them.",)
            raise
        return decode(done, LoadResult)

    # -- request ------------------------------------------------------------------------------------------------

    def _request(self) -> bytes:
        if self._views is None:
            self._views, self._wanted_values, self._scan_problems = collect(self.scan(), self._adapter)
        try:
            folder = folder_of(self._storage)
        except OSError:  # this rank has no such folder; others may read for it
            folder = None
        wanted = Wanted(list(self._views), self._wanted_values)
        return encode(LoadRequest(self._unique_id, folder, encode(wanted)))

    # -- decide -------------------------------------------------------------------------------------------------

    def _plan(self, files: ExitStack) -> bytes:
        self._read_answer()
        targets = self._targets = Targets(problems=list(self._scan_problems))
        self._find_odd()
        self._add_targets()
        targets.stage_tied()
        self._items = self._plan_items()
        self._opened = {}
        needed = sorted({self._files[i].name for i in self._table.shard_file[self._items.shard].tolist()})
        unreachable: dict[str, str] = {}
        if self._options.exchange != "always" or len(self._session.ranks) == 1:
            unreachable = self._open(files, {name: self._expected[name] for name in needed})
        staged = any(target.staged for target in targets.rows)
        self._skipped = list(targets.problems)
        return encode(Needs(targets.problems, needed, unreachable, staged))

    def _read_answer(self) -> None:
        answer = self._answer
        self._table: ShardTable = table_from_record(answer.tensors, len(answer.files))
        check_value_rows(self._table)
        self._files = answer.files
        shards = len(self._table.shard_file)
        self._starts: IntArray = unpack_column(answer.starts, shards, _MANY, "starts")
        self._blocks: IntArray = unpack_column(answer.blocks, shards, _MANY, "blocks")
        counts = unpack_column(answer.block_counts, len(answer.files), _MANY, "block_counts").tolist()
        self._expected = {info.name: (info, count) for info, count in zip(answer.files, counts, strict=True)}

    def _find_odd(self) -> None:
        assert self._views is not None
        words = {"none": "None", "dict": "a dict", "other": "a value"}
        wanted = {path: words[present] for path, present in self._wanted_values}
        for path, found in self._answer.odd.items():
            what = "a tensor" if path in self._views else wanted[path]
            self._targets.problems.append(
                f"{plain_key(path)}: the state_dict has {what}; in the checkpoint it is {found}"
            )

    def _add_targets(self) -> None:
        assert self._views is not None
        for path, view in self._views.items():
            if path in self._table.index:
                self._targets.add_tensor(path, view, self._table, self._options.cast)
        for path, kind in zip(self._table.paths, self._table.kinds.tolist(), strict=True):
            if kind == Kind.VALUE:
                self._targets.add_value(path, self._table)

    def _plan_items(self) -> ReadItems:
        rows = self._targets.rows
        dimensions = max([1, *(len(target.offset) for target in rows), *(len(x.shape) for x in self._table.layouts)])
        offset = np.zeros((len(rows), dimensions), np.int64)
        shape = np.ones((len(rows), dimensions), np.int64)
        for i, target in enumerate(rows):
            offset[i, : len(target.offset)] = target.offset
            shape[i, : len(target.offset)] = target.array.shape
        items = plan_load(self._table, WantedBoxes(np.array([t.tensor for t in rows], np.int64), offset, shape))
        for i in items.uncovered.tolist():
            box = Box(rows[i].offset, rows[i].shape)
            self._targets.problems.append(
                f"{plain_key(rows[i].path)}: the checkpoint does not hold the region {box} exactly once"
            )
        if not len(items.uncovered):
            return items
        keep = ~np.isin(items.wanted, items.uncovered)
        return ReadItems(items.wanted[keep], items.shard[keep], items.offset[keep], items.shape[keep], items.uncovered)

    def _open(self, files: ExitStack, expected: dict[str, tuple[FileInfo, int]]) -> dict[str, str]:
        """Open and check files; returns the ones that cannot be read, and why."""
        failed: dict[str, str] = {}
        for name, (info, blocks) in expected.items():
            if name in self._opened:
                continue
            try:
                file = self._storage.open(name)
                files.callback(file.close)
                hashes, data_start = read_header(file, info, blocks)
            except (OSError, CheckpointCorruptedError) as error:
                failed[name] = f"rank {self._session.rank}: {error}"
                continue
            self._opened[name] = OpenFile(name, file, data_start, hashes)
            self._opened_count += 1
        return failed

    # -- exchange -----------------------------------------------------------------------------------------------

    def _agree_on_exchange(
        self, decision: Decision, coordinator: LoadCoordinator, files: ExitStack
    ) -> ExchangeOrder | None:
        expected = {info.name: (info, count) for info, count in zip(decision.files, decision.block_counts, strict=True)}

        def reach() -> bytes:
            if decision.probe:
                self._open(files, expected)
            return encode(Reach(sorted(self._opened.keys() & expected.keys()), self._shard_needs()))

        order = decode(self._session.gather_scatter("exchange", reach, coordinator.exchange), ExchangeOrder)
        if order.restart:
            return None

        def open_mine() -> bytes:
            return encode(Opened(self._open(files, {name: expected[name] for name in order.files})))

        return None if self._session.gather_scatter("open", open_mine, coordinator.opened) else order

    def _shard_needs(self) -> list[ShardNeed]:
        needs = []
        for row in range(len(self._items.wanted)):
            target, shard, _, entry_box = self._item(row)
            within = shard - int(self._table.first_shard[target.tensor])
            needs.append(ShardNeed(target.path, within, row, (entry_box.offset, entry_box.shape), target.staged))
        return needs

    def _item(self, row: int) -> tuple[Target, int, Box, Box]:
        """An item: its target, its shard, and its box as counted from the target's corner and from the shard's."""
        items = self._items
        target, shard = self._targets.rows[items.wanted[row]], int(items.shard[row])
        ndim = len(target.offset)
        box = Box(tuple(items.offset[row, :ndim].tolist()), tuple(items.shape[row, :ndim].tolist()))
        _, shard_offset, _ = self._table.shard_place(shard)
        return target, shard, box.relative_to(target.offset), box.relative_to(shard_offset)

    # -- read ---------------------------------------------------------------------------------------------------

    def _read_staged(self, order: ExchangeOrder | None) -> bytes:
        self._run_pass(True, order.staged if order is not None else None)
        problems = self._targets.compare_tied()
        self._skipped += problems
        return encode(Problems(problems))

    def _read(self, order: ExchangeOrder | None) -> bytes:
        self._run_pass(False, order.main if order is not None else None)
        self._targets.finish()
        self._collect_values()
        return b""

    def _run_pass(self, staged: bool, rounds: Sequence[Round] | None) -> None:
        rows = [i for i, w in enumerate(self._items.wanted.tolist()) if self._targets.rows[w].staged == staged]
        is_coordinator = self._session.rank == self._session.coordinator
        with Progress("load", self._nbytes(rows), self._options.progress, is_coordinator) as progress:
            if rounds is None:
                wanted = self._wanted_entries(rows)
                read_entries(wanted, self._answer.block_bytes, self._threads, self._session.check, progress)
            else:
                self._exchange(rounds, progress)
        self._bytes_read += progress.done

    @property
    def _threads(self) -> int:
        return io_threads(self._answer.ranks_on_host.get(self._session.rank, 1))

    def _nbytes(self, rows: Sequence[int]) -> int:
        itemsizes = self._table.itemsizes[self._table.shard_tensor[self._items.shard[rows]]]
        return int((np.prod(self._items.shape[rows], axis=1) * itemsizes).sum())

    def _wanted_entries(self, rows: Sequence[int]) -> list[tuple[StoredEntry, list[Consumer]]]:
        entries: dict[int, tuple[StoredEntry, list[Consumer]]] = {}
        for row in rows:
            target, shard, box, entry_box = self._item(row)
            if shard not in entries:
                entries[shard] = (self._entry(shard), [])
            entries[shard][1].append(target.consumer(box, entry_box))
        return list(entries.values())

    def _entry(self, shard: int) -> StoredEntry:
        table = self._table
        tensor, _, shape = table.shard_place(shard)
        return StoredEntry(
            file=self._opened[self._files[table.shard_file[shard]].name],
            start=int(self._starts[shard]),
            first_block=int(self._blocks[shard]),
            shape=shape,
            dtype=table.dtypes[tensor],
            key=self._answer.keys.get(table.paths[tensor]) or plain_key(table.paths[tensor]),
        )

    def _exchange(self, rounds: Sequence[Round], progress: Progress) -> None:
        """Run the rounds of an exchange; an error in reading is raised when no rank waits for this one any more."""
        ranks = self._session.ranks

        def run(alive: Callable[[], None]) -> Exchange:
            def moved(nbytes: int) -> None:
                alive()
                progress(nbytes)

            exchange = Exchange(
                ranks=ranks,
                place=ranks.index(self._session.rank),
                files=self._opened,
                consumer=self._consumer_of_need,
                transport=WatchedTransport(self._transport, alive),
                block_bytes=self._answer.block_bytes,
                threads=self._threads,
                check=self._session.check,
                progress=moved,
            )
            exchange.run(rounds)
            return exchange

        exchange = self._session.run_collectives(run)
        self._received += exchange.received
        if exchange.failure is not None:
            raise exchange.failure

    def _consumer_of_need(self, row: int, entry_part: Box) -> Consumer:
        """The consumer of a part of one of this rank's items; the part is counted from the shard's corner."""
        target, _, box, entry_box = self._item(row)
        shift = entry_part.relative_to(entry_box.offset)
        part = Box(tuple(a + b for a, b in zip(shift.offset, box.offset, strict=True)), entry_part.shape)
        return target.consumer(part, entry_part)

    def _collect_values(self) -> None:
        for path, tree in self._answer.values:
            self.values[path] = from_jsonable(tree)
        for target in self._targets.rows:
            if target.staged and target.path not in (self._views or ()):
                self.values[target.path] = decode_value(target.array.tobytes())
        for path, present in self._wanted_values:
            if present == "none" and path not in self.values:
                below = [(p[len(path) :], v) for p, v in self.values.items() if p.startswith(path + "/")]
                if below:
                    self.values = {p: v for p, v in self.values.items() if not p.startswith(path + "/")}
                    self.values[path] = build_tree(below)

    def report(self, result: LoadResult) -> LoadReport:
        """What this rank tells its caller."""
        return LoadReport(
            path=self._storage.location,
            unique_id=self._answer.unique_id,
            bytes_read=self._bytes_read,
            bytes_received=self._received,
            files_opened=self._opened_count,
            skipped=tuple(self._skipped),
            unused_keys=tuple(result.unused),
            seconds=self._seconds,
        )
