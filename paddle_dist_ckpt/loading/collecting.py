"""Finds out what a load's caller wants filled: the tensors and values of its state_dict, and where they are stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.local_tensors import LocalTensors
from ..core.parts import Arranger
from ..core.text import encodable
from ..errors import StateDictMismatchError
from ..options import LoadOptions
from ..recipes import distinct_text
from ..tree.building import owner_of
from ..tree.names import scheduler_of
from ..tree.objects import ObjectKind, OpenedObject
from ..tree.paths import containers_of, flat_keys, join, plain_key, unstorable
from ..tree.state_dict import Adapter, Leaves, PerRank
from ..visible import each_visible
from . import key_map
from .messages import Mismatch, WantedPaths, WantedRecord
from .recipes import Matching, match_recipes
from .wanted import WantedState

__all__ = ["collect", "keys_of_own"]

_LONGEST_TEXT = 1000  # of a recipe that is compared with those of other ranks


def collect(
    leaves: Leaves, adapter: Adapter, options: LoadOptions, arranger: Arranger | None = None, thaws: bool = False
) -> tuple[WantedState, WantedPaths]:
    """Look at what a load was called with.

    Returns:
        What is wanted, and what the coordinator is told of it; with the parameters that are not trained if ``thaws``.

    Raises:
        StateDictMismatchError: there are keys under which nothing can be stored, and which cannot be sent either.
    """
    objects = {opened.path: opened for opened in leaves.objects}
    free = {path for path, opened in objects.items() if opened.kind is ObjectKind.FREE}  # they take any values
    as_named = options.key_map is None and not options.recipes  # and others than this rank may have statements
    told = _Told() if as_named and arranger is None else _find_told(leaves, objects, free, options)
    skipped = told.skipped
    tensors, spared = LocalTensors(), LocalTensors()
    asked, values = _to_fill(leaves, skipped, objects, free)
    refused = tensors.look_at(asked, values, adapter)
    left = {path: value for path, value in zip(leaves.tensor_paths, leaves.tensors, strict=True) if path in skipped}
    spared.look_at(list(left), list(left.values()), adapter)
    wanted = WantedState(
        tensors=tensors,
        values=_present_values(leaves, objects, skipped),
        problems=[Mismatch(plain_key(path), text) for path, text in refused.items()],
        moved=told.moved,
        skipped=skipped,
        made=told.made,
        has_objects=bool(objects),
        own=_own_values(leaves),
        repeated=leaves.repeated,
        needed={
            path: [key for key in one.state if isinstance(key, str)]
            for path, one in objects.items()
            if path in free and path not in skipped and adapter.needs_all_entries(one.value)
        },
        may_be_disabled={path for path, one in objects.items() if adapter.may_be_disabled(one.value)},
        tied=tensors.tied(),
        may_be_missing=key_map.matcher(options.allow_missing),
    )
    said = WantedPaths(
        tensors=tensors.paths,
        values=wanted.values,
        names=tensors.names,
        others=_others(leaves, tensors, skipped, adapter),
        moved=told.moved,
        made=[path for path in tensors.paths if path in told.made.recipes],
        sources=told.made.sources,
        instead=_instead(wanted, spared),
        records={}
        if arranger is None
        else _records(tensors, dict(zip(asked, values, strict=True)), told.keys, arranger),
        kept=list(leaves.kept),
        tied=wanted.tied,
        frozen=_frozen(leaves, adapter, options, {*told.moved, *skipped}) if thaws else [],
        spared=sorted(skipped) if "object" in wanted.values.values() else [],
        rules="" if arranger is None else arranger.rules,
        patterns={encodable(key): there for key, there in told.made.patterns.items()},
        key_map={encodable(key): there for key, there in told.matched.items()},
        complete=_complete(objects, adapter) if as_named and (arranger is None or arranger.idles) else [],
    )
    # Not all that objects have which take any values, or that is left: of that nothing is said.
    everywhere = itertools.chain(said.tensors, said.values, said.others, said.spared, objects)
    meant = itertools.filterfalse(str.isascii, itertools.chain(said.moved.values(), said.sources))
    if wrong := list(dict.fromkeys(unstorable(itertools.chain(everywhere, (join("", key) for key in meant))))):
        raise StateDictMismatchError("\n".join(["no checkpoint has such keys:", *each_visible(wrong)]), wrong)
    return wanted, said


def _complete(objects: Mapping[str, OpenedObject], adapter: Adapter) -> list[str]:
    """The keys of the objects of users' own classes."""
    return [plain_key(path) for path, one in objects.items() if adapter.is_defined_by_user(one.value)]


