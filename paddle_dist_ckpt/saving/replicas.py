"""Whether what several ranks have under one key is the same on all of them, and what becomes of it if not."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ..core.shards import Kind
from ..core.text import ranks_text
from ..errors import UnsupportedValueError
from ..tree.paths import plain_key
from ..tree.values import decode_jsonable, in_any_order
from .global_state import GlobalState, in_charge
from .messages import SaveRequest, ValueRecord

__all__ = ["Comparison", "logged", "merge_contents", "replica_warnings"]

_LARGE = 1 << 16
"""So many elements in one dimension are no statistic's."""
_MOST_LOGGED = 5  # keys in a warning


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """What may be another in each save of one structure.

    Attributes:
        value_json: The JSON of the small values that are kept, by path.
        cost: What the other values that are kept take to be decoded, see :mod:`.files.room`.
        differing: For each path whose replicas are not equal the ranks that differ from the one that is saved.
        minority: For each of these paths the ranks that have not what more than a half have, if so many agree.
        differs: Which tensors are among those, ``[tensors]``.
        alike: Which plain tensors are known to be equal on all ranks that have them, ``[tensors]``.
        digests: Of the plain tensors of those who are asked first, ``[tensors, 2]``.
    """

    value_json: dict[str, bytes]
    cost: int
    differing: dict[str, list[int]]
    minority: dict[str, list[int]]
    differs: npt.NDArray[np.bool_]
    alike: npt.NDArray[np.bool_]
    digests: npt.NDArray[np.uint64]


def merge_contents(state: GlobalState, requests: Mapping[int, SaveRequest]) -> Comparison:
    """Compare what the ranks have, as far as they have said."""
    differing: dict[str, list[int]] = {}
    kept: dict[str, ValueRecord] = {}
    count = len(state.paths)
    seen, has_seen, differs = np.zeros((count, 2), np.uint64), np.zeros(count, bool), np.zeros(count, bool)
    compared = np.zeros(count, np.int64)
    for i in in_charge(len(state.ranks), state.coordinator):
        rank = state.ranks[i]
        request = requests[rank]
        if not request.values and not request.digests:  # as of nearly all of very many ranks
            continue
        for path, value in zip(state.value_paths[i], request.values, strict=True):
            if (first := kept.setdefault(path, value)).digest != value.digest and not _are_same(first.json, value.json):
                differing.setdefault(path, []).append(rank)
        if request.digests:  # none: that rank was not to compare
            digests = np.frombuffer(request.digests, "<u8").reshape(-1, 2)
            tensor = state.compared[i]
            fresh = ~has_seen[tensor]
            seen[tensor[fresh]], has_seen[tensor] = digests[fresh], True
            compared[tensor] += 1
            unequal = tensor[(seen[tensor] != digests).any(axis=1)]
            differs[unequal] = True
            for t in unequal.tolist():
                differing.setdefault(state.paths[t], []).append(rank)
    value_json = {path: json for path in state.value_owner if (json := kept[path].json) is not None}
    cost = sum(kept[path].cost for path in state.value_owner)
    minority = _minorities(state, requests, differing) if differing else {}
    alike = ~differs & (state.holders > 1) & (compared == state.holders)
    return Comparison(value_json, cost, differing, minority, differs, alike, seen)


def _are_same(json: bytes | None, other: bytes | None) -> bool:
    """Whether small values of other bytes are the same but for the order of keys of dicts in them."""
    return json is not None is not other and in_any_order(decode_jsonable(json)) == in_any_order(decode_jsonable(other))


def _minorities(
    state: GlobalState, requests: Mapping[int, SaveRequest], differing: Mapping[str, list[int]]
) -> dict[str, list[int]]:
    """See :class:`Comparison`."""
    by_digest: dict[str, dict[object, list[int]]] = {path: {} for path in differing}
    wanted = np.array([path in by_digest for path in state.paths], bool)
    for i, rank in enumerate(state.ranks):
        request, tensor = requests[rank], state.compared[i]
        said: list[tuple[str, object]] = [
            (path, value.digest) for path, value in zip(state.value_paths[i], request.values, strict=True)
        ]
        rows = np.flatnonzero(wanted[tensor]).tolist() if request.digests else []
        said += [(state.paths[tensor[row]], request.digests[16 * row : 16 * row + 16]) for row in rows]
        for path, digest in said:
            if path in by_digest:
                by_digest[path].setdefault(digest, []).append(rank)
    found = {}
    for path, groups in by_digest.items():
        most = max(groups.values(), key=len)
        others = sorted(rank for group in groups.values() if group is not most for rank in group)
        if len(most) > len(others):
            found[path] = others
    return found


