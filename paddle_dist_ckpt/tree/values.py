"""Python and numpy values as JSON and back, equal and of the same type. No pickle.

JSON null, true, false, integers of 64 bits, finite numbers with a point and strings stand for themselves; an array is a
list. Everything else is an object with one member, whose name is the tag:

    {"int": "0x1f"}             an int beyond 64 bits, in hexadecimal
    {"float": "nan"}            nan, inf or -inf
    {"complex": [re, im]}       two floats
    {"bytes": "..."}            base64
    {"str": "..."}              base64 of UTF-8 with surrogates passed, for strings that UTF-8 cannot hold
    {"tuple": [...]}
    {"dict": [[key, value], ...]}
    {"numpy": ["<f4", "..."]}   a numpy scalar: dtype string, base64 of its bytes
    {"array": ["<U3", [2], "..."]}   a numpy array that no tensor entry can hold: dtype string, shape, base64
"""

from __future__ import annotations

import base64
import io
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import msgspec
import numpy as np

from ..core.decoding import decoding, finite_float, has_few_of_one_hash
from ..core.frames import with_room_for_frames
from ..core.garbage import no_collections
from ..core.memory import Bytes1D
from ..errors import CheckpointCorruptedError, UnsupportedValueError
from .advice import refusal_of
from .paths import plain_key

