"""Many small tensors, and large ones among them, that ranks read for each other, or that are cast: in batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.dtypes import DTYPES, arithmetic_dtype
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointError
from paddle_dist_ckpt.loading import exchange_messages
from paddle_dist_ckpt.loading.needs import Needs
from paddle_dist_ckpt.loading.targets import Targets
from paddle_dist_ckpt.options import LoadOptions, SaveOptions
from paddle_dist_ckpt.testing.in_process_transport import InProcessTransport
from test.jobs import (
    LAYOUTS,
    SMALL,
    blank_like,
    check_pieces,
    data_files,
    everything,
    laid_out,
    load_alone,
    load_on,
    make_array,
    rows_of,
    same_bits,
    save_alone,
    save_on,
    sharded,
    try_load,
)

COUNT = 60
CAST = {"float32": "bfloat16", "float64": "float32", "bfloat16": "float32", "int8": "int32"}
OPTIONS = LoadOptions(cast=True, timeout=60)


def homes_in(tmp_path: Path, ranks: int) -> list[Path]:
    """A folder for each rank."""
    homes = [tmp_path / f"rank{rank}" for rank in range(ranks)]
    for home in homes:
        home.mkdir()
    return homes


def numbers(i: int, dtype: str) -> np.ndarray:
    """Small whole numbers, which every type has, in a tensor of a shape of its own; every fifth has several blocks."""
    shape = (60 + i, 40) if i % 5 == 0 else (4 + i % 3, 6 + i % 4)
    values = (np.arange(np.prod(shape)) * 7 + i) % 100
    return values.reshape(shape).astype(arithmetic_dtype(DTYPES[dtype]))


def contents() -> dict[str, np.ndarray]:
    """What is saved."""
    dtypes = ("float32", "float64", "bfloat16", "int8", "int64")
    return {f"t{i:03}": numbers(i, dtypes[i % len(dtypes)]) for i in range(COUNT)} | {"scalar": np.array(5.0)}


def cut(array: np.ndarray, i: int, rank: int, ranks: int, fill: bool) -> Any:
    """A rank's part of a tensor: whole, rows or columns, in memory of any strides."""
    how = LAYOUTS[i % len(LAYOUTS)]
    if i % 3 == 0 or not array.ndim:
        return laid_out(array if fill else blank_like(array), how)
    if i % 7 == 0:
        return sharded(array, everything(array), how, fill)
    return sharded(array, [rows_of(array.shape, rank, ranks, i % 2)], how, fill)


