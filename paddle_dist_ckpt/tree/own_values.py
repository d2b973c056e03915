"""Values of which every rank keeps its own, where all of them are together: in dicts by rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.text import ranks_text
from .paths import ListIndex, Part, TupleIndex, parse_path, plain_key
from .state_dict import PerRank

__all__ = ["OfRanks", "with_own"]


class OfRanks(PerRank):
    """The own values of several ranks; ``value`` has them by rank."""


def with_own(state_dict: dict[Any, Any], paths: Iterable[str], ranks: Sequence[int], choice: str) -> dict[Any, Any]:
    """A state_dict in which dicts by rank are :class:`OfRanks`.

    Args:
        state_dict: It stays as it is.
        paths: Where there may be such dicts.
        ranks: The ranks that are to get the values.
        choice: ``LoadOptions.per_rank``, for dicts of other ranks.

    Raises:
        ValueError: a dict is of other ranks, and the choice is to refuse that.
    """
    for path in paths:
        state_dict = _replaced(state_dict, parse_path(path), plain_key(path), ranks, choice)
    return state_dict


def _replaced(container: Any, parts: Sequence[Part], key: str, ranks: Sequence[int], choice: str) -> Any:
    first, *rest = parts
    index: Any = first.at if isinstance(first, (ListIndex, TupleIndex)) else first
    if not isinstance(container, (dict, list, tuple)):
        return container
    try:
        child = container[index]
    except (LookupError, TypeError):
        return container
    new = _replaced(child, rest, key, ranks, choice) if rest else _of_ranks(child, key, ranks, choice)
    if new is child:
        return container
    if isinstance(container, dict):
        return {**container, index: new}
    return type(container)(new if i == index else one for i, one in enumerate(container))


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
