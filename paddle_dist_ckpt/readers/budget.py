"""How much work and memory a checkpoint may take, from how much there really is of it on the disk."""

from __future__ import annotations

from ..errors import CheckpointCorruptedError

__all__ = ["Budget"]

_FREE = 4 << 20  # steps that may be made of any checkpoint, however small: about a second
_OF_TEN_BYTES = 7  # steps


class Budget:
    """What is left of the steps that may be made to find out what one checkpoint holds.

    A step is about a quarter of a microsecond, and ten bytes of memory. What costs more is counted as several. So time
    and memory follow from what is on the disk, on any machine and at any load in the same way: not from what files say
    of themselves, nor from how long they are where they have holes.
    """

    def __init__(self) -> None:
        self._left = _FREE
        self._files = set[object]()

    def grant(self, file: object, nbytes: int) -> None:
        """Allow more steps for a file of so many bytes, once however many names and links it has."""
        if file not in self._files:
            self._files.add(file)
            self._left += nbytes * _OF_TEN_BYTES // 10

    def spend(self, steps: int, where: object) -> None:
        """Count steps; ``where`` says what for, as text or by what becomes text.

        Raises:
            CheckpointCorruptedError: there are not so many left.
        """
        self._left -= steps
        if self._left < 0:
            raise CheckpointCorruptedError(
                f"{where}: what has been read so far takes more time and memory than its size on the disk has room for"
            )