@dataclass(slots=True)
class _Told:
    """What options say of the entries of a state_dict; without such options nothing.

    Attributes:
        keys: The flat key of each path by which the options know it.
        made, moved, skipped: See :class:`.wanted.WantedState`.
        matched: See :attr:`.messages.WantedPaths.key_map`.
    """

    keys: dict[str, str] = field(default_factory=dict)
    made: Matching = field(default_factory=Matching)
    moved: dict[str, str] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    matched: dict[str, bool] = field(default_factory=dict)


def _find_told(leaves: Leaves, objects: Mapping[str, OpenedObject], free: Set[str], options: LoadOptions) -> _Told:
    """Find out what the recipes and the key_map say."""
    keys, inside = _flat_keys(leaves, objects, free)
    targets = (path for path in leaves.tensor_paths if not free or owner_of(path, objects) not in free)
    made = match_recipes(options.recipes or {}, {path: keys[path] for path in targets})
    moved, skipped = key_map.apply(options.key_map, {p: key for p, key in keys.items() if p not in made.recipes})
    # Of these objects, others than those that take any values, there may be stored what they do not have.
    left_whole = key_map.left_whole(options.key_map, {path: plain_key(path) for path in objects})
    skipped.update(set(left_whole) - containers_of(made.recipes))
    matched = key_map.matched(options.key_map, keys.values())
    entries = {key: (keys[one], None if one in skipped else moved.get(one, keys[one])) for key, one in inside.items()}
    matched |= dict.fromkeys(key_map.unheard(options.key_map, entries), False)
    return _Told(keys, made, moved, skipped, matched)


def keys_of_own(leaves: Leaves, said: key_map.KeyMap | None) -> list[str]:
    """The flat keys under which what this rank has of its own is stored, but for what the key_map leaves as it is."""
    objects = {opened.path: opened for opened in leaves.objects}
    goes_with: dict[str, str] = {}  # with which path's key, see _flat_keys
    for path in _own_values(leaves):
        owner = owner_of(path, objects)
        goes_with[path] = owner if owner is not None and objects[owner].kind is ObjectKind.FREE else path
    keys = {one: plain_key(one) for one in goes_with.values()}
    moved, skipped = key_map.apply(said, keys)
    return [
        moved.get(one, keys[one]) + plain_key(path)[len(keys[one]) :]
        for path, one in goes_with.items()
        if one not in skipped
    ]


def _instead(wanted: WantedState, spared: LocalTensors) -> dict[str, str]:
    """What distributed tensors are made of, in words, if this rank has recipes or a key_map for any tensor.

    Of a tensor of which a rank has no elements it says nothing. Plain tensors are each rank's own. ``spared`` are
    tensors that the key_map says are left as they are.
    """
    if not wanted.moved and not wanted.made.recipes and not spared.paths:
        return {}
    found = dict.fromkeys(_distributed(spared), key_map.LEFT_OUT)
    for path in _distributed(wanted.tensors):
        key, filled = wanted.moved.get(path), wanted.made.recipes.get(path)
        if filled is not None:
            found[path] = distinct_text(filled.recipe, _LONGEST_TEXT)
        else:
            found[path] = key_map.OWN_KEY if key is None else f"stored({key!r})"
    return found


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


