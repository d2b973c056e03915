"""What the page shows of a checkpoint, without the page."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paddle_dist_ckpt import read_metadata
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.boxes import Boxes
from paddle_dist_ckpt.core.columns import pack_column
from paddle_dist_ckpt.core.layouts import Layout
from paddle_dist_ckpt.core.shards import Kind
from paddle_dist_ckpt.files.times import SaveTimes
from paddle_dist_ckpt.report.facts import Facts, facts_of, rank_of
from paddle_dist_ckpt.report.layers import LayerColumns, layers_of
from paddle_dist_ckpt.report.regions import regions_of
from test.report.samples import large_metadata, metadata_of, own_names, save_model

WHOLE = Layout.from_cuts((4, 6), [[], []])
HALVES = Layout.from_cuts((4, 6), [[2], []])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model(made, ranks=3, width=24, layers=2, long="x" * 9000)
    return made


def boxes_in(facts: Facts, tensor: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and shape of a tensor's boxes, as the page makes them from what it is given."""
    layout = facts.regions.layouts[facts.tensors.layout[tensor]]
    if layout.cuts is None:
        return list(zip(zip(*layout.offset, strict=True), zip(*layout.extent, strict=True), strict=True))
    edges = [[0, *cuts, end] for cuts, end in zip(layout.cuts, layout.shape, strict=True)]
    cells = itertools.product(*(list(itertools.pairwise(e)) for e in edges))
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


# -- layers


def layers(tensors: list[tuple[str, int]]) -> LayerColumns:
    """Those of keys and bytes."""
    return layers_of([key for key, _ in tensors], [nbytes for _, nbytes in tensors])


def test_layers_add_up_and_chains_are_joined() -> None:
    columns = layers([("model.a.w", 6), ("model.a.b", 2), ("model.z", 1), ("opt.only.one", 4), ("flat", 3)])
    rows = dict(zip(columns.key, zip(columns.name, columns.nbytes, columns.tensors, strict=True), strict=True))
    assert rows == {
        "": ("all tensors", 16, 5),
        "model": ("model", 9, 3),
        "model.a": ("a", 8, 2),
        "model.a.w": ("w", 6, 1),
        "model.a.b": ("b", 2, 1),
        "model.z": ("z", 1, 1),
        "opt.only.one": ("opt.only.one", 4, 1),
        "flat": ("flat", 3, 1),
    }
    assert columns.parent[0] == -1
    assert all(parent < i for i, parent in enumerate(columns.parent))


def test_a_tensor_whose_key_another_continues_is_kept() -> None:
    columns = layers([("a.w", 1), ("a.w.m", 2), ("a.w.n", 4)])
    assert list(zip(columns.key, columns.nbytes, strict=True)) == [("", 7), ("a.w", 7), ("a.w.n", 4), ("a.w.m", 2)]


def test_equal_layers_are_in_the_order_of_their_numbers() -> None:
    columns = layers([(f"l.{i}.w", 1) for i in (10, 9, 1, 2)])
    assert columns.name[2:] == ["1.w", "2.w", "9.w", "10.w"]


def test_many_layers_side_by_side_are_grouped() -> None:
    columns = layers([(f"layer.{i}.w", 8) for i in range(1200)])
    groups = [i for i, parent in enumerate(columns.parent) if parent == 1]
    assert len(groups) == 60
    assert columns.name[groups[0]] == "0 … 19"
    assert sum(columns.nbytes[i] for i in groups) == 9600
    assert columns.key[groups[0]] == ""
    assert [columns.key[i] for i, p in enumerate(columns.parent) if p == groups[0]][:2] == ["layer.0.w", "layer.1.w"]


def test_the_tree_is_bounded() -> None:
    columns = layers([(f"a{i % 300}.b{i % 7}.c{i}", i) for i in range(50_000)])
    assert len(columns.parent) < 4400
    deep = layers([(".".join("a" * 5000), 1), (".".join("ab" * 5000), 1)])
    assert len(deep.parent) < 40


def test_very_long_keys_make_no_large_page() -> None:
    tensors = [(f"/{i:05d}" + "k" * 600, WHOLE, [0]) for i in range(9000)]
    facts = facts_of(metadata_of(tensors, own_names(1)), "")
    assert sum(map(len, facts.tensors.key)) < 5_000_000
    assert facts.totals.tensors == 9000


