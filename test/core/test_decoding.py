"""What is decoded of files: in proportion to their size, and with one kind of error."""

from __future__ import annotations

import json

import msgspec
import pytest

from paddle_dist_ckpt.core.decoding import decoding, has_few_of_one_hash, is_too_dense
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointNotFoundError


def dumped(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize("unit", [[], [[]], {}, {"tuple": []}, [1]])
def test_brackets_and_nothing_else_are_too_dense(unit: object) -> None:
    assert is_too_dense(dumped([unit] * 2_000_000))
    assert not is_too_dense(dumped([unit] * 10_000)), "few of them do no harm"


@pytest.mark.parametrize(
    "value",
    [
        list(range(1_000_000)),
        [0] * 1_000_000,
        [1.5] * 1_000_000,
        ["ab"] * 500_000,
        [[i, i] for i in range(300_000)],
        [{"tuple": [i, i]} for i in range(300_000)],
        [{"dict": [["a", i], ["b", i]]} for i in range(200_000)],
        "[" * 2_000_000,
        ['"[{,\\' * 1000] * 500,
    ],
    ids=["ints", "digits", "floats", "texts", "pairs", "tuples", "dicts", "a text", "texts of brackets"],
)
def test_large_values_of_all_kinds_are_not(value: object) -> None:
    assert not is_too_dense(dumped(value))


def test_strings_that_end_in_backslashes_hide_nothing() -> None:
    assert is_too_dense(dumped(["\\", '\\"', *[[]] * 1_000_000]))


def test_a_zero_byte_ends_it() -> None:
    with pytest.raises(CheckpointCorruptedError, match="zero byte"):
        is_too_dense(b"[" + b" " * 2_000_000 + b"\0")


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
