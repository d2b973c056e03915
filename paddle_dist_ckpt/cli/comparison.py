"""Where two checkpoints differ, found in windows of bounded memory, on one rank or on several."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.box import Box, whole
from ..core.dtypes import DType
from ..core.progress import Progress
from ..core.protocols import ControlSession
from ..core.shards import Kind
from ..core.threads import io_threads, run_all
from ..errors import CheckpointError, CheckpointNotFoundError
from ..files.metadata import Metadata
from ..folder.boxes import BoxReader
from ..folder.checkpoint import unless_replaced
from ..storage.base import Storage
from ..tree.paths import plain_key
from ..tree.values import encode_value
from .contents import ValueContent, read_value
from .differences import Difference, compare_items
from .inspection import matches
from .ranks import gathered, is_first, same_checkpoint
from .regions import windows

__all__ = ["ComparisonFacts", "Side", "compare_together"]

_BATCH_BYTES = 4 << 20
_BATCH_WINDOWS = 1 << 12  # each of them has arrays of its own


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints that are compared: its folder, its number, and a prefix that its keys are without."""

    storage: Storage
    unique_id: int | None
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class SideFacts:
    """Which checkpoint was compared."""

    path: str
    unique_id: int
    format: str


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
class _Held:
    """What one of the two holds.

    Attributes:
        rows: The place of each tensor in the table, by flat key.
        values: The values by flat key without the prefix.
        unread: Why the rest cannot be read, by flat key.
    """

    storage: Storage
    metadata: Metadata
    rows: dict[str, int]
    values: dict[str, ValueContent]
    unread: dict[str, str]

    @classmethod
    def of(cls, side: Side, metadata: Metadata, pattern: str | None) -> _Held:
        rows: dict[str, int] = {}
        values: dict[str, ValueContent] = {}
        for row, path in enumerate(metadata.table.paths):
            whole_key = metadata.key(path)
            key = _without(whole_key, side.prefix)
            if key is not None and matches(key, pattern):
                if metadata.table.kinds[row] == Kind.VALUE:
                    values[key] = ValueContent(whole_key, row)
                else:
                    rows[key] = row
        for path, tree in metadata.value_records:
            whole_key = metadata.key(path)
            key = _without(whole_key, side.prefix)
            if key is not None and matches(key, pattern):
                values[key] = ValueContent(whole_key, None, tree)
        left_out = ((_without(plain_key(path), side.prefix), why) for path, why in metadata.left_out.items())
        unread = {key: why for key, why in left_out if key is not None and matches(key, pattern)}
        return cls(side.storage, metadata, rows, values, unread)

    def shape(self, key: str) -> tuple[int, ...]:
        table = self.metadata.table
        return table.layouts[table.layout_of[self.rows[key]]].shape

    def dtype(self, key: str) -> DType:
        return self.metadata.table.dtypes[self.rows[key]]

    def value(self, key: str) -> Any:
        if key in self.rows:
            return f"a tensor of shape {self.shape(key)}, {self.dtype(key).name}"
        with self.unless_replaced():
            return read_value(self.storage, self.metadata, self.values[key])

    def unless_replaced(self) -> AbstractContextManager[None]:
        return unless_replaced(self.storage, self.metadata)

    @property
    def keys(self) -> set[str]:
        return {*self.rows, *self.values}

    @property
    def facts(self) -> SideFacts:
        return SideFacts(self.storage.location, self.metadata.unique_id, self.metadata.format)


def _without(key: str, prefix: str | None) -> str | None:
    if prefix is None:
        return key
    return key.removeprefix(prefix + ".") if key.startswith(prefix + ".") else None


@dataclass(frozen=True, slots=True)
class _ComparedRegion:
    """A region of a tensor that is compared at once: which of the compared tensors, and where."""

    tensor: int
    box: Box
    nbytes: int


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
    one, other = (_Held.of(side, same_checkpoint(session, side.storage, side.unique_id), pattern) for side in (a, b))
    if not (one.keys or other.keys or one.unread or other.unread):
        raise CheckpointNotFoundError("neither checkpoint has a key that was asked for")
    common = sorted(one.rows.keys() & other.rows.keys())
    alike = [key for key in common if one.shape(key) == other.shape(key)]
    share = _share(one, other, alike, len(session.ranks), session.ranks.index(session.rank))

    def compare() -> list[Difference]:
        total = 2 * sum(window.nbytes for window in share)
        with (
            one.unless_replaced(),
            other.unless_replaced(),
            Progress("diff", total, progress, is_first(session)) as bar,
        ):
            return _compare_windows(one, other, alike, share, io_threads(len(session.ranks), True), session.check, bar)

    parts = gathered(session, "compare", compare, list[Difference])
    return [_facts(one, other, common, alike, list(itertools.chain(*parts)))] if parts else []


