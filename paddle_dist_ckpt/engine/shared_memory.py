"""Targets that share memory: tied weights, or a tensor and views of it. What they get must agree."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .targets import Target

__all__ = ["SharedMemory", "find_shared_memory"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemory:
    """A stretch of memory that several targets reach into. The targets are read to buffers of their own first.

    Attributes:
        targets: The targets; their ``array`` is the buffer.
        memories: The memory of each.
        low: The stretch's first address.
        high: The address behind it.
    """

    targets: list[Target]
    memories: list[Array]
    low: int
    high: int

    def differing(self) -> list[Target]:
        """The targets that another one would overwrite with other data."""
        if not self.targets:
            return []
        first = self.memories[0]
        if all(_same_elements(first, memory) for memory in self.memories):
            data = self.targets[0].array.tobytes()
            return [target for target in self.targets if target.array.tobytes() != data]
        trial = np.empty(self.high - self.low, np.uint8)
        views = [self._moved(memory, trial) for memory in self.memories]
        for target, view in zip(self.targets, views, strict=True):
            view[...] = target.array
        pairs = zip(self.targets, views, strict=True)
        return [target for target, view in pairs if view.tobytes() != target.array.tobytes()]

    def _moved(self, memory: Array, trial: npt.NDArray[np.uint8]) -> Array:
        """What ``memory`` would be if the stretch were ``trial``."""
        offset = _address(memory) - self.low
        return np.ndarray(memory.shape, memory.dtype, trial.data, offset, memory.strides)

    def without(self, targets: Container[Target]) -> SharedMemory:
        """The same without targets that are not read."""
        kept = [(t, m) for t, m in zip(self.targets, self.memories, strict=True) if t not in targets]
        return SharedMemory([t for t, _ in kept], [m for _, m in kept], self.low, self.high)

    def fill(self) -> None:
        """Fill the memory from the buffers."""
        for target, memory in zip(self.targets, self.memories, strict=True):
            memory[...] = target.array


def find_shared_memory(targets: Sequence[Target]) -> list[SharedMemory]:
    """Find targets of different paths whose memory overlaps, and give them buffers of their own.

    Targets that merely lie between each other's rows are taken for sharing; that costs memory and does no harm.
    """
    spans = sorted(((*_span(t.array), i) for i, t in enumerate(targets) if not t.staged and t.array.size))
    shared: list[SharedMemory] = []
    group: list[int] = []
    low = high = 0
    for start, stop, i in [*spans, (1 << 64, 1 << 64, -1)]:
        if start < high:
            group.append(i)
            high = max(high, stop)
            continue
        if len({targets[j].path for j in group}) > 1:
            shared.append(_stage([targets[j] for j in group], low, high))
        group, low, high = [i], start, stop
    return shared


def _stage(targets: list[Target], low: int, high: int) -> SharedMemory:
    memories = [target.array for target in targets]
    for target in targets:
        target.array, target.staged = np.empty(target.shape, target.wanted.raw), True
    return SharedMemory(targets, memories, low, high)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _span(array: Array) -> tuple[int, int]:
    """The addresses of an array's first byte and of the one behind its last."""
    address = _address(array)
    if array.flags.c_contiguous:
        return address, address + array.nbytes
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    return address + sum(min(0, r) for r in reach), address + sum(max(0, r) for r in reach) + array.itemsize


def _same_elements(a: Array, b: Array) -> bool:
    """Whether two arrays have the same elements in the same order."""
    if _address(a) != _address(b) or a.nbytes != b.nbytes:
        return False
    return (a.flags.c_contiguous and b.flags.c_contiguous) or (a.shape == b.shape and a.strides == b.strides)
