"""Streams a checkpoint's tensors into files of an export: a window is read, verified, converted, written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

import numpy as np

from ..core.box import flat_range
from ..core.buffers import Buffers
from ..core.dtypes import cast_array
from ..core.garbage import no_collections
from ..core.memory import Bytes1D
from ..core.parts import NEW, Part
from ..core.threads import run_all
from ..errors import UnsupportedValueError
from ..files.block_hashes import BlockHashes
from ..files.contents import Window
from ..files.metadata import FileInfo, Metadata
from ..files.reader import view_at
from ..files.writer import FileSave, write_window
from ..folder.boxes import BoxReader
from ..storage.base import Storage, WritableFile
from ..storage.capabilities import extended
from .plan import CONVERTED_BYTES, WINDOW_BYTES, ExportFile, ExportPiece, ExportWindow, PieceSource, cut_in_windows

__all__ = ["write_files"]

_ZEROS = memoryview(bytes(WINDOW_BYTES))  # of which nobody has memory until it is read, and then of one page


class _Read(NamedTuple):
    """What is read for a piece: the number of the box among the reader's, the piece, and where it comes from."""

    number: int
    piece: ExportPiece
    source: PieceSource

    @property
    def is_converted(self) -> bool:
        """Whether its items are converted on the way."""
        return self.source.dtype is not self.piece.tensor.dtype


def write_files(
    source: Storage,
    metadata: Metadata,
    target: Storage,
    files: Sequence[ExportFile],
    threads: int,
    check: Callable[[], None],
    progress: Callable[[int], None],
) -> list[FileInfo]:
    """Write files and make them durable, in memory of a few windows, among them at most one of a transposed tensor.

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
    with no_collections():
        cut = [cut_in_windows(file) for file in files]
        pieces = [piece for windows in cut for window in windows for piece in window.pieces]
        pairs = ((piece, source) for piece in pieces for source in piece.sources())
        reads = [_Read(number, piece, source) for number, (piece, source) in enumerate(pairs)]
        of_piece: dict[int, list[_Read]] = {id(piece): [] for piece in pieces}
        for read in reads:
            of_piece[id(read.piece)].append(read)
    buffers = Buffers(threads)
    written: list[FileInfo] = []
    rows, boxes = [read.source.row for read in reads], [read.source.box for read in reads]
    with BoxReader(source, metadata, rows, boxes) as reader:
        for file, windows in zip(files, cut, strict=True):
            content = _Content(file, windows, reader, of_piece, buffers, progress)
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
        reads: What is read for each piece, by the piece's ``id``.
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
        reads: Mapping[int, Sequence[_Read]],
        buffers: Buffers,
        progress: Callable[[int], None],
    ) -> None:
        self._cut, self._reader, self._reads, self._buffers, self._progress = cut, reader, reads, buffers, progress
        self._entries = {id(part): i for i, part in enumerate(file.parts)}
        self.keeps_holes = False

    def tasks(self, out: WritableFile) -> Iterator[Callable[[], None]]:
        """Tasks that write it, one window each."""

        def write(window: ExportWindow) -> None:
            with self._filled(window, None) as (start, data):
                write_window(out, data, start, self.keeps_holes)
            self._progress(len(data))

        for window in self._cut:
            yield functools.partial(write, window)

    def _is_hole(self, window: ExportWindow) -> bool:
        """Whether all of a window is zeros that are nowhere on the disk; they are zeros in any type."""
        return not window.known and all(
            piece.tensor.data is None and all(self._reader.is_hole(read.number) for read in self._reads[id(piece)])
            for piece in window.pieces
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
                    entry, start, nbytes = self._entries[id(piece.tensor)], _start_of(piece), piece.stop - piece.start
                    for done in range(0, nbytes, len(_ZEROS)):
                        hashes.add(entry, start + done, _ZEROS[: nbytes - done])
            self._progress(window.nbytes)
            yield window.start, np.zeros(0, np.uint8)
            return
        with self._buffers.borrow(window.nbytes) as buffer:
            for start, data in window.known:
                buffer[start : start + len(data)] = np.frombuffer(data, np.uint8)
            for reads in _read_together([read for piece in window.pieces for read in self._reads[id(piece)]]):
                targets = [_target(read, buffer) for read in reads]
                self._reader.read([read.number for read in reads], targets)
                for read, items in zip(reads, targets, strict=True):
                    if read.is_converted:
                        _convert(read, items, buffer)
                del targets
            for piece in window.pieces:
                if piece.tensor.data is not None:
                    given = np.frombuffer(piece.tensor.data, np.uint8)[piece.box.slices]
                    buffer[piece.start : piece.stop] = given
                if hashes is not None:
                    part = buffer[piece.start : piece.stop].data
                    hashes.add(self._entries[id(piece.tensor)], _start_of(piece), part)
            yield window.start, buffer


def _read_together(reads: Sequence[_Read]) -> Iterator[list[_Read]]:
    """What stays as it is, and then what is converted, some at a time."""
    yield [read for read in reads if not read.is_converted]
    some: list[_Read] = []
    nbytes = 0
    for read in reads:
        if read.is_converted:
            size = read.source.box.size * read.source.dtype.itemsize
            if some and nbytes + size > CONVERTED_BYTES:
                yield some
                some, nbytes = [], 0
            some.append(read)
            nbytes += size
    yield some


def _start_of(piece: ExportPiece) -> int:
    """The place of a piece's first byte in its tensor, of which it is a range."""
    elements = flat_range(piece.box, piece.tensor.shape)
    assert elements is not None
    return elements[0] * piece.tensor.dtype.itemsize


def _target(read: _Read, buffer: Bytes1D) -> np.ndarray:
    """What to read into: its place in the window, or, if it is to be converted, memory of its own."""
    if read.is_converted:
        return np.empty(read.source.box.shape, read.source.dtype.raw)
    return _place(read, buffer)


def _place(read: _Read, buffer: Bytes1D) -> np.ndarray:
    """Where something goes in a window, with the axes of the stored tensor."""
    piece, part = read.piece, read.source.part
    place = buffer[piece.start : piece.stop].view(piece.tensor.dtype.raw).reshape(piece.box.shape)
    return place if part is None else _with_stored_axes(view_at(place, part.place.slices), part)


def _with_stored_axes(place: np.ndarray, part: Part) -> np.ndarray:
    """The same memory, of the shape of a part's box there, with the axes of its box in the stored tensor."""
    kept = [axis for axis in part.axes if axis != NEW]
    here = view_at(place, tuple(0 if axis == NEW else slice(None) for axis in part.axes))
    turned = here.transpose(sorted(range(len(kept)), key=kept.__getitem__))
    return np.expand_dims(turned, tuple(d for d in range(len(part.box.shape)) if d not in kept))


def _convert(read: _Read, items: np.ndarray, buffer: Bytes1D) -> None:
    tensor, stored = read.piece.tensor, read.source.dtype
    if not cast_array(items, stored, _place(read, buffer), tensor.dtype):
        raise UnsupportedValueError(f"{tensor.key}: a finite {stored.name} value is too large for {tensor.dtype.name}")
