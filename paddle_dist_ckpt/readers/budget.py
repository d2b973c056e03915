"""How much work and memory a checkpoint may take, from how much there really is of it on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..errors import CheckpointCorruptedError

__all__ = ["Budget"]

_FREE = 9 << 19  # steps that may be made of any checkpoint, however small: about a second
_FREE_BYTES = 16 << 20  # that may be read beyond those on the disk, where files may be compressed
_FEW_DIMENSIONS = 2
_SMALL = 32 << 20  # bytes for which there are three steps for twenty; beyond them, two


class Budget:
    """What is left of the steps that may be made to find out what one checkpoint holds.

    A step is about a fifth of a microsecond, and at most ten bytes of memory; what costs more counts as several. So
    looking at a checkpoint takes at most about 64 MiB beyond its size, a second, and one more for each ten MiB of it.
    Both follow from what is on the disk, on any machine and at any load in the same way: not from what files say of
    themselves, nor from how long they are where they have holes.

    Args:
        more: Gives more files, each with its bytes, that the checkpoint has beside those that have been granted. It is
            called when there would be no steps left without them.
    """

    def __init__(self, more: Callable[[], Iterable[tuple[object, int]]] = tuple) -> None:
        self._left, self._left_bytes = _FREE, _FREE_BYTES
        self._more = more
        self._bytes = 0
        self._files = set[object]()
        self._looked_at = set[int]()

    def grant(self, file: object, nbytes: int) -> None:
        """Allow more for a file of so many bytes, once however many names and links it has."""
        if file not in self._files:
            self._files.add(file)
            self._left_bytes += nbytes
            before, self._bytes = self._bytes, self._bytes + nbytes
            self._left += _steps_for(self._bytes) - _steps_for(before)

    def has(self, steps: int) -> bool:
        """Whether there are so many steps left."""
        if self._left < steps:
            self._ask_for_more()
        return self._left >= steps

    def spend(self, steps: int, where: object) -> None:
        """Count steps; ``where`` says what for, as text or by what becomes text.

        Raises:
            CheckpointCorruptedError: there are not so many left.
        """
        self._left -= steps
        if self._left < 0:
            self._ask_for_more()
        if self._left < 0:
            raise CheckpointCorruptedError(
                f"{where}: what has been read so far takes more time and memory than its size on the disk has room for"
            )

    def take_bytes(self, nbytes: int, where: object) -> None:
        """Count bytes of long texts and byte strings, which are not read before they are wanted; they are no steps.

        Raises:
            CheckpointCorruptedError: the files granted so far have not so many on the disk.
        """
        self._left_bytes -= nbytes
        if self._left_bytes < 0:
            raise CheckpointCorruptedError(f"{where} and what is before it are larger than the files")

    def spend_again(self, steps: int, record: object, where: object) -> None:
        """Count steps for a record that has been looked at before: what it takes to look at each once is counted when
        it is read. Records are known by identity, and must stay alive."""
        if id(record) in self._looked_at:
            self.spend(steps, where)
        self._looked_at.add(id(record))

    def spend_on_dimensions(self, steps: int, dimensions: int, where: object) -> None:
        """Count steps for each dimension beyond a few, for which what is counted when a shape is read suffices."""
        self.spend(steps * max(0, dimensions - _FEW_DIMENSIONS), where)

    def _ask_for_more(self) -> None:
        more, self._more = self._more, tuple
        for file, nbytes in more():
            self.grant(file, nbytes)


def _steps_for(nbytes: int) -> int:
    return (2 * nbytes + min(nbytes, _SMALL)) // 20
