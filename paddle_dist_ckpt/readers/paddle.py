"""Reads checkpoints of Paddle's own `dist.save_state_dict`, of all versions since 2.6.

A checkpoint of number i is a file `i.metadata`, a pickle of Paddle's class Metadata, and for each rank r a data file
`r_i.distcp` (a pickled dict of arrays) or `r_i.safetensors`. Which shards there are, of what shape and type, is in
`state_dict_metadata`; in which file each lies in `storage_metadata`; where in the nested state_dict each tensor was in
`flat_mapping` (since 3.0).
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from ..core.box import Box
from ..core.dtypes import DTYPES, DType
from ..errors import CheckpointCorruptedError, CheckpointNotFoundError, UnsupportedValueError
from ..storage.base import Storage
from ..tree.paths import Part
from .assembly import Assembly
from .budget import Budget
from .catalog import Catalog
from .checks import AtPath, counts_of, shown
from .numpy_pickles import PickledArray
from .orders import ArrayPart, LyingArray
from .paddle_pickles import PADDLE, flat_parts, meant
from .pickled_values import ENDURED, Record, record_of
from .pickles import walk
from .safetensors_header import read_safetensors_header
from .window import WindowedFile, on_disk

__all__ = ["PaddleReader", "data_of_paddle"]

_METADATA = re.compile(r"(0|[1-9][0-9]{0,17})\.metadata")
_DATA = re.compile(r"(0|[1-9][0-9]{0,8})_(0|[1-9][0-9]{0,17})\.(?:distcp|safetensors)")
_NAMES = "StructuredToParameterName@@"
_ADVICE = (
    "Paddle leaves a .metadata that it finds, so a later save into the same folder may have left this key out, and its "
    "files are those that are here"
)
_UNKNOWN = (
    "does not speak of it; Paddle leaves a .metadata that it finds, so a later save into the same folder may have had "
    "more keys"
)
_FEW_CHARACTERS = 1 << 16
_STEPS_OF_SAME = 70  # of a shard's record that is referred to again
_STEPS_OF_SHARD, _STEPS_OF_PLACE, _STEPS_OF_PIECE = 12, 2, 5  # for each dimension more


def data_of_paddle(names: Collection[str]) -> set[str]:
    """Which of these names are those of data files with their metadata among the names."""
    ids = {match[1] for name in names if (match := _METADATA.fullmatch(name))}
    return {name for name in names if (match := _DATA.fullmatch(name)) and match[2] in ids}


class PaddleReader:
    """Reads Paddle's distributed checkpoints."""

    format = "paddle"
    title = "Paddle's distributed checkpoint"

    def found(self, names: Collection[str]) -> list[int]:
        with_metadata = {int(match[1]) for name in names if (match := _METADATA.fullmatch(name))}
        with_data = {int(match[2]) for name in names if (match := _DATA.fullmatch(name))}
        return sorted(with_metadata & with_data)

    def read(self, storage: Storage, names: Collection[str], unique_id: int) -> Catalog:
        if unique_id not in self.found(names):
            raise CheckpointNotFoundError(f"{storage.location} has no checkpoint of Paddle's with the id {unique_id}")
        data = [file for file in names if (match := _DATA.fullmatch(file)) and int(match[2]) == unique_id]
        name, budget = f"{unique_id}.metadata", Budget(functools.partial(on_disk, storage, data))
        try:
            described = _Described(name, *_walked(storage, name, budget), budget)
        except ENDURED as error:
            raise CheckpointCorruptedError(f"{name}: it is not as Paddle writes it ({str(error)[:200]})") from error
        ranks = [int(file.partition("_")[0]) for file in data]
        assembly = Assembly(storage, names, budget)
        described.add_to(assembly, storage)
        return assembly.catalog(self.format, unique_id, 1 + max(ranks))


class _Shard(NamedTuple):
    """A shard of a tensor as the metadata have it: its box, and which of the box's elements there are (None: all)."""

    offset: tuple[int, ...]
    shape: tuple[int, ...] | None
    elements: tuple[int, int] | None


class _Stored(NamedTuple):
    """A tensor of a data file, and the name of its variable."""

    array: LyingArray
    name: str | None


