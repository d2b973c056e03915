"""Wanted tensors that are made of boxes of stored ones: which have a recipe."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ..core.parts import IdleStatement
from ..planning.recipe_parts import FilledRecipe
from ..recipes import Recipe, filled, placeholders, stored_keys, texts_and_placeholders

__all__ = ["KeyPattern", "Matching", "idle_hints", "match_recipes", "recipe_finder"]

_NUMBER = re.compile(r"(\d+)")
_MOST_NUMBERS = 8  # of a key, for each of which a statement may have a star


@dataclass(slots=True)
class Matching:
    """Which wanted tensors have recipes.

    Attributes:
        recipes: The recipe of each path that has one.
        patterns: Whether each of the recipes' keys is that of a tensor.
    """

    recipes: dict[str, FilledRecipe] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        """The flat keys of all stored tensors in the recipes."""
        return sorted({key for filled in self.recipes.values() for key in filled.keys})


def match_recipes(
    recipes: Mapping[str, Recipe], keys: Mapping[str, str], known: Mapping[str, str] = MappingProxyType({})
) -> Matching:
    """Find the recipe of each tensor: that for its very key, or else the first whose pattern its key matches.

    Args:
        recipes: The recipes by wanted key or pattern.
        keys: The tensors' flat keys, by their paths.
        known: Flat keys of stored tensors, each by itself: they are not in memory once more.
    """
    find = recipe_finder(recipes, known)
    matching = Matching(patterns=dict.fromkeys(recipes, False))
    for path, key in keys.items():
        if (found := find(key)) is not None:
            name, matching.recipes[path] = found
            matching.patterns[name] = True
    return matching


def recipe_finder(
    recipes: Mapping[str, Recipe], known: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], tuple[str, FilledRecipe] | None]:
    """A function that gives the recipe for a flat key, with the key or pattern of the recipes that it is found by; see
    :func:`match_recipes`."""
    patterns = {name: KeyPattern(name) for name in recipes if placeholders(name)}
    written = {name: tuple(stored_keys(recipes[name])) for name in patterns}

    def find(key: str) -> tuple[str, FilledRecipe] | None:
        if key in recipes and key not in patterns:
            return key, FilledRecipe(recipes[key], tuple(stored_keys(recipes[key])))
        for name, pattern in patterns.items():
            if (found := pattern.match(key)) is not None:
                sources = (filled(one, found) for one in written[name])
                return name, FilledRecipe(recipes[name], tuple(known.get(source, source) for source in sources))
        return None

    return find


class KeyPattern:
    """A key with placeholders, each of which stands for a text without dots; one that is there again, for the same.

    Of several between two dots the first takes as much as it can, then the second, and so on. A regular expression
    would try all the ways to cut what is there, of which a key of a checkpoint may allow very many. So it only finds
    where that begins and ends; unless one of them is there again, for then it depends on the rest how it is cut.

    Args:
        key: The key.
    """

    def __init__(self, key: str) -> None:
        self._several: list[tuple[list[str], list[str]]] = []  # placeholders, and the texts between them
        parts = [texts_and_placeholders(part) for part in key.split(".")]
        counts = Counter(name for pieces in parts for name in pieces[1::2])
        seen: set[str] = set()
        texts = []
        for pieces in parts:
            names = pieces[1::2]
            if len(names) > 1 and all(counts[name] == 1 for name in names):
                self._several.append((names, pieces[2:-1:2]))
                pieces = [pieces[0], names[0], pieces[-1]]
            text = re.escape(pieces[0])
            for name, after in zip(pieces[1::2], pieces[2::2], strict=True):
                text += (f"(?P={name})" if name in seen else f"(?P<{name}>[^.]+)") + re.escape(after)
                seen.add(name)
            texts.append(text)
        self._expression = re.compile(r"\.".join(texts))

    def match(self, key: str) -> dict[str, str] | None:
        """What the placeholders stand for in a key; None if it is not like the pattern."""
        match = self._expression.fullmatch(key)
        if match is None:
            return None
        found = match.groupdict()
        return found if all(_cut(found, names, between) for names, between in self._several) else None


def _cut(found: dict[str, str], names: Sequence[str], between: Sequence[str]) -> bool:
    """Cut what the first of several placeholders has got for all of them; returns whether each gets something. It is
    done from the end, so that the first keeps most."""
    text = found[names[0]]
    end = len(text)
    for name, before in zip(reversed(names[1:]), reversed(between), strict=True):
        at = text.rfind(before, 1, end - 1)
        if at < 0:
            return False
        found[name], end = text[at + len(before) : end], at
    found[names[0]] = text[:end]
    return True


def idle_hints(idle: Sequence[IdleStatement]) -> Callable[[str], str]:
    """A function that says, behind what does not fit, which statement names a flat key and changes nothing: the first
    that does, if one does. There may be very many of both."""
    first: dict[str, int] = {}
    for number, statement in enumerate(idle):
        for name in statement.names:
            first.setdefault(name, number)
    endings = {"", *itertools.chain.from_iterable(statement.endings for statement in idle)}

    def hint(key: str) -> str:
        starts = (key[: len(key) - len(ending)] for ending in endings if key.endswith(ending))
        found = [first[name] for start in starts for name in _names_of(start) if name in first]
        if not found:
            return ""
        about = idle[min(found)]
        return f"; {about.text!r} names it, but changes nothing: {about.reason}"

    return hint if first else lambda key: ""


def _names_of(key: str) -> Iterator[str]:
    """A flat key as statements may write it, with stars for some of its numbers."""
    texts = _NUMBER.split(key)
    most = 2 * _MOST_NUMBERS
    ways = [(text, "*") if i % 2 and i < most else (text,) for i, text in enumerate(texts)]
    return map("".join, itertools.product(*ways))
