"""Reads what a fitted load needs: from files alone, or in the rounds of an exchange with other ranks."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from ..core.buffers import Buffers
from ..core.cached import cached_property
from ..core.columns import IntArray
from ..core.device_memory import Copies, NoCopies
from ..core.parts import Arranger
from ..core.progress import Progress
from ..core.threads import io_threads, run_all
from ..errors import CheckpointCorruptedError
from ..files.holes import HoleBudget
from ..files.metadata import FileInfo
from ..files.reader import entry_tasks
from ..files.runs import OpenFile, check_open_files, open_data_file
from ..folder.context import Context
from ..options import LoadOptions
from ..reports import Stopwatch
from .exchange import Exchange
from .exchange_orders import ExchangeRound
from .needs import Needs
from .staging import GroupStaging, group_bytes

__all__ = ["DataFiles", "LoadContext", "Reading", "unreadable_on"]

_UNREADABLE = "not damaged, as far as is known, but it cannot be opened: "

Task = Callable[[], None]


@dataclass(frozen=True, slots=True)
class LoadContext(Context):
    """One rank's surroundings in a load.

    Attributes:
        options: How to load.
        threads: How many threads it reads with; None for this rank's part of the host's cores.
        offload: Whether its transport was chosen for host memory.
        arranger: Says what tensors are made of, if the framework does.
        is_part: Whether this is a part of what a caller has asked for, who logs the whole.
    """

    options: LoadOptions
    threads: int | None = None
    offload: bool = False
    arranger: Arranger | None = None
    is_part: bool = False


@dataclass(slots=True)
class Tally(Stopwatch):
    """What a load's report counts, over all its attempts."""

    bytes_read: int = 0
    bytes_received: int = 0
    files_opened: int = 0


def unreadable_on(reason: str) -> int | None:
    """The rank that cannot open a file that is there, if that is the reason why it cannot be read; else None."""
    match = re.match(rf"rank (\d+): {_UNREADABLE}", reason)
    return int(match[1]) if match else None


class DataFiles(ExitStack):
    """The data files that a load has opened, and what it counts; a context manager that closes them."""

    def __init__(self, context: LoadContext) -> None:
        super().__init__()
        self._storage, self._rank = context.storage, context.session.rank
        self.tally = Tally()
        self.opened: dict[str, OpenFile] = {}
        self._budget = HoleBudget()

    def forget(self) -> None:
        """Close all, since the load starts again."""
        self.opened.clear()
        self._budget = HoleBudget()
        self.close()

    def open(self, expected: Sequence[tuple[FileInfo, int]]) -> dict[str, str]:
        """Open files that are not open yet, and check their headers by what `.metadata` says of each, and by its number
        of blocks; returns those that cannot be read, with the reasons, by name."""
        failed: dict[str, str] = {}
        for info, blocks in expected:
            name = info.name
            if name in self.opened:
                continue
            try:
                opened = open_data_file(self._storage, info, blocks, self._budget)
            except (OSError, CheckpointCorruptedError) as error:
                if isinstance(error, OSError):
                    check_open_files(error, len(expected))
                unreadable = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
                failed[name] = f"rank {self._rank}: {_UNREADABLE if unreadable else ''}{error}"
                continue
            self.callback(opened.file.close)
            self.opened[name] = opened
            self.tally.files_opened += 1
        return failed

    def look_into_cache(self, shared: Sequence[str]) -> None:
        """Find out which of the files are cached, and which are read once, past the page cache: not those that other
        ranks read as well."""
        for name, opened in self.opened.items():
            cached = opened.file.is_cached()
            self.opened[name] = dataclasses.replace(opened, once=not cached and name not in shared, cached=cached)


@dataclass(frozen=True)
class Reading:
    """Reads a load's needs in one or two passes: first those of staged targets, if there are any."""

    context: LoadContext
    needs: Needs
    files: DataFiles
    ranks_on_host: int
    # Targets on a device for which a part of an exchange brought something.
    _begun: set[int] = field(default_factory=set)

    @contextmanager
    def one_pass(self, staged: bool) -> Iterator[Callable[[Sequence[ExchangeRound] | None], None]]:
        """Around one pass: for the staged targets, or for all others.

        Gives what reads it all, if that is given None, or runs rounds of an exchange. It shows and counts what is read.
        """
        context, chosen = self.context, self.needs.chosen(staged)
        shown, total = context.options.progress, self.needs.nbytes(chosen)
        with Progress("load", total, shown, context.is_coordinator, True) as progress:

            def run(rounds: Sequence[ExchangeRound] | None) -> None:
                if rounds is not None:
                    self._exchange(rounds, progress)
                    return
                try:
                    run_all(self._tasks(chosen, progress), self._threads, context.session.check)
                finally:
                    self.copies.mark().wait()

            try:
                yield run
            finally:
                self.files.tally.bytes_read += progress.done

    @cached_property
    def copies(self) -> Copies:
        """The queue of copies to devices."""
        devices = self.context.adapter.devices
        return devices.copies() if devices is not None else NoCopies()

    @cached_property
    def _threads(self) -> int:
        if self.context.threads is not None:
            return self.context.threads
        return io_threads(self.ranks_on_host, any(opened.once for opened in self.files.opened.values()))

    def _tasks(self, chosen: IntArray, progress: Progress) -> Iterator[Task]:
        """What has to be done to read needs: first those that go to host memory, then those that go to a device."""
        needs, buffers = self.needs, Buffers(self._threads)
        most = group_bytes(self.context.options.staging_bytes, needs.block_bytes)
        on_host, groups = needs.device_groups(chosen, most)
        yield from self._read_tasks(on_host, buffers, progress)
        devices = self.context.adapter.devices
        if devices is None:
            return
        staging = GroupStaging(needs.targets, self.copies, devices.host_memory)
        for rows, group in groups:
            yield from staging.through(rows, functools.partial(self._read_tasks, group, buffers, progress))

    def _read_tasks(self, chosen: IntArray, buffers: Buffers, progress: Progress) -> Iterator[Task]:
        needs, opened = self.needs, self.files.opened
        for batch in needs.batches(chosen, opened):
            yield from batch.tasks(buffers, progress)
        yield from entry_tasks(needs.entries(chosen, opened), needs.block_bytes, buffers, progress)

    def _exchange(self, rounds: Sequence[ExchangeRound], progress: Progress) -> None:
        """Run the rounds of an exchange; an error in reading is raised when no rank waits for this one any more."""
        context, most = self.context, self.context.options.staging_bytes
        exchange = Exchange(context.session, self.needs, self.files, self.copies, most, progress, self._begun)
        try:
            context.session.run_collectives(context.transport, functools.partial(exchange.run, rounds))
        except BaseException:
            exchange.give_up()
            raise
        if exchange.failure is not None:
            raise exchange.failure
