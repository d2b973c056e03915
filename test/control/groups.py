"""Groups of ranks over TCP or in process, for the conformance suite."""

from __future__ import annotations

import threading

from paddle_dist_ckpt.control import TcpHub
from paddle_dist_ckpt.core.protocols import ControlHub
from paddle_dist_ckpt.testing.hub_conformance.cases import RANKS
from paddle_dist_ckpt.testing.in_process import InProcessWorld


class Store:
    """A BootstrapStore among threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(key)
            return self._values[key]


class InProcessGroup:
    """Implements HubGroup with the in-process twin."""

    def __init__(self) -> None:
        self._world = InProcessWorld(RANKS)

    def hub(self, rank: int) -> ControlHub:
        return self._world.hub(rank)

    def cut(self, rank: int) -> None:
        self._world.disconnect(rank)


class TcpGroup:
    """Implements HubGroup over TCP."""

    def __init__(self) -> None:
        store = Store()
        self._hubs = {rank: self._make(rank, store) for rank in range(RANKS)}

    def _make(self, rank: int, store: Store) -> TcpHub:
        return TcpHub(rank, range(RANKS), 0, store, "k", bind_host="127.0.0.1")

    def hub(self, rank: int) -> ControlHub:
        return self._hubs[rank]

    def cut(self, rank: int) -> None:
        self._hubs[rank].close()

    def close(self) -> None:
        for hub in self._hubs.values():
            hub.close()
