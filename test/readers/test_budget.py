"""What it takes to find out what a checkpoint holds follows from what is on the disk, whatever its files say."""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from paddle_dist_ckpt import CheckpointCorruptedError, read_metadata
from paddle_dist_ckpt.readers.budget import Budget
from paddle_dist_ckpt.readers.pdparams import PdparamsReader
from test.pace import slowness
from test.readers.golden import GOLDEN
from test.readers.measured import measured
from test.readers.test_hostile import text
from test.strategies import some

_MIB = 1 << 20
_SIZE = 5 * _MIB
_MOST_MEMORY = 64 * _MIB  # beyond the size on the disk
_START = b"\x80\x04}"
_LIST = _START + text("a") + b"]("
_ARRAY = (
    b"\x80\x04cnumpy.core.multiarray\n_reconstruct\n\x940cnumpy\nndarray\n\x940cnumpy\ndtype\n\x8c\x02f4\x89\x88\x87R"
    b"\x940}(" + text("x") + b"h\x00)R(K\x01\x85h\x02\x89C\x04\0\0\0\0tb\x94"
)
PICKLES: dict[str, Callable[[], bytes]] = {
    "references to nothing": lambda: _START + b"\x94" * _SIZE + b".",
    "a list of nothing": lambda: _LIST + b"N" * _SIZE + b"es.",
    "a list of small numbers": lambda: _LIST + b"K\x01" * (_SIZE // 2) + b"es.",
    "a list of larger numbers": lambda: _LIST + b"M\x01\x02" * (_SIZE // 3) + b"es.",
    "a list of one dict": lambda: b"\x80\x04}\x940}" + text("a") + b"](" + b"h\x00" * (_SIZE // 2) + b"es.",
    "a list of one array": lambda: _ARRAY + text("a") + b"](" + b"h\x03" * (_SIZE // 2) + b"eu.",
    "texts of wide characters": lambda: _LIST + b"\x8c\x04\xf0\x9f\x98\x80" * (_SIZE // 6) + b"es.",
    "what is dropped at once": lambda: _START + b"N0" * (_SIZE // 2) + b".",
    "lines": lambda: _LIST + b"V\n" * (_SIZE // 2) + b"es.",
    "a dict far below": lambda: (
        _START
        + (text("a") + b"}") * 58
        + b"("
        + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(_SIZE // 6))
        + b"u"
        + b"s" * 58
        + b"."
    ),
    "dicts in dicts": lambda: (
        _START
        + b"("
        + b"".join(b"\x8c\x05%05x}" % i + b"\x8c\x01a}" * 59 + b"s" * 59 for i in range(_SIZE // 306))
        + b"u."
    ),
}


def _members(member: bytes) -> bytes:
    """A JSON object of many members."""
    return b"{" + b",".join(b'"%06x":' % i + member for i in range(_SIZE // (len(member) + 10))) + b"}"


HEADERS: dict[str, Callable[[], bytes]] = {
    "wrong members": lambda: _members(b"0"),
    "members of no bytes": lambda: _members(b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'),
    "a long shape": lambda: b'{"a":{"dtype":"U8","shape":[' + b"0," * (_SIZE // 2) + b'0],"data_offsets":[0,0]}}',
    "escapes": lambda: b'{"__metadata__":{"a":"' + b'\\"' * (_SIZE // 2) + b'"}}',
}


def _with_length(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


def _links(folder: Path) -> None:
    """One file under many names, each of which has to be read."""
    (folder / "a.pdparams").write_bytes(pickle.dumps({f"k{i}": i for i in range(20_000)}, 4))
    for i in range(200):
        if i % 2:
            os.link(folder / "a.pdparams", folder / f"{i}.pdparams")
        else:
            (folder / f"{i}.pdparams").symlink_to("a.pdparams")


def _long_value(nbytes: int, content: bytes) -> bytes:
    """The start of a pickle of a byte string that begins so, up to a part of it that may be a hole."""
    return _START + text("a") + b"\x8e" + struct.pack("<Q", nbytes) + content


def _holes(folder: Path) -> None:
    """Many files of a value each, of which little is on the disk."""
    for i in range(20):
        with (folder / f"{i}.pdparams").open("wb") as file:
            file.write(_long_value(15 * _MIB, b""))
            file.seek(15 * _MIB, os.SEEK_CUR)
            file.write(b"s.")


def _linked_value(folder: Path) -> None:
    (folder / "a.pdparams").write_bytes(_long_value(_SIZE, bytes(_SIZE)) + b"s.")
    for i in range(50):
        os.link(folder / "a.pdparams", folder / f"{i}.pdparams")


def _hole(name: str, start: bytes, size: int) -> Callable[[Path], None]:
    """A file that is nearly all hole."""

    def write(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.write(start)
            file.truncate(size)

    return write


FOLDERS: dict[str, Callable[[Path], object]] = {
    **{name: lambda f, made=made: (f / "a.pdparams").write_bytes(made()) for name, made in PICKLES.items()},
    **{
        name: lambda f, made=made: (f / "a.safetensors").write_bytes(_with_length(made()))
        for name, made in HEADERS.items()
    },
    "an index of many": lambda f: (f / "model.safetensors.index.json").write_bytes(
        b'{"weight_map":' + _members(b'"x.safetensors"') + b"}"
    ),
    "links": _links,
    "a long value under many names": _linked_value,
    "values that are holes": _holes,
    "a header that is a hole": _hole("a.safetensors", struct.pack("<Q", 99_000_000) + b"{", 100 * _MIB),
    "an index that is a hole": _hole("model.safetensors.index.json", b"{", 8 << 30),
    "a value that is a hole": _hole("a.pdparams", _long_value(4 << 30, b""), 5 << 30),
}


def test_what_asks_for_too_much_is_refused_in_time(tmp_path: Path) -> None:
    names = some(FOLDERS, 10)
    folders = [tmp_path / str(i) for i in range(len(names))]
    for folder, name in zip(folders, names, strict=True):
        folder.mkdir()
        FOLDERS[name](folder)
    for folder, name, taken in zip(folders, names, measured(folders), strict=True):
        files = {(status.st_dev, status.st_ino): status for status in map(Path.stat, folder.iterdir())}
        size = sum(status.st_blocks * 512 for status in files.values())
        error = taken["error"] or ""
        assert error.startswith("CheckpointCorruptedError: "), f"{name}: {taken}"
        assert len(error) < 4096, name
        assert taken["memory"] < size + _MOST_MEMORY, f"{name}: {taken}"
        assert taken["seconds"] < 5 * slowness(), f"{name}: {taken}"


def _left_in(budget: Budget) -> int:
    """How many steps a budget still allows; there are none afterwards."""
    left, step = 0, 1 << 30
    while step:
        try:
            budget.spend(step, "here")
            left += step
        except CheckpointCorruptedError as error:
            assert str(error).startswith("here: what has been read so far takes more time and memory")  # noqa: PT017
            budget.spend(-step, "here")
            step >>= 1
    return left


def test_a_budget_ends() -> None:
    free = _left_in(Budget())
    assert 1 << 20 < free < 5 << 20
    budget = Budget()
    for _ in range(5):
        budget.grant("a file", 10 * _MIB)  # by whatever name it is opened
    assert _left_in(budget) - free == 3 * _MIB // 2
    large = Budget()
    large.grant("a file", 20 * _MIB)
    large.grant("another", 100 * _MIB)
    assert _left_in(large) - free == (3 * 32 + 2 * 88) * _MIB // 20  # so that memory grows no faster than files


def test_long_texts_and_bytes_take_what_is_on_the_disk() -> None:
    budget = Budget()
    budget.grant("a file", 10 * _MIB)
    budget.take_bytes(26 * _MIB, "here")
    with pytest.raises(CheckpointCorruptedError, match="here and what is before it are larger than the files"):
        budget.take_bytes(1, "here")


def test_a_budget_asks_for_more_when_it_is_due_and_once() -> None:
    asked: list[str] = []

    def more() -> Iterator[tuple[object, int]]:
        asked.append("more")
        yield from (("a file", 5 * _MIB), ("another", 5 * _MIB), ("a file", 5 * _MIB))

    free, budget = _left_in(Budget()), Budget(more)
    budget.grant("another", 5 * _MIB)
    budget.spend(free, "here")
    assert not asked
    assert _left_in(budget) == 3 * _MIB // 2
    assert asked == ["more"]


def test_many_small_tensors_are_no_attack(tmp_path: Path) -> None:
    arrays = {f"layers.{i}.weight": np.full((2, 3), i, np.float32) for i in range(30_000)}
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps(arrays, 4))
    assert len(read_metadata(tmp_path).table.paths) == 30_000


@pytest.mark.parametrize("folder", ["paddle-3.3.1", "torch-dcp-2.13"])
def test_what_describes_tensors_may_take_what_their_files_are_worth(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The description is read first, and alone may be too much of a checkpoint whose tensors are large."""
    shutil.copytree(GOLDEN / folder, tmp_path / "it")
    paths = read_metadata(tmp_path / "it").table.paths
    monkeypatch.setattr("paddle_dist_ckpt.readers.budget._FREE", -50_000)
    with pytest.raises(CheckpointCorruptedError, match="has room for"):
        read_metadata(tmp_path / "it")
    for path in (tmp_path / "it").glob("*.distcp"):
        with path.open("ab") as file:
            file.write(b"\1" * 4 * _MIB)
    assert read_metadata(tmp_path / "it").table.paths == paths


def test_what_nobody_has_thought_of_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps({"a": 1}, 4))
    for error in (MemoryError(), OverflowError("x" * 9999), RecursionError("deep"), TypeError("odd"), SystemError()):

        def fail(self: PdparamsReader, *args: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(PdparamsReader, "read", fail)
        with pytest.raises(CheckpointCorruptedError, match=r"\.pdparams") as caught:
            read_metadata(tmp_path)
        assert caught.value.__cause__ is error
        assert len(str(caught.value)) < 1000
    monkeypatch.setattr(PdparamsReader, "read", lambda self, *args: (_ for _ in ()).throw(OSError(5, "broken")))
    with pytest.raises(OSError, match="broken"):
        read_metadata(tmp_path)


def test_tensors_of_a_few_bytes_take_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more for each would have checkpoints of very many such tensors refused."""
    counted: list[int] = []
    spend = Budget.spend

    def counting(self: Budget, steps: int, where: object) -> None:
        counted.append(steps)
        spend(self, steps, where)

    monkeypatch.setattr(Budget, "spend", counting)
    arrays = {f"w{i}": np.arange(6, dtype="float32") + i for i in range(1000)}
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps(arrays, 4))
    assert len(read_metadata(tmp_path).table.paths) == len(arrays)
    assert 100 < sum(counted) / len(arrays) < 140
