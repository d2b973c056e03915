"""The content of one zip of ``torch.save``: tensors, by where their data lie, and plain values around them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.dtypes import DTYPES, DType
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from ..tree.paths import Part
from .checks import AtPath, check_shape, shown, text_of
from .orders import LyingArray, dense_axes
from .pickled_tree import PickledLeaf, leaves
from .pickles import walk
from .torch_pickles import SAVED, SavedTensor, TorchDType, storage_of
from .torch_zip import TorchZip, ZipMember

__all__ = ["PlacedTensor", "SavedReader", "torch_dtype"]

_MOST_ALIKE = 1 << 10  # bytes of a pickle that may be like others
_MOST_KNOWN = 1000  # pickles
_STEPS_OF_TENSOR = 24


class PlacedTensor(NamedTuple):
    """A tensor, and the member that its data are in."""

    array: LyingArray
    member: ZipMember


def torch_dtype(dtype: TorchDType, where: object) -> DType:
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

    def __init__(self) -> None:
        self._known: dict[bytes, SavedTensor] = {}  # pickles of tensors, which are alike where tensors are

    def leaves(self, zip_file: TorchZip, path: tuple[Part, ...]) -> list[PickledLeaf]:
        """What was saved: a tensor, a value, or those of a dict, and of a list or a tuple that has tensors in it.

        Args:
            zip_file: Where it is.
            path: Where it belongs in the state_dict.

        Returns:
            The leaves, of which tensors are :class:`PlacedTensor`.

        Raises:
            CheckpointCorruptedError: the pickle, or where it says that tensors lie, is damaged.
            UnsupportedValueError: it holds what is not read, or tensors with gaps between their elements.
        """
        pickle, file = zip_file.member("data.pkl"), zip_file.file
        zip_file.verify(pickle)
        found = list(leaves(self._walked(zip_file, pickle, path), file, SavedTensor, path))
        for i, leaf in enumerate(found):
            if type(leaf.value) is SavedTensor:
                file.budget.spend(_STEPS_OF_TENSOR, file.name)
                found[i] = leaf._replace(value=_placed(AtPath(file.name, leaf.path), leaf.value, zip_file))
        return found

    def _walked(self, zip_file: TorchZip, pickle: ZipMember, path: tuple[Part, ...]) -> Any:
        text = zip_file.content(pickle) if pickle.nbytes <= _MOST_ALIKE else b""
        if text in self._known:
            return self._known[text]
        try:
            window = zip_file.file.window(pickle.position, pickle.position + pickle.nbytes)
            saved = walk(window, SAVED, storage_of)
        except UnsupportedValueError as error:
            raise UnsupportedValueError(f"{text_of(path)}: {error}") from error
        if text and type(saved) is SavedTensor and len(self._known) < _MOST_KNOWN:
            self._known[text] = saved
        return saved


def _placed(where: AtPath, tensor: SavedTensor, zip_file: TorchZip) -> PlacedTensor:
    """Where a tensor lies, checked."""
    if tensor.marks:
        marks = shown(", ".join(tensor.marks))
        raise UnsupportedValueError(f"{where} is stored to be changed when it is loaded ({marks})")
    dtype = torch_dtype(tensor.dtype, where)
    stored = torch_dtype(tensor.storage_dtype, where).itemsize if tensor.storage_dtype else 1
    nbytes = check_shape(tensor.shape, dtype.itemsize, where)
    member = zip_file.member(f"data/{tensor.key}")
    begin = tensor.offset * dtype.itemsize
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    end = begin + (last + 1) * dtype.itemsize  # of an expanded tensor, fewer bytes than it has elements for
    if member.nbytes != tensor.storage_size * stored or (nbytes and end > member.nbytes):
        raise CheckpointCorruptedError(
            f"{where} is damaged: a tensor from {begin} to {end}, in a storage of {tensor.storage_size} elements that "
            f"has {member.nbytes} bytes"
        )
    if not nbytes:
        return PlacedTensor(LyingArray(dtype, tensor.shape, member.position), member)
    axes = dense_axes(tensor.shape, tensor.stride)
    if axes is None:
        raise UnsupportedValueError(
            f"{where} is stored with gaps, or expanded (shape {list(tensor.shape)}, strides {list(tensor.stride)}), "
            "which is not read"
        )
    several = [axis for axis in axes if tensor.shape[axis] > 1]
    in_order = several == sorted(several)
    return PlacedTensor(LyingArray(dtype, tensor.shape, member.position + begin, None if in_order else axes), member)
