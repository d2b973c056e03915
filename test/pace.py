"""How fast the machine is just now, for tests that bound processor time."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

__all__ = ["check_all_depths", "slowness"]

_USUAL = 0.01
"""Seconds of :func:`_work` on the machine for which the bounds were chosen."""


def slowness() -> float:
    """How many times as long as usual something takes, 1 at the least: on another machine, or beside other work, which
    takes the processor's caches. Of nine moments the third slowest says it, for the speed of some machines changes."""
    found = []
    for _ in range(9):
        start = time.process_time()
        _work()
        found.append(time.process_time() - start)
    return max(1.0, sorted(found)[-3] / _USUAL)


def _work() -> None:
    rows = [{"key": f"model.layers.{i}.weight", "shape": [i, i + 1]} for i in range(3000)]
    back = json.loads(json.dumps(rows))
    assert sum(len(row["key"].split(".")) for row in back) == 12_000


def _seconds(work: Callable[[], object], depth: int) -> float:
    """The processor time that work takes when it is called at a depth."""
    if depth:
        return _seconds(work, depth - 1)
    start = time.process_time()
    work()
    return time.process_time() - start


def check_all_depths(work: Callable[[], object], step: int = 5) -> None:
    """Assert that work takes about as long at all depths of its caller: see :mod:`paddle_dist_ckpt.core.frames`."""
    usual = statistics.median(_seconds(work, depth) for depth in range(0, 150, 5))
    for depth in range(0, 150, step):
        times = (_seconds(work, depth) for _ in range(10))
        assert any(seconds < 3 * usual for seconds in times), depth
