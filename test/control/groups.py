"""Groups of ranks as threads, over TCP or in process, and calls that all of them make."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from paddle_dist_ckpt.control import ZmqHub
from paddle_dist_ckpt.testing.in_process import InProcessWorld

RANKS = 4
LONG = 200.0
"""A timeout that no test may wait for, nor for a tenth of it: what is noticed then was noticed at once."""
SHORT = 0.5
AT_ONCE = 5.0


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


class Group(Protocol):
    """Ranks as threads, each with a hub."""

    abandoned: list[int]

    def hub(self, rank: int) -> Any: ...

    def cut(self, rank: int) -> None:
        """End a rank's connection as its death would."""
        ...

    def close(self) -> None: ...


class InProcessGroup:
    def __init__(self) -> None:
        self.abandoned: list[int] = []
        self._world = InProcessWorld(RANKS)

    def hub(self, rank: int) -> Any:
        return self._world.hub(rank, on_abandon=lambda: self.abandoned.append(rank))

    def cut(self, rank: int) -> None:
        self._world.disconnect(rank)

    def close(self) -> None: ...


class ZmqGroup:
    def __init__(self) -> None:
        self.abandoned: list[int] = []
        store = Store()
        self._hubs = {rank: self._make(rank, store) for rank in range(RANKS)}

    def _make(self, rank: int, store: Store) -> ZmqHub:
        return ZmqHub(
            rank, range(RANKS), 0, store, "k", bind_host="127.0.0.1", on_abandon=lambda: self.abandoned.append(rank)
        )

    def hub(self, rank: int) -> Any:
        return self._hubs[rank]

    def cut(self, rank: int) -> None:
        self._hubs[rank].close()

    def close(self) -> None:
        for hub in self._hubs.values():
            hub.close()


def run(group: Group, work: Callable[[Any, int], object], ranks: Sequence[int] = range(RANKS)) -> dict[int, Any]:
    """Call ``work(hub, rank)`` on a thread per rank; returns what each returned or raised."""
    outcomes: dict[int, Any] = {}

    def body(rank: int) -> None:
        try:
            outcomes[rank] = work(group.hub(rank), rank)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(outcomes) == set(ranks), f"ranks {set(ranks) - set(outcomes)} hang"
    return outcomes


def echo(parts: Mapping[int, bytes]) -> Mapping[int, bytes]:
    return parts


def one_round(local: Callable[[int], bytes], timeout: float = LONG) -> Callable[[Any, int], bytes]:
    """A session of one round 'write', with ``local(rank)`` as what a rank does in it."""

    def work(hub: Any, rank: int) -> bytes:
        with hub.session("save", timeout) as session:
            return bytes(session.gather_scatter("write", lambda: local(rank), echo))

    return work


def own_number(rank: int) -> bytes:
    return str(rank).encode()


def assert_works(group: Group, ranks: Sequence[int] = range(RANKS)) -> None:
    """The next session succeeds."""
    assert run(group, one_round(own_number), ranks) == {rank: own_number(rank) for rank in ranks}


def raising(errors: Mapping[int, BaseException]) -> Callable[[int], bytes]:
    def local(rank: int) -> bytes:
        if rank in errors:
            raise errors[rank]
        return b""

    return local