def states_of(state: dict[str, np.ndarray], ranks: int, fill: bool, shift: int = 0) -> list[dict[str, Any]]:
    """Each rank's part."""
    return [
        {key: cut(array, i + shift, rank, ranks, fill) for i, (key, array) in enumerate(state.items())}
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("exchange", ["auto", "always"])
@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mix_arrives_bit_by_bit(tmp_path: Path, ranks: int, is_cast: bool, exchange: Any) -> None:
    homes, state = homes_in(tmp_path, ranks), contents()
    save_on(states_of(state, ranks, True), homes, None, SMALL)
    wanted = {
        key: array.astype(arithmetic_dtype(DTYPES[CAST.get(array.dtype.name, array.dtype.name)])) if is_cast else array
        for key, array in state.items()
    }
    # Another shift cuts the tensors in other ways than they were saved in.
    targets = states_of(wanted, ranks, False, shift=1)
    load_on(targets, homes, options=dataclasses.replace(OPTIONS, exchange=exchange))
    for target in targets:
        for key, array in wanted.items():
            if isinstance(target[key], np.ndarray):
                assert same_bits(np.ascontiguousarray(target[key]).reshape(array.shape), array), key
            else:
                check_pieces(target[key], array)


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_object_is_made_for_a_small_tensor(tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where it is planned, nor in messages, nor by who reads or receives it; with a cast or without."""
    homes = homes_in(tmp_path, ranks)
    state = {f"w{i}": make_array((8 + i % 4, 16), "int8", i) for i in range(400)}
    save_on([{key: laid_out(array, "c") for key, array in state.items()} for _ in range(ranks)], homes)

    def refused(*_: Any) -> None:
        raise AssertionError("an object for one tensor")

    monkeypatch.setattr(Targets, "consumer", refused)
    monkeypatch.setattr(Needs, "consumer", refused)
    listed = exchange_messages.messages_of
    seen = []
    monkeypatch.setattr(
        "paddle_dist_ckpt.loading.exchange.messages_of", lambda one, me: seen.append(one) or listed(one, me)
    )
    for dtype in ("int8", "int32"):
        targets = [{key: blank_like(a.astype(dtype)) for key, a in state.items()} for _ in range(ranks)]
        load_on(targets, homes, options=OPTIONS)
        assert all(same_bits(t[key], state[key].astype(dtype)) for t in targets for key in state)
    assert seen
    assert not any(one.units for one in seen)
    assert sum(one.kept is not None for one in seen) <= 20 * ranks
    alone = {key: blank_like(a.astype("int32")) for key, a in state.items()}
    save_alone(dict(state), tmp_path / "alone")
    load_alone(alone, tmp_path / "alone", None, OPTIONS)
    assert all(same_bits(alone[key], state[key].astype("int32")) for key in state)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("victim", ["t001", "t013", "t032", "t050"])
def test_a_damaged_tensor_is_named(tmp_path: Path, ranks: int, victim: str) -> None:
    homes = homes_in(tmp_path, ranks)
    state = {key: make_array(array.shape, "int64", i) for i, (key, array) in enumerate(contents().items())}
    save_on([dict(state)] + [{} for _ in homes[1:]], homes, None, SMALL)
    (path,) = [path for home in homes for path in data_files(home) if path.stat().st_size > 10_000]
    data = bytearray(path.read_bytes())
    data[data.index(state[victim].tobytes())] ^= 1
    path.write_bytes(data)
    targets = [{key: blank_like(array) for key, array in state.items()} for _ in homes]
    for error in try_load(targets, homes, options=OPTIONS):
        assert isinstance(error, CheckpointError)
        assert f"{victim}: the checksum of" in str(error)
        assert path.name in str(error)
        assert isinstance(error, CheckpointCorruptedError) or "rank 0" in str(error)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_too_large_for_a_cast_is_named(tmp_path: Path, ranks: int, strided: bool) -> None:
    homes = homes_in(tmp_path, ranks)
    state = {f"w{i:02}": np.full((6, 4), 2.0**i) for i in range(10, 40)}
    state["w30"][5, 1] = 1e300
    save_on([dict(state)] + [{} for _ in homes[1:]], homes)
    columns = 8 if strided else 4
    targets = [{key: np.zeros((6, columns), np.float32)[:, :4] for key in state} for _ in homes]
    for error in try_load(targets, homes, options=OPTIONS):
        assert isinstance(error, CheckpointError)
        assert "w30: a finite float64 value is too large for float32" in str(error)
        assert "w29" not in str(error)


@pytest.mark.parametrize("ranks", [2, 3])
def test_many_small_tensors_travel_in_rounds_of_bounded_size(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = homes_in(tmp_path, ranks)
    state = {f"w{i:04}": make_array((1 << 17,), "uint8", i) for i in range(400)}
    save_on([dict(state)] + [{} for _ in homes[1:]], homes, None, SaveOptions(timeout=60))
    largest: list[int] = []
    exchange, broadcast = InProcessTransport.exchange, InProcessTransport.broadcast

    def exchanged(self: InProcessTransport, outgoing: Any, *rest: Any) -> None:
        largest.append(sum(map(len, outgoing.values())))
        exchange(self, outgoing, *rest)

    def sent(self: InProcessTransport, data: Any, *rest: Any) -> None:
        largest.append(len(data))
        broadcast(self, data, *rest)

    monkeypatch.setattr(InProcessTransport, "exchange", exchanged)
    monkeypatch.setattr(InProcessTransport, "broadcast", sent)
    targets = [{key: blank_like(array) for key, array in state.items()} for _ in homes]
    load_on(targets, homes, options=OPTIONS)
    assert all(same_bits(target[key], array) for target in targets for key, array in state.items())
    assert 8 << 20 < max(largest) <= 32 << 20
