"""Columns of many shards in narrow types say, at the edges of each type, what those in 64 bits say, to whoever reads
them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paddle_dist_ckpt import copy_checkpoint, export, read_metadata, rebuild_metadata, verify
from paddle_dist_ckpt.core import columns, layouts
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import MANY, pack_column
from paddle_dist_ckpt.core.layouts import Layout, LayoutRecord
from paddle_dist_ckpt.core.shards import ShardTable
from paddle_dist_ckpt.files.tables import TableRecord, table_from_record
from paddle_dist_ckpt.folder import boxes
from paddle_dist_ckpt.folder.boxes import BoxReader
from paddle_dist_ckpt.loading import needs
from paddle_dist_ckpt.options import LoadOptions
from paddle_dist_ckpt.planning import cover, load_plan
from paddle_dist_ckpt.planning.load_plan import WantedBoxes, plan_load
from paddle_dist_ckpt.report.facts import facts_of
from paddle_dist_ckpt.storage import LocalStorage
from test.cli.commands import answer
from test.jobs import (
    SMALL,
    check_pieces,
    files_in,
    load_alone,
    load_on,
    load_whole,
    make_array,
    same_bits,
    save_on,
    sharded,
    split_rows,
    without_times,
)
from test.strategies import some
from test.torture.crafting import Entry, write_checkpoint

EDGES = [127, 128, 255, 256, 32_767, 32_768, 65_535, 65_536, 2**31 - 1, 2**31, 2**32]


@contextmanager
def narrow_from(rows: int) -> Iterator[None]:
    """From so few rows on columns are narrow, and needs are read some after others."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (columns, layouts, cover, load_plan):
            patch.setattr(module, "MANY", rows)
        patch.setattr(load_plan, "_TOGETHER", 3)
        patch.setattr(boxes, "_TOGETHER", 3)
        for name in ("_TOGETHER", "_MANY", "_READ_TOGETHER"):
            patch.setattr(needs, name, 3)
        yield


# -- columns


def record_at(edge: int) -> tuple[TableRecord, int]:
    """Tensors of a grid, of one of two dimensions, and of other tilings: their sizes, places and files' numbers around
    the edge."""
    count = min(edge, 2**16) + 2
    rows = Boxes.of([Box((0, 0), (edge, 1)), Box((0, 1), (edge + 1, 1)), Box((edge, 0), (1, 1))], 2)
    ends = Boxes.of([Box((0,), (edge,)), Box((edge,), (1,)), Box((edge + 1,), (edge,)), Box((2 * edge,), (1,))], 1)
    made = [
        LayoutRecord((2 * edge + 3,), ((1, edge, edge + 1, 2 * edge),)),
        LayoutRecord((edge + 1, 3), ((edge,), (1, 2))),
        LayoutRecord((edge + 1, 2), None, 3, *([pack_column(c) for c in x.T] for x in (rows.offset, rows.shape))),
        LayoutRecord([2 * edge + 1], None, 4, *([pack_column(c) for c in x.T] for x in (ends.offset, ends.shape))),
    ]
    layout_of = [0, 1, 2, 3] * 3
    shards = sum([5, 6, 3, 4][i] for i in layout_of)
    files = np.resize([0, count - 1, count - 2, 1, 0, 0, 1], shards)
    record = TableRecord(
        paths=[f"/{i:02}" for i in range(12)],
        dtypes=["uint8", "float32", "complex128"],
        dtype=pack_column(np.repeat([0, 1, 2], 4)),
        kind=pack_column(np.zeros(12)),
        layouts=made,
        layout=pack_column(layout_of),
        shard_file=pack_column(files),
    )
    return record, count


