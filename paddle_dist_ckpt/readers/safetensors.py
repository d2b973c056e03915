"""Reads safetensors: a file, files with an index as Hugging Face has them, and PaddleNLP's unified checkpoints.

A folder may hold, for each kind of state, one of

    model.safetensors                                          one file
    model-00001-of-00002.safetensors, ...,
    model.safetensors.index.json                               several, and which tensor is in which
    any others that end in .safetensors                        several without an index

Files without an index that count themselves (-of-00002) must all be there. Of one file and an index, the index is
taken, unless files that it names are missing. What it does not name is not read, and a warning tells of it.

The kinds are ``model``, and in PaddleNLP's unified checkpoints ``optimizer`` (whose keys are ``weight/moment1_0``),
``master_weights`` and ``peft_model``. Where a folder has one kind only, tensors have the paths ``(key,)``; else
``(kind, key)``. Files of torch.distributed.checkpoint say where in its tensor each entry belongs.
PaddleNLP may save each rank's part of an optimizer as it is, over several files if there is much of it
(``optimizer.shard00.safetensors_shard_0001``), with an index that names no files.

PaddleNLP writes numpy's arrays, and bfloat16 as uint16, which Paddle takes for nothing else. Such files say
``"format": "np"`` of themselves. PaddleFormers does so too where it saves in the background, but they may say that they
are of torch: there the model's `config.json` tells that it is of bfloat16.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import msgspec

from ..core.box import Box, whole
from ..core.dtypes import DTYPES
from ..errors import CheckpointCorruptedError, CheckpointNotFoundError, UnsupportedValueError
from ..storage.base import Storage
from ..storage.capabilities import is_part
from ..tree.paths import Part
from ..tree.values import DECODE_ERRORS
from .assembly import Assembly
from .budget import Budget
from .catalog import Catalog
from .checks import shown
from .orders import ArrayPart, LyingArray
from .paddle import data_of_paddle
from .safetensors_header import SafetensorsHeader, read_safetensors_header, spend_on_json
from .weight_maps import OF_INDEX, check_lost, lacking_text, weight_map_of
from .window import WindowedFile

__all__ = ["SafetensorsReader"]

_logger = logging.getLogger("paddle_dist_ckpt")
_SUFFIX = ".safetensors"
_INDEX = _SUFFIX + OF_INDEX
_DATA = re.compile(r".*\.safetensors(?:_shard_[0-9]{4})?", re.DOTALL)
_MODEL = "model"
_COUNTED = re.compile(r"(shard-[0-9]+-)?(.*)-([0-9]{1,9})-of-([0-9]{1,9})(.*)\.safetensors", re.DOTALL)
_OF_RANKS = ("optimizer", "master_weights")  # kinds of which ranks may have saved what they had, under one key
_MOST_NAMED = 5  # files in a message
_KIND = re.compile(r"(optimizer|master_weights|peft_model)[-.].*")
_OWN = re.compile(r"[0-9]+_[0-9]+\.[0-9a-f]{16}\.[0-9]+\.safetensors")  # of this library, without its `.metadata`
_CONFIG = "config.json"
_OFFSETS = "DCP_SHARDING_INFO"  # torch.distributed.checkpoint's: where each entry begins in its tensor, as JSON


class _SavedOffsets(msgspec.Struct, frozen=True):
    saved_offsets: tuple[int, ...]


class _Config(msgspec.Struct, frozen=True):
    dtype: str | None = None
    torch_dtype: str | None = None


# Made here, not by the first thread that decodes: msgspec may crash if two threads have it look at a type at once.
_OFFSETS_DECODER = msgspec.json.Decoder(dict[str, _SavedOffsets])
_CONFIG_DECODER = msgspec.json.Decoder(_Config)


class _StateFiles(NamedTuple):
    """The files of one kind of state: indexes, of which there should be one at most, and data."""

    indexes: list[str]
    files: list[str]


class _Entry(NamedTuple):
    """An entry of a file, and where in its tensor it begins if the file says so."""

    file: str
    entry: LyingArray
    offset: tuple[int, ...] | None


class SafetensorsReader:
    """Reads safetensors, with or without an index. See the module."""

    format = "safetensors"
    title = "safetensors (Hugging Face, PaddleNLP)"

    def found(self, names: Collection[str]) -> list[int]:
        """0 if there are such files."""
        return [0] if _kinds(names) else []

    def read(self, storage: Storage, names: Collection[str], unique_id: int) -> Catalog:
        """See :class:`Reader`. It is unsupported too if two files of a model have one key, and no index says which is
        meant; of an optimizer such a key is left out."""
        kinds = _kinds(names)
        if not kinds or unique_id:
            raise CheckpointNotFoundError(f"{storage.location} has no safetensors files of a checkpoint {unique_id}")
        budget = Budget()
        assembly = Assembly(storage, names, budget)
        of_bfloat16 = functools.cache(functools.partial(_is_of_bfloat16, storage, frozenset(names)))
        for kind, sources in kinds.items():
            parents: tuple[Part, ...] = (kind,) if len(kinds) > 1 else ()
            found, refused, lost = _entries(storage, set(names), sources, budget, of_bfloat16)
            for key, entries in found.items():
                several = _several(key, entries)
                if several is not None and key not in refused:
                    if kind not in _OF_RANKS:
                        raise UnsupportedValueError(several)
                    refused[key] = entries[0].file, several
                if key not in refused:
                    _add(assembly, (*parents, key), entries)
            for key, (file, reason) in refused.items():
                assembly.leave_out(file, (*parents, key), reason)
            for key, file in lost.items():
                assembly.leave_out(file, (*parents, key), lacking_text(file, key), lost=True)
        return assembly.catalog(self.format, 0, 1)


def _kinds(names: Collection[str]) -> dict[str, _StateFiles]:
    """What there is of each kind. Files of which a `.metadata` among the names speaks are left to its reader."""
    kinds: dict[str, _StateFiles] = {}
    described = data_of_paddle(names)
    for name in sorted(names):
        match = _KIND.fullmatch(name)
        kind = match[1] if match else _MODEL
        if name.endswith(_INDEX):
            kinds.setdefault(kind, _StateFiles([], [])).indexes.append(name)
        elif _DATA.fullmatch(name) and name not in described and not _OWN.fullmatch(name):
            kinds.setdefault(kind, _StateFiles([], [])).files.append(name)
    return kinds


def _entries(
    storage: Storage, names: set[str], sources: _StateFiles, budget: Budget, is_of_bfloat16: Callable[[], bool]
) -> tuple[dict[str, list[_Entry]], dict[str, tuple[str, str]], dict[str, str]]:
    """The entries of each key, usually one; the keys that cannot be held, each with a file and the reason; and those
    that an index says are in a file which has only others of it."""
    if len(sources.indexes) > 1:
        raise UnsupportedValueError(
            f"{storage.location} has several indexes: {', '.join(sources.indexes[:5])}; "
            "keep each in a folder of its own"
        )
    weight_map, files = _meant(storage, names, sources, budget)
    found: dict[str, list[_Entry]] = {}
    refused: dict[str, tuple[str, str]] = {}
    as_numpy, unclear, has_bfloat16 = set[str](), set[str](), False  # the former two with uint16, and without bfloat16
    for name in files:
        with WindowedFile(storage, name, budget) as file:
            header = read_safetensors_header(file)
        offsets = _offsets(header, name)
        dtypes = {entry.dtype.name for entry in header.entries.values()}
        if "bfloat16" in dtypes:
            has_bfloat16 = True
        elif "uint16" in dtypes:
            (as_numpy if header.metadata.get("format") == "np" else unclear).add(name)
        for key, entry in header.entries.items():
            found.setdefault(key, []).append(_Entry(name, entry, offsets.get(key)))
        for key, reason in header.refused.items():
            if weight_map.get(key, name) == name:
                refused[key] = name, reason
    meant = as_numpy | unclear if unclear and not has_bfloat16 and is_of_bfloat16() else as_numpy
    if meant:
        found = {key: [_as_bfloat16(one) if one.file in meant else one for one in some] for key, some in found.items()}
    lost: dict[str, str] = {}
    for key, name in weight_map.items():
        listed = [entry for entry in found.get(key, ()) if entry.file == name]
        if key in refused:
            continue
        if not listed:
            lost[key] = name
            found.pop(key, None)
        elif listed[0].offset is None:
            found[key] = listed
    check_lost(lost, weight_map)
    return found, refused, lost


def _several(key: str, entries: list[_Entry]) -> str | None:
    """Why nobody knows which of a key's entries is meant, if that is so."""
    if len(entries) == 1 or all(entry.offset is not None for entry in entries):
        return None
    files = ", ".join(entry.file for entry in entries[:5])
    return f"{shown(key)} is in several files, and no index says which is meant: {files}"


