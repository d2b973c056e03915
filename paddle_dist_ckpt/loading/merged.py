"""Loading a checkpoint, or a part of it, whole into one process."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..control import SoloHub
from ..control.transports import NoTransport
from ..core.dtypes import arithmetic_dtype
from ..core.shards import Kind
from ..errors import CheckpointCorruptedError, CheckpointError, CheckpointNotFoundError, StateDictMismatchError
from ..files.metadata import Metadata
from ..folder.checkpoint import Restarts, check_sizes, read_checkpoint
from ..options import LoadOptions
from ..storage.base import Storage
from ..tree.paths import Part, flat_keys, format_path, parse_path
from ..tree.state_dict import Adapter, Leaves, build_tree
from .context import LoadContext
from .load import load_leaves

__all__ = ["Selection", "load_merged"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which part of a checkpoint: see :func:`paddle_dist_ckpt.load_merged_state_dict`."""

    prefix: str | None = None
    keys: Collection[str] | None = None


def load_merged(
    storage: Storage,
    adapter: Adapter,
    unique_id: int | None,
    selection: Selection,
    flat: bool,
    options: LoadOptions,
    threads: int | None = None,
) -> dict[Any, Any]:
    """See :func:`paddle_dist_ckpt.load_merged_state_dict`."""
    restarts = Restarts(storage)
    while True:
        metadata = read_checkpoint(storage, unique_id)
        chosen = _select(metadata, selection)
        try:
            check_sizes(storage, metadata, _files_of(metadata, chosen))
            filled = _load(storage, adapter, metadata, list(chosen), options, threads)
        except (StateDictMismatchError, CheckpointCorruptedError):
            if restarts.due(metadata):
                continue
            raise
        if flat:
            return dict(zip(flat_keys(list(chosen.values())), filled.values(), strict=True))
        tree: dict[Any, Any] = build_tree((chosen[path], value) for path, value in filled.items())
        return tree


def _load(
    storage: Storage,
    adapter: Adapter,
    metadata: Metadata,
    paths: Sequence[str],
    options: LoadOptions,
    threads: int | None,
) -> dict[str, Any]:
    """The values and whole tensors at these paths."""
    values: dict[str, Any] = {}

    @functools.cache
    def scan() -> Leaves:
        leaves = Leaves()
        for path in paths:
            _add_leaf(leaves, metadata, path, adapter)
        return leaves

    with SoloHub().session("load", options.timeout) as session:
        context = LoadContext(storage, session, NoTransport(), adapter, threads=threads)
        options = dataclasses.replace(options, key_map=None)  # whole tensors are loaded under the keys that they have
        load_leaves(scan, lambda found, _: values.update(found), context, metadata.unique_id, options)
    tensors = dict(zip(scan().tensor_paths, scan().tensors, strict=True))
    return {path: tensors[path] if path in tensors else values[path] for path in paths}


def _files_of(metadata: Metadata, paths: Iterable[str]) -> list[int]:
    """The files that hold tensors, or stored values, of these paths."""
    table = metadata.table
    tensors = sorted(table.index[path] for path in paths if path in table.index)
    return sorted(set(table.select(tensors)[0].shard_file.tolist()))


def _add_leaf(leaves: Leaves, metadata: Metadata, path: str, adapter: Adapter) -> None:
    table = metadata.table
    place = table.index.get(path)
    if place is None or table.kinds[place] == Kind.VALUE:
        leaves.value_paths.append(path)
        leaves.values.append(None)
        return
    shape, dtype = table.layouts[table.layout_of[place]].shape, table.dtypes[place]
    leaves.tensor_paths.append(path)
    if table.kinds[place] == Kind.ARRAY:
        leaves.tensors.append(np.empty(shape, arithmetic_dtype(dtype)))
    else:
        try:
            leaves.tensors.append(adapter.empty(shape, dtype))
        except (RuntimeError, OSError, MemoryError) as error:
            nbytes = math.prod(shape) * dtype.itemsize
            raise CheckpointError(
                f"{metadata.key(path)}: no memory for a tensor of {nbytes:,} bytes ({error}); load a part of the "
                "checkpoint, or to the host"
            ) from error


def _select(metadata: Metadata, selection: Selection) -> dict[str, str]:
    """The paths that are wanted, each with what is left of it without the prefix.

    Raises:
        CheckpointNotFoundError: nothing matches, or one of the keys matches nothing.
        CheckpointError: without the prefix, two paths would be the same.
    """
    prefix, keys = selection.prefix, selection.keys
    paths = [*metadata.table.paths, *(path for path, _ in metadata.value_records)]
    chosen = {path: rest for path in paths if (rest := _without(path, prefix)) is not None}
    if not chosen and (paths or prefix is not None):
        raise CheckpointNotFoundError(
            f"no key of checkpoint {metadata.unique_id} is below the prefix {prefix!r}; {_examples(metadata, paths)}"
        )
    if keys is not None:
        matched = _matching({metadata.key(path): path for path in chosen}, keys)
        unmatched = [pattern for pattern, found in matched.items() if not found]
        if unmatched:
            raise CheckpointNotFoundError(f"no key matches {unmatched}; {_examples(metadata, list(chosen))}")
        wanted = set().union(*matched.values())
        chosen = {path: rest for path, rest in chosen.items() if path in wanted}
    if len(set(chosen.values())) < len(chosen):
        raise CheckpointError(f"below the prefix {prefix!r} there are equal keys from different branches")
    return chosen


def _examples(metadata: Metadata, paths: Sequence[str]) -> str:
    return "there are, for example: " + (", ".join(metadata.key(path) for path in paths[:5]) or "none")


def _matching(paths: dict[str, str], keys: Collection[str]) -> dict[str, set[str]]:
    """The paths whose flat key is each of the keys, or matches it as a pattern."""
    found: dict[str, set[str]] = {}
    for pattern in keys:
        if pattern in paths:
            found[pattern] = {paths[pattern]}
        else:
            found[pattern] = {path for key, path in paths.items() if fnmatch.fnmatchcase(key, pattern)}
    return found


def _without(path: str, prefix: str | None) -> str | None:
    """What is left of a path below a prefix that is made of whole parts; None if it is not below it."""
    if prefix is None:
        return path
    parts = parse_path(path)
    for count in range(1, len(parts)):
        if ".".join(map(_text, parts[:count])) == prefix:
            return format_path(parts[count:])
    return None


def _text(part: Part) -> str:
    return str(part if isinstance(part, (str, int)) else part.at)