class _Described:
    """What the metadata say, tensor by tensor."""

    def __init__(self, name: str, metadata: Any, size: int, budget: Budget) -> None:
        """Read the unpickled object. What it lacks may be raised as any of ENDURED.

        Args:
            name: The file's name.
            metadata: What it holds.
            size: How many bytes it has. So many shards and parts of paths may be in it, each counted as often as it
                refers to it.
            budget: What may be done to read the checkpoint.
        """
        self._name, self._budget = name, budget
        # The shapes of the shards of each key, by offset and range of elements: as texts, whose hashes nobody knows.
        self._known: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._offsets: dict[str, dict[str, tuple[int, ...]]] = {}  # of the shards of each key, each once, by its text
        self._types: dict[str, str] = {}
        self._places: dict[str, list[tuple[_Shard, Any]]] = defaultdict(list)
        self._paths: dict[str, tuple[Part, ...]] = {}

        metadata = record_of(metadata, "Metadata")
        shards = _checked(metadata.get("state_dict_metadata"), dict)
        paths = _checked(metadata.get("flat_mapping") or {}, dict)
        if sum(len(parts) for told in (shards, paths) for parts in told.values()) > size:
            raise ValueError("it refers to more than it has")
        for key, parts in shards.items():
            key = _checked(key, str)
            for shard in _checked(parts, list):
                self._take_shard(key, shard)
        for index, file in _checked(metadata.get("storage_metadata"), dict).items():
            place = record_of(index, "LocalTensorIndex")
            self._spend(_STEPS_OF_PLACE, place.get("global_offset"))
            self._places[_checked(place.get("tensor_key"), str)].append((_shard_of(place), file))
        for key, path in paths.items():
            self._paths[key] = tuple(_checked(part, str) for part in _checked(path, tuple))
        if sum(len(str(part)) for path in self._paths.values() for part in path) > size + _FEW_CHARACTERS:
            raise ValueError("its paths refer to the same texts again and again")

    def _spend(self, steps: int, numbers: Any) -> None:
        self._budget.spend_on_dimensions(steps, len(numbers), self._name)

    def _take_shard(self, key: str, record: Any) -> None:
        shard = record_of(record, "LocalTensorMetadata")
        self._budget.spend_again(_STEPS_OF_SAME, record, self._name)
        self._spend(_STEPS_OF_SHARD, shard.get("global_offset"))
        offset, extent, elements = _shard_of(shard)
        if extent is None:
            raise ValueError("a shard without a shape")
        self._offsets.setdefault(key, {})[str(offset)] = offset
        self._known.setdefault((key, str((offset, elements))), {})[str(extent)] = extent
        if shard.get("global_shape") is not None:
            shape = counts_of(shard.get("global_shape"))
            self._spend(_STEPS_OF_SHARD, shape)
        else:  # what all shards reach
            before = self._shapes.get(key, (0,) * len(extent))
            ends = (o + n for o, n in zip(offset, extent, strict=True))
            shape = tuple(max(pair) for pair in zip(before, ends, strict=True))
        self._shapes[key] = shape
        if shard.get("dtype") is not None:
            self._types[key] = _checked(shard.get("dtype"), str)

    def add_to(self, assembly: Assembly, storage: Storage) -> None:
        """Look up all that is described in the data files."""
        files: dict[int, Mapping[str, _Stored]] = {}
        used: set[int] = set()  # files that have something of what is said of them
        lost: dict[str, int] = {}  # keys that none of their files has, with one of these
        for key, shape in self._shapes.items():
            where = AtPath(self._name, (key,))
            dtype, name = None, None
            parts: list[ArrayPart] = []
            lacking: int | None = None
            shard_of: dict[int, _Shard] = {}
            for shard, file in self._places.get(key, ()):
                number = assembly.file(file, where)
                if number not in files:
                    files[number] = _stored(storage, assembly.files[number].name, self._budget)
                if number in shard_of:
                    if shard_of[number] != shard:
                        raise CheckpointCorruptedError(f"{where} has one place in two parts of it, in {shown(file)}")
                    continue
                shard_of[number] = shard
                stored = files[number].get(key)
                if stored is None:
                    lacking = number
                    continue
                used.add(number)
                dtype = self._type_of(key, stored, dtype, assembly.files[number].name)
                name = name or stored.name
                parts += self._parts(assembly.files[number].name, key, shard, stored.array, number)
            if lacking is not None:
                if dtype is not None:
                    raise CheckpointCorruptedError(f"{assembly.files[lacking].name} has no {shown(key)}")
                lost[key] = lacking
                continue
            if dtype is None:
                dtype = self._type_of(key, None, None, self._name)
            offsets = sorted(self._offsets[key].values())
            assembly.add_tensor(self._name, self._paths.get(key, (key,)), dtype, shape, name, parts, offsets)
        for key in self._places.keys() - self._shapes.keys():
            raise CheckpointCorruptedError(f"{self._name} has a file for {shown(key)}, but no shape")
        for key, number in lost.items():
            reason = f"{assembly.files[number].name} has no {shown(key)}; {_ADVICE}"
            if number not in used:  # which may be any file
                raise CheckpointCorruptedError(reason)
            assembly.leave_out(self._name, self._paths.get(key, (key,)), reason, lost=True)
        unknown = {key: number for number, found in files.items() for key in found if key not in self._shapes}
        containers = {path[0] for key, path in self._paths.items() if key in self._shapes and len(path) > 1}
        for key, number in unknown.items():
            file, path = assembly.files[number].name, self._paths.get(key, (key,))
            if len(path) > 1 or path[0] not in containers:  # what is below that is stored, and it cannot be both
                assembly.leave_out(file, path, f"{file} has it, but {self._name} {_UNKNOWN}")

    def _type_of(self, key: str, stored: _Stored | None, before: DType | None, file: str) -> DType:
        said = self._types.get(key)
        if said is not None and said.removeprefix("paddle.") not in DTYPES:
            raise UnsupportedValueError(f"{self._name}: {shown(key)} has the dtype {shown(said)}, which cannot be held")
        if stored is None:
            if said is None:
                raise CheckpointCorruptedError(f"{self._name} has no file for {shown(key)}")
            return DTYPES[said.removeprefix("paddle.")]
        dtype = stored.array.dtype if said == stored.array.dtype.name else meant(stored.array.dtype, said)
        if dtype is None or before not in (None, dtype):
            raise CheckpointCorruptedError(
                f"{file}: {shown(key)} is of {stored.array.dtype.name}, where {said or (before and before.name)} is due"
            )
        return dtype

    def _parts(self, file: str, key: str, shard: _Shard, array: LyingArray, number: int) -> list[ArrayPart]:
        known = self._known.get((key, str((shard.offset, shard.elements))), {})
        shape = shard.shape
        if shape is None:
            shape = array.shape if str(array.shape) in known else min(known.values(), default=None)
        if shape is None or str(shape) not in known:
            raise CheckpointCorruptedError(f"{self._name} has a file for a shard of {shown(key)} that it does not know")
        if shard.elements is None:
            if array.shape != shape:
                raise CheckpointCorruptedError(
                    f"{file}: {shown(key)} has the shape {list(array.shape)}, where {shown(list(shape))} is due"
                )
            return [ArrayPart(Box(shard.offset, shape), number, array)]
        start, stop = shard.elements
        if math.prod(array.shape) != stop - start or not 0 <= start <= stop <= math.prod(shape):
            raise CheckpointCorruptedError(
                f"{file}: {shown(key)} has {math.prod(array.shape)} elements, where {start} to {stop} of the shape "
                f"{shown(list(shape))} are due"
            )
        if array.axes is not None:
            raise CheckpointCorruptedError(f"{file}: {shown(key)} is a range of elements, which are in no C order")
        parts = list(flat_parts(Box(shard.offset, shape), start, stop, number, array))
        self._spend(_STEPS_OF_PIECE * len(parts), shape)
        return parts


