"""Reads what ranks of a static program save one by one, with the distributed attributes that say what each has.

    prefix_dist0.pdparams, prefix_dist0.pdopt, prefix_dist0.pdattr, prefix_dist1.pdparams, ...
    model_state_rank0.pdmodel, dist_attr_rank0.pdattr, model_state_rank1.pdmodel, ...

The first are those of `Engine.save` and `save_for_auto_inference`, the others those of `save_distributed_checkpoint`.
A `.pdattr` has for each variable the mesh that it is on (`process_shape`, and the ranks in `process_group` in row-major
order) and in `dims_mapping` for each of its dimensions along which dimension of the mesh it is cut; -1 if along none.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ..core.box import Box
from ..errors import CheckpointCorruptedError, CheckpointNotFoundError, UnsupportedValueError
from ..storage.base import Storage
from ..tree.paths import format_path
from .assembly import Assembly
from .budget import Budget
from .catalog import Catalog
from .checks import counts_of, shown, text_of
from .numpy_pickles import PickledArray
from .orders import ArrayPart, LyingArray
from .pdparams import PickledState
from .pickled_values import ENDURED
from .window import WindowedFile

__all__ = ["PaddleStaticReader"]

_OF_RANK = re.compile(r"(.*)_dist(0|[1-9][0-9]{0,8})\.(pdattr|pdparams|pdopt)", re.DOTALL)
_OF_PROGRAM = re.compile(r"(?:model_state|dist_attr)_rank(0|[1-9][0-9]{0,8})\.(pdattr|pdmodel)")
_PROGRAM = ""  # stands for the files of save_distributed_checkpoint, which have no prefix
_ATTRIBUTES = "pdattr"
_MOST_DIMENSIONS = 32
_STEPS_OF_NAME, _STEPS_OF_DIMENSION = 10, 3  # of a variable, and of one that is cut as no other in its file
_MODEL, _WORLD = "model", "world_size"  # the parts that these files have


class PaddleStaticReader:
    """Reads the files of all ranks as one checkpoint, in which a variable that is cut over ranks is one tensor.

    Paths are ``(name of the variable,)``. The ids are the numbers of the prefixes in alphabetical order.
    """

    format = "paddle_static"
    title = "files of a static program's ranks (_dist0.pdparams, .pdopt, .pdattr)"

    def found(self, names: Collection[str]) -> list[int]:
        return list(range(len(self._groups(names))))

    def read(self, storage: Storage, names: Collection[str], unique_id: int) -> Catalog:
        groups = self._groups(names)
        if not 0 <= unique_id < len(groups):
            raise CheckpointNotFoundError(f"{storage.location} has no files of a static program of the id {unique_id}")
        prefix = sorted(groups)[unique_id]
        budget = Budget()
        variables = _Variables(Assembly(storage, names, budget), is_program=prefix == _PROGRAM)
        for rank, kind in sorted(groups[prefix]):
            with WindowedFile(storage, groups[prefix][rank, kind], budget) as file:
                if kind == _ATTRIBUTES:
                    variables.take_attributes(file)
                else:
                    variables.take_data(file, rank)
        world_size = 1 + max(rank for rank, _ in groups[prefix])
        return variables.assembled().catalog(self.format, unique_id, world_size)

    @staticmethod
    def _groups(names: Collection[str]) -> dict[str, dict[tuple[int, str], str]]:
        """The files by their prefix, and by rank and kind."""
        groups: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
        for name in names:
            if match := _OF_RANK.fullmatch(name):
                groups[match[1] + "_dist"][int(match[2]), match[3]] = name
            elif match := _OF_PROGRAM.fullmatch(name):
                groups[_PROGRAM][int(match[1]), match[2]] = name
        return {
            prefix: files
            for prefix, files in groups.items()
            if {kind == _ATTRIBUTES for _, kind in files} == {True, False}
        }


class _Cut(NamedTuple):
    """How a variable is cut.

    Attributes:
        mesh: The shape of its mesh.
        places: Where in the mesh, in row-major order, each rank is.
        along: For each of the variable's dimensions those of the mesh along which it is cut, the outer one first.
    """

    mesh: tuple[int, ...]
    places: Mapping[int, int]
    along: tuple[tuple[int, ...], ...]

    def part(self, rank: int) -> tuple[int, ...]:
        """Which part along each of the variable's dimensions a rank has."""
        coordinates: list[int] = []
        at = self.places[rank]
        for size in reversed(self.mesh):
            at, coordinate = divmod(at, size)
            coordinates.insert(0, coordinate)
        numbers = []
        for dimensions in self.along:
            number = 0
            for m in dimensions:
                number = number * self.mesh[m] + coordinates[m]
            numbers.append(number)
        return tuple(numbers)

    def counts(self) -> tuple[int, ...]:
        """Into how many parts each of the variable's dimensions is cut."""
        return tuple(math.prod(self.mesh[m] for m in dimensions) for dimensions in self.along)


class _Local(NamedTuple):
    """What one rank has of a variable, and in which file."""

    array: LyingArray
    file: int


