"""Holes in data files: not read where all of a block is one; and no more of others than there is on the disk."""

from __future__ import annotations

import errno
import filecmp
import json
import os
import pickle
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    LoadOptions,
    copy_checkpoint,
    export,
    read_metadata,
    stored,
    verify,
)
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.buffers import Buffers
from paddle_dist_ckpt.files import batches
from paddle_dist_ckpt.files.holes import HoleBudget, Holes
from paddle_dist_ckpt.files.metadata import FileInfo
from paddle_dist_ckpt.files.reader import clear
from paddle_dist_ckpt.folder.boxes import BoxReader
from paddle_dist_ckpt.folder.selection import Selection
from paddle_dist_ckpt.folder.verify import _check_foreign
from paddle_dist_ckpt.loading.merged import load_merged
from paddle_dist_ckpt.storage.local import LocalStorage
from paddle_dist_ckpt.storage.local_files import LocalReadable
from paddle_dist_ckpt.testing import NumpyAdapter
from test.cli.commands import fails, run
from test.jobs import load_alone, load_whole, same_bits
from test.strategies import some
from test.torture.budgets import bytes_on_disk, cost_of
from test.torture.crafting import Entry, write_checkpoint
from test.waiting import PATIENCE

_PAGE = b"x" * 4096


def _holes(folder: Path, mib: int, block_bytes: int = 1 << 20, page: bytes = b"") -> Path:
    entry = Entry([mib << 10, 1 << 10], [[], []], "uint8")
    write_checkpoint(folder, {"/w": entry}, block_bytes=block_bytes, page=page)
    return folder


