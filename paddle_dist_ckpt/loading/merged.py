"""Loading a checkpoint, or a part of it, whole into one process."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..control import NoTransport, SoloHub
from ..core.dtypes import DTYPES, DType, arithmetic_dtype, dtype_named
from ..core.parts import Arranger
from ..core.shards import Kind
from ..errors import CheckpointCorruptedError, CheckpointError
from ..files.metadata import Metadata
from ..folder.checkpoint import Restarts, check_sizes, read_checkpoint
from ..folder.selection import Selection, select, select_keys
from ..options import LoadOptions
from ..storage.base import Storage
from ..tree.paths import flat_keys, join
from ..tree.state_dict import Adapter, Leaves, build_tree
from .answering import stored_tensors
from .load import LeavesLoad
from .reading import LoadContext

__all__ = ["add_leaf", "load_merged"]


def load_merged(
    storage: Storage,
    adapter: Adapter,
    unique_id: int | None,
    selection: Selection,
    flat: bool,
    options: LoadOptions,
    threads: int | None = None,
    arranger: Arranger | None = None,
) -> dict[Any, Any]:
    """See :func:`paddle_dist_ckpt.load_merged_state_dict`."""
    if options.recipes:
        raise ValueError(
            "LoadOptions(recipes=...) is for loads into tensors that are there; a merged load makes those that are "
            "stored"
        )
    restarts = Restarts(storage)
    metadata: Metadata
    chosen: dict[str, str]
    leaves: Leaves
    values: dict[str, Any] = {}

    def scan() -> Leaves:
        nonlocal metadata, chosen, leaves
        while True:
            metadata = read_checkpoint(storage, unique_id)
            if arranger is not None:
                leaves, chosen = _arranged_leaves(metadata, selection, arranger, adapter)
                return leaves
            chosen = select(metadata, selection)
            try:
                check_sizes(storage, metadata, _files_of(metadata, chosen))
            except CheckpointCorruptedError:
                if restarts.due(metadata):
                    continue
                raise
            leaves = Leaves()
            for path in chosen:
                _add_stored(leaves, metadata, path, adapter)
            return leaves

    with SoloHub().session("load", options.timeout) as session:
        # Whole tensors are loaded under the keys that they have, and those that are not chosen are not asked for.
        options = dataclasses.replace(options, key_map=None, strict=bool(options.strict))
        context = LoadContext(storage, session, NoTransport(), adapter, options, threads, arranger=arranger)
        restore, read = (lambda found, _: values.update(found)), (lambda _: metadata)
        LeavesLoad(scan, restore, context, unique_id, read=read).run()
    values.update(zip(leaves.tensor_paths, leaves.tensors, strict=True))
    if flat:
        return dict(zip(flat_keys(list(chosen.values())), map(values.__getitem__, chosen), strict=True))
    tree: dict[Any, Any] = build_tree((rest, values[path]) for path, rest in chosen.items())
    return tree


def _arranged_leaves(
    metadata: Metadata, selection: Selection, arranger: Arranger, adapter: Adapter
) -> tuple[Leaves, dict[str, str]]:
    """What an arranger makes of a checkpoint's tensors, and its values, as far as they are selected; their paths."""
    table = metadata.table
    stored = stored_tensors(metadata)
    arranged = {key: made for key, made in arranger.arrange(stored, None).items() if made is not None}
    values = [path for path, kind in zip(table.paths, table.kinds.tolist(), strict=True) if kind == Kind.VALUE]
    paths = {metadata.key(path): path for path in (*values, *(path for path, _ in metadata.value_records))}
    paths |= {key: join("", key) for key in arranged}
    chosen = select_keys(paths, selection)
    leaves = Leaves()
    for key, path in chosen.items():
        made = arranged.get(key)
        if made is None:
            _add_stored(leaves, metadata, path, adapter)
            continue
        part = made.parts[0] if made.parts else None
        dtype = DTYPES["float32"] if part is None else dtype_named(part.dtype) if part.dtype else stored[part.key].dtype
        leaves.tensor_paths.append(path)
        leaves.tensors.append(_empty(adapter, made.shape, dtype, key))
    return leaves, dict(zip(chosen.values(), chosen.values(), strict=True))


def _files_of(metadata: Metadata, paths: Iterable[str]) -> list[int]:
    """The files that hold tensors, or stored values, of these paths."""
    table = metadata.table
    tensors = sorted(table.index[path] for path in paths if path in table.index)
    return sorted(set(table.select(tensors)[0].shard_file.tolist()))


def _add_stored(leaves: Leaves, metadata: Metadata, path: str, adapter: Adapter) -> None:
    table = metadata.table
    place = table.index.get(path)
    if place is None:
        leaves.value_paths.append(path)
        leaves.values.append(None)
        return
    shape, kind = table.layouts[table.layout_of[place]].shape, Kind(table.kinds[place])
    add_leaf(leaves, path, kind, shape, table.dtypes[place], adapter, metadata.key(path))


def add_leaf(
    leaves: Leaves, path: str, kind: Kind, shape: tuple[int, ...], dtype: DType, adapter: Adapter, key: str
) -> None:
    """Add something that is stored as an entry: memory for a tensor or an array, or the place of a value.

    Raises:
        CheckpointError: there is no memory for it.
    """
    if kind == Kind.VALUE:
        leaves.value_paths.append(path)
        leaves.values.append(None)
        return
    leaves.tensor_paths.append(path)
    if kind == Kind.ARRAY:
        leaves.tensors.append(np.empty(shape, arithmetic_dtype(dtype)))
    else:
        leaves.tensors.append(_empty(adapter, shape, dtype, key))


def _empty(adapter: Adapter, shape: tuple[int, ...], dtype: DType, key: str) -> Any:
    try:
        return adapter.empty(shape, dtype)
    except (RuntimeError, OSError, MemoryError) as error:
        nbytes = math.prod(shape) * dtype.itemsize
        raise CheckpointError(
            f"{key}: no memory for a tensor of {nbytes:,} bytes ({error}); load a part of the checkpoint, or to the "
            "host"
        ) from error
