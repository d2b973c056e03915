"""Where two checkpoints differ, found in windows of bounded memory, on one rank or on several."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.box import Box, whole
from ..core.columns import IntArray
from ..core.progress import Progress
from ..core.protocols import ControlSession
from ..core.threads import io_threads, run_all
from ..errors import CheckpointNotFoundError
from ..folder.boxes import BoxReader
from ..tree.values import are_same
from .differences import Difference, compare_items
from .matching import Held, Matched, Side, SideFacts
from .ranks import gathered, is_first, same_checkpoint
from .regions import best_along, windows

__all__ = ["ComparisonFacts", "compare_together"]

_BATCH_BYTES = 4 << 20
_BATCH_WINDOWS = 1 << 12  # each of them has arrays of its own


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor that is not the same in both.

    Attributes:
        key: Its flat key.
        shapes: Its shape in one and in the other.
        dtypes: Its element types.
        elements: How many items it has; None, as all that follows, if the shapes differ.
        differing: How many items differ: in a bit, or, if the element types differ, in value.
        max_abs: The largest absolute difference, of items of which none is NaN.
        max_rel: The largest difference relative to the larger item.
        nan: How many items are NaN, in one and in the other.
    """

    key: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    elements: int | None = None
    differing: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    nan: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value that is not the same in both, or a tensor in one of them: in JSON's terms, or in words."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class ComparisonFacts:
    """What a comparison has found.

    Attributes:
        a, b: The checkpoints.
        equal: Whether there is no difference.
        same: How many tensors and values are the same in both.
        only_in_a, only_in_b: Flat keys that the other has not.
        unread_in_a, unread_in_b: Flat keys of what cannot be read, and so is not compared, each with the reason.
        tensors: Tensors that differ.
        values: Values that differ.
    """

    a: SideFacts
    b: SideFacts
    equal: bool
    same: int
    only_in_a: list[str]
    only_in_b: list[str]
    tensors: list[TensorChange]
    values: list[ValueChange]
    unread_in_a: dict[str, str]
    unread_in_b: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Regions:
    """Regions of tensors that are compared each at once.

    Attributes:
        tensor: Which of the tensors that are alike each is of, ``[n]``.
        boxes: Where it lies in that.
        nbytes: Its size in bytes, in whichever checkpoint has the larger items, ``[n]``.
    """

    tensor: IntArray
    boxes: list[Box]
    nbytes: IntArray

    @classmethod
    def of(cls, matched: Matched) -> _Regions:
        """All of them, in order."""
        tensors, boxes, nbytes = array("q"), list[Box](), array("q")
        known = dict[str, Box]()  # one for all tensors of a shape, by a text: see hash_of
        one, other = matched.one, matched.other
        for tensor, (a, b) in enumerate(matched.alike):
            itemsize, layout = max(one.dtype(a).itemsize, other.dtype(b).itemsize), one.layout(a)
            along = best_along(max(layout, other.layout(b), key=lambda each: len(each.parts)), itemsize, _BATCH_BYTES)
            for box in windows(known.setdefault(str(layout.shape), whole(layout.shape)), itemsize, _BATCH_BYTES, along):
                tensors.append(tensor)
                boxes.append(box)
                nbytes.append(box.size * itemsize)
        return cls(np.array(tensors), boxes, np.array(nbytes))

    def share(self, ranks: int, rank: int) -> _Regions:
        """Those that a rank compares: neighbours, of about equally many bytes on each."""
        ends = np.cumsum(self.nbytes)
        total = int(ends[-1]) if len(ends) else 0
        low, high = (int(np.searchsorted(ends, total * part // ranks, side="right")) for part in (rank, rank + 1))
        some = slice(low, high)
        return _Regions(self.tensor[some], self.boxes[some], self.nbytes[some])

    def batches(self) -> Iterator[range]:
        """Neighbours that are read together: at most ``_BATCH_BYTES`` and ``_BATCH_WINDOWS``, but at least one."""
        first = size = 0
        for i, nbytes in enumerate(self.nbytes.tolist()):
            if i > first and (size + nbytes > _BATCH_BYTES or i - first == _BATCH_WINDOWS):
                yield range(first, i)
                first, size = i, 0
            size += nbytes
        if self.boxes:
            yield range(first, len(self.boxes))


def compare_together(
    session: ControlSession, a: Side, b: Side, pattern: str | None, progress: bool | None
) -> list[ComparisonFacts]:
    """Compare two checkpoints; each rank reads about equally many bytes of both.

    Returns:
        On the coordinator what was found by all; nothing elsewhere.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint, or nothing matches.
        CheckpointCorruptedError: stored bytes are not what was written.
        CheckpointReplacedError: somebody saved under the same id meanwhile.
    """
    one, other = (Held.of(side, same_checkpoint(session, side.storage, side.unique_id)) for side in (a, b))
    for held in (one, other):
        held.check_prefix()
    matched = Matched.of(one, other, pattern)
    if matched.is_empty:
        raise CheckpointNotFoundError("neither checkpoint has a key that was asked for")
    share = _Regions.of(matched).share(len(session.ranks), session.ranks.index(session.rank))

    def compare() -> list[Difference]:
        total = 2 * int(share.nbytes.sum())
        with (
            one.unless_replaced(),
            other.unless_replaced(),
            Progress("diff", total, progress, is_first(session)) as bar,
        ):
            return _compare_regions(matched, share, io_threads(len(session.ranks), True), session.check, bar)

    parts = gathered(session, "compare", compare, list[Difference])
    return [_facts(matched, list(itertools.chain(*parts)))] if parts else []


def _facts(matched: Matched, found: Sequence[Difference]) -> ComparisonFacts:
    one, other, by_tensor = matched.one, matched.other, dict[int, Difference]()
    for each in found:
        known = by_tensor.get(each.tensor)
        by_tensor[each.tensor] = each if known is None else known.joined(each)
    tensors = []
    for a, b in matched.unlike:
        tensors.append(
            TensorChange(one.key(a), (one.shape(a), other.shape(b)), (one.dtype(a).name, other.dtype(b).name))
        )
    for tensor, (a, b) in enumerate(matched.alike):
        shape, dtypes, part = one.shape(a), (one.dtype(a).name, other.dtype(b).name), by_tensor.get(tensor)
        if part is not None or dtypes[0] != dtypes[1]:
            part = part or Difference(tensor)
            sums = part.differing, part.max_abs, part.max_rel, (part.nan_a, part.nan_b)
            tensors.append(TensorChange(one.key(a), (shape, shape), dtypes, whole(shape).size, *sums))
    left, right = one.values(list(matched.others.a)), other.values(list(matched.others.b))
    changes = (
        _value_change(one.key(a), one.is_tensor(a) or other.is_tensor(b), *found)
        for (a, b), *found in zip(matched.others, left, right, strict=True)
    )
    values = [change for change in changes if change is not None]
    pairs = len(matched.alike) + len(matched.unlike) + len(matched.others)
    only, unread = (matched.only_in_a, matched.only_in_b), (matched.unread_in_a, matched.unread_in_b)
    return ComparisonFacts(
        a=one.facts,
        b=other.facts,
        equal=not any((tensors, values, *only, *unread)),
        same=pairs - len(tensors) - len(values),
        only_in_a=only[0],
        only_in_b=only[1],
        tensors=sorted(tensors, key=lambda change: change.key),
        values=sorted(values, key=lambda change: change.key),
        unread_in_a=unread[0],
        unread_in_b=unread[1],
    )


def _value_change(key: str, is_tensor: bool, left: Any, right: Any) -> ValueChange | None:
    """What has become of a value; ``is_tensor`` if that is a tensor on one side."""
    return None if not is_tensor and are_same(left, right) else ValueChange(key, left, right)


def _compare_regions(
    matched: Matched, share: _Regions, threads: int, check: Callable[[], None], progress: Callable[[int], None]
) -> list[Difference]:
    """What differs in some regions, one difference a region."""
    found: list[Difference] = []
    sides = [
        (held, np.array(leaves, np.int64)[share.tensor])
        for held, leaves in ((matched.one, matched.alike.a), (matched.other, matched.alike.b))
    ]

    def compare(rows: range, readers: Sequence[BoxReader]) -> None:
        dtypes = [[held.dtype(tensors[row]) for row in rows] for held, tensors in sides]
        nbytes = int(share.nbytes[rows.start : rows.stop].sum())
        if all(reader.is_hole(row) for row in rows for reader in readers):  # zeros, whatever the type
            progress(2 * nbytes)
            return
        items: list[list[np.ndarray]] = []
        for reader, types in zip(readers, dtypes, strict=True):
            items.append([np.empty(share.boxes[row].shape, dtype.raw) for row, dtype in zip(rows, types, strict=True)])
            reader.read(rows, items[-1])
            progress(nbytes)
        for row, left, type_a, right, type_b in zip(rows, items[0], dtypes[0], items[1], dtypes[1], strict=True):
            difference = compare_items(int(share.tensor[row]), left, type_a, right, type_b)
            if difference is not None:
                found.append(difference)

    first, second = (BoxReader(held.storage, held.metadata, tensors, share.boxes) for held, tensors in sides)
    with first, second:
        tasks = (functools.partial(compare, rows, (first, second)) for rows in share.batches())
        run_all(tasks, threads, check)
    return found