def said_by(table: ShardTable, files: int) -> dict[str, Any]:
    """All that a table says, as plain numbers."""
    boxes, of_layouts = table.shard_boxes(3), table.layout_boxes(3)
    some = of_layouts.take(np.arange(len(of_layouts))[::-1])
    selected, shards = table.select([1, 3, 6, 11])
    wanted = np.arange(12)
    regions = [Box(tuple(n // 3 for n in x.shape), tuple(-(-n // 2) for n in x.shape)) for x in table.layouts]
    plan = plan_load(table, WantedBoxes(wanted, Boxes.of([regions[i] for i in table.layout_of], 3)))
    names = ("shard_file", "shard_tensor", "shard_bytes", "file_order", "data_offsets", "shard_layout_row")
    return {
        **{name: getattr(table, name).tolist() for name in names},
        "blocks": [column.tolist() for size in (1, 100, 4096, 1 << 20) for column in table.blocks(size, files)],
        "file_bytes": table.file_bytes(files).tolist(),
        "rows": table.layout_row_of(np.arange(0, len(table.shard_file), 2)).tolist(),
        "boxes": [x.tolist() for x in (boxes.offset, boxes.shape, boxes.high, boxes.volumes)],
        "some": [x.tolist() for x in (some.offset, some.shape, some.high, some.volumes)],
        "highs": [layout.boxes.high.tolist() for layout in table.layouts],
        "volumes": [layout.parts.volumes.tolist() for layout in table.layouts],
        "records": [msgspec.json.encode(layout.to_record()) for layout in table.layouts],
        "selected": [selected.shard_bytes.tolist(), selected.blocks(4096, files)[0].tolist(), shards.tolist()],
        "plan": [getattr(plan, name).tolist() for name in ("wanted", "shard", "like", "uncovered")],
        "parts": [part.table.tolist() for part in plan.alike.take(plan.like)],
    }


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("edge", EDGES)
def test_tables_say_the_same_at_the_edges_of_types(edge: int, search: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "_FEW_PAIRS", 0 if search else 1000)
    (record, files), (again, _) = record_at(edge), record_at(edge)
    expected = said_by(table_from_record(record, files), files)
    assert expected["plan"][-1] == []
    with narrow_from(2):
        table = table_from_record(again, files)
        assert said_by(table, files) == expected
    kinds = {x.dtype.itemsize for x in (table.shard_tensor, table.shard_file, table.layouts[3].boxes.offset)}
    assert min(kinds) == 1  # or this test would compare nothing


def test_a_grid_that_reaches_to_what_32_bits_do_not_hold_ends_where_it_should() -> None:
    """Of which neither the places nor the lengths alone need more."""
    size = 2**31
    parts = Layout.from_cuts((size,), [list(range(32_768, size, 32_768))])
    assert len(parts.boxes) >= MANY
    assert int(parts.boxes.high.max()) == size
    assert int(parts.boxes.high.min()) == 32_768


# -- checkpoints


def state_at(edge: int) -> dict[str, np.ndarray]:
    return {"a": make_array((edge * 4 + 3,), "uint8"), "b": make_array((edge + 2, 4), "int16"), "c": make_array((9,))}


def saved_at(edge: int, folder: Path) -> dict[str, np.ndarray]:
    """A checkpoint of three ranks whose shards have sizes and places at the edge, some of them tiny."""
    arrays = state_at(edge)
    size = len(arrays["a"])
    cuts = [0, 1, edge, edge + 1, 2 * edge, 3 * edge + 1, 3 * edge + 2, size]
    parts = [Box((low,), (high - low,)) for low, high in itertools.pairwise(cuts)]
    rows = [Box((0, 0), (edge, 2)), Box((0, 2), (edge + 2, 2)), Box((edge, 0), (2, 1)), Box((edge, 1), (2, 1))]
    states = [
        {
            "a": sharded(arrays["a"], [box for i, box in enumerate(parts) if i % 3 == rank]),
            "b": sharded(arrays["b"], [box for i, box in enumerate(rows) if i % 3 == rank]),
            "c": split_rows(arrays["c"], 3)[rank],
        }
        for rank in range(3)
    ]
    save_on(states, folder)
    return arrays


@pytest.mark.parametrize("edge", some(EDGES[:8], 4))
def test_every_reader_finds_the_same_at_the_edges_of_types(edge: int, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    arrays = saved_at(edge, folder)
    wide = facts_of(read_metadata(folder), "here"), answer("inspect", folder), read_metadata(folder).storage_metadata
    with narrow_from(2):
        metadata = read_metadata(folder)
        assert (facts_of(metadata, "here"), answer("inspect", folder), metadata.storage_metadata) == wide
        found = load_whole(folder)
        assert all(same_bits(found[key], array) for key, array in arrays.items())
        assert verify(folder).ok
        copy_checkpoint(folder, tmp_path / "copy")
        original, copied = files_in(folder), files_in(tmp_path / "copy")
        assert {name: copied[name] for name in original} == original
        assert answer("diff", folder, tmp_path / "copy")["equal"]
        export(folder, tmp_path / "out", format="native", max_shard_bytes=max(1000, edge))
        again = load_whole(tmp_path / "out")
        assert all(same_bits(again[key], array) for key, array in arrays.items())
        low = max(0, 2 * edge - 5)
        shown = answer("cat", folder, "a", "--slice", f"{low}:{low + 10}")["values"]
        assert shown == arrays["a"][low : low + 10].tolist()
        lost = without_times(folder / "0.metadata")
        (folder / "0.metadata").unlink()
        rebuild_metadata(folder)
        assert (folder / "0.metadata").read_bytes() == lost


@pytest.mark.parametrize("edge", EDGES[:8])
def test_loads_and_exchanges_at_the_edges_of_types(edge: int, tmp_path: Path) -> None:
    arrays = saved_at(edge, tmp_path)
    with narrow_from(2):
        for exchange in ("never", "always"):
            states = [{key: split_rows(array, 2, fill=False)[rank] for key, array in arrays.items()} for rank in (0, 1)]
            load_on(states, tmp_path, options=LoadOptions(exchange=exchange, timeout=60))
            for state, (key, array) in itertools.product(states, arrays.items()):
                check_pieces(state[key], array)
        blank = {key: np.zeros((*array.shape, 2), array.dtype)[..., 0] for key, array in arrays.items()}
        load_alone(blank, tmp_path)
        assert all(same_bits(np.ascontiguousarray(blank[key]), array) for key, array in arrays.items())


@pytest.mark.parametrize("edge", [2**31 - 1, 2**31, 2**32])
def test_what_lies_far_behind_in_a_file_is_found(edge: int, tmp_path: Path) -> None:
    """Of holes, of which each block begins with the same byte; cut at the edge and beside it."""
    entries = {"/w": Entry([edge + 100], [[7, edge - 1, edge, edge + 1]], "uint8"), "/x": Entry([3], [[]], "uint8")}
    write_checkpoint(tmp_path, entries, page=b"x")
    wanted = [Box((0,), (9,)), Box((edge - 3,), (103,)), Box((edge + 90,), (10,))]
    found = []
    for rows in (MANY, 2):
        with narrow_from(rows):
            metadata = read_metadata(tmp_path)
            targets = [np.full(box.shape, 99, np.uint8) for box in wanted]
            with BoxReader(LocalStorage(tmp_path), metadata, [0] * 3, wanted) as reader:
                reader.read(range(3), targets)
            found.append([target.tolist() for target in targets])
            assert facts_of(metadata, "here").totals.nbytes == edge + 103
            assert facts_of(metadata, "here").files.nbytes == [edge + 103]
    assert found[0] == found[1]
    assert found[0][0] == [120, 0, 0, 0, 0, 0, 0, 120, 0]
    assert found[0][1][:6] == [0, 0, 120, 120, 120, 0]


def test_layouts_are_one_in_a_rebuilt_metadata_whatever_their_columns(tmp_path: Path) -> None:
    """Equal layouts of which one file holds many boxes, and two others some each."""
    array = make_array((6, 4))
    boxes = [Box((i, 0), (1, 1 + i % 3)) for i in range(6)] + [Box((i, 1 + i % 3), (1, 3 - i % 3)) for i in range(6)]
    states = [{"a": sharded(array, boxes), "b": sharded(array, boxes[::2])}, {"b": sharded(array, boxes[1::2])}]
    save_on(states, tmp_path, options=SMALL)
    lost = without_times(tmp_path / "0.metadata")
    with narrow_from(8):
        (tmp_path / "0.metadata").unlink()
        rebuild_metadata(tmp_path)
    assert (tmp_path / "0.metadata").read_bytes() == lost
