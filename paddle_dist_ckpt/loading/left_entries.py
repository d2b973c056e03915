"""Stored entries of objects of a user's class that the objects do not have: which a load may leave, and which not.

A class that has its own ``state_dict()`` may have entries that appear later, in the first step, say. A load into a
fresh object would leave them unseen. What a job has changed on purpose is no reason to stop it:

    stored, and not asked for                           what becomes of it
    --------------------------------------------------  ----------------------------------------------
    the state of a scheduler                            left, as with Paddle's own classes
    an accumulator of one of Paddle's names, if of the  left: such accumulators are made before a load
      same parameter others are asked for, or of others
      those of this name
    another accumulator of a parameter that is not      left, and named in a warning
      asked for
    what Paddle names like a parameter, in a sub-layer  left, and named in a warning: the sub-layer is gone,
      (and all else that is directly in that)             most likely
    a tensor in a sub-layer, if it was not saved        the same, for nothing is known of its name
    anything else                                       refused
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..core.shards import Kind
from ..files.metadata import Metadata
from ..tree.names import Names, is_accumulator, parameter_of_run
from ..tree.paths import plain_key
from ..tree.variables import container_of

__all__ = ["judge"]

_SCHEDULER = "LR_Scheduler."
_PARAMETER = re.compile(r"\.[wb]_\d+(?:\.dist)?$")


@dataclass(slots=True)
class _LeftEntries:
    """The flat keys of entries that may not be left, and of those that may, and are worth a warning."""

    refused: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)


def judge(
    metadata: Metadata, names: Names, asked: Collection[str], unused: Iterable[str], tops: Sequence[str]
) -> _LeftEntries:
    """Judge the entries of some objects that nothing asks for.

    Args:
        metadata: What is stored.
        names: What its tensors are called.
        asked: The stored paths that something asks for.
        unused: The others.
        tops: The flat keys of the objects.
    """
    found = _LeftEntries()
    left = [(path, top) for path in unused if (top := _top_of(metadata.key(path), tops)) is not None]
    if not left:
        return found
    known = _Accumulators(names, asked)
    places = metadata.table.index
    gone: set[str] = set()  # sub-layers that had parameters
    for path, top in left:
        place = places.get(path)
        if place is not None and _PARAMETER.search(names.names[place] or "") and path not in names.variables:
            gone.add(_sub_layer(path, top))
    gone.discard("")
    for path, top in left:
        key, place = metadata.key(path), places.get(path)
        if key[len(top) + 1 :].startswith(_SCHEDULER) or known.may_be_left(path):
            continue
        is_tensor = place is not None and metadata.table.kinds[place] == Kind.TENSOR
        sub_layer = _sub_layer(path, top)
        unnamed = metadata.format == "present" and place is not None and names.names[place] is None
        of_layer = bool(sub_layer) and (sub_layer in gone or unnamed)
        is_of_run = parameter_of_run(key) is not None
        doubtful = is_tensor and (of_layer or known.is_of_others(path) or (is_of_run and not known.is_known(path)))
        (found.doubtful if doubtful else found.refused).append(key)
    return found


class _Accumulators:
    """What is asked for of stored optimizer variables."""

    def __init__(self, names: Names, asked: Collection[str]) -> None:
        self._variables, self._asked = names.variables, asked
        self._names: set[tuple[str, str]] = set()  # a container, and the name of accumulators in it
        self._owners: set[tuple[str, str]] = set()  # a container, and a parameter of which it has some
        for path, (parameters, accumulator) in self._variables.items():
            if path in asked:
                container = container_of(path)
                self._names.add((container, accumulator))
                self._owners.update((container, one) for one in parameters)

    def may_be_left(self, path: str) -> bool:
        """Whether it is an accumulator that nobody needs any more, and none that is made later."""
        variable = self._variables.get(path)
        if variable is None or not is_accumulator(variable.accumulator):
            return False
        container = container_of(path)
        found = any((container, one) in self._owners for one in variable.parameters)
        return found or (container, variable.accumulator) in self._names

    def is_known(self, path: str) -> bool:
        """Whether it is a variable of a parameter that is stored."""
        return path in self._variables

    def is_of_others(self, path: str) -> bool:
        """Whether it is a variable of parameters that nothing asks for."""
        variable = self._variables.get(path)
        return variable is not None and not any(one in self._asked for one in variable.parameters)


def _top_of(key: str, tops: Sequence[str]) -> str | None:
    """The key of the object that an entry is of."""
    return next((top for top in tops if key.startswith(f"{top}.")), None)


def _sub_layer(path: str, top: str) -> str:
    """Of an entry that a layer has directly, the key of the sub-layer that it is in; nothing for others."""
    container, _, last = path.rpartition("/")
    if container and plain_key(container) == top:
        return last.rpartition(".")[0]
    return last.removeprefix(f"{top}.").rpartition(".")[0] if not container else ""
