"""Checkpoints of tensors in a device's memory, on ranks whose collectives are the device's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paddle_dist_ckpt import load_merged_state_dict
from test.device_plugin import build
from test.device_plugin import cases_checkpoints as cases
from test.device_plugin.ranks import DevicePool

pytestmark = pytest.mark.skipif(build.reason_to_skip() is not None, reason=str(build.reason_to_skip()))


@pytest.fixture(scope="module")
def devices() -> Iterator[DevicePool]:
    pool = DevicePool(4)
    yield pool
    pool.close()


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("layout", ["rows", "copies", "grid"])
def test_any_layout_to_any_other(devices: DevicePool, tmp_path: Path, layout: str, in_background: bool) -> None:
    devices.run(cases.save, str(tmp_path), layout, in_background)
    for target in cases.LAYOUTS:
        for options in ({}, {"exchange": "always"}, {"staging_bytes": 1000}):
            devices.run(cases.load, str(tmp_path), target, options)
    merged = load_merged_state_dict(tmp_path)
    assert np.array_equal(merged["matrix"].numpy(), cases.whole("matrix"))
    assert merged["step"] == 7


def test_addends_are_added_up(devices: DevicePool, tmp_path: Path) -> None:
    devices.run(cases.save_addends, str(tmp_path))
    assert np.array_equal(load_merged_state_dict(tmp_path)["sum"].numpy(), cases.whole("matrix") * 10)


def test_host_memory_is_bounded(devices: DevicePool, tmp_path: Path) -> None:
    for found in devices.run(cases.peak_of_host, str(tmp_path), 400 << 20, ranks=1):
        assert max(found) < 100 << 20
