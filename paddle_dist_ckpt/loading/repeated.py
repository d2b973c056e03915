"""Dicts, lists and objects that a state_dict has under several keys: what is stored under each has to be the same."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator, Mapping

__all__ = ["differing"]

_NOTHING = object()


def differing(
    repeated: Mapping[str, str], objects: Collection[str], values: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Values that one of them would get under two keys, and that differ: both paths, the one of the first key behind.

    Args:
        repeated: Where each was found again, with where it was found first, by path.
        objects: The paths of those of which all that is stored is taken; of others, what they have.
        values: What is stored for values, by path; equal if these are.
    """
    ordered = sorted(values) if repeated else []

    def below(path: str) -> set[str]:
        first, last = (bisect.bisect_left(ordered, path + sign) for sign in "/0")  # "0" comes after "/"
        return {one[len(path) :] for one in ordered[first:last]}

    for again, first in repeated.items():
        mine, others = below(again), below(first)
        for rest in sorted(mine | others if again in objects else mine & others):
            path, other = again + rest, first + rest
            if values.get(path, _NOTHING) != values.get(other, _NOTHING):
                yield path, other
