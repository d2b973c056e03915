"""Collectives that say they have succeeded and have not moved what was sent: no rank believes what has come."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import list_checkpoints
from paddle_dist_ckpt.control.verified import VerifiedTransfers
from paddle_dist_ckpt.core.memory import Bytes1D
from paddle_dist_ckpt.core.protocols import Transport
from paddle_dist_ckpt.core.tensors import Reduction
from paddle_dist_ckpt.errors import CollectiveError
from paddle_dist_ckpt.options import LoadOptions
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from paddle_dist_ckpt.testing.faults import FaultyTransport
from test.jobs import (
    all_ok,
    another_host,
    blank_like,
    check_pieces,
    errors_of,
    everything,
    make_array,
    same_bits,
    save_on,
    sharded,
    split_rows,
)
from test.waiting import PATIENCE, until

RANKS = 3
Spoil = Callable[[str, int, Bytes1D, Bytes1D], None]


def unmoved(operation: str, source: int, before: Bytes1D, now: Bytes1D) -> None:
    """Nothing has come."""
    now[:] = before


def one_bit(operation: str, source: int, before: Bytes1D, now: Bytes1D) -> None:
    """One bit of what has come is another."""
    if now.size > 100:
        now[now.size // 2] ^= 4


def half(operation: str, source: int, before: Bytes1D, now: Bytes1D) -> None:
    """Only the first half has come."""
    now[now.size // 2 :] = before[now.size // 2 :]


def only(which: str, spoil: Spoil) -> Spoil:
    """Spoil one operation alone."""

    def chosen(operation: str, source: int, before: Bytes1D, now: Bytes1D) -> None:
        if operation == which:
            spoil(operation, source, before, now)

    return chosen


def load_by(path: Path, targets: list[dict[str, Any]], liar: int, spoil: Spoil, again: bool = False) -> list[Any]:
    """Load on ranks of hosts of their own, one of which gets something else; returns what each returned or raised.

    ``again``: load twice, and return what came of the second load, which has no exchange if it is to be had without.
    """

    def work(rank: SimulatedRank) -> Any:
        here, options = another_host(path, rank.rank), LoadOptions(timeout=60, exchange="always")
        if not again:
            return rank.load(targets[rank.rank], here, options=options)
        with pytest.raises(CollectiveError):
            rank.load(targets[rank.rank], here, options=options)
        with pytest.raises(CollectiveError, match="abandoned"):
            rank.load(targets[rank.rank], here, options=options)
        return rank.load(targets[rank.rank], path, options=LoadOptions(timeout=60, exchange="never"))

    return run_ranks(RANKS, work, over=functools.partial(_lying_on, liar, spoil))


def _lying_on(liar: int, spoil: Spoil, transport: Transport, rank: int) -> Transport:
    return FaultyTransport(transport, spoil) if rank == liar else transport


@pytest.mark.parametrize("liar", [0, 2])
@pytest.mark.parametrize("spoil", [unmoved, one_bit, half])
def test_a_broadcast(tmp_path: Path, liar: int, spoil: Spoil) -> None:
    array = make_array((300, 1000))
    save_on([{"w": array, "x": array[:3]}], tmp_path)
    targets = [{"w": blank_like(array), "x": blank_like(array[:3])} for _ in range(RANKS)]
    for error in errors_of(load_by(tmp_path, targets, liar, only("broadcast", spoil)), CollectiveError):
        assert list(error.failures) == [liar]
        assert type(error.failures[liar]) is CollectiveError
        assert "broadcast from rank" in str(error)
        assert f"to rank {liar} (" in str(error)
        assert "w" in str(error).partition(f"to rank {liar} (")[2].partition(")")[0].split(", ")
        assert "exchange='never'" in str(error)
        assert "partly written" in str(error)


@pytest.mark.parametrize("liar", [0, 2])
@pytest.mark.parametrize("spoil", [unmoved, one_bit, half])
def test_an_exchange(tmp_path: Path, liar: int, spoil: Spoil) -> None:
    array = make_array((600, 900))
    save_on([{"columns": part} for part in split_rows(array, 2)], tmp_path)
    targets = [{"columns": part} for part in split_rows(array, RANKS, fill=False, dimension=1)]
    for error in errors_of(load_by(tmp_path, targets, liar, spoil), CollectiveError):
        assert list(error.failures) == [liar]
        assert f"to rank {liar} (columns)" in str(error)
        assert "exchange from rank" in str(error)


def test_afterwards_the_transport_is_left_alone_on_every_rank(tmp_path: Path) -> None:
    array = make_array((300, 1000))
    save_on([{"w": array}], tmp_path)
    targets = [{"w": blank_like(array)} for _ in range(RANKS)]
    all_ok(load_by(tmp_path, targets, 1, unmoved, again=True))
    assert all(same_bits(target["w"], array) for target in targets)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_comes_after_all_does_not_overwrite_a_later_load(tmp_path: Path, dtype: str) -> None:
    """A collective hangs until it is given up, and goes on when the targets are loaded in another way. It may receive
    in a target's own memory, so no load uses that meanwhile; or by way of other memory, from which nothing goes on."""
    old, new = make_array((3000, 1000)), make_array((3000, 1000), seed=1)
    save_on([{"w": old}], tmp_path, 0)
    save_on([{"w": new}], tmp_path, 1)
    targets = [{"w": np.zeros(old.shape, dtype)} for _ in range(RANKS)]
    released, gave_up, met = threading.Event(), threading.Barrier(RANKS), threading.Barrier(RANKS)

    def hang(operation: str, source: int, before: Bytes1D, now: Bytes1D) -> None:
        if now.size > 1000 and operation == "broadcast":
            released.wait(PATIENCE)
            now[:] = 77

    def work(rank: SimulatedRank) -> Any:
        mine, hung = targets[rank.rank], LoadOptions(timeout=1, exchange="always", cast=True)
        with pytest.raises(CollectiveError, match="no progress"):
            rank.load(mine, another_host(tmp_path, rank.rank), 1, hung)
        gave_up.wait(PATIENCE)
        options = LoadOptions(timeout=60, exchange="never", cast=True)
        if dtype == "float32":
            with pytest.raises(CollectiveError, match="given up may still write to w: restart the job, or load into"):
                rank.load(mine, tmp_path, 0, options)
        else:
            rank.load(mine, tmp_path, 0, options)
        if met.wait(PATIENCE) == 0:
            released.set()
            until(lambda: not any(one.name == "paddle_dist_ckpt collectives" for one in threading.enumerate()))
        met.wait(PATIENCE)
        if dtype == "float32":
            rank.load(mine, tmp_path, 0, options)

    all_ok(run_ranks(RANKS, work, over=functools.partial(_lying_on, 2, hang)))
    assert all(same_bits(target["w"], old.astype(dtype)) for target in targets)


