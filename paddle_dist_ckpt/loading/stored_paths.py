"""What stands at and below the paths of a checkpoint."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.cached import cached_property
from ..core.shards import Kind
from ..files.metadata import Metadata
from ..tree.names import scheduler_of
from ..tree.paths import Part, below, is_own, join, parent_of, plain_key
from ..tree.stored_values import leaves_of, parts_of
from .hints import Hints
from .wording import A_TENSOR, MEANT, MISSING, OF_ALL_RANKS

__all__ = ["StoredPaths"]


class StoredPaths:
    """The paths of one checkpoint, as a load looks at them.

    Args:
        metadata: What `.metadata` says.
        hints: What may be meant by keys that are missing.
        read: Reads the value, in the form in which it is stored, that is an entry at a place in the table.

    Attributes:
        paths: All of them, ascending.
        values: The values that `.metadata` has itself, in the form in which they are stored.
        blobs: The places of values among these.
        apart: The paths of lists that were taken apart, whose parts are among ``values`` now.
    """

    def __init__(self, metadata: Metadata, hints: Hints, read: Callable[[int], Any]) -> None:
        self._metadata, self._hints, self._read = metadata, hints, read
        self.values: dict[str, Any] = dict(metadata.value_records)
        self.paths = sorted([*metadata.table.paths, *self.values]) if self.values else metadata.table.paths
        self.blobs = set(np.flatnonzero(metadata.table.kinds == Kind.VALUE).tolist())
        self.apart: set[str] = set()
        self._parts: dict[str, dict[Part, Any]] = {}

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The places in the table of all that is not among ``values``, and never was."""
        index = self._metadata.table.index
        return {path: place for path, place in index.items() if path not in self.apart} if self.apart else index

    def forget(self) -> None:
        """Free the index, which is made again if it is asked for."""
        self.__dict__.pop("index", None)

    def below(self, path: str) -> list[str]:
        """The paths below one, ascending."""
        return self.paths[below(path, self.paths)]

    def is_there(self, path: str) -> bool:
        """Whether anything is stored at a path or below, or would be if it were read."""
        return self.is_value(path) or path in self.index or path in self._metadata.left_out or bool(self.below(path))

    def is_value(self, path: str) -> bool:
        """Whether a value is stored at a path, in `.metadata` or as an entry of a data file."""
        return path in self.values or self.index.get(path) in self.blobs

    def is_array(self, path: str) -> bool:
        """Whether an array is stored at a path."""
        place = self.index.get(path)
        return place is not None and bool(self._metadata.table.kinds[place] == Kind.ARRAY)

    def looks_like_array(self, path: str) -> bool:
        """Whether what is stored at a path may have been an array, which in other formats looks like a tensor."""
        return self._metadata.format != "native" and path in self.index and not self.is_value(path)

    def is_list(self, path: str) -> bool:
        """Whether a list or tuple that is taken apart is stored at a path, with values alone."""
        inside = self.below(path)
        return bool(inside) and inside[0].startswith(("~l", "~t"), len(path) + 1) and all(map(self.is_value, inside))

    def parts_at(self, path: str) -> dict[Part, Any]:
        """The parts of the list or tuple that is stored at a path as one value; nothing of anything else."""
        if path not in self._parts:
            is_entry = self.is_value(path) and path not in self.values
            self._parts[path] = parts_of(self._read(self.index[path]) if is_entry else self.values.get(path))
        return self._parts[path]

    def take_apart(self, path: str) -> dict[str, list[str]]:
        """Take apart a list or tuple that is stored as one value, and has this path in it. One of values alone is
        stored so, and one of objects is not, though all that these have may be values.

        Returns:
            The paths of what was one value, by the path that this had.
        """
        found = dict[str, list[str]]()
        for end in [place.start() for place in re.finditer("/", path)][1:]:
            above = path[:end]
            if self.is_value(above) and (parts := self.parts_at(above)):
                if not self.apart:
                    self.paths = self.paths.copy()  # which others have, as it was
                self.apart.add(above)
                if self.values.pop(above, None) is None:
                    self.forget()
                del self.paths[bisect.bisect_left(self.paths, above)]
                leaves = dict(leaf for part, tree in parts.items() for leaf in leaves_of(join(above, part), tree))
                self.values |= leaves
                found[above] = sorted(leaves)
                self.paths[below(above, self.paths)] = found[above]
        return found

    @cached_property
    def schedulers(self) -> set[str]:
        """The paths of learning rates' schedulers."""
        return {place for place in map(scheduler_of, self.paths) if place is not None}

    def what_is(self, path: str, hint: bool = True) -> str:
        """What stands at a path, in words."""
        if is_own(path) and path in self.index:
            return "what one rank has saved of its own"
        if self.is_value(path):
            return "a value"
        if path in self.index:
            place, table = self.index[path], self._metadata.table
            shape = list(table.shape_of(place))
            return f"{A_TENSOR} {shape} and dtype {table.dtypes[place].name}"
        if path in self._metadata.left_out:
            return f"something that is not read: {self._metadata.left_out[path]}"
        inside = self.below(path)
        if inside:
            return OF_ALL_RANKS if self._is_of_all_ranks(path) else "a container"
        key = plain_key(path)
        for end in [place.start() for place in re.finditer("/", path)][1:]:
            if self._is_of_all_ranks(path[:end]):
                return f"{MISSING}: {plain_key(path[:end])} is {OF_ALL_RANKS}"
        nested = self._hints.nested(key)
        if nested is not None:
            return f"{MISSING}; the checkpoint has it nested otherwise, as state_dict{nested}"
        close = self._hints.of(key, is_tensor=True) if hint else []
        return f"{MISSING}; is {close[0].key!r} {MEANT}" if close else MISSING

    def _is_of_all_ranks(self, path: str) -> bool:
        first = bisect.bisect_left(self.paths, path + "/")  # and no list of all below, which may be very many
        return first < len(self.paths) and is_own(self.paths[first]) and parent_of(self.paths[first]) == path
