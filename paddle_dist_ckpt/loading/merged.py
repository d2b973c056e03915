"""Loading a checkpoint, or a part of it, whole into one process."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from ..control import NoTransport, SoloHub
from ..core.dtypes import DType, arithmetic_dtype
from ..core.frames import with_room_for_frames
from ..core.garbage import no_collections
from ..core.memory import zeros_of
from ..core.parts import Arranger
from ..core.shards import Kind
from ..errors import CheckpointCorruptedError, CheckpointError, UnsupportedValueError
from ..files.metadata import Metadata
from ..folder.checkpoint import Restarts, check_sizes, read_checkpoint
from ..folder.selection import Chosen, Selection
from ..options import LoadOptions
from ..storage.base import Storage
from ..tree.building import build_tree
from ..tree.paths import plain_key
from ..tree.state_dict import Adapter, Leaves
from .choosing import choose
from .load_rounds import Holder, LeavesLoad
from .making import RecipeArranger, arranger_for
from .messages import Mismatch
from .reading import LoadContext

__all__ = ["NewLeaves", "add_leaf", "load_merged"]

_logger = logging.getLogger("paddle_dist_ckpt")
_Empty = Callable[[tuple[int, ...], DType], Any]
"""Makes a tensor that can be filled."""


class NewLeaves(Holder):
    """One that has new memory for what is loaded, or nothing yet.

    Args:
        add: Adds the leaves; called again if the load starts again.

    Attributes:
        left: The paths of those of which nothing was loaded.
    """

    def __init__(self, add: Callable[[Leaves], None]) -> None:
        self._add, self._leaves = add, Leaves()
        self._values: Mapping[str, Any] = {}
        self.left: Container[str] = ()

    def scan(self) -> Leaves:
        self._leaves = Leaves()  # those of the try before are free now
        self._add(self._leaves)
        return self._leaves

    def restore(self, values: Mapping[str, Any], untouched: Container[str]) -> list[Mismatch]:
        self._values, self.left = values, untouched
        return []

    def take(self) -> Iterator[tuple[str, Any]]:
        """The tensors and arrays in the order in which they were added, and then the values, each with its path. They
        are not here any more then, so that there is room for what is made of them."""
        paths, tensors = self._leaves.tensor_paths[::-1], self._leaves.tensors[::-1]
        self._leaves = Leaves()
        while paths:
            yield paths.pop(), tensors.pop()
        yield from self._values.items()


@with_room_for_frames
def load_merged(
    storage: Storage,
    adapter: Adapter,
    unique_id: int | None,
    selection: Selection,
    flat: bool,
    options: LoadOptions,
    threads: int | None = None,
    rest: Arranger | None = None,
    is_part: bool = False,
) -> dict[Any, Any]:
    """See :func:`paddle_dist_ckpt.load_merged_state_dict`. ``rest`` says what is made without ``options.recipes``."""
    arranger = arranger_for(options, rest)
    restarts = Restarts(storage)
    there: list[tuple[Metadata, list[str], dict[str, str]]] = []  # with what tensors, and values, are handed on under

    def add(leaves: Leaves) -> None:
        metadata, chosen = _choose(storage, unique_id, selection, arranger, options.strict, restarts)
        _add_leaves(leaves, metadata, chosen, adapter.empty)
        names = dict(zip(chosen.paths, chosen.keys(metadata), strict=True)) if flat else chosen.paths
        of_values = {path: names[path] for path in leaves.value_paths}
        there[:] = [(metadata, [names[path] for path in leaves.tensor_paths], of_values)]

    holder = NewLeaves(add)
    with SoloHub().session("load", options.timeout) as session:
        # Whole tensors are loaded under the keys that they have, and those that are not chosen are not asked for.
        plain = dataclasses.replace(options, key_map=None, recipes=None, strict=bool(options.strict))
        context = LoadContext(
            storage, session, NoTransport(), adapter, plain, threads, arranger=arranger, is_part=is_part
        )
        report = LeavesLoad(holder, context, unique_id, lambda _: there[0][0]).run()
    for reason in report.skipped:  # memory that nothing was read to
        _logger.warning("left out: %s", reason)
    of_tensors, of_values = there.pop()[1:]  # without the metadata, which may be as large as the tree
    pairs = _named(holder, of_tensors, of_values)
    tree: dict[Any, Any] = dict(pairs) if flat else build_tree(pairs)
    return tree


def _named(holder: NewLeaves, of_tensors: list[str], of_values: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """What was loaded, with what it is handed on under. The names of tensors are freed with these."""
    of_tensors.reverse()
    for path, value in holder.take():
        name = of_tensors.pop() if of_tensors else of_values[path]
        if path not in holder.left:
            yield name, value


@no_collections()
def _choose(
    storage: Storage,
    unique_id: int | None,
    selection: Selection,
    arranger: RecipeArranger | None,
    strict: bool | Literal["all"],
    restarts: Restarts,
) -> tuple[Metadata, Chosen]:
    """Read what a checkpoint holds, and choose what is loaded of it; anew if it is replaced meanwhile.

    Raises:
        StateDictMismatchError, CheckpointNotFoundError: see :func:`choose`.
        CheckpointCorruptedError: a file that is needed is missing, or has another size.
    """
    while True:
        metadata = read_checkpoint(storage, unique_id)
        chosen = choose(metadata, storage.location, selection, arranger, strict)
        try:
            check_sizes(storage, metadata, _files_of(metadata, chosen))
        except CheckpointCorruptedError:
            if restarts.due(metadata):
                continue
            raise
        return metadata, chosen


@no_collections()
def _add_leaves(leaves: Leaves, metadata: Metadata, chosen: Chosen, empty: _Empty) -> None:
    """Add memory for what is loaded, and the places of values."""
    table = metadata.table
    for path, one in chosen.made.items():
        add_leaf(leaves, path, Kind.TENSOR, one.shape, one.dtype_of(chosen.stored), empty, plain_key(path))
    for place, (path, kind) in enumerate(zip(table.paths, table.kinds.tolist(), strict=True)):
        if path in chosen.paths and path not in chosen.made:
            key = metadata.key(path)
            add_leaf(leaves, path, kind, table.shape_of(place), table.dtypes[place], empty, key)
    values = [path for path, _ in metadata.value_records if path in chosen.paths and path not in chosen.made]
    leaves.value_paths.extend(values)
    leaves.values.extend([None] * len(values))


def _files_of(metadata: Metadata, chosen: Chosen) -> list[int]:
    """The files that hold what is read."""
    table, made = metadata.table, chosen.made
    is_read = np.array([path in chosen.paths and path not in made for path in table.paths], bool)
    is_read[[table.index[metadata.path_of[part.key]] for one in made.values() for part in one.parts]] = True
    return np.unique(table.shard_file[is_read[table.shard_tensor]]).tolist()


def add_leaf(
    leaves: Leaves, path: str, kind: int, shape: tuple[int, ...], dtype: DType, empty: _Empty, key: str
) -> None:
    """Add something that is stored as an entry: memory for a tensor or an array, or the place of a value.

    Raises:
        CheckpointError: there is no memory for it.
        UnsupportedValueError: the framework has no such tensors.
    """
    if kind == Kind.VALUE:
        leaves.value_paths.append(path)
        leaves.values.append(None)
        return
    leaves.tensor_paths.append(path)
    if kind == Kind.ARRAY:
        leaves.tensors.append(zeros_of(shape, arithmetic_dtype(dtype), key))
        return
    try:
        leaves.tensors.append(empty(shape, dtype))
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{key}: {error}") from None
    except (RuntimeError, OSError, MemoryError) as error:
        nbytes = math.prod(shape) * dtype.itemsize
        raise CheckpointError(
            f"{key}: no memory for a tensor of {nbytes:,} bytes ({error}); load a part of the checkpoint, or to the "
            "host"
        ) from error