def _facts(
    one: _Held, other: _Held, common: Sequence[str], alike: Sequence[str], found: Sequence[Difference]
) -> ComparisonFacts:
    by_tensor: dict[int, Difference] = {}
    for each in found:
        known = by_tensor.get(each.tensor)
        by_tensor[each.tensor] = each if known is None else known.joined(each)
    place = {key: i for i, key in enumerate(alike)}
    tensors = []
    for key in common:
        shapes, dtypes = (one.shape(key), other.shape(key)), (one.dtype(key).name, other.dtype(key).name)
        part = by_tensor.get(place[key]) if key in place else None
        if key not in place:
            tensors.append(TensorChange(key, shapes, dtypes))
        elif dtypes[0] != dtypes[1] or part is not None:
            part = part or Difference(place[key])
            size = whole(shapes[0]).size
            nan = (part.nan_a, part.nan_b)
            tensors.append(TensorChange(key, shapes, dtypes, size, part.differing, part.max_abs, part.max_rel, nan))
    others = sorted((one.keys & other.keys) - set(common))
    values = [change for key in others if (change := _value_change(one, other, key)) is not None]
    only = sorted(one.keys - other.keys - {*other.unread}), sorted(other.keys - one.keys - {*one.unread})
    return ComparisonFacts(
        a=one.facts,
        b=other.facts,
        equal=not (tensors or values or only[0] or only[1] or one.unread or other.unread),
        same=len(common) + len(others) - len(tensors) - len(values),
        only_in_a=only[0],
        only_in_b=only[1],
        tensors=tensors,
        values=values,
        unread_in_a=one.unread,
        unread_in_b=other.unread,
    )


def _value_change(one: _Held, other: _Held, key: str) -> ValueChange | None:
    a, b = one.value(key), other.value(key)
    if key in one.values and key in other.values:
        try:
            same = encode_value(a, key) == encode_value(b, key)  # NaN is NaN there, and 1 is not True
        except CheckpointError:  # of another format, and of a kind that this library does not store
            same = repr(a) == repr(b)
        if same:
            return None
    return ValueChange(key, a, b)


def _share(one: _Held, other: _Held, alike: Sequence[str], ranks: int, rank: int) -> list[_ComparedRegion]:
    """The windows that a rank compares: of all of them, in order, a part of about equally many bytes."""
    found, boxes = [], dict[tuple[int, ...], Box]()  # one for all tensors of a shape
    for tensor, key in enumerate(alike):
        itemsize, shape = max(one.dtype(key).itemsize, other.dtype(key).itemsize), one.shape(key)
        box = boxes.setdefault(shape, whole(shape))
        found += [_ComparedRegion(tensor, part, part.size * itemsize) for part in windows(box, itemsize, _BATCH_BYTES)]
    ends = np.cumsum([window.nbytes for window in found])
    total = int(ends[-1]) if found else 0
    low, high = (np.searchsorted(ends, total * part // ranks, side="right") for part in (rank, rank + 1))
    return found[low : high if rank + 1 < ranks else len(found)]


def _batches(share: Sequence[_ComparedRegion]) -> Iterator[range]:
    """Neighbours that are read together: so many bytes, and so many of them; or one."""
    first = size = 0
    for i, window in enumerate(share):
        if i > first and (size + window.nbytes > _BATCH_BYTES or i - first == _BATCH_WINDOWS):
            yield range(first, i)
            first, size = i, 0
        size += window.nbytes
    if share:
        yield range(first, len(share))


def _compare_windows(
    one: _Held,
    other: _Held,
    alike: Sequence[str],
    share: Sequence[_ComparedRegion],
    threads: int,
    check: Callable[[], None],
    progress: Callable[[int], None],
) -> list[Difference]:
    """What differs in some windows, one difference a window."""
    found: list[Difference] = []
    boxes = [window.box for window in share]
    sides = [(leaves, [leaves.rows[alike[window.tensor]] for window in share]) for leaves in (one, other)]

    def compare(rows: range, readers: Sequence[BoxReader]) -> None:
        same_types = all(one.dtype(key) is other.dtype(key) for key in {alike[share[row].tensor] for row in rows})
        if same_types and all(reader.is_hole(row) for row in rows for reader in readers):
            progress(2 * sum(share[row].nbytes for row in rows))
            return
        items: list[list[np.ndarray]] = []
        for reader, (leaves, tensors) in zip(readers, sides, strict=True):
            dtypes = leaves.metadata.table.dtypes
            items.append([np.empty(boxes[row].shape, dtypes[tensors[row]].raw) for row in rows])
            reader.read(rows, items[-1])
            progress(sum(share[row].nbytes for row in rows))
        for row, left, right in zip(rows, *items, strict=True):
            tensor = share[row].tensor
            difference = compare_items(tensor, left, one.dtype(alike[tensor]), right, other.dtype(alike[tensor]))
            if difference is not None:
                found.append(difference)

    first, second = (BoxReader(leaves.storage, leaves.metadata, rows, boxes) for leaves, rows in sides)
    with first, second:
        tasks = (functools.partial(compare, rows, (first, second)) for rows in _batches(share))
        run_all(tasks, threads, check)
    return found
