"""Hubs over TCP for the tests here; lets pytest show what the hubs' conformance suite has compared."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

pytest.register_assert_rewrite("paddle_dist_ckpt.testing.hub_conformance")  # before anything imports it

from paddle_dist_ckpt.control import TcpHub  # noqa: E402
from test.control.tcp import Proxy, Relayed, Store, make  # noqa: E402


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def hubs(store: Store) -> Iterator[list[TcpHub]]:
    made = [make(0, store), make(1, store)]
    yield made
    for hub in reversed(made):
        hub.close()


@pytest.fixture
def relayed(store: Store, request: pytest.FixtureRequest) -> Iterator[Relayed]:
    """Two hubs, and the relay between them, which alters what goes over the first connections: as many as are asked."""
    coordinator = make(0, store)
    found = store.rendezvous()
    proxy = Proxy(found.endpoint)
    proxy.altered_connections = getattr(request, "param", 0)
    store.set("k", msgspec.msgpack.encode(msgspec.structs.replace(found, endpoint=proxy.endpoint)))
    hubs = [coordinator, make(1, store)]
    yield hubs, proxy
    for hub in reversed(hubs):
        hub.close()
    proxy.close()
