"""The columns of tables with tensors of no dimensions, of no elements, and layouts that nothing uses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core import columns, layouts
from paddle_dist_ckpt.core.box import whole
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import MANY, narrow
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.layouts import Layout
from paddle_dist_ckpt.core.shards import ShardTable
from paddle_dist_ckpt.errors import UnsupportedValueError
from test.strategies import examples, shapes, tilings


def table_of(layouts: Sequence[Layout], layout_of: Sequence[int], files: Sequence[int] | None = None) -> ShardTable:
    count, shards = len(layout_of), sum(len(layouts[i].boxes) for i in layout_of)
    file = np.array(files, np.int64) if files is not None else np.zeros(shards, np.int64)
    names = ["bool", "float32", "complex128"]
    dtypes = [DTYPES[names[i % 3]] for i in range(count)]
    kinds, numbers = np.zeros(count, np.int64), np.array(layout_of, np.int64)
    return ShardTable([f"/{i:03}" for i in range(count)], dtypes, kinds, list(layouts), numbers, file, [None] * count)


@st.composite
def tables(draw: st.DrawFn) -> ShardTable:
    layouts = []
    for _ in range(draw(st.integers(0, 4))):
        shape = draw(shapes(most=5))
        boxes = draw(tilings(shape, 5)) if math.prod(shape) else [whole(shape)] * draw(st.integers(0, 1))
        layouts.append(Layout(shape, Boxes.of(sorted(boxes), len(shape))))
    layout_of = draw(st.lists(st.integers(0, len(layouts) - 1), max_size=6)) if layouts else []
    shards = sum(len(layouts[i].boxes) for i in layout_of)
    return table_of(layouts, layout_of, draw(st.lists(st.integers(0, 3), min_size=shards, max_size=shards)))


@examples(40)
@given(tables())
def test_columns_are_what_loops_find(table: ShardTable) -> None:
    boxes = [(t, i, row) for t, i in enumerate(table.layout_of.tolist()) for row in range(len(table.layouts[i].boxes))]
    before = [sum(len(layout.boxes) for layout in table.layouts[:i]) for i in range(len(table.layouts))]
    assert table.layout_counts.tolist() == [len(layout.boxes) for layout in table.layouts]
    assert table.first_shard.tolist() == [sum(t < first for t, *_ in boxes) for first in range(len(table.paths) + 1)]
    assert table.shard_tensor.tolist() == [t for t, *_ in boxes]
    assert table.shard_layout_row.tolist() == [before[i] + row for _, i, row in boxes]
    sizes = [table.layouts[i].boxes.box(row).size * table.dtypes[t].itemsize for t, i, row in boxes]
    assert table.shard_bytes.tolist() == sizes
    found_boxes = table.shard_boxes(5)
    for found, fill, rows in [
        (found_boxes.offset, 0, [table.layouts[i].boxes.offset[row].tolist() for _, i, row in boxes]),
        (found_boxes.shape, 1, [table.layouts[i].boxes.shape[row].tolist() for _, i, row in boxes]),
    ]:
        assert found.shape == (len(boxes), 5)
        assert found.dtype == np.int64
        assert found.tolist() == [row + [fill] * (5 - len(row)) for row in rows]
    ordered = sorted(range(len(sizes)), key=lambda s: (table.shard_file[s], -table.dtypes[boxes[s][0]].itemsize, s))
    assert table.file_order.tolist() == ordered
    ends = [0] * 5
    for s in ordered:
        assert table.data_offsets[s] == ends[table.shard_file[s]]
        ends[table.shard_file[s]] += sizes[s]
    assert table.file_bytes(5).tolist() == ends


@examples(25)
@given(tables(), st.integers(4, 6), st.sampled_from([2, 4, MANY]))
def test_boxes_of_all_layouts_stand_one_behind_the_other(table: ShardTable, dimensions: int, many: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "MANY", many)  # from which on a layout's boxes are made when they are asked for
        of_all = table.layout_boxes(dimensions)
        boxes = of_all.take(np.arange(len(of_all)))
    row = 0
    for layout in table.layouts:
        for offset, extent in layout.boxes.to_list():
            pad = dimensions - len(offset)
            assert boxes.box(row) == (offset + (0,) * pad, extent + (1,) * pad)
            row += 1
    assert boxes.offset.shape == boxes.shape.shape == (row, dimensions)
    some = np.arange(row)[::-2]
    assert of_all.take(some).table.tolist() == boxes.take(some).table.tolist()


def test_dimensions_that_are_not_cut_share_their_edges() -> None:
    one, other = (Layout.from_cuts((3, n, 3), [[], [1], []]) for n in (4, 5))
    for grid in (one.parts, other.parts):
        assert isinstance(grid, layouts.Grid)
        assert [column.tolist() for column in grid.starts] == [[0], [0, 1], [0]]
        assert grid.starts[0] is grid.starts[2]
        assert grid.lengths[0] is grid.lengths[2]
    assert one.parts.lengths[0] is other.parts.lengths[0]
    assert [column.tolist() for column in other.parts.lengths] == [[3], [1, 4], [3]]
    assert other.parts.volumes.tolist() == [9, 36]
    assert Layout.from_cuts((), []).parts is Layout.from_cuts((), []).parts


@pytest.mark.parametrize("width", [2**31, 2**53 + 1])
def test_sizes_are_exact_above_what_a_float_counts(width: int) -> None:
    layout = Layout.from_cuts((width,), [[1]])
    table = table_of([layout], [0, 0, 0])
    assert table.shard_bytes.tolist() == [n * size for size in (1, 4, 16) for n in (1, width - 1)]
    assert table.file_bytes(1).tolist() == [21 * width]
    assert table.blocks(1, 1)[1].tolist() == [21 * width]


@pytest.mark.parametrize(
    "values", [[0, 127], [-128, 5], [128, 0], [-129, 1], [2**31 - 1, 0], [2**31, 0], [-(2**40), 3]]
)
def test_many_integers_are_kept_in_the_narrowest_type(values: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert narrow(np.array(values)).dtype == np.int64  # for they are few
    monkeypatch.setattr(columns, "MANY", 2)
    found = narrow(np.array(values))
    assert found.tolist() == values
    fits = [
        np.iinfo(kind).min <= min(values) and max(values) <= np.iinfo(kind).max for kind in ("i1", "i2", "i4", "i8")
    ]
    assert found.dtype.itemsize == 2 ** fits.index(True)


@examples(25)
@given(tables())
def test_tables_of_narrow_columns_say_the_same(table: ShardTable) -> None:
    def made() -> ShardTable:
        numbers = table.shard_file + 100  # which times the most bytes of an item is more than 8 bits hold
        return ShardTable(
            table.paths, table.dtypes, table.kinds, table.layouts, table.layout_of, narrow(numbers), table.names
        )

    wide, names = made(), ("shard_tensor", "shard_bytes", "file_order", "data_offsets")
    expected = [getattr(wide, name).tolist() for name in names], [column.tolist() for column in wide.blocks(2, 200)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "MANY", 1)
        few = made()
        for _ in range(2):
            found = [getattr(few, name).tolist() for name in names], [column.tolist() for column in few.blocks(2, 200)]
            assert found == expected
            few.forget()


@pytest.mark.parametrize("shape", [(1,) * 33, (2**58,), (2**29, 2**29), (0, 2**58)])
def test_shapes_that_no_checkpoint_may_have_are_not_stored(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedValueError, match="a tensor of shape .* cannot be stored"):
        Layout(shape, Boxes.of([whole(shape)], len(shape))).to_record()
