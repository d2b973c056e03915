"""Streams a checkpoint's tensors into files of an export: a window is read, verified, converted, written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

import numpy as np

from ..core.box import flat_range
from ..core.buffers import Buffers
from ..core.dtypes import cast_array
from ..core.memory import Bytes1D
from ..core.threads import run_all
from ..errors import UnsupportedValueError
from ..files.block_hashes import BlockHashes
from ..files.contents import Window
from ..files.metadata import FileInfo, Metadata
from ..files.writer import FileSave
from ..folder.boxes import BoxReader
from ..storage.base import Storage, WritableFile
from ..storage.capabilities import extended
from .plan import CONVERTED_BYTES, WINDOW_BYTES, ExportFile, ExportPiece, ExportWindow, cut_in_windows

__all__ = ["write_files"]

_ZEROS = memoryview(bytes(WINDOW_BYTES))  # of which nobody has memory until it is read, and then of one page


def write_files(
    source: Storage,
    metadata: Metadata,
    target: Storage,
    files: Sequence[ExportFile],
    threads: int,
    check: Callable[[], None],
    progress: Callable[[int], None],
) -> list[FileInfo]:
    """Write files and make them durable, in memory of a few windows.

    Args:
        source: The checkpoint's folder.
        metadata: What it holds.
        target: Where to; the names must be free.
        files: What to write.
        threads: How many threads read and write.
        check: Called now and then; may raise to stop.
        progress: Told how many bytes were written, as they are.

    Returns:
        The files, those of this library's own format with the digests of their headers.

    Raises:
        CheckpointCorruptedError: a block is not what was written, or a file is missing.
        UnsupportedValueError: a finite value cannot be held by the element type that it is converted to.
        OSError: reading or writing failed.
    """
    cut = [cut_in_windows(file) for file in files]
    stored = [p for windows in cut for window in windows for p in window.pieces if p.tensor.data is None]
    rows = {id(piece): row for row, piece in enumerate(stored)}
    buffers = Buffers(threads)
    written: list[FileInfo] = []
    with BoxReader(source, metadata, [p.tensor.row for p in stored], [p.box for p in stored]) as reader:
        for file, windows in zip(files, cut, strict=True):
            content = _Content(file, windows, reader, rows, buffers, progress)
            if file.own is None:
                out = target.create(file.name)
                with closing(out):
                    content.keeps_holes = reader.may_have_holes and extended(out, file.nbytes)
                    run_all(content.tasks(out), threads, check)
                    out.sync()
                written.append(FileInfo(file.name, file.nbytes, ""))
            else:
                with closing(FileSave(target, file.name, file.own.table, file.own.info, content)) as save:
                    content.keeps_holes = reader.may_have_holes and save.extend()
                    written.append(save.finish(threads, check, progress))
                progress(file.nbytes - file.own.table.nbytes)
    return written


class _Content:
    """The windows of a file, read from a checkpoint.

    Args:
        file: The file.
        cut: Its windows.
        reader: Reads what is stored in the checkpoint.
        rows: The place of each of those pieces among the reader's boxes, by the piece's ``id``.
        buffers: One for each thread.
        progress: Told of holes that are not written, and by :meth:`tasks` of what is.

    Attributes:
        keeps_holes: Whether the file has zeros wherever nothing is written, so that holes need not be.
    """

    def __init__(
        self,
        file: ExportFile,
        cut: Sequence[ExportWindow],
        reader: BoxReader,
        rows: Mapping[int, int],
        buffers: Buffers,
        progress: Callable[[int], None],
    ) -> None:
        self._cut, self._reader, self._rows, self._buffers, self._progress = cut, reader, rows, buffers, progress
        self._entries = {id(part): i for i, part in enumerate(file.parts)}
        self.keeps_holes = False

    def tasks(self, out: WritableFile) -> Iterator[Callable[[], None]]:
        """Tasks that write it, one window each."""

        def write(window: ExportWindow) -> None:
            with self._filled(window, None) as (start, data):
                if len(data):
                    out.write(data, start)
            self._progress(len(data))

        for window in self._cut:
            yield functools.partial(write, window)

    def _is_hole(self, window: ExportWindow) -> bool:
        """Whether all of a window is zeros that are nowhere on the disk; they are zeros in any type."""
        return not window.known and all(
            piece.tensor.data is None and self._reader.is_hole(self._rows[id(piece)]) for piece in window.pieces
        )

    def windows(self, span: range, hashes: BlockHashes) -> Generator[Window, None, None]:
        """As :class:`FileSave` wants it: all windows, hashed."""
        for window in self._cut:
            yield self._filled(window, hashes)

    @contextmanager
    def _filled(self, window: ExportWindow, hashes: BlockHashes | None) -> Iterator[tuple[int, Bytes1D]]:
        """The bytes of a window, hashed if that is wanted; none for a hole that need not be written."""
        if self.keeps_holes and self._is_hole(window):
            if hashes is not None:
                for piece in window.pieces:
                    hashes.add(self._entries[id(piece.tensor)], _start_of(piece), _ZEROS[: piece.stop - piece.start])
            self._progress(window.nbytes)
            yield window.start, np.zeros(0, np.uint8)
            return
        with self._buffers.borrow(window.nbytes) as buffer:
            for start, data in window.known:
                buffer[start : start + len(data)] = np.frombuffer(data, np.uint8)
            for pieces in _read_together(window.pieces):
                targets = [_target(piece, buffer) for piece in pieces]
                self._reader.read([self._rows[id(piece)] for piece in pieces], targets)
                for piece, items in zip(pieces, targets, strict=True):
                    if piece.tensor.is_converted:
                        _convert(piece, items, buffer)
                del targets
            for piece in window.pieces:
                if piece.tensor.data is not None:
                    given = np.frombuffer(piece.tensor.data, np.uint8)[piece.box.slices]
                    buffer[piece.start : piece.stop] = given
                if hashes is not None:
                    part = buffer[piece.start : piece.stop].data
                    hashes.add(self._entries[id(piece.tensor)], _start_of(piece), part)
            yield window.start, buffer


def _read_together(pieces: Sequence[ExportPiece]) -> Iterator[list[ExportPiece]]:
    """The pieces that are stored in the checkpoint: those that stay as they are, and the others some at a time."""
    stored = [piece for piece in pieces if piece.tensor.data is None]
    yield [piece for piece in stored if not piece.tensor.is_converted]
    some: list[ExportPiece] = []
    nbytes = 0
    for piece in stored:
        if piece.tensor.is_converted:
            if some and nbytes + piece.stored_bytes > CONVERTED_BYTES:
                yield some
                some, nbytes = [], 0
            some.append(piece)
            nbytes += piece.stored_bytes
    yield some


def _start_of(piece: ExportPiece) -> int:
    """The place of a piece's first byte in its tensor, of which it is a range."""
    elements = flat_range(piece.box, piece.tensor.shape)
    assert elements is not None
    return elements[0] * piece.tensor.dtype.itemsize


def _target(piece: ExportPiece, buffer: Bytes1D) -> np.ndarray:
    """Where to read a piece: its place in the window, or, if it is to be converted, memory of its own."""
    if piece.tensor.is_converted:
        return np.empty(piece.box.shape, piece.tensor.stored.raw)
    return buffer[piece.start : piece.stop].view(piece.tensor.dtype.raw).reshape(piece.box.shape)


def _convert(piece: ExportPiece, items: np.ndarray, buffer: Bytes1D) -> None:
    tensor = piece.tensor
    place = buffer[piece.start : piece.stop].view(tensor.dtype.raw).reshape(piece.box.shape)
    if not cast_array(items, tensor.stored, place, tensor.dtype):
        raise UnsupportedValueError(
            f"{tensor.key}: a finite {tensor.stored.name} value is too large for {tensor.dtype.name}"
        )