def test_many_short_keys_are_all_named() -> None:
    tensors = [(f"/{i}", WHOLE, [0]) for i in range(9000)]
    assert len(facts_of(metadata_of(tensors, own_names(1)), "").tensors.key) == 9000


# -- all of it


def test_facts_are_those_of_the_checkpoint(folder: Path) -> None:
    metadata = read_metadata(folder)
    facts = facts_of(metadata, str(folder))
    assert (facts.origin.unique_id, facts.origin.world_size, facts.origin.format) == (1200, 3, "native")
    by_file: dict[str, int] = defaultdict(int)
    for info in metadata.storage_metadata.values():
        by_file[info.file_name] += info.nbytes
    assert dict(zip(facts.files.name, facts.files.nbytes, strict=True)) == by_file
    assert facts.files.size == [(folder / name).stat().st_size for name in facts.files.name]
    assert facts.ranks.rank == facts.files.rank == [0, 1, 2]
    assert facts.ranks.nbytes == facts.files.nbytes
    total = sum(by_file.values())
    assert facts.totals.nbytes == total == sum(facts.dtypes.nbytes) == sum(facts.tensors.nbytes)
    assert facts.layers.nbytes[0] == total
    assert facts.dtypes.name[0] == "float32"
    assert facts.times.rank == [0, 1, 2]
    assert facts.times.phases == ["plan", "write"]
    assert facts.times.left_out == 0
    assert set(facts.files.state) == {""}


def test_times_of_very_many_ranks_are_those_of_the_first() -> None:
    times = SaveTimes(pack_column(range(30_000)), {f"{i}": pack_column([i] * 30_000) for i in range(100)})
    found = facts_of(metadata_of([], own_names(1), times=times), "x").times
    assert found.rank == list(range(3000))
    assert found.milliseconds == [[i] * 3000 for i in range(100)]
    assert found.left_out == 27_000


def test_every_region_is_where_the_checkpoint_says(folder: Path) -> None:
    metadata = read_metadata(folder)
    facts = facts_of(metadata, "")
    found = {}
    for t, key in enumerate(facts.tensors.key):
        where = facts.regions.files[facts.tensors.cut[t]]
        for box, file, start in zip(boxes_in(facts, t), where, facts.tensors.start[t], strict=True):
            found[(key, *box)] = (facts.files.name[file], start)
    expected = {
        (index.tensor_id, index.global_offset, index.local_shape): (info.file_name, info.data_offset)
        for index, info in metadata.storage_metadata.items()
    }
    assert found == expected


def test_boxes_that_are_no_grid() -> None:
    odd = Layout((4, 4), Boxes.of([Box((0, 0), (2, 4)), Box((2, 0), (2, 1)), Box((2, 1), (2, 3))], 2))
    scalar = Layout((), Boxes.of([Box((), ())], 0))
    facts = facts_of(metadata_of([("/odd", odd, [0, 1, 0]), ("/s", scalar, [1])], own_names(2)), "")
    assert boxes_in(facts, 0) == [((0, 0), (2, 4)), ((2, 0), (2, 1)), ((2, 1), (2, 3))]
    assert boxes_in(facts, 1) == [((), ())]
    assert facts.regions.files == [[0, 1, 0], [1]]


def test_values_and_what_the_user_said(folder: Path) -> None:
    facts = facts_of(read_metadata(folder), "")
    values = dict(zip(facts.values.key, zip(facts.values.type, facts.values.text, strict=True), strict=True))
    assert values["trainer.step"] == ("int", "1200")
    assert values["trainer.seen"] == ("tuple", "(1000000000, 'tokens')")
    assert values["long"][1].startswith("(in a data file, ")
    assert facts.user.key == ["run", "config"]
    assert facts.user.text == ["'baseline-7b'", "{'width': 24, 'ranks': 3}"]
    assert facts.totals.values == 5
    (size,) = (size for kind, size in zip(facts.tensors.kind, facts.tensors.nbytes, strict=True) if kind == Kind.VALUE)
    assert (facts.totals.stored_values, facts.totals.stored_value_bytes) == (1, size)


def test_a_damaged_value_is_named_and_no_error() -> None:
    metadata = metadata_of([("/w", WHOLE, [0])], own_names(1))
    broken = msgspec.structs.replace(metadata, value_records=[("/a", {"float": "7"}), ("/b", 7)])
    assert facts_of(broken, "").values.text == ["(a stored value is not well-formed: 7)", "7"]


