"""What every reader checks before it believes it: names of files, shapes, and boxes that must not overlap."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..core.box import Box
from ..core.boxes import Boxes
from ..core.columns import IntArray
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..planning.cover import covers_exactly
from ..tree.paths import Part

__all__ = ["AtPath", "check_name", "check_shape", "counts_of", "first_overlap", "is_text", "shown", "text_of"]

_MOST_DIMENSIONS = 32
_MOST_COUNTS = 64
_MOST = 1 << 62
_MOST_ELEMENTS = 1 << 58
_MOST_SHOWN = 200  # characters of a name in a message
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxlong = 3, 33, 33, _MOST_SHOWN
_FEW = 16  # boxes that are compared pair by pair
_STEPS_OF_CUT, _ELEMENTS_OF_STEP = 60, 12
_FEW_DIMENSIONS = 4  # for which that suffices
_STEPS_OF_HALVES, _STEPS_OF_COVER = 40, 1000  # for each dimension more


def shown(name: object) -> str:
    """Something out of a file as a message shows it, however long, deep or full of repetitions it is."""
    text = repr(name[:_MOST_SHOWN]) if isinstance(name, str) else _SHORT.repr(name)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def is_text(text: str) -> bool:
    """Whether it is text through and through, without halves of surrogate pairs, so that it can be stored and sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_name(name: object, names: Collection[str], where: object) -> str:
    """A file's name as another file gives it; ``where`` says which, as text or by what becomes text.

    Raises:
        CheckpointCorruptedError: it is no plain name, or not in the folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise CheckpointCorruptedError(f"{where} names {shown(name)}, which is no name of a file beside it")
    if name not in names:
        raise CheckpointCorruptedError(f"{where} names {shown(name)}, which is missing")
    return name


def text_of(path: Iterable[Part]) -> str:
    """A path for messages."""
    return shown(".".join(part[:_MOST_SHOWN] if isinstance(part, str) else _number(part) for part in path))


def _number(part: Part) -> str:
    return str(part if type(part) is int else part[0])  # type: ignore[index]


class AtPath(NamedTuple):
    """What messages begin with: which file speaks of which path. Made for every tensor, and seldom shown."""

    file: str
    path: tuple[Part, ...]

    def __str__(self) -> str:
        return f"{self.file}: {text_of(self.path)}"


def counts_of(value: object, most: int = _MOST_COUNTS) -> tuple[int, ...]:
    """The sizes, offsets or the like that something out of a pickle should be a list or a tuple of.

    Raises:
        TypeError: it is none, or one of more than ``most``.
    """
    if type(value) not in (tuple, list) or len(value) > most:  # type: ignore[arg-type]
        raise TypeError(f"no list of at most {most} sizes")
    for n in value:  # type: ignore[attr-defined]
        if type(n) is not int or not 0 <= n <= _MOST:
            raise TypeError("a list of something else than sizes")
    return tuple(value)  # type: ignore[arg-type]


def check_shape(shape: Sequence[int], itemsize: int, where: object) -> int:
    """How many bytes a tensor of this shape has; ``where`` says which it is, as text or by what becomes text.

    Raises:
        UnsupportedValueError: it has more dimensions or elements than an array can have.
    """
    if len(shape) > _MOST_DIMENSIONS:
        raise UnsupportedValueError(f"{where} has {len(shape)} dimensions; {_MOST_DIMENSIONS} are possible")
    if math.prod(shape if 0 not in shape else [size or 1 for size in shape]) >= _MOST_ELEMENTS:
        raise UnsupportedValueError(f"{where} is larger than any array: {shown(list(shape))}")
    return math.prod(shape) * itemsize


def first_overlap(boxes: Sequence[Box], spend: Callable[[int], object] = lambda steps: None) -> tuple[Box, Box] | None:
    """Two of these boxes, all different and of as many dimensions, that have an element in common; None if none have.

    Boxes that make up one box have none. If they do not, space is halved again and again along the dimension that
    separates best, a box going to each half that it reaches into, until few are left. The first two that are found end
    it, so only disjoint boxes with gaps between them are looked at to the end.

    Args:
        boxes: The boxes.
        spend: Called with the steps that this takes, of a fifth of a microsecond; what it raises is raised.
    """
    if len(boxes) <= _FEW:
        for i, box in enumerate(boxes):
            for other in boxes[:i]:
                if not _apart(box, other):
                    return other, box
        return None
    columns = Boxes.of(boxes, len(boxes[0].offset))
    filled = np.flatnonzero(columns.filled)
    columns, boxes = columns.take(filled), [boxes[row] for row in filled.tolist()]
    low, high = columns.offset, columns.high
    more = max(0, low.shape[1] - _FEW_DIMENSIONS)
    spend(_STEPS_OF_COVER * more)
    if len(boxes) and _make_up_one(columns):
        return None
    stack = [np.arange(len(boxes))]
    while stack:
        rows = stack.pop()
        spend(_STEPS_OF_CUT + rows.size * low.shape[1] // _ELEMENTS_OF_STEP)
        halves = None
        if len(rows) > _FEW:
            spend(_STEPS_OF_HALVES * more)
            halves = _halves(low[rows], high[rows])
        if halves is not None:
            stack += [rows[halves[0]], rows[halves[1]]]
            continue
        for n, row in enumerate(rows.tolist()):
            before = rows[:n]
            spend(_STEPS_OF_CUT + before.size * low.shape[1] // _ELEMENTS_OF_STEP)
            common = ((low[before] < high[row]) & (low[row] < high[before])).all(axis=1)
            if common.any():
                return boxes[int(before[common.argmax()])], boxes[row]
    return None


def _make_up_one(boxes: Boxes) -> bool:
    """Whether boxes, none of them empty, make up one box exactly: that in which they all lie."""
    first = boxes.offset.min(axis=0)
    region = Boxes.of([Box(tuple(first.tolist()), tuple((boxes.high.max(axis=0) - first).tolist()))], boxes.dimensions)
    return bool(covers_exactly(np.zeros(len(boxes), np.int64), boxes, region)[0])


def _apart(box: Box, other: Box) -> bool:
    """Whether two boxes of as many dimensions have no element in common."""
    for start, length, begin, extent in zip(*box, *other, strict=True):
        if start + length <= begin or begin + extent <= start or not length or not extent:
            return True
    return False


def _halves(low: IntArray, high: IntArray) -> tuple[IntArray, IntArray] | None:
    """The rows on each side of the cut that leaves the fewest in the fuller half; None if none separates any."""
    best, fewest = None, len(low)
    for d in range(low.shape[1]):
        at = np.partition(low[:, d], len(low) // 2)[len(low) // 2]
        left, right = low[:, d] < at, high[:, d] > at
        most = max(int(left.sum()), int(right.sum()))
        if most < fewest and left.any():
            best, fewest = (np.flatnonzero(left), np.flatnonzero(right)), most
    return best
