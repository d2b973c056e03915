"""What a load's caller wants filled: the tensors and values of its state_dict, and where the checkpoint has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.local_tensors import LocalTensors
from ..core.tensors import TensorAdapter
from ..errors import UnsupportedValueError
from ..tree.objects import ObjectKind
from ..tree.state_dict import Leaves, PerRank, owner_of
from . import key_map

__all__ = ["WantedState", "collect"]


@dataclass(slots=True)
class WantedState:
    """What a state_dict wants of a checkpoint, on one rank.

    Attributes:
        tensors: The tensors that are to be filled.
        values: The paths of values, with what is there now: ``"none"``, ``"dict"``, ``"own"`` (a PerRank),
            ``"object"`` (one of any values), ``"optional"`` (of a program) or ``"other"``.
        problems: What cannot be loaded, a line each.
        others: The names of tensors that are not filled, by their paths.
        moved: The stored flat key of each path that the key_map says is stored under another.
        skipped: The paths that the key_map says are left as they are.
        has_objects: Whether there are objects to be given their states in the end.
    """

    tensors: LocalTensors = field(default_factory=LocalTensors)
    values: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    others: dict[str, str | None] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    has_objects: bool = False


def collect(leaves: Leaves, adapter: TensorAdapter, mapping: key_map.KeyMap | None) -> WantedState:
    """Look at what a load was called with.

    Args:
        leaves: The state_dict's tensors, values and objects.
        adapter: Makes the tensors accessible.
        mapping: ``LoadOptions.key_map``.
    """
    objects = {opened.path: opened for opened in leaves.objects}
    free = {path for path, opened in objects.items() if opened.kind is ObjectKind.FREE}  # they take any values
    moved, skipped = key_map.apply(mapping, list(dict.fromkeys([*leaves.tensor_paths, *leaves.value_paths, *free])))
    wanted = WantedState(moved=moved, skipped=skipped, has_objects=bool(objects))
    for path, value in zip(leaves.tensor_paths, leaves.tensors, strict=True):
        if path in skipped or (free and isinstance(value, np.ndarray) and owner_of(path, objects) in free):
            continue
        try:
            wanted.tensors.add(path, adapter.view(value, path))
        except UnsupportedValueError as error:
            wanted.problems.append(str(error))
    for path, value in zip(leaves.value_paths, leaves.values, strict=True):
        if path not in skipped and (not free or owner_of(path, objects) not in free):
            owner = objects.get(owner_of(path, objects) or "") if objects else None
            is_optional = owner is not None and owner.kind is ObjectKind.PROGRAM
            wanted.values[path] = "optional" if is_optional else _present(value)
    if len(wanted.tensors.paths) < len(leaves.tensor_paths):
        names = zip(leaves.tensor_paths, adapter.names(leaves.tensors), strict=True)
        filled = set(wanted.tensors.paths)
        wanted.others = {path: name for path, name in names if path not in filled}
    wanted.values.update((path, "object") for path in free if path not in skipped)
    return wanted


def _present(value: Any) -> str:
    if value is None:
        return "none"
    return "dict" if isinstance(value, dict) else "own" if isinstance(value, PerRank) else "other"
