"""What recipes make of a checkpoint, if nobody says which tensors are wanted: for merged loads, and to be looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..core.box import whole
from ..core.parts import Arranged, Arranger, IdleStatement, Part, SourceTensor, WantedTensor
from ..options import LoadOptions
from ..planning.recipe_parts import PartMaker, RecipeError, misfit
from ..recipes import Recipe, filled, placeholders, stored_keys
from .key_map import matcher
from .part_targets import fitted_parts
from .recipes import KeyPattern, Matching, match_recipes
from .wording import MISSING

__all__ = ["RecipeArranger", "arranger_for", "unless_itself"]


class AllMade(NamedTuple):
    """All that is made of a checkpoint.

    Attributes:
        tensors: What is made, by flat key; None for a tensor that is left as it is stored.
        sources: The flat keys that recipes speak of, those that do not fit as well.
        problems: What does not fit of the recipes, a line each.
        unfit: The flat keys for which the rest says what cannot be made, with the reasons.
        left: What is not made, for it may be missing, and something of which it would be made is; a line each.
        unmade: The flat keys of all for which there is a recipe or a statement that makes nothing.
    """

    tensors: dict[str, Arranged | None]
    sources: set[str]
    problems: list[str]
    unfit: dict[str, str]
    left: list[str]
    unmade: list[str]


class RecipeArranger:
    """What recipes make; implements :class:`..core.parts.Arranger`.

    Args:
        recipes: The recipes.
        rest: What says it of all other tensors; without it they are as they are stored.
        allow_missing: Patterns of keys that need not be made if something is not stored of which they would be.
    """

    def __init__(self, recipes: Mapping[str, Recipe], rest: Arranger | None, allow_missing: Sequence[str] = ()) -> None:
        self._recipes, self._rest, self._may_be_missing = recipes, rest, matcher(allow_missing)
        self.rules, self.idles = "", False  # which are for one rank alone

    def by(self, rules: str) -> RecipeArranger:
        """See :class:`..core.parts.Arranger`."""
        return self

    def corner(self, value: Any) -> tuple[int, ...] | None:
        """See :class:`..core.parts.Arranger`."""
        return self._rest.corner(value) if self._rest is not None else None

    def arrange(
        self, stored: Mapping[str, SourceTensor], wanted: Mapping[str, WantedTensor] | None
    ) -> dict[str, Arranged | None]:
        """See :class:`..core.parts.Arranger`. What does not fit is left out, and so is what is as it is stored: what is
        wanted was chosen of all that is made, and is made likewise."""
        made = self.make(stored, str).tensors
        return {key: one for key in (made if wanted is None else wanted) if (one := made.get(key)) is not None}

    def idle(
        self, stored: Mapping[str, SourceTensor], wanted: Mapping[str, WantedTensor] | None
    ) -> list[IdleStatement]:
        """See :class:`..core.parts.Arranger`. What is not chosen of all that is made was not meant to be idle."""
        return self._rest.idle(stored, None) if self._rest is not None else []

    def make(self, stored: Mapping[str, SourceTensor], absent: Callable[[str], str]) -> AllMade:
        """All that the recipes make, and what they and the statements of the rest use nothing of.

        Args:
            stored: The stored tensors, by flat key.
            absent: Says what the checkpoint has at a flat key at which it has no tensor.
        """
        keys, problems, unlike = _wanted_keys(self._recipes, stored)
        matching = match_recipes(self._recipes, {key: key for key in keys}, {key: key for key in stored})
        made, misfits = _made(matching, stored, absent)
        used = set(matching.sources)
        others = {
            key: one
            for key, one in self._others(stored).items()
            if key not in matching.recipes and not (one is None and key in used)
        }
        sources: dict[str, Sequence[str]] = {key: matching.recipes[key].keys for key in misfits}
        unfit = dict[str, str]()
        for key, other in others.items():
            if other is not None and (text := _why_unfit(other, stored, absent)):
                unfit[key], sources[key] = text, [part.key for part in other.parts]
        tensors = {key: one for key, one in others.items() if key not in unfit} | made
        misfits = unlike | misfits
        lacking = {
            key: text
            for key, text in (misfits | unfit).items()
            if self._may_be_missing(key)
            and (key in unlike or any(one not in stored and absent(one).startswith(MISSING) for one in sources[key]))
        }
        unmade = [*misfits, *unfit]
        problems += [f"{key}: {text}" for key, text in misfits.items() if key not in lacking]
        unfit = {key: text for key, text in unfit.items() if key not in lacking}
        left = [f"{key}: {text}" for key, text in lacking.items()]
        return AllMade(tensors, used, problems, unfit, left, unmade)

    def _others(self, stored: Mapping[str, SourceTensor]) -> dict[str, Arranged | None]:
        """What is made without recipes, in the words of :class:`AllMade`."""
        if self._rest is None:
            return dict.fromkeys(stored)
        arranged = self._rest.arrange(stored, None)
        return {key: unless_itself(key, one, stored) for key, one in arranged.items() if one is not None}


def arranger_for(options: LoadOptions, rest: Arranger | None) -> RecipeArranger | None:
    """What the options, and ``rest`` of all other tensors, make of a checkpoint; None if they make nothing."""
    return (
        RecipeArranger(options.recipes or {}, rest, options.allow_missing)
        if options.recipes or rest is not None
        else None
    )


def unless_itself(key: str, arranged: Arranged, stored: Mapping[str, SourceTensor]) -> Arranged | None:
    """What is made for a key; None if it is the stored tensor of that key, as it is."""
    if key not in stored:
        return arranged
    shape = stored[key].shape
    itself = Part(key, whole(shape), tuple(range(len(shape))), whole(shape))
    return None if arranged.parts == [itself] else arranged


def _why_unfit(arranged: Arranged, stored: Mapping[str, SourceTensor], absent: Callable[[str], str]) -> str | None:
    """Why a tensor cannot be made of the parts that were found for it, if it cannot."""
    try:
        made = fitted_parts(arranged, None, _find_in(stored, absent))
        dtype = arranged.dtype_of(stored)
        reason = misfit(made, made.shape, dtype, False)
    except RecipeError as error:
        return str(error)
    return None if reason is None else f"{reason} (of {', '.join(dict.fromkeys(part.key for part in made.parts))})"


def _find_in(stored: Mapping[str, SourceTensor], absent: Callable[[str], str]) -> Callable[[str], SourceTensor]:
    def find(key: str) -> SourceTensor:
        if key not in stored:
            raise RecipeError(f"it is made of {key}, which in the checkpoint is {absent(key)}")
        return stored[key]

    return find


def _made(
    matching: Matching, stored: Mapping[str, SourceTensor], absent: Callable[[str], str]
) -> tuple[dict[str, Arranged | None], dict[str, str]]:
    """What the recipes of some keys make; and of the others why they do not fit."""
    maker = PartMaker(_find_in(stored, absent))
    made, misfits = dict[str, Arranged | None](), dict[str, str]()
    for key, recipe in matching.recipes.items():
        try:
            shape, dtype, parts, cast = maker.make(recipe)
            made[key] = unless_itself(key, Arranged(shape, parts, dtype.name, cast), stored)
        except RecipeError as error:
            misfits[key] = str(error)
    return made, misfits


def _wanted_keys(recipes: Mapping[str, Recipe], stored: Iterable[str]) -> tuple[list[str], list[str], dict[str, str]]:
    """The keys that recipes make tensors for, where nobody says which are wanted.

    A key without placeholders is one of them. For a key with placeholders they follow from the stored keys that match a
    key in the recipe: the placeholders stand for the same there.

    Returns:
        The keys; a line for each recipe for which they cannot be known; and by key what is said of one for which they
        are none.
    """
    found: dict[str, None] = {}
    problems, unlike = list[str](), dict[str, str]()
    stored = list(stored)
    for wanted, recipe in recipes.items():
        names = set(placeholders(wanted))
        if not names:
            found[wanted] = None
            continue
        telling = [key for key in stored_keys(recipe) if set(placeholders(key)) == names]
        if not telling:
            problems.append(
                f"{wanted}: no stored key of its recipe has all of its placeholders, so it is not known which tensors "
                "it makes where none are given"
            )
            continue
        keys = _filled(wanted, telling, stored)
        if not keys:
            unlike[wanted] = f"the checkpoint has no tensor like {' or '.join(telling)}, of which it is made"
        found.update(dict.fromkeys(keys))
    return list(found), problems, unlike


def _filled(wanted: str, telling: Sequence[str], stored: Sequence[str]) -> list[str]:
    patterns = [KeyPattern(key) for key in telling]
    matches = (pattern.match(key) for key in stored for pattern in patterns)
    return [filled(wanted, found) for found in matches if found is not None]
