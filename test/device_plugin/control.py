"""Steers and watches the device's runtime from inside a process whose Paddle has loaded it."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from test.device_plugin.build import library

__all__ = [
    "TO_DEVICE",
    "TO_HOST",
    "WITHIN",
    "Count",
    "Memory",
    "copy",
    "copy_async",
    "counts",
    "held",
    "lie",
    "memory",
    "pin",
    "reset",
    "set_speed",
    "unpin",
]

TO_DEVICE, TO_HOST, WITHIN = 1, 2, 3  # kinds of copies, numbered as CUDA's

_REPORT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Count:
    """How often the runtime was asked for something since the last `reset`, and for how many bytes in all."""

    calls: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What the runtime has given to Paddle, which keeps it in chunks. ``peak`` is since the last `reset`."""

    capacity: int
    bytes: int
    peak: int


def counts() -> dict[str, Count]:
    """Return what the runtime was asked for, by the name of the call.

    ``async_memory_copy_d2h`` and the like are the interface's functions. The same name behind ``pageable_`` counts
    those asynchronous copies whose host memory is not pinned.
    """
    return {name: Count(*pair) for name, pair in _report()["counts"].items()}


def memory(device: int = 0) -> Memory:
    """Return the state of a device's memory."""
    return Memory(*_report()["devices"][device])


def reset() -> None:
    """Set the counts to zero, and each memory's peak to what is in use."""
    _runtime().test_device_reset()


def set_speed(bytes_per_second: float) -> None:
    """Limit copies between host and device, each way; 0 for no limit."""
    _runtime().test_device_set_speed(bytes_per_second)


def lie(*names: str) -> None:
    """From now on let these collectives succeed without moving a byte; all ranks have to. ``"send"`` are scatters."""
    _runtime().test_device_lie(f" {' '.join(names)} ".encode())


@contextmanager
def held() -> Iterator[None]:
    """Let streams begin no work inside the block. What waits for a stream there waits for ever."""
    _runtime().test_device_hold(1)
    try:
        yield
    finally:
        _runtime().test_device_hold(0)


def pin(address: int, size: int) -> None:
    """Take host memory as pinned, as cudaHostRegister does."""
    _runtime().test_device_host_register(address, size)


def unpin(address: int) -> None:
    """Undo `pin`.

    Raises:
        ValueError: the memory is not pinned.
    """
    if _runtime().test_device_host_unregister(address):
        raise ValueError(f"{address:#x} is not pinned")


def copy(to: int, source: int, size: int, kind: int) -> None:
    """Copy between addresses and wait, as cudaMemcpy does.

    Raises:
        ValueError: an address is not of the kind that ``kind`` says.
    """
    if _runtime().test_device_copy(to, source, size, kind):
        raise ValueError("not copied: see what the runtime printed")


def copy_async(to: int, source: int, size: int, kind: int, stream: int) -> None:
    """Queue a copy on a stream, ``paddle.device.Stream.stream_base.raw_stream``, as cudaMemcpyAsync does.

    Raises:
        ValueError: an address is not of the kind that ``kind`` says.
    """
    if _runtime().test_device_copy_async(to, source, size, kind, stream):
        raise ValueError("not copied: see what the runtime printed")


@cache
def _runtime() -> ctypes.CDLL:
    """The library that Paddle has loaded: the same path gives the same one."""
    runtime = ctypes.CDLL(str(library()))
    address, size = ctypes.c_void_p, ctypes.c_size_t
    runtime.test_device_set_speed.argtypes = [ctypes.c_double]
    runtime.test_device_host_register.argtypes = [address, size]
    runtime.test_device_host_unregister.argtypes = [address]
    runtime.test_device_copy.argtypes = [address, address, size, ctypes.c_int]
    runtime.test_device_copy_async.argtypes = [address, address, size, ctypes.c_int, address]
    return runtime


def _report() -> dict[str, Any]:
    text = ctypes.create_string_buffer(_REPORT_BYTES)
    if _runtime().test_device_report(text, ctypes.c_size_t(_REPORT_BYTES)) >= _REPORT_BYTES:
        raise RuntimeError("the report is longer than its buffer")
    return json.loads(text.value)
