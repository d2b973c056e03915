"""Data files written from tensors, from a snapshot or from both: the same bytes and checksums wherever they are cut."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from paddle_dist_ckpt.core.buffers import Buffers
from paddle_dist_ckpt.core.columns import pack_column
from paddle_dist_ckpt.core.dtypes import dtype_named
from paddle_dist_ckpt.core.memory import address_of, fresh_pages
from paddle_dist_ckpt.errors import CheckpointError
from paddle_dist_ckpt.files import contents, writer
from paddle_dist_ckpt.files.block_hashes import BlockHashes
from paddle_dist_ckpt.files.contents import SnapshotContents, Source, TensorContents
from paddle_dist_ckpt.files.datafile import FORMAT, DataFileInfo, EntryKind, FileTable, read_info
from paddle_dist_ckpt.files.metadata import FileInfo
from paddle_dist_ckpt.files.tables import TableRecord
from paddle_dist_ckpt.files.writer import FileSave, bytes_ahead
from paddle_dist_ckpt.saving.save_memory import SaveMemory
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing import FaultyStorage
from test.jobs import LAYOUTS, laid_out
from test.strategies import some

WINDOW = 8192
BLOCKS = (4096, 8192, 16384)
DTYPES = ("complex128", "float64", "float32", "float16", "uint8")
EMPTY = TableRecord([], [], pack_column([]), pack_column([]), [], pack_column([]), pack_column([]))
INFO = DataFileInfo(
    format=FORMAT,
    version=(1, 0),
    save_id="0123456789abcdef",
    unique_id=0,
    world_size=1,
    rank=0,
    part=0,
    parts=1,
    block_bytes=4096,
    created="now",
    library="test",
    paddle_version=None,
    tensors=EMPTY,
)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two pages, so that small files have many."""
    monkeypatch.setattr(writer, "WINDOW_BYTES", WINDOW)
    for kind in (contents.TensorContents, contents.SnapshotContents):
        monkeypatch.setattr(kind, "window_bytes", WINDOW)


@dataclass(frozen=True)
class File:
    """Entries with their content, and arrays that have it."""

    table: FileTable
    arrays: list[np.ndarray]
    data: bytes

    @property
    def sources(self) -> list[Source]:
        """Contiguous arrays by their address, others as they are."""
        return [address_of(a) if a.flags.c_contiguous else a for a in self.arrays]

    def tensors(self, threads: int = 1) -> TensorContents:
        return TensorContents(self.table, self.sources, Buffers(threads), None)

    def digests(self) -> list[int]:
        """The digest of every block, entry by entry."""
        size, found = self.table.block_bytes, []
        for start, stop in zip(self.table.offsets, self.table.offsets[1:], strict=False):
            found += [xxhash.xxh3_64_intdigest(self.data[i : min(i + size, stop)]) for i in range(start, stop, size)]
        return found


