"""Loading a checkpoint, or a part of it, whole into one process."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

from ..control import NoTransport, SoloHub
from ..core.dtypes import DType, arithmetic_dtype
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
from .load import LeavesLoad
from .making import RecipeArranger, arranger_for
from .reading import LoadContext

__all__ = ["add_leaf", "load_merged"]

_logger = logging.getLogger("paddle_dist_ckpt")
_Empty = Callable[[tuple[int, ...], DType], Any]
"""Makes a tensor that can be filled."""


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
    metadata: Metadata
    chosen: Chosen
    leaves: Leaves
    values: dict[str, Any] = {}

    def scan() -> Leaves:
        nonlocal metadata, chosen, leaves
        metadata, chosen = _choose(storage, unique_id, selection, arranger, bool(options.strict), restarts)
        leaves = Leaves()  # those of the try before are free now
        _add_leaves(leaves, metadata, chosen, adapter.empty)
        return leaves

    with SoloHub().session("load", options.timeout) as session:
        # Whole tensors are loaded under the keys that they have, and those that are not chosen are not asked for.
        plain = dataclasses.replace(options, key_map=None, recipes=None, strict=bool(options.strict))
        context = LoadContext(
            storage, session, NoTransport(), adapter, plain, threads, arranger=arranger, is_part=is_part
        )
        restore, read = (lambda found, _: values.update(found)), (lambda _: metadata)
        LeavesLoad(scan, restore, context, unique_id, read=read).run()
    values.update(zip(leaves.tensor_paths, leaves.tensors, strict=True))
    if flat:
        return dict(zip(chosen.keys(metadata), map(values.__getitem__, chosen.paths), strict=True))
    tree: dict[Any, Any] = build_tree((place, values[path]) for path, place in chosen.paths.items())
    return tree


def _choose(
    storage: Storage,
    unique_id: int | None,
    selection: Selection,
    arranger: RecipeArranger | None,
    strict: bool,
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
            check_sizes(storage, metadata, _files_of(metadata, _sources(metadata, chosen)))
        except CheckpointCorruptedError:
            if restarts.due(metadata):
                continue
            raise
        return metadata, chosen


def _add_leaves(leaves: Leaves, metadata: Metadata, chosen: Chosen, empty: _Empty) -> None:
    """Add memory for what is loaded, and the places of values."""
    for path in chosen.paths:
        one = chosen.made.get(path)
        if one is None:
            _add_stored(leaves, metadata, path, empty)
        else:
            leaves.tensor_paths.append(path)
            leaves.tensors.append(_empty(empty, one.shape, one.dtype_of(chosen.stored), plain_key(path)))


def _sources(metadata: Metadata, chosen: Chosen) -> set[str]:
    """The stored paths that are read."""
    of_key = {metadata.key(path): path for path in metadata.table.paths}
    parts = (part for one in chosen.made.values() for part in one.parts)
    return {*(path for path in chosen.paths if path not in chosen.made), *(of_key[part.key] for part in parts)}


def _files_of(metadata: Metadata, paths: Iterable[str]) -> list[int]:
    """The files that hold tensors, or stored values, of these paths."""
    table = metadata.table
    tensors = sorted(table.index[path] for path in paths if path in table.index)
    return sorted(set(table.select(tensors)[0].shard_file.tolist()))


def _add_stored(leaves: Leaves, metadata: Metadata, path: str, empty: _Empty) -> None:
    table = metadata.table
    place = table.index.get(path)
    if place is None:
        leaves.value_paths.append(path)
        leaves.values.append(None)
        return
    shape, kind = table.shape_of(place), Kind(table.kinds[place])
    add_leaf(leaves, path, kind, shape, table.dtypes[place], empty, metadata.key(path))


def add_leaf(
    leaves: Leaves, path: str, kind: Kind, shape: tuple[int, ...], dtype: DType, empty: _Empty, key: str
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
    else:
        leaves.tensors.append(_empty(empty, shape, dtype, key))


def _empty(empty: _Empty, shape: tuple[int, ...], dtype: DType, key: str) -> Any:
    try:
        return empty(shape, dtype)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{key}: {error}") from None
    except (RuntimeError, OSError, MemoryError) as error:
        nbytes = math.prod(shape) * dtype.itemsize
        raise CheckpointError(
            f"{key}: no memory for a tensor of {nbytes:,} bytes ({error}); load a part of the checkpoint, or to the "
            "host"
        ) from error
