"""Streams a checkpoint's tensors into files of an export: a window is read, verified, converted, written."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

import numpy as np

from ..core.box import Box, flat_range
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

_TOGETHER = 1 << 13  # pieces for which there are objects at a time
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
    rows, boxes, shared = array("q"), list[Box](), dict[Box, Box]()
    cut: list[list[_Window]] = []
    with no_collections():
        for file in files:
            cut.append([])
            for window in cut_in_windows(file):
                cut[-1].append(_Window(window, len(rows)))
                for read in cut[-1][-1].reads():
                    rows.append(read.source.row)
                    boxes.append(shared.setdefault(read.source.box, read.source.box))  # of very many, most are alike
    buffers = Buffers(threads)
    written: list[FileInfo] = []
    with BoxReader(source, metadata, rows, boxes) as reader:
        for file, windows in zip(files, cut, strict=True):
            content = _Content(windows, reader, buffers, progress)
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


class _Window(NamedTuple):
    """A window of a file, and the number of the first box that is read for it among the reader's."""

    window: ExportWindow
    first: int

    def reads(self) -> Iterator[_Read]:
        """What is read for it, in order."""
        pairs = ((piece, source) for piece in self.window.pieces for source in piece.sources())
        for number, (piece, source) in enumerate(pairs, self.first):
            yield _Read(number, piece, source)


class _Content:
    """The windows of a file, read from a checkpoint.

    Args:
        cut: The windows.
        reader: Reads what is stored in the checkpoint.
        buffers: One for each thread.
        progress: Told of holes that are not written, and by :meth:`tasks` of what is.

    Attributes:
        keeps_holes: Whether the file has zeros wherever nothing is written, so that holes need not be.
    """

    def __init__(
        self, cut: Sequence[_Window], reader: BoxReader, buffers: Buffers, progress: Callable[[int], None]
    ) -> None:
        self._cut, self._reader, self._buffers, self._progress = cut, reader, buffers, progress
        self.keeps_holes = False

    def tasks(self, out: WritableFile) -> Iterator[Callable[[], None]]:
        """Tasks that write it, one window each."""

        def write(window: _Window) -> None:
            with self._filled(window, None) as (start, data):
                write_window(out, data, start, self.keeps_holes)
            self._progress(len(data))

        for window in self._cut:
            yield functools.partial(write, window)

    def _is_hole(self, cut: _Window) -> bool:
        """Whether all of a window is zeros that are nowhere on the disk; they are zeros in any type."""
        return not any(cut.window.known) and all(self._reader.is_hole(read.number) for read in cut.reads())

    def windows(self, span: range, hashes: BlockHashes) -> Generator[Window, None, None]:
        """As :class:`FileSave` wants it: all windows, hashed."""
        for window in self._cut:
            yield self._filled(window, hashes)

    @contextmanager
    def _filled(self, cut: _Window, hashes: BlockHashes | None) -> Iterator[tuple[int, Bytes1D]]:
        """The bytes of a window, hashed if that is wanted; none for a hole that need not be written."""
        window = cut.window
        if self.keeps_holes and self._is_hole(cut):
            if hashes is not None:
                for piece in window.pieces:
                    for done in range(0, piece.nbytes, len(_ZEROS)):
                        hashes.add(piece.number, _start_of(piece) + done, _ZEROS[: piece.nbytes - done])
            self._progress(window.nbytes)
            yield window.start, np.zeros(0, np.uint8)
            return
        with self._buffers.borrow(window.nbytes) as buffer:
            for start, data in window.known:
                buffer[start : start + len(data)] = np.frombuffer(data, np.uint8)
            for reads in _some_at_a_time(cut.reads()):
                targets = [_target(read, buffer) for read in reads]
                self._reader.read([read.number for read in reads], targets)
                for read, items in zip(reads, targets, strict=True):
                    if read.is_converted:
                        _convert(read, items, buffer)
                del targets
            if hashes is not None:
                for piece in window.pieces:
                    hashes.add(piece.number, _start_of(piece), buffer[piece.start : piece.stop].data)
            yield window.start, buffer


def _some_at_a_time(reads: Iterator[_Read]) -> Iterator[list[_Read]]:
    """So few at a time that what there is of each takes little memory, and so do copies of what is converted."""
    some: list[_Read] = []
    nbytes = 0
    for read in reads:
        size = read.source.box.size * read.source.dtype.itemsize if read.is_converted else 0
        if len(some) == _TOGETHER or (some and nbytes + size > CONVERTED_BYTES):
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
