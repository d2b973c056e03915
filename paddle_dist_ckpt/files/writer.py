"""Writes data files: windows of the file are filled, hashed and written; then the header, then fsync.

A checkpoint is written once and read much later, if ever, so the page cache is of no use to it; and filling fresh pages
of it is slower than most disks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np

from ..core.buffers import Buffers
from ..core.threads import run_all
from ..storage.base import Storage
from .block_hashes import BlockHashes
from .contents import Contents, Window
from .datafile import FileLayout, FileTable, header_digest
from .metadata import FileInfo

__all__ = ["DataFileWriter"]


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
