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
import binascii
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ..errors import CheckpointCorruptedError, UnsupportedValueError

__all__ = ["decode_value", "encode_value", "from_jsonable", "to_jsonable"]

_INT64 = range(-(2**63), 2**63)
_ARRAY_KINDS = "biufcSUMm"
_MAX_DEPTH = 200


def encode_value(value: object, key: str) -> bytes:
    """A value as JSON.

    Args:
        value: None, bool, int, float, complex, str, bytes, numpy scalar or array, or a list, tuple or dict of such.
        key: Names the value in errors.

    Raises:
        UnsupportedValueError: the value, or one inside it, is of another type (subclasses included).
    """
    return msgspec.json.encode(to_jsonable(value, key))


def decode_value(data: bytes) -> Any:
    """The value that :func:`encode_value` wrote.

    Raises:
        CheckpointCorruptedError: the data are not such a value.
    """
    try:
        return from_jsonable(msgspec.json.decode(data))
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointCorruptedError(f"a stored value cannot be decoded: {error}") from error


def to_jsonable(value: object, key: str, depth: int = 0) -> Any:
    """A value as a tree of JSON types, with tags where JSON has no type of its own."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value)
    if depth >= _MAX_DEPTH:
        raise UnsupportedValueError(f"{key}: nested deeper than {_MAX_DEPTH} levels")
    if kind is list or kind is tuple:
        elements: Any = value
        items = [to_jsonable(item, f"{key}[{i}]", depth + 1) for i, item in enumerate(elements)]
        return items if kind is list else {"tuple": items}
    if isinstance(value, dict):
        return {"dict": [_encode_item(key, k, v, depth + 1) for k, v in value.items()]}
    if isinstance(value, np.generic):
        return {"numpy": [_numpy_dtype(value.dtype, key), _base64(value.tobytes())]}
    if kind is np.ndarray:
        array: Any = value
        return {"array": [_numpy_dtype(array.dtype, key), list(array.shape), _base64(array.tobytes())]}
    raise UnsupportedValueError(
        f"{key}: a {kind.__module__}.{kind.__qualname__} cannot be stored; store numbers, strings, bytes, None, numpy "
        "values, tensors, or lists, tuples and dicts of them"
    )


def _encode_item(key: str, name: object, value: object, depth: int) -> list[Any]:
    if not isinstance(name, (str, int, float, complex, bytes, tuple, np.generic)) and name is not None:
        raise UnsupportedValueError(f"{key}: a dict key of type {type(name).__name__} cannot be stored")
    return [to_jsonable(name, f"{key} (a key)", depth), to_jsonable(value, f"{key}[{name!r}]", depth)]


def _encode_int(value: Any) -> Any:
    return value if value in _INT64 else {"int": hex(value)}


def _encode_float(value: Any) -> Any:
    return value if math.isfinite(value) else {"float": repr(value)}


def _encode_str(value: Any) -> Any:
    try:
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


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _numpy_dtype(dtype: np.dtype[Any], key: str) -> str:
    if dtype.kind not in _ARRAY_KINDS or dtype.hasobject or (dtype.kind in "fc" and dtype.itemsize > 16):
        raise UnsupportedValueError(f"{key}: numpy values of dtype {dtype} cannot be stored")
    if dtype.kind == "f" and dtype.itemsize == 16:  # x87's long double: its layout differs between machines
        raise UnsupportedValueError(f"{key}: numpy values of dtype {dtype} cannot be stored")
    return str(dtype.str)


def from_jsonable(tree: Any) -> Any:
    """The value of a tree that :func:`to_jsonable` made.

    Raises:
        CheckpointCorruptedError: it is not such a tree.
    """
    kind = type(tree)
    if kind is list:
        return [from_jsonable(item) for item in tree]
    if kind is not dict:
        return tree
    try:
        ((tag, content),) = tree.items()
        return _DECODERS[tag](content)
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        raise CheckpointCorruptedError(f"a stored value is not well-formed: {str(tree)[:100]}") from error


def _decode_float(content: Any) -> float:
    if content not in ("nan", "inf", "-inf"):
        raise ValueError(content)
    return float(content)


def _decode_complex(content: Any) -> complex:
    real, imag = (from_jsonable(part) for part in content)
    return complex(real, imag)


def _decode_array(content: Any) -> Any:
    name, shape, text = content
    data = base64.b64decode(text, validate=True)
    dtype = np.dtype(_checked_dtype(name))
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("size and shape differ")
    return np.frombuffer(bytearray(data), dtype).reshape(shape) if data else np.zeros(shape, dtype)


def _decode_numpy(content: Any) -> Any:
    name, text = content
    data = base64.b64decode(text, validate=True)
    dtype = np.dtype(_checked_dtype(name))
    if len(data) != dtype.itemsize:
        raise ValueError("size and dtype differ")
    return np.frombuffer(data, dtype)[0] if data else np.zeros(1, dtype)[0]


def _checked_dtype(name: Any) -> str:
    dtype = np.dtype(str(name))
    if dtype.kind not in _ARRAY_KINDS or dtype.hasobject or dtype.str != name:
        raise ValueError(name)
    return str(dtype.str)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "float": _decode_float,
    "complex": _decode_complex,
    "bytes": lambda content: base64.b64decode(content, validate=True),
    "str": lambda content: base64.b64decode(content, validate=True).decode("utf-8", "surrogatepass"),
    "tuple": lambda content: tuple(from_jsonable(item) for item in content),
    "dict": lambda content: {from_jsonable(k): from_jsonable(v) for k, v in content},
    "numpy": _decode_numpy,
    "array": _decode_array,
}
