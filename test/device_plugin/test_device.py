"""The test device behaves as an accelerator: memory apart from the host's, asynchronous copies, streams and events."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.device_plugin import build
from test.device_plugin import cases_one as cases
from test.device_plugin.ranks import DevicePool
from test.ranks.remote import RankLostError
from test.waiting import until

_REASON = build.reason_to_skip()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=_REASON or "")

_DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
)


@pytest.fixture(scope="module")
def one() -> Iterator[DevicePool]:
    """A process with one device of 256 MiB."""
    with DevicePool(1, memory=256 << 20) as process:
        yield process


def test_tensors_are_on_the_device(one: DevicePool) -> None:
    assert one.run(cases.places) == [("test_device:0", "Place(test_device:0)")]


@pytest.mark.parametrize("access", ["read_device_memory", "write_device_memory"])
def test_memory_is_apart_from_the_hosts(access: str) -> None:
    with DevicePool(1) as process, pytest.raises(RankLostError, match="SIGSEGV"):
        process.run(getattr(cases, access))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_bytes_come_back_as_they_went(one: DevicePool, dtype: str) -> None:
    ((went, came),) = one.run(cases.there_and_back, dtype)
    assert len(went) == 384
    assert came == went


def test_model_trains_as_on_the_host(one: DevicePool) -> None:
    (expected,) = one.run(cases.training, "cpu", 4)
    (found,) = one.run(cases.training, "test_device:0", 4)
    assert expected == (found[0], ["Place(cpu)"])
    assert found[0][3] < found[0][0]
    assert found[1] == ["Place(test_device:0)"]


def test_calls_that_copies_come_down_to(one: DevicePool) -> None:
    (seen,) = one.run(cases.calls_of_copies)
    copies = {name: {call: n for call, n in calls.items() if "copy" in call} for name, calls in seen.items()}
    whole, part = (1, 4096), (1, 16)
    assert copies == {
        "cpu": {"memory_copy_d2h": whole},
        "numpy": {"memory_copy_d2h": whole},
        "to_tensor": {"memory_copy_h2d": whole},
        "to host, later": {"async_memory_copy_d2h": whole, "pageable_async_memory_copy_d2h": whole},
        "to device, later": {"async_memory_copy_h2d": whole, "pageable_async_memory_copy_h2d": whole},
        "within, later": {"async_memory_copy_d2d": whole},
        "into host": {"memory_copy_d2h": whole},
        "into host, later": {"async_memory_copy_d2h": whole, "pageable_async_memory_copy_d2h": whole},
        "part into host, later": {"async_memory_copy_d2h": part, "pageable_async_memory_copy_d2h": part},
    }


def test_copies_are_asynchronous_on_the_stream_that_is_given(one: DevicePool) -> None:
    ((before, idle, default_idle, after),) = one.run(cases.part_into_host_later)
    assert before == [0] * 8
    assert (idle, default_idle) == (False, True)
    assert after == [0, 0, 100, 101, 102, 0, 0, 0]


def test_raw_addresses_can_be_copied(one: DevicePool) -> None:
    ((before, after, refused),) = one.run(cases.raw_addresses)
    assert before == [0] * 4
    assert after == [10, 11, 12, 13]
    assert refused


def test_a_stream_waits_for_an_event(one: DevicePool) -> None:
    (seen,) = one.run(cases.order_and_events)
    assert seen == {
        "unrecorded": True,
        "at once": False,
        "after the first": (True, True, False),
        "after the second": True,
    }


def test_a_stream_keeps_the_order(one: DevicePool) -> None:
    assert one.run(cases.order_within_a_stream, 20) == [([0.0], [19.0])]


def test_slow_copies_take_their_time(one: DevicePool) -> None:
    def others_are_quick() -> bool:
        (seconds,) = one.run(cases.seconds_of_copies, 1 << 20, 10 << 20)
        assert seconds["to host"] >= 0.1
        assert seconds["for three"] >= 0.3  # one after the other: they share the way to the host
        return max(seconds["within"], seconds["to queue three"]) < 0.1

    until(others_are_quick)


def test_the_source_of_a_copy_to_the_device_may_change_at_once(one: DevicePool) -> None:
    assert one.run(cases.source_changes) == [[0, 1, 2, 3]]


def test_memory_is_counted(one: DevicePool) -> None:
    size = 8 << 20
    assert one.run(cases.memory_use) == [[(0, 0), (size, size), (0, size)]]


def test_memory_is_bounded(one: DevicePool) -> None:
    assert one.run(cases.fill_memory, 200 << 20) == [""]
    assert one.run(cases.fill_memory, 300 << 20) == ["OSError"]


def test_pageable_copies_are_counted_apart(one: DevicePool) -> None:
    def quick() -> bool:
        (seen,) = one.run(cases.pageable_and_pinned)
        assert {name: pageable for name, (_, pageable) in seen.items()} == {"pageable": True, "pinned": False}
        return max(seconds for seconds, _ in seen.values()) < 0.2

    until(quick)


def test_pageable_copies_can_wait_as_those_of_cuda_do() -> None:
    with DevicePool(1, pageable_waits=True) as process:

        def pinned_is_quick() -> bool:
            (seen,) = process.run(cases.pageable_and_pinned)
            assert seen["pageable"][0] >= 0.25
            return bool(seen["pinned"][0] < 0.2)

        until(pinned_is_quick)


COMPILER = """#!/bin/sh
touch "${0%/*}/begun.$$"
until [ -e "${0%/*}/go-on" ]; do sleep 0.01; done
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""


def test_of_several_processes_one_builds(tmp_path: Path) -> None:
    """Their compiler, a stand-in, ends when it is told to."""
    compilers, cache = tmp_path / "compilers", tmp_path / "cache"
    compilers.mkdir()
    cache.mkdir()
    compiler = compilers / "g++"
    compiler.write_text(COMPILER, encoding="utf-8")
    compiler.chmod(0o755)
    code = "from test.device_plugin.build import library; print(library())"
    command, env = [sys.executable, "-c", code], {"PATH": f"{compilers}:/usr/bin:/bin", "TMPDIR": str(cache)}
    where = Path(__file__).parents[2]
    started = [subprocess.Popen(command, cwd=where, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    while not list(compilers.glob("begun.*")):
        time.sleep(0.01)
    time.sleep(1)  # in which the other one would begin as well
    (compilers / "go-on").touch()
    paths = {process.communicate(timeout=100)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0]
    (path,) = paths
    folder = Path(path).parent
    assert sorted(cache.rglob("*")) == sorted([folder.parent, folder, folder.with_suffix(".lock"), Path(path)])
    assert len(list(compilers.glob("begun.*"))) == 1


def test_without_a_compiler_there_is_a_reason_to_skip(tmp_path: Path) -> None:
    code = "from test.device_plugin.build import reason_to_skip; print(reason_to_skip())"
    env, where = {"PATH": str(tmp_path)}, Path(__file__).parents[2]
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=where, env=env, capture_output=True, text=True, check=True
    )
    assert "needs g++" in output.stdout
