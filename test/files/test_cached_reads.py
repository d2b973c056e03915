"""What is cached is read and hashed window by window, in long segments where it needs no buffer."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.buffers import Buffers
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.errors import CheckpointCorruptedError
from paddle_dist_ckpt.files.holes import HoleBudget, Holes
from paddle_dist_ckpt.files.reader import Consumer, StoredEntry, entry_tasks
from paddle_dist_ckpt.files.runs import CHUNK_BYTES, STRAIGHT_BYTES, OpenFile
from paddle_dist_ckpt.storage.local_files import LocalReadable
from test.jobs import CountingStorage, blank_like, data_reads, load_alone, make_array, save_alone

START = 24  # of the data section
ROW = 1000  # items of four bytes: blocks and windows end within rows
ROWS = 5000  # 20 MB: more than one long segment, the last of which is short
WINDOW = 256 << 10
BLOCKS = [4096, WINDOW, 1 << 20, 4 << 20]
SHAPE = (ROWS, ROW)
CONTENT = np.random.default_rng(5).integers(0, 1 << 32, SHAPE, np.uint32)

BOXES = {
    "all": whole(SHAPE),
    "rows": Box((3, 0), (ROWS - 7, ROW)),
    "row": Box((ROWS - 1, 0), (1, ROW)),
    "within a row": Box((77, 5), (1, 900)),
    "columns": Box((0, 10), (ROWS, 500)),
}


class InMemory:
    """A file of bytes, some of which it may call a hole; notes what is read."""

    def __init__(self, data: bytes, hole: range = range(0)) -> None:
        self._data, self._hole = np.frombuffer(data, np.uint8), hole
        self.size = len(data)
        self.reads: list[tuple[int, int]] = []

    @property
    def on_disk(self) -> tuple[object, int]:
        return self, self.size - len(self._hole)

    def is_hole(self, offset: int, nbytes: int) -> bool:
        return self._hole.start <= offset and offset + nbytes <= self._hole.stop

    def hole_bytes(self, offset: int, nbytes: int) -> int:
        return max(0, min(offset + nbytes, self._hole.stop) - max(offset, self._hole.start))

    def read_into(self, buffers: Sequence[Any], offset: int, once: bool = False) -> None:
        self.reads.append((offset, sum(map(len, buffers))))
        for buffer in buffers:
            data = self._data[offset : offset + len(buffer)]
            if len(data) < len(buffer):
                raise EOFError("the file ends")
            buffer[:] = data
            offset += len(buffer)

    def is_cached(self) -> bool:
        return True

    def close(self) -> None: ...


def opened(
    content: np.ndarray, block_bytes: int, data: bytes | None = None, **options: Any
) -> tuple[OpenFile, InMemory]:
    """A file of one entry with the digests of its content, and with other ``data`` if it is damaged."""
    written = content.tobytes()
    digests = [xxhash.xxh3_64_intdigest(written[i : i + block_bytes]) for i in range(0, len(written), block_bytes)]
    file = InMemory(bytes(START) + (written if data is None else data), options.pop("hole", range(0)))
    hashes, holes = np.array(digests, np.uint64), Holes("f", file, HoleBudget())
    return OpenFile("f", file, START, hashes, holes, False, **options), file


def read(file: OpenFile, box: Box, block_bytes: int) -> np.ndarray:
    target = np.zeros(box.shape, np.uint32)
    entry = StoredEntry(file, 0, 0, SHAPE, DTYPES["uint32"], "w")
    for task in entry_tasks([(entry, [Consumer(box, target)])], block_bytes, Buffers(1), lambda nbytes: None):
        task()
    return target


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("block_bytes", BLOCKS)
@pytest.mark.parametrize("name", list(BOXES))
def test_every_part_is_what_was_written(name: str, block_bytes: int, cached: bool) -> None:
    box = BOXES[name]
    file, source = opened(CONTENT, block_bytes, cached=cached)
    assert np.array_equal(read(file, box, block_bytes), CONTENT[box.slices])
    ends = sorted((offset, offset + nbytes) for offset, nbytes in source.reads)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ends)), "nothing is read twice"
    most = max(nbytes for _, nbytes in source.reads)
    assert most <= (WINDOW if cached else max(CHUNK_BYTES, block_bytes))
    if name == "all" and not cached:
        assert most == max(CHUNK_BYTES, block_bytes)


def test_what_needs_no_buffer_is_read_in_long_segments_if_it_is_cached_and_verified() -> None:
    def tasks(file: OpenFile, box: Box) -> int:
        target = np.zeros(box.shape, np.uint32)
        entry = StoredEntry(file, 0, 0, SHAPE, DTYPES["uint32"], "w")
        return len(list(entry_tasks([(entry, [Consumer(box, target)])], 1 << 20, Buffers(1), lambda nbytes: None)))

    cached, cold = (opened(CONTENT, 1 << 20, cached=cached)[0] for cached in (True, False))
    chunks = -(-CONTENT.nbytes // CHUNK_BYTES)
    assert tasks(cached, whole(SHAPE)) == -(-CONTENT.nbytes // STRAIGHT_BYTES) < chunks
    assert tasks(cold, whole(SHAPE)) == chunks
    assert tasks(cached, BOXES["columns"]) == chunks, "its buffer stays small"
    assert tasks(dataclasses.replace(cached, hashes=None), whole(SHAPE)) == chunks, "nor is it read in windows"


@pytest.mark.parametrize("block_bytes", BLOCKS)
@pytest.mark.parametrize("place", [0, WINDOW, (1 << 20) - 1, STRAIGHT_BYTES + 5, ROWS * ROW * 4 - 1])
@pytest.mark.parametrize("name", ["all", "columns"])
def test_a_flipped_bit_is_noticed_wherever_it_is(name: str, place: int, block_bytes: int) -> None:
    damaged = bytearray(CONTENT.tobytes())
    damaged[place] ^= 4
    file, _ = opened(CONTENT, block_bytes, bytes(damaged), cached=True)
    block = place // block_bytes * block_bytes
    size = min(block_bytes, len(damaged) - block)
    with pytest.raises(
        CheckpointCorruptedError, match=rf"^w: the checksum of {size} bytes at {START + block} of f does"
    ):
        read(file, BOXES[name], block_bytes)


def test_blocks_that_are_swapped_are_noticed() -> None:
    data = CONTENT.tobytes()
    swapped = data[1 << 20 : 2 << 20] + data[: 1 << 20] + data[2 << 20 :]
    file, _ = opened(CONTENT, 1 << 20, swapped, cached=True)
    with pytest.raises(CheckpointCorruptedError, match=f"the checksum of 1048576 bytes at {START} of f"):
        read(file, whole(SHAPE), 1 << 20)


def test_a_file_that_ends_within_a_window_is_damaged() -> None:
    file, _ = opened(CONTENT, 1 << 20, CONTENT.tobytes()[:-1], cached=True)
    with pytest.raises(CheckpointCorruptedError, match=r"^w: the file ends$"):
        read(file, whole(SHAPE), 1 << 20)


def test_a_file_with_holes_is_looked_at_chunk_by_chunk() -> None:
    """Or little data in each long segment would have all of its holes read."""
    content = CONTENT.copy()
    content.reshape(-1)[CHUNK_BYTES // 4 : STRAIGHT_BYTES // 4] = 0
    hole = range(START + CHUNK_BYTES, START + STRAIGHT_BYTES)
    file, source = opened(content, 1 << 20, cached=True, hole=hole)
    assert np.array_equal(read(file, whole(SHAPE), 1 << 20), content)
    assert sum(nbytes for _, nbytes in source.reads) == content.nbytes - len(hole)


@pytest.mark.parametrize("cached", [True, False])
def test_a_load_reads_in_windows_what_is_cached(cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = make_array((1500, 1000), "int32")
    save_alone({"w": array}, tmp_path)
    monkeypatch.setattr(LocalReadable, "is_cached", lambda file: cached)
    log: list[tuple[str, int, int]] = []
    target = blank_like(array)
    load_alone({"w": target}, CountingStorage(tmp_path, log))
    assert np.array_equal(target, array)
    sizes = [stop - start for _, start, stop in data_reads(tmp_path, log)]
    assert sum(sizes) == array.nbytes
    assert max(sizes) == (WINDOW if cached else CHUNK_BYTES)