def _present_values(leaves: Leaves, objects: Mapping[str, OpenedObject], skipped: Set[str]) -> dict[str, str]:
    """What is there now where a value is wanted; see :class:`.wanted.WantedState`."""
    found = dict[str, str]()
    for path, value in zip(leaves.value_paths, leaves.values, strict=True):
        owner = owner_of(path, objects) if objects else None
        kind = None if owner is None else objects[owner].kind
        if path not in skipped and kind is not ObjectKind.FREE:
            found[path] = "optional" if kind is ObjectKind.PROGRAM else _present(value, kind is not None)
    for path, value in zip(leaves.tensor_paths, leaves.tensors, strict=True) if objects else ():
        if isinstance(value, np.ndarray) and path not in skipped and _is_of_scheduler(path, objects):
            found[path] = "other"  # another array, or a value, may replace it
    found.update(
        (path, "object") for path, one in objects.items() if one.kind is ObjectKind.FREE and path not in skipped
    )
    return found


def _own_values(leaves: Leaves) -> dict[str, PerRank]:
    """The values of its own that this rank has, by path."""
    pairs = zip(leaves.value_paths, leaves.values, strict=True)
    return {path: value for path, value in pairs if isinstance(value, PerRank)}


def _others(leaves: Leaves, tensors: LocalTensors, skipped: Set[str], adapter: Adapter) -> dict[str, str | None]:
    """The names of tensors that are not filled, and what is left of schedulers, whose dicts are loaded whole."""
    found = dict[str, str | None]()
    if len(tensors.paths) < len(leaves.tensor_paths):
        names = zip(leaves.tensor_paths, adapter.names(leaves.tensors), strict=True)
        filled = set(tensors.paths)
        found = {path: name for path, name in names if path not in filled}
    if leaves.kept:
        found.update(zip(leaves.kept, adapter.names(list(leaves.kept.values())), strict=True))
    left = (path for path in leaves.value_paths if path in skipped) if skipped else ()
    found.update((path, None) for path in left if scheduler_of(path) is not None)
    return found


def _frozen(leaves: Leaves, adapter: Adapter, options: LoadOptions, said: Set[str]) -> list[tuple[str, str]]:
    """The optimizers of which the options say nothing, nor of what is in them, as that of ``said``; each with the path
    of a parameter that is not trained now, and for which it has no entries; with all paths of one that is tied, for its
    entries may be stored after any of these."""
    optimizers = [one for one in leaves.objects if one.kind is ObjectKind.OPTIMIZER]
    frozen = {one.path: tokens for one in optimizers if (tokens := adapter.frozen(one.value))}
    if not frozen:
        return []
    above = containers_of(said)
    alone = (path for path in frozen if path not in above and key_map.leaves_alone(options.key_map, plain_key(path)))
    paths: dict[int, list[str]] = {}
    for path, one in zip(leaves.tensor_paths, leaves.tensors, strict=True):
        paths.setdefault(adapter.token(one), []).append(path)
    return [(path, one) for path in alone for token in frozen[path] for one in paths.get(token, ())]


def _records(
    tensors: LocalTensors, values: Mapping[str, Any], keys: Mapping[str, str], arranger: Arranger
) -> dict[str, WantedRecord]:
    """What an arranger is told of each tensor, by path."""
    found = {}
    for path, number in zip(tensors.paths, tensors.geometry, strict=True):
        geometry, corner = tensors.geometries[number], arranger.corner(values[path])
        if corner is None:
            corner = min((shard.box.offset for shard in geometry.shards), default=None)
        found[path] = WantedRecord(keys[path], geometry.shape, geometry.dtype.name, corner)
    return found


def _present(value: Any, in_object: bool) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "dict" if value else "nothing" if in_object else "empty"
    if isinstance(value, (list, tuple)):
        return "list" if value or in_object else "bare"
    return "own" if isinstance(value, PerRank) else "other"
