"""Which tensors and values of two checkpoints have the same keys."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ..core.dtypes import DType
from ..core.layouts import Layout
from ..errors import CheckpointNotFoundError
from ..files.metadata import Metadata
from ..folder.checkpoint import unless_replaced
from ..folder.selection import Selection, unread
from ..storage.base import Storage
from ..visible import visible
from .contents import is_value, leaf_values
from .inspection import matches

__all__ = ["Held", "Matched", "Side", "SideFacts"]


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
class Held:
    """What one of the two holds. Its leaves have numbers: rows of the table, and behind them the values in `.metadata`.

    Attributes:
        storage: Its folder.
        metadata: What is known of it.
        prefix: What its keys are without.
        paths: The path of each leaf.
    """

    storage: Storage
    metadata: Metadata
    prefix: str | None
    paths: list[str]

    @classmethod
    def of(cls, side: Side, metadata: Metadata) -> Held:
        """What there is of a side."""
        return cls(side.storage, metadata, side.prefix, metadata.paths)

    def leaves(self, pattern: str | None) -> Iterator[tuple[str, int]]:
        """The flat key, without the prefix, and the number of each leaf that was asked for; by path, so that the order
        is the same on all ranks, whatever order a reader has found them in."""
        for leaf in sorted(range(len(self.paths)), key=self.paths.__getitem__):
            key = self._without_prefix(self.metadata.key(self.paths[leaf]))
            if key is not None and matches(key, pattern):
                yield key, leaf

    def unread(self, pattern: str | None) -> dict[str, str]:
        """Why what else was asked for cannot be read, by flat key."""
        reasons = ((self._without_prefix(key), why) for key, why in unread(self.metadata, Selection()).items())
        return {key: why for key, why in reasons if key is not None and matches(key, pattern)}

    def check_prefix(self) -> None:
        """Refuse a prefix that no key has, as if it were mistyped: all of the other checkpoint would count as missing.

        Raises:
            CheckpointNotFoundError: no key has it.
        """
        if self.prefix is not None and not self.unread(None) and next(self.leaves(None), None) is None:
            hint = f"; a prefix ends without a dot: '{visible(self.prefix[:-1])}'" if self.prefix.endswith(".") else ""
            raise CheckpointNotFoundError(
                f"no key of checkpoint {self.metadata.unique_id} in {self.storage.location} is below the prefix "
                f"'{visible(self.prefix)}'{hint}"
            )

    def _without_prefix(self, key: str) -> str | None:
        if self.prefix is None:
            return key
        return key.removeprefix(self.prefix + ".") if key.startswith(self.prefix + ".") else None

    def key(self, leaf: int) -> str:
        """The flat key of a leaf, without the prefix."""
        key = self.metadata.key(self.paths[leaf])
        return key if self.prefix is None else key.removeprefix(self.prefix + ".")

    def is_tensor(self, leaf: int) -> bool:
        """Whether a leaf is no value."""
        return not is_value(self.metadata, leaf)

    def layout(self, tensor: int) -> Layout:
        """How a tensor is cut in shards."""
        table = self.metadata.table
        return table.layouts[table.layout_of[tensor]]

    def shape(self, tensor: int) -> tuple[int, ...]:
        """A tensor's global shape."""
        return self.layout(tensor).shape

    def dtype(self, tensor: int) -> DType:
        """A tensor's element type."""
        return self.metadata.table.dtypes[tensor]

    def values(self, leaves: Sequence[int]) -> Iterator[Any]:
        """Values, read many at a time; of a tensor what it is, in words.

        Raises:
            CheckpointCorruptedError: one is damaged.
        """
        with self.unless_replaced():
            values = leaf_values(self.storage, self.metadata, [leaf for leaf in leaves if not self.is_tensor(leaf)])
            for leaf in leaves:
                if self.is_tensor(leaf):
                    yield f"a tensor of shape {self.shape(leaf)}, {self.dtype(leaf).name}"
                else:
                    yield next(values)

    def unless_replaced(self) -> AbstractContextManager[None]:
        """See :func:`..folder.checkpoint.unless_replaced`."""
        return unless_replaced(self.storage, self.metadata)

    @property
    def facts(self) -> SideFacts:
        """Which checkpoint it is."""
        return SideFacts(self.storage.location, self.metadata.unique_id, self.metadata.format)


@dataclass(frozen=True, slots=True)
class _LeafPairs:
    """Leaves of two checkpoints that have the same keys: the number of each in the one, and in the other, ``[n]``."""

    a: array[int] = field(default_factory=lambda: array("q"))
    b: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.a)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.a, self.b, strict=True)

    def add(self, a: int, b: int) -> None:
        """Add a pair."""
        self.a.append(a)
        self.b.append(b)


@dataclass(frozen=True, slots=True)
class Matched:
    """What two checkpoints hold under the same keys, and under other ones.

    Attributes:
        one, other: The checkpoints.
        alike: Tensors of one shape.
        unlike: Tensors of different shapes.
        others: Values, and values that are tensors in the other.
        only_in_a, only_in_b: Flat keys of what only one of them has.
        unread_in_a, unread_in_b: Flat keys of what cannot be read, each with the reason.
    """

    one: Held
    other: Held
    alike: _LeafPairs
    unlike: _LeafPairs
    others: _LeafPairs
    only_in_a: list[str]
    only_in_b: list[str]
    unread_in_a: dict[str, str]
    unread_in_b: dict[str, str]

    @classmethod
    def of(cls, one: Held, other: Held, pattern: str | None) -> Matched:
        """Match what was asked for. The keys are in memory once, and only for as long as that takes."""
        alike, unlike, others = _LeafPairs(), _LeafPairs(), _LeafPairs()
        only_in_a, theirs = list[str](), dict(other.leaves(pattern))
        for key, a in one.leaves(pattern):
            b = theirs.pop(key, None)
            if b is None:
                only_in_a.append(key)
            elif not (one.is_tensor(a) and other.is_tensor(b)):
                others.add(a, b)
            else:
                (alike if one.shape(a) == other.shape(b) else unlike).add(a, b)
        unread = one.unread(pattern), other.unread(pattern)

        only = sorted({*only_in_a}.difference(unread[1])), sorted(theirs.keys() - unread[0].keys())
        return cls(one, other, alike, unlike, others, *only, *unread)

    @property
    def is_empty(self) -> bool:
        """Whether neither has anything that was asked for."""
        pairs = len(self.alike) + len(self.unlike) + len(self.others)
        return not (pairs or self.only_in_a or self.only_in_b or self.unread_in_a or self.unread_in_b)
