"""What kinds of memory tensors have, found for many at once."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import pytest

from paddle_dist_ckpt.paddle_adapter import device
from paddle_dist_ckpt.paddle_adapter.device import are_equal, are_on_device
from paddle_dist_ckpt.paddle_adapter.device_memory import kind_of, memories_of

_DTYPES = ("float32", "int64", "bfloat16", "float32")


class _At:
    """A tensor's stand-in, at a place with such a name."""

    def __init__(self, name: str) -> None:
        self.place = _Place(name)


class _Place:
    def __init__(self, name: str) -> None:
        self.name = name

    def _equals(self, other: _Place) -> bool:
        return self.name == other.name

    def is_cpu_place(self) -> bool:
        return self.name == "host"

    def is_cuda_pinned_place(self) -> bool:
        return self.name == "pinned"


@pytest.mark.parametrize("together", [True, False])
def test_memory_of_many_tensors_is_that_of_each(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    if not together:
        monkeypatch.setattr("paddle_dist_ckpt.paddle_adapter.device_memory.are_equal", lambda places: False)
    tensors = [paddle.zeros([2, 3], dtype=dtype) for dtype in _DTYPES]
    found = memories_of(tensors)
    assert [memory.kind for memory in found] == [kind_of(tensor) for tensor in tensors]
    assert [memory.base for memory in found] == [tensor.data_ptr() for tensor in tensors]
    assert [memory.kind.itemsize for memory in found] == [4, 8, 2, 4]
    assert found[0].kind is found[3].kind
    assert memories_of([]) == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["gpu:0", "gpu:0"], [True, True]),
        (["gpu:0", "gpu:1"], [True, True]),
        (["gpu:0", "host", "pinned"], [True, False, False]),
        (["host", "gpu:0"], [False, True]),
        (["pinned", "pinned"], [False, False]),
        ([], []),
    ],
)
def test_each_tensor_is_looked_at_unless_all_are_at_one_place(
    monkeypatch: pytest.MonkeyPatch, names: Sequence[str], expected: Sequence[bool]
) -> None:
    monkeypatch.setattr(device, "has_devices", lambda: True)
    tensors = [_At(name) for name in names]
    assert are_on_device(tensors) == expected
    assert are_equal([tensor.place for tensor in tensors]) == (len(set(names)) == 1)
