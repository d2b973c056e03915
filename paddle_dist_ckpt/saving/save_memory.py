"""What a save works with on one rank; and what is remembered from one to the next of the same group of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from ..core.buffers import Buffers
from ..core.host_memory import free_memory
from ..core.memory import Bytes1D, fresh_pages
from ..errors import CheckpointError
from ..folder.context import Context
from ..storage.helpers import StorageCall
from .async_save import AsyncSave
from .copies import CopyPlan
from .describe import KnownState
from .file_plan import FilePlan
from .messages import Transfer
from .planned_save import PlannedSave
from .preparing import Touching
from .turn import Ticket, Turn

__all__ = ["KnownPlan", "SaveContext", "SaveMemory"]

T = TypeVar("T")
Allocate = Callable[[int], Bytes1D]
_MOST_KEPT = 4  # states that are saved in turns, a model and its optimizer say, and their plans
_SHARE = 0.9  # of the free memory that snapshots may take, for training may need some more
_WORTH_IT = 1.25  # so many times what is kept: for less more, it is not worth to have each page made anew
_MUCH_MORE = 0.1  # of a snapshot
_SAID_AGAIN = 600.0  # seconds
_MOST_ENTRIES = 1 << 18  # of a state or plan that is kept beside the latest one: larger ones would take much memory


@dataclass(frozen=True, slots=True, eq=False)
class KnownPlan:
    """One rank's part of a plan, with all that can be used again while the plan stays the same.

    Attributes:
        plan_id: Names the plan; 0 for none.
        fingerprint: The digest of the structure for which it is right,
        block_bytes: and the block size.
        total_bytes: All that the ranks write together.
        transfers: What the ranks send each other of partial tensors.
        files: This rank's.
        copies: What it has twice with others.
    """

    plan_id: int = 0
    fingerprint: bytes = b""
    block_bytes: int = 0
    total_bytes: int = 0
    transfers: Sequence[Transfer] = ()
    files: Sequence[FilePlan] = ()
    copies: CopyPlan = field(default_factory=CopyPlan.of_nothing)


@dataclass(slots=True, eq=False)
class SaveMemory:
    """One rank's memory, kept with its connection to the group.

    Attributes:
        turn: Held by the save that uses the memory: one at a time, until it has ended.
        last: The latest save in the background, which may still hold the turn.
        known: The states that were saved last, the latest first.
        plan: This rank's part of the plan of the save that has the turn.
        plans: Its parts of the last plans, the latest first.
        planned: On the coordinator: the last plans, the latest first.
        given_up: On the coordinator: saves that have failed, and perhaps could not remove their files.
        unfinished: Publications of earlier saves that were given up, and may still take effect.
    """

    turn: Turn = field(default_factory=Turn)
    last: AsyncSave | None = None
    known: list[KnownState] = field(default_factory=list)
    plan: KnownPlan = field(default_factory=KnownPlan)
    plans: list[KnownPlan] = field(default_factory=list)
    planned: list[PlannedSave] = field(default_factory=list)
    given_up: set[str] = field(default_factory=set)
    unfinished: list[StorageCall] = field(default_factory=list)
    _buffer: Bytes1D = field(default_factory=lambda: np.empty(0, np.uint8))
    _buffer_is_fast: bool = False
    _touching: Touching | None = None
    _windows: dict[int, Buffers] = field(default_factory=dict)  # by their count
    _said_of_room: tuple[float, float] = (0.0, 0.0)  # what share of a snapshot has none, and until when that will do

    @contextmanager
    def take_turn(self, ticket: Ticket, may_wait: bool, check: Callable[[], None]) -> Iterator[None]:
        """Around a save: wait for the group's save before this one, if it still goes on in the background.

        Args:
            ticket: What the save is known by.
            may_wait: Whether to wait, and not to raise.
            check: Called now and then while waiting; may raise to stop.

        Raises:
            CheckpointError: it goes on, and this save is not to wait; or it failed, and nobody has noticed.
        """
        with self.turn.taken(ticket, may_wait, check):
            last, self.last = self.last, None
            if last is not None:
                last.raise_unobserved()
            try:
                yield
            except BaseException:  # it may be an interrupt that came when a buffer was neither free nor in use
                self._windows = {}
                raise

    def pass_over_last(self) -> None:
        """Wait for the latest save in the background. If it fails, its handle and the log say so, not the next save."""
        last, self.last = self.last, None
        if last is not None:
            last.wait()

    def recall(self, known: KnownState | None, fingerprint: bytes, block_bytes: int) -> None:
        """Remember what is being saved, if it can be known again, and find this rank's part of the plan that it had."""
        if known is not None:
            others = [one for one in self.known if one.identity is not known.identity]
            self.known = _kept(known, others, lambda state: len(state.tensors.paths))
        of_this = (fingerprint, block_bytes)
        found = next((plan for plan in self.plans if (plan.fingerprint, plan.block_bytes) == of_this), None)
        self.plan = KnownPlan(fingerprint=fingerprint, block_bytes=block_bytes)
        if found is not None:
            self.keep_plan(found)

    def keep_plan(self, plan: KnownPlan) -> None:
        """Use this part of a plan from now on, in the place of the one for the same structure."""
        of_this = (plan.fingerprint, plan.block_bytes)
        others = [one for one in self.plans if (one.fingerprint, one.block_bytes) != of_this]
        self.plan, self.plans = plan, _kept(plan, others, lambda one: sum(len(file.table.names) for file in one.files))

    def planned_for(self, fingerprints: Mapping[int, bytes]) -> PlannedSave | None:
        """On the coordinator: the plan for structures with these digests, by rank; it becomes the latest one."""
        found = next((one for one in self.planned if one.fingerprints == fingerprints), None)
        if found is not None:
            self.planned = [found, *(one for one in self.planned if one is not found)]
        return found

    def make_room(self, fingerprints: Mapping[int, bytes]) -> None:
        """On the coordinator: forget what a new plan for these structures will be instead of, and what is large."""
        small = [one for one in self.planned if len(one.plan.shard) <= _MOST_ENTRIES]
        self.planned = [one for one in small if one.fingerprints != fingerprints][: _MOST_KEPT - 1]

    def prepare_snapshot(self, nbytes: int) -> Touching | None:
        """Have memory for a snapshot ready, touched by a thread; None if there is enough, or not twice it is free.

        The thread ends where less than once it is left, for other ranks of the host may do the same. Nothing is done
        while a save has the turn.
        """
        if nbytes <= len(self._buffer) or not _are_free(2 * nbytes):
            return None
        ticket = Ticket()
        try:
            with self.turn.taken(ticket, may_wait=False):
                self._touching = Touching(self.snapshot_buffer(nbytes), lambda: _are_free(nbytes))
                self._touching.start()
                return self._touching
        except (CheckpointError, MemoryError, RuntimeError):  # no memory, or no thread: the save will see what there is
            return None
        finally:
            ticket.over = True

    def snapshot_room(self, nbytes: int, ranks: int) -> int:
        """How much of a snapshot of so many bytes there is memory for, without leaving the host too little.

        Args:
            nbytes: The bytes.
            ranks: How many ranks the host has. All look at about the same time, and may need as much as this one.
        """
        kept = len(self._buffer) if self._touching is None else self._touching.touched
        free = free_memory() if nbytes > kept else None
        if free is None:
            return nbytes
        room = int(_SHARE * (kept + free / ranks))
        return min(nbytes, room) if room >= min(nbytes, _WORTH_IT * kept) else kept

    def is_news_of_room(self, lacking: float) -> bool:
        """Whether to say that this share of a snapshot has no room: for the first time, if it is much more than was
        said, or now and then. What is free changes a little from save to save."""
        said, until = self._said_of_room
        is_news = lacking > said + _MUCH_MORE or time.monotonic() >= until
        if is_news:
            self._said_of_room = lacking, time.monotonic() + _SAID_AGAIN
        return is_news

    def snapshot_buffer(self, nbytes: int, allocate: Allocate | None = None) -> Bytes1D:
        """Memory for a snapshot: the same again while it is large enough, so that its pages are there already.

        Args:
            nbytes: How much.
            allocate: Makes memory that copies from devices are fast with; None if there are none.

        Raises:
            MemoryError: there is not so much.
        """
        if self._touching is not None:
            self._touching.end()
            there = max(nbytes, self._touching.touched)  # the rest has no pages, so it must not count as kept
            self._buffer = self._buffer[:there] if there < len(self._buffer) else self._buffer
            self._touching = None
        if len(self._buffer) < nbytes or (allocate is not None and not self._buffer_is_fast):
            self._buffer = np.empty(0, np.uint8)  # first of all make room
            try:
                self._buffer = allocate(nbytes) if allocate is not None else fresh_pages(nbytes, inherited=False)
            except MemoryError as error:
                raise MemoryError(
                    f"{error}; a save in the background copies what its rank writes: SaveOptions(snapshot_bytes=...) "
                    "bounds the copy, and async_save=False makes none"
                ) from None
            self._buffer_is_fast = allocate is not None
        return self._buffer[:nbytes]

    def window_buffers(self, count: int, allocate: Allocate | None) -> Buffers:
        """Buffers for ``count`` windows. Those of ``allocate``, as for a snapshot, are kept for the next save."""
        if allocate is None:
            return Buffers(count)
        if count not in self._windows:
            self._windows = {count: Buffers(count, allocate)}
        return self._windows[count]


def _are_free(nbytes: int) -> bool:
    free = free_memory()
    return free is None or free >= nbytes


def _kept(latest: T, others: Sequence[T], size_of: Callable[[T], int]) -> list[T]:
    """What is kept now: the latest, and of the others those that are not large."""
    small = [one for one in others if size_of(one) <= _MOST_ENTRIES]
    return [latest, *small[: _MOST_KEPT - 1]]


@dataclass(frozen=True, slots=True)
class SaveContext(Context):
    """One rank's surroundings in a save.

    Attributes:
        memory: What is remembered from one save to the next.
        replace_newest: Whether a save without an id replaces the newest checkpoint.
        ticket: What the save is known by among others that use the memory.
    """

    memory: SaveMemory = field(default_factory=SaveMemory)
    replace_newest: bool = False
    ticket: Ticket = field(default_factory=Ticket)
