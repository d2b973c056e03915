"""Reads segments of data files, neighbours together as runs, and verifies every block before it is handed out."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from ..core.buffers import Buffers
from ..core.columns import IntArray, places_within
from ..core.memory import Bytes1D
from ..errors import CheckpointCorruptedError
from ..storage.base import ReadableFile
from .datafile import Hashes

__all__ = ["CHUNK_BYTES", "OpenFile", "Receiver", "Segments", "Straight", "segment_tasks"]

CHUNK_BYTES = 2 << 20  # so that a block is hashed while it is still in the cache
GAP_BYTES = 4096  # a page: what lies between closer segments is read from the disk anyway


@dataclass(frozen=True, slots=True, eq=False)
class OpenFile:
    """A data file whose size and header have been checked.

    Attributes:
        name: For messages.
        file: To read from.
        data_start: Where the data section starts.
        hashes: Digest of each block.
        once: Whether the page cache lacks it, and no other rank of this host wants much of the same data.
    """

    name: str
    file: ReadableFile
    data_start: int
    hashes: Hashes
    once: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """What is to be read of one file, in ascending order. Each segment is one or more whole blocks of one entry.

    A segment may be there repeatedly; it is read and verified once, or verified as often.

    Attributes:
        file: The file.
        starts: Where each starts, counted from the start of the data section, ``[segments]``.
        stops: Where each ends, ``[segments]``.
        blocks: The number of its first block in the file, ``[segments]``.
        key: What to call a segment's entry in errors.
    """

    file: OpenFile
    starts: IntArray
    stops: IntArray
    blocks: IntArray
    key: Callable[[int], str]


@dataclass(frozen=True, slots=True, eq=False)
class Straight:
    """Where a segment is read without a buffer.

    Attributes:
        target: Memory for consecutive bytes of the segment.
        lead: The byte of the segment that goes to the target's first byte.
        skip: Where those blocks of the segment start that the target takes whole.
        inner: Bytes of those blocks.
    """

    target: Bytes1D
    lead: int
    skip: int
    inner: int


class Receiver(Protocol):
    """Takes what was read of some segments. Called on several threads at a time."""

    def straight(self, segment: int) -> Straight | None:
        """Where this segment is read without a buffer; None if it cannot be."""
        ...

    def take(self, first: int, last: int, data: Bytes1D) -> None:
        """Hand out segments ``first:last``, of which the first one starts where ``data`` does."""
        ...


def segment_tasks(
    segments: Segments,
    receiver: Receiver,
    block_bytes: int,
    buffers: Buffers,
    progress: Callable[[int], None],
    joined: bool = True,
) -> Iterator[Callable[[], None]]:
    """Tasks that read, verify and hand out segments, a run each. They may be run at the same time.

    Args:
        segments: What to read.
        receiver: Where it goes.
        block_bytes: Bytes of a block.
        buffers: Of which each task uses one.
        progress: Told how many bytes were read, as they are.
        joined: Whether what lies between segments that are close to each other may be read too.

    Returns:
        The tasks. They raise CheckpointCorruptedError if a block is not what was written, and name the tensor and the
        file; OSError if reading failed.
    """
    run = _Run(segments, receiver, block_bytes, buffers, progress)
    for first, last in _runs(segments.starts, segments.stops, GAP_BYTES if joined else 0):
        yield functools.partial(run, first, last)


def _runs(starts: IntArray, stops: IntArray, gap: int) -> Iterator[tuple[int, int]]:
    """Neighbours that are read together: no further apart than ``gap``, and together no more than a chunk.

    Segments that are the same stay together.
    """
    ends = [*(np.flatnonzero(starts[1:] - stops[:-1] > gap) + 1).tolist(), len(starts)]
    low, high = starts.tolist(), stops.tolist()
    first = 0
    for end in ends:
        while first < end:
            fitting = bisect.bisect_right(high, low[first] + CHUNK_BYTES, first, end)
            last = max(fitting, bisect.bisect_right(low, low[first], first, end))
            yield first, last
            first = last


@dataclass(frozen=True, slots=True)
class _Run:
    """Reads, verifies and hands out segments ``first:last`` when it is called."""

    segments: Segments
    receiver: Receiver
    block_bytes: int
    buffers: Buffers
    progress: Callable[[int], None]

    def __call__(self, first: int, last: int) -> None:
        size = int(self.segments.stops[last - 1]) - int(self.segments.starts[first])
        straight = self.receiver.straight(first) if last - first == 1 else None
        with self.buffers.borrow(size) as buffer:
            if straight is not None:
                self._read_straight(first, straight, buffer)
            else:
                self._read_into(first, [buffer])
                self._verify(first, last, self._digests(first, last, buffer.data))
                self.receiver.take(first, last, buffer)
        self.progress(size)

    def _read_straight(self, segment: int, straight: Straight, buffer: Bytes1D) -> None:
        """Read the blocks that the target wants whole straight into it, those at its edges by the buffer."""
        target, skip, inner = straight.target, straight.skip, straight.inner
        before = skip - straight.lead  # bytes of the target that stand in the first, partly wanted blocks
        parts = [buffer[:skip], target[before : before + inner], buffer[skip : len(buffer) - inner]]
        self._read_into(segment, parts)
        digest, size = xxhash.xxh3_64_intdigest, self.block_bytes
        found = [digest(part.data[at : at + size]) for part in parts for at in range(0, len(part), size)]
        self._verify(segment, segment + 1, found)
        target[:before] = parts[0][straight.lead :]
        target[before + inner :] = parts[2][: len(target) - before - inner]

    def _read_into(self, segment: int, buffers: Sequence[Bytes1D]) -> None:
        file = self.segments.file
        try:
            file.file.read_into(buffers, file.data_start + int(self.segments.starts[segment]), file.once)
        except EOFError as error:
            raise CheckpointCorruptedError(f"{self.segments.key(segment)}: {error}") from error

    def _digests(self, first: int, last: int, data: memoryview) -> list[int]:
        """The digests of all blocks of segments ``first:last``, of which the first one starts where ``data`` does."""
        base, size, digest = self.segments.starts[first], self.block_bytes, xxhash.xxh3_64_intdigest
        starts, stops = self.segments.starts[first:last] - base, self.segments.stops[first:last] - base
        spans: Iterable[tuple[int, int]] = zip(starts.tolist(), stops.tolist(), strict=True)
        if int((stops - starts).max()) > size:
            spans = [(at, min(at + size, stop)) for start, stop in spans for at in range(start, stop, size)]
        # No list of views: so many objects at a time would set off the garbage collector.
        return [digest(data[start:stop]) for start, stop in spans]

    def _verify(self, first: int, last: int, found: list[int]) -> None:
        """Compare the digests of all blocks of segments ``first:last`` with what they should be."""
        segments, hashes, block = self.segments, self.segments.file.hashes, int(self.segments.blocks[first])
        is_one = last - first == 1
        expected = hashes[block : block + len(found)] if is_one else hashes[self._numbers(first, last)]
        if found == expected.tolist():
            return
        numbers = self._numbers(first, last)
        wrong = int(np.flatnonzero(np.array(found, np.uint64) != hashes[numbers])[0])
        segment = first + int(np.searchsorted(np.cumsum(self._counts(first, last)), wrong, side="right"))
        start = int(segments.starts[segment]) + (int(numbers[wrong]) - int(segments.blocks[segment])) * self.block_bytes
        raise CheckpointCorruptedError(
            f"{segments.key(segment)}: the checksum of {min(self.block_bytes, int(segments.stops[segment]) - start)} "
            f"bytes at {segments.file.data_start + start} of {segments.file.name} does not match; the file was damaged "
            "after it was written"
        )

    def _counts(self, first: int, last: int) -> IntArray:
        """How many blocks each of segments ``first:last`` has."""
        sizes = self.segments.stops[first:last] - self.segments.starts[first:last]
        return -(-sizes // self.block_bytes)

    def _numbers(self, first: int, last: int) -> IntArray:
        """The numbers of all blocks of segments ``first:last`` in their file."""
        counts = self._counts(first, last)
        numbers: IntArray = np.repeat(self.segments.blocks[first:last], counts) + places_within(counts)
        return numbers
