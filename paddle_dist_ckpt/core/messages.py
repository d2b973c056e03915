"""Messages between ranks as bytes: typed msgpack."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..errors import CheckpointError

__all__ = ["decode", "encode"]

T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """The message of this type.

    Raises:
        CheckpointError: it is something else, which means that ranks run different versions of this library.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"a rank sent no {kind.__name__}; do all ranks run one version? ({error})") from error
