"""Dicts, lists and objects that a state_dict has under several keys: what is stored under each has to be the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ..tree.paths import below
from ..tree.values import in_any_order

__all__ = ["differing"]

_NOTHING = object()


def differing(
    repeated: Mapping[str, str], objects: Collection[str], values: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Find values that differ although they are stored for one and the same thing in the state_dict.

    Args:
        repeated: The path at which each dict, list or object was found again, with the path where it was found first.
        objects: Those paths of which everything that is stored is taken; of others only what is stored for both paths.
        values: What is stored for values, by path: as JSON, or in tuples that are equal if the values are.

    Yields:
        The paths of two values that differ: below the path where something was found again, and where it was first.
    """
    ordered = sorted(values) if repeated else []

    for again, first in repeated.items():
        mine, others = ({one[len(path) :] for one in ordered[below(path, ordered)]} for path in (again, first))
        for rest in sorted(mine | others if again in objects else mine & others):
            path, other = again + rest, first + rest
            if not _are_same(values.get(path, _NOTHING), values.get(other, _NOTHING)):
                yield path, other


def _are_same(value: object, other: object) -> bool:
    """Whether two values are the same; 1, 1.0 and True are not, though they are equal."""
    if isinstance(value, tuple) or isinstance(other, tuple) or value is _NOTHING or other is _NOTHING:
        return value == other
    return in_any_order(value) == in_any_order(other)
