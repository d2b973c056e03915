"""Ranks that read for each other: folders of their own, files spread anyhow, no byte read twice."""

from __future__ import annotations

import itertools
import random
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.errors import CheckpointCorruptedError
from paddle_dist_ckpt.options import LoadOptions, SaveOptions
from paddle_dist_ckpt.storage.base import FolderIdentity
from paddle_dist_ckpt.testing.in_process_transport import InProcessTransport
from test.jobs import (
    SMALL,
    CountingStorage,
    alike,
    another_host,
    blank_like,
    check_pieces,
    data_files,
    data_reads,
    errors_of,
    everything,
    load_on,
    make_array,
    rows_of,
    same_bits,
    save_on,
    sharded,
    split_rows,
    try_load,
)
from test.strategies import some


def folders(tmp_path: Path, count: int, name: str = "rank") -> list[Path]:
    """A folder a rank."""
    made = [tmp_path / f"{name}{rank}" for rank in range(count)]
    for folder in made:
        folder.mkdir()
    return made


def states_for(ranks: int, fill: bool) -> list[dict[str, Any]]:
    """Cut along rows, along columns, replicated, plain, and a large value that only the last rank has."""
    rows, columns = make_array((70, 33)), make_array((20, 90), "int16", 1)
    copy, plain = make_array((60, 60), "float64", 2), make_array((300,), "bfloat16", 3)
    states: list[dict[str, Any]] = []
    for rank in range(ranks):
        states.append(
            {
                "rows": sharded(rows, [rows_of(rows.shape, rank, ranks)], fill=fill),
                "columns": sharded(columns, [rows_of(columns.shape, rank, ranks, 1)], "fortran", fill=fill),
                "copy": sharded(copy, everything(copy), fill=fill),
                "plain": plain if fill else blank_like(plain),
                "n": 3 if fill else None,
            }
        )
    states[-1]["text"] = "long " * 2000 if fill else None
    return states


def check_states(states: list[dict[str, Any]]) -> None:
    """Assert that all have what :func:`states_for` saves."""
    whole = states_for(1, True)[0]
    for state in states:
        for key in ("rows", "columns", "copy"):
            check_pieces(state[key], whole[key].pieces[0])
        assert same_bits(state["plain"], whole["plain"])
        assert state["n"] == 3
        assert state.get("text", "long " * 2000) == "long " * 2000


@pytest.mark.parametrize(("saved_on", "loaded_on"), some(itertools.product([1, 2, 4], [1, 2, 3, 5]), 7))
def test_every_rank_has_a_disk_of_its_own(tmp_path: Path, saved_on: int, loaded_on: int) -> None:
    homes = folders(tmp_path, saved_on)
    for unique_id in range(2):
        reports = save_on(states_for(saved_on, True), homes)
        assert {report.unique_id for report in reports} == {unique_id}
    assert [(home / "0.metadata").exists() for home in homes] == [True] + [False] * (saved_on - 1)
    for rank, home in enumerate(homes):
        assert {path.name.split("_")[0] for path in data_files(home)} <= {str(rank)}
        assert not list(home.glob("*.claim"))
    rng = random.Random(saved_on * 10 + loaded_on)
    new_homes = folders(tmp_path, loaded_on, "new")
    shutil.copy(homes[0] / "1.metadata", new_homes[0])
    for path in itertools.chain.from_iterable(map(data_files, homes)):
        for home in rng.sample(new_homes, rng.randint(1, loaded_on)):
            shutil.copy(path, home)
    for exchange in ("auto", "always"):
        states = states_for(loaded_on, False)
        load_on(states, new_homes, 1, options=LoadOptions(exchange=exchange, timeout=60))
        check_states(states)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_ranks_load_from_their_own_disks(tmp_path: Path, ranks: int) -> None:
    homes = folders(tmp_path, ranks)
    save_on(states_for(ranks, True), homes)
    states = states_for(ranks, False)
    load_on(states, homes)
    check_states(states)


def test_ranks_that_cannot_reach_a_file_say_so_when_no_exchange_is_wanted(tmp_path: Path) -> None:
    homes = folders(tmp_path, 2)
    save_on(states_for(2, True), homes)
    states = states_for(2, False)
    results = try_load(states, homes, options=LoadOptions(exchange="never", timeout=60))
    for error in errors_of(results, CheckpointCorruptedError):
        assert "exchange is 'never'" in str(error)
    assert same_bits(states[0]["plain"], blank_like(states[0]["plain"]))