__all__ = [
    "DECODE_ERRORS",
    "are_same",
    "begins_a_dict",
    "decode_jsonable",
    "encode_value",
    "from_jsonable",
    "in_any_order",
    "is_tagged",
    "to_jsonable",
    "values_of",
]

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be."""
_DECODER = msgspec.json.Decoder(float_hook=finite_float)
_DICT = b'{"dict":'
_INT64 = range(-(2**63), 2**63)
_ARRAY_KINDS = "biufcSUMm"
_MAX_DEPTH = 200
_PIECE = 1 << 20  # of base64; a multiple of four
_MOST_DIMENSIONS = 64  # numpy has no more
_MOST_OF_KEY, _MOST_OF_PLACE = 200, 1000  # characters in a message
_DTYPE = re.compile(r"[<>|][biufcSUMm][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]+\])?")

_Place: TypeAlias = "str | tuple[_Place, object]"
"""Where a part of a value is: the value's key, or a place and the index or key there, None for a key itself. Its text
is made for messages alone: made for each part it would take as much as all keys above, each time."""


def encode_value(value: object, key: str) -> bytes:
    """A value as JSON.

    Args:
        value: None, bool, int, float, complex, str, bytes, numpy scalar or array, or a list, tuple or dict of such.
        key: Names the value in errors.

    Raises:
        UnsupportedValueError: the value, or one inside it, is of another type.
            Subclasses are other types, but for those of dict, which come back as dicts.
    """
    return msgspec.json.encode(to_jsonable(value, key))


def decode_jsonable(data: bytes | Bytes1D) -> Any:
    """The tree that :func:`encode_value` wrote, see :func:`to_jsonable`. :func:`from_jsonable` makes the value of it.

    Who reads the data of a file sees before that there is room for the value, and frees them before the value is made.

    Raises:
        CheckpointCorruptedError: the data are no JSON.
    """
    with decoding("a stored value cannot be decoded"), no_collections():
        return _DECODER.decode(data if isinstance(data, bytes) else data.data)


def in_any_order(tree: Any) -> bytes:
    """JSON of a tree that :func:`to_jsonable` made, the same for dicts whose keys were in another order."""
    return msgspec.json.encode(_ordered(tree, 0))


def _ordered(tree: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH // 2:  # what is below keeps its order, or Python may refuse to go on
        return tree
    if type(tree) is list:
        return [_ordered(item, depth + 1) for item in tree]
    if type(tree) is dict:
        found = {tag: _ordered(content, depth + 1) for tag, content in tree.items()}
        if type(found.get("dict")) is list:
            found["dict"].sort(key=msgspec.json.encode)
        return found
    return tree


def are_same(value: Any, other: Any) -> bool:
    """Whether two values are of one type and have the same contents: NaN is NaN, 1 is not True, 0.0 is not -0.0."""
    kind = type(value)
    if kind is not type(other):
        return False
    if kind is list or kind is tuple:
        return len(value) == len(other) and all(map(are_same, value, other))
    if isinstance(value, dict):  # with its keys in the same order
        pairs = zip(value.items(), other.items(), strict=False)
        return len(value) == len(other) and all(are_same(a, b) and are_same(x, y) for (a, x), (b, y) in pairs)
    if isinstance(value, (np.ndarray, np.generic)):
        return (value.dtype, value.shape, value.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if kind in (int, str, bytes, bool):
        return bool(value == other)
    return repr(value) == repr(other)


def begins_a_dict(data: Bytes1D) -> bool:
    """Whether what :func:`encode_value` wrote is a dict, by its first bytes."""
    return data[: len(_DICT)].tobytes() == _DICT


def to_jsonable(value: Any, key: _Place, depth: int = 0) -> Any:
    """A value as a tree of JSON types, with tags where JSON has no type of its own."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value)
    if depth >= _MAX_DEPTH:
        raise UnsupportedValueError(f"{_text_of(key)}: nested deeper than {_MAX_DEPTH} levels")
    if kind is list or kind is tuple:
        items = [to_jsonable(item, (key, i), depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if isinstance(value, dict):
        if not has_few_of_one_hash(value):
            raise UnsupportedValueError(f"{_text_of(key)}: more than 64 keys of the dict have one hash")
        return {"dict": [_encode_item(key, k, v, depth + 1) for k, v in value.items()]}
    if isinstance(value, np.generic):
        return {"numpy": [_numpy_dtype(value.dtype, key), _base64(value.tobytes()[: value.dtype.itemsize])]}
    if kind is np.ndarray:
        if value.size and not value.nbytes:
            raise UnsupportedValueError(f"{_text_of(key)}: an array of items without bytes cannot be stored")
        return {"array": [_numpy_dtype(value.dtype, key), list(value.shape), _base64(value.tobytes())]}
    raise UnsupportedValueError(f"{_text_of(key)}: {refusal_of(value)}")


def _text_of(place: _Place) -> str:
    """A place as messages show it, however long, many and deep its keys are."""
    items = []
    while not isinstance(place, str):
        place, item = place
        shown = item[:_MOST_OF_KEY] if isinstance(item, str) else item
        items.append(" (a key)" if item is None else f"[{shown!r}]")
    text = place + "".join(reversed(items))
    return text if len(text) <= _MOST_OF_PLACE else text[:_MOST_OF_PLACE] + "..."


def _encode_item(key: _Place, name: object, value: object, depth: int) -> list[Any]:
    if not isinstance(name, (str, int, float, complex, bytes, tuple, np.generic)) and name is not None:
        raise UnsupportedValueError(f"{_text_of(key)}: a dict key of type {type(name).__name__} cannot be stored")
    shown = name if isinstance(name, str) else type(name).__name__
    return [to_jsonable(name, (key, None), depth), to_jsonable(value, (key, shown), depth)]


def _encode_int(value: Any) -> Any:
    return value if value in _INT64 else {"int": hex(value)}


def _encode_float(value: Any) -> Any:
    return value if math.isfinite(value) else {"float": repr(value)}


def _encode_str(value: Any) -> Any:
    try:
        if not value.isascii():  # of most it is known, and no copy is made
            value.encode()
    except UnicodeEncodeError:
        return {"str": _base64(value.encode("utf-8", "surrogatepass"))}
    return value


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: lambda value: {"bytes": _base64(value)},
    complex: lambda value: {"complex": [_encode_float(value.real), _encode_float(value.imag)]},
}


def is_tagged(value: Any) -> bool:
    """Whether a number or a text is an object with a tag in JSON, which takes as much as a container."""
    encoder = _ENCODERS.get(type(value))
    return encoder is not None and type(encoder(value)) is dict


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _numpy_dtype(dtype: np.dtype[Any], key: _Place) -> str:
    largest = {"f": 8, "c": 16}.get(dtype.kind, dtype.itemsize)  # long doubles' layout differs between machines
    if dtype.kind not in _ARRAY_KINDS or dtype.itemsize > largest:
        raise UnsupportedValueError(f"{_text_of(key)}: numpy values of dtype {dtype} cannot be stored")
    return str(dtype.str)


def from_jsonable(tree: Any, kept: bool = True) -> Any:
    """The value of a tree that :func:`to_jsonable` made. Unless the tree is kept, its lists become those of the value.

    Raises:
        CheckpointCorruptedError: it is not such a tree.
    """
    if type(tree) is not list and type(tree) is not dict:
        return tree
    with decoding("a stored value is not well-formed"), no_collections():
        return _value(tree, 0, kept)


@with_room_for_frames
def values_of(trees: Iterable[tuple[str, Any]], kept: bool = True) -> dict[str, Any]:
    """The values of trees, by path; see :func:`from_jsonable`.

    Raises:
        CheckpointCorruptedError: one is not such a tree; its key is named.
    """
    values, path = dict[str, Any](), ""
    try:
        for path, tree in trees:
            values[path] = from_jsonable(tree, kept)
    except CheckpointCorruptedError as error:
        raise CheckpointCorruptedError(f"{plain_key(path)}: {error}") from error
    return values


def _value(tree: Any, depth: int, kept: bool) -> Any:
    """The value of a tree; see :func:`from_jsonable`."""
    kind = type(tree)
    if kind is not list and kind is not dict:
        return tree
    if depth > _MAX_DEPTH + 2:  # a dict's tag and pairs are levels of the tree, but not of the value
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    if kind is list:
        items = list(tree) if kept else tree
        for i, item in enumerate(items):
            if type(item) is list or type(item) is dict:
                items[i] = _value(item, depth + 1, kept)
        return items
    ((tag, content),) = tree.items()
    if tag == "tuple":
        return tuple(_value(_checked_list(content), depth, kept))
    if tag == "dict":
        return _dict(_checked_list(content), depth, kept)
    return _SCALARS[tag](content)


def _dict(pairs: list[Any], depth: int, kept: bool) -> dict[Any, Any]:
    keys, values = [], []
    for pair in pairs:
        key, value = _checked_list(pair)
        keys.append(_value(key, depth + 1, kept))
        values.append(_value(value, depth + 1, kept))
    if not has_few_of_one_hash(keys):
        raise ValueError("keys of one hash")
    return dict(zip(keys, values, strict=True))


def _checked_list(content: Any) -> list[Any]:
    if type(content) is not list:
        raise TypeError("a list is due")
    return content


def _decode_int(content: Any) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", content):
        raise ValueError("not an int in hexadecimal")
    return int(content, 16)


def _decode_float(content: Any) -> float:
    if content not in ("nan", "inf", "-inf"):
        raise ValueError(content)
    return float(content)


def _decode_complex(content: Any) -> complex:
    real, imag = (_decode_float(part["float"]) if type(part) is dict else part for part in _checked_list(content))
    if type(real) is not float or type(imag) is not float:
        raise TypeError("a float is due")
    return complex(real, imag)


def _decode_bytes(text: Any) -> bytes:
    """What a text is in base64. A long one is decoded piece by piece, so that it is not there a third time."""
    if len(text) <= _PIECE:
        return base64.b64decode(text, validate=True)
    data = io.BytesIO()
    for piece in _decoded_pieces(text):
        data.write(piece)
    return data.getvalue()


def _decoded_pieces(text: Any) -> Iterator[bytes]:
    for start in range(0, len(text), _PIECE):
        piece = base64.b64decode(text[start : start + _PIECE], validate=True)
        if len(piece) < _PIECE // 4 * 3 and start + _PIECE < len(text):
            raise ValueError("base64 that ends too early")
        yield piece


def _decode_array(content: Any) -> Any:
    name, shape, text = content
    if type(shape) is not list or len(shape) > _MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(shape)  # before it is multiplied: a text times a number takes as much memory as somebody likes
    dtype = _decode_dtype(name)
    size, at = math.prod(shape) * dtype.itemsize, 0
    if size != len(text) // 4 * 3 - text.count("=", -2) or (math.prod(shape) and not size):
        raise ValueError("size and shape differ")
    array = np.zeros(shape, dtype)
    for piece in _decoded_pieces(text):
        array.reshape(-1).view(np.uint8)[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    if at != size:
        raise ValueError("base64 that ends too early")
    if dtype.kind == "U" and array.reshape(-1).view(f"{dtype.str[0]}u4").max(initial=0) > sys.maxunicode:
        raise ValueError("no text")
    return array


def _decode_numpy(content: Any) -> Any:
    name, text = content
    data = _decode_bytes(text)
    dtype = _decode_dtype(name)
    if len(data) != dtype.itemsize:
        raise ValueError("size and dtype differ")
    if dtype.kind == "S":  # numpy's own arrays drop NULs at the end
        return np.bytes_(data)
    if dtype.kind == "U":
        return np.str_(data.decode("utf-32-be" if dtype.str.startswith(">") else "utf-32-le", "surrogatepass"))
    return np.frombuffer(data, dtype)[0]


def _decode_dtype(name: Any) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(name) or np.dtype(name).str != name:  # numpy evaluates some strings
        raise ValueError(name)
    dtype = np.dtype(name)
    if dtype.kind in "Mm" and np.datetime_data(dtype)[1] < 1:
        raise ValueError(name)
    return dtype


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": _decode_int,
    "float": _decode_float,
    "complex": _decode_complex,
    "bytes": _decode_bytes,
    "str": lambda content: _decode_bytes(content).decode("utf-8", "surrogatepass"),
    "numpy": _decode_numpy,
    "array": _decode_array,
}
