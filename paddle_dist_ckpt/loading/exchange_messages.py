"""What goes from rank to rank in one operation of an exchange: parcels of units, and behind them a pack."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ..core.box import whole
from ..core.columns import IntArray, all_of, edges_of
from ..core.dtypes import DTYPES
from ..files.batches import ItemKind, Kinds
from ..planning.exchange_plan import ALL
from .exchange_orders import ExchangeRound, PackOrder, ParcelOrder, UnitOrder
from .needs import Needs
from .small_items import SmallItems

__all__ = ["ALONE_BYTES", "Address", "Message", "messages_of", "needs_of"]

ALONE_BYTES = 256 << 10
Address = tuple[int, int, int]
"""A message: the rank that sends it, the one that it goes to, or ALL, and which of several."""


@dataclass(slots=True, eq=False)
class Message:
    """Parcels, one behind the other, and behind them the boxes of a pack.

    ``kept`` are the needs of this rank that the pack is for, as the reader of it or as somebody who receives it.
    """

    parts: list[tuple[UnitOrder, ParcelOrder]] = field(default_factory=list)
    pack: PackOrder | None = None

    @property
    def parcel_bytes(self) -> int:
        """Bytes of the parcels."""
        return sum(parcel.box.size * unit.itemsize for unit, parcel in self.parts)

    @property
    def kept(self) -> IntArray:
        """The needs of this rank that the pack is for."""
        return all_of(self.pack.rows) if self.pack is not None else np.zeros(0, np.int64)

    def nbytes(self, needs: Needs) -> int:
        """Bytes of all."""
        sent = 0 if self.pack is None else int(_sizes(self.pack).sum())
        return self.parcel_bytes + needs.nbytes(self.kept) + sent

    def sent(self, address: int) -> SmallItems:
        """What is read for the pack by whoever sends it, to an address."""
        order = self.pack
        assert order is not None, "there is one"
        kinds = []
        for one in order.kinds:
            dtype, box = DTYPES[one.dtype], whole(one.box.shape)
            kinds.append(ItemKind(dtype, dtype, one.shape, one.box, box.shape, box, None))
        key_of = all_of(order.key)

        def key(item: int) -> str:
            return order.keys[key_of[item]]

        return SmallItems(
            files=order.files,
            file=all_of(order.file),
            starts=all_of(order.start),
            blocks=all_of(order.block),
            addresses=address + edges_of(_sizes(order))[:-1],
            kind=all_of(order.kind),
            kinds=Kinds.of(kinds),
            key=key,
            name=key,
        )


def _sizes(order: PackOrder) -> IntArray:
    """The sizes of the boxes that a pack's sender sends, ``[items]``."""
    kinds = np.array([one.box.size * DTYPES[one.dtype].itemsize for one in order.kinds], np.int64)
    return kinds[all_of(order.kind)]


def messages_of(one: ExchangeRound) -> dict[Address, Message]:
    """What is sent together in a round, as far as this rank has a part in it.

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
    for pack in one.packs:
        messages.setdefault((pack.reader, pack.destination, 0), Message()).pack = pack
    return messages


def needs_of(one: ExchangeRound) -> IntArray:
    """The needs that a round brings something for."""
    rows = [parcel.row for unit in one.units for parcel in unit.parcels if parcel.row >= 0]
    return np.concatenate([np.array(rows, np.int64), *(all_of(pack.rows) for pack in one.packs)])
