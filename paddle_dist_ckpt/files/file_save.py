"""One data file of a save: written from the tensors, or from a snapshot of them, or from both."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from ..core.memory import Bytes1D
from ..storage.base import Storage
from .contents import WINDOW_BYTES, Snapshot, Tensors
from .datafile import DataFileInfo, FileLayout, FileTable
from .metadata import FileInfo
from .writer import DataFileWriter

__all__ = ["FileSave", "bytes_ahead"]

Check = Callable[[], None]
Progress = Callable[[int], None]


class FileSave:
    """A file that is going to be written.

    Args:
        storage: Where to.
        name: Its name.
        table: Its entries.
        info: What its header says beside the entries.
        contents: The bytes of the entries.
    """

    def __init__(self, storage: Storage, name: str, table: FileTable, info: DataFileInfo, contents: Tensors) -> None:
        self.name, self.table = name, table
        self._storage, self._info = storage, info
        self._writer: DataFileWriter | None = None
        self._left: tuple[range, Tensors | Snapshot] = (range(table.nbytes), contents)

    @cached_property
    def _layout(self) -> FileLayout:
        return FileLayout.of(self.table, self._info)

    def write_ahead(self, nbytes: int, threads: int, check: Check) -> None:
        """Write the first ``nbytes`` of the data now; they are a multiple of ``WINDOW_BYTES``, or all."""
        span, contents = self._left
        self._write(range(nbytes), contents, threads, check, _ignore)
        self._left = (span[nbytes:], contents)

    def take_snapshot(self, memory: Bytes1D) -> None:
        """Copy what is left to ``memory``, which begins at a page; the tensors are not needed any more then."""
        span, contents = self._left
        assert isinstance(contents, Tensors)
        contents.copy_to(memory, span.start)
        self._left = (span, Snapshot(self.table, memory, span.start))

    def finish(self, threads: int, check: Check, progress: Progress) -> FileInfo:
        """Write what is left, and make the file durable."""
        span, contents = self._left
        progress(span.start)
        self._write(span, contents, threads, check, progress)
        assert self._writer is not None
        info = self._writer.finish(self._layout)
        self.close()
        return info

    def _write(self, span: range, contents: Tensors | Snapshot, threads: int, check: Check, progress: Progress) -> None:
        if self._writer is None:
            self._writer = DataFileWriter(self._storage, self.name, self.table)
        self._writer.write(self._layout, contents, span, threads, check, progress)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def bytes_ahead(nbytes: int, surplus: int) -> int:
    """How many of a file's bytes are to be written ahead so that at least ``surplus`` of them, or all, are."""
    return min(nbytes, -(-surplus // WINDOW_BYTES) * WINDOW_BYTES)


def _ignore(_: int) -> None:
    """No progress is shown."""
