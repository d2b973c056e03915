"""Functions that test_device.py sends to a process with one device."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base import core

from test.device_plugin import control
from test.device_plugin.build import NAME

HOST = core.CPUPlace()
MIB = 1 << 20


def _device() -> core.CustomPlace:
    return core.CustomPlace(NAME, 0)


def numbers(size: int) -> np.ndarray:
    """Return so many float32 numbers, all different."""
    return np.arange(size, dtype=np.float32)


def on_device(size: int) -> paddle.Tensor:
    """Return `numbers` on the device."""
    paddle.set_device(f"{NAME}:0")
    return paddle.to_tensor(numbers(size))


def host_view(array: np.ndarray) -> paddle.Tensor:
    """Return a tensor over the array's own memory."""
    tensor = paddle.utils.dlpack.from_dlpack(array)
    assert tensor.data_ptr() == array.ctypes.data
    return tensor


def counted(work: Callable[[], Any]) -> dict[str, tuple[int, int]]:
    """Return what ``work`` made Paddle ask the runtime for, as (calls, bytes) by name."""
    paddle.device.synchronize()
    control.reset()
    made = work()
    found = {name: (count.calls, count.bytes) for name, count in control.counts().items()}
    paddle.device.synchronize()  # or what a copy that is under way writes to may be gone
    del made
    return found


def places() -> tuple[str, str]:
    """Return the device, and where a tensor made on it is."""
    paddle.set_device(f"{NAME}:0")
    return paddle.get_device(), str(paddle.ones([2]).place)


def read_device_memory() -> int:
    """Read a device's memory as if it were the host's."""
    return ctypes.string_at(on_device(4).data_ptr(), 1)[0]


def write_device_memory() -> None:
    """Write a device's memory as if it were the host's."""
    ctypes.memset(on_device(4).data_ptr(), 0, 1)


def there_and_back(dtype: str) -> tuple[bytes, bytes]:
    """Return the bytes of a tensor, and of its copy that went to the device and back."""
    paddle.set_device("cpu")
    bits = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 16 * 24, dtype=np.uint8)
    tensor = paddle.to_tensor(bits).view(dtype)
    back = tensor._copy_to(_device(), True)._copy_to(HOST, True)
    size = tensor.shape[0] * tensor.element_size()
    return ctypes.string_at(tensor.data_ptr(), size), ctypes.string_at(back.data_ptr(), size)


