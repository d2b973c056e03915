"""Measures what small tensors, and transposed ones, on a device cost to save and to load.

    python -m benchmark.device_tensors [number of small tensors]

The device is the one that the tests build with g++ (test/device_plugin), in this process alone. Prints, of the best of
three, the time until a call returns, the processor's time of it, and what went over the link. Takes about 20 seconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from test.device_plugin.build import NAME, environment

_DEVICE_BYTES = 3 << 30
_SHAPE = (7680, 7812)  # 240 MB of float32
_REPEATS = 3


def _measured(work: Callable[[], Any], after: Callable[[Any], None]) -> tuple[float, float, dict[str, Any]]:
    """The least time until the call returned, with its processor time, and what the runtime counted."""
    import paddle

    from test.device_plugin import control

    found = []
    for _ in range(_REPEATS):
        paddle.device.synchronize()
        control.reset()
        start, cpu = time.perf_counter(), time.process_time()
        returned = work()
        found.append((time.perf_counter() - start, time.process_time() - cpu, dict(control.counts())))
        after(returned)
    return min(found, key=lambda one: one[1])


def _report(name: str, state: Mapping[str, Any], blank: Mapping[str, Any], folder: str) -> None:
    """Print a line for each of a save, the call of one in the background, and a load."""
    from paddle_dist_ckpt import LoadOptions, SaveOptions, load_state_dict, save_state_dict

    saving, loading = SaveOptions(no_dist=True, progress=False), LoadOptions(no_dist=True, progress=False)
    works: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "save": (lambda: save_state_dict(dict(state), folder, options=saving), lambda _: None),
        "call": (
            lambda: save_state_dict(dict(state), folder, options=saving, async_save=True),
            lambda pending: pending.result(),
        ),
        "load": (lambda: load_state_dict(dict(blank), folder, options=loading), lambda _: None),
    }
    for what, (work, after) in works.items():
        seconds, cpu, counts = _measured(work, after)
        copies = [counts[key] for key in ("async_memory_copy_d2h", "async_memory_copy_h2d") if key in counts]
        link = f"{sum(c.calls for c in copies):,} copies of {sum(c.bytes for c in copies) / 1e6:,.1f} MB in all"
        each = f", {cpu / len(state) * 1e6:.1f} us each" if len(state) > 1 else ""
        print(f"{name}: {what}: {seconds * 1e3:.0f} ms, {cpu * 1e3:.0f} ms of a processor{each}; {link}", flush=True)


def _main(count: int) -> None:
    import paddle

    paddle.set_device(f"{NAME}:0")
    small = {f"w{i}": paddle.full([256], i, "float32") for i in range(count)}
    on_host = {name: one.cpu() for name, one in small.items()}
    values = paddle.to_tensor(np.arange(np.prod(_SHAPE), dtype=np.float32).reshape(_SHAPE))
    with tempfile.TemporaryDirectory(dir=Path("/dev/shm") if Path("/dev/shm").is_dir() else None) as folder:
        _report(f"{count:,} of 1 KiB on the host", on_host, on_host, f"{folder}/host")
        _report(f"{count:,} of 1 KiB", small, {name: paddle.zeros([256]) for name in small}, f"{folder}/small")
        _report("240 MB contiguous", {"x": values}, {"x": paddle.zeros(_SHAPE)}, f"{folder}/contiguous")
        _report("240 MB transposed", {"x": values.t()}, {"x": paddle.zeros(_SHAPE).t()}, f"{folder}/transposed")


if __name__ == "__main__":
    if "CUSTOM_DEVICE_ROOT" not in os.environ:  # which Paddle reads when it is imported
        os.environ.update(environment(memory=_DEVICE_BYTES))
        os.execv(sys.executable, [sys.executable, "-m", "benchmark.device_tensors", *sys.argv[1:]])
    _main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
