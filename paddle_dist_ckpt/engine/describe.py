"""Turns a rank's state_dict into the message that says what it has to save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from ..core.dtypes import DTYPES
from ..core.paths import plain_key
from ..core.shards import Kind, pack_column
from ..core.state_dict import flatten
from ..core.tensors import LocalShard, TensorAdapter, TensorView
from ..core.values import encode_value
from ..errors import UnsupportedValueError
from ..formats.datafile import Entry
from ..options import SaveOptions
from .messages import Folder, SaveRequest, ValueRecord, pack_signed
from .writer import gather

__all__ = ["LocalState", "describe", "save_request"]

_INLINE_BYTES = 4096  # a larger value becomes an entry of a data file
_INLINE_TOTAL_BYTES = 8 << 20  # so do all further ones when those of one rank are this large together
_USER_METADATA_BYTES = 1 << 20
_HASH_CHUNK = 4 << 20


@dataclass(slots=True)
class LocalState:
    """What this rank has: tensors (and numpy arrays and large values) by path, small values as JSON by path.

    ``owners`` and ``shards`` are rows: a local shard each, and the number of the tensor that it belongs to.
    """

    paths: list[str] = field(default_factory=list)
    views: list[TensorView] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    shards: list[LocalShard] = field(default_factory=list)
    values: list[ValueRecord] = field(default_factory=list)
    json: dict[str, bytes] = field(default_factory=dict)

    def add(self, path: str, view: TensorView) -> None:
        """Append a tensor and its shards, those without elements left out. A tensor without any is one whole shard."""
        shards = [shard for shard in view.shards if shard.array.size]
        if math.prod(view.shape) == 0:
            shards = [LocalShard((0,) * len(view.shape), np.empty(view.shape, view.dtype.raw))]
        self.owners += [len(self.paths)] * len(shards)
        self.shards += shards
        self.paths.append(path)
        self.views.append(view)


def describe(state_dict: dict[Any, Any], adapter: TensorAdapter) -> LocalState:
    """Look at everything in a state_dict, copying nothing but values.

    Raises:
        UnsupportedValueError: something in it cannot be stored; lists every such entry.
        TypeError: it is not a dict.
    """
    state, problems, inline = LocalState(), [], 0
    for leaf in flatten(state_dict, adapter.is_tensor):
        try:
            leaf.path.encode()
            if leaf.is_tensor:
                state.add(leaf.path, adapter.view(leaf.value, plain_key(leaf.path)))
                continue
            json = encode_value(leaf.value, plain_key(leaf.path))
        except UnicodeEncodeError:
            problems.append(f"{plain_key(leaf.path)!r}: a key with a lone surrogate cannot be stored")
            continue
        except UnsupportedValueError as error:
            problems.append(str(error))
            continue
        is_inline = len(json) <= _INLINE_BYTES and inline + len(json) <= _INLINE_TOTAL_BYTES
        inline += len(json) if is_inline else 0
        _add_value(state, leaf.path, json, is_inline)
    if problems:
        raise UnsupportedValueError("the state_dict holds what cannot be stored:\n" + "\n".join(problems))
    return state


def _add_value(state: LocalState, path: str, json: bytes, inline: bool) -> None:
    state.values.append(ValueRecord(path, xxhash.xxh3_64_intdigest(json), json if inline else None))
    if inline:
        state.json[path] = json
        return
    array = np.frombuffer(json, np.uint8)
    state.add(path, TensorView(Kind.VALUE, DTYPES["uint8"], array.shape, True, (LocalShard((0,), array),)))


def save_request(
    state: LocalState,
    unique_id: int | None,
    folder: Folder,
    options: SaveOptions,
    with_digests: bool,
    is_coordinator: bool,
) -> SaveRequest:
    """The message that tells the coordinator what this rank has.

    Args:
        state: What it has.
        unique_id: The id that the caller asked for.
        folder: The folder that this rank sees.
        options: How to save.
        with_digests: Whether plain tensors are to be compared with other ranks', and so must be hashed.
        is_coordinator: Whether this rank's user_metadata count.
    """
    shapes = list(dict.fromkeys(view.shape for view in state.views))
    place = {shape: i for i, shape in enumerate(shapes)}
    dtypes = list(dict.fromkeys(view.dtype.name for view in state.views))
    dimensions = max([1, *(len(shape) for shape in shapes)])
    names = [view.name for view in state.views]
    user = _user_metadata(options) if is_coordinator else None
    return SaveRequest(
        unique_id=unique_id,
        folder=folder,
        paths=state.paths,
        dtypes=dtypes,
        dtype=pack_column([dtypes.index(view.dtype.name) for view in state.views]),
        kind=pack_column([view.kind for view in state.views]),
        plain=pack_column([view.plain for view in state.views]),
        shapes=shapes,
        shape=pack_column([place[view.shape] for view in state.views]),
        digests=np.array([_digest(v) if with_digests else 0 for v in state.views], "<u8").tobytes(),
        names=names if any(name is not None for name in names) else [],
        reductions={
            i: (view.reduction.operation, view.reduction.position, view.reduction.count)
            for i, view in enumerate(state.views)
            if view.reduction is not None
        },
        shard_tensor=pack_column(state.owners),
        dimensions=dimensions,
        shard_boxes=pack_signed(_boxes(state.shards, dimensions)),
        values=state.values,
        user_metadata=user,
        block_bytes=options.block_bytes,
    )


def _user_metadata(options: SaveOptions) -> bytes | None:
    if options.user_metadata is None:
        return None
    user = encode_value(dict(options.user_metadata), "user_metadata")
    if len(user) > _USER_METADATA_BYTES:
        raise UnsupportedValueError(f"user_metadata takes {len(user)} bytes; {_USER_METADATA_BYTES} are allowed")
    return user


def _boxes(shards: Iterable[LocalShard], dimensions: int) -> Any:
    rows = []
    for shard in shards:
        pad = dimensions - len(shard.offset)
        rows.append([*shard.offset, *(0,) * pad, *shard.array.shape, *(1,) * pad])
    return np.array(rows, np.int64).reshape(-1, 2 * dimensions)


def _digest(view: TensorView) -> int:
    """xxh3_64 of a plain tensor's bytes; 0 for every other, whose digest nobody compares."""
    if not view.plain or view.kind == Kind.VALUE:
        return 0
    digest = xxhash.xxh3_64()
    for shard in view.shards:
        _hash_array(digest.update, shard.array, view)
    return digest.intdigest()


def _hash_array(update: Callable[[Any], None], array: Any, view: TensorView) -> None:
    if array.flags.c_contiguous:
        update(array.reshape(-1).view(np.uint8))
        return
    entry = Entry("", view.dtype, array.shape, array)
    buffer = np.empty(_HASH_CHUNK, np.uint8)
    for start in range(0, entry.nbytes, _HASH_CHUNK):
        stop = min(start + _HASH_CHUNK, entry.nbytes)
        gather(entry, start, stop, buffer)
        update(buffer[: stop - start])
