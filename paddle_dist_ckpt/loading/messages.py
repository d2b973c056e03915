"""What ranks tell the coordinator during a load, and hear from it; of exchanges see :mod:`.exchange_orders`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..core.columns import Column
from ..core.messages import prepare
from ..core.parts import Arranged
from ..files.metadata import FileInfo
from ..files.tables import TableRecord
from ..storage.base import FolderIdentity
from ..tree.paths import plain_key
from .wording import LEFT, NOT_STORED, SET

__all__ = [
    "NO_STATEMENT",
    "STATEMENTS",
    "DecideAnswer",
    "DecideRequest",
    "DoneRequest",
    "GoOnAnswer",
    "Hint",
    "LoadAnswer",
    "LoadRequest",
    "Mismatch",
    "WantedPaths",
    "WantedRecord",
]


STATEMENTS, NO_STATEMENT = "statements", "no statement"
"""What a rank has passed as aoa_config, in words: one with none may do so beside either kind of other ranks."""

_EMPTY = Column("<u1", b"")
_NO_TABLE = TableRecord([], [], _EMPTY, _EMPTY, [], _EMPTY, _EMPTY)


class Mismatch(msgspec.Struct, frozen=True, array_like=True):
    """Something that does not fit, or is left as it is: its flat key, a line that says what, with the key, and its path
    if it is something that is wanted, for another one may have the same key."""

    key: str
    text: str
    path: str = ""

    @classmethod
    def at(cls, path: str, text: str) -> Mismatch:
        """That of a path, of which a text says what."""
        key = plain_key(path)
        return Mismatch(key, f"{key}: {text}", path)

    def __str__(self) -> str:
        return self.text

    @property
    def renewed(self) -> str:
        """The line of a master weight that was set to its parameter, since this is so."""
        if self.text == f"{self.key}: {NOT_STORED}":
            return f"{self.key}: {NOT_STORED.replace(LEFT, SET)}"
        return f"{self.text}; {SET}"


class WantedRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of a tensor that it wants.

    Attributes:
        key: Its flat key.
        shape: Its global shape.
        dtype: The name of its element type.
        offset: Where this rank's box of it starts, or the box from which this rank's part is cut; None without a box.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    offset: tuple[int, ...] | None


class WantedPaths(msgspec.Struct, frozen=True, array_like=True):
    """The paths that a rank's state_dict asks for.

    Attributes:
        tensors: The paths of tensors.
        values: The paths of values, with what is there now; see :class:`.wanted.WantedState`.
        names: The framework's names of the tensors; empty if none has one.
        others: The names of tensors in the same state_dict that are not wanted, by path.
        moved: The stored flat key that the user gives for a wanted path.
        made: The paths of tensors that have recipes.
        sources: The flat keys of the stored tensors in these recipes.
        instead: What the distributed tensors of which this rank has elements are made of, in words; empty if the rank
            has neither recipes nor a key_map for any tensor.
        records: What is said of each tensor, by path, if the coordinator arranges what is made of what.
        kept: The paths among ``others`` that are left as they are although something may be stored for them.
        tied: The paths of each tensor that has several.
        frozen: The paths of optimizers, each with the path of a parameter for which it has no entries, since the
            parameter is not trained now.
        spared: The paths that the key_map says are left as they are, if there are objects that take all that is stored.
        rules: By what the coordinator arranges the tensors; see :class:`..core.parts.Arranger`.
        patterns: Whether each key of the rank's recipes is the key of a tensor.
        key_map: Whether each key of the key_map matches something, if the key_map is a mapping.
        complete: The flat keys of objects for which everything that is stored must be loaded.
    """

    tensors: list[str]
    values: dict[str, str] = {}
    names: list[str | None] = []
    others: dict[str, str | None] = {}
    moved: dict[str, str] = {}
    made: list[str] = []
    sources: list[str] = []
    instead: dict[str, str] = {}
    records: Mapping[str, WantedRecord] = {}
    kept: list[str] = []
    tied: list[list[str]] = []
    frozen: list[tuple[str, str]] = []
    spared: list[str] = []
    rules: str = ""
    patterns: dict[str, bool] = {}
    key_map: dict[str, bool] = {}
    complete: list[str] = []


class LoadRequest(msgspec.Struct, frozen=True, array_like=True):
    """Round ``request``: what a rank wants.

    Attributes:
        unique_id: Which checkpoint; None for the newest.
        options: Options that all ranks must have in common, in words.
        folder: Which folder the rank sees; None if it sees none.
        wanted: An encoded :class:`WantedPaths`, equal on many ranks.
        location: What the rank calls the folder.
        host: Where the rank runs, if it has no ``folder``.
    """

    unique_id: int | None
    options: dict[str, str]
    folder: FolderIdentity | None
    wanted: bytes
    location: str
    host: str


class Hint(msgspec.Struct, frozen=True, array_like=True):
    """A stored entry: its flat key, and the shape of a tensor, None for a value."""

    key: str
    shape: tuple[int, ...] | None


class LoadAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Round ``request``: what the checkpoint has of the wanted paths.

    Attributes:
        unique_id: The checkpoint's number.
        block_bytes: The size of its blocks.
        files: Its data files, each with its number of blocks.
        tensors: A table of the tensors, and of the values that are stored as entries.
        starts: Where each shard starts in its file's data section.
        blocks: The number of each shard's first block in its file.
        keys: The flat keys of stored paths, as far as they are not the plain ones.
        values: The values that `.metadata` has itself, by path.
        unfit: What stands at wanted paths where no tensor is, or no value.
        skipped: Why some wanted paths are left as they are.
        stored: The stored path of each tensor that is not stored under the wanted one.
        renamed: The wanted paths of other entries of data files, by stored path.
        saved_by: How many ranks have saved.
        sources: The stored paths of the tensors that wanted ones are made of, by flat key.
        absent: What is at such keys instead.
        parts: The parts of wanted paths for which the rank has no recipe.
        unread: Stored paths that are in the table for these parts alone.
        unmatched: The keys of recipes for which no rank has a tensor.
        hints: For wanted paths where nothing is stored, the stored entries that may be meant.
        save_id: The save's id; empty if the checkpoint is not in files of this format.
        foreign: Whether others wrote the checkpoint, who may leave out tensors without elements.
        cost: What the values of `.metadata` cost in memory; see :class:`.files.metadata.Metadata`.
        firsts: The coordinator's numbers of the tensors' first shards.
        thawed: Those of all ranks' ``frozen`` for which entries are stored: the ranks make them, and ask again. Nothing
            else is said then.
        gone: Why there is no such checkpoint, if there is none: ranks may go on to another one, in the same session.
    """

    unique_id: int = 0
    block_bytes: int = 1
    files: list[tuple[FileInfo, int]] = []
    tensors: TableRecord = _NO_TABLE
    starts: Column = _EMPTY
    blocks: Column = _EMPTY
    keys: dict[str, str] = {}
    values: dict[str, Any] = {}
    unfit: dict[str, str] = {}
    skipped: dict[str, str] = {}
    stored: dict[str, str] = {}
    renamed: dict[str, list[str]] = {}
    saved_by: int = 1
    sources: dict[str, str] = {}
    absent: dict[str, str] = {}
    parts: dict[str, Arranged] = {}
    unread: list[str] = []
    unmatched: list[str] = []
    hints: dict[str, list[Hint]] = {}
    save_id: str = ""
    foreign: bool = False
    cost: int = 0
    firsts: Column = _EMPTY
    thawed: list[tuple[str, str]] = []
    gone: str = ""

    def without_table(self) -> LoadAnswer:
        """The same without the columns, which take as much memory again where there are many shards."""
        return msgspec.structs.replace(self, tensors=_NO_TABLE, starts=_EMPTY, blocks=_EMPTY)


