"""This library, with its default options, and a state on the test device. See `test/device_plugin`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

import paddle_dist_ckpt
from benchmark.peers.base import Numbers
from benchmark.peers.on_paddle import Ours, State
from benchmark.states import Array
from test.device_plugin import control
from test.device_plugin.build import NAME

__all__ = ["OursOnDevice"]

_PART_BYTES = 2 << 20
_IN_FLIGHT = 2  # so that the link carries one part while the one before is put into its place


class OursOnDevice(Ours):
    """This library with tensors on a device; the ranks are joined over the device's own collectives."""

    def __init__(self) -> None:
        self._copiers = ThreadPoolExecutor(_IN_FLIGHT)
        self._buffer = np.empty(0, np.uint8)
        self._held = 0

    def setup(self, rank: int, world_size: int) -> None:
        self.device = f"{NAME}:{rank}"
        super().setup(rank, world_size)

    def prepare(self, state: State, path: Path) -> Numbers:
        """Make memory to copy to, and what connects the ranks; returns the bytes that this rank has."""
        self._buffer = np.ones(sum(nbytes for _, nbytes in _memory(state)), np.uint8)
        paddle_dist_ckpt.save_state_dict({"step": 1}, path)
        return {"bytes": len(self._buffer)}

    def local_tensor(self, array: Array) -> paddle.Tensor:
        """On the device."""
        host = paddle.to_tensor(array, place=paddle.CPUPlace())
        return host._copy_to(paddle.framework._current_expected_place(), True)

    def local_arrays(self, state: State) -> dict[str, Array]:
        """Copies of this rank's parts."""
        return {name: np.asarray(tensor._local_value().cpu().numpy()) for name, tensor in state.items()}

    def zero(self, state: State) -> None:
        """Set all of it to zero, where it is."""
        for tensor in state.values():
            local = tensor._local_value()
            local.copy_(paddle.to_tensor(np.zeros(local.shape, np.float32), place=paddle.CPUPlace()), True)

    def copied_to_host(self, state: State) -> State:
        """The same state in host memory."""
        return {
            name: dtensor_from_local(tensor._local_value().cpu(), tensor.process_mesh, tensor.placements)
            for name, tensor in state.items()
        }

    def exchange(self, state: State, path: Path) -> None:
        """Load with ranks that read for each other."""
        paddle_dist_ckpt.load_state_dict(state, path, options=paddle_dist_ckpt.LoadOptions(exchange="always"))

    def copy_to_host(self, state: State, path: Path) -> None:
        """Copy all from the device to a buffer."""
        self._copy(state, control.TO_HOST)

    def copy_to_device(self, state: State, path: Path) -> None:
        """Copy all from the buffer to the device."""
        self._copy(state, control.TO_DEVICE)

    def begin(self, memory: bool, **options: Any) -> None:
        """Limit copies to ``speed`` bytes per second each way, 0 for no limit, and count from now on."""
        if memory:
            paddle.device.empty_cache()
        control.set_speed(options["speed"])
        control.reset()
        self._held = control.memory(dist.get_rank()).bytes

    def end(self) -> Numbers:
        """The library's copies between host and device, and the most memory of the device."""
        copies = [n for name, n in control.counts().items() if name.startswith(("memory_copy", "async_memory_copy"))]
        return {
            "calls": sum(count.calls for count in copies),
            "bytes": sum(count.bytes for count in copies),
            "device_peak": control.memory(dist.get_rank()).peak - self._held,
        }

    def _copy(self, state: State, kind: int) -> None:
        """Copy a part after the other, with some under way at once."""
        parts = list(self._parts(state))

        def some(first: int) -> None:
            for host, device, nbytes in parts[first::_IN_FLIGHT]:
                to, source = (host, device) if kind == control.TO_HOST else (device, host)
                control.copy(to, source, nbytes, kind)

        list(self._copiers.map(some, range(_IN_FLIGHT)))

    def _parts(self, state: State) -> Iterator[tuple[int, int, int]]:
        """Addresses on the host and on the device, and bytes, of each part."""
        host = self._buffer.ctypes.data
        for device, nbytes in _memory(state):
            for start in range(0, nbytes, _PART_BYTES):
                yield host + start, device + start, min(_PART_BYTES, nbytes - start)
            host += nbytes


def _memory(state: State) -> Iterator[tuple[int, int]]:
    """Address and bytes of each of this rank's tensors on its device."""
    for tensor in state.values():
        local = tensor._local_value()
        yield local.data_ptr(), int(np.prod(local.shape)) * local.element_size()
