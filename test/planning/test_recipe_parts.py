"""Recipes of expressions that are there several times, or are nested deeply."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import LoadOptions, Recipe, concat, split, stored
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.parts import SourceTensor
from paddle_dist_ckpt.planning import recipe_parts
from paddle_dist_ckpt.planning.recipe_parts import FilledRecipe, Made, PartMaker, RecipeError, make_parts
from paddle_dist_ckpt.recipes import stored_keys
from test.pace import slowness

SHAPE = (12, 4)
DEEP = 5000


def find(key: str) -> SourceTensor:
    return SourceTensor(SHAPE, DTYPES["float32"])


def exchanged(levels: int, key: str = "a") -> Recipe:
    """Halves are exchanged, so many times. As a tree it has ``2 ** levels`` leaves."""
    recipe = stored(key)
    for _ in range(levels):
        first, second = split(recipe, 2)
        recipe = concat(second, first)
    return recipe


def values_of(made: Made) -> np.ndarray:
    """What parts make of the numbers from 0."""
    source, result = np.arange(np.prod(SHAPE)).reshape(SHAPE), np.full(made.shape, -1)
    for part in made.parts:
        result[part.place.slices] = source[part.box.slices].transpose(part.axes)
    return result


@pytest.fixture
def quick() -> Any:
    """Fails what takes more than a second of this process, on the usual machine."""
    begin = time.process_time()
    yield
    assert time.process_time() - begin < slowness()


@pytest.mark.usefixtures("quick")
def test_what_is_there_several_times_is_looked_at_once() -> None:
    recipe = exchanged(99, "l.{i}")  # 198 operations within each other
    options = LoadOptions(recipes={"m.{i}": recipe})
    assert stored_keys(recipe) == ["l.{i}"]
    filled = options.recipes["m.{i}"].with_keys(lambda key: key.replace("{i}", "0"))  # type: ignore[index]
    assert stored_keys(filled) == ["l.0"]
    made = make_parts(filled, find)
    assert len(made.parts) == 2
    assert (values_of(made) == np.roll(values_of(make_parts(stored("a"), find)), 6, axis=0)).all()
    assert recipe == exchanged(99, "l.{i}")
    assert hash(recipe) == hash(exchanged(99, "l.{i}"))
    assert recipe not in (filled, exchanged(98, "l.{i}"), "l.{i}")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("write", [str, repr])
def test_its_text_has_an_end(write: Callable[[Recipe], str]) -> None:
    assert write(exchanged(2)) == (
        "concat(split({0}, 2, axis=0)[1], split({0}, 2, axis=0)[0], axis=0)".format(
            "concat(split(stored('a'), 2, axis=0)[1], split(stored('a'), 2, axis=0)[0], axis=0)"
        )
    )
    text = write(exchanged(30))
    assert text.startswith("concat(split(concat(")
    assert text.endswith("...")
    assert len(text) < 110_000


@pytest.mark.usefixtures("quick")
def test_as_deep_as_you_like() -> None:
    recipe, other = stored("a"), stored("a")
    for _ in range(DEEP):
        recipe, other = recipe.T, other.T
    assert recipe == other != other.T
    assert hash(recipe) == hash(other)
    assert str(recipe) == repr(recipe) == "stored('a')" + ".T" * DEEP
    assert recipe.with_keys(lambda key: "b") != recipe
    assert make_parts(recipe, find).shape == SHAPE
    with pytest.raises(ValueError, match="more than 200 operations within each other"):
        LoadOptions(recipes={"x": recipe})


def test_boxes_without_end_are_refused() -> None:
    recipe = stored("a")
    for _ in range(190):
        recipe = concat(recipe, recipe)
    LoadOptions(recipes={"x": recipe})
    with pytest.raises(RecipeError, match=r"^concat\(.*\.\.\.: more than 262,144 boxes"):
        make_parts(recipe, find)
    with pytest.raises(RecipeError, match="boxes"):
        make_parts(concat(*[concat(*[stored("a")] * 1000)] * 1000), find)
    assert len(make_parts(concat(*[stored("a")] * 20_000), find).parts) == 20_000


def test_what_a_window_leaves_is_all_that_counts() -> None:
    """Doubled and cut time and again it is one box still."""
    recipe = stored("a")
    for _ in range(90):
        recipe = concat(recipe, recipe)[:12]
    made = make_parts(recipe, find)
    assert len(made.parts) == 1
    assert (values_of(made) == np.arange(48).reshape(SHAPE)).all()


def test_recipes_that_are_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand experts have one recipe as it is written. What is found for one counts for those whose stored tensors
    have the same shapes and dtypes, each with its own keys; two keys of a recipe may be one in one of them."""
    looked_at = []
    make = recipe_parts.make_parts
    monkeypatch.setattr(recipe_parts, "make_parts", lambda recipe, find: looked_at.append(recipe) or make(recipe, find))
    tensors = {f"{kind}.{i}": SourceTensor(SHAPE, DTYPES["float32"]) for kind in "ab" for i in range(1000)}
    tensors["b.7"] = SourceTensor((6, 4), DTYPES["float32"])
    written = concat(stored("a.{i}"), stored("{other}")).T
    maker = PartMaker(tensors.__getitem__)
    others = {i: "a.0" if i == 0 else f"b.{i}" for i in range(1000)}
    made = {i: maker.make(FilledRecipe(written, (f"a.{i}", b))) for i, b in others.items()}
    assert [[part.key for part in one.parts] for one in made.values()] == [[f"a.{i}", b] for i, b in others.items()]
    assert len(looked_at) == 2
    for i, one in made.items():
        assert one == make(concat(stored(f"a.{i}"), stored(others[i])).T, tensors.__getitem__)
    assert made[7].shape == (4, 18)
    assert made[8].shape == (4, 24)


def test_what_does_not_fit_is_said_of_the_tensor_that_it_is() -> None:
    """Also of the second of two that are alike."""
    maker = PartMaker(find)
    for i in range(2):
        with pytest.raises(RecipeError, match=rf"^stored\('a\.{i}'\)\[13:\]: no such part"):
            maker.make(FilledRecipe(stored("a.{i}")[13:], (f"a.{i}",)))
