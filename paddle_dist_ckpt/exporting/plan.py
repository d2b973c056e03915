"""What goes where in the files of an export: pure planning, the same on every rank."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.box import Box, cut_flat_range
from ..core.dtypes import DType
from ..core.shards import Kind
from ..files.datafile import DataFileInfo, FileTable

__all__ = [
    "CONVERTED_BYTES",
    "WINDOW_BYTES",
    "ExportFile",
    "ExportPiece",
    "ExportTensor",
    "ExportWindow",
    "OwnHeader",
    "cut_in_windows",
    "divide_files",
    "fill_files",
]

WINDOW_BYTES = 16 << 20  # large beside the blocks at its edges, which are read twice
CONVERTED_BYTES = 4 << 20  # as stored; of what is converted there are several copies for a moment
_PAGE = 4096  # windows start at pages, if they can, so that they can be written past the page cache


@dataclass(frozen=True, slots=True, eq=False)
class ExportTensor:
    """A whole tensor of a checkpoint, or what else is stored like one, as it is written to a file.

    Attributes:
        row: Its place in the checkpoint's table.
        path: Its path in the nested state_dict that is exported.
        key: Its flat key there.
        shape: Its shape.
        stored: Its element type in the checkpoint.
        dtype: Its element type in the file.
        name: The framework's variable name, if it is known.
        kind: What it is.
        data: Its bytes, if they are not to be read from the checkpoint.
    """

    row: int
    path: str
    key: str
    shape: tuple[int, ...]
    stored: DType
    dtype: DType
    name: str | None = None
    kind: Kind = Kind.TENSOR
    data: bytes | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes it has in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_converted(self) -> bool:
        """Whether its items are converted on the way."""
        return self.dtype != self.stored


@dataclass(frozen=True, slots=True, eq=False)
class OwnHeader:
    """What a file of this library's own format has in front of its tensors: digests of them, which are not known yet.

    Attributes:
        table: Its entries.
        info: What it says of itself.
        size: The size of the whole file in bytes.
    """

    table: FileTable
    info: DataFileInfo
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class ExportFile:
    """A file: bytes that are known from the start, and tensors between them, one behind the other.

    Attributes:
        name: Its name in the folder.
        parts: What it is made of, in order: bytes, or a tensor as contiguous items in row-major order.
        own: For a file of this library's own format its header, which is not among the parts.
    """

    name: str
    parts: Sequence[bytes | ExportTensor]
    own: OwnHeader | None = None

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        if self.own is not None:
            return self.own.size
        return sum(part.nbytes if isinstance(part, ExportTensor) else len(part) for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class ExportPiece:
    """A box of a tensor that stands at one stretch of bytes of a window.

    Attributes:
        start: Where, counted from the window's first byte.
        tensor: The tensor.
        box: Which part of it.
    """

    start: int
    tensor: ExportTensor
    box: Box

    @property
    def stored_bytes(self) -> int:
        """How many bytes it has in the checkpoint."""
        return self.box.size * self.tensor.stored.itemsize

    @property
    def stop(self) -> int:
        """Where its bytes end."""
        return self.start + self.box.size * self.tensor.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class ExportWindow:
    """Consecutive bytes of a file.

    Attributes:
        start: The number of its first byte in the file.
        nbytes: How many there are.
        known: Bytes that are known, with where they start in the window.
        pieces: Parts of tensors.
    """

    start: int
    nbytes: int
    known: list[tuple[int, bytes]]
    pieces: list[ExportPiece]


def cut_in_windows(file: ExportFile, most: int = WINDOW_BYTES) -> list[ExportWindow]:
    """A file as windows of at most ``most`` bytes, in order. No item of a tensor is cut in two.

    Args:
        file: The file.
        most: A multiple of a page, and more than an item has.
    """
    windows = [ExportWindow(0, 0, [], [])]
    at, limit = 0, most
    for part in file.parts:
        size, item = (part.nbytes, part.dtype.itemsize) if isinstance(part, ExportTensor) else (len(part), 1)
        done = 0
        while done < size:
            take = min(size - done, limit - at) // item * item
            if not take:
                windows.append(ExportWindow(at, 0, [], []))
                limit = (at + most) // _PAGE * _PAGE
                limit = limit if limit - at >= item else at + most
                continue
            windows[-1] = _with(windows[-1], part, range(done, done + take))
            done, at = done + take, at + take
    return windows if at else []


def _with(window: ExportWindow, part: bytes | ExportTensor, span: range) -> ExportWindow:
    """A window with some more bytes behind those that it has: a span of the bytes of a part."""
    start = window.nbytes
    if isinstance(part, ExportTensor):
        item = part.dtype.itemsize
        most = len(span) if not part.is_converted else CONVERTED_BYTES // part.stored.itemsize * item
        for low in range(span.start, span.stop, most):
            for box in cut_flat_range(part.shape, low // item, min(low + most, span.stop) // item):
                window.pieces.append(ExportPiece(start, part, box))
                start = window.pieces[-1].stop
    else:
        window.known.append((start, part[span.start : span.stop]))
    return replace(window, nbytes=window.nbytes + len(span))


def fill_files(tensors: Sequence[ExportTensor], most: int) -> list[list[ExportTensor]]:
    """Tensors, in their order, in groups of at most ``most`` bytes; one that is larger is a group of its own.

    Returns:
        The groups; one, which is empty, if there are no tensors.
    """
    groups: list[list[ExportTensor]] = [[]]
    left = most
    for tensor in tensors:
        if tensor.nbytes > left and groups[-1]:
            groups.append([])
            left = most
        groups[-1].append(tensor)
        left -= tensor.nbytes
    return groups


def divide_files(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Which files each of so many ranks writes: the largest first, each to the one that has the fewest bytes so far."""
    heap = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for file in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, rank = heapq.heappop(heap)
        shares[rank].append(file)
        heapq.heappush(heap, (load + sizes[file], rank))
    return [sorted(share) for share in shares]
