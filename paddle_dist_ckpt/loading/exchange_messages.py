"""What goes from rank to rank in one operation of an exchange: parcels of units, and behind them a pack."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ..core.box import whole
from ..core.columns import Column, IntArray, all_of, edges_of, numbered
from ..core.dtypes import DTYPES
from ..files.batches import ItemKind, Kinds
from ..planning.exchange_plan import ALL
from .exchange_orders import ExchangeRound, PackKind, ParcelOrder, SentPacks, UnitOrder
from .needs import Needs
from .small_items import SmallItems

__all__ = ["ALONE_BYTES", "Address", "Message", "messages_of", "needs_of"]

ALONE_BYTES = 256 << 10
Address = tuple[int, int, int]
"""A message: the rank that sends it, the one that it goes to, or ALL, and which of several."""


@dataclass(slots=True, eq=False)
class Message:
    """Parcels, one behind the other, and behind them the boxes of a pack.

    Attributes:
        parts: The parcels, each with its unit.
        pack: What this rank sends in the round of small shards, and which of it is in this message; None of others'.
        kept: The needs of this rank that the pack is for, as the reader of it or as somebody who receives it.
    """

    parts: list[tuple[UnitOrder, ParcelOrder]] = field(default_factory=list)
    pack: tuple[_Sent, slice] | None = None
    kept: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def has_pack(self) -> bool:
        """Whether there is one."""
        return self.pack is not None or len(self.kept) > 0

    @property
    def parcel_bytes(self) -> int:
        """Bytes of the parcels."""
        return sum(parcel.box.size * unit.itemsize for unit, parcel in self.parts)

    def nbytes(self, needs: Needs) -> int:
        """Bytes of all."""
        sent = 0
        if self.pack is not None:
            packs, items = self.pack
            sent = int(packs.sizes[items].sum())
        return self.parcel_bytes + needs.nbytes(self.kept) + sent

    def sent(self, address: int) -> SmallItems:
        """What is read for the pack by whoever sends it, to an address."""
        assert self.pack is not None, "there is one"
        packs, items = self.pack
        used, kind = numbered(packs.kind[items])
        files, file = numbered(packs.file[items])
        key_of = packs.key[items]

        def key(item: int) -> str:
            return packs.order.keys[key_of[item]]

        return SmallItems(
            files=[packs.order.files[i] for i in files.tolist()],
            file=file,
            starts=packs.start[items],
            blocks=packs.block[items],
            addresses=address + edges_of(packs.sizes[items])[:-1],
            kind=kind,
            kinds=Kinds.of([_item_kind(packs.order.kinds[i]) for i in used.tolist()]),
            key=key,
            name=key,
        )


class _Sent:
    """The columns of what a rank sends of small shards in a round, and the ``sizes`` of the boxes, ``[items]``."""

    def __init__(self, order: SentPacks) -> None:
        self.order = order
        columns = (order.file, order.start, order.block, order.kind, order.key)
        self.file, self.start, self.block, self.kind, self.key = map(all_of, columns)
        sizes = np.array([one.box.size * DTYPES[one.dtype].itemsize for one in order.kinds], np.int64)
        self.sizes: IntArray = sizes[self.kind]


def _item_kind(one: PackKind) -> ItemKind:
    dtype, box = DTYPES[one.dtype], whole(one.box.shape)
    return ItemKind(dtype, dtype, one.shape, one.box, box.shape, box, None)


def messages_of(one: ExchangeRound, me: int) -> dict[Address, Message]:
    """What is sent together in a round, as far as this rank, ``me``, has a part in it.

    What a unit has for all is sent alone if it is large, so that it can be sent from its target and received in its
    target.
    """
    messages: dict[Address, Message] = {}
    large: Counter[int] = Counter()
    for unit in one.units:
        size = sum(parcel.box.size for parcel in unit.parcels if parcel.destination == ALL) * unit.itemsize
        large[unit.reader] += size >= ALONE_BYTES
        for parcel in unit.parcels:
            number = large[unit.reader] if parcel.destination == ALL and size >= ALONE_BYTES else 0
            address = (unit.reader, parcel.destination, number)
            messages.setdefault(address, Message()).parts.append((unit, parcel))
    if one.sent is not None:
        packs = _Sent(one.sent)
        for destination, items in zip(one.sent.destinations, _slices(one.sent.counts), strict=True):
            messages.setdefault((me, destination, 0), Message()).pack = packs, items
    if one.kept is not None:
        rows = all_of(one.kept.rows)
        for reader, for_all, items in zip(one.kept.readers, one.kept.for_all, _slices(one.kept.counts), strict=True):
            messages.setdefault((reader, ALL if for_all else me, 0), Message()).kept = rows[items]
    return messages


def _slices(counts: Column) -> list[slice]:
    """Those of runs of so many items."""
    return [slice(start, stop) for start, stop in itertools.pairwise(edges_of(all_of(counts)).tolist())]


def needs_of(one: ExchangeRound) -> IntArray:
    """The needs that a round brings something for."""
    rows = [parcel.row for unit in one.units for parcel in unit.parcels if parcel.row >= 0]
    return np.concatenate([np.array(rows, np.int64), *(all_of(kept.rows) for kept in [one.kept] if kept is not None)])
