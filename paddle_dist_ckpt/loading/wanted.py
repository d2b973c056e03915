"""What a load's caller wants filled: the tensors and values of its state_dict, and where the checkpoint has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.local_tensors import LocalTensors
from ..core.parts import Arranger
from ..core.tensors import Geometry
from ..core.text import ranks_text
from ..options import LoadOptions
from ..recipes import distinct_text
from ..tree.building import owner_of
from ..tree.names import scheduler_of
from ..tree.objects import ObjectKind, OpenedObject
from ..tree.paths import flat_keys, own_among, parent_of, plain_key, rank_of
from ..tree.state_dict import Adapter, Leaves, PerRank
from . import key_map
from .messages import LoadAnswer, Mismatch, WantedRecord
from .recipes import Matching, match_recipes

__all__ = ["WantedState", "collect", "keys_of_own"]

_LONGEST_TEXT = 1000  # of a recipe that is compared with those of other ranks


@dataclass(slots=True)
class WantedState:
    """What a state_dict wants of a checkpoint, on one rank.

    Attributes:
        tensors: The tensors that are to be filled.
        values: The paths of values, with what is there now: ``"none"``, ``"empty"`` (a dict without entries),
            ``"nothing"`` (one that is of an object), ``"dict"`` (another), ``"list"`` (or a tuple), ``"own"`` (a
            PerRank), ``"object"`` (one of any values), ``"optional"`` (of a program) or ``"other"``.
        problems: What cannot be loaded.
        others: The names of tensors that are not filled, by their paths.
        moved: The stored flat key of each path that the key_map says is stored under another.
        skipped: The paths that the key_map says are left as they are.
        left: What else is left as it is, by choice.
        made: The tensors that have recipes.
        records: What is said of each tensor to whoever arranges what they are made of, by path.
        has_objects: Whether there are objects to be given their states in the end.
        complete: The flat keys of objects of which nothing that is stored may be left.
        kept: The paths of tensors that are left as they are, and for which something may be stored.
        spared: The tensors that the key_map says are left as they are, but for those that are no tensors to a load.
        key_map: Whether each key of the key_map matches something, if that is a mapping.
        own: The values of its own that this rank has now, by path.
        left_own: Those of them that are left as they are, which an object is given back with what is stored for it.
        repeated: See :class:`..tree.state_dict.Leaves`.
        frozen: See :class:`.messages.WantedPaths`.
        needed: The entries that objects have now which refuse a state without one of them, by the objects' paths.
        may_be_missing: Whether a flat key need not be stored.
    """

    tensors: LocalTensors = field(default_factory=LocalTensors)
    values: dict[str, str] = field(default_factory=dict)
    problems: list[Mismatch] = field(default_factory=list)
    others: dict[str, str | None] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    left: list[Mismatch] = field(default_factory=list)
    made: Matching = field(default_factory=Matching)
    records: dict[str, WantedRecord] = field(default_factory=dict)
    has_objects: bool = False
    complete: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    spared: LocalTensors = field(default_factory=LocalTensors)
    key_map: dict[str, bool] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    left_own: dict[str, Any] = field(default_factory=dict)
    repeated: dict[str, str] = field(default_factory=dict)
    frozen: list[tuple[str, str]] = field(default_factory=list)
    needed: dict[str, list[str]] = field(default_factory=dict)
    may_be_missing: Callable[[str], bool] = lambda key: False

    def instead(self) -> dict[str, str]:
        """What distributed tensors are made of, in words, if this rank has recipes or a key_map for any tensor.

        Of a tensor of which a rank has no elements it says nothing. Plain tensors are each rank's own.
        """
        if not self.moved and not self.made.recipes and not self.spared.paths:
            return {}
        found = dict.fromkeys(_distributed(self.spared), key_map.LEFT_OUT)
        for path in _distributed(self.tensors):
            key, filled = self.moved.get(path), self.made.recipes.get(path)
            if filled is not None:
                found[path] = distinct_text(filled.recipe, _LONGEST_TEXT)
            else:
                found[path] = key_map.OWN_KEY if key is None else f"stored({key!r})"
        return found

    def choose_own(self, answer: LoadAnswer, rank: int, ranks: tuple[int, ...], choice: str) -> set[str]:
        """Choose which rank's value this rank takes, of those of which every rank keeps its own, by what
        ``LoadOptions.per_rank`` says. Returns the stored paths that it does not take."""
        stored: dict[str, dict[int, str]] = {}
        for path in own_among(path for path in answer.tensors.paths if path not in self.values):
            stored.setdefault(parent_of(path), {})[rank_of(path)] = path
        same_size, others = answer.saved_by == len(ranks), set[str]()
        for own in stored.values():
            taken, problem, left = None, "", ""
            if rank in own and (same_size or choice == "by_rank"):
                taken = own[rank]
            elif same_size and own.keys() <= set(ranks) and not self._asks_for_own(own, answer):
                others |= set(own.values())  # entries that an object, or a subtree of values, has on others
                continue
            elif same_size and own.keys() <= set(ranks) and choice != "by_rank":
                verb = "has" if len(own) == 1 else "have"
                problem = f"rank {rank} has saved no value of its own, only {ranks_text(own)} {verb}"
            elif choice == "coordinator":
                taken = own[min(own)]
            elif choice == "by_rank":
                left = f"left as it is, for no rank {rank} has saved its own"
            else:
                problem = (
                    f"every rank has saved its own, on {answer.saved_by} ranks ({ranks_text(own)}), and now there are "
                    f"{len(ranks)}; LoadOptions(per_rank='by_rank') or 'coordinator' says which to take"
                )
            if taken is None:
                paths = (path for one in own.values() for path in answer.renamed.get(one, [one]))
                for path in dict.fromkeys(map(parent_of, paths)):
                    (self.problems if problem else self.left).append(Mismatch.at(path, problem or left))
                    if path in self.own:
                        self.left_own[path] = self.own[path]
            others |= {path for path in own.values() if path != taken}
        return others

    def _asks_for_own(self, own: Mapping[int, str], answer: LoadAnswer) -> bool:
        """Whether there is something here for which a value of ranks' own is stored, at these paths."""
        asked = {parent_of(path) for one in own.values() for path in answer.renamed.get(one, [one])}
        return not (asked.isdisjoint(self.own) and asked.isdisjoint(self.values))


