"""What a storage and its files may have beside what :mod:`.base` demands, and what is so of one that does not say."""

from __future__ import annotations

from collections.abc import Callable

from ..core.memory import Bytes1D
from .base import ReadableFile, Storage, WritableFile

__all__ = [
    "extended",
    "has_folders",
    "hole_bytes",
    "is_hole",
    "is_part",
    "is_published",
    "read_windows",
    "what_is_on_disk",
]


def is_part(storage: Storage) -> bool:
    """Whether a storage stands for files of a folder that somebody has picked by name."""
    return getattr(storage, "is_part", False)


def has_folders(storage: Storage) -> bool:
    """Whether a storage takes the path of a file in a folder of the folder for a name."""
    return getattr(storage, "has_folders", False)


def is_published(storage: Storage, name: str, data: bytes) -> bool:
    """Whether a file that was being published when that was given up can be seen by now, as far as is known."""
    known = getattr(storage, "is_published", None)
    return known is not None and bool(known(name, data))


def extended(file: WritableFile, nbytes: int) -> bool:
    """Make a new file as long as it will be, so that zeros need not be written; returns whether that can be done."""
    known = getattr(file, "extend", None)
    return known is not None and bool(known(nbytes))


def is_hole(file: ReadableFile, offset: int, nbytes: int) -> bool:
    """Whether a range of a file has no bytes on the disk, as far as is known."""
    known = getattr(file, "is_hole", None)
    return known is not None and bool(known(offset, nbytes))


def hole_bytes(file: ReadableFile, offset: int, nbytes: int) -> int | None:
    """How many bytes of a range of a file are in holes; None where that is not known."""
    known = getattr(file, "hole_bytes", None)
    return None if known is None else int(known(offset, nbytes))


def read_windows(
    file: ReadableFile, data: Bytes1D, offset: int, nbytes: int, each: Callable[[memoryview], object]
) -> None:
    """Fill memory from ``offset``, in windows of so many bytes, and call something with each when it is there.

    A file that can do so itself has less of Python between windows, which leave nothing of it in the cache.

    Raises:
        EOFError: the file ends before.
    """
    known = getattr(file, "read_windows", None)
    if known is not None:
        known(data, offset, nbytes, each)
        return
    for start in range(0, len(data), nbytes):
        window = data[start : start + nbytes]
        file.read_into([window], offset + start)
        each(window.data)


def what_is_on_disk(file: ReadableFile, name: object) -> tuple[object, int]:
    """What tells a file from others, and how many of its bytes are in no hole.

    Where that is not known, its ``name`` tells it from others, and all of its bytes count.
    """
    known: tuple[object, int] | None = getattr(file, "on_disk", None)
    return (name, file.size) if known is None else known
