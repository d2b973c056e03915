"""How fast the machine is just now, for tests that bound processor time."""

from __future__ import annotations

import json
import time

__all__ = ["slowness"]

_USUAL = 0.01
"""Seconds of :func:`_work` on the machine for which the bounds were chosen."""


def slowness() -> float:
    """How many times as long as usual something takes, 1 at the least: on another machine, or beside other work, which
    takes the processor's caches."""
    found = []
    for _ in range(5):
        start = time.process_time()
        _work()
        found.append(time.process_time() - start)
    return max(1.0, sorted(found)[2] / _USUAL)


def _work() -> None:
    rows = [{"key": f"model.layers.{i}.weight", "shape": [i, i + 1]} for i in range(3000)]
    back = json.loads(json.dumps(rows))
    assert sum(len(row["key"].split(".")) for row in back) == 12_000