def _shard_of(record: Record) -> _Shard:
    offset, elements = counts_of(record.get("global_offset")), None
    shape = None if record.get("local_shape") is None else counts_of(record.get("local_shape"))
    if shape is not None and len(shape) != len(offset):
        raise ValueError("a shard of another number of dimensions than its offset")
    if record.get("is_flattened") and record.get("flattened_range") is not None:
        start, stop = counts_of(record.get("flattened_range"))
        elements = start, stop
    return _Shard(offset, shape, elements)


def _stored(storage: Storage, name: str, budget: Budget) -> Mapping[str, _Stored]:
    """The tensors of a data file."""
    with WindowedFile(storage, name, budget) as file:
        if name.endswith(".safetensors"):
            entries = read_safetensors_header(file).entries
            return {key: _Stored(entry, None) for key, entry in entries.items()}
        arrays = walk(file.window(), PADDLE)
        if type(arrays) is not dict:
            raise CheckpointCorruptedError(f"{name}: it holds no dict")
        return dict(_opened(arrays, file))


def _opened(arrays: dict[Any, Any], file: WindowedFile) -> Iterator[tuple[str, _Stored]]:
    variables = arrays.pop(_NAMES, {})
    if type(variables) is not dict:
        raise CheckpointCorruptedError(f"{file.name}: its names of variables are no dict")
    for key, array in arrays.items():
        if not isinstance(key, str) or not isinstance(array, PickledArray):
            raise CheckpointCorruptedError(f"{file.name}: {shown(key)} is no tensor")
        variable = variables.get(key)
        name = variable if type(variable) is str else None
        yield key, _Stored(array.opened(AtPath(file.name, (key,)), file.size), name)


def _walked(storage: Storage, name: str, budget: Budget) -> tuple[Any, int]:
    with WindowedFile(storage, name, budget) as file:
        return walk(file.window(), PADDLE), file.size


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} where {kind.__name__} is due")
    return value
