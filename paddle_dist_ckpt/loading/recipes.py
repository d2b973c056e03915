"""Wanted tensors that are made of boxes of stored ones: which have a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..core.parts import IdleStatement
from ..planning.recipe_parts import FilledRecipe
from ..recipes import Recipe, filled, placeholders, stored_keys
from .messages import Mismatch

__all__ = ["Matching", "key_pattern", "match_recipes", "with_hint"]


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
        return sorted({key for filled in self.recipes.values() for key in filled.keys.values()})


def match_recipes(recipes: Mapping[str, Recipe], keys: Mapping[str, str]) -> Matching:
    """Find the recipe of each tensor: that for its very key, or else the first whose pattern its key matches.

    Args:
        recipes: The recipes by wanted key or pattern.
        keys: The tensors' flat keys, by their paths.
    """
    matching = Matching(patterns=dict.fromkeys(recipes, False))
    written = {name: stored_keys(recipe) for name, recipe in recipes.items()}
    patterns = [(name, key_pattern(name)) for name in recipes if placeholders(name)]
    for path, key in keys.items():
        if key in recipes and not placeholders(key):
            matching.recipes[path] = FilledRecipe(recipes[key], {one: one for one in written[key]})
            matching.patterns[key] = True
            continue
        for name, pattern in patterns:
            match = pattern.fullmatch(key)
            if match is not None:
                found = match.groupdict()
                matching.recipes[path] = FilledRecipe(recipes[name], {one: filled(one, found) for one in written[name]})
                matching.patterns[name] = True
                break
    return matching


def key_pattern(key: str) -> re.Pattern[str]:
    """A key with placeholders as a regular expression. One that is there again stands for the same text."""
    seen: set[str] = set()
    text = ""
    for i, piece in enumerate(re.split(r"\{([A-Za-z_][A-Za-z0-9_]*)\}", key)):
        if i % 2 == 0:
            text += re.escape(piece)
        elif piece in seen:
            text += f"(?P={piece})"
        else:
            text += f"(?P<{piece}>[^.]+)"
            seen.add(piece)
    return re.compile(text)


def with_hint(problem: Mismatch, idle: Iterable[IdleStatement]) -> str:
    """What does not fit, with a statement that names the key and changes nothing."""
    about = next((one for one in idle if one.is_about(problem.key)), None)
    hint = "" if about is None else f"; {about.text!r} names it, but changes nothing: {about.reason}"
    return f"{problem}{hint}"
