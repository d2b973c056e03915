"""Text and values as a person can read them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from paddle_dist_ckpt.core.text import MOST_VALUE, value_text
from test.pace import slowness


def test_values_as_text() -> None:
    assert value_text({"a": (1, None, float("nan"))}) == "{'a': (1, None, nan)}"
    assert value_text(np.float32(0.5)) == "0.5"
    assert value_text([10**9000]) == "[(an integer of 29,898 bits)]"
    assert len(value_text("x" * 100_000)) < MOST_VALUE + 40
    assert value_text(np.zeros(100_000)).endswith("0.0, …], shape=(100000,), dtype=float64)")
    assert value_text(np.zeros(11, "<f4")) == f"array([{'0.0, ' * 10}…], shape=(11,), dtype=float32)"
    assert value_text(np.arange(100).reshape(10, 10)).startswith("array([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [10, ")
    assert value_text(np.zeros((10**9, 0), "<i2")) == "array([], shape=(1000000000, 0), dtype=int16)"
    assert value_text(np.float32([[0.1, np.nan], [1e30, -0.0]])) == "array([[0.1, nan], [1e+30, -0.0]], dtype=float32)"
    assert value_text(np.array(7, "<u2")) == "array(7, dtype=uint16)"
    assert value_text(np.array(7, ">u2")) == "array(7, dtype='>u2')"
    assert value_text(np.array([7, 8], "m8[s]")) == "array(['7 seconds', '8 seconds'], dtype='<m8[s]')"
    assert value_text(np.array([b"\xff"])) == r"array([b'\xff'], dtype='|S1')"
    assert value_text(np.array(["x" * 10**6])) == "array([…], shape=(1,), dtype='<U1000000')"
    assert value_text(np.array([["a", "b\n"]])) == "array([['a', 'b\\n']], dtype='<U2')"
    assert value_text({(1,): b"\x1b", "\u202e": ()}) == "{(1,): b'\\x1b', '\\u202e': ()}"


@pytest.mark.parametrize(("kind", "item"), [("<U1", b"\xff" * 4), ("<M8", b"\0" * 7 + b"\1")])
def test_items_that_numpy_cannot_write_are_no_failure(kind: str, item: bytes) -> None:
    text = value_text({"good": 1, "bad": np.frombuffer(item, kind)})
    assert text.startswith("{'good': 1, 'bad': (a ndarray that cannot be written out: ")


def test_a_value_takes_no_more_than_its_text() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert value_text(deep).count("[") == 51
    large = np.broadcast_to(np.zeros((), bool), (2,) * 24)
    many: tuple[object, ...] = (large,) * 1000
    before = time.process_time()
    for value in (large, many, [None] * 10**6, dict.fromkeys(range(10**6)), "\x1b" * 10**7, 1 << 10**7):
        assert len(value_text(value)) <= 4 * MOST_VALUE + 20
    assert time.process_time() - before < 0.5 * slowness()


def test_arrays_without_dimensions_have_no_brackets() -> None:
    assert value_text(np.array(2.5, "<f4")) == "array(2.5, dtype=float32)"
    assert value_text(np.array(3, "m8[s]")) == "array('3 seconds', dtype='<m8[s]')"
