"""The table of shards against lists and loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import Column, pack_column, unpack_column
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.layouts import Layout, LayoutRecord
from paddle_dist_ckpt.core.shards import Kind, ShardTable
from paddle_dist_ckpt.errors import CheckpointCorruptedError, UnsupportedValueError
from test.strategies import examples, grids, shapes, tilings


def make_layout(shape: tuple[int, ...], boxes: list[Box]) -> Layout:
    return Layout(shape, Boxes.of(sorted(boxes), len(shape)))


@st.composite
def tables(draw: st.DrawFn, files: int = 4) -> ShardTable:
    """Tables of up to five tensors, some of which share a layout."""
    drawn = draw(st.lists(shapes(least=1, dimensions=3), min_size=1, max_size=3))
    layouts = [make_layout(shape, draw(tilings(shape, 4))) for shape in drawn]
    count = draw(st.integers(len(layouts), 5))
    layout_of = [*range(len(layouts)), *draw(st.lists(st.sampled_from(range(len(layouts))), min_size=5, max_size=5))][
        :count
    ]
    shards = sum(len(layouts[i].boxes) for i in layout_of)
    return ShardTable(
        [f"/t{i}" for i in range(count)],
        [DTYPES[draw(st.sampled_from(["bool", "bfloat16", "float32", "complex128"]))] for _ in range(count)],
        np.array([draw(st.sampled_from(list(Kind))) for _ in range(count)], np.int64),
        layouts,
        np.array(layout_of, np.int64),
        np.array(draw(st.lists(st.integers(0, files - 1), min_size=shards, max_size=shards)), np.int64),
        [f"var{i}" if i % 2 else None for i in range(count)],
    )


@examples(35)
@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**62))))
def test_a_column_comes_back_from_the_fewest_bytes(values: list[int]) -> None:
    column = pack_column(values)
    top = max(values, default=0)
    width = next(w for w in (1, 2, 4, 8) if top < 256**w)
    assert len(column.data) == width * len(values)
    assert unpack_column(column, len(values), top + 1, "it").tolist() == values


@pytest.mark.parametrize(
    ("column", "size", "bound"),
    [
        (Column("<u1", b"ab"), 3, 256),
        (Column("<u2", b"abc"), 1, 65536),
        (Column("<u1", b"\x05"), 1, 5),
        (Column("<u8", b"\xff" * 8), 1, 2**63),
        (Column("<f4", b"abcd"), 1, 256),
        (Column("O", b"abcdefgh"), 1, 256),
        (Column("", b""), 0, 1),
    ],
)
def test_a_column_that_is_not_as_it_should_be_is_refused(column: Column, size: int, bound: int) -> None:
    with pytest.raises(CheckpointCorruptedError, match="of a test"):
        unpack_column(column, size, bound, "of a test")


@examples(35)
@given(st.data())
def test_a_layout_comes_back(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    boxes = data.draw(tilings(shape)) if math.prod(shape) else [Box((0,) * len(shape), shape)]
    layout = make_layout(shape, data.draw(st.permutations(boxes)))
    again = Layout.from_record(layout.to_record(), len(layout.boxes))
    assert again.shape == shape
    assert again.boxes.to_list() == layout.boxes.to_list()
    with pytest.raises(CheckpointCorruptedError):
        Layout.from_record(layout.to_record(), len(layout.boxes) - 1)


@examples(25)
@given(st.data())
def test_a_grid_is_stored_by_its_cuts_alone(data: st.DataObject) -> None:
    shape = data.draw(shapes(least=1))
    record = make_layout(shape, data.draw(grids(shape))).to_record()
    assert record.cuts is not None
    assert not record.offsets


def test_a_part_of_a_grid_is_stored_box_by_box() -> None:
    layout = make_layout((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 2))])
    assert layout.cuts() is None
    assert make_layout((4,), [Box((1,), (3,))]).cuts() is None
    assert make_layout((3,), []).cuts() is None
    assert Layout.from_record(make_layout((3,), []).to_record(), 0).boxes.to_list() == []


def test_a_tensor_without_elements_may_be_cut_along_another_dimension() -> None:
    halves = [Box((0, 0), (0, 2)), Box((0, 2), (0, 2))]
    assert Layout.from_record(LayoutRecord([0, 4], [[], [2]]), 2).boxes.to_list() == halves


@pytest.mark.parametrize(
    "record",
    [
        LayoutRecord([-1], [[]]),
        LayoutRecord([2**30, 2**30], [[], []]),
        LayoutRecord([10**30], [[]]),
        LayoutRecord([0, 10**30], [[], []]),
        LayoutRecord([0, 2**60, 2**60], [[], [], []]),
        LayoutRecord([1] * 33, [[]] * 33),
        LayoutRecord([4], [[], []]),
        LayoutRecord([4], []),
        LayoutRecord([4], [[0]]),
        LayoutRecord([4], [[4]]),
        LayoutRecord([4], [[-1]]),
        LayoutRecord([4], [[3, 1]]),
        LayoutRecord([4], [[2, 2]]),
        LayoutRecord([4], [[10**30]]),
        LayoutRecord([0], [[0]]),
        LayoutRecord([4], [[1, 2, 3]]),
        LayoutRecord([4], None, -1, [pack_column([])], [pack_column([])]),
        LayoutRecord([4], None, 10**12, [pack_column([0])], [pack_column([4])]),
        LayoutRecord([4], None, 1, [], []),
        LayoutRecord([4], None, 1, [pack_column([0])], []),
        LayoutRecord([4], None, 1, [], [pack_column([4])]),
        LayoutRecord([4], None, 0, [pack_column([0])], [pack_column([4])]),
        LayoutRecord([4], None, 1, [pack_column([0])] * 2, [pack_column([1])] * 2),
        LayoutRecord([4], None, 2, [pack_column([0])], [pack_column([4])]),
        LayoutRecord([4], None, 1, [pack_column([1])], [pack_column([4])]),
        LayoutRecord([4], None, 1, [pack_column([5])], [pack_column([0])]),
        LayoutRecord([4], None, 2, [pack_column([2, 0])], [pack_column([2, 2])]),
        LayoutRecord([4], None, 2, [pack_column([0, 0])], [pack_column([2, 2])]),
        LayoutRecord([], None, 2, [], []),
        LayoutRecord(
            [0, 2**63],
            None,
            1,
            [Column("<u1", b"\0"), Column("<u8", b"\xff" * 8)],
            [pack_column([0]), pack_column([1])],
        ),
    ],
    ids=repr,
)
def test_a_hostile_layout_is_refused(record: LayoutRecord) -> None:
    with pytest.raises(CheckpointCorruptedError):
        Layout.from_record(record, 3)


@pytest.mark.parametrize("shape", [(1,) * 33, (2**30, 2**30)])
def test_a_layout_that_no_reader_takes_is_not_stored(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedValueError, match="cannot be stored"):
        make_layout(shape, [whole(shape)]).to_record()


@examples(35)
@given(tables())
def test_columns_of_a_table_are_what_loops_find(table: ShardTable) -> None:
    shards = [(t, box) for t, i in enumerate(table.layout_of.tolist()) for box in table.layouts[i].boxes.to_list()]
    sizes = [box.size * table.dtypes[t].itemsize for t, box in shards]
    assert table.first_shard.tolist() == [
        sum(1 for t, _ in shards if t < first) for first in range(len(table.paths) + 1)
    ]
    assert table.shard_tensor.tolist() == [t for t, _ in shards]
    assert table.shard_bytes.tolist() == sizes
    assert table.index == {path: i for i, path in enumerate(table.paths)}
    boxes = table.shard_boxes(4)
    for i, (_, (offset, extent)) in enumerate(shards):
        assert boxes.box(i) == (offset + (0,) * (4 - len(offset)), extent + (1,) * (4 - len(extent)))


@examples(35)
@given(tables(), st.sampled_from([1, 16, 100]))
def test_shards_stand_in_their_files_without_gaps(table: ShardTable, block_bytes: int) -> None:
    sizes = table.shard_bytes.tolist()
    itemsizes = [table.dtypes[t].itemsize for t in table.shard_tensor.tolist()]
    first_block, counts = table.blocks(block_bytes, 6)
    for file in range(6):
        inside = [i for i in range(len(sizes)) if table.shard_file[i] == file]
        inside.sort(key=lambda i: -itemsizes[i])
        place = block = 0
        for i in inside:
            assert table.data_offsets[i] == place
            assert place % itemsizes[i] == 0
            assert first_block[i] == block
            place += sizes[i]
            block += math.ceil(sizes[i] / block_bytes)
        assert table.in_file(file).tolist() == inside
        assert table.file_bytes(6)[file] == place
        assert counts[file] == block
    ordered = sorted(range(len(sizes)), key=lambda i: (table.shard_file[i], -itemsizes[i], i))
    assert table.file_order.tolist() == ordered


@examples(35)
@given(tables(), st.data())
def test_a_selection_has_its_tensors_shards(table: ShardTable, data: st.DataObject) -> None:
    tensors = sorted(data.draw(st.sets(st.sampled_from(range(len(table.paths))))))
    part, shards = table.select(tensors)
    assert part.paths == [table.paths[t] for t in tensors]
    assert [table.shard_tensor[s] for s in shards] == [
        t for t in tensors for _ in range(int((table.shard_tensor == t).sum()))
    ]
    assert part.shard_file.tolist() == table.shard_file[shards].tolist()
    assert part.shard_boxes(4).to_list() == table.shard_boxes(4).take(shards).to_list()
    assert [d.name for d in part.dtypes] == [table.dtypes[t].name for t in tensors]
    assert part.kinds.tolist() == table.kinds[tensors].tolist()
