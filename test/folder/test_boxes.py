"""Reading boxes of a checkpoint without a framework."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import CheckpointCorruptedError, read_metadata
from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.folder import boxes
from paddle_dist_ckpt.folder.boxes import BoxReader
from paddle_dist_ckpt.storage import LocalStorage
from test.jobs import CountingStorage, data_files, data_reads, make_array, save_on, split_rows
from test.torture.crafting import Entry, write_checkpoint

ARRAYS = {
    "columns": make_array((9, 3000), "bfloat16"),
    "empty": make_array((0, 4)),
    "rows": make_array((13, 700)),
    "scalar": make_array((), "int64"),
    "small": make_array((3,), "bool"),
}
BOXES = [
    ("columns", Box((2, 10), (5, 2900))),
    ("rows", Box((3, 0), (1, 700))),
    ("scalar", whole(())),
    ("empty", whole((0, 4))),
    ("rows", whole((13, 700))),
    ("small", Box((1,), (2,))),
]


def saved(folder: Path) -> None:
    """The arrays, by three ranks: some cut along a dimension, the others whole on each."""
    cut = {"columns": split_rows(ARRAYS["columns"], 3, dimension=1), "rows": split_rows(ARRAYS["rows"], 3)}
    save_on([{key: cut[key][rank] if key in cut else ARRAYS[key] for key in ARRAYS} for rank in range(3)], folder)


def reader_of(storage: LocalStorage, boxes: list[tuple[str, Box]]) -> BoxReader:
    metadata = read_metadata(storage)
    return BoxReader(storage, metadata, [metadata.table.index[f"/{key}"] for key, _ in boxes], [b for _, b in boxes])


def target_of(key: str, box: Box, arrays: Mapping[str, Any] = ARRAYS) -> np.ndarray:
    return np.zeros(box.shape, DTYPES[arrays[key].dtype.name].raw)


def expected(key: str, box: Box) -> np.ndarray:
    return np.ascontiguousarray(ARRAYS[key][box.slices]).view(DTYPES[ARRAYS[key].dtype.name].raw).reshape(box.shape)


def test_boxes_of_every_kind(tmp_path: Path) -> None:
    saved(tmp_path)
    targets = [target_of(key, box) for key, box in BOXES]
    with reader_of(LocalStorage(tmp_path), BOXES) as reader:
        reader.read(range(len(BOXES)), targets)
    for (key, box), target in zip(BOXES, targets, strict=True):
        np.testing.assert_array_equal(target, expected(key, box), err_msg=key)


def test_targets_with_strides(tmp_path: Path) -> None:
    saved(tmp_path)
    box = Box((2, 10), (5, 2900))
    target = np.zeros((2900, 10), np.uint16)
    with reader_of(LocalStorage(tmp_path), [("columns", box)]) as reader:
        reader.read([0], [target.T[::2]])
    np.testing.assert_array_equal(target.T[::2], expected("columns", box))
    assert not target.T[1::2].any()


def test_rows_one_by_one_on_several_threads(tmp_path: Path) -> None:
    saved(tmp_path)
    boxes = [("rows", Box((i, 0), (1, 700))) for i in range(13)]
    targets = [target_of(*one) for one in boxes]
    with reader_of(LocalStorage(tmp_path), boxes) as reader, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: reader.read([i], [targets[i]]), range(13)))
    np.testing.assert_array_equal(np.concatenate(targets), expected("rows", whole((13, 700))))


def test_only_the_blocks_that_hold_the_box_are_read(tmp_path: Path) -> None:
    saved(tmp_path)
    log: list[tuple[str, int, int]] = []
    with reader_of(CountingStorage(tmp_path, log), [("rows", Box((0, 0), (1, 700)))]) as reader:
        reader.read([0], [np.zeros((1, 700), "<u4")])
    reads = data_reads(tmp_path, log)
    assert len(reads) == 1
    assert reads[0][2] - reads[0][1] == 4096  # one block of the 2,800 bytes that are wanted


def test_boxes_are_read_some_shards_after_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setattr(boxes, "_TOGETHER", 2)
    counts: list[int] = []
    plain = BoxReader._chunk

    def counted(self: BoxReader, plan: Any, overlaps: np.ndarray, *args: Any) -> Any:
        counts.append(len(overlaps))
        return plain(self, plan, overlaps, *args)

    monkeypatch.setattr(BoxReader, "_chunk", counted)
    targets = [target_of(key, box) for key, box in BOXES]
    with reader_of(LocalStorage(tmp_path), BOXES) as reader:
        reader.read(range(len(BOXES)), targets)
        assert not reader.is_hole(4)
    for (key, box), target in zip(BOXES, targets, strict=True):
        assert target.tobytes() == expected(key, box).tobytes()
    assert len(counts) > 3
    assert max(counts) == 2


def test_many_boxes_are_planned_some_after_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setattr(boxes, "_PLANNED", 1)
    many = BOXES * 40
    targets = [target_of(key, box) for key, box in many]
    with reader_of(LocalStorage(tmp_path), many) as reader:
        assert len(reader._groups) > 4
        reader.read(range(len(many)), targets)
        assert len(reader._plans) == 2
        again = target_of(*many[1])
        reader.read([1], [again])
        assert not reader.is_hole(1)
    for (key, box), target in zip([*many, many[1]], [*targets, again], strict=True):
        assert target.tobytes() == expected(key, box).tobytes()
    with pytest.raises(CheckpointCorruptedError, match=r"rows: the checkpoint does not hold the region"):
        reader_of(LocalStorage(tmp_path), [*many, ("rows", Box((12, 0), (2, 700)))])


def test_a_damaged_file_is_of_no_account_to_boxes_of_others(tmp_path: Path) -> None:
    saved(tmp_path)
    opened: list[tuple[str, int, int]] = []
    first, last = ("rows", Box((0, 0), (1, 700))), ("rows", Box((12, 0), (1, 700)))
    with reader_of(CountingStorage(tmp_path, opened), [first, last]) as reader:
        reader.read([0], [target_of(*first)])
        files = {name for name, *_ in opened}
        reader.read([1], [target_of(*last)])
        (damaged,) = {name for name, *_ in opened} - files
    path = next(path for path in data_files(tmp_path) if str(path).endswith(damaged))
    path.write_bytes(bytes(path.stat().st_size))
    with reader_of(LocalStorage(tmp_path), [first, last]) as reader:
        target = target_of(*first)
        reader.read([0], [target])
        assert target.tobytes() == expected(*first).tobytes()
        for _ in range(2):
            with pytest.raises(CheckpointCorruptedError, match="header"):
                reader.read([1], [target_of(*last)])


def small_ones() -> dict[str, np.ndarray]:
    dtypes = ("float32", "uint8", "bfloat16", "complex128", "int64")
    shapes = ((), (5,), (3, 4), (2, 1, 6), (1, 7, 2, 2))
    kinds = ((dtype, shape) for dtype in dtypes for shape in shapes)
    return {f"{i:02}": make_array(shape, dtype) for i, (dtype, shape) in enumerate(kinds)}


def test_there_are_no_objects_for_small_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read together, of several files and types, whole or a part in one piece, into what is contiguous."""
    arrays = small_ones()
    save_on(
        [
            {key: split_rows(array, 2)[rank] if array.ndim else array for key, array in arrays.items()}
            for rank in (0, 1)
        ],
        tmp_path,
    )
    wanted = [(key, whole(array.shape)) for key, array in arrays.items()]
    wanted += [
        (key, Box((1, *box.offset[1:]), (1, *box.shape[1:]))) for key, box in wanted if box.shape and box.shape[0] > 1
    ]
    targets = [target_of(key, box, arrays) for key, box in wanted]
    with reader_of(LocalStorage(tmp_path), wanted) as reader, monkeypatch.context() as patch:
        patch.setattr(boxes, "StoredEntry", None)
        reader.read(range(len(wanted)), targets)
    for (key, box), target in zip(wanted, targets, strict=True):
        assert target.tobytes() == np.ascontiguousarray(arrays[key][box.slices]).tobytes(), (key, box)


