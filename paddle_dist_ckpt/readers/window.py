"""A range of a file, read from its beginning to its end in small parts, with what is large skipped."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from types import TracebackType
from typing import Any

import numpy as np

from ..core.memory import Bytes1D
from ..errors import CheckpointCorruptedError
from ..storage.base import Storage
from ..storage.capabilities import what_is_on_disk
from .budget import Budget

__all__ = ["FileWindow", "WindowedFile", "on_disk"]

_MOST_OF_HOLES = 32 << 20  # where filesystems compress, files have fewer bytes on the disk than their own
_FIRST, _MOST = 4 << 10, 64 << 10  # what is read ahead: little behind a jump, more and more where all is wanted


def on_disk(storage: Storage, names: Iterable[str]) -> Iterator[tuple[object, int]]:
    """What files are, whatever their names, and how many bytes each has on the disk; those that are there."""
    for name in names:
        with suppress(FileNotFoundError, IsADirectoryError), closing(storage.open(name)) as file:
            yield what_is_on_disk(file, name)


class WindowedFile:
    """A file of a storage, to be looked at in windows. Closed at the end of a ``with`` block.

    Args:
        storage: The folder.
        name: The file.
        budget: What may be done to read its checkpoint, which grows by what the file has on the disk.

    Attributes:
        size: How long it is, in bytes.
        on_disk: How many bytes it has on the disk, which are fewer if it has holes, or is compressed.

    Raises:
        CheckpointCorruptedError: there is no such file.
    """

    def __init__(self, storage: Storage, name: str, budget: Budget) -> None:
        try:
            self._file = storage.open(name)
        except FileNotFoundError as error:
            raise CheckpointCorruptedError(f"{name}: there is no such file in {storage.location}") from error
        except IsADirectoryError as error:
            raise CheckpointCorruptedError(f"{storage.location}/{name}: {error.strerror or 'it is no file'}") from error
        self.name = name
        self.size, self.budget = self._file.size, budget
        identity, nbytes = what_is_on_disk(self._file, name)
        self.on_disk = nbytes
        budget.grant(identity, nbytes)

    def __enter__(self) -> WindowedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, position: int, nbytes: int) -> bytes:
        """So many bytes at a position.

        Raises:
            CheckpointCorruptedError: the file ends before.
        """
        self._check(position, nbytes)
        if not nbytes:
            return b""
        buffer = np.empty(nbytes, np.uint8)
        self._fill(buffer, position)
        return buffer.tobytes()

    def read_large(self, position: int, nbytes: int) -> bytearray:
        """The same for what may be large, and has no holes.

        Raises:
            CheckpointCorruptedError: also if there is less of it on the disk.
        """
        self._check(position, nbytes)
        if nbytes > max(self.on_disk, _MOST_OF_HOLES):
            raise CheckpointCorruptedError(
                f"{self.name}: {nbytes} bytes at byte {position} are a hole: the file has {self.on_disk} on the disk"
            )
        data = bytearray(nbytes)
        self._fill(np.frombuffer(data, np.uint8), position)
        return data

    def _fill(self, buffer: Bytes1D, position: int) -> None:
        try:
            self._file.read_into([buffer], position)
        except EOFError as error:
            raise CheckpointCorruptedError(f"{self.name}: it has become shorter than {self.size} bytes") from error

    def _check(self, position: int, nbytes: int) -> None:
        if position < 0 or nbytes < 0 or position + nbytes > self.size:
            raise CheckpointCorruptedError(
                f"{self.name}: it has {self.size} bytes, so it ends before byte {position + nbytes}"
            )

    def window(self, start: int = 0, stop: int | None = None) -> FileWindow:
        """The range from ``start`` to ``stop``, or to the file's end.

        Raises:
            CheckpointCorruptedError: the file has no such range.
        """
        if stop is None:
            stop = self.size
        if not 0 <= start <= stop <= self.size:
            raise CheckpointCorruptedError(f"{self.name}: it has {self.size} bytes, no range {start} to {stop}")
        return FileWindow(self, start, stop)


class FileWindow:
    """Reads a range of a file forward.

    Attributes:
        file: The file.
        start: Where the range starts.
        stop: Where it ends.
        data: Bytes that have been read ahead.
        at: How many of them have been taken. Who takes many in small parts may do so here.
    """

    __slots__ = ("_ahead", "_base", "_skipped", "at", "data", "file", "start", "stop")

    def __init__(self, file: WindowedFile, start: int, stop: int) -> None:
        self.file, self.start, self.stop = file, start, stop
        self.data, self.at = b"", 0
        self._base, self._ahead, self._skipped = start, _FIRST, 0  # where `data` begin, how much is read next

    @property
    def position(self) -> int:
        """Where in the file the next byte lies."""
        return self._base + self.at

    @property
    def taken(self) -> int:
        """How many bytes have been taken so far, those that were skipped not counted."""
        return self.position - self.start - self._skipped

    @property
    def left(self) -> int:
        """How many bytes there are before the end."""
        return self.stop - self._base - self.at

    def take(self, nbytes: int) -> bytes:
        """The next bytes.

        Raises:
            CheckpointCorruptedError: there are not so many.
        """
        end = self.at + nbytes
        if end > len(self.data):
            self._fill(nbytes)
            end = nbytes
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def byte(self) -> int:
        """The next byte.

        Raises:
            CheckpointCorruptedError: there is none.
        """
        at = self.at
        try:
            value = self.data[at]
        except IndexError:
            return self.take(1)[0]
        self.at = at + 1
        return value

    def unpack(self, layout: struct.Struct) -> Any:
        """The number that the next bytes are, by a layout of one."""
        return layout.unpack(self.take(layout.size))[0]

    def skip(self, nbytes: int) -> int:
        """Leave out the next bytes; returns where they lie.

        Raises:
            CheckpointCorruptedError: there are not so many.
        """
        self.check(nbytes)
        position = self.position
        self._skipped += nbytes
        if self.at + nbytes <= len(self.data):
            self.at += nbytes
        else:
            self.data, self.at, self._base, self._ahead = b"", 0, position + nbytes, _FIRST
        return position

    def line(self, limit: int) -> bytes:
        """The bytes before the next newline, which is left out.

        Raises:
            CheckpointCorruptedError: there is none among the next ``limit`` bytes.
        """
        end = self.data.find(b"\n", self.at, self.at + limit)
        if end < 0:
            self._fill(min(limit, self.left))
            end = self.data.find(b"\n", 0, limit)
            if end < 0:
                raise CheckpointCorruptedError(f"{self.file.name}: the line at byte {self.position} has no end")
        taken = self.data[self.at : end]
        self.at = end + 1
        return taken

    def check(self, nbytes: int) -> None:
        """Make sure that there are so many bytes.

        Raises:
            CheckpointCorruptedError: there are not.
        """
        if not 0 <= nbytes <= self.left:
            raise CheckpointCorruptedError(
                f"{self.file.name}: it ends at byte {self.stop}, before {nbytes} bytes that are due at {self.position}"
            )

    def _fill(self, nbytes: int) -> None:
        """Have the next ``nbytes`` at the beginning of what has been read."""
        self.check(nbytes)
        position, kept = self.position, self.data[self.at :]
        start = position + len(kept)
        wanted = min(max(nbytes - len(kept), self._ahead), self.stop - start)
        self.data, self.at, self._base = kept + self.file.read(start, wanted), 0, position
        self._ahead = min(2 * self._ahead, _MOST)