def test_what_cannot_be_read_is_named_with_the_reason() -> None:
    metadata = msgspec.structs.replace(metadata_of([], []), left_out={"/model/w": "model/w has gaps\u202e"})
    unread = facts_of(metadata, "").unread
    assert (unread.key, unread.text, unread.left_out) == (["model.w"], ["model/w has gaps\\u202e"], 0)
    many = msgspec.structs.replace(metadata, left_out={f"/{i}": "gaps" for i in range(5000)})
    assert facts_of(many, "").unread.left_out == 3000


def test_files_that_are_not_as_they_were_written() -> None:
    metadata = metadata_of([("/w", HALVES, [0, 1]), ("/v", WHOLE, [2])], own_names(3))
    size = metadata.files[0].size
    assert facts_of(metadata, "", [size, "missing", 5]).files.state == ["", "missing", "5 bytes now"]


def test_ranks_that_wrote_nothing_are_among_the_ranks() -> None:
    metadata = metadata_of([("/w", HALVES, [0, 1])], [own_names(4)[1], own_names(4)[3]])
    metadata = msgspec.structs.replace(metadata, world_size=6)
    ranks = facts_of(metadata, "").ranks
    assert (ranks.rank, ranks.nbytes, ranks.files) == ([0, 1, 2, 3, 4, 5], [0, 48, 0, 48, 0, 0], [0, 1, 0, 1, 0, 0])


@pytest.mark.parametrize(("world_size", "ranks"), [(1, [1, 3]), (3, [1, 3]), (4, [0, 1, 2, 3]), (100_001, [1, 3])])
def test_ranks_that_wrote_nothing_are_named_where_their_number_can_be_true(world_size: int, ranks: list[int]) -> None:
    metadata = metadata_of([("/w", HALVES, [0, 1])], [own_names(4)[1], own_names(4)[3]])
    assert facts_of(msgspec.structs.replace(metadata, world_size=world_size), "").ranks.rank == ranks


def test_ranks_by_the_names_of_files() -> None:
    assert rank_of(own_names(4)[3]) == 3
    assert rank_of("12_0.distcp") == 12
    assert rank_of("__7_0.distcp") == 7
    assert rank_of("model_dist3.pdopt") == 3
    assert rank_of("model-00001-of-00002.safetensors") == -1
    plain = facts_of(metadata_of([("/w", HALVES, [0, 1])], ["a.safetensors", "b.safetensors"]), "")
    assert plain.ranks.rank == []


def test_a_checkpoint_of_nothing() -> None:
    facts = facts_of(metadata_of([], []), "")
    assert facts.totals.nbytes == facts.totals.tensors == 0
    assert facts.layers.name == ["all tensors"]
    assert facts.ranks.rank == facts.times.rank == []


# -- bounds


def test_only_the_largest_are_named_but_all_are_counted() -> None:
    facts = facts_of(large_metadata(1000), "", most=100)
    assert len(facts.tensors.key) == 100
    assert facts.tensors.key == sorted(facts.tensors.key)
    assert set(facts.tensors.nbytes) == {8 << 20}
    assert facts.totals.tensors == 1000
    assert facts.layers.tensors[0] == 1000
    assert sum(facts.ranks.nbytes) == facts.totals.nbytes > sum(facts.tensors.nbytes)


def test_tensors_that_are_cut_alike_share_what_says_how() -> None:
    facts = facts_of(large_metadata(5000), "")
    assert len(facts.regions.layouts) == 5
    assert len(facts.regions.files) < 120


def test_a_page_has_room_for_so_many_regions() -> None:
    many = Layout.from_cuts((100, 10), [list(range(10, 100, 10)), []])
    tensors = [("/many", many, [0] * 10)] + [(f"/w{i}", HALVES, [i % 3, i // 3 % 3]) for i in range(40)]
    table = metadata_of(tensors, own_names(3)).table
    sizes = np.array([4000] + [96] * 40)
    found, layout, cut, start = regions_of(table, np.arange(41), sizes, room=9)
    assert found.layouts[layout[0]].shape == [100, 10]
    assert cut[0] == -1
    assert cut[1] >= 0
    assert len(start[1]) == 2
    assert (cut[40], start[40]) == (-1, [])
    assert found.layouts[layout[40]].shape == [4, 6]
    assert sum(map(len, found.files)) + sum(map(len, start)) <= 9
