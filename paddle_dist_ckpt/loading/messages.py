"""What ranks tell each other during a load."""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.box import Box
from ..core.columns import Column
from ..core.messages import prepare
from ..core.parts import Arranged
from ..files.codec import TableRecord
from ..files.metadata import FileInfo
from ..storage.base import FolderIdentity
from ..tree.paths import plain_key
from .wording import LEFT, NOT_STORED, SET

__all__ = [
    "DecideAnswer",
    "DecideRequest",
    "DoneRequest",
    "ExchangeAnswer",
    "ExchangeRequest",
    "ExchangeRound",
    "GoOnAnswer",
    "LoadAnswer",
    "LoadRequest",
    "Mismatch",
    "PackKind",
    "PackOrder",
    "ParcelOrder",
    "ShardNeeds",
    "ShardOrder",
    "UnitOrder",
    "WantedPaths",
    "WantedRecord",
]


_EMPTY = Column("<u1", b"")


class Mismatch(msgspec.Struct, frozen=True, array_like=True):
    """Something that does not fit, or is left as it is: its flat key, and a line that says what, with the key."""

    key: str
    text: str

    @classmethod
    def at(cls, path: str, text: str) -> Mismatch:
        """That of a path, of which a text says what."""
        key = plain_key(path)
        return Mismatch(key, f"{key}: {text}")

    def __str__(self) -> str:
        return self.text

    @property
    def renewed(self) -> str:
        """The line of a master weight that was set to its parameter, since this is so."""
        if self.text == f"{self.key}: {NOT_STORED}":
            return f"{self.key}: {NOT_STORED.replace(LEFT, SET)}"
        return f"{self.text}; {SET}"


class WantedRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of a tensor that it wants: its flat key, its shape, its dtype, and where the rank's box of it
    starts, or that from which its part is cut."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    offset: tuple[int, ...] | None


class WantedPaths(msgspec.Struct, frozen=True, array_like=True):
    """The paths that a rank's state_dict asks for: those of tensors, with their names (left out if they have none), and
    of values with what stands there now.

    ``others`` are names of tensors of the same state_dict that are not wanted, by their paths. ``moved`` has the stored
    flat key that the user gives for a wanted path. ``made`` are the paths of tensors that have recipes, ``sources`` the
    flat keys of the stored tensors in these. ``instead`` says what distributed tensors are made of, of which this
    rank has elements, if it has recipes or a key_map for any. ``records`` are there if the coordinator arranges what is
    made of what. ``kept`` are paths of ``others`` that are left as they are, and for which something may be stored.
    ``tied`` are the paths of each tensor that has several. ``frozen`` are paths of optimizers, each with that of a
    parameter for which it has no entries, for the parameter is not trained now.
    """

    tensors: list[str]
    values: dict[str, str] = {}
    names: list[str | None] = []
    others: dict[str, str | None] = {}
    moved: dict[str, str] = {}
    made: list[str] = []
    sources: list[str] = []
    instead: dict[str, str] = {}
    records: dict[str, WantedRecord] = {}
    kept: list[str] = []
    tied: list[list[str]] = []
    frozen: list[tuple[str, str]] = []


class LoadRequest(msgspec.Struct, frozen=True, array_like=True):
    """Round ``request``: what a rank wants. ``wanted`` is an encoded :class:`WantedPaths`, equal on many ranks.
    ``patterns`` says of the keys of its recipes whether each is that of a tensor. ``complete`` has the flat keys of
    objects of which nothing that is stored may be left. ``key_map`` says of the keys of its key_map, if that is a
    mapping, whether each matches something. ``host`` is where a rank runs that has no ``folder``."""

    unique_id: int | None
    options: dict[str, str]
    folder: FolderIdentity | None
    wanted: bytes
    patterns: dict[str, bool] = {}
    complete: list[str] = []
    location: str = ""
    key_map: dict[str, bool] = {}
    host: str = ""


class LoadAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Round ``request``: what the checkpoint has of the wanted paths: a table of the tensors (and of values that are
    stored as entries), and the small values themselves.

    ``files`` has the number of blocks with each file. ``starts`` and ``blocks`` say for each shard where it starts in
    its file's data section and which is its first block, ``ranks_on_host`` for each rank how many are on its host.
    ``unfit`` tells what stands at wanted paths where no tensor is, or no value; ``skipped`` why some wanted paths are
    left as they are. ``stored`` has the stored path of tensors that are not stored under the wanted one, ``renamed``
    the wanted paths of other entries of data files. ``saved_by`` is how many ranks have saved.

    ``sources`` has the paths of the stored tensors of which wanted ones are made, by flat key, ``absent`` what is at
    such keys instead, ``parts`` the parts of wanted paths for which the rank has no recipe. ``unread`` are stored paths
    that are there for these alone, ``unmatched`` the keys of recipes that no rank has a tensor for.
    ``hints`` are stored flat keys that may be meant by wanted paths where nothing is, with the shapes of tensors.
    ``save_id`` is the save's, empty if it is not in files of this format; ``cost`` what the values of `.metadata` cost,
    see :class:`.files.metadata.Metadata`. ``firsts`` are the coordinator's numbers of the tensors' first shards.
    ``thawed`` are those of all ranks' ``frozen`` for which entries are stored: the ranks make them, and ask again.
    """

    unique_id: int
    block_bytes: int
    files: list[tuple[FileInfo, int]]
    tensors: TableRecord
    starts: Column
    blocks: Column
    keys: dict[str, str]
    values: dict[str, Any]
    unfit: dict[str, str]
    ranks_on_host: dict[int, int]
    skipped: dict[str, str] = {}
    stored: dict[str, str] = {}
    renamed: dict[str, list[str]] = {}
    saved_by: int = 1
    sources: dict[str, str] = {}
    absent: dict[str, str] = {}
    parts: dict[str, Arranged] = {}
    unread: list[str] = []
    unmatched: list[str] = []
    hints: dict[str, list[tuple[str, tuple[int, ...] | None]]] = {}
    save_id: str = ""
    cost: int = 0
    firsts: Column = _EMPTY
    thawed: list[tuple[str, str]] = []

    def without_table(self) -> LoadAnswer:
        """The same without the columns, which take as much memory again where there are many shards."""
        table = TableRecord([], [], _EMPTY, _EMPTY, [], _EMPTY, _EMPTY)
        return msgspec.structs.replace(self, tensors=table, starts=_EMPTY, blocks=_EMPTY)


class DecideRequest(msgspec.Struct, frozen=True, array_like=True):
    """Round ``decide``: what a rank found when it planned: problems, the files that it needs and how many bytes of each
    it would read, why it cannot read some of them, whether some targets are staged, and whether there are objects to be
    given their states in the end. ``torn`` are flat keys, see :meth:`.fit.Fit.torn`."""

    problems: list[Mismatch]
    files: dict[str, int]
    unreachable: dict[str, str]
    staged: bool
    objects: bool = False
    torn: list[str] = []


class DecideAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Round ``decide``: how the load goes on: ``restart``, or with an exchange of these files (each with its number of
    blocks) or without it, with a pass for staged targets first or not.

    ``probe`` tells a rank to find out which of the files its folder has. ``shared`` are files of which ranks of one
    host read the same data. ``objects``: the load ends with round ``restore``. ``unused`` are the flat keys that no
    rank has asked for. ``left`` are problems of other ranks with tensors that none may load a part of.
    """

    restart: bool = False
    exchange: bool = False
    staged: bool = False
    files: list[tuple[FileInfo, int]] = []
    probe: bool = False
    shared: list[str] = []
    objects: bool = False
    unused: list[str] = []
    left: list[Mismatch] = []


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
    """Round ``exchange``: what a rank needs of the shards whose turn it is, below ``end``; of all if that is 0.

    In the first one also which of the asked files it has opened, if it was to find out, and why not others. ``begun``:
    some of what was asked for is already where it was to go.
    """

    files: list[str]
    needs: ShardNeeds
    unreachable: dict[str, str] = {}
    end: int = 0
    begun: bool = False


class ParcelOrder(msgspec.Struct, frozen=True, array_like=True):
    """A box of a shard on its way to a rank (``ALL``: to all of them). ``row`` is the need that it is for, of the rank
    that is told of it; -1 if it is for others alone."""

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
    """Something that a rank reads, and parcels of it: all of them if that is the rank that is told, which also hears of
    the shard; else those for the rank that is told, or for all. Items have ``itemsize`` bytes. ``whole``: the parcels
    for all are whole blocks of the shard, one behind the other."""

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


class PackOrder(msgspec.Struct, frozen=True, array_like=True):
    """Boxes of small shards that one rank reads for one rank (``ALL``: for all others), in columns.

    The rank that they are for, which may be the reader, is told its own needs, ``rows``. A reader that sends them is
    told of each in which of the ``files`` its shard is, where, with which block, and which of the ``kinds`` and of the
    ``keys`` it has. A reader that keeps them is told the files.
    """

    reader: int
    destination: int
    rows: Column = _EMPTY
    files: list[str] = []
    file: Column = _EMPTY
    start: Column = _EMPTY
    block: Column = _EMPTY
    kind: Column = _EMPTY
    kinds: list[PackKind] = []
    keys: list[str] = []
    key: Column = _EMPTY


class ExchangeRound(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part in one round of an exchange, the units in the same order on all ranks.

    ``senders`` are the ranks that send to single ranks, each with the size of its largest message. ``packs`` are what
    is sent of small shards, one at most from each rank to each, behind what the units have for the same message.
    """

    units: list[UnitOrder]
    senders: list[tuple[int, int]]
    packs: list[PackOrder] = []


class ExchangeAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Round ``exchange``: what one rank does for the needs of shards below ``end``; there are no others if it is 0."""

    restart: bool = False
    rounds: list[ExchangeRound] = []
    end: int = 0

    @property
    def files(self) -> set[str]:
        """The files that the rank reads."""
        units = {unit.shard.file for one in self.rounds for unit in one.units if unit.shard is not None}
        return units.union(*(pack.files for one in self.rounds for pack in one.packs))


class DoneRequest(msgspec.Struct, frozen=True, array_like=True):
    """Rounds ``open``, ``staged``, ``read`` and ``restore``: a rank has done its part; files that it was to read and
    could not open, with the reasons, and what it found not to fit; ``torn`` as in :class:`DecideRequest`."""

    gone: dict[str, str] = {}
    problems: list[Mismatch] = []
    torn: list[str] = []


class GoOnAnswer(msgspec.Struct, frozen=True, array_like=True):
    """All ranks have done their parts; or, of round ``open``, the load starts again, since files are gone of a
    checkpoint that was replaced. ``left`` as in :class:`DecideAnswer`."""

    restart: bool = False
    left: list[Mismatch] = []


prepare(list(vars().values()))
