"""One rank with a test device, which copies, saves and loads. See :mod:`.worker`."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.worker import WORLD_SIZE, Worker, reset_peak_memory, serve, used_memory
from test.device_plugin import control
from test.device_plugin.ranks import rank_environment

__all__ = ["DeviceWorker"]

_PART_BYTES = 2 << 20
_IN_FLIGHT = 2  # so that the link carries one part while the one before is put into its place
_DEVICE_BYTES = 2 << 30


class DeviceWorker(Worker):
    """Does the commands, each a method with the command's name; ``build`` and :meth:`prepare` come first.

    Args:
        peer: Name of the peer.
        rank: This process's rank.
        barrier: Connected to the other rank.
    """

    def __init__(self, peer: str, rank: int, barrier: socket.socket) -> None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[rank::WORLD_SIZE])
        os.environ.update(rank_environment(rank, WORLD_SIZE, memory=_DEVICE_BYTES))  # Paddle is imported only now
        super().__init__(peer, rank, barrier)
        self._copiers = ThreadPoolExecutor(_IN_FLIGHT)
        self._buffer = np.empty(0, np.uint8)

    def prepare(self, path: str) -> int:
        """Make a twin of the state in host memory, memory to copy to, and what connects the ranks.

        Args:
            path: Where to save next to nothing, once.

        Returns:
            The bytes that this rank has.
        """
        from benchmark.peers.ours_device import copied_to_host

        self._specs["host"] = self._specs["same"]
        self._states["host"] = copied_to_host(self._states["same"])
        self._buffer = np.ones(sum(nbytes for _, nbytes in self._memory()), np.uint8)
        self._peer.save({"step": 1}, Path(path))
        return len(self._buffer)

    def save_first(self, path: str) -> None:
        """Save in the background, and have the state's values gone as soon as the call returns."""
        pending = self._save_later(Path(path))
        self.zero("same")
        pending.result()

    def measure(self, work: str, path: str, speed: float) -> dict[str, float]:
        """Do something once.

        Args:
            work: One of the names in :meth:`_works`.
            path: The folder, for saves and loads.
            speed: Of copies between host and device, each way, in bytes per second; 0 for no limit.

        Returns:
            ``seconds``; ``cpu``, the seconds of this process on its core; ``calls`` and ``bytes`` of the library's
            copies between host and device.
        """
        act = self._works(Path(path))[work]
        gc.collect()
        control.set_speed(speed)
        control.reset()
        self._meet()
        start, cpu = time.perf_counter(), time.process_time()
        pending = act()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        copies = [n for name, n in control.counts().items() if name.startswith(("memory_copy", "async_memory_copy"))]
        if work == "stall":
            pending.result()
        return {
            "seconds": seconds,
            "cpu": cpu,
            "calls": sum(count.calls for count in copies),
            "bytes": sum(count.bytes for count in copies),
        }

    def peak(self, work: str, path: str) -> dict[str, int]:
        """Do something once.

        Returns:
            The most bytes beside what there was before: ``host`` and ``device``. This device's memory is the host's,
            so what is taken of it counts as both.
        """
        import paddle

        act = self._works(Path(path))[work]
        gc.collect()
        paddle.device.empty_cache()
        control.set_speed(0)
        control.reset()
        on_device = control.memory(self._rank).bytes
        on_host = reset_peak_memory()["VmRSS"]
        self._meet()
        act()
        return {"host": used_memory()["VmHWM"] - on_host, "device": control.memory(self._rank).peak - on_device}

    def _works(self, path: Path) -> dict[str, Callable[[], Any]]:
        same, host = self._states["same"], self._states["host"]
        return {
            "write": lambda: self._peer.save(host, path),
            "copy": lambda: self._copy(control.TO_HOST),
            "save": lambda: self._peer.save(same, path),
            "stall": lambda: self._save_later(path),
            "read": lambda: self._peer.load(host, path),
            "copy back": lambda: self._copy(control.TO_DEVICE),
            "load": lambda: self._peer.load(same, path),
            "exchange": lambda: self._exchange(path),
        }

    def _save_later(self, path: Path) -> Any:
        import paddle_dist_ckpt

        return paddle_dist_ckpt.save_state_dict(self._states["same"], path, async_save=True)

    def _exchange(self, path: Path) -> None:
        """Load parts that are cut the other way, so that ranks read for each other."""
        import paddle_dist_ckpt

        options = paddle_dist_ckpt.LoadOptions(exchange="always")
        paddle_dist_ckpt.load_state_dict(self._states["swapped"], path, options=options)

    def _copy(self, kind: int) -> None:
        """Copy all between the device and the buffer, a part after the other, with some under way at once."""
        parts = list(self._parts())

        def some(first: int) -> None:
            for host, device, nbytes in parts[first::_IN_FLIGHT]:
                to, source = (host, device) if kind == control.TO_HOST else (device, host)
                control.copy(to, source, nbytes, kind)

        list(self._copiers.map(some, range(_IN_FLIGHT)))

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        """Addresses on the host and on the device, and bytes, of each part."""
        host = self._buffer.ctypes.data
        for device, nbytes in self._memory():
            for start in range(0, nbytes, _PART_BYTES):
                yield host + start, device + start, min(_PART_BYTES, nbytes - start)
            host += nbytes

    def _memory(self) -> Iterator[tuple[int, int]]:
        """Address and bytes of each of this rank's tensors on its device."""
        for tensor in self._states["same"].values():
            local = tensor._local_value()
            yield local.data_ptr(), int(np.prod(local.shape)) * local.element_size()


if __name__ == "__main__":
    serve(DeviceWorker)
