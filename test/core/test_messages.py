"""Messages as bytes."""

from __future__ import annotations

import msgspec
import pytest

from paddle_dist_ckpt.core.messages import decode, encode, prepare
from paddle_dist_ckpt.errors import CheckpointError
from paddle_dist_ckpt.loading import exchange_orders
from paddle_dist_ckpt.loading import messages as loading_messages
from paddle_dist_ckpt.saving import messages as saving_messages


class Question(msgspec.Struct, frozen=True, array_like=True):
    number: int
    words: list[str]


prepare([Question])


def test_a_message_comes_back() -> None:
    assert decode(encode(Question(3, ["a"])), Question) == Question(3, ["a"])


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([3]), msgspec.msgpack.encode(["3", []])])
def test_what_is_no_such_message_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="Question"):
        decode(data, Question)


def test_every_message_of_a_save_and_a_load_is_prepared() -> None:
    for module in (saving_messages, loading_messages, exchange_orders):
        for name, kind in ((name, getattr(module, name)) for name in module.__all__):
            if isinstance(kind, type):  # and no constant
                with pytest.raises(CheckpointError, match=name):
                    decode(b"\xc1", kind)


def test_what_is_not_prepared_is_not_decoded() -> None:
    class Unknown(msgspec.Struct):
        """Of which no two threads may make a decoder at once."""

    with pytest.raises(KeyError):
        decode(b"", Unknown)
