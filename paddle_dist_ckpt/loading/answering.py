"""What a checkpoint has of what ranks want: the coordinator's lookups in `.metadata`."""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, compress, filterfalse
from typing import Any

import msgspec
import numpy as np

from ..core.cached import cached_property
from ..core.columns import Mask, numbered, pack_column
from ..core.parts import Arranged
from ..core.shards import Kind
from ..files.codec import table_to_record
from ..files.metadata import Metadata
from ..tree.name_match import NameMatch
from ..tree.names import SCHEDULER, Names, may_be_of_run, may_end_in_name, scheduler_of
from ..tree.paths import containers_of, is_own, join, parent_of, plain_key, rank_of
from ..tree.stored_values import is_dict, leaves_of, parts_of
from .flat_keys import FlatKeys
from .hints import Hint, Hints
from .key_map import matcher, path_of_key
from .messages import LoadAnswer, WantedPaths
from .wording import A_TENSOR, DICTS, LEFT_BY_AOA, MEANT, MISSING, NOT_STORED, OF_TENSORS, value_text

__all__ = ["Answering"]

_GROUP = 256  # ranks that are told of each other's values
_NO_KEYS = ("~l", "~t", "~r")  # how what is below a list, a tuple or ranks' own values goes on


@dataclass(slots=True)
class _Draft:
    """What was found so far for one rank, in terms of :class:`.messages.LoadAnswer`; tensors by place in the table."""

    tensors: set[int] = field(default_factory=set)
    arrays: set[int] = field(default_factory=set)  # of the tensors, those that objects have as numpy arrays
    values: dict[str, Any] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, list[str]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    parts: dict[str, Arranged] = field(default_factory=dict)
    hints: dict[str, list[Hint]] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)  # of entries that one rank alone takes, by stored path, that rank


