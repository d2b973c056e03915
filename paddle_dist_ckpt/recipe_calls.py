"""The functions by which users write recipes; see :mod:`.recipes`."""

from __future__ import annotations

from collections.abc import Sequence

from .arguments import checked_integer
from .recipes import Concat, Recipe, Source, SplitPart

__all__ = ["concat", "split", "stack", "stored"]


def stored(key: str) -> Recipe:
    """The tensor that the checkpoint has under a flat key, for a recipe.

    Args:
        key: The flat key. Where the recipe's wanted key has placeholders (``layers.{i}.weight``), it may have them too.

    Raises:
        TypeError: ``key`` is not a str.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import LoadOptions, load_state_dict, save_state_dict, stored
        >>> report = save_state_dict({"old": paddle.ones([2, 3])}, "checkpoint")
        >>> state = {"new": paddle.zeros([3, 2])}
        >>> options = LoadOptions(recipes={"new": stored("old").T})
        >>> report = load_state_dict(state, "checkpoint", options=options)
        >>> float(state["new"].sum())
        6.0
    """
    if not isinstance(key, str):
        raise TypeError(f"stored takes a flat key, not {key!r}")
    return Source(key)


def concat(*parts: Recipe | Sequence[Recipe], axis: int = 0) -> Recipe:
    """Expressions one behind the other along an axis, for a recipe. They are alike in shape but for it, and in dtype.

    A list or tuple of them may be passed as the only part. A negative axis counts from the last one.

    Raises:
        TypeError, ValueError: there is none, one is no expression, or ``axis`` is not an integer.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import LoadOptions, concat, load_state_dict, save_state_dict, stored
        >>> report = save_state_dict({"q": paddle.ones([2, 3]), "k": paddle.zeros([2, 3])}, "checkpoint")
        >>> state = {"qk": paddle.zeros([4, 3])}
        >>> options = LoadOptions(recipes={"qk": concat(stored("q"), stored("k"))})
        >>> report = load_state_dict(state, "checkpoint", options=options)
        >>> state["qk"].sum(axis=1).tolist()
        [3.0, 3.0, 0.0, 0.0]
    """
    given = _given(parts)
    if not given:
        raise ValueError("concat needs a part")
    return Concat(given, checked_integer("axis", axis))


def stack(*parts: Recipe | Sequence[Recipe], axis: int = 0) -> Recipe:
    """Expressions one behind the other along a new axis, for a recipe. They are alike in shape and in dtype.

    A list or tuple of them may be passed as the only part. A negative axis counts from the result's last one.

    Raises:
        TypeError, ValueError: there is none, one is no expression, or ``axis`` is not an integer.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import LoadOptions, load_state_dict, save_state_dict, stack, stored
        >>> report = save_state_dict({f"experts.{i}": paddle.full([2, 3], i) for i in range(4)}, "checkpoint")
        >>> state = {"experts": paddle.zeros([4, 2, 3])}
        >>> options = LoadOptions(recipes={"experts": stack(*(stored(f"experts.{i}") for i in range(4)))})
        >>> report = load_state_dict(state, "checkpoint", options=options)
        >>> state["experts"][:, 0, 0].tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    return concat(*(part.unsqueeze(axis) for part in _given(parts)), axis=axis)


def split(recipe: Recipe, count: int, axis: int = 0) -> tuple[Recipe, ...]:
    """An expression cut into ``count`` equal parts along an axis, for recipes. A negative axis counts from the last.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import LoadOptions, load_state_dict, save_state_dict, split, stored
        >>> report = save_state_dict({"qk": paddle.ones([4, 3])}, "checkpoint")
        >>> state = {"q": paddle.zeros([2, 3]), "k": paddle.zeros([2, 3])}
        >>> q, k = split(stored("qk"), 2)
        >>> report = load_state_dict(state, "checkpoint", options=LoadOptions(recipes={"q": q, "k": k}))
        >>> float(state["k"].sum())
        6.0
    """
    _recipe(recipe)
    parts, axis = checked_integer("count", count), checked_integer("axis", axis)
    if parts < 1:
        raise ValueError(f"split into {parts} parts")
    return tuple(SplitPart(recipe, parts, axis, i) for i in range(parts))


def _given(parts: Sequence[Recipe | Sequence[Recipe]]) -> tuple[Recipe, ...]:
    """Expressions that were passed one by one, or as one list or tuple."""
    alone = parts[0] if len(parts) == 1 else None
    return tuple(map(_recipe, alone if isinstance(alone, (list, tuple)) else parts))


def _recipe(value: object) -> Recipe:
    if not isinstance(value, Recipe):
        raise TypeError(f"not a recipe: {value!r}; stored(key) is one")
    return value
