"""A verification decodes values as a load does, reads no holes, and starts again when its checkpoint is replaced."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import export, read_metadata, verify
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointReplacedError
from paddle_dist_ckpt.folder.boxes import BoxReader
from paddle_dist_ckpt.folder.checkpoint import read_checkpoint
from paddle_dist_ckpt.folder.stored_values import read_values
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing import FaultyStorage
from test.cli.commands import answer
from test.jobs import data_files, little_memory, load_alone, load_whole, make_array, same_bits, save_alone
from test.torture.crafting import Entry, write_checkpoint


def text_entry(text: bytes) -> Entry:
    return Entry([len(text)], [[]], "uint8", 2, text)


@pytest.mark.parametrize(
    "text", [b"[1,", b'{"x":1}', b"\0\0\0", b'{"array":["|S0",[99999999],""]}', b'{"dict":[[[],1]]}']
)
@pytest.mark.parametrize("inline", [False, True])
def test_values_that_cannot_be_decoded_are_problems(tmp_path: Path, text: bytes, inline: bool) -> None:
    if inline and text in (b"[1,", b"\0\0\0"):
        pytest.skip("it would not be JSON as a whole")
    entries = {"/w": Entry([4], [[]])} if inline else {"/w": Entry([4], [[]]), "/v": text_entry(text)}
    write_checkpoint(tmp_path, entries, [("/v", text)] if inline else [])
    report = verify(tmp_path)
    assert not report.ok
    (problem,) = report.problems
    assert problem.startswith("v: ")
    found = answer("verify", tmp_path, code=1)
    assert [entry["text"] for entry in found["problems"]] == [problem]
    with pytest.raises(CheckpointCorruptedError, match="^v: "):
        load_whole(tmp_path)
    if inline:
        with pytest.raises(CheckpointCorruptedError, match="^v: "):
            assert read_metadata(tmp_path).values
        with pytest.raises(CheckpointCorruptedError, match="v: "):
            export(tmp_path, tmp_path / "out.pdparams", format="pdparams")


def test_good_values_are_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"/v": text_entry(b"[1,2] ")}, [("/n", b"5")])
    assert verify(tmp_path).ok
    assert load_whole(tmp_path) == {"v": [1, 2], "n": 5}


@pytest.mark.parametrize(("count", "damaged"), [(300, [7]), (300, [0, 5, 299]), (2500, range(0, 2500, 2)), (1, [0])])
def test_a_damaged_value_among_many_is_told_from_the_others(tmp_path: Path, count: int, damaged: Sequence[int]) -> None:
    write_checkpoint(tmp_path, {f"/v/{i:04}": text_entry(b"%4d" % i) for i in range(count)})
    (file,) = data_files(tmp_path)
    with file.open("r+b") as data:
        for i in damaged:
            at = file.read_bytes().index(b"%4d" % i, file.stat().st_size - 4 * count)
            data.seek(at)
            data.write(b"1e99")
    storage = LocalStorage(tmp_path)
    found = list(read_values(storage, read_checkpoint(storage, 0), range(count)))
    wrong = [i for i, value in enumerate(found) if isinstance(value, CheckpointCorruptedError)]
    assert set(wrong) >= set(damaged)
    assert {str(found[i]).partition(":")[0] for i in wrong} <= {f"v.{i:04}" for i in damaged}
    if len(damaged) < 64:
        assert wrong == list(damaged)
        assert [value for i, value in enumerate(found) if i not in wrong] == [i for i in range(count) if i not in wrong]
    assert len(verify(tmp_path).problems) >= min(len(damaged), 64)


def test_many_values_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, {f"/v/{i:04}": text_entry(b"%d" % i) for i in range(2000)})
    reads, read = list[int](), BoxReader.read
    monkeypatch.setattr(BoxReader, "read", lambda self, rows, *args: reads.append(len(rows)) or read(self, rows, *args))
    assert verify(tmp_path).ok
    assert reads == [1024, 976]
    assert answer("diff", tmp_path, tmp_path)["equal"]
    assert len(reads) == 6


def replacing(folder: Path, times: int) -> FaultyStorage:
    """A folder in which the checkpoint is replaced when its data file is about to be opened."""
    left = [times]

    def hook(operation: str, name: str) -> None:
        if operation == "open" and name.endswith(".safetensors") and left[0]:
            left[0] -= 1
            save_alone({"a": np.arange(5.0) + left[0]}, folder, 0)

    return FaultyStorage(folder, hook)


def test_a_verification_starts_again_when_its_checkpoint_is_replaced(tmp_path: Path) -> None:
    save_alone({"a": np.arange(5.0)}, tmp_path, 0)
    assert verify(replacing(tmp_path, 3), 0).ok
    with pytest.raises(CheckpointReplacedError, match="was replaced 4 times"):
        verify(replacing(tmp_path, 4), 0)


def test_the_command_starts_again_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_alone({"a": np.arange(5.0)}, tmp_path, 0)
    storage = replacing(tmp_path, 2)
    monkeypatch.setattr("paddle_dist_ckpt.storage.as_source", lambda path: storage)
    assert answer("verify", tmp_path, "--id", 0)["ok"]


# -- holes


def punched(folder: Path, shape: tuple[int, int] = (64, 8192)) -> dict[str, Any]:
    """A checkpoint with zeros, saved, and copied so that they are a hole."""
    state = {"zeros": np.zeros(shape), "columns": np.zeros(shape, "<c16"), "ones": make_array((300, 300))}
    save_alone(state, folder)
    (path,) = data_files(folder)
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(0)
        for start in range(0, len(data), 4096):
            if data[start : start + 4096].strip(b"\0"):
                file.seek(start)
                file.write(data[start : start + 4096])
        file.truncate(len(data))
    return state


def test_a_hole_is_not_read_where_zeros_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = punched(tmp_path)
    (path,) = data_files(tmp_path)
    if path.stat().st_blocks * 512 > path.stat().st_size // 2:
        pytest.skip("this filesystem has no holes")
    read, real = [0], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(real(*args)) or read[-1])
    assert verify(tmp_path).ok
    for found in (load_whole(tmp_path), {key: np.full_like(value, -1) for key, value in state.items()}):
        if found["zeros"].any():
            load_alone(found, tmp_path)
        assert all(same_bits(found[key], state[key]) for key in state)
    assert sum(read) < 4 * state["ones"].nbytes + 3 * (1 << 20)


def test_a_hole_where_something_else_was_written_is_damage(tmp_path: Path) -> None:
    save_alone({"w": make_array((512, 512))}, tmp_path)
    (path,) = data_files(tmp_path)
    size = path.stat().st_size
    os.truncate(path, 4096 + (1 << 19))
    os.truncate(path, size)
    (problem,) = verify(tmp_path).problems
    assert problem.startswith("w: the checksum of 4096 bytes")
    with pytest.raises(CheckpointCorruptedError, match="checksum"):
        load_whole(tmp_path)


def test_a_value_that_is_no_row_of_bytes_is_a_problem(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"/v": Entry([1, 2], [[], []], "uint8", 2, b"42"), "/w": Entry([4], [[]])})
    (problem,) = verify(tmp_path).problems
    assert problem == "v: a stored value that is not a row of bytes"
    with pytest.raises(CheckpointCorruptedError, match="v: a stored value that is not a row of bytes"):
        load_whole(tmp_path)


@pytest.mark.parametrize("work", [verify, load_whole])
@pytest.mark.parametrize("kind", ["bytes", "array"])
def test_long_values_take_twice_their_size(tmp_path: Path, kind: str, work: Callable[[Path], object]) -> None:
    value = os.urandom(12 << 20) if kind == "bytes" else np.array(["ab"] * (3 << 19))
    save_alone({"v": [value], "x": np.zeros(4, np.float32)}, tmp_path)
    work(tmp_path)  # so that what it needs of code is there
    with little_memory(2 * (16 << 20) + (3 << 20)):
        work(tmp_path)


def test_a_load_leaves_nothing_of_what_it_was_told_to_the_search_for_garbage(tmp_path: Path) -> None:
    save_alone({"w": np.zeros(4, np.float32), "d": [{"v": i} for i in range(500)]}, tmp_path)
    gc.collect()
    gc.disable()
    try:
        assert len(load_whole(tmp_path)["d"]) == 500
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = {type(item).__name__ for item in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left & {"LoadCoordinator", "StoredPaths", "WantedPaths"}


@pytest.mark.parametrize("read", [verify, load_whole])
def test_what_is_read_of_a_value_is_freed_before_the_value_is_made(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    text = b'{"bytes":"' + b"A" * 20_000_000 + b'"}'
    write_checkpoint(tmp_path, {"/v": text_entry(text)})
    with little_memory(5 * len(text) // 2):
        read(tmp_path)
