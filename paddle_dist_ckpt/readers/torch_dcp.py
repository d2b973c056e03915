"""Reads checkpoints of torch.distributed.checkpoint: a pickled `.metadata`, and files of many small zips.

`.metadata` says for each key what tensor it is and which chunks it is cut into, and for each chunk, and each value,
where the zip stands that ``torch.save`` has made of it: in which file, from which byte on, how long. A key that stands
for a nested path comes with that path; an int in it is an index of a list.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from ..core.box import Box
from ..core.dtypes import DType
from ..errors import CheckpointCorruptedError, CheckpointNotFoundError, UnsupportedValueError
from ..storage.base import Storage
from ..tree.paths import ListIndex, Part
from .assembly import Assembly
from .budget import Budget
from .catalog import Catalog, StoredChecksum
from .checks import check_name, check_shape, counts_of, shown
from .orders import ArrayPart
from .others import LOOK, is_safetensors
from .pickled_tree import PickledLeaf
from .pickled_values import ENDURED, Record, record_of
from .pickles import walk
from .torch_pickles import METADATA, TorchDType
from .torch_saved import PlacedTensor, SavedReader, torch_dtype
from .torch_zip import AheadFile, TorchZip
from .window import WindowedFile, on_disk

__all__ = ["TorchDCPReader"]

_METADATA = ".metadata"
_DATA = re.compile(r"__([0-9]{1,9})_[0-9]+\.distcp")
_STEPS_OF_REFUSED = 40
_STEPS_OF_SAME = 50  # of a record that is referred to again
_STEPS_OF_NUMBER = 2  # for each dimension more
_STEPS_OF_INDEX = 8  # in a path
_MOST_DEPTH = 64  # of a path
_MOST_VERSION = 100  # characters
_MOST_INDEX = 100_000_000  # of a list, as in paths of this library
_MOST_DIRECTORY = 8 << 20  # of a zip, in bytes
_MOST_CHUNK_DIRECTORY = 64 << 10  # of one that has a single tensor


class _Tensor(NamedTuple):
    """A tensor as `.metadata` describes it."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: list[Box]


class _Item(NamedTuple):
    """A zip: its file and range, and what is in it, a chunk of a tensor or (box None) a value."""

    file: str
    start: int
    stop: int
    key: str
    box: Box | None


class _DCPDescription(NamedTuple):
    """What `.metadata` says."""

    tensors: dict[str, _Tensor]
    items: list[_Item]  # by file and place
    refused: dict[str, str]  # keys of tensors that cannot be held, with the reason
    paths: dict[str, tuple[Part, ...]]
    version: str | None


class TorchDCPReader:
    """Reads checkpoints of torch.distributed.checkpoint. See the module."""

    format = "torch_dcp"
    title = "PyTorch's distributed checkpoint (torch.distributed.checkpoint)"

    def found(self, names: Collection[str]) -> list[int]:
        """0 if there is a `.metadata` without a number."""
        return [0] if _METADATA in names else []

    def read(self, storage: Storage, names: Collection[str], unique_id: int) -> Catalog:
        """See :class:`Reader`. Tensors with gaps between their elements are unsupported."""
        if _METADATA not in names or unique_id:
            raise CheckpointNotFoundError(f"{storage.location} has no {_METADATA} of a checkpoint {unique_id}")
        data = sorted(name for name in names if _DATA.fullmatch(name))
        try:
            return self._read(storage, names, data)
        except CheckpointCorruptedError as error:
            start = b""
            with suppress(OSError):
                start = storage.read(data[0], LOOK) if data else b""
            if not is_safetensors(start):
                raise
            raise UnsupportedValueError(
                f"{data[0]} is a file of safetensors: checkpoints that torch saved with "
                "serialization_format=SAFETENSORS are not read; save them without, or with HuggingFaceStorageWriter"
            ) from error

    def _read(self, storage: Storage, names: Collection[str], data: list[str]) -> Catalog:
        names, budget = set(names), Budget(functools.partial(on_disk, storage, data))
        with WindowedFile(storage, _METADATA, budget) as file:
            metadata = walk(file.window(), METADATA)
        try:
            description = _described(metadata, names, file.size, budget)
        except ENDURED as error:
            raise CheckpointCorruptedError(f"{_METADATA}: {type(error).__name__}: {str(error)[:200]}") from error
        contents = _DCPContents(storage, names, description, budget)
        for name, items in groupby(description.items, lambda item: item.file):
            with AheadFile(storage, name, budget) as file:
                for item in items:
                    contents.add(file, item)
        return contents.catalog(self.format)


