"""The content of one zip of ``torch.save``: tensors, by where their data lie, and plain values around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..core.dtypes import DTYPES, DType
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..tree.paths import ListIndex, Part, TupleIndex
from ..tree.values import is_tagged
from .budget import Budget
from .checks import check_shape, shown
from .numpy_pickles import PickledArray
from .orders import LyingArray, dense_axes
from .pickle_machine import ENDURED, Latin1, Lying, Refused
from .pickles import walk
from .torch_pickles import SAVED, SavedBuffer, SavedTensor, TorchDType, storage_of
from .torch_zip import TorchZip, ZipMember

__all__ = ["PlacedTensor", "SavedLeaf", "SavedReader", "torch_dtype"]

_MOST_DEPTH = 64
_SMALL = (type(None), bool, int, float, str)
_MOST_ALIKE = 1 << 10  # bytes of a pickle that may be like others
_MOST_KNOWN = 1000  # pickles
_CHEAP = 4  # characters of a text that are counted as one step
_STEPS, _STEPS_OF_CONTAINER = 4, 24


class PlacedTensor(NamedTuple):
    """A tensor, and the member that its data are in."""

    array: LyingArray
    member: ZipMember


class SavedLeaf(NamedTuple):
    """A tensor or a plain value of what was saved, and where in it."""

    path: tuple[Part, ...]
    content: Any


def torch_dtype(dtype: TorchDType, where: str) -> DType:
    """The element type of this name.

    Raises:
        UnsupportedValueError: there is none.
    """
    known = DTYPES.get(dtype.name)
    if known is None:
        raise UnsupportedValueError(f"{where} has the dtype {shown(dtype.name)}, which cannot be held")
    return known


class SavedReader:
    """Reads what many zips hold: makes plain values of their pickles, and finds where tensors' data lie."""

    def __init__(self, budget: Budget) -> None:
        self._known: dict[bytes, SavedTensor] = {}  # pickles of tensors, which are alike where tensors are
        self._budget = budget

    def leaves(self, zip_file: TorchZip, key: str, above: int = 0) -> list[SavedLeaf]:
        """What was saved: a tensor, a value, or those of a dict, and of a list or a tuple that has tensors in it.

        Args:
            zip_file: Where it is.
            key: What it is called in messages.
            above: How much the path above it adds to the cost of each leaf.

        Raises:
            CheckpointCorruptedError: the pickle, or where it says that tensors lie, is damaged.
            UnsupportedValueError: it holds what is not read, or tensors with gaps between their elements.
        """
        pickle = zip_file.member("data.pkl")
        zip_file.verify(pickle)
        where = f"{zip_file.file.name}: {shown(key)}"
        saved = self._walked(zip_file, pickle, key)
        try:
            return _PlainValue(zip_file, where, self._budget, above).leaves(saved)
        except Refused as error:
            raise UnsupportedValueError(f"{where} {error}") from error
        except ENDURED as error:
            raise CheckpointCorruptedError(f"{where} is damaged: {str(error)[:200]}") from error

    def _walked(self, zip_file: TorchZip, pickle: ZipMember, key: str) -> Any:
        text = zip_file.content(pickle) if pickle.nbytes <= _MOST_ALIKE else b""
        if text in self._known:
            return self._known[text]
        try:
            window = zip_file.file.window(pickle.position, pickle.position + pickle.nbytes)
            saved = walk(window, SAVED, storage_of)
        except UnsupportedValueError as error:
            raise UnsupportedValueError(f"{shown(key)}: {error}") from error
        if text and type(saved) is SavedTensor and len(self._known) < _MOST_KNOWN:
            self._known[text] = saved
        return saved


