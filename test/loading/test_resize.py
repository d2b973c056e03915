"""Tensors of another length along one axis than what is stored: LoadOptions.resize."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import LoadOptions, StateDictMismatchError, concat
from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.shards import Kind
from paddle_dist_ckpt.core.tensors import Geometry, Reduction
from paddle_dist_ckpt.loading.resize import Resizing
from paddle_dist_ckpt.recipes import Source
from paddle_dist_ckpt.testing import run_ranks
from paddle_dist_ckpt.tree.paths import join
from test.jobs import (
    LAYOUTS,
    all_ok,
    another_host,
    blank_like,
    errors_of,
    load_on,
    make_array,
    rows_of,
    same_bits,
    save_on,
    sharded,
    split_rows,
    try_load,
)
from test.pace import slowness
from test.strategies import some

KEY = "model.embed.weight"


def options(**more: Any) -> LoadOptions:
    return LoadOptions(timeout=60, **more)


def expected_of(stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What a tensor of this shape is to hold: what is stored, and behind that what it held."""
    found = blank_like(np.empty(shape, stored.dtype))
    common = tuple(slice(min(pair)) for pair in zip(shape, stored.shape, strict=True))
    found[common] = stored[common]
    return found


def check(target: Any, expected: np.ndarray) -> None:
    for box, piece in zip(target.boxes, target.pieces, strict=True):
        assert same_bits(np.ascontiguousarray(piece).reshape(box.shape), expected[box.slices].copy()), box


SIZES = [  # before, after, the axis that changes, the axis that is cut
    ((10, 6), (16, 6), 0, 0),
    ((10, 6), (40, 6), 0, 0),  # some ranks have nothing but padding
    ((10, 6), (7, 6), 0, 0),
    ((6, 10, 3), (6, 13, 3), 1, 0),  # cut along another axis than the one that grows
    ((6, 10, 3), (6, 13, 3), 1, 1),
    ((6, 10, 3), (6, 4, 3), 1, 1),
]


@pytest.mark.parametrize(
    ("sizes", "how", "exchange"), some(itertools.product(SIZES, LAYOUTS, ["never", "always"]), 2 * len(LAYOUTS) + 6)
)
def test_what_both_have_is_loaded(tmp_path: Path, sizes: tuple[Any, Any, int, int], how: str, exchange: Any) -> None:
    before, after, axis, cut = sizes
    stored = make_array(before)
    save_on([{"embed": part, "n": 1} for part in split_rows(stored, 3, dimension=cut)], tmp_path)
    expected = expected_of(stored, after)
    boxes = [rows_of(after, rank, 4, cut) for rank in range(4)]
    boxes = [box for box in boxes if box.size]
    targets = [{"embed": sharded(np.empty(after, stored.dtype), [box], how, fill=False)} for box in boxes]
    rule = axis if after[axis] > before[axis] else (axis, after[axis])
    reports = load_on(targets, tmp_path, options=options(resize={"em*": rule}, exchange=exchange))
    for target in targets:
        check(target["embed"], expected)
    low, high = sorted((before[axis], after[axis]))
    what = "not stored, and left as they are" if after[axis] > before[axis] else "stored, and left out"
    for report in reports:
        assert report.skipped == (f"embed: {low} to {high} of axis {axis} are {what}",)


def test_ranges_of_elements_as_several_boxes(tmp_path: Path) -> None:
    """As a flattened part of a tensor has them, of which some are beyond what is stored."""
    stored = make_array((10, 6))
    save_on([{"embed": stored}], tmp_path)
    boxes = [Box((3, 2), (1, 4)), Box((4, 0), (5, 6)), Box((9, 0), (2, 6)), Box((11, 0), (1, 6)), Box((12, 0), (1, 3))]
    target = sharded(np.empty((14, 6), stored.dtype), boxes, fill=False)
    load_on([{"embed": target}], tmp_path, options=options(resize={"*": 0}))
    check(target, expected_of(stored, (14, 6)))


