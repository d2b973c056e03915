"""Writes data files, from the tensors or from a snapshot of them: windows are filled, hashed, written; header; fsync.

A checkpoint is written once and read much later, if ever, so the page cache is of no use to it; and filling fresh pages
of it is slower than most disks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property

import numpy as np

from ..core.buffers import Buffers
from ..core.memory import Bytes1D
from ..core.threads import run_all
from ..storage.base import Storage
from .block_hashes import BlockHashes
from .contents import WINDOW_BYTES, Contents, SnapshotContents, TensorContents, Window
from .datafile import DataFileInfo, FileLayout, FileTable, header_digest
from .metadata import FileInfo

__all__ = ["FileSave", "bytes_ahead"]

Check = Callable[[], None]
Progress = Callable[[int], None]


class DataFileWriter:
    """Writes one data file and makes it durable. It must be closed.

    Args:
        storage: Where to.
        name: The file's name; it must be new.
        table: Its entries.

    Raises:
        OSError: the file cannot be made. The methods raise it when a write or sync fails, a full disk included.
    """

    def __init__(self, storage: Storage, name: str, table: FileTable) -> None:
        self._name = name
        self._hashes = BlockHashes(table)
        self._file = storage.create(name)

    def write(
        self,
        layout: FileLayout,
        contents: Contents,
        span: range,
        threads: int,
        check: Callable[[], None],
        progress: Callable[[int], None],
    ) -> None:
        """Write a part of the data section.

        Args:
            layout: Where everything goes.
            contents: What is to be written.
            span: Which bytes; it starts at a multiple of ``WINDOW_BYTES`` and ends at one or at the end.
            threads: How many threads write.
            check: Called now and then; may raise to stop.
            progress: Told how many bytes of data were written, as they are.
        """

        def write_window(window: Window) -> None:
            with window.data as data:
                self._file.write(data, layout.data_start + window.start)
            progress(window.stop - window.start)

        def tasks() -> Iterator[Callable[[], None]]:
            with closing(contents.windows(span, self._hashes)) as windows:
                for window in windows:
                    yield functools.partial(write_window, window)

        run_all(tasks(), threads, check)

    def finish(self, layout: FileLayout) -> FileInfo:
        """After all data, write the header and make the file durable; returns its record for `.metadata`."""
        header = layout.header(self._hashes.values)
        with Buffers(1).borrow(len(header)) as buffer:
            buffer[:] = np.frombuffer(header, np.uint8)
            self._file.write(buffer, 0)
        # IMPORTANT: the file is durable before this rank reports it, and so before it can be committed.
        self._file.sync()
        return FileInfo(self._name, layout.size, header_digest(header))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class FileSave:
    """A file that is going to be written.

    Args:
        storage: Where to.
        name: Its name.
        table: Its entries.
        info: What its header says beside the entries.
        contents: The bytes of the entries.
    """

    def __init__(
        self, storage: Storage, name: str, table: FileTable, info: DataFileInfo, contents: TensorContents
    ) -> None:
        self.name, self.table = name, table
        self._storage, self._info = storage, info
        self._writer: DataFileWriter | None = None
        self._left: tuple[range, Contents] = (range(table.nbytes), contents)

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
        assert isinstance(contents, TensorContents)
        contents.copy_to(memory, span.start)
        self._left = (span, SnapshotContents(self.table, memory, span.start))

    def finish(self, threads: int, check: Check, progress: Progress) -> FileInfo:
        """Write what is left, and make the file durable."""
        span, contents = self._left
        progress(span.start)
        self._write(span, contents, threads, check, progress)
        assert self._writer is not None
        info = self._writer.finish(self._layout)
        self.close()
        return info

    def _write(self, span: range, contents: Contents, threads: int, check: Check, progress: Progress) -> None:
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
