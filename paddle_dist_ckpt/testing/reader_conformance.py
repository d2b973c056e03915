"""Tests that every :class:`paddle_dist_ckpt.readers.catalog.Reader` has to pass. This module needs pytest.

Whoever writes a Reader derives a class from :class:`ReaderTests` and gives it a reader and a small checkpoint:

    class TestMyReader(ReaderTests):
        @pytest.fixture
        def reader(self):
            return MyReader()

        @pytest.fixture
        def checkpoint(self):
            return ForeignCheckpoint.of_folder(path, arrays={"model.weight": array}, values={"step": 3})
"""

from __future__ import annotations

import random
import re
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

from ..core.box import Box, intersect, whole
from ..errors import CheckpointCorruptedError, CheckpointNotFoundError, UnsupportedValueError
from ..readers.catalog import Catalog, Reader, StoredTensor
from ..storage import LocalStorage
from ..storage.base import Storage
from ..tree.paths import containers_of, flat_keys, format_path
from .catalogs import read_catalog
from .faults import FaultyStorage

__all__ = ["ForeignCheckpoint", "ReaderTests", "check_catalog", "mutations"]

_REFUSED = (CheckpointNotFoundError, CheckpointCorruptedError, UnsupportedValueError)
_MOST_SECONDS = 1.0  # of the processor, for a damaged checkpoint
_MOST_MEMORY = 64 << 20  # beyond the size of its files
_MOST_MESSAGE = 4096  # characters
_MUTATIONS = 120  # of each file
_MOST_MUTATIONS = 600  # of the files of a checkpoint together, where that is not too few of each
_FEWEST_MUTATIONS = 24  # of each
_MEASURED = 12  # of 120 with a look at memory, which takes several times as long
_READS = {"names", "open", "read_into", "size", "read"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A small checkpoint of another format, and what is in it.

    Attributes:
        files: The content of each file.
        arrays: Each tensor by its flat key, as items of the same size as its element type.
        values: Each value that is no tensor by its flat key.
        unique_id: Its number.
    """

    files: dict[str, bytes]
    arrays: dict[str, npt.NDArray[Any]]
    values: dict[str, Any] = field(default_factory=dict)
    unique_id: int = 0

    @classmethod
    def of_folder(cls, path: Path, *, without: tuple[str, ...] = (), **what: Any) -> ForeignCheckpoint:
        """The files of a folder, but for those of some names; see the class for the rest."""
        names = sorted(entry.name for entry in path.iterdir() if entry.name not in without)
        return cls({name: (path / name).read_bytes() for name in names}, **what)


def check_catalog(storage: Storage, catalog: Catalog) -> None:
    """Check what a catalog promises: all that it says is inside of files and tensors, which is there once.

    Raises:
        AssertionError: it is not so.
    """
    sizes = [file.size for file in catalog.files]
    for file in catalog.files:
        assert not set(file.name) & set("/\\\0"), f"{file.name!r} is no plain name"
        assert file.name not in ("", ".", ".."), f"{file.name!r} is no plain name"
        assert storage.size(file.name) == file.size, f"{file.name} has another size"
    assert len({file.name for file in catalog.files}) == len(catalog.files), "a file is there twice"
    assert catalog.world_size >= 1
    for tensor in catalog.tensors:
        _check_tensor(tensor, sizes)
    paths = [format_path(path) for path in (*(t.path for t in catalog.tensors), *(p for p, _ in catalog.values))]
    assert len(set(paths)) == len(paths), "two leaves have one path"
    assert not containers_of(paths) & set(paths), "a leaf is inside of another"
    for path, value in catalog.values:
        assert _is_plain(value), f"{path} has a value that is not plain: {value!r}"
    for checksum in catalog.checksums:
        assert 0 <= checksum.position <= checksum.position + checksum.nbytes <= sizes[checksum.file]


def _check_tensor(tensor: StoredTensor, sizes: list[int]) -> None:
    region = whole(tensor.shape)
    boxes: list[Box] = []
    for box, file, position in tensor.pieces:
        assert len(box.offset) == len(box.shape) == len(tensor.shape), f"{tensor.path}: {box} has other dimensions"
        assert min((*box.offset, *box.shape), default=0) >= 0
        assert box.size == 0 or intersect(box, region) == box, f"{tensor.path}: {box} is outside of {tensor.shape}"
        assert all(intersect(box, other) is None for other in boxes), f"{tensor.path}: {box} is there twice"
        assert 0 <= position <= position + box.size * tensor.dtype.itemsize <= sizes[file]
        boxes.append(box)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in _PLAIN


def mutations(content: bytes, generator: random.Random, count: int = _MUTATIONS) -> Iterator[bytes]:
    """Contents that are damaged: cut short, longer, with other bits, bytes, a part missing, there twice or zero."""
    size = len(content)
    for i in range(count):
        at = generator.randrange(size) if size else 0
        end = min(size, at + generator.choice((1, 2, 8, 64, 4096)))
        kind = i % 8
        if kind == 0:
            yield content[:at]
        elif kind == 1:
            yield content[:at] + bytes([content[at] ^ (1 << generator.randrange(8))]) + content[at + 1 :]
        elif kind == 2:
            yield content[:at] + generator.randbytes(end - at) + content[end:]
        elif kind == 3:
            yield content[:at] + content[end:]
        elif kind == 4:
            yield content[:end] + content[at:]
        elif kind == 5:
            yield content[:at] + bytes(end - at) + content[end:]
        elif kind == 6:
            yield content[:at] + b"\xff" * (end - at) + content[end:]
        else:
            yield content + generator.randbytes(1 + generator.randrange(100))


class ReaderTests:
    """The promises of a Reader, as tests. To be derived from, with fixtures ``reader`` and ``checkpoint``."""

    @pytest.fixture
    def reader(self) -> Reader:
        """The reader."""
        raise NotImplementedError("override the fixture 'reader' by one that gives the reader")

    @pytest.fixture
    def checkpoint(self) -> ForeignCheckpoint:
        """A checkpoint of the format, of some tensors in each of its files."""
        raise NotImplementedError("override the fixture 'checkpoint' by one that gives a small checkpoint")

    @pytest.fixture
    def folder(self, tmp_path: Path, checkpoint: ForeignCheckpoint) -> Path:
        """A folder that holds the checkpoint."""
        path = tmp_path / "checkpoint"
        path.mkdir()
        for name, content in checkpoint.files.items():
            (path / name).write_bytes(content)
        return path

    # -- what it is

    def test_it_is_a_reader(self, reader: Reader) -> None:
        assert isinstance(reader, Reader)
        assert re.fullmatch("[a-z][a-z0-9_]*", reader.format)
        assert isinstance(reader.title, str)
        assert reader.title

    # -- what is found

    def test_it_is_found_by_names_alone(self, reader: Reader, checkpoint: ForeignCheckpoint) -> None:
        for names in (list(checkpoint.files), tuple(reversed(checkpoint.files)), set(checkpoint.files)):
            found = reader.found(names)
            assert checkpoint.unique_id in found
            assert found == sorted(set(found))
            assert checkpoint.unique_id in reader.found([*names, "config.json", "README.md", "notes"])

    @pytest.mark.parametrize("names", [[], ["config.json", "README.md"], [".", "..", "", "a b"]])
    def test_nothing_is_found_where_nothing_is(self, reader: Reader, names: list[str]) -> None:
        assert reader.found(names) == []

    def test_what_is_not_found_is_not_read(self, reader: Reader, checkpoint: ForeignCheckpoint, folder: Path) -> None:
        storage = LocalStorage(folder)
        with pytest.raises(CheckpointNotFoundError):
            reader.read(storage, [], checkpoint.unique_id)
        with pytest.raises(CheckpointNotFoundError):
            reader.read(storage, list(checkpoint.files), max(reader.found(list(checkpoint.files))) + 1)

    # -- what is read

    def test_all_of_it_is_read(self, reader: Reader, checkpoint: ForeignCheckpoint, folder: Path) -> None:
        storage = LocalStorage(folder)
        catalog = reader.read(storage, storage.names(), checkpoint.unique_id)
        check_catalog(storage, catalog)
        assert (catalog.format, catalog.unique_id) == (reader.format, checkpoint.unique_id)
        arrays = read_catalog(storage, catalog)
        assert arrays.keys() == checkpoint.arrays.keys()
        for key, expected in checkpoint.arrays.items():
            assert arrays[key].shape == expected.shape, key
            assert arrays[key].tobytes() == expected.tobytes(), key
        keys = flat_keys([format_path(path) for path, _ in catalog.values])
        values = dict(zip(keys, (value for _, value in catalog.values), strict=True))
        assert values == checkpoint.values
        assert {k: type(v) for k, v in values.items()} == {k: type(v) for k, v in checkpoint.values.items()}

    def test_checksums_are_those_of_the_files(
        self, reader: Reader, checkpoint: ForeignCheckpoint, folder: Path
    ) -> None:
        catalog = reader.read(LocalStorage(folder), list(checkpoint.files), checkpoint.unique_id)
        for file, position, nbytes, crc32 in catalog.checksums:
            content = checkpoint.files[catalog.files[file].name]
            assert zlib.crc32(content[position : position + nbytes]) == crc32

    def test_the_order_of_names_does_not_matter(
        self, reader: Reader, checkpoint: ForeignCheckpoint, folder: Path
    ) -> None:
        storage, names = LocalStorage(folder), sorted(checkpoint.files)
        first = reader.read(storage, names, checkpoint.unique_id)
        assert reader.read(storage, [*reversed(names), "README.md"], checkpoint.unique_id) == first

    def test_it_only_reads(self, reader: Reader, checkpoint: ForeignCheckpoint, folder: Path) -> None:
        done = []
        storage = FaultyStorage(folder, lambda operation, name: done.append((operation, name)))
        reader.read(storage, list(checkpoint.files), checkpoint.unique_id)
        assert {operation for operation, _ in done} <= _READS
        assert {name for _, name in done} <= {"", *checkpoint.files}

    def test_an_error_of_the_storage_is_passed_on(
        self, reader: Reader, checkpoint: ForeignCheckpoint, folder: Path
    ) -> None:
        def fail(operation: str, name: str) -> None:
            if operation in ("read", "read_into"):  # a reader need not do both
                raise OSError(5, "Input/output error", name)

        storage = FaultyStorage(folder, fail)
        with pytest.raises(OSError, match="Input/output"):
            reader.read(storage, list(checkpoint.files), checkpoint.unique_id)

    # -- what is damaged

    def test_a_missing_file_is_noticed(self, reader: Reader, checkpoint: ForeignCheckpoint, folder: Path) -> None:
        storage, noticed = LocalStorage(folder), 0
        for name, content in checkpoint.files.items():
            (folder / name).unlink()
            rest = [other for other in checkpoint.files if other != name]
            noticed += _outcome(reader, storage, rest, checkpoint.unique_id) is None
            # It may also be among the names and vanish before it is opened.
            _outcome(reader, storage, list(checkpoint.files), checkpoint.unique_id)
            (folder / name).write_bytes(content)
        assert noticed

    def test_damage_is_noticed_or_harmless(self, reader: Reader, checkpoint: ForeignCheckpoint, folder: Path) -> None:
        """Whatever a file has become: an error of the right type, soon, or a catalog that keeps its promises."""
        self._try_all(reader, checkpoint, folder, _timed)

    def test_damage_takes_little_memory(self, reader: Reader, checkpoint: ForeignCheckpoint, folder: Path) -> None:
        self._try_all(reader, checkpoint, folder, _weighed, every=_MUTATIONS // _MEASURED + 1)

    def _try_all(
        self,
        reader: Reader,
        checkpoint: ForeignCheckpoint,
        folder: Path,
        measured: Callable[[Callable[[], object], int], None],
        every: int = 1,
    ) -> None:
        storage, names = LocalStorage(folder), list(checkpoint.files)
        count = min(_MUTATIONS, max(_FEWEST_MUTATIONS, _MOST_MUTATIONS // len(names)))
        for number, (name, content) in enumerate(checkpoint.files.items()):
            generator = random.Random(zlib.crc32(name.encode()))
            for i, damaged in enumerate(mutations(content, generator, count)):
                if i % every == number % every:  # of several files each has other kinds
                    (folder / name).write_bytes(damaged)
                    size = sum(map(storage.size, names))
                    measured(lambda: _outcome(reader, storage, names, checkpoint.unique_id), size)
            (folder / name).write_bytes(content)


def _outcome(reader: Reader, storage: Storage, names: list[str], unique_id: int) -> Catalog | None:
    """The catalog, checked; None where it is refused as it should be."""
    try:
        catalog = reader.read(storage, names, unique_id)
    except _REFUSED as error:
        message = str(error)
        if not 0 < len(message) < _MOST_MESSAGE:
            raise AssertionError(f"a message of {len(message)} characters") from error
        return None
    check_catalog(storage, catalog)
    return catalog


def _timed(work: Callable[[], object], size: int) -> None:
    start = time.process_time()
    work()
    assert time.process_time() - start < _MOST_SECONDS


def _weighed(work: Callable[[], object], size: int) -> None:
    tracemalloc.start()
    try:
        work()
        assert tracemalloc.get_traced_memory()[1] < size + _MOST_MEMORY
    finally:
        tracemalloc.stop()
