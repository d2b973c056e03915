"""Calls at all depths of the caller."""

from __future__ import annotations

import pytest

from paddle_dist_ckpt.core.frames import with_room_for_frames
from test.pace import check_all_depths


def _deeper(levels: int) -> None:
    if levels:
        _deeper(levels - 1)


@with_room_for_frames
def _many_calls(count: int) -> int:
    for _ in range(count):
        _deeper(9)
    return count


def test_a_loop_of_calls_takes_as_long_at_all_depths() -> None:
    check_all_depths(lambda: _many_calls(1000))


def test_a_function_is_called_as_before() -> None:
    assert _many_calls(3) == _many_calls(count=3) == 3
    assert _many_calls.__name__ == "_many_calls"
    with pytest.raises(TypeError):
        _many_calls()  # type: ignore[call-arg]
