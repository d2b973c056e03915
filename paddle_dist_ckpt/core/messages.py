"""Messages between ranks as bytes: typed msgpack."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

from ..errors import CheckpointError

__all__ = ["decode", "encode"]

T = TypeVar("T")
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}
_making = threading.Lock()


def encode(message: msgspec.Struct) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """The message of this type.

    Raises:
        CheckpointError: it is something else, which means that ranks run different versions of this library.
    """
    # IMPORTANT: msgspec looks at a type when it first decodes it, and may crash if two threads have it do so at once.
    with _making:
        decoder = _decoders.get(kind) or _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    try:
        message: T = decoder.decode(data)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"a rank sent no {kind.__name__}; do all ranks run one version? ({error})") from error
    return message