def _meant(storage: Storage, names: set[str], sources: _StateFiles, budget: Budget) -> tuple[dict[str, str], list[str]]:
    """Which file each key is in, as far as an index says, and the files to read."""
    if not sources.indexes:
        if not is_part(storage):  # who names one file means it
            _check_counted(sources.files)
        return {}, sources.files
    index = sources.indexes[0]
    told = weight_map_of(storage, names, index, budget)
    if told is None:
        if not sources.files:
            _logger.warning("%s: %s tells of an optimizer, of which no file is here", storage.location, index)
        return {}, sources.files
    weight_map, is_taken = told
    single, files = index.removesuffix(OF_INDEX), set(weight_map.values())
    if not is_taken:
        return {}, [single]
    left = [name for name in sources.files if name not in files and name != single]
    if left:
        shown = ", ".join(left[:_MOST_NAMED]) + (", ..." if len(left) > _MOST_NAMED else "")
        _logger.warning("%s: not read, for %s does not name it: %s", storage.location, index, shown)
    return weight_map, sorted(files)


def _check_counted(files: Iterable[str]) -> None:
    """Refuse files that say how many they are, if not all of them are there."""
    groups: dict[tuple[str, str, str], dict[int, str]] = defaultdict(dict)
    for name in files:
        if match := _COUNTED.fullmatch(name):
            shard, before, number, count, behind = match.groups()
            before = f"shard-*-{before}" if shard else before  # each number may be there for several shards
            groups[before, count, behind][int(number)] = number
    for (before, count, behind), found in groups.items():
        start = 0 if 0 in found else 1
        lacking = (number for number in range(start, start + int(count)) if number not in found)
        width = len(next(iter(found.values())))
        missing = [
            f"{before}-{number:0{width}}-of-{count}{behind}{_SUFFIX}"
            for number in itertools.islice(lacking, _MOST_NAMED)
        ]
        if missing:
            more = ", ..." if len(missing) == _MOST_NAMED else ""
            raise CheckpointCorruptedError(
                f"{', '.join(missing)}{more} {'is' if len(missing) == 1 else 'are'} missing: there are {len(found)} of "
                f"{int(count)} such files, and no index says which are needed"
            )


