"""Messages between ranks as bytes: typed msgpack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from ..errors import CheckpointError

__all__ = ["decode", "encode", "prepare"]

T = TypeVar("T")
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def prepare(kinds: Iterable[object]) -> None:
    """Make what decodes messages of these types; to be called where they are defined. What is no such type is passed.

    IMPORTANT: msgspec looks at a type when it first decodes it, and may crash if two threads have it do so at once. A
    module is imported by one thread. (A lock would be left locked in a process that is forked meanwhile.)
    """
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            _decoders[kind] = msgspec.msgpack.Decoder(kind)


def encode(message: msgspec.Struct) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """The message of this type, which has been prepared.

    Raises:
        CheckpointError: it is something else, which means that ranks run different versions of this library.
    """
    try:
        message: T = _decoders[kind].decode(data)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"a rank sent no {kind.__name__}; do all ranks run one version? ({error})") from error
    return message
