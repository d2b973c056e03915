"""Measures what Paddle takes to tell the attributes of many DistTensors, by which a save sees that none has changed.

    python -m benchmark.attributes [number of tensors]

A process alone with tensors on a mesh of one rank. Prints, of the best of seven, what reading and comparing each
attribute takes, and the sum. Takes about 10 seconds.
"""

from __future__ import annotations

import copy
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

_REPEATS = 7
_AT_ONCE = 256  # tensors of which an attribute is read before the next one is, as the library does
_GETTERS = ("process_mesh", "placements", "dtype", "shape", "_local_shape", "name")
_METHODS = ("data_ptr", "is_contiguous", "is_dist")


def _milliseconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def _compare(values: Sequence[Any], read: Callable[[Any], Any], expected: Sequence[Any]) -> None:
    for start in range(0, len(values), _AT_ONCE):
        assert list(map(read, values[start : start + _AT_ONCE])) == expected[start : start + _AT_ONCE]


def _kept(name: str, found: Any) -> Any:
    """What is compared: of what lies within a tensor, a copy, which stays valid."""
    if name == "placements":
        return list(map(copy.copy, found))
    return copy.copy(found) if name == "process_mesh" else found


def _main(count: int) -> None:
    import paddle
    import paddle.distributed as dist

    mesh = dist.ProcessMesh([0], dim_names=["x"])
    values = [dist.shard_tensor(paddle.zeros([8, 8]), mesh, [dist.Shard(0)]) for _ in range(count)]
    readers = {name: getattr(paddle.Tensor, name).__get__ for name in _GETTERS}
    readers |= {f"{name}()": getattr(paddle.Tensor, name) for name in _METHODS}
    total = 0.0
    for name, read in readers.items():
        expected = [_kept(name, read(value)) for value in values]
        found = _milliseconds(functools.partial(_compare, values, read, expected))
        total += found
        print(f"{name}: {found:.1f} ms, {found / count * 1e3:.2f} us each", flush=True)
    print(f"all of them: {total:.1f} ms")


if __name__ == "__main__":
    _main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