class DecideRequest(msgspec.Struct, frozen=True, array_like=True):
    """Round ``decide``: what a rank found when it planned.

    Attributes:
        problems: What does not fit.
        files: The files that it needs, and how many bytes of each it would read.
        unreachable: Why it cannot read some of them.
        staged: Whether some targets are staged.
        objects: Whether there are objects to be given their states in the end.
        torn: Paths, see :meth:`.fit.Fit.torn`.
    """

    problems: list[Mismatch]
    files: dict[str, int]
    unreachable: dict[str, str]
    staged: bool
    objects: bool = False
    torn: list[str] = []


class DecideAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Round ``decide``: how the load goes on.

    Attributes:
        restart: Whether it starts again, since files are gone of a checkpoint that was replaced.
        exchange: Whether ranks read for each other.
        staged: Whether a pass for staged targets comes first.
        files: The files of the exchange, each with its number of blocks.
        probe: Whether this rank is to find out which of the files its folder has.
        shared: Files of which several ranks of one host read the same data.
        objects: Whether the load ends with round ``restore``.
        unused: The flat keys that no rank has asked for.
        left: Problems that single ranks have with distributed tensors: no rank loads its part of these.
        ranks_on_host: How many ranks are on this rank's host.
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
    ranks_on_host: int = 1


class DoneRequest(msgspec.Struct, frozen=True, array_like=True):
    """Rounds ``open``, ``staged``, ``read`` and ``restore``: a rank has done its part.

    Attributes:
        gone: Files that it was to read and could not open, with the reasons.
        problems: What it found not to fit.
        torn: As in :class:`DecideRequest`.
    """

    gone: dict[str, str] = {}
    problems: list[Mismatch] = []
    torn: list[str] = []


class GoOnAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to :class:`DoneRequest`: all ranks have done their parts.

    Attributes:
        restart: As in :class:`DecideAnswer`; after round ``open`` only.
        left: As in :class:`DecideAnswer`.
    """

    restart: bool = False
    left: list[Mismatch] = []


prepare(list(vars().values()))
