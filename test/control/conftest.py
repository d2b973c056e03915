"""What the tests of several ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from test.control.groups import Group, InProcessGroup, ZmqGroup


@pytest.fixture(params=[InProcessGroup, ZmqGroup], ids=["in_process", "zmq"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    made = request.param()
    yield made
    made.close()
