"""Items of small entries in columns: what is read of them, and to which places in memory it goes."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.columns import IntArray, edges_of
from ..files.batches import Batch, Kinds
from ..files.runs import OpenFile

__all__ = ["SmallItems", "batches_of"]


@dataclass(frozen=True, slots=True, eq=False)
class SmallItems:
    """Items of entries of one block at most.

    Attributes:
        files: Names of data files.
        file: In which of them each item is, ``[items]``.
        starts: Where its entry starts in the data section, ``[items]``.
        blocks: The number of the entry's block in the file, ``[items]``.
        addresses: Where the item's target starts in memory, which must stay alive, ``[items]``.
        kind: Which of ``kinds`` it is, ``[items]``.
        kinds: The kinds.
        key: What to call an item's entry in errors.
        name: What to call its target.
    """

    files: Sequence[str]
    file: IntArray
    starts: IntArray
    blocks: IntArray
    addresses: IntArray
    kind: IntArray
    kinds: Kinds
    key: Callable[[int], str]
    name: Callable[[int], str]


def batches_of(parts: Sequence[SmallItems], opened: Mapping[str, OpenFile], block_bytes: int) -> list[Batch]:
    """All items file by file, in the order in which their entries stand there, so that each entry is read once."""
    parts = [part for part in parts if len(part.file)]
    if not parts:
        return []
    names = sorted({name for part in parts for name in part.files})
    places = {name: i for i, name in enumerate(names)}
    first = edges_of(np.array([len(part.file) for part in parts], np.int64))
    first_kind = edges_of(np.array([len(part.kinds) for part in parts], np.int64)).tolist()
    kinds = Kinds.joined([part.kinds for part in parts])
    file = np.concatenate([np.array([places[name] for name in part.files], np.int64)[part.file] for part in parts])
    starts = np.concatenate([part.starts for part in parts])
    order = np.lexsort((starts, file))
    file, starts = file[order], starts[order]
    blocks = np.concatenate([part.blocks for part in parts])[order]
    addresses = np.concatenate([part.addresses for part in parts])[order]
    kind = np.concatenate([part.kind + at for part, at in zip(parts, first_kind[:-1], strict=True)])[order]
    stops = starts + kinds.entry_bytes[kind]
    edges = first.tolist()

    def named(which: Callable[[SmallItems], Callable[[int], str]], base: int) -> Callable[[int], str]:
        def name(i: int) -> str:
            item = int(order[base + i])
            part = bisect.bisect_right(edges, item) - 1
            return which(parts[part])(item - edges[part])

        return name

    cuts = [0, *(np.flatnonzero(file[1:] != file[:-1]) + 1).tolist(), len(file)]
    return [
        Batch(
            opened[names[file[a]]],
            block_bytes,
            starts[a:b],
            stops[a:b],
            blocks[a:b],
            named(lambda part: part.key, a),
            kind[a:b],
            addresses[a:b],
            kinds,
            named(lambda part: part.name, a),
        )
        for a, b in itertools.pairwise(cuts)
    ]
