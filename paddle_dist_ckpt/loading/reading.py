"""Reads what a fitted load needs: from files alone, or in the rounds of an exchange with other ranks."""

from __future__ import annotations

import dataclasses
import errno
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..control.transports import WatchedTransport
from ..core.buffers import Buffers
from ..core.columns import IntArray
from ..core.device_memory import Copies, NoCopies
from ..core.progress import Progress
from ..core.protocols import CollectiveWatch
from ..core.threads import io_threads, run_all
from ..errors import CheckpointCorruptedError
from ..files.datafile import read_header
from ..files.metadata import FileInfo
from ..files.reader import entry_tasks
from ..files.runs import OpenFile
from ..options import LoadOptions
from ..reports import Stopwatch
from ..storage.base import Storage
from .context import LoadContext
from .exchange import Exchange
from .fit import Fit
from .messages import ExchangeRound
from .staging import GroupStaging, RoundStaging, group_bytes

__all__ = ["DataFiles", "Reading", "Tally"]

Task = Callable[[], None]


@dataclass(slots=True)
class Tally(Stopwatch):
    """What a load's report counts, over all its attempts."""

    bytes_read: int = 0
    bytes_received: int = 0
    files_opened: int = 0


class DataFiles:
    """The data files that one attempt to load has opened; a context manager that closes them.

    Args:
        storage: Where they are.
        rank: This rank, for messages.
        tally: Counts the files.
    """

    def __init__(self, storage: Storage, rank: int, tally: Tally) -> None:
        self._storage, self._rank, self._tally = storage, rank, tally
        self._closing = ExitStack()
        self.opened: dict[str, OpenFile] = {}

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def open(self, expected: Mapping[str, tuple[FileInfo, int]]) -> dict[str, str]:
        """Open files that are not open yet, and check their headers.

        Args:
            expected: What `.metadata` says of each, with its number of blocks, by name.

        Returns:
            Those that cannot be read, with the reasons.
        """
        failed: dict[str, str] = {}
        for name, (info, blocks) in expected.items():
            if name in self.opened:
                continue
            try:
                file = self._storage.open(name)
                self._closing.callback(file.close)
                hashes, data_start = read_header(file, info, blocks)
            except (OSError, CheckpointCorruptedError) as error:
                if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                    raise OSError(
                        error.errno, f"too many files are open; {len(expected)} are needed (see ulimit -n)"
                    ) from error
                failed[name] = f"rank {self._rank}: {error}"
                continue
            self.opened[name] = OpenFile(f"{self._storage.location}/{name}", file, data_start, hashes)
            self._tally.files_opened += 1
        return failed

    def look_into_cache(self, shared: Sequence[str]) -> None:
        """Find out which of the files are read once, past the page cache: not those that other ranks read as well."""
        for name, opened in self.opened.items():
            once = name not in shared and not opened.file.is_cached()
            self.opened[name] = dataclasses.replace(opened, once=once)


@dataclass(frozen=True)
class Reading:
    """Reads a load's needs in one or two passes: first those of staged targets, if there are any.

    Attributes:
        context: This rank's surroundings.
        options: How to load.
        fit: What this rank needs, and where it goes.
        opened: The data files that this rank reads, by name.
        block_bytes: Bytes of a block.
        ranks_on_host: How many ranks share this rank's host.
        tally: Counts what is read and received.
    """

    context: LoadContext
    options: LoadOptions
    fit: Fit
    opened: Mapping[str, OpenFile]
    block_bytes: int
    ranks_on_host: int
    tally: Tally

    def run(self, staged: bool, rounds: Sequence[ExchangeRound] | None) -> None:
        """One pass.

        Args:
            staged: Whether it is for the staged targets, or for all others.
            rounds: The rounds of the exchange; None if this rank reads for itself.
        """
        needs = self.fit.needs(staged)
        shown, is_coordinator = self.options.progress, self.context.is_coordinator
        with Progress("load", self.fit.nbytes(needs), shown, is_coordinator) as progress:
            if rounds is not None:
                self._exchange(rounds, progress)
            else:
                try:
                    run_all(self._tasks(needs, staged, progress), self._threads, self.context.session.check)
                finally:
                    self.copies.mark().wait()
        self.tally.bytes_read += progress.done

    @cached_property
    def copies(self) -> Copies:
        """The queue of copies to devices."""
        devices = self.context.adapter.devices
        return devices.copies() if devices is not None else NoCopies()

    @cached_property
    def _threads(self) -> int:
        if self.context.threads is not None:
            return self.context.threads
        return io_threads(self.ranks_on_host, any(opened.once for opened in self.opened.values()))

    def _tasks(self, needs: IntArray, staged: bool, progress: Progress) -> Iterator[Task]:
        """What has to be done to read needs: first those that go to host memory, then those that go to a device."""
        fit, buffers = self.fit, Buffers(self._threads)
        groups = [] if staged else fit.device_groups(group_bytes(self.options.staging_bytes, self.block_bytes))
        later = np.concatenate([np.zeros(0, np.int64), *(fit.needs_of(group) for group in groups)])
        yield from self._read_tasks(np.setdiff1d(needs, later), buffers, progress)
        devices = self.context.adapter.devices
        if devices is None:
            return
        staging = GroupStaging(fit.targets, self.copies, devices.host_memory)
        for group in groups:
            make_tasks = functools.partial(self._read_tasks, fit.needs_of(group), buffers, progress)
            yield from staging.through(group, make_tasks)

    def _read_tasks(self, needs: IntArray, buffers: Buffers, progress: Progress) -> Iterator[Task]:
        small, others = self.fit.split(needs)
        for batch in self.fit.batches(small, self.opened):
            yield from batch.tasks(buffers, progress)
        yield from entry_tasks(self.fit.entries(others, self.opened), self.block_bytes, buffers, progress)

    def _exchange(self, rounds: Sequence[ExchangeRound], progress: Progress) -> None:
        """Run the rounds of an exchange; an error in reading is raised when no rank waits for this one any more."""
        most = self.options.staging_bytes
        rows = [self.fit.rows_on_device(_needs_of(one)) for one in rounds]
        staging = RoundStaging(self.fit.targets, self.copies, rows, most)

        def run(watch: CollectiveWatch) -> Exchange:
            exchange = Exchange(
                context=self.context,
                fit=self.fit,
                files=self.opened,
                transport=WatchedTransport(self.context.transport, watch),
                within=staging.round,
                staging_bytes=most,
                block_bytes=self.block_bytes,
                progress=progress,
            )
            try:
                exchange.run(rounds)
            finally:
                staging.finish()
            return exchange

        exchange = self.context.session.run_collectives(run)
        self.tally.bytes_received += exchange.received
        if exchange.failure is not None:
            raise exchange.failure


def _needs_of(one: ExchangeRound) -> IntArray:
    """The needs that a round brings something for."""
    rows = [parcel.row for unit in one.units for parcel in unit.parcels if parcel.row >= 0]
    return np.array(rows, np.int64)
