"""Streams of devices, and the events by which they are waited for.

To wait for a stream by its own functions would hold Python's lock meanwhile, so events are asked instead.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import paddle

from .device import at_device

__all__ = ["current_stream", "forget_reached", "recorded", "stream_for_copies", "wait_for"]

_LEAST_WAIT, _MOST_WAIT = 20e-6, 500e-6
current_stream = threading.Lock()  # also held where copies need another device than the current one
# Events that are not reached yet, with the tensors that are copied until then. To drop such an event would wait for it,
# with Python's lock held; and memory that a copy is under way to must not be used for anything else, whatever happens.
_pending: deque[tuple[Any, Sequence[Any]]] = deque()


@cache
def stream_for_copies(device: str) -> Any:
    """A stream that nothing but copies of this library goes on; None for a device that has no streams."""
    try:
        return paddle.device.Stream(device)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None


def wait_for(event: Any) -> None:
    """Wait until an event is reached; other threads run meanwhile. None is reached."""
    pause = _LEAST_WAIT
    while event is not None and not event.query():
        time.sleep(pause)
        pause = min(2 * pause, _MOST_WAIT)


def recorded(stream: Any, device: str, used: Sequence[Any]) -> Any:
    """A new event at the end of what a stream has to do; until it is reached, the tensors ``used`` are in use."""
    try:
        with at_device(device):  # events belong to the current one
            event = paddle.device.Event()
        event.record(stream)
        _pending.append((event, used))
    except BaseException:
        paddle.device.synchronize(device)  # for nothing else tells when they are no longer in use
        raise
    forget_reached()
    return event


def forget_reached() -> None:
    while _pending and _pending[0][0].query():
        _pending.popleft()
