"""What is decoded of files: in proportion to their size, and with one kind of error."""

from __future__ import annotations

import json

import msgspec
import pytest

from paddle_dist_ckpt.core.decoding import Room, decoding, has_few_of_one_hash, objects_of
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointNotFoundError


def dumped(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize("unit", [[], [[]], {}, {"tuple": []}, [1], 1000, 0.5, "ab"])
def test_many_objects_of_few_bytes_have_no_room(unit: object) -> None:
    with pytest.raises(CheckpointCorruptedError, match="more objects than its size has room for: "):
        Room().take(dumped([unit] * 500_000))
    Room().take(dumped([unit] * 20_000))  # few of them do no harm


@pytest.mark.parametrize("value", ["[" * 40_000_000, ['"[{,\\' * 1000] * 500, list(range(100_000))])
def test_texts_and_what_people_store_have_room(value: object) -> None:
    Room().take(dumped(value))


def test_all_that_is_decoded_together_shares_the_room() -> None:
    room, text = Room(), dumped(list(range(300_000)))
    room.take(text)
    with pytest.raises(CheckpointCorruptedError, match="too many"):
        room.take(text)
    room = Room(0)
    room.grant(objects_of(text))
    room.take(text)


def test_strings_that_end_in_backslashes_hide_nothing() -> None:
    brackets = objects_of(dumped([[]] * 50_000))
    assert objects_of(dumped(["\\", '\\"', *[[]] * 50_000])) > brackets > 112 * 49_000
    assert objects_of(b'["[{,]","\\"[",1]') == 72 + 2 * 40 + 4 * 12


def test_a_zero_byte_ends_it() -> None:
    with pytest.raises(CheckpointCorruptedError, match="zero byte"):
        Room().take(b"[" + b" " * 2_000_000 + b"\0")


@pytest.mark.parametrize(
    "error",
    [*(MemoryError(), OverflowError("x"), RecursionError("x"), TypeError("x"), KeyError("x"), ValueError("x"))]
    + [msgspec.ValidationError("x"), CheckpointCorruptedError("x"), UnicodeDecodeError("utf-8", b"", 0, 1, "x")],
)
def test_whatever_goes_wrong_is_the_fault_of_the_file(error: Exception) -> None:
    with (
        pytest.raises(CheckpointCorruptedError, match=r"^0.metadata: (.*x|MemoryError)") as caught,
        decoding("0.metadata"),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [CheckpointNotFoundError("x"), OSError("x"), KeyboardInterrupt()])
def test_what_is_no_fault_of_the_file_stays_what_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)), decoding("0.metadata"):
        raise error


def test_numbers_of_one_hash_are_found() -> None:
    prime = 2**61 - 1
    assert not has_few_of_one_hash([i * prime for i in range(1, 100)])
    assert not has_few_of_one_hash([complex(-1000003 * i, i) for i in range(100)])
    assert has_few_of_one_hash([2.0**i for i in range(-1000, 1000)])
    assert has_few_of_one_hash(range(-(2**10), 2**10))
    assert has_few_of_one_hash([(i, -i) for i in range(10_000)])
