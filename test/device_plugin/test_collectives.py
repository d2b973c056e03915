"""Paddle's collectives between ranks with a test device each give what numpy computes."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from test.device_plugin import build
from test.device_plugin import cases_collectives as cases
from test.device_plugin.cases_collectives import values
from test.device_plugin.ranks import DevicePool
from test.ranks.remote import RankLostError

_REASON = build.reason_to_skip()
pytestmark = pytest.mark.skipif(_REASON is not None, reason=_REASON or "")

_LARGE = 300_001  # more bytes than a ring holds, and nothing that divides evenly


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[DevicePool]:
    """Ranks with a device each."""
    with DevicePool(request.param, memory=128 << 20) as started:
        yield started


def _arrays(ranks: DevicePool, size: int, dtype: str = "float32") -> list[np.ndarray]:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return [values(rank, size).astype(kind) for rank in range(ranks.size)]


def _reduced(arrays: list[np.ndarray], op: str) -> np.ndarray:
    """Reduce in the order of the ranks; small floats in float32, rounded at the end."""
    wide = np.float32 if arrays[0].dtype.itemsize == 2 and arrays[0].dtype.kind not in "iu" else arrays[0].dtype
    functions = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = functions[op](total, array.astype(wide))
    return total.astype(arrays[0].dtype)


def test_each_rank_has_its_own_device(ranks: DevicePool) -> None:
    names = [f"test_device:{rank}" for rank in range(ranks.size)]
    assert ranks.run(cases.places) == [(name, f"Place({name})", "XCCL") for name in names]


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "uint8", "int8", "int32", "int64"])
def test_all_reduce(ranks: DevicePool, dtype: str, op: str) -> None:
    expected = _reduced(_arrays(ranks, 101, dtype), op).tobytes()
    assert ranks.run(cases.all_reduce, dtype, op, 101) == [expected] * ranks.size


def test_all_reduce_of_much(ranks: DevicePool) -> None:
    expected = _reduced(_arrays(ranks, _LARGE), "sum").tobytes()
    assert ranks.run(cases.all_reduce, "float32", "sum", _LARGE) == [expected] * ranks.size


def test_all_reduce_of_less_than_there_are_ranks(ranks: DevicePool) -> None:
    expected = _reduced(_arrays(ranks, 1), "sum").tobytes()
    assert ranks.run(cases.all_reduce, "float32", "sum", 1) == [expected] * ranks.size


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "bfloat16", "float64", "complex64", "complex128"])
def test_broadcast(ranks: DevicePool, dtype: str) -> None:
    root = ranks.size - 1
    expected = _arrays(ranks, 101, dtype)[root].tobytes()
    assert ranks.run(cases.broadcast, dtype, 101, root) == [expected] * ranks.size


def test_broadcast_of_much(ranks: DevicePool) -> None:
    assert ranks.run(cases.broadcast, "float32", _LARGE, 1) == [values(1, _LARGE).tobytes()] * ranks.size


def test_types_that_the_interface_does_not_know_are_refused(ranks: DevicePool) -> None:
    for message in ranks.run(cases.refusal, "float8_e4m3fn"):
        assert "DataType is not supported on test_device" in message


def test_reduce(ranks: DevicePool) -> None:
    arrays = _arrays(ranks, _LARGE)
    expected = [array.tobytes() for array in arrays]
    expected[1] = _reduced(arrays, "sum").tobytes()
    assert ranks.run(cases.reduce, _LARGE, 1) == expected


@pytest.mark.parametrize("size", [3, _LARGE])
def test_all_gather(ranks: DevicePool, size: int) -> None:
    parts = [array.tobytes() for array in _arrays(ranks, size)]
    assert ranks.run(cases.all_gather, size) == [(parts, b"".join(parts))] * ranks.size


def test_reduce_scatter(ranks: DevicePool) -> None:
    total = _reduced(_arrays(ranks, 1000 * ranks.size), "sum")
    expected = [total[1000 * rank : 1000 * (rank + 1)].tobytes() for rank in range(ranks.size)]
    assert ranks.run(cases.reduce_scatter, 1000) == expected


def test_all_to_all(ranks: DevicePool) -> None:
    count = ranks.size
    sizes = [[50_000 * ((a + 2 * b) % 3) for b in range(count)] for a in range(count)]
    pairs = _arrays(ranks, 2 * count)
    cut = [np.split(values(rank, sum(row)), np.cumsum(row)[:-1]) for rank, row in enumerate(sizes)]
    for rank, (parts, output) in enumerate(ranks.run(cases.all_to_all, sizes)):
        assert parts == [pair[2 * rank : 2 * rank + 2].tobytes() for pair in pairs]
        assert output == b"".join(row[rank].tobytes() for row in cut)


@pytest.mark.parametrize("size", [3, _LARGE])
def test_send_and_receive(ranks: DevicePool, size: int) -> None:
    assert ranks.run(cases.send_and_receive, size) == [values(0, size).tobytes()] * ranks.size


@pytest.mark.parametrize("size", [3, _LARGE])
def test_batch_of_sends_and_receives(ranks: DevicePool, size: int) -> None:
    expected = [array.tobytes() for array in _arrays(ranks, size)]
    assert ranks.run(cases.batch, size) == [expected] * ranks.size


def test_objects(ranks: DevicePool) -> None:
    gathered = [{"rank": rank, "pad": "x" * rank} for rank in range(ranks.size)]
    assert ranks.run(cases.objects) == [(gathered, [("from", 1)])] * ranks.size


def test_groups_of_the_device_and_of_the_host(ranks: DevicePool) -> None:
    arrays = _arrays(ranks, 100)
    on_device = [array.tobytes() for array in arrays[:-2]] + [_reduced(arrays[-2:], "sum").tobytes()] * 2
    on_host = np.sum(arrays, axis=0)
    for (device, host), expected in zip(ranks.run(cases.groups, 100), on_device, strict=True):
        assert device == expected
        np.testing.assert_allclose(np.frombuffer(host, np.float32), on_host, rtol=1e-6)


def test_collectives_run_in_the_order_of_their_stream(ranks: DevicePool) -> None:
    expected = (False, True, values(0, 1000).tobytes())
    assert ranks.run(cases.stream_order, 1000) == [expected] * ranks.size


def test_no_names_are_left_in_shared_memory(ranks: DevicePool) -> None:
    assert ranks.run(cases.shared_memory_names) == [[]] * ranks.size


def test_ranks_that_disagree_are_told(ranks: DevicePool) -> None:
    with pytest.raises(RankLostError, match=r"expects (broadcast|all_reduce) of \d+ bytes, the other rank has"):
        ranks.run(cases.disagree, timeout=20)
