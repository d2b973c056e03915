"""Writes pickles whose arrays are streamed in later: the opcodes as bytes, and tensors between them.

Only what Paddle's own files have: plain values, numpy arrays, instances of classes that are named and not imported.
"""

from __future__ import annotations

import pickle  # noqa: TID251 (for its opcodes; nothing is read)
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.dtypes import DType
from ..errors import UnsupportedValueError
from .plan import ExportTensor

__all__ = ["Instance", "pickled"]

# Element types that Paddle makes of numpy arrays; bfloat16, which numpy does not have, it keeps as uint16.
_CODES = {
    "bool": "b1",
    "uint8": "u1",
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "float16": "f2",
    "bfloat16": "u2",
    "float32": "f4",
    "float64": "f8",
    "complex64": "c8",
    "complex128": "c16",
}
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of a class of somebody else's. It may be the key of a dict.

    Attributes:
        module: The class's module.
        name: Its name.
        state: What becomes the object's ``__dict__``.
    """

    module: str
    name: str
    state: Mapping[str, Any]


def pickled(value: Any) -> list[bytes | ExportTensor]:
    """A pickle of protocol 4, as what a file is made of.

    Args:
        value: Dicts, lists, tuples, instances, plain values, those of numpy too, and tensors, which become numpy
            arrays.

    Raises:
        UnsupportedValueError: there is something else, or a tensor of a type for which Paddle has no numpy array.
    """
    writer = _Writer()
    writer.write(value)
    return writer.finished()


def _inner(value: Any) -> bytes:
    """A pickle without what begins and ends it. Of protocol 3, for protocol 4 has frames."""
    return pickle.dumps(value, 3)[2:-1]


class _Writer:
    """Puts opcodes together. It remembers nothing of what it has written, so equal parts are repeated."""

    def __init__(self) -> None:
        self._parts: list[bytes | ExportTensor] = []
        self._text = bytearray(pickle.PROTO + b"\x04")

    def finished(self) -> list[bytes | ExportTensor]:
        """All of it."""
        self._text += pickle.STOP
        return [*self._parts, bytes(self._text)]

    def write(self, value: Any) -> None:
        """Write one object."""
        if isinstance(value, ExportTensor):
            self._write_array(value)
        elif isinstance(value, Instance):
            self._write_global(value.module, value.name)
            self._text += pickle.EMPTY_TUPLE + pickle.NEWOBJ
            self.write(dict(value.state))
            self._text += pickle.BUILD
        elif type(value) is dict:
            self._text += pickle.EMPTY_DICT + pickle.MARK
            for key, item in value.items():
                self.write(key)
                self.write(item)
            self._text += pickle.SETITEMS
        elif type(value) is list:
            self._text += pickle.EMPTY_LIST
            self._write_items(value, pickle.APPENDS)
        elif type(value) is tuple:
            self._write_items(value, pickle.TUPLE)
        elif isinstance(value, _PLAIN):
            self._text += _inner(value)
        elif isinstance(value, (np.generic, np.ndarray)):
            # Older versions of numpy have no numpy._core, and newer ones know the old name.
            self._text += _inner(value).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n", 1)
        else:
            raise UnsupportedValueError(f"a {type(value).__name__} cannot be exported to a pickle")

    def _write_items(self, items: Sequence[Any], end: bytes) -> None:
        self._text += pickle.MARK
        for item in items:
            self.write(item)
        self._text += end

    def _write_global(self, module: str, name: str) -> None:
        self._text += pickle.GLOBAL + f"{module}\n{name}\n".encode()

    def _write_array(self, tensor: ExportTensor) -> None:
        """As numpy pickles an array: an empty one is made, and given its shape, dtype, order (C) and bytes."""
        self._write_global("numpy.core.multiarray", "_reconstruct")
        self._text += pickle.MARK
        self._write_global("numpy", "ndarray")
        self.write((0,))
        self.write(b"b")
        self._text += pickle.TUPLE + pickle.REDUCE + pickle.MARK
        self.write(1)
        self.write(tensor.shape)
        self._write_dtype(tensor.dtype, tensor.key)
        self._text += pickle.NEWFALSE + pickle.BINBYTES8 + tensor.nbytes.to_bytes(8, "little")
        self._parts += [bytes(self._text), tensor]
        self._text = bytearray(pickle.TUPLE + pickle.BUILD)

    def _write_dtype(self, dtype: DType, key: str) -> None:
        if dtype.name not in _CODES:
            raise UnsupportedValueError(f"{key}: Paddle's files cannot hold the element type {dtype.name}")
        order = "<" if dtype.itemsize > 1 else "|"
        self._write_global("numpy", "dtype")
        self.write((_CODES[dtype.name], False, True))
        self._text += pickle.REDUCE
        self.write((3, order, None, None, None, -1, -1, 0))
        self._text += pickle.BUILD