def _looks_at_holes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes are looked at, from here on, each time that it is asked whether there is a hole."""
    looks = list[int]()
    real = LocalReadable.is_hole

    def is_hole(self: LocalReadable, offset: int, nbytes: int) -> bool:
        looks.append(nbytes)
        return real(self, offset, nbytes)

    monkeypatch.setattr(LocalReadable, "is_hole", is_hole)
    return looks


def test_what_is_read_of_holes_is_bounded_by_what_is_on_the_disk(tmp_path: Path) -> None:
    much = _holes(tmp_path / "much", 64, 16 << 20, _PAGE)
    assert "in other blocks more holes than" in "".join(verify(much).problems)
    with pytest.raises(CheckpointCorruptedError, match=r"copy it again without \(cp --sparse=never\)"):
        load_whole(much, flat=True)
    some = _holes(tmp_path / "some", 32, 16 << 20, _PAGE)  # as a copy may have
    assert verify(some).ok
    assert int(load_whole(some, flat=True)["w"].sum()) == 2 * 4096 * ord("x")


def test_a_part_of_a_file_counts_once(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as stream:
        stream.seek(1 << 20)
        stream.write(_PAGE)
        stream.truncate(200 << 20)
    file = LocalStorage(tmp_path).open("file")
    assert file.hole_bytes(0, 2 << 20) == (2 << 20) - 4096
    assert file.hole_bytes(1 << 20, 4096) == 0
    assert file.hole_bytes(199 << 20, 5 << 20) == 1 << 20
    holes = Holes("file", file, HoleBudget())
    for _ in range(9):
        holes.read(0, 40 << 20)
    with pytest.raises(CheckpointCorruptedError, match="file has 4096 bytes on the disk"):
        holes.read(40 << 20, 40 << 20)
    file.close()


def test_a_file_has_its_own_part_when_others_have_used_up_what_is_shared(tmp_path: Path) -> None:
    budget = HoleBudget()
    for name, page in (("a", b""), ("b", _PAGE * 4)):
        (tmp_path / name).write_bytes(page)
        os.truncate(tmp_path / name, 100 << 20)
    with closing(LocalStorage(tmp_path).open("a")) as a, closing(LocalStorage(tmp_path).open("b")) as b:
        with pytest.raises(CheckpointCorruptedError, match="a has 0 bytes on the disk"):
            Holes("a", a, budget).read(0, 100 << 20)
        holes = Holes("b", b, budget)
        holes.read(0, 5 * 4096)
        with pytest.raises(CheckpointCorruptedError, match="b has 16384 bytes on the disk"):
            holes.read(1 << 20, 1 << 20)


class _Slow(LocalReadable):
    """A file that says where its holes are when another one has."""

    def __init__(self, path: Path, others: threading.Barrier) -> None:
        super().__init__(os.open(path, os.O_RDONLY), path, queue.SimpleQueue())
        self._others = others

    def hole_bytes(self, offset: int, nbytes: int) -> int:
        self._others.wait(PATIENCE)
        return super().hole_bytes(offset, nbytes)


def test_no_file_waits_until_another_has_said_where_its_holes_are(tmp_path: Path) -> None:
    """A network filesystem may have to ask its server; and all files share one budget."""
    budget, both = HoleBudget(), threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for name in ("a", "b"):
            (tmp_path / name).touch()
            os.truncate(tmp_path / name, 40 << 20)
        files = [_Slow(tmp_path / name, both) for name in ("a", "b")]
        reads = [pool.submit(Holes("file", file, budget).read, 0, 1 << 20) for file in files]
        assert [read.result() for read in reads] == [None, None]
    assert budget.left == (48 << 20) - (2 << 20)
    for file in files:
        file.close()


def _sharded_with_holes(folder: Path, files: int, mib: int) -> Path:
    """Files of safetensors, with a page of something in every 2 MiB, as an export to them may be copied."""
    folder.mkdir()
    names = {f"w{i}": f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)}
    for key, name in names.items():
        entry = {"dtype": "U8", "shape": [mib << 20], "data_offsets": [0, mib << 20]}
        header = json.dumps({key: entry}).encode().ljust(4088)
        with (folder / name).open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            for at in range(0, mib << 20, 2 << 20):
                stream.seek(4096 + at)
                stream.write(_PAGE)
            stream.truncate(4096 + (mib << 20))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_all_files_together_have_no_more_of_holes_than_there_is_on_the_disk(tmp_path: Path) -> None:
    folder = _sharded_with_holes(tmp_path / "some", 4, 10)
    assert {key: len(value) for key, value in load_whole(folder, flat=True).items()} == {
        f"w{i}": 10 << 20 for i in range(4)
    }
    folder = _sharded_with_holes(tmp_path / "much", 6, 10)
    with pytest.raises(CheckpointCorruptedError, match="in other blocks more holes than there is memory for"):
        load_whole(folder, flat=True)
    with pytest.raises(CheckpointCorruptedError, match="in other blocks more holes than there is memory for"):
        export(folder, tmp_path / "out")


def test_many_small_holes_count_as_a_large_one(tmp_path: Path) -> None:
    """Tensors of 60 KB, each with something else behind it, so that they are not read together."""
    array = pickle.dumps(np.zeros(15_000, np.float32), protocol=3)[2:-1]
    begin, end = array.split(bytes(60_000))
    with (tmp_path / "model.pdparams").open("wb") as stream:
        stream.write(b"\x80\x03}")
        for i in range(2000):
            stream.write(b"X\x05\x00\x00\x00" + f"{i:05}".encode() + begin)
            stream.seek(60_000, os.SEEK_CUR)
            stream.write(end + b"sB" + (9000).to_bytes(4, "little"))  # bytes that nobody asks for
            stream.seek(9000, os.SEEK_CUR)
            stream.write(b"0")
        stream.write(b".")
    with pytest.raises(CheckpointCorruptedError, match="in other blocks more holes than there is memory for"):
        load_whole(tmp_path, flat=True)


def test_columns_of_a_hole_are_looked_at_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself would take as many steps through the whole tensor as there are."""
    columns = 256
    write_checkpoint(tmp_path, {"/w": Entry([4096, columns], [[], list(range(1, columns))])})
    cleared = list[tuple[int, ...]]()
    monkeypatch.setattr(batches, "clear", lambda target: cleared.append(target.shape) or clear(target))
    state = {"w": np.ones((4096, columns), np.float32)}
    load_alone(state, tmp_path)
    assert not state["w"].any()
    assert cleared == [(4096, columns // 2)] * 2, "of as many as are read together"


def test_a_hole_that_is_converted_takes_no_memory(tmp_path: Path) -> None:
    entry = Entry([64 << 20], [[]])
    write_checkpoint(tmp_path / "hole", {"/w": entry}, block_bytes=64 << 20)
    write_checkpoint(tmp_path / "small", {"/w": Entry([4], [[]])})
    options = LoadOptions(recipes={"w": stored("w").cast("float64")})

    def size(folder: Path) -> int:
        return load_merged(LocalStorage(folder), NumpyAdapter(), None, Selection(), True, options)["w"].size

    found = cost_of(size, tmp_path / "small", tmp_path / "hole")
    assert found.outcome == str(64 << 20)
    assert found.memory < 64 << 20


def _same(first: Path, second: Path) -> bool:
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    return filecmp.cmpfiles(first, second, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("block_bytes", some([4096, 1 << 20], 1))
def test_a_copy_keeps_holes(tmp_path: Path, block_bytes: int) -> None:
    data = np.arange((5 << 20) + 3, dtype=np.uint8).tobytes()
    entries = {
        "/a": Entry([200 << 20, 1], [[3, 70 << 20], []], "uint8"),
        "/b": Entry([len(data)], [[]], "uint8", data=data),
        "/c": Entry([(100 << 20) + 5], [[]], "uint8"),
    }
    write_checkpoint(tmp_path / "a", entries, block_bytes=block_bytes)
    copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert bytes_on_disk(tmp_path / "b") < bytes_on_disk(tmp_path / "a") + (4 << 20), "a chunk at each edge"
    assert _same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("format", "dtype", "block_bytes"),
    [
        ("safetensors", None, 1 << 20),
        ("safetensors", "float16", 1 << 20),
        ("pdparams", None, 1 << 20),
        ("native", None, 1 << 20),
        ("native", "float16", 1 << 20),
        ("native", None, 16 << 20),
    ],
)
def test_an_export_keeps_holes(tmp_path: Path, format: str, dtype: str | None, block_bytes: int) -> None:
    data = np.arange(5 << 18, dtype=np.float32) % 1000
    entries = {
        "/a": Entry([50 << 20, 1], [[3, 20 << 20], []]),
        "/b": Entry([len(data)], [[]], data=data.tobytes()),
        "/c": Entry([(100 << 20) + 5], [[]], "uint8"),
    }
    write_checkpoint(tmp_path / "a", entries, block_bytes=block_bytes)
    out = tmp_path / "out" / ("x.pdparams" if format == "pdparams" else "x")
    out.parent.mkdir()
    export(tmp_path / "a", out, format, dtype=dtype)
    written = out.parent if out.is_file() else out
    assert bytes_on_disk(written) < bytes_on_disk(tmp_path / "a") + (80 << 20), "a window at each edge"
    found = load_whole(out)
    assert format != "native" or verify(out).ok
    assert np.array_equal(found["b"], data.astype(dtype or "float32"))
    assert found["a"].shape == (50 << 20, 1)
    assert not found["a"].any()
    assert not found["c"].any()


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("format", ["safetensors", "paddle", "pdparams", "native"])
def test_an_export_writes_no_large_holes_beside_what_is_none(tmp_path: Path, format: str, dtype: str | None) -> None:
    arrays = {f"{i:02}a": np.arange(1024, dtype=np.float32) + i for i in range(40)}
    entries = {f"/{key}": Entry([1024], [[]], data=array.tobytes()) for key, array in arrays.items()}
    holes = {f"/{i:02}b": Entry([1 << 18], [[]]) for i in range(40)}
    write_checkpoint(tmp_path / "a", entries | holes, block_bytes=4096)
    out = tmp_path / "out" / ("x.pdparams" if format == "pdparams" else "x")
    out.parent.mkdir()
    export(tmp_path / "a", out, format, dtype=dtype)
    assert bytes_on_disk(out.parent if out.is_file() else out) < bytes_on_disk(tmp_path / "a") + (1 << 20)
    found = load_whole(out)
    assert len(found) == 80
    assert format != "native" or verify(out).ok
    assert all(same_bits(found[key], array.astype(dtype or "float32")) for key, array in arrays.items())
    assert not any(found[f"{i:02}b"].any() for i in range(40))


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("format", ["safetensors", "paddle", "pdparams", "native"])
def test_an_export_writes_no_large_holes_within_a_tensor(tmp_path: Path, format: str, dtype: str | None) -> None:
    data = np.zeros(8 << 20, np.float32)
    data[12345 :: 1 << 20] = np.arange(1, 9)
    write_checkpoint(tmp_path / "a", {"/w": Entry([len(data)], [[]], data=data.tobytes())}, block_bytes=4096)
    (file,) = (tmp_path / "a").glob("*.safetensors")
    content = np.fromfile(file, np.uint8)
    file.unlink()
    with file.open("wb") as stream:
        for page in np.flatnonzero(np.maximum.reduceat(content, range(0, len(content), 4096))).tolist():
            stream.seek(page * 4096)
            stream.write(content[page * 4096 : page * 4096 + 4096])
        stream.truncate(len(content))
    out = tmp_path / "out" / ("x.pdparams" if format == "pdparams" else "x")
    out.parent.mkdir()
    export(tmp_path / "a", out, format, dtype=dtype)
    assert bytes_on_disk(out.parent if out.is_file() else out) < bytes_on_disk(tmp_path / "a") + (1 << 20)
    assert format != "native" or verify(out).ok
    assert same_bits(load_whole(out)["w"], data.astype(dtype or "float32"))


def test_holes_of_a_transpose_are_hashed_in_full(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", {"/a": Entry([20 << 20, 1], [[], []])}, block_bytes=1 << 20)
    export(tmp_path / "a", tmp_path / "out", "native", options=LoadOptions(recipes={"a": stored("a").T}))
    assert bytes_on_disk(tmp_path / "out") < 1 << 20
    assert verify(tmp_path / "out").ok
    found = load_whole(tmp_path / "out")["a"]
    assert found.shape == (1, 20 << 20)
    assert not found.any()


def test_a_copy_writes_holes_where_it_cannot_keep_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = _holes(tmp_path / "start", 8)
    asked = list[int]()

    def refuse(descriptor: int, nbytes: int) -> None:
        asked.append(nbytes)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "ftruncate", refuse)
    error = errno.EOPNOTSUPP
    copy_checkpoint(start, tmp_path / "copy")
    assert len(asked) == 1
    assert _same(start, tmp_path / "copy")
    assert bytes_on_disk(tmp_path / "copy") > 8 << 20
    error = errno.EIO
    with pytest.raises(OSError, match=r"Input/output error: .*safetensors"):
        copy_checkpoint(start, tmp_path / "failed")
    assert list((tmp_path / "failed").iterdir()) == []


def test_a_copy_without_holes_is_written_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "a", {"/w": Entry([3 << 20], [[]], "uint8", data=b"x" * (3 << 20))})
    monkeypatch.setattr(os, "ftruncate", lambda descriptor, nbytes: 1 // 0)
    copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert _same(tmp_path / "a", tmp_path / "b")


def test_a_hole_in_place_of_data_is_not_copied(tmp_path: Path) -> None:
    data = b"x" * (8 << 20)
    write_checkpoint(
        tmp_path / "a", {"/v": Entry([64 << 20], [[]], "uint8"), "/w": Entry([8 << 20], [[]], "uint8", data=data)}
    )
    (file,) = (tmp_path / "a").glob("*.safetensors")
    size = file.stat().st_size
    os.truncate(file, size - (2 << 20))
    os.truncate(file, size)
    assert "w: the checksum of 1048576 bytes" in "".join(verify(tmp_path / "a").problems)
    with pytest.raises(CheckpointCorruptedError, match="w: the checksum of 1048576 bytes"):
        copy_checkpoint(tmp_path / "a", tmp_path / "b")
    assert list((tmp_path / "b").iterdir()) == []


@pytest.mark.parametrize(
    ("zeros", "others", "block_bytes", "wrong"),
    [(512 << 10, 512 << 10, 64 << 10, 64 << 10), (9 << 20, 1, 1 << 20, 1)],
    ids=["half of it", "the last byte"],
)
def test_a_hole_in_place_of_data_is_not_taken_for_the_zeros_beside_them(
    tmp_path: Path, zeros: int, others: int, block_bytes: int, wrong: int
) -> None:
    """After a crash that the data did not survive, say: all of a segment is a hole, and some of it were zeros."""
    data = bytes(zeros) + b"x" * others
    write_checkpoint(tmp_path, {"/w": Entry([len(data)], [[]], "uint8", data=data)}, block_bytes=block_bytes)
    assert verify(tmp_path).ok
    (file,) = tmp_path.glob("*.safetensors")
    size = file.stat().st_size
    os.truncate(file, size - len(data))
    os.truncate(file, size)
    said = f"w: the checksum of {wrong} bytes"
    assert said in "".join(verify(tmp_path).problems)
    with pytest.raises(CheckpointCorruptedError, match=said):
        load_whole(tmp_path)


def test_a_large_hole_is_known_by_a_few_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = _holes(tmp_path / "start", 64 << 10)
    (file,) = start.glob("*.safetensors")
    looks = _looks_at_holes(monkeypatch)
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda storage: None)  # smaller disks have no room for it
    assert verify(start).ok
    copy_checkpoint(start, tmp_path / "copy")
    assert len(looks) < 20
    with file.open("r+b") as stream:  # in the middle of 65,536 blocks
        stream.seek(-32 << 30, os.SEEK_END)
        stream.write(b"x")
    looks.clear()
    assert len(verify(start).problems) == 1
    assert 15 < len(looks) < 60


def test_a_comparison_does_not_read_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (_holes(tmp_path / name, 256) for name in "ab")
    compared = list[int]()
    real = BoxReader.read

    def read(self: BoxReader, rows: Sequence[int], *args: Any) -> None:
        compared.extend(rows)
        real(self, rows, *args)

    monkeypatch.setattr(BoxReader, "read", read)
    run("diff", first, second)
    assert not compared
    (file,) = second.glob("*.safetensors")
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"x")
    assert "does not match" in fails("diff", first, second)
    assert compared, "a block that is no hole any more is read"


