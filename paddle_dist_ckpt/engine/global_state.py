"""Puts together what the ranks of a save have, and checks that it fits together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.dtypes import DTYPES, DType
from ..core.paths import containers_of, flat_keys, mixed_containers, plain_key
from ..core.shards import Kind, unpack_column
from ..errors import UnsupportedValueError
from ..planning.save_plan import LocalShards
from .messages import SaveRequest, ValueRecord, unpack_signed

__all__ = ["GlobalState", "merge_requests"]

_COMPARED: dict[str, tuple[str, ...] | None] = {
    "shape": None,
    "dtype": None,
    "plain": ("distributed", "plain"),
    "kind": ("a tensor", "a numpy array", "a value"),
    "reduction": None,
}
_EMPTY_JSON = (b"[]", b'{"dict":[]}', b'{"tuple":[]}')


@dataclass(slots=True)
class GlobalState:
    """What all ranks together have. Tensors are in ascending order of their paths.

    Attributes:
        ranks: The global ranks, ascending; everywhere else ranks are positions in it.
        paths, dtypes, kinds, shapes, names: The tensors.
        value_owner: Which rank's value is kept, by path.
        value_json: The kept small values.
        shards: All ranks' shards.
        differing: For each path whose replicas are not equal the ranks that differ from the one that is saved.
        keys: Flat key of each path.
    """

    ranks: tuple[int, ...]
    coordinator: int
    block_bytes: int
    paths: list[str] = field(default_factory=list)
    dtypes: list[DType] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    names: list[str | None] = field(default_factory=list)
    value_owner: dict[str, int] = field(default_factory=dict)
    value_json: dict[str, bytes] = field(default_factory=dict)
    shards: LocalShards | None = None
    differing: dict[str, list[int]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Seen:
    """The first description of a tensor, and who gave it."""

    rank: int
    dtype: str
    kind: int
    shape: tuple[int, ...]
    plain: int
    name: str | None
    digest: int
    reduction: tuple[str, int] | None


def merge_requests(requests: Mapping[int, SaveRequest], coordinator: int) -> GlobalState:
    """Put together what the ranks have, and check that it fits.

    Args:
        requests: Every rank's request, by global rank.
        coordinator: The coordinator's global rank.

    Raises:
        UnsupportedValueError: tensors or values of one key that contradict each other. Lists them all.
        ValueError: ranks passed different arguments.
    """
    ranks = tuple(sorted(requests))
    _check_arguments(requests, coordinator)
    state = GlobalState(ranks, ranks.index(coordinator), requests[coordinator].block_bytes)
    ordered = [requests[rank] for rank in ranks]
    problems: list[str] = []
    _merge_values(state, ordered)
    seen = _merge_tensors(state, ordered, problems)
    _check_paths(state, seen, problems)
    if problems:
        raise UnsupportedValueError("the ranks' state_dicts do not fit together:\n" + "\n".join(problems))
    state.paths = sorted(seen)
    for path in state.paths:
        first = seen[path]
        state.dtypes.append(DTYPES[first.dtype])
        state.kinds.append(first.kind)
        state.shapes.append(first.shape)
        state.names.append(first.name)
    paths = state.paths + sorted(state.value_json)
    state.keys = dict(zip(paths, flat_keys(paths), strict=True))
    state.shards = _all_shards(state, ordered)
    return state


def _check_arguments(requests: Mapping[int, SaveRequest], coordinator: int) -> None:
    ours = requests[coordinator]
    for rank, request in sorted(requests.items()):
        if request.unique_id != ours.unique_id:
            raise ValueError(
                f"rank {rank} passed unique_id={request.unique_id}, rank {coordinator} unique_id={ours.unique_id}; "
                "all ranks must pass the same"
            )
        if request.block_bytes != ours.block_bytes:
            raise ValueError(
                f"rank {rank} passed block_bytes={request.block_bytes}, rank {coordinator} {ours.block_bytes}; "
                "all ranks must pass the same"
            )


def _merge_values(state: GlobalState, requests: Sequence[SaveRequest]) -> None:
    """Of each value keep the coordinator's, or else the lowest rank's that has it."""
    order = [state.coordinator, *(i for i in range(len(requests)) if i != state.coordinator)]
    kept: dict[str, ValueRecord] = {}
    for i in order:
        for value in requests[i].values:
            first = kept.setdefault(value.path, value)
            if first is value:
                state.value_owner[value.path] = i
                if value.json is not None:
                    state.value_json[value.path] = value.json
            elif value.digest != first.digest:
                state.differing.setdefault(value.path, []).append(state.ranks[i])


def _merge_tensors(state: GlobalState, requests: Sequence[SaveRequest], problems: list[str]) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}
    # The coordinator first: its plain tensors are the ones that are saved.
    for i in (state.coordinator, *(i for i in range(len(requests)) if i != state.coordinator)):
        request = requests[i]
        count = len(request.paths)
        dtype = unpack_column(request.dtype, count, len(request.dtypes), "dtype").tolist()
        kind = unpack_column(request.kind, count, len(Kind), "kind").tolist()
        plain = unpack_column(request.plain, count, 2, "plain").tolist()
        shape = unpack_column(request.shape, count, len(request.shapes), "shape").tolist()
        digests = np.frombuffer(request.digests, "<u8").tolist()
        for t, path in enumerate(request.paths):
            if kind[t] == Kind.VALUE and state.value_owner.get(path) != i:
                continue
            reduction = request.reductions.get(t)
            this = _Seen(
                state.ranks[i],
                request.dtypes[dtype[t]],
                kind[t],
                request.shapes[shape[t]],
                plain[t],
                request.names[t] if request.names else None,
                digests[t],
                (reduction[0], reduction[2]) if reduction else None,
            )
            first = seen.setdefault(path, this)
            if first is this:
                _check_reduction(path, this, problems)
            else:
                _compare(state, path, first, this, problems)
    return seen


def _check_reduction(path: str, this: _Seen, problems: list[str]) -> None:
    if this.reduction is not None and this.reduction[0] == "avg" and DTYPES[this.dtype].category in ("int", "bool"):
        problems.append(f"{plain_key(path)}: the average of {this.dtype} addends is not defined")


def _compare(state: GlobalState, path: str, first: _Seen, this: _Seen, problems: list[str]) -> None:
    for what, words in _COMPARED.items():
        mine, other = getattr(first, what), getattr(this, what)
        if mine != other:
            if words is not None:
                mine, other = words[mine], words[other]
            problems.append(f"{plain_key(path)}: {what} is {mine} on rank {first.rank}, {other} on rank {this.rank}")
            return
    if first.digest != this.digest and first.digest and this.digest:  # 0: that rank was not to compare
        state.differing.setdefault(path, []).append(this.rank)


def _check_paths(state: GlobalState, seen: Mapping[str, _Seen], problems: list[str]) -> None:
    """No path may be a tensor here and a value there, or a leaf here and a container there."""
    problems += [
        f"{plain_key(path)}: a tensor on rank {seen[path].rank}, a value on rank {state.ranks[owner]}"
        for path, owner in state.value_owner.items()
        if path in seen and seen[path].kind != Kind.VALUE
    ]
    leaves = set(seen) | set(state.value_owner)
    _check_containers(leaves, problems)
    for container in sorted(containers_of(leaves) & leaves):
        if state.value_json.get(container) in _EMPTY_JSON:  # an empty container on one rank, a filled one on another
            del state.value_json[container]
        else:
            problems.append(f"{plain_key(container)}: a value or tensor on one rank, a container on another")


def _check_containers(paths: Collection[str], problems: list[str]) -> None:
    problems += [
        f"{plain_key(path)}: a dict on one rank, a list or tuple on another, or a list here and a tuple there"
        for path in sorted(mixed_containers(paths))
    ]


def _all_shards(state: GlobalState, requests: Sequence[SaveRequest]) -> LocalShards:
    place = {path: t for t, path in enumerate(state.paths)}
    dimensions = max([1, *(request.dimensions for request in requests)])
    ranks = [_shards_of(state, i, request, place, dimensions) for i, request in enumerate(requests)]
    columns = (np.concatenate([getattr(shards, name) for shards in ranks]) for name in LocalShards.__slots__)
    return LocalShards(*columns)


def _shards_of(
    state: GlobalState, rank: int, request: SaveRequest, place: Mapping[str, int], dimensions: int
) -> LocalShards:
    """One rank's shards, those of values that another rank saves left out."""
    count, width = len(request.paths), request.dimensions
    boxes = unpack_signed(request.shard_boxes, 2 * width)
    owner = unpack_column(request.shard_tensor, len(boxes), max(1, count), "shard_tensor")
    kind = unpack_column(request.kind, count, len(Kind), "kind")
    tensor = np.array([place.get(path, -1) for path in request.paths], np.int64)
    for t in np.flatnonzero(kind == Kind.VALUE).tolist():
        if state.value_owner.get(request.paths[t]) != rank:
            tensor[t] = -1
    reduction = np.tile(np.array([-1, 0], np.int64), (count, 1))
    for t, (_, position, addends) in request.reductions.items():
        reduction[t] = position, addends
    rows = np.flatnonzero(tensor[owner] >= 0)
    offset, shape = np.zeros((len(rows), dimensions), np.int64), np.ones((len(rows), dimensions), np.int64)
    offset[:, :width], shape[:, :width] = boxes[rows, :width], boxes[rows, width:]
    owner = owner[rows]
    return LocalShards(
        tensor=tensor[owner],
        rank=np.full(len(rows), rank, np.int64),
        row=rows,
        offset=offset,
        shape=shape,
        plain=unpack_column(request.plain, count, 2, "plain")[owner],
        addend=reduction[owner, 0],
        addends=reduction[owner, 1],
    )