class Answering:
    """Looks up in one checkpoint what ranks want.

    Args:
        metadata: What `.metadata` says.
        ranks: The ranks that load.
        ranks_on_host: For each rank how many are on its host.
        unmatched: The keys of recipes that no rank has a tensor for.
        allow_missing: Patterns of wanted keys that need not be there.
        wanted_keys: Finds the flat keys that all ranks ask for.

    Attributes:
        files: The data files, each with its number of blocks.
        first_block: The number of each shard's first block in its file, ``[shards]``.
        hints: What may be meant by keys that are missing.
        without_tensors: The stored paths of containers in which a rank's state_dict has no entries, or none but of a
            learning rate's scheduler, as that of an optimizer before its first step.
    """

    def __init__(
        self,
        metadata: Metadata,
        ranks: Sequence[int],
        ranks_on_host: dict[int, int],
        unmatched: Sequence[str] = (),
        allow_missing: Sequence[str] = (),
        wanted_keys: Callable[[], Collection[str]] = set,
    ) -> None:
        self._metadata, self._ranks_on_host, self._unmatched = metadata, ranks_on_host, unmatched
        self._groups = [frozenset(ranks[i : i + _GROUP]) for i in range(0, len(ranks), _GROUP)]
        self._ranks = frozenset(ranks)
        self._may_be_missing = matcher(allow_missing)
        self._index = metadata.table.index
        self._values: dict[str, Any] = dict(metadata.value_records)
        self._paths = sorted([*metadata.table.paths, *self._values])
        self._flat_keys = FlatKeys(self._paths)
        self.first_block, counts = metadata.blocks
        self.files = list(zip(metadata.files, counts.tolist(), strict=True))
        self._blobs = set(np.flatnonzero(metadata.table.kinds == Kind.VALUE).tolist())
        self.names = Names(metadata.table.paths, metadata.table.names)
        self._wanted_names = Names([], [])
        self.hints = Hints(metadata, wanted_keys)
        self._is_asked: Mask = np.zeros(len(metadata.table.paths), bool)  # see ``asked``, ``[tensors]``
        self._asked_values: set[str] = set()
        self.without_tensors: set[str] = set()
        self._frozen: dict[str, list[tuple[str, str]]] = {}  # see WantedPaths, by the path of the stored parameter
        self._lacking: list[tuple[list[str], set[str]]] = []  # what ranks want, and for which of it nothing was found

    @cached_property
    def _path_of_key(self) -> Any:
        return path_of_key(self._metadata)

    def answer(self, wanted: WantedPaths, arranged: Mapping[str, Arranged | None]) -> list[tuple[Set[int], LoadAnswer]]:
        """What the checkpoint has of what ranks want; of tensors that are arranged by flat key, of their parts.

        It is one answer for all ranks. If many have values of their own, some ranks are told of theirs together: to
        tell each of all would take as many bytes as the square of the ranks.
        """
        paths, found = self._metadata.table.paths, _Draft()
        names = self._names_of(wanted)
        moved = self._nested_otherwise(wanted, names) | {p: self._path_of_key(key) for p, key in wanted.moved.items()}
        made = set(wanted.made)
        self._answer_arranged(wanted, arranged, made, found)
        as_they_are = [path for path in wanted.tensors if path not in made] if made else wanted.tensors
        tied = {path: group for group in wanted.tied for path in group}
        match = NameMatch(self.names, self._index, names, moved, tied)
        places = dict(zip(as_they_are, match.places(as_they_are), strict=True))
        for path, place in places.items():
            if place is None and path in tied and path not in moved and not self._is_there(path):
                # It is filled with what its other path is.
                place = next((at for other in tied[path] if (at := places.get(other)) is not None), None)
            if place is not None and place not in self._blobs:
                found.tensors.add(place)
                if paths[place] != path:
                    found.stored[path] = paths[place]
            elif not self.names.learning_rates and path in names.learning_rates:
                found.skipped[path] = "left as it is, for the checkpoint has no learning rate of a static-graph program"
            else:
                self._lack(path, moved.get(path, path), found, is_tensor=True)
        schedulers = {scheduler for path in wanted.values if (scheduler := scheduler_of(path)) is not None}
        self.without_tensors.update(scheduler.removesuffix(SCHEDULER) for scheduler in schedulers)
        asked: dict[str, int | None] = {}
        apart = set[str]()
        if "object" in wanted.values.values():
            asked = dict.fromkeys(wanted.tensors) | places
            apart = {path for path, present in wanted.values.items() if present not in ("empty", "nothing")}
            apart.update(wanted.spared, schedulers)
        for path, present in wanted.values.items():
            source = moved.get(path) or self._scheduler_at(path, schedulers)
            if "/~l" in source or "/~t" in source:
                self._take_apart(source)
            if present == "object":
                self._answer_object(path, source, asked, apart, wanted.others, found)
            else:
                self._answer_value(path, source, present, wanted.others, found)
        self._answer_parts_of_schedulers(wanted, moved, schedulers, found)
        for key in wanted.sources:
            self._answer_source(key, found)
        self._lacking.append((wanted.tensors, {*found.unfit, *found.skipped}))
        self._is_asked[list(found.tensors)] = True
        self._is_asked[[place for place in match.places(wanted.kept) if place is not None]] = True
        for optimizer, parameter in wanted.frozen:
            place = places.get(parameter)
            if place is not None:
                self._frozen.setdefault(paths[place], []).append((optimizer, parameter))
        groups = self._groups if found.own else [self._ranks]
        return [(ranks, self._assemble(found, ranks)) for ranks in groups]

    def lacked_by_some(self) -> list[str]:
        """The paths of tensors for which nothing was found for some ranks, and something for others. It may depend on
        what else is in a rank's state_dict."""
        lacked = Counter(path for _, lacking in self._lacking for path in lacking)
        if len(self._lacking) == 1 or not lacked:
            return []
        wanted = Counter(path for tensors, _ in self._lacking for path in tensors if path in lacked)
        return [path for path, count in wanted.items() if count > lacked[path]]

    def thawed(self) -> list[tuple[str, str]]:
        """Those of the ranks' frozen parameters, each with its optimizer, for which something is stored there."""
        found: dict[tuple[str, str], None] = {}
        for path, variable in self.names.variables.items() if self._frozen else ():
            for pair in (pair for parameter in variable.parameters for pair in self._frozen.get(parameter, ())):
                if path.startswith(f"{pair[0]}/"):
                    found[pair] = None
        return list(found)

    def _names_of(self, wanted: WantedPaths) -> Names:
        """What the tensors of a rank are called; those of many ranks are called the same, and parsed once."""
        own_names = wanted.names or [None] * len(wanted.tensors)
        paths, names = [*wanted.tensors, *wanted.others], [*own_names, *wanted.others.values()]
        if (paths, names) != (self._wanted_names.paths, self._wanted_names.names):
            self._wanted_names = Names(paths, names)
        return self._wanted_names

    def _answer_arranged(
        self, wanted: WantedPaths, arranged: Mapping[str, Arranged | None], made: set[str], found: _Draft
    ) -> None:
        """Tensors that have no recipe, and are arranged; they are added to ``made``."""
        for path, record in wanted.records.items() if arranged else ():
            if record.key not in arranged or path in made:
                continue
            made.add(path)
            whole = arranged[record.key]
            if whole is None:
                found.skipped[path] = LEFT_BY_AOA
                continue
            found.parts[path] = whole
            for key in dict.fromkeys(part.key for part in whole.parts):
                if key not in found.sources and key not in found.absent:
                    self._answer_source(key, found)

    def _answer_source(self, key: str, found: _Draft) -> None:
        """A stored tensor of which wanted ones are made."""
        path = self._path_of_key(key)
        place = self._index.get(path)
        if place is None or place in self._blobs:
            found.absent[key] = self._what_is(path)
        else:
            found.tensors.add(place)
            found.sources[key] = path

    @property
    def asked(self) -> set[str]:
        """The stored paths of what ranks were given, or leave as it is whether it is stored or not."""
        return set(compress(self._metadata.table.paths, self._is_asked)) | self._asked_values

    def not_asked(self) -> list[str]:
        """The stored paths of all else, tensors first."""
        left = compress(self._metadata.table.paths, ~self._is_asked)
        return [*left, *(path for path in self._values if path not in self._asked_values)]

    def nothing_asked(self, tensors_of_ranks: Sequence[str]) -> dict[str, int]:
        """Containers of which a rank's state_dict has no tensors and no rank asks for one, by flat key: how many the
        checkpoint has there. The paths of all tensors in ranks' state_dicts are given."""
        found, asked = {}, self.asked if self.without_tensors else set()
        for path in sorted(self.without_tensors):
            tensors = [stored for stored in self._below(path) if not self._is_value(stored) and not is_own(stored)]
            has_some = any(tensor.startswith(f"{path}/") for tensor in tensors_of_ranks)
            if tensors and not has_some and asked.isdisjoint(tensors):
                found[plain_key(path)] = len(tensors)
        return found

    def what_is(self, key: str) -> str:
        """What the checkpoint has at a flat key."""
        return self._what_is(self._path_of_key(key))

    def _nested_otherwise(self, wanted: WantedPaths, names: Names) -> dict[str, str]:
        """Where what is wanted is stored under the same flat key, nested in other dicts: the only one, for only one.

        Not what may be an optimizer variable under a name that says which it is in one run only.
        """
        values = (path for path, present in wanted.values.items() if present in ("none", "list", "other"))
        absent = filterfalse(self._index.__contains__, chain(wanted.tensors, wanted.kept, values))
        paths = [path for path in absent if "~" not in path and path not in self._values]
        elsewhere = [
            path
            for path in paths
            if not may_end_in_name(path) or (not may_be_of_run(path) and names.of_run(path) is None)
        ]
        if not elsewhere:
            return {}
        found = self._flat_keys.found(elsewhere, [*wanted.tensors, *wanted.values, *wanted.others])
        return {path: at for path, at in found.items() if not self._below(path)}

    def _answer_value(self, path: str, source: str, present: str, arrays: Container[str], found: _Draft) -> None:
        """A value that is wanted at a path, and would be stored at ``source``; ``arrays``: see ``_answer_object``."""
        is_array = scheduler_of(path) is not None and self._is_array(source) and present not in DICTS
        if scheduler_of(path) is not None and self._looks_like_array(source) and (present == "none" or path in arrays):
            found.arrays.add(self._index[source])
            is_array = True
        if present == "own":
            self._answer_own(path, source, found)
        elif source in self._values and present != "none" and (present in DICTS) != is_dict(self._values[source]):
            found.unfit[path] = value_text(is_dict(self._values[source]))
        elif self._is_value(source) or is_array:
            self._take(source, path, found)
        elif present == "none" or (present == "list" and self._is_list(source)):
            self._answer_subtree(path, source, found)
        elif present == "empty" and source not in self._index:
            self._answer_empty(path, source, found)
        elif present == "nothing" and source not in self._index:
            self.without_tensors.add(source)
        elif present == "optional":
            found.skipped[path] = NOT_STORED
        else:
            self._lack(path, source, found)

    def _take_apart(self, path: str) -> None:
        """Take apart a list or tuple that is stored as one value, and has this path in it. One of values alone is
        stored so, and one of objects is not, though all that these have may be values."""
        for end in [place.start() for place in re.finditer("/", path)][1:]:
            above = path[:end]
            parts = parts_of(self._values.get(above))
            if parts:
                del self._values[above], self._paths[bisect.bisect_left(self._paths, above)]
                below = dict(leaf for part, tree in parts.items() for leaf in leaves_of(join(above, part), tree))
                self._values |= below
                if above in self._asked_values:
                    self._asked_values.update(below)
                place = bisect.bisect_left(self._paths, above + "/")
                self._paths[place:place] = sorted(below)

    def _is_list(self, path: str) -> bool:
        """Whether a list or tuple that is taken apart is stored at a path, with values alone."""
        below = self._below(path)
        return bool(below) and below[0].startswith(("~l", "~t"), len(path) + 1) and all(map(self._is_value, below))

    def _answer_parts_of_schedulers(
        self, wanted: WantedPaths, moved: Mapping[str, str], schedulers: set[str], found: _Draft
    ) -> None:
        """What else is stored in the dicts that a learning rate's scheduler has now: one may add to them as it goes.

        Lists stay as long as they are, and what is of another kind than what is stored was looked at by itself.
        """
        places = dict[str, str]()
        for path, present in wanted.values.items():
            scheduler = scheduler_of(path)
            if scheduler is None or present in ("none", "object"):
                continue
            source, rest = moved.get(path) or self._scheduler_at(path, schedulers), path[len(scheduler) :]
            if rest and source.endswith(rest):
                name = rest.split("/", 2)[1]
                places[f"{scheduler}/{name}"] = f"{source.removesuffix(rest)}/{name}"
        everything = chain(wanted.values, wanted.others, wanted.tensors) if places else ()
        here = {path for path in everything if SCHEDULER in path}
        containers = containers_of(here)
        dicts = containers | {path for path in here if wanted.values.get(path) in ("empty", "nothing")}
        here |= containers
        for path, source in places.items():
            for stored in self._below(source):
                of_path = added = path + stored[len(source) :]
                while parent_of(added) not in dicts:
                    added = parent_of(added)
                fits = added not in here and not added.startswith(_NO_KEYS, added.rindex("/") + 1)
                if fits and (self._is_value(stored) or self._is_array(stored)):
                    self._take(stored, of_path, found)

    def _lack(self, path: str, source: str, found: _Draft, is_tensor: bool = False) -> None:
        """What is wanted at a path is not what is stored at ``source``, if anything is."""
        if self._may_be_missing(plain_key(path)) and not self._is_there(source):
            found.skipped[path] = NOT_STORED
        else:
            found.unfit[path] = self._what_is(source, hint=False)
            if found.unfit[path] == MISSING:
                found.hints[path] = self.hints.of(plain_key(source), is_tensor)

    def _is_there(self, path: str) -> bool:
        """Whether anything is stored at a path or below, or would be if it were read."""
        return self._is_value(path) or path in self._index or path in self._metadata.left_out or bool(self._below(path))

    def _is_value(self, path: str) -> bool:
        """Whether a value is stored at a path, in `.metadata` or as an entry of a data file."""
        return path in self._values or self._index.get(path) in self._blobs

    def _is_array(self, path: str) -> bool:
        """Whether an array is stored at a path."""
        place = self._index.get(path)
        return place is not None and bool(self._metadata.table.kinds[place] == Kind.ARRAY)

    def _looks_like_array(self, path: str) -> bool:
        """Whether what is stored at a path may have been an array, which in other formats looks like a tensor."""
        return self._metadata.format != "native" and path in self._index and not self._is_value(path)

    def _take(self, stored: str, wanted: str, found: _Draft) -> None:
        """Take a value, or an array of an object."""
        if stored in self._values:
            found.values[wanted] = self._values[stored]
            self._asked_values.add(stored)
        else:
            found.tensors.add(self._index[stored])
            found.renamed.setdefault(stored, []).append(wanted)

    def _answer_object(
        self,
        path: str,
        source: str,
        asked: Mapping[str, int | None],
        apart: Container[str],
        arrays: Container[str],
        found: _Draft,
    ) -> None:
        """All values and arrays at or below a path, but for those that are ``apart``, as those of objects in this one
        are, which may be stored elsewhere; the tensors there have to be wanted by themselves.

        In other formats an array may look like a tensor; ``arrays`` has the paths at which the object has one.
        ``asked`` has the place that was found for each wanted tensor.
        """
        below = [source] if self._is_value(source) else self._below(source)
        if not below or (source in self._values and not is_dict(self._values[source])):
            self._lack(path, source, found)
            return
        inside: set[int | None] | None = None
        for stored in below:
            wanted = path + stored[len(source) :]
            above = wanted
            while above != path and above not in apart:
                above = parent_of(above)
            if above != path:
                continue
            if self._is_value(stored) or self._is_array(stored):
                self._take(stored, wanted, found)
            elif self._looks_like_array(stored) and wanted in arrays:
                found.arrays.add(self._index[stored])
                self._take(stored, wanted, found)
            elif wanted not in asked:
                if inside is None:  # where objects in this one call a tensor otherwise
                    inside = {place for one, place in asked.items() if one.startswith(f"{path}/")}
                if self._index[stored] not in inside:
                    found.unfit[wanted] = self._what_is(stored)

    def _answer_own(self, path: str, source: str, found: _Draft) -> None:
        """What every rank has of its own at a path."""
        below = self._below(source)
        if not below or not all(is_own(stored) and parent_of(stored) == source for stored in below):
            self._lack(path, source, found)
            return
        for stored in below:
            self._take(stored, path + stored[len(source) :], found)
        of_rank = {stored: rank_of(stored) for stored in below if stored in self._index}
        if self._metadata.world_size == len(self._ranks) and self._ranks.issubset(of_rank.values()):
            found.own |= of_rank

    def _answer_subtree(self, path: str, source: str, found: _Draft) -> None:
        """All that is below a path, if that is values alone."""
        below = self._below(source)
        held = [stored for stored in below if not self._is_value(stored)]
        if held:
            found.unfit[path] = f"{OF_TENSORS}, such as {self._metadata.key(held[0])}"
        elif not below:
            self._lack(path, source, found)
        else:
            for stored in below:
                self._take(stored, path + stored[len(source) :], found)

    def _answer_empty(self, path: str, source: str, found: _Draft) -> None:
        """The values below a dict that is empty here, if it has values alone; else it wants nothing."""
        below = self._below(source) if source else []  # all of a checkpoint is asked for by name
        is_dict = below and not any(stored.startswith(_NO_KEYS, len(source) + 1) for stored in below)
        if is_dict and all(map(self._is_value, below)):
            for stored in below:
                self._take(stored, path + stored[len(source) :], found)
        else:
            self.without_tensors.add(source)

    def _scheduler_at(self, path: str, wanted: set[str]) -> str:
        """Where a value is stored: at its path; or in the only scheduler there is, which may be elsewhere than the only
        one that is wanted."""
        scheduler = scheduler_of(path)
        if scheduler is None or len(wanted) != 1 or len(self._schedulers) != 1:
            return path
        (stored,) = self._schedulers
        return stored + path[len(scheduler) :]

    @cached_property
    def _schedulers(self) -> set[str]:
        return {place for place in map(scheduler_of, self._paths) if place is not None}

    def _below(self, path: str) -> list[str]:
        first = bisect.bisect_left(self._paths, path + "/")
        last = bisect.bisect_left(self._paths, path + "0")  # "0" is the character after "/"
        return self._paths[first:last]

    def _what_is(self, path: str, hint: bool = True) -> str:
        if is_own(path) and path in self._index:
            return "what one rank has saved of its own"
        if self._is_value(path):
            return "a value"
        if path in self._index:
            place, table = self._index[path], self._metadata.table
            shape = list(table.shape_of(place))
            return f"{A_TENSOR} {shape} and dtype {table.dtypes[place].name}"
        if path in self._metadata.left_out:
            return f"something that is not read: {self._metadata.left_out[path]}"
        below = self._below(path)
        if below:
            return "what every rank has saved of its own" if is_own(below[0]) else "a container"
        key = plain_key(path)
        nested = self.hints.nested(key)
        if nested is not None:
            return f"{MISSING}; the checkpoint has it nested otherwise, as state_dict{nested}"
        close = self.hints.of(key, is_tensor=True) if hint else []
        return f"{MISSING}; is {close[0].key!r} {MEANT}" if close else MISSING

    def _assemble(self, found: _Draft, ranks: Set[int]) -> LoadAnswer:
        metadata = self._metadata
        left = {path for path, rank in found.own.items() if rank not in ranks and len(found.renamed[path]) == 1}
        places = sorted(found.tensors.difference(map(self._index.__getitem__, left)))
        table, shards = metadata.table.select(places)
        table.kinds[np.searchsorted(places, sorted(found.arrays))] = Kind.ARRAY
        used, renumbered = numbered(table.shard_file)
        special = metadata.special_keys
        return LoadAnswer(
            unique_id=metadata.unique_id,
            block_bytes=metadata.block_bytes,
            files=[self.files[i] for i in used.tolist()],
            tensors=msgspec.structs.replace(table_to_record(table), shard_file=pack_column(renumbered)),
            starts=pack_column(metadata.table.data_offsets[shards]),
            blocks=pack_column(self.first_block[shards]),
            keys={path: special[path] for path in table.paths if path in special} if special else {},
            values=found.values,
            unfit=found.unfit,
            skipped=found.skipped,
            ranks_on_host=self._ranks_on_host,
            stored=found.stored,
            renamed={path: to for path, to in found.renamed.items() if to != [path] and path not in left},
            saved_by=metadata.world_size,
            sources=found.sources,
            absent=found.absent,
            parts=found.parts,
            unread=sorted(path for path in found.sources.values() if path not in found.renamed),
            unmatched=list(self._unmatched),
            hints={path: [(hint.key, hint.shape) for hint in hints] for path, hints in found.hints.items()},
            save_id=metadata.save_id if metadata.format == "native" else "",
            cost=metadata.cost,
            firsts=pack_column(metadata.table.first_shard[places]),
        )
