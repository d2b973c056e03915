"""What ranks tell the coordinator that they need in an exchange, and what it orders each of them to do."""

from __future__ import annotations

import msgspec

from ..core.box import Box
from ..core.columns import Column
from ..core.messages import prepare

__all__ = [
    "ExchangeAnswer",
    "ExchangeRequest",
    "ExchangeRound",
    "KeptPacks",
    "PackKind",
    "ParcelOrder",
    "SentPacks",
    "ShardNeeds",
    "ShardOrder",
    "UnitOrder",
]


class ShardNeeds(msgspec.Struct, frozen=True, array_like=True):
    """The boxes that a rank needs of tensors' shards, in columns with a row for each need.

    ``row`` is the rank's own number for it, ``shard`` the coordinator's for its shard. ``box`` is which of ``boxes`` it
    needs of the shard, in the shard's own coordinates: ``dimensions`` offsets and as many lengths each.
    """

    row: Column
    shard: Column
    box: Column
    dimensions: int
    boxes: Column


class ExchangeRequest(msgspec.Struct, frozen=True, array_like=True):
    """Round ``exchange``: what a rank needs of the shards whose turn it is.

    Attributes:
        files: In the first of these rounds, which of the asked files the rank has opened, if it was to find out.
        needs: What it needs.
        unreachable: Why it could not open others.
        end: Only shards below this number are spoken of; 0 for all.
        begun: Whether some of what was asked for is already where it was to go.
    """

    files: list[str]
    needs: ShardNeeds
    unreachable: dict[str, str] = {}
    end: int = 0
    begun: bool = False


class ParcelOrder(msgspec.Struct, frozen=True, array_like=True):
    """A box of a shard on its way to a rank.

    Attributes:
        destination: The rank; ``ALL`` for all of them.
        row: Which need of the rank that gets this order it is for; -1 if it is for others only.
        box: The box.
    """

    destination: int
    row: int
    box: Box


class ShardOrder(msgspec.Struct, frozen=True, array_like=True):
    """Where a stored shard is, for the rank that reads it."""

    file: str
    start: int
    first_block: int
    shape: tuple[int, ...]
    dtype: str
    key: str


class UnitOrder(msgspec.Struct, frozen=True, array_like=True):
    """Something that one rank reads, for itself and others.

    Attributes:
        reader: The rank that reads it.
        itemsize: Bytes of an item.
        parcels: What becomes of it. The reader is told of all parcels, another rank of those for itself or for all.
        shard: Where it is; None for ranks that do not read it.
        whole: Whether the parcels for all ranks are whole blocks of the shard, one behind the other.
    """

    reader: int
    itemsize: int
    parcels: list[ParcelOrder]
    shard: ShardOrder | None
    whole: bool


class PackKind(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Small shards, and boxes of them, that are alike."""

    shape: tuple[int, ...]
    dtype: str
    box: Box


class SentPacks(msgspec.Struct, frozen=True, array_like=True):
    """Boxes of small shards that one rank reads for others in a round, in columns.

    Of those for each of the ``destinations`` (``ALL``: for all others) there are ``counts``, one behind the other. Each
    has what it is in: which of the ``files``, where, with which block; and which of the ``kinds`` and of the ``keys``
    it has.
    """

    destinations: list[int]
    counts: Column
    files: list[str]
    file: Column
    start: Column
    block: Column
    kind: Column
    kinds: list[PackKind]
    keys: list[str]
    key: Column


class KeptPacks(msgspec.Struct, frozen=True, array_like=True):
    """A rank's own needs of small shards that a round brings something for, in columns.

    Of those that each of the ``readers`` has for it there are ``counts``, one behind the other; ``for_all`` says which
    come with what is for all ranks. ``rows`` are the rank's own numbers of the needs, and ``files`` those that it reads
    itself for it.
    """

    readers: list[int]
    for_all: list[bool]
    counts: Column
    rows: Column
    files: list[str]


class ExchangeRound(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part in one round of an exchange, the units in the same order on all ranks.

    ``senders`` are the ranks that send to single ranks, each with the size of its largest message. ``sent`` and
    ``kept`` are what it reads of small shards for others, and what it gets of them, behind what the units have for the
    same messages.
    """

    units: list[UnitOrder]
    senders: list[tuple[int, int]]
    sent: SentPacks | None = None
    kept: KeptPacks | None = None


class ExchangeAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Round ``exchange``: what one rank does next.

    Attributes:
        restart: As in :class:`DecideAnswer`.
        rounds: Its part in the rounds of this part of the exchange.
        end: Shards from this number on are left for later parts; 0 if this part is the last.
    """

    restart: bool = False
    rounds: list[ExchangeRound] = []
    end: int = 0

    @property
    def files(self) -> set[str]:
        """The files that the rank reads."""
        units = {unit.shard.file for one in self.rounds for unit in one.units if unit.shard is not None}
        packs = (packs for one in self.rounds for packs in (one.sent, one.kept) if packs is not None)
        return units.union(*(pack.files for pack in packs))


prepare(list(vars().values()))
