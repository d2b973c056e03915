"""What ranks tell each other during a save."""

from __future__ import annotations

import msgspec

from ..core.box import Box
from ..core.columns import Column
from ..core.decoding import hash_of
from ..core.messages import prepare
from ..files.metadata import FileInfo, SaveInfo
from ..storage.base import Folder

__all__ = [
    "ClearRequest",
    "CommitAnswer",
    "Description",
    "ItemList",
    "PlanAnswer",
    "RankPlan",
    "SaveRequest",
    "Structure",
    "TensorList",
    "Transfer",
    "ValueRecord",
    "WriteAnswer",
    "WriteRequest",
]


class ValueRecord(msgspec.Struct, frozen=True, array_like=True):
    """A value's digest, and its JSON, or None where it is kept as an entry of a data file; what it then costs to be
    decoded, see :func:`.core.decoding.json_cost`."""

    digest: int
    json: bytes | None
    cost: int = 0


class Description(msgspec.Struct, frozen=True, array_like=True):
    """What is the same of a tensor on all ranks that have it. ``addends`` is 0 unless it is partial."""

    dtype: str
    kind: int
    plain: bool
    shape: tuple[int, ...]
    operation: str | None
    addends: int

    def __hash__(self) -> int:
        return hash_of(self.shape)  # shapes may be a stranger's


class TensorList(msgspec.Struct, frozen=True, array_like=True):
    """Tensors, in one rank's order. Most ranks of a job send equal lists, so these are decoded once."""

    paths: list[str]
    names: list[str | None]
    descriptions: list[Description]
    description: Column


class Structure(msgspec.Struct, frozen=True, array_like=True):
    """All of a rank's state but its contents and its memory: what stays the same from save to save.

    ``tensors`` is an encoded :class:`TensorList`. Each tensor has a ``geometry``; geometry g has ``shards[g]`` shards,
    whose rows in ``cells`` follow each other: offset and shape, padded to ``dimensions`` with 0 and 1, and the addend
    (-1: not partial). ``values`` are paths, and whether the value is an empty container.
    """

    tensors: bytes
    geometry: Column
    shards: Column
    dimensions: int
    cells: bytes
    values: list[tuple[str, bool]]


class SaveRequest(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has to save.

    ``structure`` is an encoded :class:`Structure`, of which ``fingerprint`` is the digest. It is left out, None, where
    the coordinator is believed to know it. ``digests`` are those of the plain tensors, ``values`` run along the
    structure's. ``plan_id`` names the plan that the rank still has, 0 for none. ``on_device`` says whether some tensors
    are in a device's memory.
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
    data_suffix: str | None = None
    location: str = ""
    on_device: bool = False
    check_replicas: str = ""


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """A box of an addend that goes from one rank to another.

    ``source`` and ``destination`` are global ranks, the rows their own numbers of the shards, ``box`` is in global
    coordinates.
    """

    source: int
    source_row: int
    destination: int
    destination_row: int
    box: Box
    nbytes: int


class ItemList(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has of what is written: the shards ``row`` of its state, counted over all tensors.

    Of the items ``cut`` it is only a box; ``boxes`` has them in global coordinates, offset and shape padded to
    ``dimensions``.
    """

    row: Column
    cut: Column
    dimensions: int
    boxes: bytes


class RankPlan(msgspec.Struct, frozen=True, array_like=True):
    """What one rank is to write, in the order of its files.

    Of the items ``copied`` other ranks have copies; ``copies`` are those that it has itself of what others write.
    ``keys`` are the flat keys that do not follow from the paths, ``values`` the paths whose values this rank's header
    keeps, ``writers`` (for the coordinator) the ranks that write files.
    """

    items: ItemList
    copied: Column
    copies: ItemList
    keys: dict[str, str]
    values: list[str]
    transfers: list[Transfer]
    total_bytes: int
    writers: list[int] | None


class PlanAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What one rank is to do, in the save ``save``.

    ``plan`` is an encoded :class:`RankPlan`, None if the rank has it. In round ``plan`` the coordinator answers nothing
    at all if it first wants to know all structures. ``dead`` are saves whose files this rank removes in round
    ``clear``, before anything is written; None if there is no such round. ``compared`` says which blocks of copies are
    compared: all, or which part of them, from 0; None for none.
    """

    plan_id: int
    plan: bytes | None
    save: SaveInfo
    ranks_on_host: int
    dead: list[str] | None
    compared: int | None = None


class ClearRequest(msgspec.Struct, frozen=True, array_like=True):
    """How much room a rank's folder has when it has removed what it was to remove (None: unknown), and whether some of
    that is left."""

    free_bytes: int | None
    left: bool


class WriteRequest(msgspec.Struct, frozen=True, array_like=True):
    """What one rank wrote and wants committed: its files, how many entries each has, and their bytes of data.

    ``seconds`` says how long each phase took it until then. ``copied`` and ``copies`` are digests of the items that its
    plan calls so, 8 bytes each, if these are compared.
    """

    files: list[FileInfo]
    entries: list[int]
    nbytes: int
    seconds: dict[str, float]
    copied: bytes = b""
    copies: bytes = b""


class CommitAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What was committed.

    ``replaced`` are the saves whose files ``leaders`` now remove from their folders; none where there is one folder, in
    which the coordinator does that by itself.
    """

    unique_id: int
    files: int
    total_bytes: int
    warnings: list[str]
    replaced: list[str]
    leaders: list[int]


class WriteAnswer(msgspec.Struct, frozen=True, array_like=True):
    """How a save goes on: ``result`` if it is committed, ``abort`` if a rank failed, else the rank seals ``files``."""

    abort: bool
    files: list[FileInfo]
    result: CommitAnswer | None


prepare(list(vars().values()))
