"""Checkpoints of tensors in a device's memory, on ranks whose collectives are the device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import export, load_merged_state_dict
from test import strategies
from test.device_plugin import build
from test.device_plugin import cases_checkpoints as cases
from test.device_plugin.ranks import DevicePool
from test.paddle.versions import EMPTY_CACHE, lacks

pytestmark = pytest.mark.skipif(build.reason_to_skip() is not None, reason=str(build.reason_to_skip()))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"staging_bytes": 2500},
    {"exchange": "always"},
    {"exchange": "always", "staging_bytes": 2500},
]


SAVES = [("rows", False), ("copies", False), ("grid", False), ("grid", True)]


@pytest.mark.parametrize(("layout", "in_background"), strategies.some(SAVES, 2))
def test_any_layout_to_any_other(devices: DevicePool, tmp_path: Path, layout: str, in_background: bool) -> None:
    """Each target with one of the options, in the next save with another one; with all of them if ``--long``."""
    devices.run(cases.save, str(tmp_path), layout, in_background)
    for i, target in enumerate(cases.LAYOUTS, SAVES.index((layout, in_background))):
        for options in OPTIONS if strategies.long_run else [OPTIONS[i % 4]]:
            devices.run(cases.load, str(tmp_path), target, options)
    merged = load_merged_state_dict(tmp_path)
    assert np.array_equal(merged["matrix"].numpy(), cases.whole("matrix"))
    assert merged["step"] == 7


@pytest.mark.parametrize("format", ["paddle", "safetensors", "pdparams"])
def test_other_formats_to_any_layout(devices: DevicePool, tmp_path: Path, format: str) -> None:
    devices.run(cases.save, str(tmp_path / "own"), "rows", False)
    out = tmp_path / ("out.pdparams" if format == "pdparams" else "out")
    export(tmp_path / "own", out, format)
    for options in strategies.some(OPTIONS, 2):
        found = devices.run(cases.load_tensors, str(out), "grid", options)
        assert any(received for _, received in found) == (options.get("exchange") == "always")


def test_addends_are_added_up(devices: DevicePool, tmp_path: Path) -> None:
    devices.run(cases.save_addends, str(tmp_path))
    assert np.array_equal(load_merged_state_dict(tmp_path)["sum"].numpy(), cases.whole("matrix") * 10)


@pytest.mark.parametrize("own_group", [False, True])
def test_offload_exchanges_on_the_host(tmp_path: Path, own_group: bool) -> None:
    with DevicePool(2) as pool:
        pool.run(cases.save, str(tmp_path), "pair", False)
        for options in OPTIONS[2:]:
            found = pool.run(cases.load_offloaded, str(tmp_path), own_group, options)
            assert [used for used, _ in found] == [0, 0]
            assert any(received for _, received in found)


@lacks(EMPTY_CACHE, "cannot free cached memory of a device")
@pytest.mark.parametrize("staging_bytes", [256 << 20, 1 << 20])
def test_an_exchange_takes_little_memory_of_the_device(devices: DevicePool, tmp_path: Path, staging_bytes: int) -> None:
    for peak, calls, received in devices.run(cases.exchange_memory, str(tmp_path), staging_bytes):
        assert peak <= min(64 << 20, staging_bytes)
        assert calls >= (1 if staging_bytes > 8 << 20 else 8)
        assert received == 3 << 20


def test_an_exchange_where_most_ranks_send_nothing(devices: DevicePool) -> None:
    found = devices.run(cases.exchange_few, 100)
    assert found == [(bytes(range(100)) if rank == 2 else b"", 1) for rank in range(4)]


def test_rounds_bound_what_a_rank_reads_for_itself(devices: DevicePool, tmp_path: Path) -> None:
    for memory, received in devices.run(cases.host_memory_of_own_part, str(tmp_path), 64 << 20):
        assert memory < 72 << 20  # of 96 MiB that it reads
        assert received == 0


@lacks(EMPTY_CACHE, "cannot free cached memory of a device")
def test_a_backend_without_all_to_all(tmp_path: Path) -> None:
    with DevicePool(4, all_to_all=False) as pool:
        for _, calls, received in pool.run(cases.exchange_memory, str(tmp_path / "large"), 256 << 20):
            assert calls == 0
            assert received == 3 << 20
        pool.run(cases.save, str(tmp_path), "grid", False)
        for options in OPTIONS[2:]:
            pool.run(cases.load, str(tmp_path), "other", options)


def test_tensors_of_any_strides(devices: DevicePool, tmp_path: Path) -> None:
    (expected,) = devices.run(cases.save_strided, str(tmp_path), ranks=1)
    merged = load_merged_state_dict(tmp_path)
    assert expected.keys() == merged.keys()
    assert all(np.array_equal(merged[name].numpy(), array) for name, array in expected.items())


def test_whole_tensors_are_made_where_they_are_wanted(devices: DevicePool, tmp_path: Path) -> None:
    (found,) = devices.run(cases.load_to_places, str(tmp_path), ranks=1)
    assert all(found.values()), found


@pytest.mark.parametrize("pinned", [False, True])
def test_every_byte_is_copied_once(devices: DevicePool, tmp_path: Path, pinned: bool) -> None:
    (found,) = devices.run(cases.copied_bytes, str(tmp_path), pinned, ranks=1)
    assert {name: more for name, (more, _) in found.items()} == {"save": 0, "async": 0, "load": 0}
    assert all((pageable == 0) is pinned for _, pageable in found.values())


def test_a_snapshot_does_not_hold_up_the_device(devices: DevicePool, tmp_path: Path) -> None:
    assert devices.run(cases.computes_beside_a_snapshot, str(tmp_path), ranks=1) == [(True, True)]


def test_host_memory_is_bounded(devices: DevicePool, tmp_path: Path) -> None:
    for found in devices.run(cases.peak_of_host, str(tmp_path), 400 << 20, ranks=1):
        assert max(found) < 100 << 20


def test_tensors_of_another_length(devices: DevicePool, tmp_path: Path) -> None:
    stored = cases.whole("matrix")
    for found in devices.run(cases.load_resized, str(tmp_path)):
        for array in found:
            expected = np.full(array.shape, 5, np.float32)
            rows, columns = (min(pair) for pair in zip(array.shape, stored.shape, strict=True))
            expected[:rows, :columns] = stored[:rows, :columns]
            assert np.array_equal(array, expected)
        assert len(found) == 4
