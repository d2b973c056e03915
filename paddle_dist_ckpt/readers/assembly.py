"""Puts a catalog together from what was found in files, none of which is believed before it has been checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from ..core.box import whole
from ..core.dtypes import DType
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..storage.base import Storage
from ..tree.paths import Containers, Part, containers_of, format_path, parse_path
from .budget import Budget
from .catalog import Catalog, Piece, StoredFile, StoredTensor
from .checks import AtPath, check_name, check_shape, first_overlap, is_text, shown, text_of
from .orders import ArrayPart, LyingArray, Scattered, parts_in_order

__all__ = ["Assembly"]

_MOST_PARTS = 64
_MOST_CHARACTERS = 4096  # of a path
_CHARACTERS_OF_STEP = 8  # of a reason
_CHARACTERS_OF_LONGER = 4  # of a path of which signs are written as two
_STEPS_OF_LEAF, _STEPS_OF_PIECE = 64, 12
_STEPS_OF_SHAPE, _STEPS_OF_DIMENSION = 60, 14  # of a tensor of a shape that none before it has; it is cut as none is
_FEW_DIMENSIONS, _STEPS_OF_BOX = 4, 3  # of one piece of several, for each dimension beyond a few
_INT64 = range(-(2**63), 2**63)


class Assembly:
    """The files, tensors and values of one catalog.

    Args:
        storage: The folder.
        names: The names in it that may belong to the checkpoint.
        budget: What may be done to read it.

    Attributes:
        files: The files that tensors may lie in.
    """

    def __init__(self, storage: Storage, names: Collection[str], budget: Budget) -> None:
        self.files: list[StoredFile] = []
        self._storage, self._names, self._budget = storage, set(names), budget
        self._numbers: dict[str, int] = {}
        self._tensors: list[StoredTensor] = []
        self._values: list[tuple[tuple[Part, ...], Any]] = []
        self._left_out: list[tuple[tuple[Part, ...], str]] = []
        self._lost: list[tuple[Part, ...]] = []
        # As texts, whose hashes nobody knows: tuples of integers can be made to have one hash, all of them.
        self._leaves: set[str] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}

    def file(self, name: object, where: object) -> int:
        """The number of a file that ``where`` speaks of, which is text or becomes text.

        Raises:
            CheckpointCorruptedError: there is none of that name, or it is no plain name.
        """
        if not isinstance(name, str) or name not in self._numbers:
            checked = check_name(name, self._names, where)
            try:
                size = self._storage.size(checked)
            except FileNotFoundError as error:
                raise CheckpointCorruptedError(f"{where} names {shown(checked)}, which is missing") from error
            except IsADirectoryError as error:
                raise CheckpointCorruptedError(f"{where} names {shown(checked)}, which is no file") from error
            self._numbers[checked] = len(self.files)
            self.files.append(StoredFile(checked, size))
            return self._numbers[checked]
        return self._numbers[name]

    def add_tensor(
        self,
        where: str,
        path: tuple[Part, ...],
        dtype: DType,
        shape: Sequence[int],
        name: str | None,
        parts: Sequence[ArrayPart],
        offsets: list[tuple[int, ...]] | None = None,
    ) -> None:
        """Add a tensor. Parts without elements are left out, and of those of one box all but the first.

        If it lies in too many pieces (:class:`.Scattered`), the tensor is left out.

        Args:
            where: The file that speaks of it.
            path: Its path.
            dtype: Its element type.
            shape: Its global shape.
            name: The framework's name of the variable.
            parts: The arrays that it is made of.
            offsets: See :class:`StoredTensor`; where the parts start, if it is None and their elements lie in another
                order than C's.

        Raises:
            CheckpointCorruptedError: parts are not in their file or in the tensor, or overlap; there is something else
                at its path.
            UnsupportedValueError: its path or its shape is one that no tensor can have.
        """
        entry = AtPath(where, path)
        self._add_leaf(entry)
        for n in shape:
            if type(n) is not int or n < 0:
                raise CheckpointCorruptedError(f"{entry} has the shape {shown(list(shape))}")
        check_shape(shape, dtype.itemsize, entry)
        if name is not None and not is_text(name):
            raise UnsupportedValueError(f"{entry} has a variable's name that is no text")
        try:
            pieces = [
                piece
                for part in parts
                for piece in parts_in_order(AtPath(self.files[part.file].name, path), part, self._budget)
                if self._check_piece(entry, shape, dtype.itemsize, piece)
            ]
        except Scattered as error:
            self._left_out.append((path, str(error)))
            return
        if len(pieces) > 1:
            self._budget.spend(_STEPS_OF_BOX * len(pieces) * max(0, len(shape) - _FEW_DIMENSIONS), entry)
            found: dict[str, Piece] = {}  # by boxes as texts, whose hashes nobody knows
            for piece in pieces:
                found.setdefault(str(piece.box), piece)
            pieces = sorted(found.values())
            overlap = first_overlap([piece.box for piece in pieces], lambda steps: self._budget.spend(steps, entry))
            if overlap is not None:
                raise CheckpointCorruptedError(f"{entry} has the parts {overlap[0]} and {overlap[1]}, which overlap")
        if offsets is None and any(part.array.axes is not None for part in parts):
            offsets = [offset for offset, _ in groupby(sorted(part.box.offset for part in parts))]
        self._tensors.append(StoredTensor(path, dtype, self._shared(tuple(shape), entry), name, pieces, offsets))

    def add_whole(self, path: tuple[Part, ...], file: int, array: LyingArray, name: str | None = None) -> None:
        """Add a tensor that is one array of a file. Raises what :meth:`add_tensor` raises."""
        part = ArrayPart(whole(array.shape), file, array)
        self.add_tensor(self.files[file].name, path, array.dtype, array.shape, name, [part])

    def add_value(self, where: str, path: tuple[Part, ...], value: Any) -> None:
        """Add a value.

        Raises:
            CheckpointCorruptedError: there is something else at its path.
            UnsupportedValueError: its path is one that no value can have.
        """
        self._add_leaf(AtPath(where, path))
        self._values.append((path, value))

    def leave_out(self, where: str, path: tuple[Part, ...], reason: str, lost: bool = False) -> None:
        """Note what cannot be read, or has been lost, at a path. Raises what :meth:`add_value` raises."""
        self._add_leaf(AtPath(where, path))
        self._budget.spend(len(reason) // _CHARACTERS_OF_STEP, where)
        self._left_out.append((path, reason))
        if lost:
            self._lost.append(path)

    def catalog(self, kind: str, unique_id: int, world_size: int, version: str | None = None) -> Catalog:
        """All that was added.

        Raises:
            CheckpointCorruptedError: a path leads through another, or one takes for a list what is a dict to another.
        """
        for text in self._leaves & containers_of(self._leaves):
            where = f"{self._storage.location}: {text_of(parse_path(text))}"
            raise CheckpointCorruptedError(f"{where} is an entry, and has entries below it")
        containers = Containers.of(self._leaves)
        if containers.too_long:
            raise CheckpointCorruptedError(f"{self._storage.location}: lists with far more places than entries")
        for text in containers.mixed:
            where = f"{self._storage.location}: {text_of(parse_path(text)) if text else 'the whole'}"
            raise CheckpointCorruptedError(f"{where} has entries below it of a list and of a dict")
        return Catalog(
            format=kind,
            unique_id=unique_id,
            world_size=world_size,
            files=self.files,
            tensors=self._tensors,
            values=self._values,
            version=version,
            left_out=self._left_out,
            lost=self._lost,
        )

    def _add_leaf(self, entry: AtPath) -> None:
        path = entry.path
        self._budget.spend(_STEPS_OF_LEAF + 2 * len(path), entry)
        if not 0 < len(path) <= _MOST_PARTS:
            raise UnsupportedValueError(f"{entry} is {len(path)} levels deep; 1 to {_MOST_PARTS} are possible")
        if sum([len(part) for part in path if isinstance(part, str)]) > _MOST_CHARACTERS:
            raise UnsupportedValueError(f"{entry} is a path of more than {_MOST_CHARACTERS} characters")
        for part in path:
            if isinstance(part, str):
                if not part.isascii() and not is_text(part):
                    raise UnsupportedValueError(f"{entry} has a key that is no text")
            elif type(part) is int and part not in _INT64:
                raise UnsupportedValueError(f"{entry} has a key beyond 64 bits")
        text = format_path(path)
        if "\\" in text:  # there is a flat key beside the plain one, in which dots are two signs as well
            self._budget.spend(len(text), entry)
        elif "~" in text:
            self._budget.spend(len(text) // _CHARACTERS_OF_LONGER, entry)
        if text in self._leaves:
            raise CheckpointCorruptedError(f"{entry} is there twice")
        self._leaves.add(text)

    def _shared(self, shape: tuple[int, ...], entry: AtPath) -> tuple[int, ...]:
        """One object for all equal shapes."""
        text = str(shape)  # as the paths
        if text not in self._shapes:
            self._budget.spend(_STEPS_OF_SHAPE + _STEPS_OF_DIMENSION * len(shape), entry)
            self._shapes[text] = shape
        return self._shapes[text]

    def _check_piece(self, entry: AtPath, shape: Sequence[int], itemsize: int, piece: Piece) -> int:
        """Refuse a piece that is not in the tensor or in its file; returns how many bytes it has."""
        self._budget.spend(_STEPS_OF_PIECE + 2 * len(shape), entry)
        (offset, extent), number, position = piece
        if not len(offset) == len(extent) == len(shape):
            raise CheckpointCorruptedError(f"{entry} has {len(shape)} dimensions, and a part of {len(extent)}")
        for o, n, most in zip(offset, extent, shape, strict=True):
            if o < 0 or n < 0 or o + n > most:
                raise CheckpointCorruptedError(
                    f"{entry} has the part {shown(str(piece.box))}, outside of its shape {shown(list(shape))}"
                )
        nbytes = math.prod(extent) * itemsize
        if nbytes and not 0 <= position <= self.files[number].size - nbytes:
            raise CheckpointCorruptedError(
                f"{entry} has {nbytes} bytes at {position} of {self.files[number].name}, which has "
                f"{self.files[number].size}"
            )
        return nbytes
