"""What goes where in the files of an export: pure planning, the same on every rank."""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

import msgspec

from ..core.box import Box, cut_flat_range, whole
from ..core.cached import cached_property
from ..core.dtypes import DType
from ..core.parts import NEW, Part
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
    "PieceSource",
    "StoredPart",
    "cut_in_windows",
    "divide_files",
    "fill_files",
]

WINDOW_BYTES = 16 << 20  # large beside the blocks at its edges, which are read twice
_TURNED_BYTES = 256 << 20  # of a window of a transposed tensor, for which all of its blocks may have to be read
CONVERTED_BYTES = 4 << 20  # as stored; of what is converted there are several copies for a moment
_PAGE = 4096  # windows start at pages, if they can, so that they can be written past the page cache


class StoredPart(msgspec.Struct, frozen=True, gc=False):
    """A box of a stored tensor that is a box of one of the export.

    Attributes:
        row: The stored tensor's place in the checkpoint's table.
        dtype: Its element type.
        part: The boxes; None if both are all of the tensor, as it is.
    """

    row: int
    dtype: DType
    part: Part | None = None


class ExportTensor(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A whole tensor, or what else is stored like one, as it is written to a file. There may be very many.

    Attributes:
        path: Its path in the nested state_dict that is exported.
        key: Its flat key there.
        shape: Its shape.
        dtype: Its element type in the file.
        made_of: All of one tensor of the checkpoint, or what a recipe makes it of.
        name: The framework's variable name, if it is known.
        kind: What it is.
        data: Its bytes, if they are not to be read from the checkpoint.
    """

    path: str
    key: str
    shape: tuple[int, ...]
    dtype: DType
    made_of: StoredPart | Sequence[StoredPart] = ()
    name: str | None = None
    kind: Kind = Kind.TENSOR
    data: bytes | None = None

    @property
    def parts(self) -> Sequence[StoredPart]:
        """The parts that it is made of; none if its bytes are known."""
        return (self.made_of,) if isinstance(self.made_of, StoredPart) else self.made_of

    @property
    def nbytes(self) -> int:
        """How many bytes it has in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_turned(self) -> bool:
        """Whether rows of it are columns of what is stored."""
        found = ([axis for axis in one.part.axes if axis != NEW] for one in self.parts if one.part is not None)
        return any(axes != sorted(axes) for axes in found)


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


@dataclass(frozen=True, eq=False)
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

    @cached_property
    def nbytes(self) -> int:
        """Its size in bytes."""
        if self.own is not None:
            return self.own.size
        return sum(map(_size_of, self.parts))


class PieceSource(NamedTuple):
    """What is read for a piece of a tensor.

    Attributes:
        row: The stored tensor's place in the checkpoint's table.
        dtype: Its element type.
        box: What is read of it.
        part: Where that goes in the piece, counted from the piece's corner; None if it is all of it, as it is.
    """

    row: int
    dtype: DType
    box: Box
    part: Part | None


class ExportPiece(NamedTuple):
    """A box of a tensor that stands at one stretch of bytes of a window.

    Attributes:
        start: Where, counted from the window's first byte.
        tensor: The tensor.
        number: Its number among the parts of the file.
        box: Which part of it.
    """

    start: int
    tensor: ExportTensor
    number: int
    box: Box

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.box.size * self.tensor.dtype.itemsize

    @property
    def stop(self) -> int:
        """Where its bytes end."""
        return self.start + self.nbytes

    def sources(self) -> Iterable[PieceSource]:
        """What it is read from; what is converted in boxes of some megabytes."""
        stored = self.tensor.made_of
        if isinstance(stored, StoredPart) and stored.part is None and stored.dtype is self.tensor.dtype:
            return (PieceSource(stored.row, stored.dtype, self.box, None),)  # as of nearly all
        return self._sources()

    def _sources(self) -> Iterator[PieceSource]:
        for stored in self.tensor.parts:
            row, dtype, part = stored.row, stored.dtype, stored.part
            box, mine = self.box, None
            if part is not None:
                mine = part.within(self.box)
                if mine is None:
                    continue
                box, mine = mine.box, mine._replace(place=mine.place.relative_to(self.box.offset))
            most = CONVERTED_BYTES // dtype.itemsize
            if dtype is self.tensor.dtype or box.size <= most:
                yield PieceSource(row, dtype, box, mine)
                continue
            mine = mine or Part(self.tensor.key, box, tuple(range(len(box.shape))), whole(box.shape))
            for start in range(0, box.size, most):
                for some in cut_flat_range(box.shape, start, min(start + most, box.size)):
                    there = Box(tuple(map(add, some.offset, box.offset)), some.shape)
                    yield PieceSource(row, dtype, there, mine.of_box(there))


class ExportWindow(NamedTuple):
    """Consecutive bytes of a file. There are objects for what is in it only while somebody looks at them.

    Attributes:
        parts: What the file is made of.
        sizes: How many bytes each of the parts has.
        start: The number of its first byte in the file.
        stop: Where it ends.
        first: The number of the part that it begins with.
        skipped: How many bytes of that part stand before it.
    """

    parts: Sequence[bytes | ExportTensor]
    sizes: Sequence[int]
    start: int
    stop: int
    first: int
    skipped: int

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.stop - self.start

    @property
    def known(self) -> Iterator[tuple[int, memoryview]]:
        """Bytes that are known, with where they start in the window."""
        for at, number, start, stop in self._spans():
            part = self.parts[number]
            data = part.data if isinstance(part, ExportTensor) else part
            if data is not None:
                yield at, memoryview(data)[start:stop]

    @property
    def pieces(self) -> Iterator[ExportPiece]:
        """Parts of tensors."""
        everything = whole(())
        for at, number, start, stop in self._spans():
            part = self.parts[number]
            if isinstance(part, ExportTensor):
                if stop - start == self.sizes[number]:
                    if part.shape != everything.shape:  # mostly it is that of the one before
                        everything = whole(part.shape)
                    yield ExportPiece(at, part, number, everything)
                    continue
                item = part.dtype.itemsize
                for box in cut_flat_range(part.shape, start // item, stop // item):
                    yield ExportPiece(at, part, number, box)
                    at += box.size * item

    def _spans(self) -> Iterator[tuple[int, int, int, int]]:
        """Where in the window bytes of a part stand, the part's number, and from where to where in it they are."""
        at, skipped, number, nbytes, sizes = 0, self.skipped, self.first, self.nbytes, self.sizes
        while at < nbytes:
            stop = min(sizes[number], skipped + nbytes - at)
            if stop > skipped:
                yield at, number, skipped, stop
            at, skipped, number = at + stop - skipped, 0, number + 1


def _size_of(part: bytes | ExportTensor) -> int:
    return part.nbytes if isinstance(part, ExportTensor) else len(part)


def cut_in_windows(file: ExportFile, most: int = WINDOW_BYTES, most_turned: int = _TURNED_BYTES) -> list[ExportWindow]:
    """A file as windows, in order. No item of a tensor is cut in two.

    Args:
        file: The file.
        most: The most bytes of a window: a multiple of a page, and more than an item has.
        most_turned: The same for those of a transposed tensor, if it has more than there is room for in a window.
    """
    sizes = array("q", map(_size_of, file.parts))
    edges = [(0, 0, 0)]  # byte of the file, part, byte of the part
    at, limit = 0, most
    for number, part in enumerate(file.parts):
        size, item = sizes[number], part.dtype.itemsize if isinstance(part, ExportTensor) else 1
        has_own = isinstance(part, ExportTensor) and size > limit - at and part.is_turned
        room = most_turned if has_own else most
        limit = at if has_own else limit
        done = 0
        while done < size:
            take = min(size - done, limit - at) // item * item
            if not take:
                edges.append((at, number, done))
                limit = (at + room) // _PAGE * _PAGE
                limit = limit if limit - at >= item else at + room
                continue
            done, at = done + take, at + take
        limit = at if has_own else limit
    windows = [
        ExportWindow(file.parts, sizes, start, stop, first, skipped)
        for (start, first, skipped), (stop, _, _) in itertools.pairwise([*edges, (at, 0, 0)])
    ]
    return [window for window in windows if window.nbytes]


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
