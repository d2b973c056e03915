"""What a wanted tensor is made of: expressions of stored tensors, for ``LoadOptions(recipes=...)``.

An expression is a value that says what is meant. Nothing is read or computed when it is written; a load finds out which
boxes of which stored tensors it stands for, and reads these alone.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from types import EllipsisType
from typing import Any, TypeVar

__all__ = [
    "Cast",
    "Concat",
    "Permuted",
    "Recipe",
    "Sliced",
    "Source",
    "SplitPart",
    "Squeezed",
    "Unsqueezed",
    "concat",
    "distinct_text",
    "dtype_name",
    "filled",
    "fold",
    "placeholders",
    "split",
    "stack",
    "stored",
    "stored_keys",
    "text_of",
    "texts_and_placeholders",
]

T = TypeVar("T")
_Index = slice | int | EllipsisType

_MOST_NESTED = 200  # operations within each other; each costs the stack of Python some frames
_LONGEST = 100_000  # text of an expression; parts that are there again and again can make it as long as you like
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Recipe:
    """An expression of stored tensors. :func:`stored`, :func:`concat` and :func:`split` make them.

    Expressions may be parts of several others, or of one several times. All that is done to one is done to each of its
    parts once (see :func:`fold`).
    """

    __slots__ = ()
    __iter__ = None  # for without it, Python would take elements for ever

    @property
    def inner(self) -> tuple[Recipe, ...]:
        """The expressions that this one is made of."""
        raise NotImplementedError

    def text(self, inner: Sequence[str]) -> str:
        """How it is written, given how the expressions are that it is made of."""
        raise NotImplementedError

    def with_keys(self, change: Callable[[str], str]) -> Recipe:
        """The same of other stored tensors, whose keys a function gives."""

        def changed(one: Recipe, inner: Sequence[Recipe]) -> Recipe:
            if isinstance(one, Source):
                return Source(change(one.key))
            if isinstance(one, Concat):
                return Concat(tuple(inner), one.axis)
            assert isinstance(one, Operation), "there are no others"
            return replace(one, of=inner[0])

        return fold(self, changed)

    def __str__(self) -> str:
        return text_of(self, _LONGEST)

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Recipe):
            return NotImplemented
        numbers: dict[Any, int] = {}  # of all expressions that are not equal
        mine, theirs = (
            fold(each, lambda one, inner: numbers.setdefault((*_fields(one), *inner), len(numbers)))
            for each in (self, other)
        )
        return mine == theirs

    def __hash__(self) -> int:
        return fold(self, lambda one, inner: hash((*_fields(one), *inner)))

    @property
    def T(self) -> Recipe:  # noqa: N802  (as numpy and Paddle have it)
        """The same with its axes in reverse order."""
        return Permuted(self, None)

    def permute(self, *axes: int | Sequence[int]) -> Recipe:
        """The same with its axes in another order: dimension ``d`` of the result is dimension ``axes[d]`` of this.

        Negative ones count from the last axis. A list or tuple of them may be passed as the only argument.

        Raises:
            TypeError, ValueError: these are not all numbers of axes, each once.
        """
        given = axes[0] if len(axes) == 1 and isinstance(axes[0], (list, tuple)) else axes
        order = tuple(_integer("an axis", axis) for axis in given)
        counted = tuple(axis + len(order) if axis < 0 else axis for axis in order)
        if sorted(counted) != list(range(len(order))):
            raise ValueError(f"permute{order}: each axis is due once, from 0 to {len(order) - 1}")
        return Permuted(self, counted)

    def cast(self, dtype: Any) -> Recipe:
        """The same in another element type, such as ``"bfloat16"`` or ``paddle.bfloat16``; rounded to the nearest
        value, ties to even.

        Raises:
            TypeError: ``dtype`` is neither a str nor one of Paddle's dtypes.
        """
        name = dtype_name(dtype)
        if not isinstance(name, str):
            raise TypeError(f"cast takes a dtype or the name of one, not {dtype!r}")
        return Cast(self, name)

    def squeeze(self, axis: int) -> Recipe:
        """The same without an axis, along which it has one element. A negative one counts from the last.

        Raises:
            TypeError: ``axis`` is not an integer.
        """
        return Squeezed(self, _integer("axis", axis))

    def unsqueeze(self, axis: int) -> Recipe:
        """The same with one more axis, of one element, which becomes the result's axis of this number. A negative one
        counts from the result's last.

        Raises:
            TypeError: ``axis`` is not an integer.
        """
        return Unsqueezed(self, _integer("axis", axis))

    def __getitem__(self, index: _Index | tuple[_Index, ...]) -> Recipe:
        """A part of it, by a slice without a step for each of the first dimensions, and, behind ``...``, of the last.

        An integer in the place of a slice is one element along that axis, which the result does not have.

        Raises:
            TypeError: something else than a slice or an integer, or several ``...``.
        """
        items = index if isinstance(index, tuple) else (index,)
        first = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
        found: Recipe = Sliced(self, tuple(map(_bounds, items[:first])), tuple(map(_bounds, items[first + 1 :])))
        single = [i if i < first else i - len(items) for i, item in enumerate(items) if _is_integer(item)]
        # From the last to the first, as each axis that goes renumbers those that are counted past it.
        for axis in [*sorted(i for i in single if i < 0), *sorted((i for i in single if i >= 0), reverse=True)]:
            found = found.squeeze(axis)
        return found


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Source(Recipe):
    """A stored tensor, by its flat key, or by a pattern of it."""

    key: str

    @property
    def inner(self) -> tuple[Recipe, ...]:
        """See :class:`Recipe`."""
        return ()

    def text(self, inner: Sequence[str]) -> str:
        """See :class:`Recipe`."""
        return f"stored({self.key!r})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Operation(Recipe):
    """Something done to one expression."""

    of: Recipe

    @property
    def inner(self) -> tuple[Recipe, ...]:
        """See :class:`Recipe`."""
        return (self.of,)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Permuted(Operation):
    """An expression with its axes in another order; None is the reverse one."""

    axes: tuple[int, ...] | None

    def text(self, inner: Sequence[str]) -> str:
        """See :class:`Recipe`."""
        return f"{inner[0]}.T" if self.axes is None else f"{inner[0]}.permute({', '.join(map(str, self.axes))})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sliced(Operation):
    """A part of an expression: for each of the first dimensions, and of the last, where it starts and stops, None for
    its ends."""

    bounds: tuple[tuple[int | None, int | None], ...]
    last: tuple[tuple[int | None, int | None], ...] = ()

    def text(self, inner: Sequence[str]) -> str:
        """See :class:`Recipe`."""
        first, last = (
            [f"{'' if a is None else a}:{'' if b is None else b}" for a, b in bounds]
            for bounds in (self.bounds, self.last)
        )
        return f"{inner[0]}[{', '.join([*first, *['...'] * bool(last or not first), *last])}]"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Squeezed(Operation):
    """An expression without an axis, along which it has one element."""

    axis: int

    def text(self, inner: Sequence[str]) -> str:
        """See :class:`Recipe`."""
        return f"{inner[0]}.squeeze({self.axis})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Unsqueezed(Operation):
    """An expression with one more axis, of one element."""

    axis: int

    def text(self, inner: Sequence[str]) -> str:
        """See :class:`Recipe`."""
        return f"{inner[0]}.unsqueeze({self.axis})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Concat(Recipe):
    """Expressions one behind the other along an axis."""

    parts: tuple[Recipe, ...]
    axis: int

    @property
    def inner(self) -> tuple[Recipe, ...]:
        """See :class:`Recipe`."""
        return self.parts

    def text(self, inner: Sequence[str]) -> str:
        """See :class:`Recipe`."""
        return f"concat({', '.join(inner)}, axis={self.axis})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SplitPart(Operation):
    """One of several equal parts into which an expression is cut along an axis."""

    count: int
    axis: int
    number: int

    def text(self, inner: Sequence[str]) -> str:
        """See :class:`Recipe`."""
        return f"split({inner[0]}, {self.count}, axis={self.axis})[{self.number}]"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cast(Operation):
    """An expression in another element type."""

    dtype: str

    def text(self, inner: Sequence[str]) -> str:
        """See :class:`Recipe`."""
        return f"{inner[0]}.cast({self.dtype!r})"


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
    if len(parts) == 1 and isinstance(parts[0], (list, tuple)):
        parts = tuple(parts[0])
    if not parts:
        raise ValueError("concat needs a part")
    return Concat(tuple(map(_recipe, parts)), _integer("axis", axis))


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
    if len(parts) == 1 and isinstance(parts[0], (list, tuple)):
        parts = tuple(parts[0])
    return concat(*(_recipe(part).unsqueeze(axis) for part in parts), axis=axis)


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
    parts, axis = _integer("count", count), _integer("axis", axis)
    if parts < 1:
        raise ValueError(f"split into {parts} parts")
    return tuple(SplitPart(recipe, parts, axis, i) for i in range(parts))


def dtype_name(dtype: Any) -> Any:
    """The name of one of Paddle's dtypes (``paddle.bfloat16``); anything else as it is. Does not need paddle."""
    text = "" if isinstance(dtype, str) else str(dtype)
    return text.removeprefix("paddle.") if text.startswith("paddle.") else dtype