def test_replaced_and_failed_saves_leave_nothing_on_any_disk(tmp_path: Path) -> None:
    homes = folders(tmp_path, 3)
    for _ in range(3):
        save_on(states_for(3, True), homes, 7)
    for home in homes:
        assert len(data_files(home)) == 1
    states = states_for(3, False)
    load_on(states, homes)
    check_states(states)


def test_a_stale_file_of_another_save_is_not_taken_for_the_right_one(tmp_path: Path) -> None:
    """Of two disks that have a file of one name, only the one with the right content serves."""
    homes = folders(tmp_path, 3)
    array = make_array((50, 50))
    save_on([{}, {"a": array}, {}], homes)
    (path,) = data_files(homes[1])
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    (homes[2] / path.name).write_bytes(damaged)
    targets = [blank_like(array) for _ in range(3)]
    for exchange in ("auto", "always"):
        load_on([{"a": target} for target in targets], homes, options=LoadOptions(exchange=exchange, timeout=60))
        assert all(same_bits(target, array) for target in targets)


# -- how much is read


def covered_once(reads: list[tuple[str, int, int]]) -> dict[str, int]:
    """How many bytes of each file were read, after checking that none was read twice."""
    sizes: dict[str, int] = defaultdict(int)
    end: dict[str, int] = {}
    for name, start, stop in reads:
        assert start >= end.get(name, 0), f"bytes {start}:{end[name]} of {name} were read twice"
        end[name] = stop
        sizes[name] += stop - start
    return dict(sizes)


def tensor_bytes(folder: Path) -> dict[str, int]:
    """The size of each file's data."""
    found = {}
    for path in data_files(folder):
        with path.open("rb") as file:
            found[path.name] = path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return {name: size for name, size in found.items() if size}


@pytest.mark.parametrize("saved_on", [1, 3])
@pytest.mark.parametrize("loaded_on", [2, 3, 5])
def test_always_reads_each_byte_once_in_the_whole_job(tmp_path: Path, saved_on: int, loaded_on: int) -> None:
    save_on(states_for(saved_on, True), tmp_path)
    log: list[tuple[str, int, int]] = []
    states = states_for(loaded_on, False)
    paths = [CountingStorage(tmp_path, log) for _ in range(loaded_on)]
    reports = load_on(states, paths, options=LoadOptions(exchange="always", timeout=60))
    check_states(states)
    sizes = covered_once(data_reads(tmp_path, log))
    assert sizes == tensor_bytes(tmp_path)
    assert sum(report.bytes_read for report in reports) == sum(sizes.values())


def test_column_slices_on_eight_ranks_read_the_file_once(tmp_path: Path) -> None:
    array = make_array((4096, 1024))
    save_on([{"w": array}], tmp_path, options=SaveOptions())
    log: list[tuple[str, int, int]] = []
    parts = split_rows(array, 8, fill=False, dimension=1)
    paths = [CountingStorage(tmp_path, log) for _ in parts]
    reports = load_on([{"w": part} for part in parts], paths, options=LoadOptions(exchange="always", timeout=60))
    for part in parts:
        check_pieces(part, array)
    assert sum(covered_once(data_reads(tmp_path, log)).values()) == array.nbytes
    assert sum(report.bytes_read for report in reports) == array.nbytes
    assert sum(report.bytes_received for report in reports) == array.nbytes * 7 // 8
    assert max(report.bytes_read for report in reports) <= array.nbytes // 2, "several ranks share the reading"


@pytest.mark.parametrize("exchange", ["auto", "always", "never"])
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_row_slice_reads_what_it_needs_and_at_most_a_block_at_each_end(
    tmp_path: Path, ranks: int, exchange: Any
) -> None:
    array = make_array((4096, 257))
    save_on([{"w": array}], tmp_path, options=SMALL)
    boxes = [Box((37 + 501 * rank, 0), (333, 257)) for rank in range(ranks)]
    parts = [sharded(array, [box], fill=False) for box in boxes]
    logs: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    paths = [CountingStorage(tmp_path, log) for log in logs]
    reports = load_on([{"w": part} for part in parts], paths, options=LoadOptions(exchange=exchange, timeout=60))
    for part in parts:
        check_pieces(part, array)
    needed = 333 * 257 * 4
    read = [sum(stop - start for _, start, stop in data_reads(tmp_path, log)) for log in logs]
    assert read == [report.bytes_read for report in reports]
    assert sum(read) <= ranks * (needed + 2 * 4096)
    if exchange != "always":
        assert max(read) <= needed + 2 * 4096


