"""A load, as each of its ranks runs it.

    request   every rank says what it wants; the coordinator reads `.metadata` and tells each what there is of it
    decide    every rank plans and opens the files that it needs; what does not fit is raised on all, nothing touched
    exchange  if not everyone can read for itself: who reads what for whom
    open      ... and whether the readers have their files
    staged    values stored as entries, and tied tensors, are read to buffers and looked at
    read      everything else is read to where it belongs
    restore   if there are objects: they are given their states

If files are gone because a save has replaced the checkpoint meanwhile, the load starts again.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import errno
import functools
import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import numpy as np

from ..control.transports import WatchedTransport
from ..core.buffers import Buffers
from ..core.columns import IntArray
from ..core.device_memory import Copies
from ..core.messages import decode, encode
from ..core.progress import Progress
from ..core.protocols import CollectiveWatch
from ..core.threads import io_threads, run_all
from ..errors import CheckpointCorruptedError, CheckpointError
from ..files.batch import batch_tasks
from ..files.datafile import read_header
from ..files.metadata import FileInfo
from ..files.reader import OpenFile, entry_tasks
from ..options import LoadOptions
from ..planning.exchange_plan import ALL
from ..reports import LoadReport
from ..tree.paths import is_own, plain_key
from ..tree.state_dict import Leaves, PerRank, assign_all, build_tree, flatten
from ..tree.values import decode_value, from_jsonable
from . import key_map
from .context import LoadContext
from .exchange import Exchange
from .fit import Fit
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
    Wanted,
)
from .own_values import OwnValues, parent_of
from .staging import GroupStaging, RoundStaging, group_bytes
from .targets import Wishes, all_paths, collect

__all__ = ["load", "load_leaves"]

_logger = logging.getLogger("paddle_dist_ckpt")
_PARTLY = "\nTargets are partly written: load again, or do not use them."


def load(state_dict: dict[Any, Any], context: LoadContext, unique_id: int | None, options: LoadOptions) -> LoadReport:
    """Fill a state_dict together with the session's other ranks. See :func:`paddle_dist_ckpt.load_state_dict`."""

    found: list[Leaves] = []

    def scan() -> Leaves:
        found.append(flatten(state_dict, context.adapter))
        return found[-1]

    def restore(values: Mapping[str, Any], missing: Container[str]) -> None:
        for opened, state in assign_all(state_dict, found[-1], values):
            if opened.path in missing:
                continue
            try:
                context.adapter.restore(opened.value, state)
            except Exception as error:
                raise CheckpointError(
                    f"{plain_key(opened.path)}: the {type(opened.value).__name__} did not take its state: "
                    f"{type(error).__name__}: {error}"
                ) from error

    return load_leaves(scan, restore, context, unique_id, options, _PARTLY)


def load_leaves(
    scan: Callable[[], Leaves],
    restore: Callable[[Mapping[str, Any], Container[str]], None],
    context: LoadContext,
    unique_id: int | None,
    options: LoadOptions,
    warning: str = "",
) -> LoadReport:
    """Fill the tensors among the leaves that ``scan`` finds, and have the values for the others restored.

    Args:
        scan: Finds what is to be filled.
        restore: Given the values by path; also the paths of which the checkpoint has nothing, or something else.
        context: This rank's surroundings.
        unique_id: Which checkpoint; None for the newest.
        options: How to load.
        warning: Added to the message of an error that came after a tensor may have been touched.
    """
    loading = _Loading(scan, restore, context, unique_id, options)
    loading.warning = warning
    coordinator = LoadCoordinator(context.storage, context.session, options)
    while True:
        with ExitStack() as files:
            result = loading.attempt(coordinator, files)
        if result is not None:
            report = loading.report(result)
            level = logging.INFO if context.is_coordinator else logging.DEBUG
            _logger.log(level, "loaded id %d from %s: %s", report.unique_id, report.path, report)
            return report


