"""What ranks tell each other during a load."""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.columns import Column
from ..files.codec import TableRecord
from ..files.metadata import FileInfo
from ..storage.base import Folder

Box2 = tuple[tuple[int, ...], tuple[int, ...]]

__all__ = [
    "Decision",
    "ExchangeOrder",
    "Incoming",
    "LoadAnswer",
    "LoadRequest",
    "LoadResult",
    "Needs",
    "Opened",
    "Piece",
    "Problems",
    "Reach",
    "Round",
    "ShardNeed",
    "UnitRead",
    "Wanted",
]


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """What one rank wants: the tensors' paths, and each value's path with what stands there now.

    ``names`` are the tensors' names, and those of ``others`` of the same state_dict that are not wanted; or all are
    left out. ``moved`` has the stored flat keys that the user has given.
    """

    tensors: list[str]
    values: list[tuple[str, str]]
    others: list[str] = []
    names: list[str | None] = []
    moved: dict[str, str] = {}


class LoadRequest(msgspec.Struct, frozen=True, array_like=True):
    """One rank's wish. ``wanted`` is an encoded :class:`Wanted`, which many ranks have in common."""

    unique_id: int | None
    options: dict[str, str]
    folder: Folder | None
    wanted: bytes


class LoadAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What the checkpoint has of it: tables of the tensors (and stored values), and the small values themselves.

    ``starts`` and ``blocks`` say for each shard where it starts in its file's data section and which is its first
    block; ``block_counts`` says for each file how many blocks it has, ``ranks_on_host`` for each rank how many are on
    its host. ``odd`` tells what stands at wanted paths where there is no tensor, or no value; ``left`` why some entries
    are left as they are. ``stored`` has the stored path of tensors that are not stored under the wanted one,
    ``renamed`` the wanted paths of other entries of data files. ``saved_by`` is how many ranks have saved.
    """

    unique_id: int
    save_id: str
    block_bytes: int
    files: list[FileInfo]
    block_counts: Column
    tensors: TableRecord
    starts: Column
    blocks: Column
    keys: dict[str, str]
    values: list[tuple[str, Any]]
    odd: dict[str, str]
    ranks_on_host: dict[int, int]
    left: dict[str, str] = {}
    stored: dict[str, str] = {}
    renamed: dict[str, list[str]] = {}
    saved_by: int = 1


class Needs(msgspec.Struct, frozen=True, array_like=True):
    """What a rank found when it planned: problems, the files that it needs and how many bytes of each it would read,
    why it cannot read some of them, and whether there are objects to be given their states in the end."""

    problems: list[str]
    files: dict[str, int]
    unreachable: dict[str, str]
    staged: bool
    objects: bool = False


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """How the load goes on: ``restart``, or with an exchange of these files or without, staged pass first or not.

    ``probe`` tells a rank to find out which of the files its folder has. ``shared`` are files of which ranks of one
    host read the same data. ``objects``: the load ends with round ``restore``.
    """

    restart: bool = False
    exchange: bool = False
    staged: bool = False
    files: list[FileInfo] = []
    block_counts: list[int] = []
    probe: bool = False
    shared: list[str] = []
    objects: bool = False


class ShardNeed(msgspec.Struct, frozen=True, array_like=True):
    """A box that a rank needs of a tensor's shard, in the shard's own coordinates; ``row`` is the rank's number for it.

    ``shard`` counts the shards of the tensor.
    """

    path: str
    shard: int
    row: int
    box: Box2
    staged: bool


class Reach(msgspec.Struct, frozen=True, array_like=True):
    """Which of the asked files are in a rank's folder, if it was to find out, and what it needs."""

    files: list[str]
    needs: list[ShardNeed]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A box of a shard on its way to a rank position (-1: to all), for that rank's need ``row``.

    ``message`` says, of what goes to all, in which of this reader's broadcasts of the round it goes.
    """

    destination: int
    row: int
    box: Box2
    message: int = 0


class UnitRead(msgspec.Struct, frozen=True, array_like=True):
    """Something to read from a file: a shard and the pieces that are wanted of it."""

    file: str
    start: int
    first_block: int
    shape: tuple[int, ...]
    dtype: str
    key: str
    pieces: list[Piece]


class Incoming(msgspec.Struct, frozen=True, array_like=True):
    """What comes from one rank position in one message: for each piece its need's ``row`` (-1: not for this rank), its
    box in the shard, and its size in bytes."""

    source: int
    rows: list[int]
    boxes: list[Box2]
    sizes: list[int]


class Round(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part in one round: what to read, what comes by broadcast, what comes for this rank alone.

    ``scatters`` are the operations by which the latter comes, in which all ranks take part: each source, and the size
    of its largest message.
    """

    reads: list[UnitRead]
    broadcasts: list[Incoming]
    receives: list[Incoming]
    scatters: list[tuple[int, int]]


class ExchangeOrder(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part in an exchange: the files that it reads, the rounds of the staged pass and of the main one."""

    restart: bool
    files: list[str]
    staged: list[Round]
    main: list[Round]


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """The files that a rank was to read and could not open, with the reasons."""

    gone: dict[str, str]


class Problems(msgspec.Struct, frozen=True, array_like=True):
    """What does not fit, found in the staged pass."""

    problems: list[str]


class LoadResult(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator knows at the end: the flat keys that no rank asked for."""

    unused: list[str]
