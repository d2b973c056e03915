"""Small tensors on a device are copied together, strided ones by way of its memory: copies and bytes are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.device_plugin import build
from test.device_plugin import cases_packs as cases
from test.device_plugin.ranks import DevicePool
from test.paddle.versions import EMPTY_CACHE, KEPT_DTYPES, lacks
from test.strategies import some

pytestmark = pytest.mark.skipif(build.reason_to_skip() is not None, reason=str(build.reason_to_skip()))

MIB = 1 << 20
_ALONE = (
    3 * (len(cases.SHAPES) - 1) + 1
)  # of the type without kernels, as one of the shapes is empty; and the large one


def test_small_tensors_of_all_kinds_are_copied_together(devices: DevicePool, tmp_path: Path) -> None:
    ((count, nbytes, copies),) = devices.run(cases.small_tensors, str(tmp_path), ranks=1)
    assert count > 150
    for calls, copied in copies:
        assert copied == nbytes
        assert calls <= len(cases.DTYPES) + _ALONE + 3  # and the edges of windows and of pieces


def test_many_tensors_take_few_copies(devices: DevicePool, tmp_path: Path) -> None:
    (found,) = devices.run(cases.calls_of_many, str(tmp_path), 2500, ranks=1)
    assert [copied for _, copied in found] == [2500 * 1024] * 3
    assert max(calls for calls, _ in found) <= 8


def test_groups_are_read_as_they_stand_in_files(devices: DevicePool, tmp_path: Path) -> None:
    (reads,) = devices.run(cases.reads_of_groups, str(tmp_path), 1000, 256 << 10, ranks=1)
    assert reads < 50  # of groups of 64 tensors


@pytest.mark.parametrize(
    ("count", "elements", "staging_bytes"),
    [(60, 32 << 10, MIB), (2000, 256, MIB), (2000, 250, MIB), (600, 16_001, 64 * MIB)],
    ids=["large", "together", "apart", "more than may be under way"],
)
def test_memory_of_groups_is_used_again_only_when_they_have_arrived(
    devices: DevicePool, tmp_path: Path, count: int, elements: int, staging_bytes: int
) -> None:
    arguments = str(tmp_path), count, elements, staging_bytes, 0.3
    (wrong,) = devices.run(cases.load_from_pinned_memory, *arguments, ranks=1)
    assert wrong == []


def test_without_kernels_each_is_copied_by_itself(devices: DevicePool, tmp_path: Path) -> None:
    (copies,) = devices.run(cases.without_kernels, str(tmp_path), ranks=1)
    assert min(calls for calls, _ in copies) >= 150


@pytest.mark.parametrize("operation", ["concat", "split"])
def test_where_a_pack_fails_each_is_copied_by_itself(devices: DevicePool, tmp_path: Path, operation: str) -> None:
    (said,) = devices.run(cases.with_failing_kernels, str(tmp_path), operation, ranks=1)
    (line,) = said
    assert "one by one" in line
    assert "no room for it" in line


def test_what_is_copied_to_is_kept_where_a_pack_fails_after_that(devices: DevicePool) -> None:
    (found,) = devices.run(cases.kept_by_a_failing_pack, 20, ranks=1)
    assert found == ([True], [False], True)


def test_no_copy_is_under_way_where_no_event_can_be_recorded(devices: DevicePool) -> None:
    assert devices.run(cases.copied_when_no_event_is_recorded, ranks=1) == [[7]]


def test_what_is_copied_to_is_kept_where_an_interrupt_comes_behind_its_event(devices: DevicePool) -> None:
    assert devices.run(cases.kept_where_earlier_events_cannot_be_asked, ranks=1) == [(True, [7])]


def test_a_pack_that_cannot_wait_for_the_computations(devices: DevicePool, tmp_path: Path) -> None:
    assert devices.run(cases.queued_before_a_failing_wait, str(tmp_path), ranks=1) == [[2.0]]


def test_copies_of_two_devices_by_two_threads(devices: DevicePool) -> None:
    (found,) = devices.run(cases.two_devices_by_two_threads, ranks=1)
    assert found == ([f"{build.NAME}:0"], True)


def test_tensors_are_made_on_ones_own_device_beside_copies_of_another(devices: DevicePool, tmp_path: Path) -> None:
    (found,) = devices.run(cases.made_beside_copies_of_another_device, str(tmp_path), ranks=1)
    assert found == [f"Place({build.NAME}:0)", "[1.0, 1.0, 1.0]"]


def test_a_tensor_never_moves_to_the_host(devices: DevicePool, tmp_path: Path) -> None:
    (places,) = devices.run(cases.with_kernels_of_the_host, str(tmp_path), ranks=1)
    assert len(places) == 4
    assert all(build.NAME in place for place in places)


@pytest.mark.parametrize(
    ("shapes", "views"),
    some(
        [
            ([(7,)] * 600, 0),
            ([(7,), (3, 4)] * 300, 300),
            ([(n % 3 + 1, 4) for n in range(600)], 0),
            ([(3, 4)] * 600, 0),
        ],
        2,
    ),
)
def test_small_tensors_are_saved_with_few_views_and_loaded_without(
    devices: DevicePool, tmp_path: Path, shapes: list[tuple[int, ...]], views: int
) -> None:
    ((in_save, in_load, parts),) = devices.run(cases.views_and_parts, str(tmp_path), shapes, ranks=1)
    assert (in_save, in_load) == (views, 0)
    assert parts == 256


@lacks(KEPT_DTYPES, "makes a dtype for each that asks")
def test_tensors_here_and_there_are_told_apart_and_looked_at_together(devices: DevicePool, tmp_path: Path) -> None:
    ((alone, places),) = devices.run(cases.beside_each_other, str(tmp_path), 2000, ranks=1)
    assert alone <= 512, "those of the first few hundred, among which neither kind was known"
    assert [build.NAME in place for place in places] == [i % 2 == 0 for i in range(2000)]


@lacks(EMPTY_CACHE, "cannot free cached memory of a device")
def test_a_transposed_tensor_is_copied_once(devices: DevicePool, tmp_path: Path) -> None:
    ((nbytes, copied, peaks),) = devices.run(cases.transposed, str(tmp_path), 2500, 4100, ranks=1)
    assert copied == [nbytes] * 3
    assert max(peaks) <= 28 << 20 < nbytes


def test_small_tensors_are_compared_together(devices: DevicePool, tmp_path: Path) -> None:
    for calls, copied in devices.run(cases.compared_among_ranks, str(tmp_path), 400):
        assert calls <= 4
        assert 400 * 256 <= copied <= 2 * 400 * 256