def replica_warnings(state: GlobalState, contents: Comparison, check: str, doubtful: bool) -> list[str]:
    """Warnings of replicas that differ. If ``doubtful``, ranks may be at different calls.

    Raises:
        UnsupportedValueError: some do, and it is not known that they may; or so many that they are no replicas.
    """
    if check == "off" and not doubtful:
        return []
    warnings = [
        f"{plain_key(path)}: the plain tensors or values of {ranks_text(ranks)} differ from the others'; the "
        f"coordinator's is taken, or else that of the lowest rank that has one"
        + "; as a PerRank each rank's own would be kept" * (path in state.value_owner)
        + _minority(contents.minority.get(path, ()))
        for path, ranks in sorted(contents.differing.items())
    ]
    if warnings and doubtful:
        raise UnsupportedValueError(
            "an earlier call was given up because ranks did not take part, and now their states differ: they may "
            "be at different calls. Let all ranks meet (a barrier will do) and save again, or pass the step as "
            "unique_id, so that it can be told what belongs together:\n" + "\n".join(warnings)
        )
    if warnings and check == "error":
        raise UnsupportedValueError("replicas differ:\n" + "\n".join(warnings))
    if check in ("auto", "sampled"):
        _check_that_most_are_equal(state, contents)
    return warnings


def _check_that_most_are_equal(state: GlobalState, contents: Comparison) -> None:
    """A few tensors that differ are statistics, as BatchNorm's. If most do, each rank has others under the same keys.

    Most are more than half of them, or of their bytes: experts of which each rank has its own are few and large. Small
    tensors of one dimension, as statistics and generators' states are, do not count, nor does what one rank has, nor
    zeros, as the accumulators of an optimizer are at first: those of any two stages are equal.

    Raises:
        UnsupportedValueError: most differ.
    """
    if not contents.differs.any():
        return  # as nearly always
    counted = (state.holders != 1) & (np.array(state.kinds, np.int64) != Kind.VALUE)  # 0 holders: it is distributed
    counted &= (state.tensors.ndim > 1) | (state.tensors.shape[:, 0] >= _LARGE)
    unequal = np.flatnonzero(contents.differs & counted).tolist()
    if not unequal:
        return
    equal = [t for t in np.flatnonzero(counted & ~contents.differs).tolist() if not _is_zero(state, contents, t)]
    if len(unequal) <= len(equal) and _nbytes(state, unequal) <= _nbytes(state, equal):
        return
    lines = [
        f"{plain_key(path)}: differs on {ranks_text(contents.differing[path])}"
        + _minority(contents.minority.get(path, ()))
        for path in (state.paths[t] for t in unequal)
    ]
    raise UnsupportedValueError(
        f"most plain tensors of the same keys differ among ranks ({len(unequal)} of the {len(unequal) + len(equal)} "
        f"that count, {_nbytes(state, unequal)} of {_nbytes(state, unequal + equal)} bytes; zeros and short vectors do "
        "not), so they are no replicas, and those of all ranks but one would be lost. If each rank has the whole "
        "model, let it begin alike on all, as by the same paddle.seed(). Give tensors that belong to one rank keys of "
        "their own, such as {f'stage{i}': state} for stage i of a pipeline; make parts of a tensor DistTensors or "
        "ShardedWeights; or pass SaveOptions(check_replicas='warn') if one rank's "
        "shall be saved:\n" + "\n".join(lines)
    )


def _nbytes(state: GlobalState, tensors: Sequence[int]) -> int:
    return sum(math.prod(state.shapes[t]) * state.dtypes[t].itemsize for t in tensors)


def _is_zero(state: GlobalState, contents: Comparison, tensor: int) -> bool:
    """Whether a tensor that all ranks have alike is all zeros, by its digest."""
    return contents.digests[tensor].astype("<u8").tobytes() == _digest_of_zeros(_nbytes(state, [tensor]))


@functools.lru_cache(maxsize=1024)
def _digest_of_zeros(nbytes: int) -> bytes:
    digest, piece = xxhash.xxh3_128(), bytes(1 << 20)
    for _ in range(nbytes >> 20):
        digest.update(piece)
    digest.update(piece[: nbytes & (len(piece) - 1)])
    return digest.digest()


def logged(warnings: Sequence[str]) -> str:
    """Warnings of replicas that differ as one, with the first few."""
    if len(warnings) == 1:
        return warnings[0]
    lines = [f"{len(warnings)} plain tensors or values differ among ranks:", *warnings[:_MOST_LOGGED]]
    if len(warnings) > _MOST_LOGGED:
        lines.append(f"... and {len(warnings) - _MOST_LOGGED} more; the report's warnings have all")
    return "\n  ".join(lines)


def _minority(ranks: Sequence[int]) -> str:
    return f" (the minority: {ranks_text(ranks)})" if ranks else ""