def training(device: str, steps: int) -> tuple[list[float], list[str]]:
    """Train a small model, and return the losses and the places of its weights and of its optimizer's state."""
    paddle.set_device(device)
    random = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))
    for parameter in model.parameters():
        parameter.set_value(random.random(parameter.shape, dtype=np.float32))
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    losses = []
    for _ in range(steps):
        output = model(paddle.to_tensor(random.random((4, 8), dtype=np.float32)))
        loss = ((output - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)  # zeroing in place is a kernel without a fallback
        losses.append(float(loss))
    tensors = [*model.parameters(), *(v for v in optimizer.state_dict().values() if isinstance(v, paddle.Tensor))]
    return losses, sorted({str(tensor.place) for tensor in tensors})


def calls_of_copies() -> dict[str, dict[str, tuple[int, int]]]:
    """Return which functions of the interface Paddle's copies come down to, for 4,096 bytes."""
    device = on_device(1024)
    host = host_view(np.zeros(1024, np.float32))
    return {
        "cpu": counted(device.cpu),
        "numpy": counted(device.numpy),
        "to_tensor": counted(lambda: paddle.to_tensor(numbers(1024))),
        "to host, later": counted(lambda: device._copy_to(HOST, False)),
        "to device, later": counted(lambda: host._copy_to(_device(), False)),
        "within, later": counted(lambda: device._copy_to(_device(), False)),
        "into host": counted(lambda: host.copy_(device, True)),
        "into host, later": counted(lambda: host.copy_(device, False)),
        "part into host, later": counted(lambda: host[4:8].copy_(device[8:12], False)),
    }


def part_into_host_later() -> tuple[list[float], bool, bool, list[float]]:
    """Queue the copy of a part into given host memory on a given stream while streams are held.

    Returns:
        The host memory before, whether the stream was idle then, whether the default stream was, the memory after.
    """
    device = on_device(1024)
    array = np.zeros(8, np.float32)
    host = host_view(array)
    stream = paddle.device.Stream(f"{NAME}:0")
    with control.held():
        with paddle.device.stream_guard(stream):
            host[2:5].copy_(device[100:103], False)
        before = array.tolist()
        idle, default_idle = stream.query(), paddle.device.current_stream().query()
    stream.synchronize()
    return before, idle, default_idle, array.tolist()


def raw_addresses() -> tuple[list[float], list[float], bool]:
    """Copy by raw addresses, as cudaMemcpyAsync would. Returns the host memory before and after, and whether a host
    address in place of the device's is refused."""
    device = on_device(1024)
    array = np.zeros(4, np.float32)
    stream = paddle.device.Stream(f"{NAME}:0")
    source = device.data_ptr() + 40
    with control.held():
        control.copy_async(array.ctypes.data, source, 16, control.TO_HOST, stream.stream_base.raw_stream)
        before = array.tolist()
    stream.synchronize()
    try:
        control.copy(array.ctypes.data, array.ctypes.data, 16, control.TO_HOST)
    except ValueError:
        return before, array.tolist(), True
    return before, array.tolist(), False


def order_and_events() -> dict[str, Any]:
    """Look at events and the order of two streams' work."""
    device = on_device(1024)
    first_array, second_array = np.zeros(1024, np.float32), np.zeros(1024, np.float32)
    first, second = paddle.device.Stream(f"{NAME}:0"), paddle.device.Stream(f"{NAME}:0")
    event, unrecorded = paddle.device.Event(), paddle.device.Event()
    seen: dict[str, Any] = {"unrecorded": unrecorded.query()}
    control.set_speed(4096 / 0.05)
    try:
        with paddle.device.stream_guard(first):
            host_view(first_array).copy_(device, False)
        event.record(first)
        second.wait_event(event)
        with paddle.device.stream_guard(second):
            host_view(second_array).copy_(device, False)
        seen["at once"] = event.query()
        event.synchronize()
        seen["after the first"] = event.query(), bool(first_array[1023]), bool(second_array[1023])
        second.synchronize()
        seen["after the second"] = bool(second_array[1023])
    finally:
        control.set_speed(0)
    return seen


def order_within_a_stream(copies: int) -> tuple[list[float], list[float]]:
    """Queue copies of different values into one place; return the place after each was let through, and at the end."""
    array = np.zeros(1, np.float32)
    host = host_view(array)
    values = on_device(copies)
    stream = paddle.device.Stream(f"{NAME}:0")
    with control.held(), paddle.device.stream_guard(stream):
        for i in range(copies):
            host.copy_(values[i : i + 1], False)
        held = array.tolist()
    stream.synchronize()
    return held, array.tolist()


def seconds_of_copies(size: int, speed: float) -> dict[str, float]:
    """Measure copies of ``size`` bytes at a speed."""
    device = on_device(size // 4)
    paddle.device.synchronize()
    control.set_speed(speed)
    try:
        seconds = {"to host": _seconds(device.cpu), "within": _seconds(lambda: device._copy_to(_device(), True))}
        start = time.perf_counter()
        kept = [device._copy_to(HOST, False) for _ in range(3)]
        seconds["to queue three"] = time.perf_counter() - start
        paddle.device.synchronize()
        seconds["for three"] = time.perf_counter() - start
    finally:
        control.set_speed(0)
    assert len(kept) == 3
    return seconds


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def source_changes() -> list[float]:
    """Overwrite host memory after a copy from it was queued, and return what arrived."""
    device = on_device(4)
    array = numbers(4)
    with control.held():
        later = host_view(array)._copy_to(device.place, False)
        array[:] = -1
    return later.numpy().tolist()


def memory_use() -> list[tuple[int, int]]:
    """Return bytes in use and their peak: at first, with 8 MiB, after they are freed."""
    paddle.set_device(f"{NAME}:0")
    paddle.device.empty_cache()
    control.reset()
    seen = [control.memory()]
    tensor = paddle.empty([8 * MIB], dtype="uint8")
    seen.append(control.memory())
    del tensor
    paddle.device.empty_cache()
    seen.append(control.memory())
    return [(one.bytes - seen[0].bytes, one.peak - seen[0].bytes) for one in seen]


def fill_memory(size: int) -> str:
    """Ask for more than the device has, and return what Paddle raises. The device is still of use then."""
    paddle.set_device(f"{NAME}:0")
    try:
        paddle.empty([size], dtype="uint8")
    except Exception as error:
        assert paddle.ones([2]).sum().item() == 2
        return type(error).__name__
    return ""


def pageable_and_pinned() -> dict[str, tuple[float, bool]]:
    """Queue copies of a mebibyte at 4 MiB/s. Returns the seconds that it took, and if they are counted as pageable."""
    device = on_device(MIB // 4)
    array = np.zeros(MIB // 4, np.float32)
    host = host_view(array)
    seen = {}
    control.set_speed(4 * MIB)
    try:
        for name in ("pageable", "pinned"):
            if name == "pinned":
                control.pin(array.ctypes.data, array.nbytes)
            control.reset()
            seconds = _seconds(lambda: host.copy_(device, False))
            seen[name] = seconds, "pageable_async_memory_copy_d2h" in control.counts()
            paddle.device.synchronize()
    finally:
        control.set_speed(0)
    control.unpin(array.ctypes.data)
    assert array[-1] == numbers(MIB // 4)[-1]
    return seen
