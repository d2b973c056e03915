"""Host memory by its address: arrays that look at it, and copies from and to it.

A state_dict may have a hundred thousand tensors. To keep an array object for each would cost more than to copy them, so
the engine keeps addresses in columns and makes arrays only where it needs one.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .box import cut_flat_range
from .columns import places_of_equals

__all__ = [
    "Bytes1D",
    "address_of",
    "array_at",
    "bytes_at",
    "copy_bytes",
    "copy_each",
    "copy_various",
    "fresh_pages",
    "gather",
    "zeros_of",
]

Bytes1D = npt.NDArray[np.uint8]
"""A row of bytes."""
_HUGE_PAGE = 2 << 20
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", -1)
# MADV_WIPEONFORK. With MADV_DONTFORK a child would have a hole there, use it for something else, and lose that when it
# drops the mapping.
_EMPTY_IN_CHILDREN = 18 if sys.platform == "linux" else -1
_TINY = 4096  # up to it, numpy's copy to a place between costs less than a call of its own for each would
_MANY = 32  # fewer are copied sooner by a call of its own for each
_SMALL = 64 << 10  # below it, to let other threads run meanwhile costs more than the copy


def _memmove(library: ctypes.CDLL) -> Any:
    function = library.memmove
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return function


_copy_small = _memmove(ctypes.PyDLL(None))
_copy_large = _memmove(ctypes.CDLL(None))


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy from one address to another. Both must be valid for ``nbytes``: nothing here can check it."""
    if nbytes < _SMALL:
        _copy_small(target, source, nbytes)
    else:
        _copy_large(target, source, nbytes)


def copy_each(targets: npt.NDArray[np.int64], sources: npt.NDArray[np.int64], nbytes: int) -> None:
    """Copy as many bytes from each of some addresses to one of others; see :func:`copy_bytes`. No two may overlap.

    Of small ones numpy copies many in the time of one call for each: to it they are items of an array that has one at
    every byte of memory, and of which nothing but these is looked at.
    """
    if not nbytes or not len(targets):
        return
    if nbytes > _TINY:
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            copy_bytes(target, source, nbytes)
        return
    _everywhere(targets, nbytes)[targets - targets.min()] = _everywhere(sources, nbytes)[sources - sources.min()]


def copy_various(targets: npt.NDArray[np.int64], sources: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> None:
    """Copy from addresses to others as :func:`copy_each` does, each its own number of bytes."""
    for some in places_of_equals(sizes):
        if len(some) >= _MANY:
            copy_each(targets[some], sources[some], int(sizes[some[0]]))
            continue
        for row in zip(targets[some].tolist(), sources[some].tolist(), sizes[some].tolist(), strict=True):
            copy_bytes(*row)


def _everywhere(addresses: npt.NDArray[np.int64], nbytes: int) -> npt.NDArray[Any]:
    low = int(addresses.min())
    return array_at(low, (int(addresses.max()) - low + 1,), (1,), np.dtype((np.void, nbytes)), None)


class _Memory:
    """Memory as numpy wants to hear of it; keeps its owner alive as long as an array looks at it."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface
        self._owner = owner


def array_at(
    address: int, shape: Sequence[int], strides: Sequence[int] | None, raw: np.dtype[np.generic], owner: Any
) -> npt.NDArray[Any]:
    """An array that looks at memory from an address on, and holds on to the owner, which keeps that memory alive.

    Its strides are in bytes; None means that it is contiguous.
    """
    if 0 in shape:
        return np.empty(shape, raw)
    interface: dict[str, Any] = {"version": 3, "typestr": raw.str, "shape": tuple(shape), "data": (address, False)}
    if strides is not None:
        interface["strides"] = tuple(strides)
    return np.asarray(_Memory(owner, interface))


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory as bytes. It must outlive the array, which keeps nothing alive."""
    return np.frombuffer(memoryview((ctypes.c_char * nbytes).from_address(address)), np.uint8)


def address_of(array: npt.NDArray[Any]) -> int:
    """Where an array's first element is. An array that is asked for its buffer keeps some 100 bytes for that."""
    return int(array.__array_interface__["data"][0])


def fresh_pages(size: int, inherited: bool = True) -> npt.NDArray[np.uint8]:
    """Fresh pages, huge ones if the size is worth it: the first copy into small ones costs three times as much.

    Args:
        size: How many bytes.
        inherited: Whether processes that are forked from this one see what is in the memory. For as long as they live,
            the first write to each page of such memory makes a copy of the page.

    Raises:
        MemoryError: there is not so much.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    length = max(size, 1) if size < _HUGE_PAGE else -(-size // _HUGE_PAGE) * _HUGE_PAGE
    try:
        memory = mmap.mmap(-1, length, private)
    except OSError as error:
        raise MemoryError(f"{length:,} bytes of memory cannot be had: {error}") from error
    advice = [_HUGE_PAGES] if size >= _HUGE_PAGE else []
    for number in [*advice, *([] if inherited else [_EMPTY_IN_CHILDREN])]:
        with suppress(OSError, ValueError, AttributeError):  # a kernel, or a platform, without it
            memory.madvise(number)
    return np.frombuffer(memory, np.uint8)


def zeros_of(shape: Sequence[int], raw: np.dtype[np.generic], what: str) -> npt.NDArray[Any]:
    """An array of zeros, whose pages are there when they are first written to.

    Raises:
        CheckpointError: there is no room for ``what``.
    """
    try:
        return np.zeros(shape, raw)
    except (MemoryError, ValueError) as error:
        raise CheckpointError(f"{what}: no memory for it: {error}") from error


def gather(array: npt.NDArray[Any], start: int, stop: int, buffer: Bytes1D) -> None:
    """Copy bytes ``start:stop`` (of whole items) of an array into the beginning of a buffer."""
    size, at = array.itemsize, 0
    for box in cut_flat_range(array.shape, start // size, stop // size):
        nbytes = box.size * size
        buffer[at : at + nbytes].view(array.dtype).reshape(box.shape)[...] = array[box.slices]
        at += nbytes
