"""Every layout of up to four ranks loads what every other one has saved, with tensors on devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from paddle_dist_ckpt import load_merged_state_dict
from test.device_plugin import build
from test.device_plugin import cases_conversions as cases
from test.device_plugin.ranks import DevicePool
from test.paddle import cases_recipes
from test.paddle.layouts import LAYOUTS
from test.paddle.test_conversions import SAMPLE, _hand_on
from test.paddle.versions import LATER_THAN_3_0, lacks
from test.strategies import some

pytestmark = pytest.mark.skipif(build.reason_to_skip() is not None, reason=str(build.reason_to_skip()))

RANKS = 4
NAMES = [name for name, layout in LAYOUTS.items() if layout.ranks <= RANKS]
PAIRS = [(source, destination) for source, destination in SAMPLE if {source, destination} <= set(NAMES)]
BYTES_PER_SECOND = 200_000.0  # so that copies of a kilobyte take longer than what the host does meanwhile
Saved = Callable[..., Path]


@pytest.fixture
def ready(devices: DevicePool) -> DevicePool:
    """The ranks, with groups of the device's backend."""
    devices.run(cases.use_groups, "xccl")
    return devices


@pytest.fixture(params=["xccl", "gloo"])
def either(devices: DevicePool, request: pytest.FixtureRequest) -> DevicePool:
    """The ranks, with groups of the device's backend, or gloo's. That of the group of all four is the device's."""
    devices.run(cases.use_groups, request.param)
    return devices


@pytest.fixture(scope="module")
def saved(devices: DevicePool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Gives the folder of a checkpoint that a layout has saved from somewhere. Each saves once."""
    folders: dict[tuple[str, str], Path] = {}

    def folder(source: str, where: str = "device") -> Path:
        if (where, source) not in folders:
            path = tmp_path_factory.mktemp(source)
            devices.run(cases.save, where, source, str(path), ranks=LAYOUTS[source].ranks)
            folders[where, source] = path
        return folders[where, source]

    return folder


def assert_loads(
    pool: DevicePool, destination: str, path: Path, exchange: str, where: str = "device", called: str = "device"
) -> None:
    ranks = LAYOUTS[destination].ranks
    assert pool.run(cases.load, where, destination, str(path), exchange, False, called, ranks=ranks) == [[]] * ranks


# A tenth of all pairs, in which each layout comes on either side; more of them are tried on the host.
@pytest.mark.parametrize(("source", "destination"), some(itertools.product(NAMES, NAMES), len(NAMES) ** 2 // 10))
def test_every_pair(ready: DevicePool, saved: Saved, source: str, destination: str) -> None:
    assert_loads(ready, destination, saved(source), "auto")


@pytest.mark.parametrize(("pair", "exchange"), some(itertools.product(PAIRS, ["always", "never"]), 4), ids=str)
def test_exchange(either: DevicePool, saved: Saved, pair: tuple[str, str], exchange: str) -> None:
    source, destination = pair
    assert_loads(either, destination, saved(source), exchange)


@pytest.mark.parametrize(("pair", "most"), some(itertools.product(some(PAIRS, 3), [1, 8]), 3), ids=str)
def test_an_exchange_in_parts_adds_to_what_is_on_the_device(
    ready: DevicePool, saved: Saved, pair: tuple[str, str], most: int
) -> None:
    source, destination = pair
    ranks = LAYOUTS[destination].ranks
    found = ready.run(cases.load_in_parts, destination, str(saved(source)), most, ranks=ranks)
    assert found == [[]] * ranks


@pytest.mark.parametrize(("source", "destination"), some(PAIRS, 3))
def test_every_rank_has_a_disk_of_its_own(either: DevicePool, tmp_path: Path, source: str, destination: str) -> None:
    either.run(cases.save, "device", source, str(tmp_path), True, ranks=LAYOUTS[source].ranks)
    assert [path.parent.name for path in tmp_path.glob("*/*.metadata")] == ["rank0"]
    _hand_on(tmp_path, LAYOUTS[source].ranks, LAYOUTS[destination].ranks)
    ranks = LAYOUTS[destination].ranks
    assert either.run(cases.load, "device", destination, str(tmp_path), "auto", True, ranks=ranks) == [[]] * ranks


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "exchange"),
    some(
        [
            (*places, exchange)
            for places in [("device", "host"), ("host", "device"), ("either", "device"), ("host", "either")]
            for exchange in ["auto", "always"]
        ],
        4,
    ),
)
def test_between_host_and_device(
    either: DevicePool, saved: Saved, saved_on: str, loaded_on: str, exchange: str
) -> None:
    for source, destination in some(PAIRS[::2], 1):
        assert_loads(either, destination, saved(source, saved_on), exchange, loaded_on)


@pytest.mark.parametrize("exchange", ["auto", "always"])
@pytest.mark.parametrize("where", ["device", "host"])
def test_the_host_is_the_current_device(either: DevicePool, tmp_path: Path, where: str, exchange: str) -> None:
    """Tensors are where they are, whatever Paddle's current device is."""
    for source, destination in some(PAIRS[-2:], 1):
        path, ranks = str(tmp_path / source), LAYOUTS[source].ranks
        either.run(cases.save, "device", source, path, False, "host", ranks=ranks)
        assert_loads(either, destination, tmp_path / source, exchange, where, "host")


@pytest.mark.parametrize("exchange", ["auto", "always"])
def test_slow_copies(either: DevicePool, tmp_path: Path, exchange: str) -> None:
    """Nothing is read before it has been copied, and nothing is overwritten before."""
    for source, destination in some(PAIRS[-2:], 1):
        path = str(tmp_path / source)
        either.run(cases.save_slowly, source, path, BYTES_PER_SECOND, ranks=LAYOUTS[source].ranks)
        ranks = LAYOUTS[destination].ranks
        found = either.run(cases.load_slowly, destination, path, exchange, BYTES_PER_SECOND, ranks=ranks)
        assert found == [[]] * ranks


@pytest.mark.parametrize("source", NAMES)
def test_merged(ready: DevicePool, saved: Saved, source: str) -> None:
    for offload, place in ((False, "device"), (True, "host")):
        assert ready.run(cases.load_merged, str(saved(source)), offload, ranks=1) == [([], {place})]
    assert cases.merged_problems(load_merged_state_dict(saved(source))) == []


@pytest.mark.parametrize("aoa", [False, pytest.param(True, marks=lacks(LATER_THAN_3_0, "has no aoa_config"))])
@pytest.mark.parametrize(("dimension", "exchange"), [(0, "never"), (1, "never"), (0, "always"), (1, "always")])
def test_what_is_made_of_others(ready: DevicePool, tmp_path: Path, dimension: int, exchange: str, aoa: bool) -> None:
    arguments = (str(tmp_path), 2, dimension, exchange, aoa)
    assert ready.run(cases_recipes.load_what_is_made, *arguments, ranks=2) == [[], []]
