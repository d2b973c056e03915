"""Writes pickles whose arrays are streamed in later: the opcodes as bytes, and tensors between them.

Only what Paddle's own files have: plain values, numpy arrays, instances of classes that are named and not imported.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 (for its opcodes; nothing is read)
import struct
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import DType
from ..errors import UnsupportedValueError
from .plan import ExportTensor

__all__ = ["Instance", "Pairs", "Template", "pickled"]

# Element types of numpy's arrays, as Paddle keeps them; bfloat16, which numpy does not have, it keeps as uint16.
_CODES = {
    "bool": "b1",
    "uint8": "u1",
    "int8": "i1",
    "uint16": "u2",
    "int16": "i2",
    "uint32": "u4",
    "int32": "i4",
    "uint64": "u8",
    "int64": "i8",
    "float16": "f2",
    "bfloat16": "u2",
    "float32": "f4",
    "float64": "f8",
    "complex64": "c8",
    "complex128": "c16",
}
_PLAIN = (int, float, complex, str, bytes)
_TUPLES = {0: pickle.EMPTY_TUPLE, 1: pickle.TUPLE1, 2: pickle.TUPLE2, 3: pickle.TUPLE3}
_OF_EMPTY = (np.ndarray, (0,), b"b")  # what numpy has an empty array made of
_MOST_SHORT = 255  # of what is counted in one byte
_MOST_TEXT = 1 << 20  # bytes of opcodes in a part, about
_MOST_ALIKE = 1 << 12  # of what is often the same; of shapes that are all different it would take many times as much
_MOST_PLACES = 1 << 16  # of the memo: of texts that are all different it would take many times as much as these


class Template(NamedTuple):
    """What is the same in many places of a file: it is made, and its opcodes are put together, only once or twice.

    Attributes:
        mark: Tells it from whatever else the file has of this kind.
        make: Makes it, of plain values and instances.
    """

    mark: bytes
    make: Callable[[], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of a class of somebody else's. It may be the key of a dict.

    Attributes:
        module: The class's module.
        name: Its name.
        state: What becomes the object's ``__dict__``,
        common: and, behind it, a dict of what many objects have in common.
    """

    module: str
    name: str
    state: Mapping[str, Any]
    common: Template | None = None


class Pairs(NamedTuple):
    """A dict whose keys and values are made when they are written, and not kept.

    Attributes:
        items: Each key, of which there are no equal ones, with its value.
    """

    items: Iterable[tuple[Any, Any]]


def pickled(value: Any) -> list[bytes | ExportTensor]:
    """A pickle of protocol 4, as what a file is made of.

    Args:
        value: Dicts, lists, tuples, instances, plain values, those of numpy too, templates, and tensors, which
            become numpy arrays.

    Raises:
        UnsupportedValueError: there is something else, or a tensor of a type for which Paddle has no numpy array.
    """
    writer = _Writer()
    writer.write(value)
    return writer.finished()