@pytest.mark.parametrize("columns", [16, 7, 10])
@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("exchange", ["never", "always"])
def test_what_a_recipe_makes_may_be_of_another_length(tmp_path: Path, columns: int, cut: int, exchange: Any) -> None:
    """As a head that is stored transposed, and whose vocabulary is padded; and a bias that is made of two."""
    weight, first, second = make_array((10, 6)), make_array((4,)), make_array((6,)) + 1
    save_on([{"w": part, "a": first, "b": second} for part in split_rows(weight, 3)], tmp_path)
    expected = {
        "head": expected_of(np.ascontiguousarray(weight.T), (6, columns)),
        "bias": expected_of(np.concatenate([first, second]), (columns,)),
    }
    targets = [
        {
            "head": sharded(np.empty((6, columns), weight.dtype), [rows_of((6, columns), rank, 3, cut)], fill=False),
            "bias": blank_like(np.empty(columns, first.dtype)),
        }
        for rank in range(3)
    ]
    recipes = {"head": Source("w").T, "bias": concat(Source("a"), Source("b"))}
    rules = {"head": (1, min(10, columns)), "bias": (0, min(10, columns))}
    reports = load_on(targets, tmp_path, options=options(recipes=recipes, resize=rules, exchange=exchange))
    for target in targets:
        check(target["head"], expected["head"])
        assert same_bits(target["bias"], expected["bias"])
    assert {len(report.skipped) for report in reports} == {0 if columns == 10 else 2}


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (0, "the target has shape \\[6, 16\\], its recipe makes \\[6, 10\\]"),
        ((1, 11), "the target has length 16 along axis 1, the checkpoint 10, and resize says that the first 11"),
        (2, "the target has shape"),
    ],
)
def test_what_a_recipe_makes_of_another_length_is_as_the_rule_says(tmp_path: Path, rule: Any, says: str) -> None:
    save_on([{"w": make_array((10, 6))}], tmp_path)
    target = {"head": make_array((6, 16))}
    kept = target["head"].copy()
    wanted = options(recipes={"head": Source("w").T}, resize={"head": rule})
    with pytest.raises(StateDictMismatchError, match=says):
        load_on([target], tmp_path, options=wanted)
    assert same_bits(target["head"], kept)


@pytest.mark.parametrize("longer", [True, False])
def test_hosts_that_read_for_each_other_and_a_cast(tmp_path: Path, longer: bool) -> None:
    stored = make_array((300, 50), "float32")
    save_on([{"embed": part} for part in split_rows(stored, 2)], tmp_path)
    shape = (320, 50) if longer else (260, 50)
    targets = [{"embed": part} for part in split_rows(np.zeros(shape), 2, fill=False)]
    rules = {"embed": (0, 260)}
    load_on(targets, [tmp_path, another_host(tmp_path, 1)], options=options(resize=rules, cast=True))
    expected = np.zeros(shape)
    rows = min(300, shape[0])
    expected[:rows] = stored[:rows]
    for target in targets:
        check(target["embed"], expected)


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    """They are read to buffers first, which have nothing to say of what is not stored."""
    stored = make_array((10, 4))
    save_on([{"embed": stored, "head": stored, "other": make_array((10, 4)) + 1}], tmp_path)
    memory = blank_like(np.empty((13, 4), stored.dtype))
    load_on([{"embed": memory, "head": memory}], tmp_path, options=options(resize={"embed": 0, "head": 0}))
    assert same_bits(memory, expected_of(stored, (13, 4)))
    wanted = [{"embed": memory, "other": memory}]
    for error in errors_of(try_load(wanted, tmp_path, options=options(resize={"*": 0})), StateDictMismatchError):
        assert "shares memory" in str(error)


def test_only_what_is_named_and_only_along_that_axis(tmp_path: Path) -> None:
    stored = make_array((10, 4))
    names = ("embed", "fixed", "wide", "deep", "equal", "scalar")
    save_on([dict.fromkeys(names, stored)], tmp_path)
    shapes = {"embed": (12, 4), "fixed": (12, 4), "wide": (12, 5), "deep": (10, 4, 1), "equal": (10, 4), "scalar": ()}
    target = {name: blank_like(np.empty(shape, stored.dtype)) for name, shape in shapes.items()}
    rules = {"fixed": 1, "[!f]*": 0, "fix*": 0}  # the first that matches counts
    for error in errors_of(try_load([target], tmp_path, options=options(resize=rules)), StateDictMismatchError):
        assert [line.partition(":")[0] for line in error.problems] == ["fixed", "wide", "deep", "scalar"]
        assert all("the target has shape" in line for line in error.problems)
    assert all(same_bits(value, blank_like(value)) for value in target.values())


@pytest.mark.parametrize(
    ("rows", "rule", "says"),
    [
        (8, 0, r"resize=\{\.\.\.: \(0, n\)\} leaves out what is stored beyond"),
        (8, (0, 9), "the first 9 have to be loaded"),
        (12, (0, 11), "the first 11 have to be loaded"),
        (10, (0, 50), "the first 50 have to be loaded"),
    ],
)
def test_nothing_that_counts_is_left_out_or_missing(tmp_path: Path, rows: int, rule: Any, says: str) -> None:
    save_on([{KEY: make_array((10, 4))}], tmp_path)
    target = {KEY: make_array((rows, 4))}
    kept = target[KEY].copy()
    with pytest.raises(StateDictMismatchError, match=rf"{KEY}.*target has length {rows} .*, the checkpoint 10.*{says}"):
        load_on([target], tmp_path, options=options(resize={"*embed*": rule}))
    (report,) = load_on([target], tmp_path, options=options(resize={"*embed*": rule}, strict=False))
    assert same_bits(target[KEY], kept)
    assert len(report.skipped) == 1


