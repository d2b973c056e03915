"""The leaves of what was pickled as a whole: tensors with their paths, and everything else as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..tree.paths import ListIndex, Part, TupleIndex
from ..tree.values import is_tagged
from .checks import AtPath
from .numpy_pickles import PickledArray
from .pickled_values import Latin1, Lying
from .torch_pickles import SavedBuffer, SavedTensor, TorchDType
from .window import WindowedFile

__all__ = ["PickledLeaf", "leaves"]

_MOST_DEPTH = 64
_CHEAP = 4  # characters of texts and paths that are counted as one step
_STEPS, _STEPS_OF_CONTAINER = 4, 24
_PLAIN = (type(None), bool, int, float, complex, str)
_CALLED: dict[type, str] = {PickledArray: "numpy array", TorchDType: "torch.dtype"}  # what messages call objects


class PickledLeaf(NamedTuple):
    """An entry of a state_dict: a tensor, with its variable's name where that is known, or a plain value."""

    path: tuple[Part, ...]
    value: Any
    name: str | None = None


def leaves(
    tree: Any, file: WindowedFile, tensors: type[PickledArray | SavedTensor], path: tuple[Part, ...] = ()
) -> Iterator[PickledLeaf]:
    """The leaves of what :func:`.walk` has read from a file.

    Dicts with str and int keys are taken apart, and lists and tuples that hold a tensor somewhere. Arrays with their
    names, as `paddle.save` writes tensors, are tensors. Everything else is a value.

    Args:
        tree: What has been read.
        file: The file.
        tensors: What tensors are in it.
        path: Where it is in the state_dict.

    Raises:
        CheckpointCorruptedError: it refers to the same parts more often than its size has room for.
        UnsupportedValueError: it is nested too deeply, contains itself, or has what is no plain value.
    """
    return _Tree(file, tensors).below(path, tree)


class _Tree:
    """Takes one tree apart. Parts of a pickle may be shared, so what is looked at is counted."""

    def __init__(self, file: WindowedFile, tensors: type) -> None:
        self._file, self._tensors = file, tensors
        self._has_tensor: dict[int, bool] = {}

    def below(self, path: tuple[Part, ...], value: Any) -> Iterator[PickledLeaf]:
        """The leaves at a path and below it."""
        self._count_entry(path)
        tensor, name = self._tensor(value)
        if tensor is not None:
            yield PickledLeaf(path, tensor, name)
        elif type(value) is dict and value and all(type(key) in (str, int) for key in value):
            for key, part in value.items():
                if type(part) is self._tensors:  # a step down for each would take longer than all else
                    self._count_entry((*path, key))
                    yield PickledLeaf((*path, key), part)
                else:
                    yield from self.below((*path, key), part)
        elif self._holds_tensor(path, value, len(path)):
            if type(value) is dict:
                raise UnsupportedValueError(f"{self._where(path)} has a key above an array that is neither str nor int")
            index = ListIndex if type(value) is list else TupleIndex
            for at, part in enumerate(value):
                yield from self.below((*path, index(at)), part)
        else:
            yield PickledLeaf(path, self._plain(path, value, len(path)))

    def _tensor(self, value: Any) -> tuple[Any, str | None]:
        """The tensor that a part of the tree is, and the name that it was pickled with."""
        if type(value) is self._tensors:
            return value, None
        if type(value) is tuple and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is PickledArray:
            return (value[1], str(value[0])) if self._tensors is PickledArray else (None, None)
        return None, None

    def _holds_tensor(self, path: tuple[Part, ...], value: Any, depth: int) -> bool:
        """Whether there is a tensor in a container. Each container is looked at once."""
        if self._tensor(value)[0] is not None:
            return True
        if type(value) not in (list, tuple, dict):
            return False
        if id(value) not in self._has_tensor:
            self._check_depth(path, depth)
            parts = [part for part in (value.values() if type(value) is dict else value) if type(part) not in _PLAIN]
            self._count(path, _STEPS_OF_CONTAINER + len(value) + _STEPS * len(parts))
            self._has_tensor[id(value)] = False
            self._has_tensor[id(value)] = any(self._holds_tensor(path, part, depth + 1) for part in parts)
        return self._has_tensor[id(value)]

    def _plain(self, path: tuple[Part, ...], value: Any, depth: int) -> Any:
        kind = type(value)
        text = len(value) if kind in (str, Latin1) else value.bit_length() // 4 if kind is int else 0
        is_small = kind in _PLAIN and not is_tagged(value)
        self._count(path, (_STEPS if is_small else _STEPS_OF_CONTAINER) + text // _CHEAP)
        if kind in _PLAIN:
            return value
        if kind is Latin1:
            return str(value)
        if kind is Lying or kind is SavedBuffer:
            return self._read(path, value if kind is Lying else value.content)
        self._check_depth(path, depth)
        if kind in (list, tuple):
            return kind(self._plain(path, part, depth + 1) for part in value)
        if kind is dict:
            return {
                self._plain(path, key, depth + 1): self._plain(path, part, depth + 1) for key, part in value.items()
            }
        called = _CALLED.get(kind, kind.__name__.lstrip("_"))
        raise UnsupportedValueError(f"{self._where(path)} holds a {called}, which is not read")

    def _read(self, path: tuple[Part, ...], lying: Lying) -> bytes | str:
        if lying.data is not None:
            self._count(path, lying.nbytes // _CHEAP)
            return lying.data
        self._file.budget.take_bytes(lying.nbytes, self._where(path))
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

    def _where(self, path: tuple[Part, ...]) -> AtPath:
        return AtPath(self._file.name, path)
