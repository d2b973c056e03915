"""What a checkpoint of another format holds and where it lies, as a plain value, and the Protocol of what finds it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..core.box import Box
from ..core.dtypes import DType
from ..storage.base import Storage
from ..tree.paths import Part

__all__ = ["Catalog", "Piece", "Reader", "StoredChecksum", "StoredFile", "StoredTensor"]


class StoredFile(NamedTuple):
    """A file of a checkpoint: its plain name in the folder, and how many bytes it has there."""

    name: str
    size: int


class Piece(NamedTuple):
    """Where a part of a tensor lies.

    Attributes:
        box: Which part of the global tensor it is.
        file: The file's number in the catalog.
        position: Where in the file the part's data begin, in bytes. They are contiguous and in C order.
    """

    box: Box
    file: int
    position: int


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        path: Its nested path in the state_dict.
        dtype: Its true element type, bfloat16 and float8 too.
        shape: Its global shape.
        name: The framework's name of the variable, None where it is not known.
        pieces: Its parts, disjoint. Of replicas one is taken. Together they normally are the whole tensor.
        offsets: Where the boxes start of which ranks had parts, each once, ascending, if that is not where the pieces
            start; else None.
    """

    path: tuple[Part, ...]
    dtype: DType
    shape: tuple[int, ...]
    name: str | None
    pieces: list[Piece]
    offsets: list[tuple[int, ...]] | None = None


class StoredChecksum(NamedTuple):
    """What a format says of a range of a file's bytes, by which it can be verified: the range and its CRC-32."""

    file: int
    position: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """A checkpoint of another format. Everything in it has been checked: pieces lie in their files and tensors.

    Attributes:
        format: The format's short name, :attr:`Reader.format`.
        unique_id: Which of the folder's checkpoints it is; 0 where the format has no such number.
        world_size: How many ranks wrote it, as far as it shows; 1 if it does not.
        files: The files that hold tensors.
        tensors: The tensors, all of different paths.
        values: Everything that is no tensor, by its path: None, bool, int, float, str, bytes, and lists, tuples and
            dicts of these.
        checksums: What the format itself allows to verify.
        version: What wrote it, None if it does not say so.
        left_out: What it has beside that and cannot be read, by its path, with the reason.
        lost: The paths of those that cannot be read because they are not there, though the checkpoint speaks of them.
    """

    format: str
    unique_id: int
    world_size: int
    files: list[StoredFile]
    tensors: list[StoredTensor]
    values: list[tuple[tuple[Part, ...], Any]] = field(default_factory=list)
    checksums: list[StoredChecksum] = field(default_factory=list)
    version: str | None = None
    left_out: list[tuple[tuple[Part, ...], str]] = field(default_factory=list)
    lost: list[tuple[Part, ...]] = field(default_factory=list)


@runtime_checkable
class Reader(Protocol):
    """Reads the catalogs of one format. It holds no state, reads no tensor's data and executes nothing it reads.

    :mod:`paddle_dist_ckpt.testing.reader_conformance` tests whether an implementation does all that is said here.
    """

    @property
    def format(self) -> str:
        """The format's short name: a lower-case word, as in ``"paddle"``."""
        ...

    @property
    def title(self) -> str:
        """What to call the format in messages."""
        ...

    def found(self, names: Collection[str]) -> list[int]:
        """The ids of all checkpoints of this format among the names of a folder, ascending. Looks at names only."""
        ...

    def read(self, storage: Storage, names: Collection[str], unique_id: int) -> Catalog:
        """The catalog of one checkpoint.

        Args:
            storage: The folder.
            names: The names in the folder that may belong to the checkpoint: all of them, or those to keep to.
            unique_id: Which checkpoint, one of those that :meth:`found` finds.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint among these names.
            CheckpointCorruptedError: a file is missing, damaged or not what it claims to be; the message has the file
                and what is wrong with it.
            UnsupportedValueError: the checkpoint holds something that cannot be read; the message says what and where.
            OSError: the storage could not be read.
        """
        ...
