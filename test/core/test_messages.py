"""Messages as bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from paddle_dist_ckpt.core.messages import decode, encode
from paddle_dist_ckpt.errors import CheckpointError


class Question(msgspec.Struct, frozen=True, array_like=True):
    number: int
    words: list[str]


def test_a_message_comes_back() -> None:
    assert decode(encode(Question(3, ["a"])), Question) == Question(3, ["a"])


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([3]), msgspec.msgpack.encode(["3", []])])
def test_what_is_no_such_message_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="Question"):
        decode(data, Question)


RACE = """
import sys, threading
from msgspec import defstruct
from paddle_dist_ckpt.core.messages import decode, encode

sys.setswitchinterval(1e-6)
for _ in range(400):
    inner = defstruct("inner", [("x", list[int]), ("y", dict[str, int])], array_like=True)
    middle = defstruct("middle", [("c", list[inner]), ("d", dict[str, inner])], array_like=True)
    outer = defstruct("outer", [("b", list[middle]), ("q", dict[str, list[middle]])], array_like=True)
    data = encode(outer([middle([inner([1], {"a": 1})], {"k": inner([2], {})})], {}))
    together = threading.Barrier(8)
    threads = [threading.Thread(target=lambda: (together.wait(), decode(data, outer))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("all decoded")
"""


def test_threads_that_decode_a_type_for_the_first_time_together() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RACE], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "all decoded\n"), done.stderr