def collect(leaves: Leaves, adapter: Adapter, options: LoadOptions, arranger: Arranger | None = None) -> WantedState:
    """Look at what a load was called with."""
    objects = {opened.path: opened for opened in leaves.objects}
    free = {path for path, opened in objects.items() if opened.kind is ObjectKind.FREE}  # they take any values
    as_stored = options.key_map is None and not options.recipes and arranger is None
    keys, inside = ({}, {}) if as_stored else _flat_keys(leaves, objects, free)
    made, moved, skipped = Matching(), dict[str, str](), set[str]()
    if not as_stored:
        targets = (path for path in leaves.tensor_paths if not free or owner_of(path, objects) not in free)
        made = match_recipes(options.recipes or {}, {path: keys[path] for path in targets})
        moved, skipped = key_map.apply(options.key_map, {p: key for p, key in keys.items() if p not in made.recipes})
        # Of these objects, others than those that take any values, there may be stored what they do not have.
        left_whole = [path for path in objects if key_map.leaves_all(options.key_map, plain_key(path))]
        skipped.update(path for path in left_whole if not _any_below(path, made.recipes))
    wanted = WantedState(moved=moved, skipped=skipped, made=made, has_objects=bool(objects), repeated=leaves.repeated)
    wanted.key_map = key_map.matched(options.key_map, keys.values())
    entries = {key: (keys[one], None if one in skipped else moved.get(one, keys[one])) for key, one in inside.items()}
    wanted.key_map |= dict.fromkeys(key_map.unheard(options.key_map, entries), False)
    asked, values = _to_fill(leaves, skipped, objects, free)
    refused = wanted.tensors.look_at(asked, values, adapter)
    wanted.problems += [Mismatch(plain_key(path), text) for path, text in refused.items()]
    left = {path: value for path, value in zip(leaves.tensor_paths, leaves.tensors, strict=True) if path in skipped}
    wanted.spared.look_at(list(left), list(left.values()), adapter)
    if arranger is not None:
        corners = {path: arranger.corner(value) for path, value in zip(asked, values, strict=True)}
        for path, number in zip(wanted.tensors.paths, wanted.tensors.geometry, strict=True):
            wanted.records[path] = _record(keys[path], wanted.tensors.geometries[number], corners[path])
    _add_values(wanted, leaves, objects)
    _add_arrays_of_schedulers(wanted, leaves, objects)
    _add_others(wanted, leaves, adapter)
    if as_stored:
        wanted.complete = [plain_key(path) for path, one in objects.items() if adapter.is_defined_by_user(one.value)]
    wanted.frozen = [
        (path, parameter)
        for path, parameter in _frozen(leaves, adapter)
        if key_map.leaves_alone(options.key_map, plain_key(path)) and not _any_below(path, (*moved, *skipped))
    ]
    wanted.values.update((path, "object") for path in free if path not in skipped)
    wanted.needed = {
        path: [key for key in one.state if isinstance(key, str)]
        for path, one in objects.items()
        if path in free and path not in skipped and adapter.needs_all_entries(one.value)
    }
    wanted.may_be_missing = key_map.matcher(options.allow_missing)
    return wanted