def test_values_that_are_read_first_are_not_believed_either(tmp_path: Path) -> None:
    """A large value is exchanged in the pass for what is looked at before it is used."""
    save_on([{"text": "long " * 2000}], tmp_path)
    targets: list[dict[str, Any]] = [{"text": None} for _ in range(RANKS)]
    errors_of(load_by(tmp_path, targets, 2, unmoved), CollectiveError)
    assert targets == [{"text": None}] * RANKS


def test_addends_of_a_partial_tensor(tmp_path: Path) -> None:
    """A save that got other addends than were sent commits nothing."""
    array = make_array((300, 300), "int32")

    def state(rank: int) -> dict[str, Any]:
        whole = sharded(array, everything(array))
        return {"w": dataclasses.replace(whole, reduction=Reduction("sum", rank, RANKS))}

    def work(rank: SimulatedRank) -> Any:
        return rank.save(state(rank.rank), tmp_path)

    for liar in range(RANKS):
        results = run_ranks(RANKS, work, over=functools.partial(_lying_on, liar, one_bit))
        for error in errors_of(results, CollectiveError):
            assert list(error.failures) == [liar]
            assert f"to rank {liar} (w)" in str(error)
        assert list_checkpoints(tmp_path) == []
        assert list(tmp_path.iterdir()) == []
    all_ok(run_ranks(RANKS, work))


