"""Puts a state_dict's tree together from leaves with paths, and sets leaves in one that is there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core.garbage import no_collections
from .objects import ObjectKind, OpenedObject
from .paths import ListIndex, Part, RankIndex, TupleIndex, parent_of, parse_path
from .state_dict import Leaves

__all__ = ["assign", "assign_all", "build_tree", "owner_of"]


def owner_of(path: str, objects: Mapping[str, OpenedObject]) -> str | None:
    """The path of the innermost object that has what is at a path, or below which it is."""
    while path:
        if path in objects:
            return path
        path = parent_of(path)
    return None


def assign_all(
    state_dict: dict[Any, Any], leaves: Leaves, values: Mapping[str, Any]
) -> list[tuple[OpenedObject, dict[Any, Any]]]:
    """Set the values at these paths, in the state_dict itself and in the state_dicts of its objects.

    Returns:
        Each object with the state that it is to be given; those in other objects first.
    """
    objects = {opened.path: opened for opened in leaves.objects}
    by_owner: dict[str | None, dict[str, Any]] = {None: {}, **{path: {} for path in objects}}
    for path, value in values.items():
        by_owner[owner_of(path, objects)][path] = value
    assign(state_dict, by_owner[None])
    free = {path for path, opened in objects.items() if opened.kind is ObjectKind.FREE}
    if free:
        inner = [(path, opened.value) for path, opened in objects.items()]
        stored = {path: _StateOfObject(path, by_owner[path]) for path in free}
        for path, value in (*zip(leaves.tensor_paths, leaves.tensors, strict=True), *inner):
            if isinstance(value, np.ndarray):  # like a value, it is as it was stored
                continue
            owner = owner_of(path if path not in objects else parent_of(path), objects)
            if owner in free and stored[owner].leaves_room_for(path):
                by_owner[owner][path] = value
    found = []
    for path, opened in reversed(objects.items()):
        own = {name[len(path) :]: value for name, value in by_owner[path].items()}
        if path in free:
            if own:
                found.append((opened, build_tree(own.items())))
        else:
            assign(opened.state, own)
            found.append((opened, opened.state))
    return found


class _StateOfObject:
    """What is stored for an object, which it gets as it is: tensors that it has where that has something else, as when
    only what fits is loaded, are not put in.

    Args:
        owner: The object's path.
        paths: Those of what is stored.
    """

    def __init__(self, owner: str, paths: Collection[str]) -> None:
        self._owner, self._leaves, self._kinds = owner, set(paths), dict[str, str]()
        for path in paths:
            self._kinds.update(self._containers(path))

    def leaves_room_for(self, path: str) -> bool:
        """Whether nothing else is stored at a path, below it, or where the containers are that it leads through."""
        return not (path in self._leaves or path in self._kinds) and all(
            above not in self._leaves and self._kinds.get(above, kind) == kind for above, kind in self._containers(path)
        )

    def _containers(self, path: str) -> Iterator[tuple[str, str]]:
        """The containers in the object that a path leads through, each with what tells their kinds apart."""
        while path != self._owner:
            path, _, part = path.rpartition("/")
            yield path, part[:2] if part.startswith(("~l", "~t")) else ""


def assign(state_dict: dict[Any, Any], values: Mapping[str, Any]) -> None:
    """Set the leaves at these paths. Dicts and lists are changed in place; a tuple is replaced by a new one."""
    if "" in values:  # all of it is one value: an object's state without entries
        state_dict.update(values[""])
        return
    changes: dict[Part, Any] = {}
    for path, value in values.items():
        _put(changes, path, value)
    _assign(state_dict, changes)


_OF_DICTS = frozenset((str, int))


class _DictLeaf(NamedTuple):
    """A leaf whose value is a dict, among nested dicts by part of the path. All other leaves stand for themselves."""

    value: dict[Any, Any]


def _put(root: dict[Part, Any], path: str, value: Any) -> None:
    """Put a leaf into nested dicts by part of the path.

    Raises:
        ValueError: a path is both a leaf's and a container's, or twice a leaf's.
    """
    node = root
    *containers, last = parse_path(path)
    for part in containers:
        node = node.setdefault(part, {})
        if type(node) is not dict:
            raise ValueError(f"{path}: both a leaf and a container")
    if last in node:
        raise ValueError(f"{path}: twice a leaf, or both a leaf and a container")
    node[last] = _DictLeaf(value) if type(value) is dict else value


def _assign(container: Any, changes: dict[Part, Any]) -> Any:
    copy: Any = list(container) if isinstance(container, tuple) else container
    for part, change in changes.items():
        index = part.at if isinstance(part, (ListIndex, TupleIndex)) else part
        present = copy.get(index) if isinstance(copy, dict) else copy[index]
        if type(change) is dict and present is not None:
            copy[index] = _assign(present, change)
        elif isinstance(change, _DictLeaf) and isinstance(present, dict) and not present:
            present.update(change.value)
        else:
            copy[index] = _settle(change)
    return tuple(copy) if isinstance(container, tuple) else copy


@no_collections()
def build_tree(leaves: Iterable[tuple[str, Any]]) -> Any:
    """The nested containers that have these leaves at these paths.

    Places of a list or tuple that no path names hold None. A leaf at the empty path is the tree itself.
    """
    root: dict[Part, Any] = {}
    for path, value in leaves:
        if path == "":
            return value
        _put(root, path, value)
    return _settle(root)


def _settle(node: Any) -> Any:
    """What a node stands for: a leaf's value, or a container, for which the node's own dict is taken if it can be."""
    if isinstance(node, _DictLeaf):
        return node.value
    if type(node) is not dict:
        return node
    for part, child in node.items():
        if isinstance(child, (dict, _DictLeaf)):
            node[part] = _settle(child)
    kinds = set(map(type, node))
    if kinds <= _OF_DICTS:
        return node
    if kinds == {RankIndex}:
        return {part.at: child for part, child in node.items()}
    if kinds in ({ListIndex}, {TupleIndex}):
        items: list[Any] = [None] * (1 + max(part.at for part in node))
        for part, child in node.items():
            items[part.at] = child
        return items if ListIndex in kinds else tuple(items)
    return node