@pytest.mark.parametrize("width", [1, 100, 1200])
def test_a_column_slice_of_wide_rows_reads_only_the_blocks_that_it_touches(tmp_path: Path, width: int) -> None:
    array = make_array((50, 10240), "float64")
    save_on([{"w": array}], tmp_path, options=SMALL)
    part = sharded(array, [Box((3, 5000), (40, width))], fill=False)
    log: list[tuple[str, int, int]] = []
    load_on([{"w": part}], CountingStorage(tmp_path, log))
    check_pieces(part, array)
    reads = data_reads(tmp_path, log)
    assert sum(covered_once(reads).values()) <= 40 * (width * 8 + 2 * 4096)


def test_ranks_on_one_host_read_for_themselves(tmp_path: Path) -> None:
    array = make_array((100, 100))
    save_on([{"w": array}], tmp_path)
    reports = load_on([{"w": blank_like(array)} for _ in range(3)], tmp_path)
    assert [report.bytes_received for report in reports] == [0, 0, 0]
    assert [report.bytes_read for report in reports] == [array.nbytes] * 3


def test_replicas_on_several_hosts_are_read_once_and_broadcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array, other = make_array((300, 100)), make_array((7,), "int64")
    save_on([{"w": array, "x": other}], tmp_path)
    sent: list[int] = []
    broadcast = InProcessTransport.broadcast

    def counted(self: InProcessTransport, data: Any, source: int, most: int) -> None:
        if source == self._rank:
            sent.append(len(data))
        broadcast(self, data, source, most)

    monkeypatch.setattr(InProcessTransport, "broadcast", counted)
    states = [{"w": blank_like(array), "x": blank_like(other)} for _ in range(4)]
    reports = load_on(states, [another_host(tmp_path, rank) for rank in range(4)])
    assert all(alike(state, {"w": array, "x": other}) for state in states)
    assert sum(size for size in sent if size != 8) == array.nbytes + other.nbytes  # 8: a digest
    assert sum(report.bytes_read for report in reports) == array.nbytes + other.nbytes
    assert sum(report.bytes_received for report in reports) == 3 * (array.nbytes + other.nbytes)


def test_a_rank_that_needs_nothing_may_read_for_all(tmp_path: Path) -> None:
    array = make_array((100, 100))
    homes = folders(tmp_path, 4)
    save_on([{}, {}, {}, {"w": array}], homes)
    targets = [blank_like(array) for _ in range(3)]
    states: list[dict[str, Any]] = [{"w": target} for target in targets]
    reports = load_on([*states, {}], homes)
    assert all(same_bits(target, array) for target in targets)
    assert [report.bytes_read for report in reports] == [0, 0, 0, array.nbytes]


def test_two_hosts_with_two_ranks_each(tmp_path: Path) -> None:
    """Folders are equal within a host and different between hosts."""
    homes = folders(tmp_path, 2)
    from paddle_dist_ckpt.testing import FaultyStorage

    def storages() -> list[FaultyStorage]:
        return [
            FaultyStorage(homes[rank // 2], lambda *_: None, FolderIdentity(f"h{rank // 2}", 1, 1)) for rank in range(4)
        ]

    for _ in range(2):
        save_on(states_for(4, True), storages(), 3)
    assert [len(data_files(home)) for home in homes] == [2, 2]
    states = states_for(4, False)
    load_on(states, storages())
    check_states(states)


def test_more_than_a_round_of_traffic(tmp_path: Path) -> None:
    """Several rounds of messages: more than 32 MiB for a rank."""
    array = np.arange(12 << 20, dtype="uint32").reshape(3072, 4096)
    save_on([{"w": part} for part in split_rows(array, 2)], tmp_path, options=SaveOptions())
    parts = split_rows(array, 3, fill=False, dimension=1)
    options = LoadOptions(exchange="always", timeout=60)
    reports = load_on([{"w": part} for part in parts], tmp_path, options=options)
    for part in parts:
        check_pieces(part, array)
    assert sum(report.bytes_read for report in reports) == array.nbytes
