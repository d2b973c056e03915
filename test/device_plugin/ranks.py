"""Ranks that have a test device each, in a world whose default backend is the device's own collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from test.device_plugin.build import NAME, environment
from test.ranks.pool import RankPool
from test.ranks.world import RankProcess, World

__all__ = ["DevicePool", "DeviceWorld", "rank_environment", "read_at_import"]

_START_SECONDS = 180.0
_DEVICES = 4  # that every process sees, however many ranks there are


def rank_environment(rank: int, size: int, **options: Any) -> dict[str, str]:
    """Return the variables that give rank ``rank`` of ``size`` the device of its number; options of `environment`."""
    assert size <= _DEVICES
    return {
        **environment(devices=_DEVICES, **options),
        "PADDLE_DISTRI_BACKEND": "xccl",
        "PADDLE_XCCL_BACKEND": NAME,
        f"FLAGS_selected_{NAME}s": str(rank),
    }


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """Return those of a rank's variables that are read when Paddle is imported; the others when a device is used."""
    names = ("CUSTOM_DEVICE_ROOT", "TEST_DEVICE_COUNT", "TEST_DEVICE_NO_ALL_TO_ALL", "TEST_DEVICE_NO_KERNELS")
    return {name: env[name] for name in names}


class DeviceWorld(World):
    """A `World` whose ranks have a device each."""

    def __init__(self, size: int, **options: Any) -> None:
        self._size = size
        self._options = options
        super().__init__(size, at_import=read_at_import(rank_environment(0, size, **options)))

    def _start(self, rank: int, arguments: list[str], env: Mapping[str, str]) -> RankProcess:
        ours = rank_environment(rank, self._size, **self._options)
        return super()._start(rank, arguments, {**env, **ours})


class DevicePool(RankPool):
    """A `RankPool` whose ranks have a device each. They have no groups but the world, and start anew after an error."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(size)
        self._options = options

    def _checked_world(self) -> World:
        if self._suspect:
            self.close()
        return super()._checked_world()

    def _started_world(self) -> World:
        self._world = DeviceWorld(self.size, **self._options)
        self._replies(self._world, list(range(self.size)), "start", _START_SECONDS)
        return self._world