class _Loading:
    """One rank's part in one load."""

    warning = ""

    def __init__(
        self,
        scan: Callable[[], Leaves],
        restore: Callable[[Mapping[str, Any], Container[str]], None],
        context: LoadContext,
        unique_id: int | None,
        options: LoadOptions,
    ) -> None:
        self._scan, self._restore, self._context, self._session = scan, restore, context, context.session
        self._unique_id, self._options = unique_id, options
        self._wishes: Wishes | None = None
        self._opened: dict[str, OpenFile] = {}
        self._seconds: dict[str, float] = {}
        self._bytes_read = self._received = self._opened_count = 0
        self._skipped: list[str] = []
        self._values: dict[str, Any] = {}

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def attempt(self, coordinator: LoadCoordinator, files: ExitStack) -> LoadResult | None:
        """One try; None if the checkpoint was replaced meanwhile."""
        session, order = self._session, None
        self._opened = {}
        with self._timed("plan"):
            self._answer = decode(session.gather_scatter("request", self._request, coordinator.request), LoadAnswer)
            decided = session.gather_scatter("decide", lambda: self._plan(files), coordinator.decide)
            decision = decode(decided, Decision)
        if decision.restart:
            return None
        self._opened = {
            name: dataclasses.replace(opened, once=name not in decision.shared and not opened.file.is_cached())
            for name, opened in self._opened.items()
        }
        if decision.exchange:
            with self._timed("open"):
                order = self._agree_on_exchange(decision, coordinator, files)
            if order is None:
                return None
        if decision.staged:
            session.gather_scatter("staged", lambda: self._read_staged(order), coordinator.staged)
        try:
            with self._timed("read"):
                done = session.gather_scatter("read", lambda: self._read(order), coordinator.done)
                if decision.objects:
                    session.gather_scatter("restore", self._restore_values, coordinator.restored)
                else:
                    self._restore(self._values, self._untouched)
        except CheckpointError as error:
            error.args = (f"{error.args[0]}{self.warning}",)
            raise
        except OSError as error:  # of a process that works alone; from several it comes as RankFailureError
            raise CheckpointError(f"reading failed: {error}{self.warning}") from error
        return decode(done, LoadResult)

    def _request(self) -> bytes:
        if self._wishes is None:
            leaves = self._scan()
            self._moved, self._left = key_map.apply(self._options.key_map, all_paths(leaves))
            self._wishes = collect(leaves, self._context.adapter, self._left)
        try:
            folder = self._context.folder()
        except OSError:  # this rank has no such folder; others may read for it
            folder = None
        tensors, others = self._wishes.tensors, self._wishes.others
        names = [*tensors.names, *others.values()]
        wanted = Wanted(tensors.paths, list(self._wishes.values.items()), list(others), names, self._moved)
        choices = {
            name: str(getattr(self._options, name))
            for name in ("exchange", "strict", "cast", "per_rank", "staging_bytes")
        }
        choices["offload"] = str(self._context.offload)
        return encode(LoadRequest(self._unique_id, choices, folder, encode(wanted)))

    def _plan(self, files: ExitStack) -> bytes:
        assert self._wishes is not None
        answer, session = self._answer, self._session
        own = OwnValues.choose(
            [path for path in answer.tensors.paths if path not in self._wishes.values],
            answer.saved_by,
            session.rank,
            session.ranks,
            self._options.per_rank,
        )
        self._fit = fit = Fit(answer, self._wishes, self._options.cast, own, self._context.adapter)
        needed = fit.file_bytes()
        unreachable: dict[str, str] = {}
        if self._options.exchange != "always" or len(self._session.ranks) == 1:
            unreachable = self._open(files, {name: fit.files[name] for name in needed})
        self._skipped = fit.problems + own.left + fit.left
        staged = bool(fit.targets.staged.any())
        return encode(Needs(fit.problems, needed, unreachable, staged, self._wishes.has_objects))

    def _open(self, files: ExitStack, expected: dict[str, tuple[FileInfo, int]]) -> dict[str, str]:
        """Open and check files; returns the ones that cannot be read, and why."""
        failed: dict[str, str] = {}
        for name, (info, blocks) in expected.items():
            if name in self._opened:
                continue
            try:
                file = self._context.storage.open(name)
                files.callback(file.close)
                hashes, data_start = read_header(file, info, blocks)
            except (OSError, CheckpointCorruptedError) as error:
                if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                    raise OSError(
                        error.errno, f"too many files are open; {len(expected)} are needed (see ulimit -n)"
                    ) from error
                failed[name] = f"rank {self._session.rank}: {error}"
                continue
            self._opened[name] = OpenFile(f"{self._context.storage.location}/{name}", file, data_start, hashes)
            self._opened_count += 1
        return failed

    def _agree_on_exchange(
        self, decision: Decision, coordinator: LoadCoordinator, files: ExitStack
    ) -> ExchangeOrder | None:
        """Rounds ``exchange`` and ``open``; None if the load is to start again."""
        expected = {info.name: (info, count) for info, count in zip(decision.files, decision.block_counts, strict=True)}

        def reach() -> bytes:
            if decision.probe:
                self._open(files, expected)
            return encode(Reach(sorted(self._opened.keys() & expected.keys()), self._fit.shard_needs()))

        order = decode(self._session.gather_scatter("exchange", reach, coordinator.exchange), ExchangeOrder)
        if order.restart:
            return None

        def open_mine() -> bytes:
            return encode(Opened(self._open(files, {name: expected[name] for name in order.files})))

        return None if self._session.gather_scatter("open", open_mine, coordinator.opened) else order

    def _read_staged(self, order: ExchangeOrder | None) -> bytes:
        self._run_pass(True, order.staged if order is not None else None)
        problems = self._fit.targets.compare_shared()
        self._skipped += problems
        return encode(Problems(problems))

    def _read(self, order: ExchangeOrder | None) -> bytes:
        self._run_pass(False, order.main if order is not None else None)
        self._fit.targets.finish(self._copies)
        self._collect_values()
        return b""

    def _run_pass(self, staged: bool, rounds: Sequence[Round] | None) -> None:
        items = self._fit.items(staged)
        with Progress(
            "load", self._fit.nbytes(items), self._options.progress, self._context.is_coordinator
        ) as progress:
            if rounds is not None:
                self._exchange(rounds, progress)
            else:
                try:
                    run_all(self._tasks(items, staged, progress), self._threads, self._session.check)
                finally:
                    self._copies.mark().wait()
        self._bytes_read += progress.done

    @cached_property
    def _copies(self) -> Copies:
        return self._context.adapter.copies()

    def _tasks(self, items: IntArray, staged: bool, progress: Progress) -> Iterator[Callable[[], None]]:
        """What has to be done to read items: first those that go to host memory, then those that go to a device."""
        fit, options, buffers = self._fit, self._options, Buffers(self._threads)
        groups = [] if staged else fit.device_groups(group_bytes(options.staging_bytes, self._answer.block_bytes))
        later = np.concatenate([np.zeros(0, np.int64), *(fit.items_of(group) for group in groups)])
        yield from self._read_tasks(np.setdiff1d(items, later), buffers, progress)
        staging = GroupStaging(fit.targets, self._copies, self._context.adapter.host_memory)
        for group in groups:
            make_tasks = functools.partial(self._read_tasks, fit.items_of(group), buffers, progress)
            yield from staging.through(group, make_tasks)

    def _read_tasks(self, items: IntArray, buffers: Buffers, progress: Progress) -> Iterator[Callable[[], None]]:
        small, others = self._fit.split(items)
        yield from batch_tasks(self._fit.batches(small, self._opened), buffers, progress)
        wanted = self._fit.entries(others, self._opened)
        yield from entry_tasks(wanted, self._answer.block_bytes, buffers, progress)

    @property
    def _threads(self) -> int:
        if self._context.threads is not None:
            return self._context.threads
        waits = any(opened.once for opened in self._opened.values())
        return io_threads(self._answer.ranks_on_host.get(self._session.rank, 1), waits)

    def _exchange(self, rounds: Sequence[Round], progress: Progress) -> None:
        """Run the rounds of an exchange; an error in reading is raised when no rank waits for this one any more."""

        place = self._session.ranks.index(self._session.rank)
        rows = [self._fit.rows_on_device(_items_of(one, place)) for one in rounds]
        staging = RoundStaging(self._fit.targets, self._copies, rows, self._options.staging_bytes)

        def run(watch: CollectiveWatch) -> Exchange:
            exchange = Exchange(
                ranks=self._session.ranks,
                place=place,
                files=self._opened,
                consumer=self._fit.consumer,
                transport=WatchedTransport(self._context.transport, watch),
                within=staging.round,
                staging_bytes=self._options.staging_bytes,
                block_bytes=self._answer.block_bytes,
                threads=1,
                check=self._session.check,
                progress=progress,
            )
            try:
                exchange.run(rounds)
            finally:
                staging.finish()
            return exchange

        exchange = self._session.run_collectives(run)
        self._received += exchange.received
        if exchange.failure is not None:
            raise exchange.failure

    def _collect_values(self) -> None:
        assert self._wishes is not None
        values = {path: from_jsonable(tree) for path, tree in self._answer.values}
        targets, renamed = self._fit.targets, self._answer.renamed
        entries = {path: decode_value(json) for path, json in targets.values().items()} | dict(targets.arrays())
        values |= {
            path: value if i == 0 else copy.deepcopy(value)
            for stored, value in entries.items()
            for i, path in enumerate(renamed.get(stored, [stored]))
        }
        for path in [path for path in values if is_own(path) and path not in self._wishes.values]:
            values[parent_of(path)] = PerRank(values.pop(path))
        paths = sorted(values)
        for path, present in self._wishes.values.items():
            if present == "none" and path not in values:
                first, last = bisect.bisect_left(paths, path + "/"), bisect.bisect_left(paths, path + "0")
                if first < last:
                    values[path] = build_tree((p[len(path) :], values.pop(p)) for p in paths[first:last])
        self._values = values

    def _restore_values(self) -> bytes:
        self._restore(self._values, self._untouched)
        return b""

    @property
    def _untouched(self) -> set[str]:
        """The paths of which nothing is loaded."""
        return {*self._answer.odd, *self._answer.left, *self._left}

    def report(self, result: LoadResult) -> LoadReport:
        """What this rank tells its caller."""
        return LoadReport(
            path=self._context.storage.location,
            unique_id=self._answer.unique_id,
            bytes_read=self._bytes_read,
            bytes_received=self._received,
            files_opened=self._opened_count,
            skipped=tuple(self._skipped),
            unused_keys=tuple(result.unused),
            seconds=self._seconds,
        )


def _items_of(one: Round, place: int) -> list[int]:
    """The items that a round brings something for, at this rank's place."""
    pieces = [p.row for unit in one.reads for p in unit.pieces if p.destination in (ALL, place)]
    received = [row for message in (*one.broadcasts, *one.receives) for row in message.rows]
    return [item for item in (*pieces, *received) if item >= 0]
