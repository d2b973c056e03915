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

from .arguments import as_integer, checked_integer

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
    "distinct_text",
    "dtype_name",
    "filled",
    "fold",
    "placeholders",
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
        order = tuple(checked_integer("an axis", axis) for axis in given)
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
        return Squeezed(self, checked_integer("axis", axis))

    def unsqueeze(self, axis: int) -> Recipe:
        """The same with one more axis, of one element, which becomes the result's axis of this number. A negative one
        counts from the result's last.

        Raises:
            TypeError: ``axis`` is not an integer.
        """
        return Unsqueezed(self, checked_integer("axis", axis))

    def __getitem__(self, index: _Index | tuple[_Index, ...]) -> Recipe:
        """A part of it, by a slice without a step for each of the first dimensions, and, behind ``...``, of the last.

        An integer in the place of a slice is one element along that axis, which the result does not have.

        Raises:
            TypeError: something else than a slice or an integer, or several ``...``.
        """
        items = index if isinstance(index, tuple) else (index,)
        first = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
        found: Recipe = Sliced(self, tuple(map(_bounds, items[:first])), tuple(map(_bounds, items[first + 1 :])))
        single = [i if i < first else i - len(items) for i, item in enumerate(items) if as_integer(item) is not None]
        # From the last to the first, as each axis that goes renumbers those that are counted past it.
        for axis in [*sorted(i for i in single if i < 0), *sorted((i for i in single if i >= 0), reverse=True)]:
            found = found.squeeze(axis)
        return found


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Source(Recipe):
    """A stored tensor, by its flat key, or by a pattern of it."""

    key: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Operation(Recipe):
    """Something done to one expression."""

    of: Recipe


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Permuted(Operation):
    """An expression with its axes in another order; None is the reverse one."""

    axes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sliced(Operation):
    """A part of an expression: for each of the first dimensions, and of the last, where it starts and stops, None for
    its ends."""

    bounds: tuple[tuple[int | None, int | None], ...]
    last: tuple[tuple[int | None, int | None], ...] = ()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Squeezed(Operation):
    """An expression without an axis, along which it has one element."""

    axis: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Unsqueezed(Operation):
    """An expression with one more axis, of one element."""

    axis: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Concat(Recipe):
    """Expressions one behind the other along an axis."""

    parts: tuple[Recipe, ...]
    axis: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SplitPart(Operation):
    """One of several equal parts into which an expression is cut along an axis."""

    count: int
    axis: int
    number: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cast(Operation):
    """An expression in another element type."""

    dtype: str


def dtype_name(dtype: Any) -> Any:
    """The name of one of Paddle's dtypes (``paddle.bfloat16``); anything else as it is. Does not need paddle."""
    text = "" if isinstance(dtype, str) else str(dtype)
    return text.removeprefix("paddle.") if text.startswith("paddle.") else dtype


def stored_keys(recipe: Recipe) -> list[str]:
    """The keys of all stored tensors in an expression, each once.

    Raises:
        ValueError: it nests too many operations.
    """
    if isinstance(recipe, Source):  # as very many may be
        return [recipe.key]
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
        missing = [inner for inner in reversed(_inner(one)) if id(inner) not in made]
        if missing:
            due += missing
            continue
        due.pop()
        if id(one) not in made:
            made[id(one)] = visit(one, [made[id(inner)] for inner in _inner(one)])
    return made[id(recipe)]


def _inner(one: Recipe) -> tuple[Recipe, ...]:
    """The expressions that one is made of."""
    if isinstance(one, Concat):
        return one.parts
    return (one.of,) if isinstance(one, Operation) else ()


def _written(one: Recipe, inner: Sequence[str]) -> str:
    """How one is written, given how the expressions are that it is made of."""
    match one:
        case Source(key):
            return f"stored({key!r})"
        case Concat(_, axis):
            return f"concat({', '.join(inner)}, axis={axis})"
        case Permuted(_, axes):
            return f"{inner[0]}.T" if axes is None else f"{inner[0]}.permute({', '.join(map(str, axes))})"
        case Squeezed(_, axis):
            return f"{inner[0]}.squeeze({axis})"
        case Unsqueezed(_, axis):
            return f"{inner[0]}.unsqueeze({axis})"
        case SplitPart(_, count, axis, number):
            return f"split({inner[0]}, {count}, axis={axis})[{number}]"
        case Cast(_, dtype):
            return f"{inner[0]}.cast({dtype!r})"
        case Sliced(_, bounds, last):
            first, behind = (
                [f"{'' if a is None else a}:{'' if b is None else b}" for a, b in some] for some in (bounds, last)
            )
            return f"{inner[0]}[{', '.join([*first, *['...'] * bool(behind or not first), *behind])}]"
    raise AssertionError("there are no others")


def text_of(recipe: Recipe, most: int) -> str:
    """How an expression is written, cut after so many characters."""

    def write(one: Recipe, inner: Sequence[str]) -> str:
        text = _written(one, inner)
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
        level = list({id(inner): inner for node in level for inner in _inner(node)}.values())
        if not level:
            return
    raise ValueError(f"a recipe has more than {_MOST_NESTED} operations within each other; concat takes many parts")


def _bounds(item: _Index) -> tuple[int | None, int | None]:
    at = as_integer(item)
    if at is not None:
        return at, at + 1 or None  # the last one ends where its axis does
    if not isinstance(item, slice) or item.step not in (None, 1):
        raise TypeError(f"a recipe is indexed by slices without a step, integers, and one ... at most, not by {item!r}")
    try:
        start, stop = (None if end is None else operator.index(end) for end in (item.start, item.stop))
    except TypeError:
        raise TypeError(f"a recipe is indexed by slices of integers, not by {item!r}") from None
    return start, stop