def _is_of_bfloat16(storage: Storage, names: Collection[str]) -> bool:
    """Whether the model's configuration says so, which also lies beside a file that somebody has picked by name."""
    if _CONFIG not in names and not is_part(storage):
        return False
    try:
        with WindowedFile(storage, _CONFIG, Budget()) as file:  # of its own: without it, the model can be read as well
            text = file.read_large(0, file.size)
            spend_on_json(file, text)
        config = _CONFIG_DECODER.decode(text)
    except (CheckpointCorruptedError, *DECODE_ERRORS):  # there is none that says anything
        return False
    return "bfloat16" in (config.dtype, config.torch_dtype)


def _as_bfloat16(found: _Entry) -> _Entry:
    """An entry, of bfloat16 in place of uint16, as a library means it that has to store that so."""
    if found.entry.dtype.name != "uint16":
        return found
    return found._replace(entry=found.entry._replace(dtype=DTYPES["bfloat16"]))


def _offsets(header: SafetensorsHeader, name: str) -> dict[str, tuple[int, ...]]:
    """Where entries begin in their tensors, as far as a file says so."""
    text = header.metadata.get(_OFFSETS)
    if text is None:
        return {}
    try:
        records = _OFFSETS_DECODER.decode(text)
    except DECODE_ERRORS as error:
        raise CheckpointCorruptedError(f"{name}: its {_OFFSETS} cannot be read: {str(error)[:200]}") from error
    for key, entry in header.entries.items():
        offset = records[key].saved_offsets if key in records else entry.shape
        if len(offset) != len(entry.shape) or any(start < 0 for start in offset):
            raise CheckpointCorruptedError(f"{name}: {shown(key)} begins at {shown(list(offset))} of its tensor")
    return {key: record.saved_offsets for key, record in records.items()}


def _add(assembly: Assembly, path: tuple[Part, ...], entries: list[_Entry]) -> None:
    """Add the tensor of a key: one whole entry, or several of which all say where they belong."""
    first, key = entries[0], shown(path[-1])
    dtype, shape = first.entry.dtype, first.entry.shape
    parts = []
    for file, entry, offset in entries:
        if entry.dtype != dtype or len(entry.shape) != len(shape):
            raise CheckpointCorruptedError(f"{file}: {key} is of another dtype or rank than in {first.file}")
        box = whole(entry.shape) if offset is None else Box(offset, entry.shape)
        shape = tuple(max(n, o + s) for n, o, s in zip(shape, *box, strict=True))
        parts.append(ArrayPart(box, assembly.file(file, key), entry))
    assembly.add_tensor(first.file, path, dtype, shape, None, parts)
