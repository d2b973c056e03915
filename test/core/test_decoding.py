"""What is decoded of files: in proportion to their size, and with one kind of error."""

from __future__ import annotations

import json

import msgspec
import pytest

from paddle_dist_ckpt.core.decoding import MOST_COST, decoding, has_few_of_one_hash, json_cost
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointNotFoundError


def dumped(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("value", "cost"),
    [
        ([], 72),
        ([[], []], 72 * 3 + 40),
        ("a text", 24),
        ({"tuple": [1, 2]}, 240 + 24 + 72 + 40),
        ([0] * 1_000_000, 72 + 40 * 999_999),
        ("[" * 2_000_000, 24),
        (["[{,"] * 100_000, 72 + 40 * 99_999 + 24 * 100_000),
    ],
    ids=["a list", "lists", "a text", "a tuple", "digits", "a text of brackets", "texts of brackets"],
)
def test_the_objects_of_json_are_counted_before_they_are_made(value: object, cost: int) -> None:
    assert json_cost(dumped(value)) == cost


def test_of_a_text_more_is_not_counted_than_it_has_bytes() -> None:
    assert json_cost(dumped("a comma," * 100_000)) == 24
    assert json_cost(dumped("a comma, now and then, in words" * 100_000)) <= 3_200_000


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 20])
def test_strings_that_end_in_backslashes_hide_nothing(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.core.decoding._PIECE", piece)
    many = 1000 if piece < 1000 else 1_000_000
    texts = ["\\", '\\"', '"', '[\\\\"[', ""]
    lists = 72 + 72 * many + 40 * (many + 4) + 24 * 5
    assert json_cost(dumped([*texts, *[[]] * many])) == lists


def test_no_json_costs_more_than_the_most() -> None:
    dense = (b"[" + b",".join([b"{}"] * 100_000) + b"]", b"[" * 100, b'[["",""],[{}]]')
    assert all(json_cost(json) <= MOST_COST * len(json) for json in dense)


def test_a_zero_byte_ends_it() -> None:
    with pytest.raises(CheckpointCorruptedError, match="zero byte"):
        json_cost(b"[" + b" " * 2_000_000 + b"\0")


@pytest.mark.parametrize(
    "error",
    [*(MemoryError(), OverflowError("x"), RecursionError("x"), TypeError("x"), KeyError("x"), ValueError("x"))]
    + [msgspec.ValidationError("x"), CheckpointCorruptedError("x"), UnicodeDecodeError("utf-8", b"", 0, 1, "x")],
)
def test_whatever_goes_wrong_is_the_fault_of_the_file(error: Exception) -> None:
    with (
        pytest.raises(CheckpointCorruptedError, match=r"^0.metadata: (.*x|there is not enough memory)") as caught,
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
