"""The Protocol of a storage: a flat folder of named byte sequences, with an atomic way to publish one."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from ..core.memory import Bytes1D

__all__ = ["Folder", "FolderIdentity", "ReadableFile", "Storage", "WritableFile", "is_refusal"]

_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


class FolderIdentity(NamedTuple):
    """Tells whether two ranks see one folder: the host (this boot of it) and the folder's device and inode there."""

    host: str
    device: int
    inode: int


class WritableFile(Protocol):
    """A new file that is being written.

    It may also have a method ``extend(nbytes)``, which is called before anything is written: make so many bytes of it
    zeros, of which there is nothing on the disk. It returns whether that was possible; if not, nothing has changed.
    """

    def write(self, data: Bytes1D, offset: int) -> None:
        """Write all of ``data`` at ``offset``; its memory is filled anew after that. Raises OSError if that did not
        succeed in full."""
        ...

    def sync(self) -> None:
        """Make what was written durable."""
        ...

    def close(self) -> None:
        """Give the file's resources back. What was not synced may be lost."""
        ...


class ReadableFile(Protocol):
    """A file open for reading.

    It may also have a method ``is_hole(offset, nbytes)``: whether it is known that there is nothing on the disk for all
    of these bytes, which are zeros then. They are not read if zeros are what was written. And if it can tell:
    ``hole_bytes(offset, nbytes)``, how many of these bytes are in holes, and ``on_disk``, a pair of what tells the file
    from others and how many bytes it has that are in none. ``read_windows(data, offset, nbytes, each)`` fills ``data``
    in windows of so many bytes, and calls ``each`` with every one when it is there; else each is read by itself.
    """

    @property
    def size(self) -> int:
        """How many bytes the file has."""
        ...

    def read_into(self, buffers: Sequence[Bytes1D], offset: int, once: bool = False) -> None:
        """Fill the buffers, one behind the other, from ``offset``.

        Args:
            buffers: What to fill.
            offset: Where to start.
            once: A hint that nobody on this host is about to read the same bytes too, so that a cache has no use for
                what it does not hold already.

        Raises:
            EOFError: the file ends before.
        """
        ...

    def is_cached(self) -> bool:
        """Whether most of it can be read without waiting for a disk, as far as is known.

        What needs no wait is read in pieces of 256 KiB, so that it is hashed while the processor's cache has it.
        """
        ...

    def close(self) -> None:
        """Give the file's resources back."""
        ...


@runtime_checkable
class Storage(Protocol):
    """A folder of files, which are called by plain file names.

    Methods raise OSError, and FileNotFoundError where a name is missing. Several threads may call them at once.
    :mod:`paddle_dist_ckpt.testing.storage_conformance` tests whether an implementation does all that is said here.

    It may also have an attribute ``is_part``, which is true if it stands for files of a folder that somebody has picked
    by name: :meth:`names` has no others then. And an attribute ``has_folders``, which is true if :meth:`modified` takes
    the path of a file in a folder of the folder, such as ``step_7/7.metadata``, for a name: errors then tell of these.
    """

    @property
    def location(self) -> str:
        """What to call the folder in messages."""
        ...

    def prepare(self) -> None:
        """Make the folder if it is not there."""
        ...

    def identity(self) -> FolderIdentity:
        """Which folder it is: equal on two ranks if what one writes is what the other reads."""
        ...

    def free_bytes(self) -> int | None:
        """How many bytes can still be written, or None where that is not known."""
        ...

    def names(self) -> list[str]:
        """All names in the folder; an empty list if there is no folder. NotADirectoryError if it is something else."""
        ...

    def create(self, name: str) -> WritableFile:
        """Start a new file; FileExistsError if the name is taken."""
        ...

    def open(self, name: str) -> ReadableFile:
        """Open a file for reading; IsADirectoryError if it is no file of the folder, such as a folder or a FIFO."""
        ...

    def size(self, name: str) -> int:
        """How many bytes a file has; IsADirectoryError if it is no file of the folder, as for :meth:`open`."""
        ...

    def read(self, name: str, limit: int | None = None) -> bytes:
        """A file's content, or its first ``limit`` bytes; IsADirectoryError if it is no file."""
        ...

    def publish(
        self, name: str, data: bytes, temporary: str, replace: bool, confirm: Callable[[], None] | None = None
    ) -> bool:
        """Make ``name`` hold ``data``, durably and at once: a reader sees the old content or the new one, whole.

        Args:
            name: The final name.
            data: The content.
            temporary: A name to use on the way, where one is needed. If somebody deletes it meanwhile, nothing may be
                published, and OSError is raised.
            replace: Whether to replace a file of that name; if not and there is one, nothing changes.
            confirm: Called when the content is complete and has only its temporary name; may raise to stop.

        Returns:
            Whether it was published.

        Raises:
            OSError: it was not published; or it was, and readers see it, but it is not certain to be durable. Who calls
                looks which of the two. What goes wrong with the temporary name after that is no error.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens if it is not there, or is a folder."""
        ...

    def sync(self) -> None:
        """Make the folder's names durable."""
        ...

    def touch(self, name: str) -> None:
        """Set a file's modification time to now, by the folder's own clock."""
        ...

    def modified(self, name: str) -> float:
        """When a file was last modified, in seconds, by the folder's own clock."""
        ...


class Folder(msgspec.Struct, frozen=True, array_like=True):
    """Which folder a rank sees, and how much room there is (None: unknown)."""

    identity: FolderIdentity
    free_bytes: int | None


def is_refusal(error: OSError) -> bool:
    """Whether a storage has said that it does not do something, now or late; of other errors that is not known."""
    return error.errno in _REFUSALS
