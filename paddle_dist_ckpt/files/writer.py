"""Writes data files, from the tensors or from a snapshot of them: windows are filled, hashed, written; header; fsync.

A checkpoint is written once and read much later, if ever, so the page cache is of no use to it; and filling fresh pages
of it is slower than most disks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..core.buffers import Buffers
from ..core.cached import cached_property
from ..core.columns import run_edges
from ..core.memory import Bytes1D
from ..core.threads import run_all
from ..storage.base import Storage, WritableFile
from ..storage.capabilities import extended
from .block_hashes import BlockHashes
from .contents import WINDOW_BYTES, Contents, SnapshotContents, TensorContents, Window
from .datafile import DataFileInfo, FileLayout, FileTable
from .metadata import FileInfo

__all__ = ["FileSave", "bytes_ahead", "write_window"]

_HOLE = 16 << 10  # bytes of a file, from a multiple of it on, that are left out together if they are zeros

Check = Callable[[], None]
Progress = Callable[[int], None]


class FileSave:
    """A data file that is going to be written, and made durable. It must be closed.

    Args:
        storage: Where to.
        name: Its name; it must be new.
        table: Its entries.
        info: What its header says beside the entries.
        contents: The bytes of the entries.

    Raises:
        OSError: the methods raise it when the file cannot be made, or a write or sync fails, a full disk included.
    """

    def __init__(self, storage: Storage, name: str, table: FileTable, info: DataFileInfo, contents: Contents) -> None:
        self.name, self.table = name, table
        self._storage, self._info = storage, info
        self._hashes = BlockHashes(table)
        self._left: tuple[range, Contents] = (range(table.nbytes), contents)
        self._file: WritableFile | None = None
        self._keeps_holes = False

    @cached_property
    def _layout(self) -> FileLayout:
        return FileLayout(self.table, self._info)

    @property
    def block_digests(self) -> npt.NDArray[np.uint64]:
        """The digests of the file's blocks, when all is written."""
        return self._hashes.values

    def extend(self) -> bool:
        """Make the file as long as it will be, if that can be, so that zeros need not be written: its contents may then
        hash them, and give no bytes."""
        self._keeps_holes = extended(self._opened(), self._layout.size)
        return self._keeps_holes

    def write_ahead(self, nbytes: int, threads: int, check: Check) -> None:
        """Write the first ``nbytes`` of the data now; they are a multiple of ``WINDOW_BYTES``, or all."""
        span, contents = self._left
        self._write(range(nbytes), contents, threads, check, lambda _: None)
        self._left = (span[nbytes:], contents)

    def take_snapshot(self, memory: Bytes1D) -> None:
        """Copy what is left to ``memory``, which begins at a page; the tensors are not needed any more then."""
        span, contents = self._left
        assert isinstance(contents, TensorContents)
        contents.copy_to(memory, span.start)
        self._left = (span, SnapshotContents(self.table, memory, span.start))

    def finish(self, threads: int, check: Check, progress: Progress) -> FileInfo:
        """Write what is left, and after all data the header; make the file durable.

        Args:
            threads: How many threads write.
            check: Called now and then; may raise to stop.
            progress: Told how many bytes of data were written, as they are.

        Returns:
            The file's record for `.metadata`.
        """
        span, contents = self._left
        progress(span.start)
        file = self._write(span, contents, threads, check, progress)
        with Buffers(1).borrow(self._layout.data_start) as header:
            digest = self._layout.fill_header(header, self._hashes.values)
            file.write(header, 0)
        # IMPORTANT: the file is durable before this rank reports it, and so before it can be committed.
        file.sync()
        self.close()
        return FileInfo(self.name, self._layout.size, digest)

    def _write(self, span: range, contents: Contents, threads: int, check: Check, progress: Progress) -> WritableFile:
        """Write a part of the data section, which starts at a window and ends at one or at the end."""
        check()  # of a save that has failed meanwhile, as while this was frozen, no file is made
        file, data_start = self._opened(), self._layout.data_start

        def write(window: Window) -> None:
            with window as (start, data):
                write_window(file, data, data_start + start, self._keeps_holes)
            progress(len(data))

        def tasks() -> Iterator[Callable[[], None]]:
            with closing(contents.windows(span, self._hashes)) as windows:
                for window in windows:
                    yield functools.partial(write, window)

        run_all(tasks(), threads, check)
        return file

    def _opened(self) -> WritableFile:
        if self._file is None:
            self._file = self._storage.create(self.name)
        return self._file

    def close(self) -> None:
        """Close the file, if it is open."""
        file, self._file = self._file, None  # which counts as closed even if that fails
        if file is not None:
            file.close()


def write_window(file: WritableFile, data: Bytes1D, start: int, keeps_holes: bool) -> None:
    """Write consecutive bytes of a file. If it has zeros wherever nothing is written, long ones are left out."""
    stretches = [slice(0, len(data))] if len(data) else []
    if keeps_holes and stretches:
        edges = np.append(0, np.arange(_HOLE - start % _HOLE, len(data), _HOLE))
        filled = np.maximum.reduceat(data, edges) != 0
        runs = run_edges(filled)
        bounds = np.append(edges, len(data))[runs].tolist()
        stretches = [slice(*pair) for pair, wanted in zip(pairwise(bounds), filled[runs[:-1]], strict=True) if wanted]
    for stretch in stretches:
        file.write(data[stretch], start + stretch.start)


def bytes_ahead(nbytes: int, surplus: int) -> int:
    """How many of a file's bytes are to be written ahead so that at least ``surplus`` of them, or all, are."""
    return min(nbytes, -(-surplus // WINDOW_BYTES) * WINDOW_BYTES)
