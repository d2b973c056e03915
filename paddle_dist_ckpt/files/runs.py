"""Reads segments of data files, neighbours together as runs, and verifies every block before it is handed out."""

from __future__ import annotations

import bisect
import errno
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash

from ..core.buffers import Buffers
from ..core.columns import IntArray, places_within
from ..core.memory import Bytes1D
from ..errors import CheckpointCorruptedError
from ..storage.base import ReadableFile, Storage
from ..storage.capabilities import hole_bytes, is_hole, read_windows
from .datafile import Hashes, read_header
from .holes import HoleBudget, Holes
from .metadata import FileInfo

__all__ = [
    "CHUNK_BYTES",
    "STRAIGHT_BYTES",
    "OpenFile",
    "Segments",
    "check_open_files",
    "digest_of_zeros",
    "open_data_file",
]

CHUNK_BYTES = 2 << 20  # so that a block is hashed while it is still in the cache
STRAIGHT_BYTES = 16 << 20  # of what is cached and needs no buffer: between chunks Python takes a quarter of the time
_WINDOW_BYTES = 256 << 10  # of what is cached: a core's own cache holds it, and where it came from, until it is hashed
_MOST_SEGMENTS = 1 << 16
_LEAST_HOLE = 64 << 10  # less is read sooner than looked at, unless most of the file is holes
GAP_BYTES = 4096  # a page: what lies between closer segments is read from the disk anyway


@dataclass(frozen=True, slots=True, eq=False)
class OpenFile:
    """A data file whose size, and header if it is of ours, have been checked.

    Attributes:
        name: For messages.
        file: To read from.
        data_start: Where the data section starts.
        hashes: Digest of each block; None for a file of another format, in which nothing is verified.
        holes: What may be read of holes.
        once: Whether the page cache lacks it, and no other rank of this host wants much of the same data.
        cached: Whether the page cache has it, so that many small reads cost no more than a large one.
    """

    name: str
    file: ReadableFile
    data_start: int
    hashes: Hashes | None
    holes: Holes
    once: bool = True
    cached: bool = False

    @property
    def chunk_bytes(self) -> int:
        """How much of what needs no buffer is one task. What is not verified is not read in windows, either."""
        in_windows = self.cached and self.hashes is not None
        return STRAIGHT_BYTES if in_windows and self.holes.none else CHUNK_BYTES

    def is_hole(self, start: int, nbytes: int) -> bool:
        """Whether a part of the data section is a hole, which has no bytes on the disk, as far as is known."""
        return is_hole(self.file, self.data_start + start, nbytes)

    def may_have_holes(self, start: int, nbytes: int) -> bool:
        """Whether there is a hole in such a part, or that is not known."""
        return hole_bytes(self.file, self.data_start + start, nbytes) != 0


