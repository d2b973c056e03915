"""Streams a checkpoint's tensors into files of an export: a window is read, verified, converted, written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..core.buffers import Buffers
from ..core.dtypes import cast_array
from ..core.memory import Bytes1D
from ..core.threads import run_all
from ..errors import UnsupportedValueError
from ..files.metadata import Metadata
from ..folder.boxes import BoxReader
from ..storage.base import Storage, WritableFile
from .plan import ExportFile, ExportPiece, ExportWindow, cut_in_windows

__all__ = ["write_files"]


def write_files(
    source: Storage,
    metadata: Metadata,
    target: Storage,
    files: Sequence[ExportFile],
    threads: int,
    check: Callable[[], None],
    progress: Callable[[int], None],
) -> None:
    """Write files and make them durable, in memory of a few windows.

    Args:
        source: The checkpoint's folder.
        metadata: What it holds.
        target: Where to; the names must be free.
        files: What to write.
        threads: How many threads read and write.
        check: Called now and then; may raise to stop.
        progress: Told how many bytes were written, as they are.

    Raises:
        CheckpointCorruptedError: a block is not what was written, or a file is missing.
        UnsupportedValueError: a finite value cannot be held by the element type that it is converted to.
        OSError: reading or writing failed.
    """
    cut = [cut_in_windows(file) for file in files]
    pieces = [piece for windows in cut for window in windows for piece in window.pieces]
    buffers = Buffers(threads)
    with BoxReader(source, metadata, [p.tensor.row for p in pieces], [p.box for p in pieces]) as reader:
        row = 0
        for file, windows in zip(files, cut, strict=True):
            out = target.create(file.name)
            try:
                run_all(_tasks(windows, row, reader, out, buffers, progress), threads, check)
                out.sync()
            finally:
                out.close()
            row += sum(len(window.pieces) for window in windows)


def _tasks(
    windows: Sequence[ExportWindow],
    row: int,
    reader: BoxReader,
    out: WritableFile,
    buffers: Buffers,
    progress: Callable[[int], None],
) -> Iterator[Callable[[], None]]:
    for window in windows:
        yield functools.partial(_write, window, range(row, row + len(window.pieces)), reader, out, buffers, progress)
        row += len(window.pieces)


def _write(
    window: ExportWindow,
    rows: range,
    reader: BoxReader,
    out: WritableFile,
    buffers: Buffers,
    progress: Callable[[int], None],
) -> None:
    with buffers.borrow(window.nbytes) as buffer:
        for start, data in window.known:
            buffer[start : start + len(data)] = np.frombuffer(data, np.uint8)
        targets = [_target(piece, buffer) for piece in window.pieces]
        reader.read(rows, targets)
        for piece, items in zip(window.pieces, targets, strict=True):
            if piece.tensor.dtype != piece.tensor.stored:
                _convert(piece, items, buffer)
        out.write(buffer, window.start)
    progress(window.nbytes)


def _target(piece: ExportPiece, buffer: Bytes1D) -> np.ndarray:
    """Where to read a piece: its place in the window, or, if it is to be converted, memory of its own."""
    if piece.tensor.dtype != piece.tensor.stored:
        return np.empty(piece.box.shape, piece.tensor.stored.raw)
    return buffer[piece.start : piece.stop].view(piece.tensor.dtype.raw).reshape(piece.box.shape)


def _convert(piece: ExportPiece, items: np.ndarray, buffer: Bytes1D) -> None:
    tensor = piece.tensor
    place = buffer[piece.start : piece.stop].view(tensor.dtype.raw).reshape(piece.box.shape)
    if not cast_array(items, tensor.stored, place, tensor.dtype):
        raise UnsupportedValueError(
            f"{tensor.key}: a finite {tensor.stored.name} value is too large for {tensor.dtype.name}"
        )
