"""Wanted tensors that are made of boxes of stored ones: which have a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.parts import IdleStatement
from ..planning.recipe_parts import FilledRecipe
from ..recipes import Recipe, filled, placeholders, placeholders_between, stored_keys
from .messages import Mismatch

__all__ = ["KeyPattern", "Matching", "match_recipes", "with_hint"]


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
    patterns = [(name, KeyPattern(name)) for name in recipes if placeholders(name)]
    for path, key in keys.items():
        if key in recipes and not placeholders(key):
            matching.recipes[path] = FilledRecipe(recipes[key], {one: one for one in written[key]})
            matching.patterns[key] = True
            continue
        for name, pattern in patterns:
            found = pattern.match(key)
            if found is not None:
                matching.recipes[path] = FilledRecipe(recipes[name], {one: filled(one, found) for one in written[name]})
                matching.patterns[name] = True
                break
    return matching


class KeyPattern:
    """A key with placeholders, each of which stands for a text without dots; one that is there again, for the same.

    Of several between two dots the first takes as much as it can, then the second, and so on. A regular expression
    finds what they share; it would try all the ways to cut that, of which a key of a checkpoint may allow very many.

    Args:
        key: The key.
    """

    def __init__(self, key: str) -> None:
        self._cut: dict[int, list[str]] = {}  # by group, what has several placeholders
        seen: set[str] = set()
        texts = []
        for part in key.split("."):
            pieces = placeholders_between(part)
            if len(pieces) > 3:
                self._cut[len(seen) + len(self._cut) + 1] = pieces
                texts.append("([^.]+)")
                continue
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
        return found if all(_cut(match[group], pieces, found) for group, pieces in self._cut.items()) else None


def _cut(text: str, pieces: Sequence[str], found: dict[str, str]) -> bool:
    """Whether a text is like pieces, which are texts with names of placeholders in between; finds what those stand for
    that are not found yet. From the end, so that the first takes most."""
    fixed, names = [pieces[0]], list[str]()
    for name, after in zip(pieces[1::2], pieces[2::2], strict=True):
        if name in found:
            fixed[-1] += found[name] + after
        else:
            names.append(name)
            fixed.append(after)
    begin, end = len(fixed[0]), len(text) - len(fixed[-1])
    if len(set(names)) == 1:
        found[names[0]] = text[begin : begin + (len(text) - sum(map(len, fixed))) // len(names)]
    else:
        for name, after in zip(reversed(names[1:]), reversed(fixed[1:-1]), strict=True):
            at = text.rfind(after, begin + 1, max(0, end - 1))
            if at < 0:
                return False
            found[name], end = text[at + len(after) : end], at
        found.update((name, text[begin:end]) for name in names[:1])
    parts = (found[name] + after for name, after in zip(names, fixed[1:], strict=True))
    return fixed[0] + "".join(parts) == text and all(found[name] for name in names)


def with_hint(problem: Mismatch, idle: Iterable[IdleStatement]) -> str:
    """What does not fit, with a statement that names the key and changes nothing."""
    about = next((one for one in idle if one.is_about(problem.key)), None)
    hint = "" if about is None else f"; {about.text!r} names it, but changes nothing: {about.reason}"
    return f"{problem}{hint}"
