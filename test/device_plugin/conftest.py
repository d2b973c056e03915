"""Fixtures that the tests on the test device share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from test.device_plugin.ranks import DevicePool


@pytest.fixture(scope="session")
def devices() -> Iterator[DevicePool]:
    """Four warm ranks with a device each, which start when the first test calls ``devices.run``."""
    with DevicePool(4) as ranks:
        yield ranks