def _inner(value: Any) -> bytes:
    """A pickle without what begins and ends it. Of protocol 3, for protocol 4 has frames."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 3)
    pickler.fast = True  # so that it has no memo, whose places would be those of the whole
    pickler.dump(value)
    return file.getvalue()[2:-1]


class _Writer:
    """Puts opcodes together. Texts, shapes, names of classes and element types are written once, and then taken from
    the memo of whoever reads them, as far as that has places."""

    def __init__(self) -> None:
        self._parts: list[bytes | ExportTensor] = []
        self._text = bytearray(pickle.PROTO + b"\x04")
        # What takes something from the memo: texts, shapes, modules with names, element types.
        self._codes: dict[Hashable, bytes] = {}
        self._alike: dict[bytes, bytes] = {}  # the opcodes of what is often the same, by its mark

    def finished(self) -> list[bytes | ExportTensor]:
        """All of it."""
        self._text += pickle.STOP
        self._cut()
        return self._parts

    def _cut(self) -> None:
        """Make a part of the text that has been written."""
        self._parts.append(bytes(self._text))
        self._text.clear()

    def write(self, value: Any) -> None:
        """Write one object."""
        write = _WRITERS.get(type(value))
        if write is not None:
            write(self, value)
        elif isinstance(value, (np.generic, np.ndarray)):
            # Older versions of numpy have no numpy._core, and newer ones know the old name.
            self._text += _inner(value).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n", 1)
        elif isinstance(value, _PLAIN):
            self._text += _inner(value)
        else:
            raise UnsupportedValueError(f"a {type(value).__name__} cannot be exported to a pickle")

    def _write_none(self, _: None) -> None:
        self._text += pickle.NONE

    def _write_bool(self, value: bool) -> None:
        self._text += pickle.NEWTRUE if value else pickle.NEWFALSE

    def _write_float(self, value: float) -> None:
        self._text += pickle.BINFLOAT + struct.pack(">d", value)

    def _write_list(self, items: list[Any]) -> None:
        self._text += pickle.EMPTY_LIST + pickle.MARK
        for item in items:
            self.write(item)
        self._text += pickle.APPENDS

    def _write_dict(self, items: Mapping[Any, Any]) -> None:
        self._write_pairs(Pairs(items.items()))

    def _write_pairs(self, pairs: Pairs) -> None:
        self._text += pickle.EMPTY_DICT + pickle.MARK
        for pair in pairs.items:
            self._write_items([pair])
            if len(self._text) > _MOST_TEXT:
                self._cut()
        self._text += pickle.SETITEMS

    def _write_items(self, items: Iterable[tuple[Any, Any]]) -> None:
        for key, item in items:
            self.write(key)
            self.write(item)

    def _write_instance(self, value: Instance) -> None:
        self._write_global(value.module, value.name)
        self._text += pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
        self._write_items(value.state.items())
        if value.common is not None:
            mark, make = value.common
            self._repeat(mark, lambda: self._write_items(make().items()))
        self._text += pickle.SETITEMS + pickle.BUILD

    def _write_template(self, value: Template) -> None:
        mark, make = value
        self._repeat(mark, lambda: self.write(make()))

    def _repeat(self, mark: bytes, write: Callable[[], None]) -> None:
        """Write what is the same wherever it has this mark: by the opcodes of the last time, if these took all they
        could from the memo."""
        if (code := self._alike.get(mark)) is not None:
            self._text += code
            return
        start, before = len(self._text), (len(self._codes), len(self._parts))
        write()
        if (len(self._codes), len(self._parts)) == before and len(self._alike) < _MOST_ALIKE:
            self._alike[mark] = bytes(self._text[start:])

    def _is_recalled(self, what: Hashable) -> bool:
        """Take something from the memo, if it has been written before."""
        code = self._codes.get(what)
        if code is None:
            return False
        self._text += code
        return True

    def _remember(self, what: Hashable) -> None:
        """Put what has just been written into the memo, if there is a place."""
        place = len(self._codes)
        if place < _MOST_PLACES:
            self._text += pickle.MEMOIZE
            short = place <= _MOST_SHORT
            code = (pickle.BINGET if short else pickle.LONG_BINGET) + place.to_bytes(1 if short else 4, "little")
            self._codes[what] = code

    def _write_text(self, text: str) -> None:
        if (code := self._codes.get(text)) is not None:  # as in _is_recalled, but faster: of texts there are most
            self._text += code
            return
        data = text.encode("utf-8", "surrogatepass")
        short = len(data) <= _MOST_SHORT
        self._text += pickle.SHORT_BINUNICODE if short else pickle.BINUNICODE8
        self._text += len(data).to_bytes(1 if short else 8, "little") + data
        self._remember(text)

    def _write_int(self, value: int) -> None:
        if 0 <= value <= _MOST_SHORT:
            self._text += pickle.BININT1 + value.to_bytes(1, "little")
        elif value.bit_length() < 32:
            self._text += pickle.BININT + value.to_bytes(4, "little", signed=True)
        else:
            self._text += _inner(value)

    def _write_tuple(self, items: tuple[Any, ...]) -> None:
        is_shape = {int}.issuperset(map(type, items))
        # By a text, see hash_of; as bytes, for texts are remembered themselves.
        shape = str(items).encode() if is_shape else b""
        if is_shape and self._is_recalled(shape):
            return
        end = _TUPLES.get(len(items), pickle.TUPLE)
        if end == pickle.TUPLE:
            self._text += pickle.MARK
        for item in items:
            self.write(item)
        self._text += end
        if is_shape:
            self._remember(shape)

    def _write_global(self, module: str, name: str) -> None:
        if not self._is_recalled((module, name)):
            self._text += pickle.GLOBAL + f"{module}\n{name}\n".encode()
            self._remember((module, name))

    def _write_array(self, tensor: ExportTensor) -> None:
        mark = f"array {tensor.dtype.name} {tensor.shape}".encode()
        self._repeat(mark, lambda: self._write_head(tensor))
        self._cut()
        self._parts.append(tensor)
        self._text += pickle.TUPLE + pickle.BUILD

    def _write_head(self, tensor: ExportTensor) -> None:
        """As numpy pickles an array: an empty one is made, and given its shape, dtype, order (C) and bytes."""
        self._write_global("numpy.core.multiarray", "_reconstruct")
        if not self._is_recalled(_OF_EMPTY):
            self._text += _inner(_OF_EMPTY)
            self._remember(_OF_EMPTY)
        self._text += pickle.REDUCE + pickle.MARK
        self.write(1)
        self.write(tensor.shape)
        self._write_dtype(tensor.dtype, tensor.key)
        self._text += pickle.NEWFALSE + pickle.BINBYTES8 + tensor.nbytes.to_bytes(8, "little")

    def _write_dtype(self, dtype: DType, key: str) -> None:
        if dtype.name not in _CODES:
            raise UnsupportedValueError(f"{key}: Paddle's files cannot hold the element type {dtype.name}")
        if not self._is_recalled(dtype):
            self._write_global("numpy", "dtype")
            self.write((_CODES[dtype.name], False, True))
            self._text += pickle.REDUCE
            self.write((3, "<" if dtype.itemsize > 1 else "|", None, None, None, -1, -1, 0))
            self._text += pickle.BUILD
            self._remember(dtype)


_WRITERS: Mapping[type, Callable[[_Writer, Any], None]] = {
    str: _Writer._write_text,
    int: _Writer._write_int,
    bool: _Writer._write_bool,
    float: _Writer._write_float,
    type(None): _Writer._write_none,
    tuple: _Writer._write_tuple,
    list: _Writer._write_list,
    dict: _Writer._write_dict,
    Pairs: _Writer._write_pairs,
    Instance: _Writer._write_instance,
    Template: _Writer._write_template,
    ExportTensor: _Writer._write_array,
}
