"""How much of a data file may be holes that have to be read, since the blocks that they are in are not all zeros.

A save makes no holes; copies and exports of a checkpoint may have them. What is read of holes takes time and memory,
and nothing on the disk: so it may be about as much as there is on the disk, in all files that are read together.
"""

from __future__ import annotations

import threading

from ..errors import CheckpointCorruptedError
from ..storage.base import ReadableFile
from ..storage.capabilities import hole_bytes, what_is_on_disk

__all__ = ["HoleBudget", "Holes"]

_MOST = 48 << 20  # of all files, and of each as many bytes as it has on the disk


class HoleBudget:
    """What may still be read of holes in files that are read together, beyond what each has on the disk."""

    def __init__(self) -> None:
        self.left = _MOST
        self.lock = threading.Lock()


class Holes:
    """What may still be read of the holes in one file.

    Args:
        name: The file's name, for errors.
        file: The file.
        budget: What all files may have together beyond that.

    Attributes:
        none: Whether it has none, as far as is known.
        may_exceed: Whether it may have more than there is on the disk.
    """

    def __init__(self, name: str, file: ReadableFile, budget: HoleBudget) -> None:
        self._name, self._file, self._budget = name, file, budget
        _, self._on_disk = what_is_on_disk(file, name)
        self.none = self._on_disk >= file.size
        self._left = self._on_disk
        self.may_exceed = file.size - self._on_disk > self._left
        self._seen = set[int]()

    def read(self, offset: int, nbytes: int) -> None:
        """Count what of these bytes are holes, once wherever they begin.

        Raises:
            CheckpointCorruptedError: that is more than may be read.
        """
        if not self.may_exceed:
            return
        with self._budget.lock:
            is_new = offset not in self._seen
            self._seen.add(offset)
        found = (hole_bytes(self._file, offset, nbytes) or 0) if is_new else 0  # others need not wait for this file
        with self._budget.lock:
            self._budget.left -= max(0, found - self._left)
            self._left = max(0, self._left - found)
            if self._left == 0 and self._budget.left < 0:
                raise CheckpointCorruptedError(
                    f"{self._name} has {self._on_disk} bytes on the disk, and in other blocks more holes "
                    "than there is memory for; if it is a copy that was made with holes, copy it again without "
                    "(cp --sparse=never)"
                )