def keys_of_own(leaves: Leaves, said: key_map.KeyMap | None) -> list[str]:
    """The flat keys under which what this rank has of its own is stored, but for what the key_map leaves as it is."""
    objects = {opened.path: opened for opened in leaves.objects}
    told: dict[str, str] = {}  # with which key it goes, see _flat_keys
    for path, value in zip(leaves.value_paths, leaves.values, strict=True):
        if isinstance(value, PerRank):
            owner = owner_of(path, objects)
            told[path] = owner if owner is not None and objects[owner].kind is ObjectKind.FREE else path
    keys = {one: plain_key(one) for one in told.values()}
    moved, skipped = key_map.apply(said, keys)
    return [
        moved.get(one, keys[one]) + plain_key(path)[len(keys[one]) :]
        for path, one in told.items()
        if one not in skipped
    ]


def _distributed(tensors: LocalTensors) -> Iterator[str]:
    """The paths of distributed tensors of which this rank has elements."""
    for path, number in zip(tensors.paths, tensors.geometry, strict=True):
        geometry = tensors.geometries[number]
        if not geometry.plain and any(0 not in shard.box.shape for shard in geometry.shards):
            yield path


def _flat_keys(
    leaves: Leaves, objects: Mapping[str, OpenedObject], free: Set[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The flat key of each path, by which a key_map, recipes or an arranger know it. Values and arrays of objects that
    take any go with their objects: nobody can say where one of them is stored; their keys, with the objects' paths."""
    paths = list(dict.fromkeys([*leaves.tensor_paths, *leaves.value_paths, *leaves.kept, *free]))
    keys = dict(zip(paths, flat_keys(paths), strict=True))
    inside = dict[str, str]()
    if free:
        arrays = (p for p, value in zip(leaves.tensor_paths, leaves.tensors, strict=True) if type(value) is np.ndarray)
        for path in sorted({*leaves.value_paths, *arrays} - free):
            owner = owner_of(path, objects)
            if owner is not None and owner in free:
                inside[keys.pop(path)] = owner
    return keys, inside


def _to_fill(
    leaves: Leaves, skipped: Set[str], objects: Mapping[str, OpenedObject], free: Set[str]
) -> tuple[list[str], list[Any]]:
    """The tensors and arrays that are filled in place, with their paths: not the arrays of objects that take any, and
    of schedulers."""
    if not skipped and not objects:
        return leaves.tensor_paths, leaves.tensors
    filled = [
        (path, value)
        for path, value in zip(leaves.tensor_paths, leaves.tensors, strict=True)
        if path not in skipped
        and not (isinstance(value, np.ndarray) and (owner_of(path, objects) in free or _is_of_scheduler(path, objects)))
    ]
    return [path for path, _ in filled], [value for _, value in filled]


def _is_of_scheduler(path: str, objects: Mapping[str, OpenedObject]) -> bool:
    """Whether it is in the state of the learning rate's scheduler that an optimizer or a program has."""
    owner = owner_of(scheduler, objects) if (scheduler := scheduler_of(path)) is not None else None
    return owner is not None and objects[owner].kind in (ObjectKind.OPTIMIZER, ObjectKind.PROGRAM)


def _add_values(wanted: WantedState, leaves: Leaves, objects: Mapping[str, OpenedObject]) -> None:
    """Add what is there now where a value is wanted."""
    for path, value in zip(leaves.value_paths, leaves.values, strict=True):
        if isinstance(value, PerRank):
            wanted.own[path] = value
        owner = objects.get(owner_of(path, objects) or "") if objects else None
        kind = owner.kind if owner is not None else None
        if path not in wanted.skipped and kind is not ObjectKind.FREE:
            wanted.values[path] = "optional" if kind is ObjectKind.PROGRAM else _present(value, kind is not None)


def _add_arrays_of_schedulers(wanted: WantedState, leaves: Leaves, objects: Mapping[str, OpenedObject]) -> None:
    """Add the arrays that schedulers have now, each of which another array or a value may replace."""
    for path, value in zip(leaves.tensor_paths, leaves.tensors, strict=True) if objects else ():
        if isinstance(value, np.ndarray) and path not in wanted.skipped and _is_of_scheduler(path, objects):
            wanted.values[path] = "other"


def _add_others(wanted: WantedState, leaves: Leaves, adapter: Adapter) -> None:
    """Add the names of tensors that are not filled, and what is left of schedulers, whose dicts are loaded whole."""
    if len(wanted.tensors.paths) < len(leaves.tensor_paths):
        names = zip(leaves.tensor_paths, adapter.names(leaves.tensors), strict=True)
        filled = set(wanted.tensors.paths)
        wanted.others = {path: name for path, name in names if path not in filled}
    if leaves.kept:
        wanted.kept = list(leaves.kept)
        wanted.others.update(zip(leaves.kept, adapter.names(list(leaves.kept.values())), strict=True))
    left = (path for path in leaves.value_paths if path in wanted.skipped) if wanted.skipped else ()
    wanted.others.update((path, None) for path in left if scheduler_of(path) is not None)


def _any_below(container: str, paths: Iterable[str]) -> bool:
    return any(path.startswith(f"{container}/") for path in paths)


def _frozen(leaves: Leaves, adapter: Adapter) -> list[tuple[str, str]]:
    """The optimizers, each with the path of a parameter that is not trained now, and for which it has no entries."""
    optimizers = [one for one in leaves.objects if one.kind is ObjectKind.OPTIMIZER]
    frozen = {one.path: tokens for one in optimizers if (tokens := adapter.frozen(one.value))}
    if not frozen:
        return []
    paths = {adapter.token(one): path for path, one in zip(leaves.tensor_paths, leaves.tensors, strict=True)}
    return [(path, paths[token]) for path, tokens in frozen.items() for token in tokens if token in paths]


def _record(key: str, geometry: Geometry, corner: tuple[int, ...] | None) -> WantedRecord:
    if corner is None:
        corner = min((shard.box.offset for shard in geometry.shards), default=None)
    return WantedRecord(key, geometry.shape, geometry.dtype.name, corner)


def _present(value: Any, in_object: bool) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "dict" if value else "nothing" if in_object else "empty"
    if isinstance(value, (list, tuple)):
        return "list"
    return "own" if isinstance(value, PerRank) else "other"