def file_of(sizes: Sequence[tuple[str, int]], block_bytes: int, layouts: Sequence[str] = ("c",)) -> File:
    """A file whose entries have these element types and sizes in bytes."""
    rng = np.random.default_rng(len(sizes))
    arrays, kinds = [], []
    for i, (name, nbytes) in enumerate(sizes):
        dtype = dtype_named(name)
        count = nbytes // dtype.itemsize
        shape = (count // 7, 7) if count % 7 == 0 else (count,)
        raw = rng.integers(0, 256, nbytes, np.uint8).view(dtype.raw).reshape(shape)
        arrays.append(laid_out(raw, layouts[i % len(layouts)]))
        kinds.append(EntryKind(dtype, shape))
    names = [f"e{i}" for i in range(len(sizes))]
    table = FileTable(names, kinds, np.arange(len(kinds), dtype=np.int64), block_bytes)
    return File(table, arrays, b"".join(array.tobytes() for array in arrays))


def bytes_of(*nbytes: int) -> list[tuple[str, int]]:
    return [("uint8", n) for n in nbytes]


EDGES = {
    "nothing": [],
    "only empty ones": bytes_of(0, 0, 0),
    "one byte": bytes_of(1),
    "one block": bytes_of(4096),
    "one window": bytes_of(WINDOW),
    "a window and a byte": bytes_of(WINDOW + 1),
    "a byte less than three windows": bytes_of(3 * WINDOW - 1),
    "cut at each window": bytes_of(WINDOW, WINDOW, WINDOW),
    "empty ones at edges": bytes_of(0, WINDOW, 0, 0, WINDOW, 0, 5, 0),
    "empty ones inside": bytes_of(5, 0, WINDOW, 0, 0, 7, 0),
    "blocks across windows": bytes_of(100, 5 * WINDOW + 3, 2 * WINDOW, 1),
    "a block begins with the last byte of a window": bytes_of(WINDOW - 1, 3 * WINDOW, 4096, 4095),
    "many small ones": bytes_of(*[(37 * i) % 301 for i in range(200)]),
    "large items first": [("complex128", 16 * 600), ("float64", 8 * 77), ("float16", 2 * 5001), ("uint8", 4097)],
}


def random_sizes(seed: int) -> list[tuple[str, int]]:
    """Up to 12 entries, larger items first, of sizes about those of blocks and windows."""
    rng = random.Random(seed)
    sizes = []
    for name in sorted(rng.choices(DTYPES, k=rng.randrange(1, 12)), key=DTYPES.index):
        item = dtype_named(name).itemsize
        around = rng.choice([0, 1, 5, 300, 4096, WINDOW, 2 * WINDOW, 3 * WINDOW])
        sizes.append((name, max(0, around + item * rng.choice([-1, 0, 0, 1, 3])) // item * item))
    return sizes


ALL_SIZES = {**EDGES, **{str(seed): random_sizes(seed) for seed in range(12)}}


def nothing(*_: Any) -> None:
    """No check, and no progress."""


def page_memory(nbytes: int) -> np.ndarray:
    """Memory from the beginning of a page, full of what no file has."""
    memory = fresh_pages(max(1, nbytes))[:nbytes]
    memory[:] = 0x5A
    return memory


def written(folder: Path, name: str, file: File, work: Callable[[FileSave], FileInfo]) -> bytes:
    """Write a file in a way; check its content and checksums; returns all of it."""
    storage = LocalStorage(folder)
    save = FileSave(storage, name, file.table, INFO, file.tensors(2))
    info = work(save)
    path = folder / name
    _, hashes, found, data_start = read_info(storage.open(name), name)
    assert found == info
    assert path.stat().st_size == info.size == data_start + file.table.nbytes
    content = path.read_bytes()
    assert content[data_start:] == file.data
    assert hashes.tolist() == file.digests()
    return content


def from_tensors(save: FileSave) -> FileInfo:
    return save.finish(2, nothing, nothing)


def after_snapshot(save: FileSave, file: File, ahead: int) -> FileInfo:
    """Write some bytes ahead, take a snapshot, destroy the tensors, and write the rest."""
    if ahead:
        save.write_ahead(ahead, 2, nothing)
    save.take_snapshot(page_memory(file.table.nbytes - ahead))
    for array in file.arrays:
        array[...] = np.zeros(1, np.uint8).view(bool)[0] if array.dtype == bool else 0
    return save.finish(1, nothing, nothing)


@pytest.mark.parametrize(("case", "block_bytes"), some(itertools.product(ALL_SIZES, BLOCKS), len(ALL_SIZES) + 4))
def test_a_file_is_the_same_however_it_is_written(tmp_path: Path, case: str, block_bytes: int) -> None:
    """Split at every window: what is before is written from the tensors, what is behind from the snapshot."""
    sizes = ALL_SIZES[case]
    direct = written(tmp_path, "direct", file_of(sizes, block_bytes, LAYOUTS), from_tensors)
    total = file_of(sizes, block_bytes).table.nbytes
    for ahead in {min(start, total) for start in range(0, total + WINDOW, WINDOW)}:
        file = file_of(sizes, block_bytes, LAYOUTS)
        name = f"ahead-{ahead}"
        assert written(tmp_path, name, file, lambda save, f=file, n=ahead: after_snapshot(save, f, n)) == direct


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_snapshot_is_a_copy_whatever_the_strides(layout: str) -> None:
    sizes = [("complex128", 16 * 700), ("float32", 4 * 7 * 999), ("float16", 2 * 4097), ("uint8", 7 * 1234)]
    for start in (0, WINDOW, 3 * WINDOW):
        file = file_of(sizes, 4096, [layout])
        memory = page_memory(file.table.nbytes - start)
        file.tensors().copy_to(memory, start)
        assert memory.tobytes() == file.data[start:]


def test_a_snapshot_is_copied_to_its_memory_and_no_further() -> None:
    file = file_of(bytes_of(100, 0, 5000, 0, 3), 4096, LAYOUTS)
    memory = page_memory(3 * 4096)
    file.tensors().copy_to(memory[4096 : 4096 + file.table.nbytes], 0)
    assert memory[4096 : 4096 + file.table.nbytes].tobytes() == file.data
    assert (memory[:4096] == 0x5A).all()
    assert (memory[4096 + file.table.nbytes :] == 0x5A).all()


@pytest.mark.parametrize("block_bytes", BLOCKS)
@pytest.mark.parametrize("seed", range(6))
def test_every_block_is_hashed_in_whatever_order_the_windows_are_opened(seed: int, block_bytes: int) -> None:
    file = file_of(random_sizes(seed), block_bytes)
    total = file.table.nbytes
    first = min(total // WINDOW // 2 * WINDOW, total)
    memory = page_memory(total - first)
    file.tensors().copy_to(memory, first)
    hashes = BlockHashes(file.table)
    count = -(-first // WINDOW)
    ahead = TensorContents(file.table, file.sources, Buffers(count), None).windows(range(first), hashes)
    windows = [*ahead, *SnapshotContents(file.table, memory, first).windows(range(first, total), hashes)]
    random.Random(seed).shuffle(windows)
    for window in windows:
        with window as (start, data):
            assert data.tobytes() == file.data[start : start + len(data)]
            assert address_of(data) % 4096 == 0, "else direct I/O is not possible"
    assert hashes.values.tolist() == file.digests()


def test_threads_may_hash_parts_of_one_block_at_the_same_time() -> None:
    file = file_of(bytes_of(40 * 4096 + 5), 64 * 4096)
    for seed in range(20):
        hashes = BlockHashes(file.table)
        starts = list(range(0, file.table.nbytes, 4096))
        random.Random(seed).shuffle(starts)
        with ThreadPoolExecutor(4) as pool:
            for start in starts:
                pool.submit(hashes.add, 0, start, memoryview(file.data)[start : start + 4096])
        assert hashes.values.tolist() == file.digests()


def test_what_comes_ahead_is_written_by_the_call_and_the_rest_later(tmp_path: Path) -> None:
    file = file_of(bytes_of(5 * WINDOW + 9), 4096)
    steps: list[str] = []
    storage = FaultyStorage(tmp_path, lambda operation, name: steps.append(operation))
    save = FileSave(storage, "file", file.table, INFO, file.tensors())
    assert steps == [], "no file is made before it is written to"
    save.write_ahead(2 * WINDOW, 1, nothing)
    assert steps == ["create", "write", "write"]
    save.take_snapshot(page_memory(file.table.nbytes - 2 * WINDOW))
    assert steps == ["create", "write", "write"]
    save.finish(1, nothing, nothing)
    assert steps == ["create", *["write"] * 2, *["write"] * 4, "write", "sync_file"], "the header is the last"


def test_of_a_save_that_has_failed_meanwhile_no_file_is_made(tmp_path: Path) -> None:
    """Nobody might look for it any more."""
    file = file_of(bytes_of(9), 4096)
    save = FileSave(LocalStorage(tmp_path), "file", file.table, INFO, file.tensors())

    def check() -> None:
        raise CheckpointError("it has failed")

    with pytest.raises(CheckpointError, match="it has failed"):
        save.finish(1, check, nothing)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ahead", [0, 2 * WINDOW, 6 * WINDOW])
def test_progress_adds_up_to_the_size(tmp_path: Path, ahead: int) -> None:
    file = file_of(bytes_of(5 * WINDOW + 9), 4096)
    ahead = min(ahead, file.table.nbytes)
    save = FileSave(LocalStorage(tmp_path), "file", file.table, INFO, file.tensors())
    if ahead:
        save.write_ahead(ahead, 1, nothing)
    save.take_snapshot(page_memory(file.table.nbytes - ahead))
    told: list[int] = []
    save.finish(1, nothing, told.append)
    assert sum(told) == file.table.nbytes


@pytest.mark.parametrize("when", ["ahead", "later"])
def test_a_check_that_raises_stops_the_writing(tmp_path: Path, when: str) -> None:
    file = file_of(bytes_of(5 * WINDOW), 4096)
    save = FileSave(LocalStorage(tmp_path), "file", file.table, INFO, file.tensors())
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        if when == "ahead":
            save.write_ahead(5 * WINDOW, 1, check)
        save.finish(1, check, nothing)
    assert len(calls) == 3
    save.close()
    save.close()


@pytest.mark.parametrize("nbytes", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW, 5 * WINDOW + 9])
def test_what_is_left_fits_in_the_room_and_is_cut_at_windows(nbytes: int) -> None:
    for room in sorted({0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, nbytes, nbytes + 1}):
        surplus = max(0, nbytes - room)
        ahead = bytes_ahead(nbytes, surplus)
        assert nbytes - ahead <= room
        assert ahead % WINDOW == 0 or ahead == nbytes
        assert ahead < surplus + WINDOW, "no more than it takes"


def test_the_buffer_is_kept_for_what_fits_and_grows() -> None:
    memory = SaveMemory()
    first = memory.snapshot_buffer(3 * 4096)
    address = address_of(first)
    assert len(first) == 3 * 4096
    assert address % 4096 == 0
    first[:] = 1
    for nbytes in (3 * 4096, 1, 0, 2 * 4096 + 1):
        again = memory.snapshot_buffer(nbytes)
        assert len(again) == nbytes
        assert nbytes == 0 or address_of(again) == address
    assert len(memory.snapshot_buffer(64 << 20)) == 64 << 20
    larger = address_of(memory.snapshot_buffer(64 << 20))
    assert address_of(memory.snapshot_buffer(3 * 4096)) == larger


def test_the_old_buffer_is_given_back_before_a_larger_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SaveMemory()
    memory.snapshot_buffer(4096)
    held: list[int] = []

    def fresh(nbytes: int, inherited: bool = True) -> np.ndarray:
        held.append(len(memory._buffer))
        return fresh_pages(nbytes, inherited)

    monkeypatch.setattr("paddle_dist_ckpt.saving.save_memory.fresh_pages", fresh)
    memory.snapshot_buffer(8192)
    assert held == [0]


def test_a_buffer_that_cannot_be_had_leaves_a_memory_that_works() -> None:
    memory = SaveMemory()
    memory.snapshot_buffer(4096)
    with pytest.raises(MemoryError, match="cannot be had"):
        memory.snapshot_buffer(1 << 60)
    assert len(memory.snapshot_buffer(4096)) == 4096


def test_nothing_holds_the_sources_when_the_snapshot_is_taken(tmp_path: Path) -> None:
    file = file_of(bytes_of(7 * 1000, 5000), 4096, ["fortran", "strided"])
    save = FileSave(LocalStorage(tmp_path), "file", file.table, INFO, file.tensors())
    save.take_snapshot(page_memory(file.table.nbytes))
    held = [weakref.ref(array) for array in file.arrays]
    file.arrays.clear()
    gc.collect()
    assert all(reference() is None for reference in held)
    save.close()


@pytest.mark.parametrize("is_copied", [False, True], ids=["from the tensors", "from a snapshot"])
def test_small_entries_take_no_steps_of_their_own(is_copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls from Python are counted: thousands of small entries need fewer than there are entries."""
    for kind in (contents.TensorContents, contents.SnapshotContents):
        monkeypatch.setattr(kind, "window_bytes", contents.WINDOW_BYTES)
    file = file_of(bytes_of(*[96] * 3000, *[40] * 3000), 4096)
    memory, hashes, calls = fresh_pages(file.table.nbytes), BlockHashes(file.table), 0
    tensors = file.tensors()

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        if is_copied:
            tensors.copy_to(memory, 0)
        source = SnapshotContents(file.table, memory, 0) if is_copied else tensors
        with closing(source.windows(range(file.table.nbytes), hashes)) as windows:
            for window in windows:
                with window as (_, data):
                    assert bytes(data) == file.data
    finally:
        sys.setprofile(None)
    assert hashes.values.tolist() == file.digests()
    assert calls < 1000