def test_an_axis_that_is_not_there_is_named(tmp_path: Path) -> None:
    save_on([{KEY: make_array((10, 4))}], tmp_path)
    for error in errors_of(
        try_load([{KEY: np.zeros((10, 4))}], tmp_path, options=options(resize={"*": 2})), StateDictMismatchError
    ):
        assert "resize names axis 2, and it has 2" in str(error)


@pytest.mark.parametrize(("columns", "rule"), [(12, 1), (12, (1, 8)), (8, (1, 8))])
def test_powers_of_betas_that_a_pattern_matches_too(tmp_path: Path, columns: int, rule: Any) -> None:
    """A pattern of a parameter and of all that an optimizer has for it: the powers are no longer, and have one axis."""
    parts = ("head.weight", "o.head.weight.moment1", "o.head.weight.beta1_pow_acc", "o.head.weight.beta2_pow_acc")
    shapes = [(4, 10), (4, 10), (1,), ()]
    stored = {key: make_array(shape) for key, shape in zip(parts, shapes, strict=True)}
    save_on([stored], tmp_path)
    wanted = [(4, columns), (4, columns), (1,), ()]
    target = {key: blank_like(np.empty(shape, stored[key].dtype)) for key, shape in zip(parts, wanted, strict=True)}
    (report,) = load_on([target], tmp_path, options=options(resize={"*head.weight*": rule}))
    for key, shape in zip(parts, wanted, strict=True):
        assert same_bits(target[key], expected_of(stored[key], shape)), key
    assert len(report.skipped) == 2


def test_a_partial_tensor_is_refused(tmp_path: Path) -> None:
    save_on([{"embed": make_array((10, 4), "float32")}], tmp_path)
    part = sharded(np.zeros((12, 4), "float32"), [Box((0, 0), (12, 4))])
    part.reduction = Reduction("sum", 0, 1)
    for error in errors_of(
        try_load([{"embed": part}], tmp_path, options=options(resize={"*": 0})), StateDictMismatchError
    ):
        assert "a partial tensor cannot be resized" in str(error)


@pytest.mark.parametrize("rules", [[], "embed", 5, [("embed", 0)]])
def test_rules_are_a_mapping(rules: Any) -> None:
    with pytest.raises(TypeError, match="resize must be a mapping"):
        LoadOptions(resize=rules)


@pytest.mark.parametrize("rule", [-1, "0", None, 1.0, True, (0,), (0, 1, 2), (0, -1), (0, "9"), [0, 9]])
def test_of_axes(rule: Any) -> None:
    with pytest.raises(TypeError, match="resize must have patterns of keys"):
        LoadOptions(resize={"embed": rule})
    assert LoadOptions(resize={"embed": (0, 9)}).resize == {"embed": (0, 9)}


def test_they_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    save_on([{"embed": make_array((10, 4))}], tmp_path)
    each = [options(resize={"embed": 0}), options()]
    results = run_ranks(2, lambda rank: rank.load({"embed": make_array((12, 4))}, tmp_path, options=each[rank.rank]))
    assert all("passed resize=" in str(error) for error in errors_of(results, ValueError))
    all_ok(run_ranks(2, lambda rank: rank.load({"embed": make_array((12, 4))}, tmp_path, options=each[0])))


def test_the_first_rule_that_is_about_a_key_holds(tmp_path: Path) -> None:
    stored = {f"w{i}": make_array((6, 4)) + i for i in range(4)}
    save_on([stored], tmp_path)
    targets = {key: blank_like(np.empty((6, 6), array.dtype)) for key, array in stored.items()}
    wrong = 0  # they differ along axis 1
    rules = {"w[01]": 1, "w1": wrong, "w2": 1, "w*": wrong, "w3": 1}
    load_on([targets], tmp_path, options=options(resize=rules, strict=False))
    for key in ("w0", "w1", "w2"):
        assert same_bits(targets[key], expected_of(stored[key], (6, 6)))
    assert not np.array_equal(targets["w3"][:, :4], stored["w3"])


def test_rules_for_many_keys_are_not_gone_through_for_each() -> None:
    keys = [f"model.layers.{i}.weight" for i in range(20_000)]
    resizing = Resizing(dict.fromkeys(keys, 0))
    geometry = Geometry(Kind.ARRAY, DTYPES["float32"], (4, 2), True, ())
    start = time.process_time()
    for key in keys:
        assert resizing.fitted(join("", key), geometry, (3, 2)).shape == (3, 2)
    assert time.process_time() - start < slowness()  # it took more than 10
    assert len(resizing.notes) == len(keys)