def _described(metadata: Any, names: set[str], size: int, budget: Budget) -> _DCPDescription:
    """What the value of a `.metadata` of this size says."""
    metadata = record_of(metadata, "Metadata")
    described, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    ranges = {_index(index, budget): record_of(info, "_StorageInfo") for index, info in stored.items()}
    tensors, items, refused, chunks = {}, [], {}, 0
    for key, record in described.items():
        if type(key) is not str:
            raise TypeError(f"a key that is {type(key).__name__}")
        boxes: list[Box | None] = [None]
        if record.kind != "BytesStorageMetadata":
            try:
                tensors[key] = tensor = _tensor(key, record_of(record, "TensorStorageMetadata"), budget)
            except UnsupportedValueError as error:
                budget.spend(_STEPS_OF_REFUSED, _METADATA)
                refused[key] = str(error)
                continue
            boxes = [*tensor.chunks]
            chunks += len(record.get("chunks"))
            if chunks > size:
                raise ValueError("tensors refer to the same chunks again and again")
        for box in boxes:
            place = (key, str(box.offset) if box else None)
            if place not in ranges:
                raise ValueError(f"{shown(key)}{box or ''} is in no file")
            items.append(_item(key, box, ranges[place], names))
    items.sort(key=lambda item: (item.file, item.start))
    for before, item in pairwise(items):
        if before.file == item.file and before.stop > item.start:
            raise ValueError(f"{shown(before.key)} and {shown(item.key)} have bytes of {item.file} in common")
    version = metadata.get("version")
    paths = _paths(described, metadata.get("planner_data"), size, budget)
    told = type(version) is str and len(version) <= _MOST_VERSION and version.isprintable()
    wrote = f"torch.distributed.checkpoint {version}" if told else None
    return _DCPDescription(tensors, items, refused, paths, wrote)


def _tensor(key: str, record: Record, budget: Budget) -> _Tensor:
    where = f"{_METADATA}: {shown(key)}"
    dtype, *_ = record_of(record.get("properties"), "TensorProperties").state
    if type(dtype) is not TorchDType:
        raise TypeError(f"{shown(key)} has no dtype")
    known = torch_dtype(dtype, where)
    (shape,) = _sizes(budget, record, "size")
    check_shape(shape, known.itemsize, where)
    chunks: dict[str, Box] = {}
    for chunk in record.get("chunks"):
        box = Box(*_sizes(budget, record_of(chunk, "ChunkStorageMetadata"), "offsets", "sizes"))
        if len(box.offset) != len(box.shape):
            raise ValueError(f"{shown(key)} has a chunk of {len(box.offset)} and {len(box.shape)} dimensions")
        if box.size:
            chunks[str(box)] = box
    return _Tensor(known, shape, list(chunks.values()))


def _sizes(budget: Budget, record: Record, *names: str) -> list[tuple[int, ...]]:
    """Sizes that a record has by these names; it may be referred to again and again."""
    budget.spend_again(_STEPS_OF_SAME, record, _METADATA)
    sizes = [counts_of(record.get(name)) for name in names]
    for size in sizes:
        budget.spend_on_dimensions(_STEPS_OF_NUMBER, len(size), _METADATA)
    return sizes


def _index(record: Any, budget: Budget) -> tuple[str, str | None]:
    """The key and chunk that a range of a file is for; the chunk's offset as text, whose hash nobody knows."""
    record = record_of(record, "MetadataIndex")
    key, offset = record.get("fqn"), record.get("offset")
    if type(key) is not str:
        raise TypeError(f"a key that is {type(key).__name__}")
    return key, None if offset is None else str(*_sizes(budget, record, "offset"))


def _item(key: str, box: Box | None, record: Record, names: set[str]) -> _Item:
    name = check_name(record.get("relative_path"), names, _METADATA)
    start, length = counts_of((record.get("offset"), record.get("length")))
    transforms = record.get("transform_descriptors")
    if transforms:
        raise UnsupportedValueError(f"{name}: {shown(key)} is stored through {shown(transforms)}, which is not read")
    return _Item(name, start, start + length, key, box)


