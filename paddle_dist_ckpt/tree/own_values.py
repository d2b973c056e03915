"""Values of which every rank keeps its own, where all of them are together: in dicts by rank."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

from ..core.text import ranks_text
from .state_dict import PerRank

__all__ = ["OfRanks", "with_own"]


class OfRanks(PerRank):
    """The own values of several ranks; ``value`` has them by rank."""


def with_own(state_dict: dict[Any, Any], keys: Collection[str], ranks: Sequence[int], choice: str) -> dict[Any, Any]:
    """A state_dict in which dicts by rank are :class:`OfRanks`.

    Args:
        state_dict: It stays as it is.
        keys: The flat keys at which there may be such dicts, however nested.
        ranks: The ranks that are to get the values.
        choice: ``LoadOptions.per_rank``, for dicts of other ranks.

    Raises:
        ValueError: a dict is of other ranks, and the choice is to refuse that.
    """
    found: dict[Any, Any] = _replaced(state_dict, None, keys, ranks, choice)
    return found


def _replaced(value: Any, key: str | None, keys: Collection[str], ranks: Sequence[int], choice: str) -> Any:
    if key is not None and key in keys and (own := _of_ranks(value, key, ranks, choice)) is not value:
        return own
    above = "" if key is None else f"{key}."
    if not isinstance(value, (dict, list, tuple)) or not any(one.startswith(above) for one in keys):
        return value
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = {index: _replaced(one, f"{above}{index}", keys, ranks, choice) for index, one in pairs}
    if isinstance(value, dict):
        return value if all(found[index] is one for index, one in value.items()) else found
    return value if all(map(operator.is_, found.values(), value)) else type(value)(found.values())


def _of_ranks(value: Any, key: str, ranks: Sequence[int], choice: str) -> Any:
    if not isinstance(value, dict) or not value or not all(type(rank) is int and rank >= 0 for rank in value):
        return value
    if choice == "coordinator" and value.keys() != set(ranks):
        return OfRanks(dict.fromkeys(ranks, value[min(value)]))
    if choice == "refuse" and not value.keys() <= set(ranks):
        raise ValueError(
            f"{key}: whole has values that {ranks_text(value)} had as their own, and now there are {len(ranks)} "
            f"({ranks_text(ranks)}); LoadOptions(per_rank='by_rank') or 'coordinator' says which to take"
        )
    return OfRanks(dict(value))