def check_open_files(error: OSError, needed: int) -> None:
    """Raises an OSError that says how many files are needed at once, if that is why one could not be opened."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise OSError(error.errno, f"too many files are open; {needed} are needed (see ulimit -n)") from error


def open_data_file(storage: Storage, info: FileInfo, blocks: int, budget: HoleBudget) -> OpenFile:
    """Open a data file, and check it against what `.metadata` says of it.

    Args:
        storage: Where it is.
        info: Its name, size and header digest.
        blocks: How many blocks its entries have.
        budget: What may be read of holes, in all files of the checkpoint.

    Raises:
        CheckpointCorruptedError: it is missing, or not the file that was written.
        OSError: it cannot be opened.
    """
    name = f"{storage.location}/{info.name}"
    try:
        file = storage.open(info.name)
    except FileNotFoundError:
        raise CheckpointCorruptedError(f"{name} is missing") from None
    except IsADirectoryError as error:
        raise CheckpointCorruptedError(f"{name}: {error.strerror or 'it is no file'}") from None
    try:
        if file.size != info.size:
            raise CheckpointCorruptedError(f"{name} has {file.size} bytes; {info.size} were written")
        hashes, start = (None, 0) if not info.digest else read_header(file, info, blocks)
    except BaseException:
        file.close()
        raise
    return OpenFile(name, file, start, hashes, Holes(name, file, budget))


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """What is to be read of one file, in ascending order. Each segment is one or more whole blocks of one entry.

    A segment may be there repeatedly; it is read once, and verified as often. Where it goes a subclass knows.

    Attributes:
        file: The file.
        block_bytes: Bytes of a block.
        starts: Where each starts, counted from the start of the data section, ``[segments]``.
        stops: Where each ends, ``[segments]``.
        blocks: The number of its first block in the file, ``[segments]``.
        key: What to call a segment's entry in errors.
    """

    file: OpenFile
    block_bytes: int
    starts: IntArray
    stops: IntArray
    blocks: IntArray
    key: Callable[[int], str]

    def straight(self, segment: int) -> tuple[Bytes1D, int] | None:
        """If all that is wanted of a segment are bytes in a row: where they go, and the first of them in the segment.

        They are read without a buffer then.
        """
        return None

    def take(self, first: int, last: int, data: Bytes1D) -> None:
        """Hand out segments ``first:last``, of which the first one starts where ``data`` does; on several threads."""
        raise NotImplementedError

    def take_zeros(self, first: int, last: int) -> None:
        """Hand out segments ``first:last``, of which every byte is zero. Memory that is zero already is not touched, so
        that pages which nobody has used yet need not be there."""
        self.take(first, last, np.zeros(self._span(first, last), np.uint8))

    def tasks(
        self, buffers: Buffers, progress: Callable[[int], None], joined: bool = True
    ) -> Iterator[Callable[[], None]]:
        """Tasks that read, verify and hand out segments, a run each. They may be run at the same time.

        Args:
            buffers: Of which each task uses one.
            progress: Told how many bytes were read, as they are.
            joined: Whether what lies between segments that are close to each other may be read too.

        Returns:
            The tasks. They raise CheckpointCorruptedError if a block is not what was written, and name the tensor and
            the file; OSError if reading failed.
        """
        for first, last in self._runs(GAP_BYTES if joined else 0):
            yield functools.partial(self._read, first, last, buffers, progress)

    def _runs(self, gap: int) -> Iterator[tuple[int, int]]:
        """Neighbours that are read together: no further apart than ``gap``, and together no more than a chunk, and no
        more than a thread has memory to look at.

        Segments that are the same stay together. In files that others wrote, segments may lie within others.
        """
        count, stops = len(self.starts), np.maximum.accumulate(self.stops)
        apart = np.append(np.flatnonzero(self.starts[1:] - stops[:-1] > gap) + 1, count)
        pieces = np.unique(np.searchsorted(self.starts, self.starts[::_MOST_SEGMENTS])).tolist()
        for start, stop in itertools.pairwise([*pieces, count]):
            low, high = self.starts[start:stop].tolist(), stops[start:stop].tolist()
            within = apart[np.searchsorted(apart, start, side="right") : np.searchsorted(apart, stop)]
            first = 0
            for end in [*(within - start).tolist(), stop - start]:
                while first < end:
                    fitting = bisect.bisect_right(high, low[first] + CHUNK_BYTES, first, end)
                    last = max(fitting, bisect.bisect_right(low, low[first], first, end))
                    yield start + first, start + last
                    first = last

    def are_zeros(self) -> bool:
        """Whether all segments are holes, and zeros are what was written."""
        return all(self._are_zeros(first, last) for first, last in self._runs(0))

    def zeros(self) -> Iterator[slice]:
        """Neighbours among the segments that are such holes, as far as a look or two at each tells."""
        for first, last in self._runs(0):
            if self._known_zeros(first, last):
                yield slice(first, last)
            elif last - first > 1 and self.file.may_have_holes(int(self.starts[first]), self._span(first, last)):
                yield from (slice(i, i + 1) for i in range(first, last) if self._known_zeros(i, i + 1))

    def _span(self, first: int, last: int) -> int:
        """How many bytes segments ``first:last`` have from the start of the first to where the furthest ends."""
        return int(self.stops[first:last].max()) - int(self.starts[first])

    def _read(self, first: int, last: int, buffers: Buffers, progress: Callable[[int], None]) -> None:
        size = self._span(first, last)
        if self._are_zeros(first, last):
            self.take_zeros(first, last)
            progress(size)
            return
        straight = self.straight(first) if last - first == 1 else None
        if straight is not None:
            self._read_straight(first, *straight, size, buffers)
        else:
            with buffers.borrow(size) as buffer:
                self._read_blocks(first, last, [buffer])
                self.take(first, last, buffer)
        progress(size)

    def _are_zeros(self, first: int, last: int) -> bool:
        """Whether segments ``first:last`` are a hole, and zeros are what was written; nothing need be read then.

        Raises:
            CheckpointCorruptedError: they have to be read, and are holes for the most part, as too much was before.
        """
        size, holes = self._span(first, last), self.file.holes
        if size < _LEAST_HOLE and not holes.may_exceed:
            return False
        if self._known_zeros(first, last):
            return True
        holes.read(self.file.data_start + int(self.starts[first]), size)
        return False

    def _known_zeros(self, first: int, last: int) -> bool:
        if not self.file.is_hole(int(self.starts[first]), self._span(first, last)):
            return False
        if self.file.hashes is None:
            return True
        low, high, blocks = self._blocks(first, last)
        sizes, size = np.unique(high - low, return_inverse=True)
        zeros = np.array([digest_of_zeros(nbytes) for nbytes in sizes.tolist()], np.uint64)
        return bool((self.file.hashes[blocks] == zeros[size.reshape(-1)]).all())

    def _read_straight(self, segment: int, target: Bytes1D, lead: int, nbytes: int, buffers: Buffers) -> None:
        """Read the blocks that the target wants whole straight into it, those at its edges by a buffer."""
        size, end = self.block_bytes, lead + len(target)
        skip = -(-lead // size) * size
        stop = max(skip, end if end == nbytes else end // size * size)
        inner = target[skip - lead : stop - lead]
        if len(inner) == nbytes:
            self._read_blocks(segment, segment + 1, [inner])
            return
        with buffers.borrow(nbytes - len(inner)) as edges:
            self._read_blocks(segment, segment + 1, [edges[:skip], inner, edges[skip:]])
            target[: skip - lead] = edges[lead : min(skip, end)]
            target[stop - lead :] = edges[skip : skip + max(0, end - stop)]

    def _read_into(self, segment: int, parts: Sequence[Bytes1D]) -> None:
        with self._ends_early(segment):
            self.file.file.read_into(parts, self.file.data_start + int(self.starts[segment]), self.file.once)

    @contextmanager
    def _ends_early(self, segment: int) -> Iterator[None]:
        """A block that reads a segment, before whose end the file may end."""
        try:
            yield
        except EOFError as error:
            raise CheckpointCorruptedError(f"{self.key(segment)}: {error}") from error

    def _read_blocks(self, first: int, last: int, parts: Sequence[Bytes1D]) -> None:
        """Read segments ``first:last``, and compare the digests of all their blocks with what they should be.

        ``parts`` is where they go from the start of the first one on; that of a single one may be cut between blocks.
        """
        if self.file.hashes is None:
            self._read_into(first, parts)
            return
        if last - first == 1:  # as of large tensors, without arrays: what they need is not in the cache after a chunk
            found = self._read_hashing(first, parts)
            block = int(self.blocks[first])
            expected = self.file.hashes[block : block + len(found)]
        else:
            self._read_into(first, parts)
            low, high, blocks = self._blocks(first, last)
            base, digest, data = int(self.starts[first]), xxhash.xxh3_64_intdigest, parts[0].data
            # No list of views: so many objects at a time would set off the garbage collector.
            found = [
                digest(data[start - base : stop - base])
                for start, stop in zip(low.tolist(), high.tolist(), strict=True)
            ]
            expected = self.file.hashes[blocks]
        if found != expected.tolist():
            raise CheckpointCorruptedError(next(self._wrong(first, last, found))[1])

    def _read_hashing(self, segment: int, parts: Sequence[Bytes1D]) -> list[int]:
        """Read a segment; the digests of its blocks. What is cached is hashed window by window as it is read."""
        size, digest, found = self.block_bytes, xxhash.xxh3_64_intdigest, list[int]()
        if not self.file.cached:
            self._read_into(segment, parts)
            return [digest(part.data[i : i + size]) for part in parts for i in range(0, len(part), size)]
        file, offset = self.file.file, self.file.data_start + int(self.starts[segment])
        step, begun = max(size, _WINDOW_BYTES), xxhash.xxh3_64()  # of a block that is larger than a window
        with self._ends_early(segment):
            for part in parts:
                for start in range(0, len(part), step):
                    data = part[start : start + step]
                    if size < step:
                        file.read_into([data], offset + start)
                        found += [digest(data.data[i : i + size]) for i in range(0, len(data), size)]
                        continue
                    read_windows(file, data, offset + start, _WINDOW_BYTES, begun.update)
                    found.append(begun.intdigest())
                    begun.reset()
                offset += len(part)
        return found

    def _wrong(self, first: int, last: int, found: Sequence[int]) -> Iterator[tuple[int, str]]:
        """The segments of ``first:last`` of which a block has another digest than it should, and what is to be said."""
        assert self.file.hashes is not None, "or else there is nothing to compare with"
        low, high, blocks = self._blocks(first, last)
        for wrong in np.flatnonzero(np.array(found, np.uint64) != self.file.hashes[blocks]).tolist():
            segment = first + int(np.searchsorted(self.starts[first:last], low[wrong], side="right")) - 1
            yield (
                segment,
                f"{self.key(segment)}: the checksum of {high[wrong] - low[wrong]} bytes at "
                f"{self.file.data_start + low[wrong]} of {self.file.name} does not match; the file was damaged after "
                "it was written",
            )

    def _blocks(self, first: int, last: int) -> tuple[IntArray, IntArray, IntArray]:
        """Where the blocks of segments ``first:last`` start and end, and their numbers in the file, ``[blocks]``."""
        starts, stops = self.starts[first:last], self.stops[first:last]
        counts = -(-(stops - starts) // self.block_bytes)
        within = places_within(counts)
        low = np.repeat(starts, counts) + within * self.block_bytes
        high = np.minimum(low + self.block_bytes, np.repeat(stops, counts))
        return low, high, np.repeat(self.blocks[first:last], counts) + within


@functools.lru_cache(maxsize=256)
def digest_of_zeros(nbytes: int) -> int:
    """The digest of so many zero bytes."""
    digest, zeros = xxhash.xxh3_64(), memoryview(bytes(min(nbytes, CHUNK_BYTES)))
    for at in range(0, nbytes, CHUNK_BYTES):
        digest.update(zeros[: nbytes - at])
    return digest.intdigest()
