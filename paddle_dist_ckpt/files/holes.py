"""How much of a data file may be holes that have to be read, since the blocks that they are in are not all zeros.

A save makes no holes; copies and exports of a checkpoint may have them. What is read of holes takes time and memory,
and nothing on the disk: so it may be about as much as there is on the disk.
"""

from __future__ import annotations

import threading

from ..errors import CheckpointCorruptedError
from ..storage.base import ReadableFile
from ..storage.capabilities import hole_bytes, what_is_on_disk

__all__ = ["Holes"]

_MOST = 48 << 20  # and as many bytes as the file has on the disk


class Holes:
    """What may still be read of the holes in one file.

    Args:
        name: The file's name, for errors.
        file: The file.

    Attributes:
        none: Whether it has none, as far as is known.
    """

    def __init__(self, name: str, file: ReadableFile) -> None:
        self._name, self._file = name, file
        _, self._on_disk = what_is_on_disk(file, name)
        self.none = self._on_disk >= file.size
        self._left = _MOST + self._on_disk
        self._may_exceed = file.size - self._on_disk > self._left
        self._seen = set[int]()
        self._lock = threading.Lock()

    def read(self, offset: int, nbytes: int) -> None:
        """Count what of these bytes are holes, once wherever they begin.

        Raises:
            CheckpointCorruptedError: that is more than may be read.
        """
        if not self._may_exceed:
            return
        with self._lock:
            if offset not in self._seen:
                self._seen.add(offset)
                self._left -= hole_bytes(self._file, offset, nbytes) or 0
            if self._left < 0:
                raise CheckpointCorruptedError(
                    f"{self._name} has {self._on_disk} bytes on the disk, and in other blocks more holes "
                    "than there is memory for; if it is a copy that was made with holes, copy it again without "
                    "(cp --sparse=never)"
                )
