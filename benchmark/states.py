"""The states that are saved and loaded: which tensors, how they are sharded, and which values they hold.

State A looks like a part of a language model: 6 layers, 0.68 GB; state C has 36 such layers, 4.1 GB. State B is 20,000
tiny tensors, so that what counts is the work per tensor; states D and E are 5,000 and 50,000 such tensors. For a smoke
test the states are of the same make, but small. ``tensors:N`` is N tiny tensors, ``bytes:N`` about so many bytes in
tensors of 16 MB.
Values follow from a tensor's number and an element's place in the global tensor, so that every rank can make its part,
and check a load, without seeing the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LAYOUTS", "Array", "TensorSpec", "layout"]

Array = npt.NDArray[Any]

_MULTIPLIER = np.uint32(2654435761)  # Knuth's multiplicative hash: neighbours get unrelated values
_EXACT = np.uint32((1 << 24) - 1)  # integers up to here are exact in float32

LAYOUTS = {"A": ("same", "swapped", "layer"), "B": ("same", "swapped")}
"""The layouts of the states that benchmark.run times; of state C it measures only the memory."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One float32 tensor with two dimensions at most.

    Attributes:
        name: Its key.
        number: Its place in the state.
        shape: The global shape.
        shard_dim: The dimension that is cut into equal parts, one a rank; None if every rank holds all of it.
    """

    name: str
    number: int
    shape: tuple[int, ...]
    shard_dim: int | None

    def swapped(self) -> TensorSpec:
        """The same tensor, cut along its other dimension."""
        return dataclasses.replace(self, shard_dim=None if self.shard_dim is None else 1 - self.shard_dim)

    def local_part(self, rank: int, world_size: int) -> Array:
        """The values that a rank holds."""
        shape = self.shape if len(self.shape) == 2 else (1, *self.shape)
        ranges = [range(extent) for extent in shape]
        if self.shard_dim is not None:
            extent = shape[self.shard_dim] // world_size
            ranges[self.shard_dim] = range(rank * extent, (rank + 1) * extent)
        rows, columns = (np.arange(r.start, r.stop, dtype=np.uint32) for r in ranges)
        place = rows[:, None] * np.uint32(shape[1]) + columns
        values = ((place + np.uint32(self.number)) * _MULTIPLIER) & _EXACT
        local: Array = values.astype(np.float32).reshape([len(r) for r in ranges][-len(self.shape) :])
        return local


def layout(state: str, name: str, smoke: bool = False) -> list[TensorSpec]:
    """The tensors of a state as they are sharded in one of its layouts.

    ``same`` is how the state is saved; ``swapped`` has Shard(0) and Shard(1) exchanged; ``layer`` is the first layer
    alone, as it is saved; in ``replicated`` every rank has all.

    Args:
        state: ``"A"`` to ``"E"``, or one whose size is named.
        name: The layout.
        smoke: Whether a tiny state of the same make will do.
    """
    kind, _, size = state.partition(":")
    specs = list(_SIZED[kind](int(size)) if size else (_SMOKE_STATES if smoke else _STATES)[state]())
    if name == "swapped":
        return [spec.swapped() for spec in specs]
    if name == "replicated":
        return [dataclasses.replace(spec, shard_dim=None) for spec in specs]
    return [spec for spec in specs if spec.name.startswith("layers.0.")] if name == "layer" else specs


def _layers(layers: int, h: int) -> Iterator[TensorSpec]:
    tensors: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
        ("qkv", (h, 3 * h), 1),
        ("out", (h, h), 0),
        ("up", (h, 4 * h), 1),
        ("down", (4 * h, h), 0),
        ("ln", (h,), None),
    )
    for i in range(layers):
        for j, (name, shape, shard_dim) in enumerate(tensors):
            yield TensorSpec(f"layers.{i}.{name}", i * len(tensors) + j, shape, shard_dim)


def _small(tensors: int) -> Iterator[TensorSpec]:
    # Names of one length, however many there are: the order of the state is then that in which tensors are stored.
    return (TensorSpec(f"tensors.{i:07}", i, (8, 8), 0) for i in range(tensors))


def _even(nbytes: int) -> Iterator[TensorSpec]:
    rows = max(1, nbytes // _ROW_BYTES)
    for i, start in enumerate(range(0, rows, _ROWS)):
        yield TensorSpec(f"layers.{i}", i, (min(_ROWS, rows - start), _ROW_BYTES // 4), 0)


_ROW_BYTES, _ROWS = 4000, 4000
_SIZED = {"tensors": _small, "bytes": _even}
_STATES = {
    "A": lambda: _layers(6, 1536),
    "B": lambda: _small(20_000),
    "C": lambda: _layers(36, 1536),
    "D": lambda: _small(5_000),
    "E": lambda: _small(50_000),
}
_SMOKE_STATES = {
    "A": lambda: _layers(2, 32),
    "B": lambda: _small(20),
    "C": lambda: _layers(3, 32),
    "D": lambda: _small(10),
    "E": lambda: _small(30),
}
