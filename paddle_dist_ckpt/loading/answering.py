"""What a checkpoint has of what ranks want: the coordinator's lookups in `.metadata`."""

from __future__ import annotations

import bisect
import difflib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ..core.columns import pack_column
from ..core.shards import Kind
from ..files.codec import table_to_record
from ..files.metadata import Metadata
from ..tree.name_match import NameMatch
from ..tree.names import Names, may_be_optimizers
from ..tree.paths import is_own, parent_of, plain_key, plain_keys
from .key_map import path_of_key
from .messages import LoadAnswer, WantedPaths

__all__ = ["Answering"]

_MOST_HINTS = 20  # each costs a comparison with every key
_SCHEDULER = "/LR_Scheduler"


@dataclass(slots=True)
class _Draft:
    """What was found so far for one rank, in terms of :class:`.messages.LoadAnswer`; tensors by place in the table."""

    tensors: set[int] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, list[str]] = field(default_factory=dict)


class Answering:
    """Looks up in one checkpoint what ranks want.

    Attributes:
        files: The data files, each with its number of blocks.
        asked: The stored paths of what ranks were given.
    """

    def __init__(self, metadata: Metadata, ranks_on_host: dict[int, int]) -> None:
        self._metadata, self._ranks_on_host = metadata, ranks_on_host
        self._index = metadata.table.index
        self._values: dict[str, Any] = dict(metadata.value_records)
        self._paths = sorted([*metadata.table.paths, *self._values])
        self._first_block, counts = metadata.table.blocks(metadata.block_bytes, len(metadata.files))
        self.files = list(zip(metadata.files, counts.tolist(), strict=True))
        self._blobs = set(np.flatnonzero(metadata.table.kinds == Kind.VALUE).tolist())
        self._names = Names(metadata.table.paths, metadata.table.names)
        self._missing = 0
        self.asked: set[str] = set()

    @cached_property
    def _path_of_key(self) -> Any:
        return path_of_key(self._metadata)

    def answer(self, wanted: WantedPaths) -> LoadAnswer:
        """What the checkpoint has of what a rank wants."""
        paths, found = self._metadata.table.paths, _Draft()
        moved = self._nested_otherwise(wanted) | {path: self._path_of_key(key) for path, key in wanted.moved.items()}
        own_names = wanted.names or [None] * len(wanted.tensors)
        names = Names([*wanted.tensors, *wanted.others], [*own_names, *wanted.others.values()])
        places = NameMatch(self._names, self._index, names, moved).places(wanted.tensors)
        for path in wanted.tensors:
            place = places.get(path)
            if place is not None and place not in self._blobs:
                found.tensors.add(place)
                if paths[place] != path:
                    found.stored[path] = paths[place]
            elif not self._names.learning_rates and path in names.learning_rates:
                found.skipped[path] = "left as it is, for the checkpoint has no learning rate of a static-graph program"
            else:
                found.unfit[path] = self._what_is(moved.get(path, path))
        schedulers = {scheduler for path in wanted.values if (scheduler := _scheduler_of(path)) is not None}
        for path, present in wanted.values.items():
            source = moved.get(path) or self._scheduler_at(path, schedulers)
            self._answer_value(path, source, present, found)
        self.asked.update(paths[t] for t in found.tensors)
        return self._assemble(found)

    def _nested_otherwise(self, wanted: WantedPaths) -> dict[str, str]:
        """Where what is wanted is stored under the same flat key, nested in other dicts: the only one, for only one.

        Not what may be an optimizer variable, whose key says which it is in one run only.
        """
        paths = [*wanted.tensors, *(path for path, present in wanted.values.items() if present in ("none", "other"))]
        elsewhere = [path for path in paths if path not in self._index and path not in self._values]
        elsewhere = [path for path in elsewhere if "~" not in path and not may_be_optimizers(path)]
        if not elsewhere:
            return {}
        asked, stored = Counter(plain_keys([*wanted.tensors, *wanted.values, *wanted.others])), self._path_of_plain_key
        keys = zip(elsewhere, plain_keys(elsewhere), strict=True)
        return {path: stored[key] for path, key in keys if asked[key] == 1 and key in stored and not self._below(path)}

    @cached_property
    def _path_of_plain_key(self) -> dict[str, str]:
        """The stored path of each plain key of one path only, for paths of keys that are text."""
        keys = plain_keys(self._paths)
        counts = Counter(keys)
        return {key: path for key, path in zip(keys, self._paths, strict=True) if counts[key] == 1 and "~" not in path}

    def _answer_value(self, path: str, source: str, present: str, found: _Draft) -> None:
        """A value that is wanted at a path, and would be stored at ``source``."""
        if present == "object":
            self._answer_object(path, source, found)
        elif present == "own":
            self._answer_own(path, source, found)
        elif source in self._values and present != "none" and (present == "dict") != _is_dict(self._values[source]):
            found.unfit[path] = "a dict" if _is_dict(self._values[source]) else "a value that is no dict"
        elif self._is_value(source):
            self._take(source, path, found)
        elif present == "none":
            self._answer_subtree(path, source, found)
        elif present == "dict" and source not in self._index:
            return  # an empty dict wants nothing
        elif present == "optional":
            found.skipped[path] = "left as it is, for the checkpoint does not have it"
        else:
            found.unfit[path] = self._what_is(source)

    def _is_value(self, path: str) -> bool:
        """Whether a value is stored at a path, in `.metadata` or as an entry of a data file."""
        return path in self._values or self._index.get(path) in self._blobs

    def _take(self, stored: str, wanted: str, found: _Draft) -> None:
        """Take a value, or an array of an object."""
        if stored in self._values:
            found.values[wanted] = self._values[stored]
            self.asked.add(stored)
        else:
            found.tensors.add(self._index[stored])
            found.renamed.setdefault(stored, []).append(wanted)

    def _answer_object(self, path: str, source: str, found: _Draft) -> None:
        """All values and arrays at or below a path; the tensors there have to be wanted by themselves."""
        below = [source] if self._is_value(source) else self._below(source)
        if not below or (source in self._values and not _is_dict(self._values[source])):
            found.unfit[path] = self._what_is(source)
            return
        for stored in below:
            wanted = path + stored[len(source) :]
            if self._is_value(stored) or self._metadata.table.kinds[self._index[stored]] == Kind.ARRAY:
                self._take(stored, wanted, found)
            elif self._index[stored] not in found.tensors:
                found.unfit[wanted] = self._what_is(stored)

    def _answer_own(self, path: str, source: str, found: _Draft) -> None:
        """What every rank has of its own at a path."""
        below = self._below(source)
        if not below or not all(is_own(stored) and parent_of(stored) == source for stored in below):
            found.unfit[path] = self._what_is(source)
            return
        for stored in below:
            self._take(stored, path + stored[len(source) :], found)

    def _answer_subtree(self, path: str, source: str, found: _Draft) -> None:
        """All that is below a path, if that is values alone."""
        below = self._below(source)
        held = [stored for stored in below if not self._is_value(stored)]
        if held:
            found.unfit[path] = f"a container of tensors, such as {self._metadata.key(held[0])}"
        elif not below:
            found.unfit[path] = self._what_is(source)
        else:
            for stored in below:
                self._take(stored, path + stored[len(source) :], found)

    def _scheduler_at(self, path: str, wanted: set[str]) -> str:
        """Where a value is stored: at its path; or in the only scheduler there is, which may be elsewhere than the only
        one that is wanted."""
        scheduler = _scheduler_of(path)
        if scheduler is None or len(wanted) != 1 or len(self._schedulers) != 1:
            return path
        (stored,) = self._schedulers
        return stored + path[len(scheduler) :]

    @cached_property
    def _schedulers(self) -> set[str]:
        return {place for place in map(_scheduler_of, self._paths) if place is not None}

    def _below(self, path: str) -> list[str]:
        first = bisect.bisect_left(self._paths, path + "/")
        last = bisect.bisect_left(self._paths, path + "0")  # "0" is the character after "/"
        return self._paths[first:last]

    def _what_is(self, path: str) -> str:
        if self._is_value(path):
            return "a value"
        if path in self._index:
            place, table = self._index[path], self._metadata.table
            shape = list(table.layouts[table.layout_of[place]].shape)
            return f"a tensor of shape {shape} and dtype {table.dtypes[place].name}"
        if path in self._metadata.left_out:
            return f"something that is not read: {self._metadata.left_out[path]}"
        if self._below(path):
            return "a container"
        self._missing += 1
        return f"missing{self._hint(path) if self._missing <= _MOST_HINTS else ''}"

    def _hint(self, path: str) -> str:
        """Where what is wanted may be instead."""
        key = plain_key(path)
        nested = self._metadata.flat_mapping.get(key)
        if nested is not None:
            place = "".join(f"[{part!r}]" if isinstance(part, (str, int)) else f"[{part.at}]" for part in nested)
            return f"; the checkpoint has it nested otherwise, as state_dict{place}"
        keys = list(self._metadata.flat_mapping)
        close = difflib.get_close_matches(key, keys, 1, cutoff=0.8) if len(keys) <= 5000 and len(key) > 3 else []
        return f"; is {close[0]!r} meant?" if close else ""

    def _assemble(self, found: _Draft) -> LoadAnswer:
        metadata = self._metadata
        table, shards = metadata.table.select(sorted(found.tensors))
        used, renumbered = np.unique(table.shard_file, return_inverse=True)
        record = table_to_record(table)
        special = metadata.special_keys
        return LoadAnswer(
            unique_id=metadata.unique_id,
            block_bytes=metadata.block_bytes,
            files=[self.files[i] for i in used.tolist()],
            tensors=msgspec.structs.replace(record, shard_file=pack_column(renumbered.reshape(-1))),
            starts=pack_column(metadata.table.data_offsets[shards]),
            blocks=pack_column(self._first_block[shards]),
            keys={path: special[path] for path in table.paths if path in special} if special else {},
            values=found.values,
            unfit=found.unfit,
            skipped=found.skipped,
            ranks_on_host=self._ranks_on_host,
            stored=found.stored,
            renamed={path: wanted for path, wanted in found.renamed.items() if wanted != [path]},
            saved_by=metadata.world_size,
        )


def _scheduler_of(path: str) -> str | None:
    """The path of the learning rate's scheduler in which a value is, or that it is."""
    before, found, after = path.partition(_SCHEDULER)
    return before + found if found and after[:1] in ("", "/") else None


def _is_dict(tree: Any) -> bool:
    return isinstance(tree, dict) and "dict" in tree
