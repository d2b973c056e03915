"""The hub over TCP and its in-process twin do what every hub must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paddle_dist_ckpt.testing.hub_conformance import HubConformance
from test.control.groups import InProcessGroup, TcpGroup


class TestInProcessHub(HubConformance):
    @pytest.fixture
    def group(self) -> InProcessGroup:
        return InProcessGroup()


class TestTcpHub(HubConformance):
    @pytest.fixture
    def group(self) -> Iterator[TcpGroup]:
        made = TcpGroup()
        yield made
        made.close()
