"""What a checkpoint has of what ranks want: the coordinator's lookups in `.metadata`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import cache
from itertools import chain, compress, filterfalse
from typing import Any

import msgspec
import numpy as np

from ..core.cached import cached_property
from ..core.columns import Mask, numbered, pack_column
from ..core.parts import Arranged
from ..core.shards import Kind
from ..files.metadata import Metadata
from ..files.tables import table_to_record
from ..tree.name_match import NameMatch
from ..tree.names import Names, may_be_of_run, may_be_optimizers, may_end_in_name
from ..tree.paths import containers_of, is_own, plain_key
from .flat_keys import FlatKeys
from .hints import Hints
from .key_map import matcher, path_of_key
from .messages import LoadAnswer, WantedPaths
from .stored_paths import StoredPaths
from .value_answers import Draft, Places, ValueAnswers
from .wording import LEFT_BY_AOA, MISSING

__all__ = ["Answering"]

_GROUP = 256  # ranks that are told of each other's values


class Answering:
    """Looks up in one checkpoint what ranks want.

    Args:
        metadata: What `.metadata` says.
        ranks: The ranks that load.
        unmatched: The keys of recipes that no rank has a tensor for.
        allow_missing: Patterns of wanted keys that need not be there.
        wanted_keys: Finds the flat keys that all ranks ask for.
        read: See :class:`.stored_paths.StoredPaths`.
        containers: Finds the containers, by path, in which any rank wants something.

    Attributes:
        files: The data files, each with its number of blocks.
        first_block: The number of each shard's first block in its file, ``[shards]``.
        hints: What may be meant by keys that are missing.
        untrained: Patterns of the flat keys of optimizer variables that are missing, of parameters that are stored
            without any, as those that were not trained.
    """

    def __init__(
        self,
        metadata: Metadata,
        ranks: Sequence[int],
        unmatched: Sequence[str] = (),
        allow_missing: Sequence[str] = (),
        wanted_keys: Callable[[], Collection[str]] = set,
        read: Callable[[int], Any] = lambda place: None,
        containers: Callable[[], Collection[str]] = set,
    ) -> None:
        self._metadata, self._unmatched = metadata, unmatched
        self._groups = [frozenset(ranks[i : i + _GROUP]) for i in range(0, len(ranks), _GROUP)]
        self._ranks = frozenset(ranks)
        self.hints = Hints(metadata, wanted_keys)
        self._stored = StoredPaths(metadata, self.hints, read)
        may_be_missing = matcher(allow_missing)
        self._values = ValueAnswers(metadata, self._stored, self.hints, self._ranks, may_be_missing, containers)
        self._flat_keys = FlatKeys(self._stored.paths)  # as they are before lists are taken apart
        self.first_block, counts = metadata.blocks
        self.files = list(zip(metadata.files, counts.tolist(), strict=True))
        self.names = Names(metadata.table.paths, metadata.table.names)
        self._wanted_names = Names([], [])
        self._is_asked: Mask = np.zeros(len(metadata.table.paths), bool)  # see ``asked``, ``[tensors]``
        self.untrained: dict[str, None] = {}
        self._frozen: dict[str, list[tuple[str, str]]] = {}  # see WantedPaths, by the path of the stored parameter
        # What ranks want, for which of it nothing was found, and the paths of each tensor that has several.
        self._lacking: list[tuple[list[str], set[str], list[list[str]]]] = []

    @cached_property
    def _path_of_key(self) -> Any:
        return path_of_key(self._metadata, self._stored.parts_at)

    def answer(self, wanted: WantedPaths, arranged: Mapping[str, Arranged | None]) -> list[tuple[Set[int], LoadAnswer]]:
        """What the checkpoint has of what ranks want; of tensors that are arranged by flat key, of their parts.

        It is one answer for all ranks. If many have values of their own, some ranks are told of theirs together: to
        tell each of all would take as many bytes as the square of the ranks.
        """
        paths = self._metadata.table.paths
        found = Draft(np.zeros(len(paths), bool))
        names = self._names_of(wanted)
        made = set(wanted.made)
        self._answer_arranged(wanted, arranged, made, found)
        as_they_are = [path for path in wanted.tensors if path not in made] if made else wanted.tensors
        # Where the parameters of optimizer variables are stored tells which variables these are, made or not.
        sought = as_they_are if made and not any(map(may_be_optimizers, names.paths)) else wanted.tensors
        # As in a load of everything, which needs no index then: it takes as much memory as the paths.
        is_all = as_they_are is paths and names.names == self.names.names
        moved = self._nested_otherwise(() if is_all else sought, wanted, names)
        moved |= {path: self._path_of_key(key) for path, key in wanted.moved.items()}
        tied = {path: group for group in wanted.tied for path in group}
        match = cache(lambda: NameMatch(self.names, self._stored.index, names, moved, tied))
        numbers = range(len(paths)) if is_all and not moved else match().places(as_they_are)
        places = cache(lambda: dict(zip(as_they_are, numbers, strict=True)))  # which only few states need
        for path, place in zip(as_they_are, numbers, strict=True):
            if place is None and path in tied and path not in moved and not self._stored.is_there(path):
                # It is filled with what its other path is.
                place = next((at for other in tied[path] if (at := places().get(other)) is not None), None)
            if place is not None and place not in self._stored.blobs:
                found.tensors[place] = True
                if paths[place] != path:
                    found.stored[path] = paths[place]
            elif not self.names.learning_rates and path in names.learning_rates:
                found.skipped[path] = "left as it is, for the checkpoint has no learning rate of a static-graph program"
            else:
                self._values.lack(path, moved.get(path, path), found, is_tensor=True)
        self._find_untrained(found, names, places)
        self._values.answer(wanted, moved, places, found)
        for key in wanted.sources:
            self._answer_source(key, found)
        self._lacking.append((wanted.tensors, {*found.unfit, *found.skipped}, wanted.tied))
        self._is_asked |= found.tensors
        kept = match().places(wanted.kept) if wanted.kept else []
        apart = map(self._metadata.table.index.get, self._stored.apart) if self._stored.apart else ()
        self._is_asked[[place for place in chain(kept, apart) if place is not None]] = True
        for optimizer, parameter in wanted.frozen:
            place = places().get(parameter)
            if place is not None:
                self._frozen.setdefault(paths[place], []).append((optimizer, parameter))
        groups = self._groups if found.own else [self._ranks]
        return [(ranks, self._assemble(found, ranks)) for ranks in groups]

    def forget(self) -> None:
        """Free what only answers need, which is made again if it is asked for."""
        self._stored.forget()
        self._metadata.table.forget()

    def _find_untrained(self, found: Draft, names: Names, places: Callable[[], Places]) -> None:
        """Note of what kind of parameters optimizer variables are missing, see ``untrained``."""
        missing = [path for path, text in found.unfit.items() if text == MISSING and may_be_optimizers(path)]
        for path in missing if missing and self.names.variables else ():  # they take time to find
            parameters, accumulator = names.variables.get(path, ((), ""))
            stored = [self._metadata.table.paths[at] for one in parameters if (at := places().get(one)) is not None]
            if stored and not self.names.variables_of.containers(stored):
                key = plain_key(path)
                self.untrained[f"{key.removesuffix(accumulator)}*" if key.endswith(f".{accumulator}") else key] = None

    @cached_property
    def tied(self) -> dict[str, tuple[str, ...]]:
        """All paths that a tensor has on any ranks, by the flat key of each, if it has several on one of them."""
        found: dict[str, dict[str, None]] = {}
        for group in dict.fromkeys(tuple(group) for _, _, tied in self._lacking for group in tied):
            whole = dict.fromkeys(group)
            for key in map(plain_key, group):
                whole |= found.get(key, {})
            found.update(dict.fromkeys(map(plain_key, whole), whole))
        return {key: tuple(whole) for key, whole in found.items()}

    def lacked_by_some(self) -> list[str]:
        """The paths of tensors for which nothing was found for some ranks, and something for others. It may depend on
        what else is in a rank's state_dict."""
        if len(self._lacking) == 1 or not any(lacking for _, lacking, _ in self._lacking):
            return []
        lacked = Counter[str]()
        for _, lacking, tied in self._lacking:
            found = {path for group in tied if not lacking.issuperset(group) for path in group}
            lacked.update(self._firsts(lacking - found))
        wanted = Counter(path for tensors, _, _ in self._lacking for path in self._firsts(tensors) if path in lacked)
        some = (path for path, count in wanted.items() if count > lacked[path])
        return [path for first in some for path in self.tied.get(plain_key(first), (first,))]

    def _firsts(self, some: Iterable[str]) -> Iterable[str]:
        """The first of all paths of each tensor that has one of some."""
        tied = self.tied
        return list(dict.fromkeys(tied.get(plain_key(path), (path,))[0] for path in some)) if tied else some

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
        paths, names = wanted.tensors, wanted.names or [None] * len(wanted.tensors)
        if wanted.others:
            paths, names = [*paths, *wanted.others], [*names, *wanted.others.values()]
        if (paths, names) != (self._wanted_names.paths, self._wanted_names.names):
            self._wanted_names = Names(paths, names)
        return self._wanted_names

    def _answer_arranged(
        self, wanted: WantedPaths, arranged: Mapping[str, Arranged | None], made: set[str], found: Draft
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

    def _answer_source(self, key: str, found: Draft) -> None:
        """A stored tensor of which wanted ones are made."""
        path = self._path_of_key(key)
        place = self._stored.index.get(path)
        if place is None or place in self._stored.blobs:
            found.absent[key] = self._stored.what_is(path)
        else:
            found.tensors[place] = True
            found.sources[key] = path

    @property
    def asked(self) -> set[str]:
        """The stored paths of what ranks were given, or leave as it is whether it is stored or not."""
        return set(compress(self._metadata.table.paths, self._is_asked)) | self._values.asked

    def not_asked(self) -> list[str]:
        """The stored paths of all else, tensors first."""
        left = compress(self._metadata.table.paths, ~self._is_asked)
        return [*left, *(path for path in self._stored.values if path not in self._values.asked)]

    def nothing_asked(self, tensors_of_ranks: Sequence[str]) -> dict[str, int]:
        """Containers of which a rank's state_dict has no tensors and no rank asks for one, by flat key: how many the
        checkpoint has there. The paths of all tensors in ranks' state_dicts are given."""
        found, asked, is_value = {}, self.asked if self._values.without_tensors else set(), self._stored.is_value
        for path in sorted(self._values.without_tensors):
            tensors = [stored for stored in self._stored.below(path) if not is_value(stored) and not is_own(stored)]
            if tensors and asked.isdisjoint(tensors):
                found[path] = len(tensors)
        here = containers_of(tensors_of_ranks) if found else set()
        if tensors_of_ranks:
            here.add("")  # of all of a state_dict
        return {plain_key(path): count for path, count in found.items() if path not in here}

    def what_is(self, key: str) -> str:
        """What the checkpoint has at a flat key."""
        return self._stored.what_is(self._path_of_key(key))

    def _nested_otherwise(self, sought: Iterable[str], wanted: WantedPaths, names: Names) -> dict[str, str]:
        """Where what is wanted is stored under the same flat key, nested in other dicts: the only one, for only one.

        Not what may be an optimizer variable under a name that says which it is in one run only.
        """
        tensors = [
            path
            for path in chain(sought, wanted.kept)
            if path not in self._stored.index
            and (not may_end_in_name(path) or (not may_be_of_run(path) and names.of_run(path) is None))
        ]
        here = (path for path, present in wanted.values.items() if present not in ("nothing", "optional"))
        values = list(filterfalse(self._stored.is_there, here))
        asked = [*wanted.tensors, *wanted.values, *wanted.others] if tensors or values else []
        found = self._flat_keys.found(tensors, asked) if tensors else {}
        found = {path: at for path, at in found.items() if not self._stored.is_there(path)}
        return found | (self._flat_keys.found_of_values(values, asked) if values else {})

    def _assemble(self, found: Draft, ranks: Set[int]) -> LoadAnswer:
        metadata = self._metadata
        left = {path for path, rank in found.own.items() if rank not in ranks and len(found.renamed[path]) == 1}
        taken = found.tensors.copy()
        taken[[self._stored.index[path] for path in left]] = False
        places = np.flatnonzero(taken)
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
            stored=found.stored,
            renamed={path: to for path, to in found.renamed.items() if to != [path] and path not in left},
            saved_by=metadata.world_size,
            sources=found.sources,
            absent=found.absent,
            parts=found.parts,
            unread=sorted(path for path in found.sources.values() if path not in found.renamed),
            unmatched=list(self._unmatched),
            hints=found.hints,
            save_id=metadata.save_id if metadata.format == "native" else "",
            foreign=metadata.format not in ("native", "present"),
            cost=metadata.cost,
            firsts=pack_column(metadata.table.first_shard[places]),
        )