def test_small_shards_of_which_a_part_or_the_target_is_not_in_one_piece(tmp_path: Path) -> None:
    arrays = {"a": make_array((4, 6)), "b": make_array((8, 3), "int64"), "c": make_array((5,))}
    save_on([arrays], tmp_path)
    wanted = [("a", Box((1, 2), (3, 2))), ("b", whole((8, 3))), ("c", whole((5,))), ("a", Box((2, 0), (2, 6)))]
    memory = [target_of(key, box, arrays) for key, box in wanted]
    targets = [memory[0], np.zeros((3, 8), np.uint64).T, np.zeros(10, np.uint32)[::2], memory[3]]
    with reader_of(LocalStorage(tmp_path), wanted) as reader:
        reader.read(range(4), targets)
    for (key, box), target in zip(wanted, targets, strict=True):
        assert np.ascontiguousarray(target).tobytes() == np.ascontiguousarray(arrays[key][box.slices]).tobytes(), key


def test_small_shards_that_are_holes_are_known_to_be_zeros(tmp_path: Path) -> None:
    cuts = [list(range(1024, 1 << 20, 1024))]
    write_checkpoint(
        tmp_path / "zeros", {"/w": Entry([1 << 20], cuts, "uint8"), "/x": Entry([9], [[]], "uint8", 0, b"x" * 9)}
    )
    boxes_there = [("w", whole((1 << 20,))), ("x", whole((9,)))]
    with reader_of(LocalStorage(tmp_path / "zeros"), boxes_there) as reader:
        if not reader.is_hole(0):
            pytest.skip("this filesystem has no holes")
        assert not reader.is_hole(1)
        target = np.ones(1 << 20, np.uint8)
        reader.read([0], [target])
    assert not target.any()