class Misrouting(FaultyTransport):
    """What one rank sends to the two others goes to the wrong one of them, if it is of one size; the digests, too."""

    def exchange(self, outgoing: Mapping[int, Bytes1D], *rest: Any, **more: Any) -> None:
        if len({data.size for data in outgoing.values()}) == 1:
            outgoing = dict(zip(outgoing, reversed(outgoing.values()), strict=True))
        super().exchange(outgoing, *rest, **more)


def test_what_another_rank_should_have_got_is_not_believed(tmp_path: Path) -> None:
    array = make_array((600, 900))
    save_on([{"rows": array}], tmp_path)
    targets = [{"rows": part} for part in split_rows(array, RANKS, fill=False)]

    def work(rank: SimulatedRank) -> Any:
        here = tmp_path if rank.rank == 0 else tmp_path / str(rank.rank)  # rank 0 alone has files
        return rank.load(targets[rank.rank], here, options=LoadOptions(timeout=60, separate_folders=True))

    def over(transport: Transport, rank: int) -> Transport:
        return Misrouting(transport, lambda *_: None) if rank == 0 else transport

    for error in errors_of(run_ranks(RANKS, work, over=over), CollectiveError):
        assert list(error.failures) == [1, 2]
        assert "exchange from rank 0 to rank" in str(error)


class Replay:
    """What has come in the first load comes again in the second, in place of what is sent there."""

    def __init__(self) -> None:
        self.kept: defaultdict[tuple[str, int], list[Bytes1D]] = defaultdict(list)
        self.replays = False

    def __call__(self, operation: str, source: int, before: Bytes1D, now: Bytes1D) -> None:
        if not self.replays:
            self.kept[operation, source].append(now.copy())
        elif operation == "broadcast":
            now[:] = self.kept[operation, source].pop(0)


def test_what_an_earlier_load_has_left_in_memory_is_not_believed(tmp_path: Path) -> None:
    """A receive buffer that is used again holds the bytes of the load before, with their digests."""
    arrays = [make_array((300, 1000), seed=seed) for seed in range(2)]
    for unique_id, array in enumerate(arrays):
        save_on([{"w": array}], tmp_path, unique_id)
    replay, target = Replay(), [{"w": blank_like(arrays[0])} for _ in range(RANKS)]

    def work(rank: SimulatedRank) -> Any:
        here, options = another_host(tmp_path, rank.rank), LoadOptions(timeout=60, exchange="always")
        rank.load(target[rank.rank], here, 0, options)
        if rank.rank == 1:
            replay.replays = True
        return rank.load(target[rank.rank], here, 1, options)

    results = run_ranks(RANKS, work, over=functools.partial(_lying_on, 1, replay))
    for error in errors_of(results, CollectiveError):
        assert list(error.failures) == [1]


def test_many_messages_and_none(tmp_path: Path) -> None:
    """Messages without bytes, ranks without messages, several messages between the same two."""

    def work(rank: SimulatedRank) -> Any:
        mine = np.full(5, rank.rank, np.uint8)
        transfers = VerifiedTransfers(rank.transport, rank.rank, "n")
        got = []
        for size in (0, 3, 5):
            sent = {1: mine[:size]} if rank.rank == 0 else {}
            into = {0: np.zeros(size, np.uint8)} if rank.rank == 1 else {}
            transfers.exchange(sent, into, [(0, size), (2, 0)], 1 << 20, str)
            told = mine.copy() if rank.rank == 2 else np.zeros(5, np.uint8)
            transfers.broadcast(told[:size], 2, 1 << 20, str)
            got += [part.tolist() for part in into.values()] + [told[:size].tolist()]
        transfers.settle()
        return got

    assert all_ok(run_ranks(RANKS, work))[1] == [[], [], [0] * 3, [2] * 3, [0] * 5, [2] * 5]


def test_no_load_is_refused_for_nothing(tmp_path: Path) -> None:
    array = make_array((600, 900))
    save_on([{"w": array}], tmp_path)
    parts = split_rows(array, RANKS, fill=False, dimension=1)
    targets = [{"w": part} for part in parts]
    all_ok(load_by(tmp_path, targets, 1, lambda *_: None))
    for part in parts:
        check_pieces(part, array)
