"""Exchanges of several rounds: read before it is their turn, and sent with the digests that the file has."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from paddle_dist_ckpt.control import verified
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.memory import Bytes1D
from paddle_dist_ckpt.core.protocols import Transport
from paddle_dist_ckpt.errors import RankFailureError
from paddle_dist_ckpt.loading import exchange
from paddle_dist_ckpt.options import LoadOptions
from paddle_dist_ckpt.planning import exchange_plan
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from test.jobs import (
    SMALL,
    CountingStorage,
    all_ok,
    another_host,
    blank_like,
    check_pieces,
    data_files,
    data_reads,
    errors_of,
    make_array,
    replaced_bytes,
    same_bits,
    save_on,
    sharded,
)

_BESIDE = ("reads ahead", "hashes")


class _Held:
    """A transport, of which no broadcast begins before ``may_begin`` returns."""

    def __init__(self, inner: Transport, may_begin: Callable[[], None]) -> None:
        self._inner, self._may_begin = inner, may_begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def broadcast(self, data: Bytes1D, source: int, most: int) -> None:
        """Wait first."""
        self._may_begin()
        self._inner.broadcast(data, source, most)


def _in_rounds(tmp_path: Path, patch: pytest.MonkeyPatch) -> Any:
    """Save a tensor that three ranks load in eight rounds, of two units each."""
    patch.setattr(exchange_plan, "_ROUND_BYTES", 512 << 10)
    array = make_array((1048, 1000))
    save_on([{"w": array}], tmp_path, None, dataclasses.replace(SMALL, block_bytes=256 << 10))
    return array


def _load_rounds(tmp_path: Path, targets: list[Any], may_begin: Callable[[], None], log: list[Any]) -> list[Any]:
    return _load_states(tmp_path, [{"w": target} for target in targets], may_begin, log)


def _load_states(
    tmp_path: Path, states: list[dict[str, Any]], may_begin: Callable[[], None], log: list[Any]
) -> list[Any]:
    def work(rank: SimulatedRank) -> Any:
        storage = CountingStorage(tmp_path, log) if rank.rank == 0 else another_host(tmp_path / "none", rank.rank)
        return rank.load(states[rank.rank], storage, options=LoadOptions(timeout=60, exchange="always"))

    return run_ranks(3, work, over=lambda transport, rank: cast("Transport", _Held(transport, may_begin)))


def _threads_beside() -> set[str]:
    """The threads that exchanges have to themselves, once those that are about to end have had time to."""
    until = time.monotonic() + 30
    while True:
        found = {thread.name for thread in threading.enumerate()} & {f"paddle_dist_ckpt {name}" for name in _BESIDE}
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.01)


def test_threads_beside_an_exchange_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = _in_rounds(tmp_path, monkeypatch)
    targets = [blank_like(array) for _ in range(3)]
    seen: set[str] = set()

    def look() -> None:
        seen.update(thread.name for thread in threading.enumerate())

    all_ok(_load_rounds(tmp_path, targets, look, []))
    assert seen >= {f"paddle_dist_ckpt {name}" for name in _BESIDE}
    assert not _threads_beside()
    begun: list[int] = []

    def fail_later() -> None:
        begun.append(0)
        if len(begun) > 10:
            raise RuntimeError("broken")

    assert all(isinstance(error, Exception) for error in _load_rounds(tmp_path, targets, fail_later, []))
    assert not _threads_beside()


def test_the_next_round_is_read_before_the_first_has_travelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = _in_rounds(tmp_path, monkeypatch)
    log: list[tuple[str, int, int]] = []
    targets = [blank_like(array) for _ in range(3)]

    def may_begin() -> None:
        until = time.monotonic() + 30
        while sum(stop - start for _, start, stop in data_reads(tmp_path, list(log))) < 1 << 20:
            assert time.monotonic() < until, "nothing is read ahead"
            time.sleep(0.001)

    all_ok(_load_rounds(tmp_path, targets, may_begin, log))
    assert all(same_bits(target, array) for target in targets)


def test_a_damaged_block_is_told_from_a_collective_that_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent in its place comes as it was sent, and every rank hears of the file."""
    array = _in_rounds(tmp_path, monkeypatch)
    (path,) = data_files(tmp_path)
    targets = [blank_like(array) for _ in range(3)]
    size = path.stat().st_size
    for place in (size // 2, size - 1):
        with replaced_bytes(path, {place: path.read_bytes()[place] ^ 1}):
            results = _load_rounds(tmp_path, targets, lambda: None, [])
        for error in errors_of(results, RankFailureError):
            assert "CheckpointCorruptedError: w: the checksum of" in str(error)
            assert list(error.failures) == [0]


def test_the_sender_of_whole_blocks_does_not_hash_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = _in_rounds(tmp_path, monkeypatch)
    targets = [blank_like(array) for _ in range(3)]
    hashed: list[int] = []

    def digest_of(data: Bytes1D, block_bytes: int = 0) -> int:
        hashed.append(data.size)
        return verified.digest_of(data, block_bytes)

    monkeypatch.setattr(exchange, "digest_of", digest_of)
    all_ok(_load_rounds(tmp_path, targets, lambda: None, []))
    assert sum(hashed) < 256 << 10  # the tail, which is small
    assert all(same_bits(target, array) for target in targets)


def test_a_buffer_is_sent_before_more_is_read_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two tensors in each round only one is sent from where it belongs, so that little may be read ahead."""
    monkeypatch.setattr(exchange_plan, "_ROUND_BYTES", 640 << 10)
    arrays = {str(i): make_array((257, 256), seed=i) for i in range(8)}
    save_on([arrays], tmp_path, None, dataclasses.replace(SMALL, block_bytes=256 << 10))
    states = [{key: blank_like(array) for key, array in arrays.items()} for _ in range(3)]
    states[0].update((key, np.zeros((256, 257), np.float32).T) for key in list(arrays)[1::2])
    log: list[tuple[str, int, int]] = []
    read_before: list[int] = []

    def may_begin() -> None:
        if not read_before:
            time.sleep(0.1)
            read_before.append(sum(stop - start for _, start, stop in data_reads(tmp_path, list(log))))

    all_ok(_load_states(tmp_path, states, may_begin, log))
    assert read_before[0] < 3 * (512 << 10), "more than two rounds"
    assert all(same_bits(state[key], array) for state in states for key, array in arrays.items())


@pytest.mark.parametrize("strided", [0, 1])
def test_a_message_is_neither_sent_from_nor_received_in_a_target_with_gaps(strided: int, tmp_path: Path) -> None:
    array = make_array((512, 256))
    save_on([{"w": array}], tmp_path, None, dataclasses.replace(SMALL, block_bytes=256 << 10))
    wide = np.full((512, 300), 7, np.float32)
    targets: list[Any] = [wide[:, :256] if rank == strided else blank_like(array) for rank in range(3)]
    all_ok(_load_rounds(tmp_path, targets, lambda: None, []))
    assert all(same_bits(target.copy(), array) for target in targets)
    assert (wide[:, 256:] == 7).all()


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (200, 1024))],
        [Box((56, 0), (200, 1024))],
        [Box((0, 0), (100, 1024)), Box((110, 0), (146, 1024))],
        [Box((0, 0), (256, 512))],
        [Box((0, 0), (256, 1024))],  # it is
    ],
    ids=str,
)
def test_what_is_not_whole_blocks_is_not_sent_with_the_digests_of_blocks(boxes: list[Box], tmp_path: Path) -> None:
    array = make_array((512, 1024))
    save_on([{"w": array}], tmp_path, None, dataclasses.replace(SMALL, block_bytes=256 * 4096))
    targets = [sharded(array, boxes, fill=False) for _ in range(3)]
    all_ok(_load_rounds(tmp_path, targets, lambda: None, []))
    for target in targets:
        check_pieces(target, array)


def test_a_rank_that_cannot_take_a_value_receives_what_follows_all_the_same(tmp_path: Path) -> None:
    """Or the others would wait for it in collectives."""
    array = np.ones((1024, 256), np.float32)
    array[0, 0] = 1e30
    save_on([{"w": array}], tmp_path, None, dataclasses.replace(SMALL, block_bytes=256 << 10))
    begun: Counter[int] = Counter()

    def work(rank: SimulatedRank) -> Any:
        storage = tmp_path if rank.rank == 0 else another_host(tmp_path / "none", rank.rank)
        target = np.zeros(array.shape, np.float16 if rank.rank == 1 else np.float32)
        return rank.load({"w": target}, storage, options=LoadOptions(timeout=60, exchange="always", cast=True))

    def counted(transport: Transport, rank: int) -> Transport:
        return cast("Transport", _Held(transport, lambda: begun.update([rank])))

    for error in errors_of(run_ranks(3, work, over=counted), RankFailureError):
        assert list(error.failures) == [1]
        assert "a finite float32 value is too large for float16" in str(error)
    assert begun[0] == begun[1] == begun[2] > 1
