"""What ranks tell each other during a save or a load, as typed msgpack messages."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..core.columns import Column, IntArray
from ..errors import CheckpointError
from ..files.codec import TableRecord
from ..files.metadata import FileInfo

__all__ = ["decode", "encode", "pack_signed", "unpack_signed"]

T = TypeVar("T")
Box2 = tuple[tuple[int, ...], tuple[int, ...]]


class Folder(msgspec.Struct, frozen=True, array_like=True):
    """Which folder a rank sees, and how much room there is (None: unknown)."""

    host: str
    device: int
    inode: int
    free_bytes: int | None

    @property
    def key(self) -> tuple[str, int, int]:
        """Equal for ranks that see one folder."""
        return (self.host, self.device, self.inode)


class ValueRecord(msgspec.Struct, frozen=True, array_like=True):
    """A value's digest, and its JSON, or None where it is kept as an entry of a data file."""

    digest: int
    json: bytes | None


class Description(msgspec.Struct, frozen=True, array_like=True):
    """What is the same of a tensor on all ranks that have it. ``addends`` is 0 unless it is partial."""

    dtype: str
    kind: int
    plain: bool
    shape: tuple[int, ...]
    operation: str | None
    addends: int


class TensorList(msgspec.Struct, frozen=True, array_like=True):
    """Tensors, in one rank's order. Most ranks of a job send equal lists, so these are decoded once."""

    paths: list[str]
    names: list[str | None]
    descriptions: list[Description]
    description: Column


class Structure(msgspec.Struct, frozen=True, array_like=True):
    """All of a rank's state but its contents and its memory: what stays the same from save to save.

    ``tensors`` is an encoded :class:`TensorList`. Each tensor has a ``geometry``; geometry g has ``pieces[g]`` pieces,
    whose rows in ``cells`` follow each other: offset and shape, padded to ``dimensions`` with 0 and 1, and the addend
    (-1: not partial). ``values`` are paths, and whether the value is an empty container.
    """

    tensors: bytes
    geometry: Column
    pieces: Column
    dimensions: int
    cells: bytes
    values: list[tuple[str, bool]]


class SaveRequest(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has to save.

    ``structure`` is an encoded :class:`Structure`, of which ``fingerprint`` is the digest. It is left out, None, where
    the coordinator is believed to know it. ``digests`` are those of the plain tensors, ``values`` run along the
    structure's. ``plan_id`` names the plan that the rank still has, 0 for none.
    """

    unique_id: int | None
    folder: Folder
    block_bytes: int
    fingerprint: bytes
    structure: bytes | None
    plan_id: int
    digests: bytes
    values: list[ValueRecord]
    user_metadata: bytes | None


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """An addend's box that goes from one rank to another. Rows are the ranks' own shard numbers."""

    source: int
    source_row: int
    destination: int
    destination_row: int
    box: Box2
    nbytes: int


class RankPlan(msgspec.Struct, frozen=True, array_like=True):
    """What one rank is to write, in the order of its files: the pieces ``row`` of its state, counted over all tensors.

    Of the items ``cut`` only a box is written; ``boxes`` has them in global coordinates, offset and shape padded to
    ``dimensions``. ``keys`` are the flat keys that do not follow from the paths, ``values`` the paths whose values this
    rank's header keeps, ``writers`` (for the coordinator) the ranks that write files.
    """

    row: Column
    cut: Column
    dimensions: int
    boxes: bytes
    keys: dict[str, str]
    values: list[str]
    transfers: list[Transfer]
    total_bytes: int
    writers: list[int] | None


class SaveOrder(msgspec.Struct, frozen=True, array_like=True):
    """What one rank is to do. ``plan`` is an encoded :class:`RankPlan`, None if the rank has it; without a ``save_id``
    the coordinator first wants to know all structures."""

    plan_id: int
    plan: bytes | None
    unique_id: int
    save_id: str
    created: str
    ranks_on_host: int
    clean: list[str]


class Written(msgspec.Struct, frozen=True, array_like=True):
    """The files that one rank wrote, and how many entries each has."""

    files: list[FileInfo]
    entries: list[int]
    nbytes: int


class SaveResult(msgspec.Struct, frozen=True, array_like=True):
    """What was committed.

    ``replaced`` is the save whose files ``leaders`` now remove from their folders; None where there is one folder, in
    which the coordinator does that by itself.
    """

    unique_id: int
    files: int
    total_bytes: int
    warnings: list[str]
    replaced: str | None
    leaders: list[int]


class WriteAnswer(msgspec.Struct, frozen=True, array_like=True):
    """How a save goes on: ``result`` if it is committed, ``abort`` if a rank failed, else seal ``files``."""

    abort: bool
    files: list[FileInfo]
    result: SaveResult | None


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


def encode(message: msgspec.Struct) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """The message of this type.

    Raises:
        CheckpointError: it is something else, which means that ranks run different versions of this library.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"a rank sent no {kind.__name__}; do all ranks run one version? ({error})") from error


def pack_signed(values: npt.ArrayLike) -> bytes:
    """Integers of any sign as bytes."""
    return np.ascontiguousarray(values, "<i8").tobytes()


def unpack_signed(data: bytes, columns: int) -> IntArray:
    """Rows of ``columns`` integers each."""
    return np.frombuffer(data, "<i8").reshape(-1, columns)
