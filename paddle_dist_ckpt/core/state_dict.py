"""The tree of a state_dict: taken apart into leaves with paths, put together again, values set in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import UnsupportedValueError
from .paths import ListIndex, Part, TupleIndex, join, parse_path, plain_key

__all__ = ["Leaves", "assign", "build_tree", "flatten"]

_MAX_DEPTH = 200
_KEYS = "keys above a tensor must be str or int (of 64 bits)"
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """The entries of a flattened state_dict in its own order, tensors and values apart."""

    tensor_paths: list[str] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)
    value_paths: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


def flatten(state_dict: dict[Any, Any], is_tensor: Callable[[Any], bool]) -> Leaves:
    """The leaves of a state_dict.

    Dicts with str and int keys are taken apart, and lists and tuples that hold a tensor somewhere. Everything else is a
    leaf: tensors, values, empty dicts, lists of values.

    Raises:
        TypeError: ``state_dict`` is not a dict.
        UnsupportedValueError: a tensor under a dict key that is neither str nor int, or a tree without an end.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict must be a dict, not {type(state_dict).__name__}")
    leaves = Leaves()
    for key in state_dict:
        if not _is_plain_key(key):
            raise UnsupportedValueError(f"state_dict has the key {_shown(key)}; {_KEYS}")
    _flatten_parts(leaves, "", state_dict.items(), is_tensor, 0)
    return leaves


def _flatten_parts(
    leaves: Leaves, path: str, parts: Iterable[tuple[Part, Any]], is_tensor: Callable[[Any], bool], depth: int
) -> None:
    for part, value in parts:
        child = join(path, part)
        if is_tensor(value):
            leaves.tensor_paths.append(child)
            leaves.tensors.append(value)
            continue
        try:
            below = _children(child, value, is_tensor, depth)
            if below is not None:
                _flatten_parts(leaves, child, below, is_tensor, depth + 1)
                continue
        except RecursionError:
            raise UnsupportedValueError(f"{plain_key(child)[:80]}: nested too deeply, or contains itself") from None
        leaves.value_paths.append(child)
        leaves.values.append(value)


def _children(path: str, value: Any, is_tensor: Callable[[Any], bool], depth: int) -> Iterable[tuple[Part, Any]] | None:
    """The parts of a container that is taken apart, or None for a leaf."""
    if depth > _MAX_DEPTH:
        raise UnsupportedValueError(
            f"{plain_key(path)[:80]}: nested deeper than {_MAX_DEPTH} levels, or contains itself"
        )
    if isinstance(value, dict) and value:
        odd = [key for key in value if not _is_plain_key(key)]
        if not odd:
            return value.items()
        if _holds_tensor(value.values(), is_tensor, set()):
            raise UnsupportedValueError(f"{plain_key(path)}: holds tensors, and has the key {_shown(odd[0])}; {_KEYS}")
    elif isinstance(value, (list, tuple)) and _holds_tensor(value, is_tensor, set()):
        if type(value) not in (list, tuple):
            raise UnsupportedValueError(
                f"{plain_key(path)}: a {type(value).__name__} of tensors cannot be stored; use a tuple"
            )
        place = ListIndex if type(value) is list else TupleIndex
        return [(place(i), child) for i, child in enumerate(value)]
    return None


def _is_plain_key(key: Any) -> bool:
    return type(key) is str or (type(key) is int and key in _INT64)


def _shown(key: Any) -> str:
    return "of more than 64 bits" if type(key) is int else repr(key)[:80]


def _holds_tensor(values: Iterable[Any], is_tensor: Callable[[Any], bool], seen: set[int]) -> bool:
    """Whether there is a tensor among the values or in containers among them. ``seen`` are containers without one."""
    for value in values:
        if is_tensor(value):
            return True
        if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
            continue
        seen.add(id(value))
        if _holds_tensor(value.values() if isinstance(value, dict) else value, is_tensor, seen):
            return True
    return False


def assign(state_dict: dict[Any, Any], values: Mapping[str, Any]) -> None:
    """Set the leaves at these paths. Dicts and lists are changed in place; a tuple is replaced by a new one."""
    if values:
        tree: dict[Any, Any] = {}
        for path, value in values.items():
            node = tree
            parts = parse_path(path)
            for part in parts[:-1]:
                node = node.setdefault(part, {})
            node[parts[-1]] = _Set(value)
        _assign(state_dict, tree)


class _Set(NamedTuple):
    value: Any


def _assign(container: Any, changes: dict[Part, Any]) -> Any:
    copy: Any = list(container) if isinstance(container, tuple) else container
    for part, change in changes.items():
        index = part.at if isinstance(part, (ListIndex, TupleIndex)) else part
        copy[index] = change.value if isinstance(change, _Set) else _assign(copy[index], change)
    return tuple(copy) if isinstance(container, tuple) else copy


def build_tree(leaves: Iterable[tuple[str, Any]]) -> Any:
    """The nested containers that have these leaves at these paths.

    Places of a list or tuple that no path names hold None. A leaf at the empty path is the tree itself.
    """
    root: dict[Part, Any] = {}
    for path, value in leaves:
        if path == "":
            return value
        node = root
        parts = parse_path(path)
        for part in parts[:-1]:
            node = node.setdefault(part, {})
            if isinstance(node, _Set):
                raise ValueError(f"{path}: both a leaf and a container")
        if parts[-1] in node:
            raise ValueError(f"{path}: twice a leaf, or both a leaf and a container")
        node[parts[-1]] = _Set(value)
    return _settle(root)


def _settle(node: Any) -> Any:
    if isinstance(node, _Set):
        return node.value
    kinds = {type(part) for part in node}
    if (kinds <= {ListIndex} and node) or (kinds <= {TupleIndex} and node):
        items: list[Any] = [None] * (1 + max(part.at for part in node))
        for part, child in node.items():
            items[part.at] = _settle(child)
        return items if ListIndex in kinds else tuple(items)
    return {part: _settle(child) for part, child in node.items()}