def stored_keys(recipe: Recipe) -> list[str]:
    """The keys of all stored tensors in an expression, each once.

    Raises:
        ValueError: it nests too many operations.
    """
    return list(dict.fromkeys(node.key for node in _nodes(recipe) if isinstance(node, Source)))


def placeholders(key: str) -> list[str]:
    """The names of the placeholders in a key, in their order, each once."""
    return list(dict.fromkeys(_PLACEHOLDER.findall(key)))


def texts_and_placeholders(key: str) -> list[str]:
    """The texts of a key and the names of its placeholders in turn, beginning and ending with a text."""
    return _PLACEHOLDER.split(key)


def filled(key: str, found: dict[str, str]) -> str:
    """A key with these texts in the place of its placeholders."""
    return _PLACEHOLDER.sub(lambda match: found[match[1]], key)


def fold(recipe: Recipe, visit: Callable[[Recipe, Sequence[T]], T]) -> T:
    """What a function makes of an expression, given what it has made of those that this one is made of.

    It is called once for each, however many others that one is a part of. Nested as deep as you like.
    """
    made: dict[int, T] = {}
    due = [recipe]
    while due:
        one = due[-1]
        missing = [inner for inner in reversed(one.inner) if id(inner) not in made]
        if missing:
            due += missing
            continue
        due.pop()
        if id(one) not in made:
            made[id(one)] = visit(one, [made[id(inner)] for inner in one.inner])
    return made[id(recipe)]