class _PlainValue:
    """Makes a plain value of what a walk has found."""

    def __init__(self, zip_file: TorchZip, where: str, budget: Budget, above: int) -> None:
        self._zip, self._where, self._budget, self._above = zip_file, where, budget, above
        self._divided: set[int] = set()  # the ids of those copies that have tensors in them

    def leaves(self, saved: Any) -> list[SavedLeaf]:
        copy = self._copied(saved, 0)  # kept until the end, so that its parts' ids are theirs alone
        return list(self._leaves_of(copy, ()))

    def _leaves_of(self, copy: Any, path: tuple[Part, ...]) -> Iterator[SavedLeaf]:
        if type(copy) is dict and copy and all(type(key) in (str, int) for key in copy):
            for key, item in copy.items():
                yield from self._leaves_of(item, (*path, key))
        elif id(copy) not in self._divided:
            text = sum([len(part) for part in path if type(part) is str])
            self._budget.spend(self._above + _STEPS * len(path) + text // _CHEAP, self._where)
            yield SavedLeaf(path, copy)
        elif type(copy) is dict:
            raise Refused("has tensors in a dict with a key that is neither str nor int")
        else:
            place = ListIndex if type(copy) is list else TupleIndex
            for i, item in enumerate(copy):
                yield from self._leaves_of(item, (*path, place(i)))

    def _copied(self, value: Any, depth: int) -> Any:
        """A copy that shares nothing, so that what refers to one thing often is found out."""
        kind = type(value)
        text = len(value) if kind is str else value.bit_length() // 4 if kind is int else 0
        is_small = kind in _SMALL and not is_tagged(value)
        self._budget.spend((_STEPS if is_small else _STEPS_OF_CONTAINER) + text // _CHEAP, self._where)
        if kind in _SMALL:
            return value
        if kind is Latin1:
            return str(value)
        if kind is SavedTensor:
            return self._placed(value)
        if kind is Lying or kind is SavedBuffer:
            return self._bytes(value if kind is Lying else value.content)
        if depth >= _MOST_DEPTH:
            raise Refused(f"is nested deeper than {_MOST_DEPTH} levels")
        copy: Any
        if kind is list or kind is tuple:
            copy = parts = [self._copied(item, depth + 1) for item in value]
            copy = parts if kind is list else tuple(parts)
        elif kind is dict:
            copy = {self._copied(key, depth + 1): self._copied(item, depth + 1) for key, item in value.items()}
            parts = list(copy.values())
        else:
            name = {TorchDType: "torch.dtype", PickledArray: "numpy array"}.get(kind, kind.__name__.lstrip("_"))
            raise Refused(f"holds a {name}, which is not read")
        if any(type(part) is PlacedTensor or id(part) in self._divided for part in parts):
            self._divided.add(id(copy))
        return copy

    def _bytes(self, lying: Lying) -> bytes | str:
        self._budget.spend(lying.nbytes // _CHEAP, self._where)
        data = lying.data if lying.data is not None else self._zip.file.read(lying.position, lying.nbytes)
        if lying.form == "bytes" or lying.data is not None:
            return data
        text = data.decode("utf-8", "surrogatepass")
        return text if lying.form == "text" else text.encode("latin1")

    def _placed(self, tensor: SavedTensor) -> PlacedTensor:
        """Where a tensor lies, checked."""
        if tensor.marks:
            raise Refused(f"is stored to be changed when it is loaded ({shown(', '.join(tensor.marks))})")
        dtype = torch_dtype(tensor.dtype, self._where)
        stored = torch_dtype(tensor.storage_dtype, self._where).itemsize if tensor.storage_dtype else 1
        nbytes = check_shape(tensor.shape, dtype.itemsize, self._where)
        member = self._zip.member(f"data/{tensor.key}")
        begin = tensor.offset * dtype.itemsize
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
        end = begin + (last + 1) * dtype.itemsize  # of an expanded tensor, fewer bytes than it has elements for
        if member.nbytes != tensor.storage_size * stored or (nbytes and end > member.nbytes):
            raise ValueError(
                f"a tensor from {begin} to {end}, in a storage of {tensor.storage_size} elements that has "
                f"{member.nbytes} bytes"
            )
        position, axes = member.position + (begin if nbytes else 0), None
        if nbytes:
            axes = dense_axes(tensor.shape, tensor.stride)
            if axes is None:
                raise Refused(
                    f"is stored with gaps, or expanded (shape {list(tensor.shape)}, strides {list(tensor.stride)}), "
                    "which is not read"
                )
            several = [axis for axis in axes if tensor.shape[axis] > 1]
            axes = axes if several != sorted(several) else None
        return PlacedTensor(LyingArray(dtype, tensor.shape, position, axes), member)
