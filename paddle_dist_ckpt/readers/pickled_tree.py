"""The leaves of a state_dict that was pickled as a whole: arrays with their paths, and everything else as values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..tree.paths import ListIndex, Part, TupleIndex
from ..tree.values import is_tagged
from .assembly import text_of
from .numpy_pickles import PickledArray
from .pickle_machine import Latin1, Lying
from .window import WindowedFile

__all__ = ["PickledLeaf", "leaves"]

_MOST_DEPTH = 64
_MOST_BEYOND = 16 << 20  # of what was skipped, if a file has less on the disk: it may be compressed there
_CHEAP = 4  # characters of texts and paths that are counted as one step
_STEPS, _STEPS_OF_CONTAINER = 4, 24
_PLAIN = (type(None), bool, int, float, complex, str)


class PickledLeaf(NamedTuple):
    """An entry of a state_dict: an array, with its variable's name where that is known, or a plain value."""

    path: tuple[Part, ...]
    value: PickledArray | Any
    name: str | None


def leaves(tree: dict[Any, Any], file: WindowedFile) -> Iterator[PickledLeaf]:
    """The leaves of what :func:`.walk` has read from a file.

    Dicts with str and int keys are taken apart, and lists and tuples that hold an array somewhere. Arrays with their
    names, as `paddle.save` writes tensors, are arrays. Everything else is a value.

    Raises:
        CheckpointCorruptedError: it refers to the same parts more often than its size has room for.
        UnsupportedValueError: it is nested too deeply, contains itself, or has what is no plain value.
    """
    return _Tree(file).below((), tree)


class _Tree:
    """Takes one tree apart. Parts of a pickle may be shared, so what is looked at is counted."""

    def __init__(self, file: WindowedFile) -> None:
        self._file = file
        self._unread = min(file.size, max(file.on_disk, _MOST_BEYOND))  # bytes of what was skipped
        self._has_array: dict[int, bool] = {}

    def below(self, path: tuple[Part, ...], value: Any) -> Iterator[PickledLeaf]:
        """The leaves at a path and below it."""
        self._count_entry(path)
        array, name = _tensor(value)
        if array is not None:
            yield PickledLeaf(path, array, name)
        elif type(value) is dict and (value or not path) and all(type(key) in (str, int) for key in value):
            for key, part in value.items():
                if type(part) is PickledArray:  # a step down for each would take longer than all else
                    self._count_entry((*path, key))
                    yield PickledLeaf((*path, key), part, None)
                else:
                    yield from self.below((*path, key), part)
        elif not path:
            raise UnsupportedValueError(f"{self._file.name} is a dict with a key that is neither str nor int")
        elif self._holds_array(path, value, len(path)):
            if type(value) is dict:
                raise UnsupportedValueError(f"{self._where(path)} has a key above an array that is neither str nor int")
            index = ListIndex if type(value) is list else TupleIndex
            for at, part in enumerate(value):
                yield from self.below((*path, index(at)), part)
        else:
            yield PickledLeaf(path, self._plain(path, value, len(path)), None)

    def _holds_array(self, path: tuple[Part, ...], value: Any, depth: int) -> bool:
        """Whether there is an array in a container. Each container is looked at once."""
        if _tensor(value)[0] is not None:
            return True
        if type(value) not in (list, tuple, dict):
            return False
        if id(value) not in self._has_array:
            self._check_depth(path, depth)
            self._count(path, _STEPS_OF_CONTAINER + _STEPS * len(value))
            self._has_array[id(value)] = False
            parts = value.values() if type(value) is dict else value
            self._has_array[id(value)] = any(self._holds_array(path, part, depth + 1) for part in parts)
        return self._has_array[id(value)]

    def _plain(self, path: tuple[Part, ...], value: Any, depth: int) -> Any:
        kind = type(value)
        text = len(value) if kind in (str, Latin1) else value.bit_length() // 4 if kind is int else 0
        is_small = kind in _PLAIN and not is_tagged(value)
        self._count(path, (_STEPS if is_small else _STEPS_OF_CONTAINER) + text // _CHEAP)
        if kind in _PLAIN:
            return value
        if kind is Latin1:
            return str(value)
        if kind is Lying:
            return self._read(path, value)
        self._check_depth(path, depth)
        if kind in (list, tuple):
            return kind(self._plain(path, part, depth + 1) for part in value)
        if kind is dict:
            return {
                self._plain(path, key, depth + 1): self._plain(path, part, depth + 1) for key, part in value.items()
            }
        raise UnsupportedValueError(f"{self._where(path)} is no plain value, but {kind.__name__}")

    def _read(self, path: tuple[Part, ...], lying: Lying) -> bytes | str:
        if lying.data is not None:
            self._count(path, lying.nbytes // _CHEAP)
            return lying.data
        self._unread -= lying.nbytes
        if self._unread < 0:
            raise CheckpointCorruptedError(f"{self._where(path)} and what is before it are larger than the file")
        data = self._file.read_large(lying.position, lying.nbytes)
        try:
            if lying.form == "text":
                return data.decode("utf-8", "surrogatepass")
            return data.decode("utf-8").encode("latin1") if lying.form == "encoded" else bytes(data)
        except UnicodeError as error:
            raise CheckpointCorruptedError(f"{self._where(path)} is no text: {error}") from error

    def _count_entry(self, path: tuple[Part, ...]) -> None:
        self._count(path, _STEPS * (1 + len(path)) + sum([len(part) for part in path if type(part) is str]) // _CHEAP)

    def _count(self, path: tuple[Part, ...], amount: int) -> None:
        self._file.budget.spend(amount, self._file.name)
        self._check_depth(path, len(path))

    def _check_depth(self, path: tuple[Part, ...], depth: int) -> None:
        if depth > _MOST_DEPTH:
            raise UnsupportedValueError(
                f"{self._where(path)} is nested more than {_MOST_DEPTH} levels deep, or contains itself"
            )

    def _where(self, path: tuple[Part, ...]) -> str:
        return f"{self._file.name}: {text_of(path)}"


def _tensor(value: Any) -> tuple[PickledArray | None, str | None]:
    """The array that a part of the tree is, and the name that it was pickled with."""
    if type(value) is tuple and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], PickledArray):
        return value[1], str(value[0])
    return (value, None) if isinstance(value, PickledArray) else (None, None)