def _paths(keys: Collection[str], planner_data: Any, size: int, budget: Budget) -> dict[str, tuple[Part, ...]]:
    """The nested path of each key: what the planner says of it, or the key itself."""
    told = planner_data if type(planner_data) is dict else {}
    paths = {key: _path(told[key], budget) if key in told else (key,) for key in keys}
    if sum(len(part) for path in paths.values() for part in path if type(part) is str) > size:
        raise ValueError("paths refer to the same texts again and again")
    return paths


def _path(parts: Any, budget: Budget) -> tuple[Part, ...]:
    if type(parts) not in (tuple, list) or not 0 < len(parts) <= _MOST_DEPTH:
        raise TypeError(f"{type(parts).__name__} for a path, or one that is too long")
    budget.spend(sum([_STEPS_OF_INDEX if type(part) is int else 1 for part in parts]), _METADATA)
    return tuple(map(_part, parts))


def _part(part: Any) -> Part:
    if type(part) is int and 0 <= part < _MOST_INDEX:
        return ListIndex(part)
    if type(part) is not str:
        raise TypeError(f"{shown(part)} in a path")
    return part


class _DCPContents:
    """Puts together what the items hold."""

    def __init__(self, storage: Storage, names: set[str], description: _DCPDescription, budget: Budget) -> None:
        self._description = description
        self._assembly = Assembly(storage, names, budget)
        self._parts: dict[str, list[ArrayPart]] = {key: [] for key in description.tensors}
        self._checksums: dict[StoredChecksum, None] = {}
        self._saved = SavedReader()
        self._refused = dict(description.refused)  # keys of which something cannot be read, with the reason

    def add(self, file: AheadFile, item: _Item) -> None:
        """Find what an item holds."""
        most = _MOST_DIRECTORY if item.box is None else _MOST_CHUNK_DIRECTORY
        zip_file = TorchZip(file, item.start, item.stop, most)
        try:
            leaves = self._saved.leaves(zip_file, self._description.paths[item.key])
        except UnsupportedValueError as error:
            self._refused[item.key] = str(error)
            return
        if item.box is not None:
            self._add_chunk(file, item.key, item.box, leaves)
            return
        for path, content, _ in leaves:
            if type(content) is PlacedTensor:
                self._assembly.add_whole(path, self._file_of(file, content), content.array)
            else:
                self._assembly.add_value(file.name, path, content)

    def _add_chunk(self, file: AheadFile, key: str, box: Box, leaves: list[PickledLeaf]) -> None:
        content = leaves[0].value if len(leaves) == 1 else None
        due = self._description.tensors[key].dtype
        if type(content) is not PlacedTensor or content.array[:2] != (due, box.shape):
            raise CheckpointCorruptedError(
                f"{file.name}: {shown(key)} is not what {_METADATA} says: {due.name}{list(box.shape)}"
            )
        self._parts[key].append(ArrayPart(box, self._file_of(file, content), content.array))

    def _file_of(self, file: AheadFile, tensor: PlacedTensor) -> int:
        """The number of the file that a tensor is in, whose checksum is noted."""
        number = self._assembly.file(file.name, _METADATA)
        position, nbytes, crc32 = tensor.member
        if nbytes and crc32 is not None:
            self._checksums[StoredChecksum(number, position, nbytes, crc32)] = None
        return number

    def catalog(self, kind: str) -> Catalog:
        """The catalog of all items."""
        for key, reason in self._refused.items():
            self._assembly.leave_out(_METADATA, self._description.paths[key], reason)
        for key, (dtype, shape, _) in self._description.tensors.items():
            if key not in self._refused:
                path = self._description.paths[key]
                self._assembly.add_tensor(_METADATA, path, dtype, shape, None, self._parts[key])
        ranks = [int(match[1]) for item in self._description.items if (match := _DATA.fullmatch(item.file))]
        catalog = self._assembly.catalog(kind, 0, max(ranks, default=0) + 1, self._description.version)
        return replace(catalog, checksums=list(self._checksums))