class _Variables:
    """The variables of all ranks."""

    def __init__(self, assembly: Assembly, is_program: bool) -> None:
        self._assembly, self._is_program = assembly, is_program
        self._cuts: dict[str, _Cut] = {}
        # By texts, whose hashes nobody knows: tuples of integers can be made to have one hash, all of them.
        self._places: dict[str, Mapping[int, int]] = {}
        self._values: set[str] = set()
        self._groups: dict[int, Mapping[int, int]] = {}  # the same by the objects of one file
        self._locals: dict[str, dict[int, _Local]] = defaultdict(dict)

    def take_attributes(self, file: WindowedFile) -> None:
        """Read a `.pdattr`. Ranks say the same of a variable that they share, so who says it first is believed."""
        told = PickledState(file).tree
        if self._is_program:
            told = told.get(_MODEL, {})
        if type(told) is not dict:
            raise CheckpointCorruptedError(f"{file.name} has no dict of distributed attributes")
        self._groups.clear()
        cuts: dict[int, _Cut] = {}  # by the objects of the file
        for name, attributes in told.items():
            file.budget.spend(_STEPS_OF_NAME, file.name)
            if name in self._cuts:
                continue
            try:
                if id(attributes) not in cuts:
                    cuts[id(attributes)] = self._cut(attributes, file)
                self._cuts[name] = cuts[id(attributes)]
            except ENDURED as error:
                raise CheckpointCorruptedError(
                    f"{file.name}: the distributed attributes of {shown(name)} are damaged ({str(error)[:200]})"
                ) from error

    def take_data(self, file: WindowedFile, rank: int) -> None:
        """Read what a rank has: variables, and values, of which the first rank that has one is believed."""
        state = PickledState(file)
        state.names()
        number = self._assembly.file(file.name, file.name)
        for path, value, _ in state.leaves():
            place = path[1:] if self._is_program and path[:1] == (_MODEL,) else path
            if isinstance(value, PickledArray) and len(place) == 1 and isinstance(place[0], str):
                self._locals[place[0]].setdefault(rank, _Local(state.opened(path, value), number))
            elif isinstance(value, PickledArray):
                raise UnsupportedValueError(f"{file.name}: {text_of(path)} is an array, but no variable")
            elif (
                place
                and not (self._is_program and place == (_WORLD,))
                and (text := format_path(place)) not in self._values
            ):
                self._values.add(text)
                self._assembly.add_value(file.name, place, value)

    def assembled(self) -> Assembly:
        """All variables, each as one tensor.

        Raises:
            CheckpointCorruptedError: what ranks have does not fit together, or a rank's part is missing.
        """
        for name, parts in self._locals.items():
            self._add(name, parts)
        return self._assembly

    def _cut(self, attributes: Any, file: WindowedFile) -> _Cut:
        """How a variable is cut. What is wrong with its attributes may be raised as any of ENDURED."""
        shape, group, mapping = (attributes[key] for key in ("process_shape", "process_group", "dims_mapping"))
        if max(len(shape), len(mapping)) > _MOST_DIMENSIONS:
            raise ValueError("more dimensions than there can be")
        file.budget.spend(_STEPS_OF_DIMENSION * (len(shape) + len(mapping)), file.name)
        mesh = counts_of(shape)
        if id(group) not in self._groups:  # which variables may share
            ranks = counts_of(group, len(group))
            text = str(ranks)
            if text not in self._places:
                self._places[text] = {rank: place for place, rank in enumerate(ranks)}
            self._groups[id(group)] = self._places[text]
        places = self._groups[id(group)]
        if math.prod(mesh) != len(group) or len(places) != len(group):
            raise ValueError(f"a mesh of {len(mesh)} dimensions that does not fit {len(group)} ranks")
        along = []
        for dimension in mapping:
            dimensions = () if dimension == -1 else [dimension] if type(dimension) is int else dimension
            if len(dimensions) > len(mesh):
                raise ValueError("more dimensions of the mesh than it has")
            along.append(counts_of(dimensions))
        used = [m for dimensions in along for m in dimensions]
        if len(set(used)) != len(used) or any(m >= len(mesh) for m in used):
            raise ValueError("a dimension of the mesh that is not there, or used twice")
        return _Cut(mesh, places, tuple(along))

    def _add(self, name: str, parts: Mapping[int, _Local]) -> None:
        first = next(iter(parts.values()))
        where = self._assembly.files[first.file].name
        cut = self._cuts.get(name)
        if cut is None or not any(cut.along):
            cut = _Cut((), dict.fromkeys(parts, 0), ((),) * len(first.array.shape))
        held = {rank: local for rank, local in parts.items() if rank in cut.places}
        if any(
            local.array.dtype != first.array.dtype or len(local.array.shape) != len(cut.along)
            for local in held.values()
        ):
            raise CheckpointCorruptedError(f"{where}: of {shown(name)} ranks have different types or dimensions")
        parts_held = {cut.part(rank) for rank in held}
        if len(parts_held) < math.prod(cut.counts()):
            lost = min(rank for rank in cut.places if cut.part(rank) not in parts_held)
            raise CheckpointCorruptedError(f"{where}: {shown(name)} lacks what rank {lost} had of it")
        entry = f"{where}: {shown(name)}"
        starts = self._starts(entry, cut, held)
        arrays = []
        for rank, local in held.items():
            offset = tuple(starts[d][number] for d, number in enumerate(cut.part(rank)))
            arrays.append(ArrayPart(Box(offset, local.array.shape), local.file, local.array))
        self._assembly.add_tensor(where, (name,), first.array.dtype, [ends[-1] for ends in starts], name, arrays)

    @staticmethod
    def _starts(where: str, cut: _Cut, held: Mapping[int, _Local]) -> list[list[int]]:
        """For each dimension where its parts start, and where the last one ends."""
        extents: list[dict[int, int]] = [{} for _ in cut.along]
        for rank, local in held.items():
            for d, number in enumerate(cut.part(rank)):
                if extents[d].setdefault(number, local.array.shape[d]) != local.array.shape[d]:
                    raise CheckpointCorruptedError(f"{where} has parts of different sizes along its dimension {d}")
        return [
            [0, *itertools.accumulate(extents[d][number] for number in range(count))]
            for d, count in enumerate(cut.counts())
        ]
