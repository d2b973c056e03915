"""What kinds of memory tensors have, found for many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import paddle
import pytest

from paddle_dist_ckpt.errors import UnsupportedValueError
from paddle_dist_ckpt.paddle_adapter import device, device_memory
from paddle_dist_ckpt.paddle_adapter.device import devices_of
from paddle_dist_ckpt.paddle_adapter.device_memory import TensorBytes, memories_of
from test.paddle.versions import SHARED_HOST_MEMORY, lacks

_DTYPES = ("float32", "int64", "bfloat16", "float32")
_MORE = [("float32", 4), ("bfloat16", 2), ("int64", 8)]


class _At:
    """A tensor's stand-in, at a place with such a name, of such a dtype, which is a new object for each that asks, as
    in older versions of Paddle, or the same one for all."""

    def __init__(self, name: str, dtype: str = "float32", size: int = 4, fresh: bool = True) -> None:
        self.name, self._dtype, self._size, self._fresh = name, dtype, size, fresh

    @property
    def place(self) -> _Place:
        return _Place(self.name)

    @property
    def dtype(self) -> _Dtype:
        return _Dtype(self._dtype) if self._fresh else _SAME.setdefault(self._dtype, _Dtype(self._dtype))

    def element_size(self) -> int:
        return self._size

    def data_ptr(self) -> int:
        return 16


class _Dtype:
    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


_SAME: dict[str, _Dtype] = {}


class _Place:
    def __init__(self, name: str) -> None:
        self.name = name

    def _equals(self, other: _Place) -> bool:
        return self.name == other.name

    def is_cpu_place(self) -> bool:
        return self.name == "host"

    def is_cuda_pinned_place(self) -> bool:
        return self.name == "pinned"


def test_memory_of_many_tensors_is_that_of_each() -> None:
    tensors = [paddle.zeros([2, 3], dtype=dtype) for dtype in _DTYPES]
    found = memories_of(tensors, [7, 1, 0, 7])
    assert [memory.kind for memory in found] == [TensorBytes.of(tensor).kind for tensor in tensors]
    assert [memory.base for memory in found] == [tensor.data_ptr() for tensor in tensors]
    assert [memory.kind.itemsize for memory in found] == [4, 8, 2, 4]
    assert found[0].kind is found[3].kind
    assert memories_of([], []) == []


@pytest.mark.parametrize(
    "names", [["gpu:0"] * 6, ["gpu:0", "gpu:1"] * 3, ["gpu:0", "gpu:0", "gpu:1", "gpu:0", "gpu:0", "gpu:0"]]
)
@pytest.mark.parametrize("dtypes", [_MORE * 2, _MORE[:1] * 6])
@pytest.mark.parametrize("fresh", [True, False])
def test_kinds_of_several_devices_and_dtypes(
    monkeypatch: pytest.MonkeyPatch, names: Sequence[str], dtypes: Sequence[tuple[str, int]], fresh: bool
) -> None:
    monkeypatch.setattr(device_memory, "name_of", lambda place: place.name)
    monkeypatch.setattr(device_memory, "_kinds", {})
    of_each = list(zip(names, dtypes, strict=True))
    tensors = [_At(name, *dtype, fresh=fresh) for name, dtype in of_each]
    kinds = [memory.kind for memory in memories_of(tensors, list(map(of_each.index, of_each)))]
    assert [(kind.device, str(kind.dtype), kind.itemsize) for kind in kinds] == [
        (name, *dtype) for name, dtype in of_each
    ]
    assert len(set(map(id, kinds))) == len(set(of_each))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["gpu:0", "gpu:0"], ["gpu:0", "gpu:0"]),
        (["gpu:0", "gpu:1"], ["gpu:0", "gpu:1"]),
        (["gpu:0", "host", "pinned"], ["gpu:0", None, None]),
        (["gpu:0", "host", "gpu:0"], ["gpu:0", None, "gpu:0"]),
        (["host", "gpu:0"], [None, "gpu:0"]),
        (["pinned", "pinned"], [None, None]),
        ([], []),
    ],
)
def test_device_of_each_tensor(
    monkeypatch: pytest.MonkeyPatch, names: Sequence[str], expected: Sequence[str | None]
) -> None:
    monkeypatch.setattr(device, "has_devices", lambda: True)
    monkeypatch.setattr(device, "name_of", lambda place: place.name)
    assert devices_of([_At(name) for name in names]) == expected


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "float16", "bfloat16", "float32", "int64", "complex64", "complex128"]
)
@lacks(SHARED_HOST_MEMORY, "copies host memory")
def test_host_memory_as_a_tensor_of_any_type(dtype: str) -> None:
    """Where it is viewed as one of wider items, Paddle 3.0.0 ends the process."""
    tensor = paddle.to_tensor([1, 0, 1, 1]).astype(dtype)
    (memory,) = memories_of([tensor], [0])
    data = np.zeros(4 * memory.kind.itemsize, np.uint8)
    seen = memory.kind.on_host(data)
    assert seen.dtype == tensor.dtype
    assert seen.data_ptr() == data.ctypes.data
    seen.copy_(tensor, False)
    assert data.tobytes() == memory.kind.on_host(data).numpy().tobytes() == tensor.numpy().tobytes()


def test_a_copy_of_host_memory_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Paddle 2.6 makes: what a device copies there is lost."""
    monkeypatch.setattr(device_memory, "host_tensor", lambda data: device.host_tensor(data.copy()))
    (memory,) = memories_of([paddle.zeros([4])], [0])
    with pytest.raises(UnsupportedValueError, match="need Paddle 3.0 or newer"):
        memory.kind.on_host(np.zeros(16, np.uint8))


def _written() -> list[list[float]]:
    """Columns 1 and 3 of a tensor of 5 columns, when ones were written to them."""
    memory = paddle.zeros([3, 5])
    writer = device_memory.strided_writer("cpu")
    assert writer is not None
    writer(paddle.as_strided(memory.detach(), [2, 3], [2, 5], 1 * 4), paddle.ones([2, 3]))
    return memory.tolist()


@pytest.fixture
def untried() -> Iterator[None]:
    device_memory.strided_writer.cache_clear()
    yield
    device_memory.strided_writer.cache_clear()


@pytest.mark.usefixtures("untried")
def test_items_are_written_where_they_are_and_nothing_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a version of Paddle whose ``copy_`` takes them to stand together, as it did before 3.2."""
    assert _written() == [[0, 1, 0, 1, 0]] * 3
    device_memory.strided_writer.cache_clear()
    monkeypatch.setattr(paddle.Tensor, "copy_", _copy_side_by_side)
    assert _written() == [[0, 1, 0, 1, 0]] * 3
    device_memory.strided_writer.cache_clear()
    monkeypatch.setattr(device_memory, "_assign", _copy_side_by_side)
    assert device_memory.strided_writer("cpu") is None
    monkeypatch.setattr(device_memory, "has_kernels", lambda *names: True)
    assert memories_of([paddle.zeros([3, 5])], [0])[0].strided(4, [2, 3], [8, 20]) is None


def _copy_side_by_side(target: paddle.Tensor, source: paddle.Tensor, *_: bool) -> None:
    count = int(source.numel())
    target.detach().as_strided([count], [1], target.offset)[:] = source.reshape([-1])
