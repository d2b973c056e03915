"""Reads what `paddle.save` writes: `.pdparams` and `.pdopt`, each one pickle of a state_dict.

Tensors of uint16 are bfloat16, as `paddle.load` takes them. Of float8 tensors Paddle writes int8, and so they are read.
Which arrays are tensors is told by a table of names, or by the name that stands before one in a tuple. In a file that
has neither, all are; in one that has either, all others are arrays of numpy's, and uint16 is uint16.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from ..core.box import whole
from ..core.dtypes import DType
from ..errors import CheckpointCorruptedError, CheckpointNotFoundError, UnsupportedValueError
from ..storage.base import Storage
from ..tree.paths import Part
from .assembly import Assembly
from .budget import Budget
from .catalog import Catalog
from .checks import AtPath, counts_of, shown
from .numpy_pickles import PickledArray
from .orders import ArrayPart, LyingArray
from .others import LOOK, is_safetensors, what_it_is
from .paddle_pickles import PADDLE, flat_parts, meant
from .pickled_tree import PickledLeaf, leaves
from .pickles import walk
from .weight_maps import OF_INDEX, check_lost, lacking_text, weight_map_of
from .window import WindowedFile

__all__ = ["PdparamsReader", "PickledState"]

_NAME = re.compile(r".+\.(?:pdparams|pdopt)", re.DOTALL)
_OF_RANK = re.compile(r"(.*_dist[0-9]+)\.(?:pdparams|pdopt)", re.DOTALL)
_NAMES = "StructuredToParameterName@@"
_UNPACKED = "UnpackBigParamInfor@@"
_STEPS_OF_SLICE, _STEPS_OF_PART = 14, 4  # for each dimension more


class PdparamsReader:
    """Reads the files of one folder as one checkpoint, of id 0.

    If there is one file, which a caller has who leaves only its name among ``names``, paths are those in its
    state_dict: ``("linear.weight",)``. Where there are several, the file's name comes first: ``("model.pdparams",
    "linear.weight")``. Files of which an index speaks, as PaddleNLP writes it (`model_state.pdparams.index.json`), are
    together one, of the index's name without `.index.json`. Files that ranks of a static program wrote, which have a
    `.pdattr` beside them, are not of this format.
    """

    format = "pdparams"
    title = "paddle.save's .pdparams and .pdopt"

    def found(self, names: Collection[str]) -> list[int]:
        return [0] if self._files(names) else []

    def read(self, storage: Storage, names: Collection[str], unique_id: int) -> Catalog:
        files = self._files(names)
        if unique_id != 0 or not files:
            raise CheckpointNotFoundError(f"{storage.location} has no .pdparams or .pdopt of the id {unique_id}")
        budget = Budget()
        assembly = Assembly(storage, names, budget)
        sources = _sources(storage, names, files, budget)
        for source, parts in sources.items():
            prefix = (source,) if len(sources) > 1 else ()
            for name, listed in parts.items():
                with WindowedFile(storage, name, budget) as file:
                    _state_of(file).add_to(assembly, prefix, listed)
        return assembly.catalog(self.format, 0, 1)

    @staticmethod
    def _files(names: Collection[str]) -> list[str]:
        all_names = set(names)
        return sorted(
            name
            for name in all_names
            if _NAME.fullmatch(name.removesuffix(OF_INDEX))
            and not ((match := _OF_RANK.fullmatch(name)) and f"{match[1]}.pdattr" in all_names)
        )


class _IndexedFile(NamedTuple):
    """What an index says: which keys a file has, and which file has each key."""

    keys: list[str]
    weight_map: Mapping[str, str]


def _sources(
    storage: Storage, names: Collection[str], files: Collection[str], budget: Budget
) -> dict[str, dict[str, _IndexedFile | None]]:
    """What to read: for each state_dict the files that it is in, each with what an index says of it."""
    sources: dict[str, dict[str, _IndexedFile | None]] = {name: {name: None} for name in files}
    for index in [name for name in files if name.endswith(OF_INDEX)]:
        del sources[index]
        told = weight_map_of(storage, names, index, budget)
        if told is None:
            continue
        weight_map, is_taken = told
        parts = {name: _IndexedFile([], weight_map) for name in sorted(set(weight_map.values()))}
        for key, name in weight_map.items():
            parts[name].keys.append(key)
        for name in parts:
            sources.pop(name, None)
        if is_taken:
            sources[index.removesuffix(OF_INDEX)] = {**parts}
    return sources


def _state_of(file: WindowedFile) -> PickledState:
    """The state_dict of an open file, or what the file is if it is known to be something else."""
    try:
        return PickledState(file)
    except (CheckpointCorruptedError, UnsupportedValueError) as error:
        start = file.read(0, min(LOOK, file.size))
        kind = what_it_is(start)
        if is_safetensors(start):
            kind = "of safetensors, as paddle.save(safetensors=True) writes it: call it .safetensors, and it is read"
        if kind is None:
            raise
        raise UnsupportedValueError(f"{file.name} is {kind}") from error


class PickledState:
    """The state_dict of an open file.

    Raises:
        CheckpointCorruptedError: it is no pickle, or not of a dict.
        UnsupportedValueError: it asks for something that is not read.
    """

    def __init__(self, file: WindowedFile) -> None:
        tree = walk(file.window(), PADDLE)
        if type(tree) is not dict:
            raise UnsupportedValueError(f"{file.name} holds no state_dict, but {type(tree).__name__}")
        self.tree: dict[Any, Any] = tree
        self._file = file

    def leaves(self) -> Iterator[PickledLeaf]:
        """See :func:`.pickled_tree.leaves`; none of an empty state_dict.

        Raises:
            UnsupportedValueError: also if it has keys of its own that are neither str nor int.
        """
        if any(type(key) not in (str, int) for key in self.tree):
            raise UnsupportedValueError(f"{self._file.name} is a dict with a key that is neither str nor int")
        return leaves(self.tree, self._file, PickledArray) if self.tree else iter(())

    def names(self) -> dict[Any, Any]:
        """The names of variables by key, which are taken out of the state_dict."""
        return self._table(_NAMES)

    def opened(self, path: tuple[Part, ...], array: PickledArray) -> LyingArray:
        """A tensor's element type as it is meant, its shape, and how its data lie."""
        return _as_tensor(array.opened(AtPath(self._file.name, path), self._file.size))

    def add_to(self, assembly: Assembly, prefix: tuple[Part, ...], listed: _IndexedFile | None) -> None:
        """Add all tensors and values, with these parts before their paths.

        Args:
            assembly: Where to add them.
            prefix: The parts.
            listed: What an index says: nothing is added of keys that it says are in other files.

        Raises:
            CheckpointCorruptedError: it has nothing of what the index says.
        """
        file, number = self._file.name, assembly.file(self._file.name, self._file.name)
        is_told = _NAMES in self.tree
        names, unpacked = self.names(), self._table(_UNPACKED)
        if listed is not None:
            lost = {key: file for key in listed.keys if key not in self.tree and key not in unpacked}
            check_lost(lost, dict.fromkeys(listed.keys, file))
            for key in lost:
                assembly.leave_out(file, (*prefix, key), lacking_text(file, key), lost=True)
            for key in [key for key in self.tree if isinstance(key, str)]:
                if listed.weight_map.get(key, file) != file:
                    del self.tree[key]
        for key, told in unpacked.items():
            self._add_joined(assembly, prefix, key, told, names.get(key))
        undecided: list[tuple[tuple[Part, ...], LyingArray]] = []
        for path, value, name in self.leaves():
            full = (*prefix, *path)
            if not isinstance(value, PickledArray):
                assembly.add_value(file, full, value)
                continue
            is_told = is_told or name is not None
            name = name or (names.get(path[0]) if len(path) == 1 else None)
            array = value.opened(AtPath(file, path), self._file.size)
            if name is None and meant(array.dtype) != array.dtype:
                undecided.append((full, array))
            else:
                assembly.add_whole(full, number, _as_tensor(array), name if isinstance(name, str) else None)
        for full, array in undecided:
            assembly.add_whole(full, number, array if is_told else _as_tensor(array))

    def _add_joined(self, assembly: Assembly, prefix: tuple[Part, ...], key: Any, told: Any, name: Any) -> None:
        """A tensor of more than a GiB, which protocols 2 and 3 have in slices of its elements."""
        file, number = self._file.name, assembly.file(self._file.name, self._file.name)
        where = f"{file}: {shown(key)}"
        try:
            shape, slices = counts_of(told["OriginShape"]), told["slices"]
            if not isinstance(key, str) or type(slices) is not list:
                raise TypeError("no list of slices, or no name")
        except (TypeError, LookupError) as error:
            raise CheckpointCorruptedError(f"{where} was cut into slices, but does not say how") from error
        start, most = 0, math.prod(shape)
        parts: list[ArrayPart] = []
        dtypes: set[DType] = set()
        for part in slices:
            pickled = self.tree.pop(part, None) if isinstance(part, str) else None
            if not isinstance(pickled, PickledArray):
                raise CheckpointCorruptedError(f"{where} lacks its slice {shown(part)}")
            array = self.opened((part,), pickled)
            if array.axes is not None:
                raise CheckpointCorruptedError(f"{where} has a slice of several dimensions")
            stop = start + math.prod(array.shape)
            if stop > most:
                raise CheckpointCorruptedError(f"{where} has more elements than its shape {shown(list(shape))}")
            made = list(flat_parts(whole(shape), start, stop, number, array))
            self._file.budget.spend_on_dimensions(_STEPS_OF_SLICE + _STEPS_OF_PART * len(made), len(shape), where)
            parts += made
            dtypes.add(array.dtype)
            start = stop
        if start != most or len(dtypes) != 1:
            raise CheckpointCorruptedError(f"{where} has {start} elements in slices, where {most} are due")
        name = name if isinstance(name, str) else None
        assembly.add_tensor(file, (*prefix, key), dtypes.pop(), shape, name, parts)

    def _table(self, key: str) -> dict[Any, Any]:
        table = self.tree.pop(key, {})
        if type(table) is not dict:
            raise CheckpointCorruptedError(f"{self._file.name}: {key} is no dict")
        return table


def _as_tensor(array: LyingArray) -> LyingArray:
    """An array with the element type that a tensor has of which Paddle has written it."""
    return array._replace(dtype=meant(array.dtype) or array.dtype)
