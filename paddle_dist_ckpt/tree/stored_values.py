"""Looks into values in the form in which they are stored, see :func:`.values.to_jsonable`, without making them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .paths import ListIndex, Part, TupleIndex, join

__all__ = ["is_dict", "leaves_of", "parts_of"]


def is_dict(tree: Any) -> bool:
    """Whether a value is a dict."""
    return isinstance(tree, dict) and "dict" in tree


def parts_of(tree: Any) -> dict[Part, Any]:
    """The parts of a list or tuple; nothing of another value."""
    parts = tree.get("tuple") if isinstance(tree, dict) else tree
    place = TupleIndex if isinstance(tree, dict) else ListIndex
    return {place(i): part for i, part in enumerate(parts)} if isinstance(parts, list) else {}


def leaves_of(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """The values at a path and below it, of dicts taken apart as those of a state_dict are."""
    pairs = tree.get("dict") if isinstance(tree, dict) else None
    if not isinstance(pairs, list) or not pairs or not all(_is_plain(pair) for pair in pairs):
        yield path, tree
        return
    for key, part in pairs:
        yield from leaves_of(join(path, key), part)


def _is_plain(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int)
