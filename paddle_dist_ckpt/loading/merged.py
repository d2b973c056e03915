"""Loading a checkpoint, or a part of it, whole into one process."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..control import NoTransport, SoloHub
from ..core.dtypes import DType, arithmetic_dtype
from ..core.memory import zeros_of
from ..core.messages import counted
from ..core.parts import Arranged, Arranger, SourceTensor
from ..core.shards import Kind
from ..errors import CheckpointCorruptedError, CheckpointError, StateDictMismatchError, UnsupportedValueError
from ..files.metadata import Metadata
from ..folder.checkpoint import Restarts, check_sizes, read_checkpoint
from ..folder.selection import Selection, select, select_keys, selected_keys
from ..options import LoadOptions
from ..storage.base import Storage
from ..tree.building import build_tree
from ..tree.paths import flat_keys, is_own, join, plain_key
from ..tree.state_dict import Adapter, Leaves
from .answering import Answering
from .load import LeavesLoad
from .making import RecipeArranger, is_itself
from .reading import LoadContext
from .stored_tensors import stored_tensors

__all__ = ["add_leaf", "load_merged"]

_logger = logging.getLogger("paddle_dist_ckpt")
_Empty = Callable[[tuple[int, ...], DType], Any]
"""Makes a tensor that can be filled."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is loaded of a checkpoint.

    Attributes:
        metadata: What the checkpoint holds.
        paths: What is loaded, by path, each with the path under which it is returned.
        made: Those that are not as they are stored, and what they are made of.
        stored: The stored tensors, by flat key; empty if nothing is made of them.
    """

    metadata: Metadata
    paths: dict[str, str]
    made: dict[str, Arranged]
    stored: Mapping[str, SourceTensor]


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
    arranger = RecipeArranger(options.recipes or {}, rest) if options.recipes or rest is not None else None
    restarts = Restarts(storage)
    metadata: Metadata
    paths: dict[str, str]
    leaves: Leaves
    values: dict[str, Any] = {}

    def scan() -> Leaves:
        nonlocal metadata, paths, leaves
        chosen = _choose(storage, unique_id, selection, arranger, bool(options.strict), restarts)
        metadata, paths, leaves = chosen.metadata, chosen.paths, Leaves()  # those of the try before are free now
        _add_leaves(leaves, chosen, adapter.empty)
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
        keys = selected_keys(metadata, paths) if arranger is None else flat_keys(list(paths.values()))
        return dict(zip(keys, map(values.__getitem__, paths), strict=True))
    tree: dict[Any, Any] = build_tree((place, values[path]) for path, place in paths.items())
    return tree


def _choose(
    storage: Storage,
    unique_id: int | None,
    selection: Selection,
    arranger: RecipeArranger | None,
    strict: bool,
    restarts: Restarts,
) -> _Chosen:
    """Read what a checkpoint holds, and choose what is loaded of it; anew if it is replaced meanwhile.

    Raises:
        StateDictMismatchError: see :func:`_all_made`.
        CheckpointCorruptedError: a file that is needed is missing, or has another size.
    """
    while True:
        metadata = read_checkpoint(storage, unique_id)
        if arranger is None:
            chosen = _Chosen(metadata, select(metadata, selection), {}, {})
        else:
            stored = stored_tensors(metadata)
            every = _all_made(storage.location, metadata, stored, arranger, strict)
            chosen = _Chosen(metadata, *_select_made(metadata, stored, every, selection), stored)
        try:
            check_sizes(storage, metadata, _files_of(metadata, _sources(metadata, chosen.paths, chosen.made)))
        except CheckpointCorruptedError:
            if restarts.due(metadata):
                continue
            raise
        return chosen


def _add_leaves(leaves: Leaves, chosen: _Chosen, empty: _Empty) -> None:
    """Add memory for what is loaded, and the places of values."""
    for path in chosen.paths:
        one = chosen.made.get(path)
        if one is None:
            _add_stored(leaves, chosen.metadata, path, empty)
        else:
            leaves.tensor_paths.append(path)
            leaves.tensors.append(_empty(empty, one.shape, one.dtype_of(chosen.stored), plain_key(path)))


def _all_made(
    location: str, metadata: Metadata, stored: Mapping[str, SourceTensor], arranger: RecipeArranger, strict: bool
) -> dict[str, Arranged]:
    """All that is made of a checkpoint's tensors, and those that are left, by flat key.

    Raises:
        StateDictMismatchError: recipes and the checkpoint do not fit together, and it is to be strict.
    """
    made, _, problems = arranger.make(stored, Answering(metadata, {}).what_is)
    if problems and strict:
        where = f"checkpoint {metadata.unique_id} in {location}"
        text = f"{where} does not fit the recipes; {counted(len(problems), 'problem')}:"
        raise StateDictMismatchError(
            "\n".join([text, *problems, "(LoadOptions(strict=False) loads what fits)"]), problems
        )
    for problem in problems:
        _logger.warning("left out: %s", problem)
    return made


def _select_made(
    metadata: Metadata, stored: Mapping[str, SourceTensor], made: Mapping[str, Arranged], selection: Selection
) -> tuple[dict[str, str], dict[str, Arranged]]:
    """What is made of a checkpoint's tensors, and its values, as far as they are selected: their paths, each with the
    one under which it is returned, which has the flat key as its one part; and those that are not stored like this."""
    table = metadata.table
    values = [path for path, kind in zip(table.paths, table.kinds.tolist(), strict=True) if kind == Kind.VALUE]
    paths = {metadata.key(path): path for path in (*values, *(path for path, _ in metadata.value_records))}
    of_key = {metadata.key(path): path for path in table.paths}
    paths |= {key: of_key[key] if is_itself(key, one, stored) else join("", key) for key, one in made.items()}
    selected = select_keys(paths, selection)
    chosen = {path: path if is_own(path) else join("", key) for key, path in selected.items()}
    return chosen, {
        path: made[key] for key, path in selected.items() if key in made and not is_itself(key, made[key], stored)
    }


def _sources(metadata: Metadata, chosen: Iterable[str], made: Mapping[str, Arranged]) -> set[str]:
    """The stored paths that are read for these."""
    of_key = {metadata.key(path): path for path in metadata.table.paths}
    parts = (part for one in made.values() for part in one.parts)
    return {*(path for path in chosen if path not in made), *(of_key[part.key] for part in parts)}


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