def text_of(recipe: Recipe, most: int) -> str:
    """How an expression is written, cut after so many characters."""

    def write(one: Recipe, inner: Sequence[str]) -> str:
        text = one.text(inner)
        return text if len(text) <= most else text[:most] + "..."

    return fold(recipe, write)


def distinct_text(recipe: Recipe, most: int) -> str:
    """How an expression is written; a long one is cut after so many characters, and has a digest of all of it behind.
    No two expressions have the same text."""
    text = text_of(recipe, most)
    if len(text) <= most:
        return text

    def digest(one: Recipe, inner: Sequence[bytes]) -> bytes:
        return hashlib.sha256(b"".join([*inner, repr(_fields(one)).encode("utf-8", "surrogatepass")])).digest()

    return f"{text} (SHA-256 {fold(recipe, digest).hex()})"


def _fields(one: Recipe) -> tuple[Any, ...]:
    """What an expression is, but for those that it is made of."""
    assert isinstance(one, Source | Operation | Concat), "there are no others"
    names = (field.name for field in fields(one) if field.name not in ("of", "parts"))
    return (type(one).__name__, *(getattr(one, name) for name in names))


def _nodes(recipe: Recipe) -> Iterator[Recipe]:
    """All expressions in one, itself too, level by level; on each level once."""
    level: list[Recipe] = [recipe]
    for _ in range(_MOST_NESTED):
        yield from level
        level = list({id(inner): inner for node in level for inner in node.inner}.values())
        if not level:
            return
    raise ValueError(f"a recipe has more than {_MOST_NESTED} operations within each other; concat takes many parts")


def _recipe(value: object) -> Recipe:
    if not isinstance(value, Recipe):
        raise TypeError(f"not a recipe: {value!r}; stored(key) is one")
    return value


def _integer(name: str, value: object) -> int:
    """An integer of whatever type."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, not {value!r}")


def _is_integer(value: object) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")


def _bounds(item: _Index) -> tuple[int | None, int | None]:
    if _is_integer(item):
        at = operator.index(item)  # type: ignore[arg-type]
        return at, at + 1 or None  # the last one ends where its axis does
    if not isinstance(item, slice) or item.step not in (None, 1):
        raise TypeError(f"a recipe is indexed by slices without a step, integers, and one ... at most, not by {item!r}")
    try:
        start, stop = (None if end is None else operator.index(end) for end in (item.start, item.stop))
    except TypeError:
        raise TypeError(f"a recipe is indexed by slices of integers, not by {item!r}") from None
    return start, stop
