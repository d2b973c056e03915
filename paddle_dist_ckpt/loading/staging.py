"""Host memory of bounded size through which a load's data go to tensors on a device.

Where this rank reads for itself, rows of the targets are taken in groups, one after the other (:class:`GroupStaging`):
while one group is being copied to the device, the next ones are read. In an exchange the plan says which rows each
round brings something for (:class:`RoundStaging`).
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..core.columns import IntArray
from ..core.device_memory import Copies, Mark
from ..core.memory import Bytes1D

if TYPE_CHECKING:
    from .targets import Targets

__all__ = ["GroupStaging", "RoundStaging", "group_bytes", "own_round_bytes", "piece_bytes"]

_GROUPS = 4  # that are read, or copied to the device, at a time
_MOST_GROUP_BYTES = 8 << 20  # more memory would take longer to be had than to be used,
_GROUP_BLOCKS = 16  # but blocks at the edges of groups are read twice
_LEAST_ROUND_BYTES = 16 << 20
_ALIGNMENT = 16  # of the largest items; what stands together in a file is read at once if it does here too
Task = Callable[[], None]


def piece_bytes(staging_bytes: int) -> int:
    """The most bytes of a piece of a tensor on a device, of so much staging memory."""
    return max(1, min(_MOST_GROUP_BYTES, staging_bytes // _GROUPS))


def group_bytes(staging_bytes: int, block_bytes: int) -> int:
    """Bytes of a group of pieces, of so much staging memory, if blocks are so large."""
    return max(1, min(max(_MOST_GROUP_BYTES, _GROUP_BLOCKS * block_bytes), staging_bytes // _GROUPS))


def own_round_bytes(staging_bytes: int) -> int:
    """The most bytes that a rank reads for itself in one round of an exchange, if it has ``staging_bytes``.

    It is a part of them, since what the round before brought is on its way to the device meanwhile; but not arbitrarily
    little, since rounds cost time.
    """
    return max(_LEAST_ROUND_BYTES, staging_bytes // _GROUPS)


class GroupStaging:
    """Groups of rows on their way through buffers, of which there are four."""

    def __init__(self, targets: Targets, copies: Copies, allocate: Callable[[int], Bytes1D]) -> None:
        self._targets, self._copies, self._allocate = targets, copies, allocate
        self._buffers: queue.SimpleQueue[tuple[Bytes1D | None, Mark | None]] = queue.SimpleQueue()
        for _ in range(_GROUPS):
            self._buffers.put((None, None))
        self._lock = threading.Lock()

    def through(self, rows: IntArray, make_tasks: Callable[[], Iterable[Task]]) -> Iterator[Task]:
        """The tasks that fill a group, of which the last to end sends it to the device; they are made when there is
        memory for the rows."""
        buffer, mark = self._buffers.get()
        if mark is not None:
            mark.wait()
        stops = np.cumsum(-(-self._targets.nbytes[rows] // _ALIGNMENT) * _ALIGNMENT)
        room = int(stops[-1])
        memory = self._allocate(room) if buffer is None or len(buffer) < room else buffer
        self._targets.place_all(rows, memory, np.append(0, stops[:-1]))
        tasks = list(make_tasks())
        left = itertools.count(len(tasks) - 1, -1)

        def run(task: Task) -> None:
            try:
                task()
                if next(left) == 0:
                    with self._lock:
                        self._targets.send(rows.tolist(), self._copies)
                        mark = self._copies.mark()
                    self._buffers.put((memory, mark))  # to be had again when the rows have arrived
            except BaseException:
                self._buffers.put((None, None))  # whoever waits for one must not wait for ever
                raise

        for task in tasks:
            yield functools.partial(run, task)


class RoundStaging:
    """The rows of an exchange, in host memory from the first round that brings something for them to the last.

    If there are more than ``most`` bytes, some go to the device before they are complete, and come back later; more are
    there only if a single round needs them. ``rows`` are those on a device that each round brings something for.
    ``begun`` are those for which earlier parts of the exchange have brought something, to which this one's are added.
    """

    def __init__(self, targets: Targets, copies: Copies, rows: Sequence[IntArray], most: int, begun: set[int]) -> None:
        self._targets, self._copies, self._rows, self._most, self._begun = targets, copies, rows, most, begun
        self._last = {row: i for i, here in enumerate(rows) for row in here.tolist()}
        self._open: dict[int, int] = {}  # rows that are on the host, with their sizes, the least recently used first
        self._incomplete: set[int] = set()  # rows that are on the device for the time being
        self._leaving: deque[tuple[Mark, int, int]] = deque()  # rows on their way there: their bytes, since which round
        self._used = 0

    def begin(self, number: int) -> None:
        """Have the rows of a round on the host."""
        rows = self._rows[number]
        missing = [row for row in rows.tolist() if row not in self._open]
        sizes = dict(zip(missing, self._targets.nbytes[missing].tolist(), strict=True))
        for row in rows.tolist():
            if row in self._open:
                self._open[row] = self._open.pop(row)
        self._make_room(sum(sizes.values()), number, set(rows.tolist()))
        for row, size in sizes.items():
            self._bring(row, size)

    def end(self, number: int) -> None:
        """Send those rows of a round to the device that no later one brings anything for."""
        rows = self._rows[number]
        self._send([row for row in rows.tolist() if self._last[row] == number], number)

    def finish(self) -> None:
        """Wait until everything is on the device."""
        self._copies.mark().wait()
        self._begun.update(self._last)

    def _make_room(self, nbytes: int, number: int, needed: set[int]) -> None:
        room = self._most - nbytes
        victims = [row for row in self._open if row not in needed]
        leaving = sum(size for _, size, _ in self._leaving)
        for row in victims:
            if self._used - leaving <= room:
                break
            leaving += self._open[row]
            self._incomplete.add(row)
            self._send([row], number)
        while self._leaving and (self._used > room or self._leaving[0][2] < number - 1):
            mark, size, _ = self._leaving.popleft()
            mark.wait()
            self._used -= size

    def _bring(self, row: int, size: int) -> None:
        """Give a row memory on the host, with what the device has of it so far."""
        memory: Bytes1D = np.empty(size, np.uint8)
        if row in self._incomplete or row in self._begun:
            self._incomplete.discard(row)
            self._targets.device_memory([row])[0].read(0, size, memory, self._copies)
        self._targets.place(row, memory)
        self._open[row] = size
        self._used += size

    def _send(self, rows: Sequence[int], number: int) -> None:
        """Send rows to the device, and let go of their memory when they have arrived."""
        if rows:
            self._targets.send(rows, self._copies)
            self._leaving.append((self._copies.mark(), sum(self._open.pop(row) for row in rows), number))
