"""One flipped byte anywhere in a checkpoint: an error that says where, on every rank; never a silent success."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import verify
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointError, RankFailureError
from paddle_dist_ckpt.options import LoadOptions, SaveOptions
from paddle_dist_ckpt.testing import FaultyStorage
from test.jobs import (
    alike,
    another_host,
    blank_like,
    data_files,
    errors_of,
    load_alone,
    load_on,
    load_whole,
    make_array,
    replaced_bytes,
    save_alone,
    save_on,
    sharded,
    try_load,
)
from test.readers.golden import GOLDEN

STATE: dict[str, Any] = {
    "doubles": make_array((40, 50), "float64"),
    "words": make_array((33, 100), "bfloat16", 1),
    "bytes": make_array((5001,), "uint8", 2),
    "text": "v" * 6000,
    "n": 3,
}


def wanted() -> dict[str, Any]:
    """Targets for all of it."""
    return {key: blank_like(value) if isinstance(value, np.ndarray) else None for key, value in STATE.items()}


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def entries(folder: Path) -> Iterator[tuple[str, Path, int, int]]:
    """The tensor, file, start and end of every entry."""
    import json

    for path in data_files(folder):
        start = header_bytes(path)
        header = json.loads(path.read_bytes()[8:start])
        for name, record in header.items():
            if name != "__metadata__":
                yield name.split("[")[0], path, start + record["data_offsets"][0], start + record["data_offsets"][1]


def flipped(path: Path, place: int, mask: int) -> Any:
    """The file with some bits of one byte flipped, for a while."""
    with path.open("rb") as file:
        file.seek(place)
        return replaced_bytes(path, {place: file.read(1)[0] ^ mask})


def test_a_flipped_byte_of_any_entry_is_blamed_on_its_tensor(tmp_path: Path) -> None:
    save_alone(STATE, tmp_path)
    rng = random.Random(1)
    seen = set()
    for key, path, start, stop in entries(tmp_path):
        seen.add(key)
        edges = {start, stop - 1, *range(start + 4095, stop, 4096), *range(start + 4096, stop, 4096)}
        for place in sorted(edges | {rng.randrange(start, stop) for _ in range(8)}):
            with flipped(path, place, 1 << rng.randrange(8)):
                with pytest.raises(CheckpointCorruptedError, match=rf"{key}\b.*{path.name}"):
                    load_alone(wanted(), tmp_path)
                with pytest.raises(CheckpointCorruptedError, match=key):
                    load_whole(tmp_path)
                report = verify(tmp_path)
                assert not report.ok
                assert [key in problem and path.name in problem for problem in report.problems] == [True]
                others = {name: target for name, target in wanted().items() if name != key}
                load_alone(others, tmp_path)
                assert alike(others, {name: STATE[name] for name in others})
    assert seen == set(STATE) - {"n"}
    state = wanted()
    load_alone(state, tmp_path)
    assert alike(state, STATE)
    assert verify(tmp_path).ok


def test_a_flipped_byte_of_any_part_of_a_header_is_blamed_on_its_file(tmp_path: Path) -> None:
    save_alone(STATE, tmp_path)
    (path,) = data_files(tmp_path)
    size = header_bytes(path)
    text = len(path.read_bytes()[:size].rstrip(b" "))
    assert text < size, "no padding to flip"
    for place in [*range(12), *range(12, text, 37), text - 1, text, (text + size) // 2, size - 1]:
        for mask in (1, 0x80):
            with flipped(path, place, mask):
                with pytest.raises(CheckpointCorruptedError, match=path.name):
                    load_alone(wanted(), tmp_path)
                report = verify(tmp_path)
                assert path.name in "".join(report.problems)


@pytest.mark.parametrize("change", [b"", b"x", None])
def test_a_file_of_another_length_is_refused(tmp_path: Path, change: bytes | None) -> None:
    save_alone(STATE, tmp_path)
    (path,) = data_files(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] if change is None else data + change if change else b"")
    with pytest.raises(CheckpointCorruptedError, match=path.name):
        load_alone(wanted(), tmp_path)
    assert path.name in "".join(verify(tmp_path).problems)


def test_a_file_of_another_save_under_the_same_name_is_refused(tmp_path: Path) -> None:
    save_alone({"a": np.arange(100)}, tmp_path / "one")
    save_alone({"a": np.arange(100) + 1}, tmp_path / "two")
    (one,), (two,) = data_files(tmp_path / "one"), data_files(tmp_path / "two")
    one.write_bytes(two.read_bytes())
    with pytest.raises(CheckpointCorruptedError, match=one.name):
        load_alone({"a": np.zeros(100, int)}, tmp_path / "one")


@pytest.mark.parametrize("hosts", [False, True])
@pytest.mark.parametrize("exchange", ["auto", "always", "never"])
def test_every_rank_raises_and_the_reader_of_the_damaged_block_is_named(
    tmp_path: Path, exchange: Any, hosts: bool
) -> None:
    array = make_array((64, 256))
    save_on([{"a": sharded(array, [Box((32 * i, 0), (32, 256))])} for i in range(2)], tmp_path)
    for key, path, _, stop in entries(tmp_path):
        low = 32 * int(path.name[0])
        targets = [
            {"a": sharded(array, [Box((low, 0), (16, 256))], fill=False)},
            {"a": sharded(array, [Box((low + 16, 0), (16, 256))], fill=False)},
            {},
        ]
        paths = [another_host(tmp_path, rank) if hosts else tmp_path for rank in range(3)]
        with flipped(path, stop - 5, 0x10):
            results = try_load(targets, paths, options=LoadOptions(exchange=exchange, timeout=60))
        for error in errors_of(results, RankFailureError):
            ((rank, failure),) = error.failures.items()
            exchanged = exchange == "always" or (exchange == "auto" and hosts)
            assert rank in (0, 1) if exchanged else rank == 1, "who reads the last block; rank 1 alone needs it"
            assert isinstance(failure, CheckpointCorruptedError)
            assert key in str(error)
            assert path.name in str(error)
            assert "partly written" in str(error)


def test_a_damaged_block_that_nobody_needs_is_not_read(tmp_path: Path) -> None:
    array = make_array((64, 256))
    save_alone({"a": array}, tmp_path)
    ((_, path, start, _),) = entries(tmp_path)
    with flipped(path, start + 40 * 1024, 1):
        target = sharded(array, [Box((0, 0), (39, 256))], fill=False)
        load_alone({"a": target}, tmp_path)
    assert np.array_equal(target.pieces[0].view("u4"), array[:39].view("u4"))


@pytest.mark.parametrize("exchange", ["auto", "always"])
def test_setters_and_values_are_left_alone_when_reading_fails(tmp_path: Path, exchange: Any) -> None:
    save_on([STATE], tmp_path)
    place = next((path, start) for key, path, start, _ in entries(tmp_path) if key == "words")
    states = [wanted(), wanted()]
    with flipped(place[0], place[1], 4):
        results = try_load(states, tmp_path, options=LoadOptions(exchange=exchange, timeout=60))
    errors_of(results, RankFailureError)
    assert all(state["n"] is None and state["text"] is None for state in states)


def test_a_flipped_byte_anywhere_in_the_metadata(tmp_path: Path) -> None:
    array = make_array((4, 4))
    save_on([{"a": part, "n": 5} for part in [sharded(array, [Box((2 * i, 0), (2, 4))]) for i in range(2)]], tmp_path)
    path = tmp_path / "0.metadata"
    minor = path.read_bytes().index(b'"version":[1,0]') + len(b'"version":[1,')
    size = path.stat().st_size
    silent = []
    for place in (place for place in range(size) if place != minor):  # any minor version may be read
        with flipped(path, place, (0x01, 0x20, 0x80)[place % 3]):
            try:
                load_alone({"a": blank_like(array), "n": 0}, tmp_path)
            except CheckpointError:
                continue
            silent.append(place)
    assert silent == []


def test_a_truncated_metadata_is_refused(tmp_path: Path) -> None:
    save_alone({"n": 5}, tmp_path)
    path = tmp_path / "0.metadata"
    data = path.read_bytes()
    for size in [*range(0, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:size])
        for results in (try_load([{"n": 0}], tmp_path), try_load([{"n": 0}, {}], tmp_path)):
            errors_of(results, CheckpointError)
    path.write_bytes(data + b"\n")
    errors_of(try_load([{"n": 0}], tmp_path), CheckpointCorruptedError)


def test_a_load_into_many_ranks_after_all_is_well_again(tmp_path: Path) -> None:
    save_on([STATE, {}], tmp_path)
    states = [wanted() for _ in range(3)]
    load_on(states, tmp_path, options=LoadOptions(exchange="always", timeout=60))
    assert all(alike(state, STATE) for state in states)


@pytest.mark.parametrize("rows", [1, 40000])
def test_a_disk_that_fails_in_the_middle_of_a_file_is_a_problem_of_each_tensor_that_it_hides(
    tmp_path: Path, rows: int
) -> None:
    save_alone({"a": make_array((rows, 50)), "b": make_array((7,))}, tmp_path)
    reads: list[str] = []

    def fail(operation: str, name: str) -> None:
        if operation == "read_into" and name.endswith(".safetensors"):
            reads.append(name)
            if len(reads) > good:
                raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    good = 1 << 30
    assert verify(FaultyStorage(tmp_path, fail)).ok
    good = len(reads) - 1
    del reads[:]
    report = verify(FaultyStorage(tmp_path, fail))
    assert report.problems
    assert all("Input/output error" in problem for problem in report.problems)


@pytest.mark.parametrize("block_bytes", [1 << 20, 4 << 20])
def test_a_file_that_is_cut_while_it_is_verified_is_a_problem(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a block that is read in several pieces."""
    # Of two threads the other one may read the file's end before.
    monkeypatch.setattr("paddle_dist_ckpt.folder.verify.io_threads", lambda *_, **__: 1)
    save_alone({"w": np.ones(4 << 20, np.uint8)}, tmp_path, options=SaveOptions(block_bytes=block_bytes))
    (file,) = data_files(tmp_path)
    reads: list[str] = []

    def cut(operation: str, name: str) -> None:
        if operation == "read_into" and name == file.name:
            reads.append(name)
            if len(reads) == last:
                os.truncate(file, file.stat().st_size - 1)

    last = 1 << 30
    assert verify(FaultyStorage(tmp_path, cut)).ok
    last = len(reads)
    del reads[:]
    (problem,) = verify(FaultyStorage(tmp_path, cut)).problems
    assert problem.startswith(f"w: {file} ends at byte ")


def test_a_file_of_another_format_that_cannot_be_opened_any_more_is_a_problem(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "hf-safetensors", tmp_path / "ckpt")
    opened: list[str] = []

    def fail(operation: str, name: str) -> None:
        if operation == "open" and name.endswith(".safetensors"):
            opened.append(name)
            if opened.count(name) > 1:
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), name)

    report = verify(FaultyStorage(tmp_path / "ckpt", fail))
    assert [problem.rpartition(" ")[0] for problem in report.problems] == ["[Errno 13] Permission denied:"] * 2


def test_files_that_are_refused_are_not_left_open(tmp_path: Path) -> None:
    save_alone(STATE, tmp_path)
    (path,) = data_files(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with flipped(path, 20, 1):
        for _ in range(20):
            with pytest.raises(CheckpointCorruptedError, match="header"):
                load_whole(tmp_path)
            assert not verify(tmp_path).ok
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(20):
        with pytest.raises(CheckpointCorruptedError, match="were written"):
            load_whole(tmp_path)
    assert len(os.listdir("/proc/self/fd")) < before + 15