def test_one_large_buffer_is_there_at_a_time() -> None:
    buffers = Buffers(2, lambda size: np.zeros(size, np.uint8))
    large, small = buffers.take(17 << 20), buffers.take(1 << 20)
    buffers.give_back(large)
    assert buffers.take(17 << 20) is large
    buffers.give_back(small)
    assert {id(buffers.take(1 << 20)), id(buffers.take(1 << 20))} >= {id(small)}


def test_what_another_format_has_checksums_of_is_no_endless_hole(tmp_path: Path) -> None:
    with open(tmp_path / "hole.bin", "wb") as file:
        file.truncate(1 << 42)
    info, checksum = FileInfo("hole.bin", 1 << 42, ""), (0, 0, 1 << 42, 0)
    (problem,) = _check_foreign(LocalStorage(tmp_path), info, [checksum], lambda nbytes: None, HoleBudget())
    assert "more holes than there is memory for" in problem


@pytest.mark.parametrize("block_bytes", [1 << 16, 1 << 20])
def test_holes_in_many_columns_are_known_without_an_object_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    rows, columns, window = 1 << 20, 64, 1 << 16
    entry = Entry([rows, columns], [[], list(range(1, columns))], "uint8")
    write_checkpoint(tmp_path, {"/w": entry}, block_bytes=block_bytes)
    (file,) = tmp_path.glob("*.safetensors")
    with file.open("r+b") as stream:
        stream.seek(-entry.nbytes + 40 * rows + 3 * window, os.SEEK_END)  # the 41st column, in the fourth window
        stream.write(b"x")
    monkeypatch.setattr(BoxReader, "_entry", lambda *_: 1 // 0)
    storage = LocalStorage(tmp_path)
    boxes = [Box((start, 0), (window, columns)) for start in range(0, rows, window)]
    with BoxReader(storage, read_metadata(storage), [0] * len(boxes), boxes) as reader:
        holes = [reader.is_hole(row) for row in range(len(boxes))]
    assert holes == [block_bytes == 1 << 16 and row != 3 for row in range(len(boxes))]


def test_shards_that_are_holes_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many windows have a bit of each; and what else there is in a window is read."""
    rows, columns, step = 1 << 17, 64, 1 << 12
    entry = Entry([rows, columns], [[], list(range(1, columns))], "uint8")
    write_checkpoint(tmp_path, {"/w": entry}, block_bytes=1 << 20)
    (file,) = tmp_path.glob("*.safetensors")
    with file.open("r+b") as stream:
        stream.seek(-entry.nbytes + 40 * rows, os.SEEK_END)  # the 41st column begins with zeros that are on the disk
        stream.write(bytes(4096))
    looks = _looks_at_holes(monkeypatch)
    storage = LocalStorage(tmp_path)
    boxes = [Box((start, 0), (step, columns)) for start in range(0, rows, step)]
    target = np.full((step, columns), 7, np.uint8)
    with BoxReader(storage, read_metadata(storage), [0] * len(boxes), boxes) as reader:
        assert not any(reader.is_hole(row) for row in range(len(boxes)))
        assert len(looks) < columns + len(boxes)
        reads = list[int]()
        monkeypatch.setattr(LocalReadable, "read_into", lambda self, parts, *_: reads.append(sum(map(len, parts))))
        reader.read([3], [target])
    assert not target.any()
    assert reads == [rows], "of all columns one is read"


def test_windows_lie_along_the_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor of very many columns each window has whole ones, and holes are known without being read."""
    for name in "ab":
        entry = Entry([1 << 14, 1 << 12], [[], list(range(1, 1 << 12))])
        write_checkpoint(tmp_path / name, {"/w": entry}, block_bytes=1 << 20)
        (file,) = (tmp_path / name).glob("*.safetensors")
        with file.open("r+b") as stream:
            stream.seek(-entry.nbytes // 2, os.SEEK_END)
            stream.write(bytes(4096))
    read = list[int]()
    real = BoxReader.read

    def counted(self: BoxReader, rows: Sequence[int], targets: Sequence[np.ndarray], *args: Any, **more: Any) -> None:
        read.append(sum(target.nbytes for target in targets))
        real(self, rows, targets, *args, **more)

    monkeypatch.setattr(BoxReader, "read", counted)
    assert "equal: 1 key" in run("diff", tmp_path / "a", tmp_path / "b")
    assert read == [4 << 20] * 2, "one window of each"
    read.clear()
    assert "zero      67,108,864" in run("cat", tmp_path / "a", "w", "--stats")
    assert read == [16 << 20]