def test_memory_for_a_shard_of_a_box_is_bounded(tmp_path: Path) -> None:
    """There are no objects for all of them, whoever reads them and asks whether they are holes."""
    shards = 1 << 16
    write_checkpoint(tmp_path, {"/w": Entry([shards], [list(range(1, shards))], "uint8", 0, b"x" * shards)})
    target = np.zeros(shards, np.uint8)
    tracemalloc.start()
    with reader_of(LocalStorage(tmp_path), [("w", whole((shards,)))]) as reader:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        assert not reader.is_hole(0)
        reader.read([0], [target])
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (target == ord("x")).all()
    assert peak - before < 24 << 20  # a shard's objects take more than a KiB


def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    metadata = read_metadata(tmp_path)
    shard = int(metadata.table.first_shard[metadata.table.index["/rows"]])
    path = tmp_path / metadata.files[metadata.table.shard_file[shard]].name
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + int(metadata.table.data_offsets[shard])] ^= 1
    path.write_bytes(data)
    reader = reader_of(LocalStorage(tmp_path), [("rows", Box((0, 0), (1, 1)))])
    with reader, pytest.raises(CheckpointCorruptedError, match=r"rows.*does not match"):
        reader.read([0], [np.zeros((1, 1), "<u4")])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    with reader_of(LocalStorage(tmp_path), BOXES) as reader:
        for path in data_files(tmp_path):
            path.unlink()
        with pytest.raises(CheckpointCorruptedError, match="missing"):
            reader.read([0], [target_of(*BOXES[0])])


def test_a_region_outside_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointCorruptedError, match=r"rows.*does not hold the region \[12:14,0:700\]"):
        reader_of(LocalStorage(tmp_path), [("rows", Box((12, 0), (2, 700)))])


@pytest.mark.parametrize("written", [0, 10, 4000])
def test_a_part_of_a_large_shard_that_is_not_in_one_piece_is_a_hole_or_not(tmp_path: Path, written: int) -> None:
    array = np.zeros((8192, 1024), np.uint8)
    array[written, 7] = 1
    save_on([{"w": array}], tmp_path)
    (path,) = data_files(tmp_path)
    data = path.read_bytes()
    with path.open("wb") as file:  # with holes for what is zero
        for start in range(0, len(data), 4096):
            if any(page := data[start : start + 4096]):
                file.seek(start)
                file.write(page)
        file.truncate(len(data))
    wanted = [("w", Box((3072, 512), (2048, 512))), ("w", whole((8192, 1024)))]
    with reader_of(LocalStorage(tmp_path), wanted) as reader:
        if not reader.may_have_holes:
            pytest.skip("this filesystem has no holes")
        assert reader.is_hole(0) == (written != 4000)  # of which a block is read, though it has none of its items
        assert not reader.is_hole(1)
        target = np.ones((2048, 512), np.uint8)
        reader.read([0], [target])
    assert np.array_equal(target, array[3072:5120, 512:])
