"""Many small tensors, some large ones between them, loaded on any layout and into any memory, together or in part."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_dist_ckpt.core.box import Box, whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointError, StateDictMismatchError
from paddle_dist_ckpt.files import runs
from paddle_dist_ckpt.options import LoadOptions
from paddle_dist_ckpt.testing import ShardedArray
from test.folder.test_damage import entries
from test.jobs import (
    LAYOUTS,
    CountingStorage,
    alike,
    another_host,
    blank_like,
    data_files,
    data_reads,
    laid_out,
    little_memory,
    load_alone,
    load_on,
    load_whole,
    make_array,
    replaced_bytes,
    rows_of,
    same_bits,
    save_alone,
    save_on,
    sharded,
    try_load,
)
from test.strategies import examples, some

SHAPES = ((), (1,), (7,), (3, 5), (5, 3), (6, 8), (2, 3, 4), (0, 3), (1, 1, 1), (70, 90), (2500,))
"""Few, so that many tensors are alike; the last two are above one block in most dtypes."""


def cut_2d(shape: tuple[int, ...], columns: int) -> list[Box]:
    """A grid: rows in halves, the last dimension in a few pieces."""
    boxes = [whole(shape)]
    for d, parts in ((0, 2), (len(shape) - 1, columns)):
        if shape and (d or len(shape) == 1):
            boxes = [piece for box in boxes for piece in split(box, d, parts)]
    return [box for box in boxes if box.size] or [whole(shape)]


def split(box: Box, d: int, parts: int) -> list[Box]:
    found = []
    for r in range(parts):
        part = rows_of(box.shape, r, parts, d)
        offset = tuple(a + b for a, b in zip(box.offset, part.offset, strict=True))
        found.append(Box(offset, part.shape))
    return found


def cuts(shape: tuple[int, ...], how: str) -> list[Box]:
    """The boxes of a tensor that is cut in a certain way."""
    if not shape or how == "replicated":
        return [whole(shape)]
    if how == "grid":
        return cut_2d(shape, 3)
    boxes = split(whole(shape), 0 if how == "rows" else len(shape) - 1, 3)
    return [box for box in boxes if box.size] or [whole(shape)]


HOW = ("replicated", "rows", "columns", "grid")


def guarded(array: np.ndarray, how: str) -> tuple[np.ndarray, np.ndarray | None]:
    """A target for an array, and the memory of which it is a part if it is a part."""
    view = laid_out(array, how)
    memory = view.base if isinstance(view.base, np.ndarray) else None
    if memory is not None:
        memory[...] = blank_like(memory)
    view[...] = blank_like(array)
    return view, memory


class Target:
    """A rank's target for one array: some of its boxes, or all of it in a numpy array; in memory laid out somehow."""

    def __init__(self, array: np.ndarray, boxes: Sequence[Box] | None, how: str) -> None:
        self.array, self.boxes = array, boxes
        parts = [array] if boxes is None else [array[box.slices] for box in boxes]
        self._views = [guarded(part, how) for part in parts]
        pieces = [view for view, _ in self._views]
        dtype = DTYPES[array.dtype.name]
        self.value: Any = pieces[0] if boxes is None else ShardedArray(array.shape, dtype, list(boxes), pieces)

    def check(self, key: str) -> None:
        """Assert that it has the data, and the memory around it what was there."""
        boxes = [whole(self.array.shape)] if self.boxes is None else self.boxes
        for box, (view, memory) in zip(boxes, self._views, strict=True):
            assert same_bits(np.array(view), np.array(self.array[box.slices])), (key, box)
            self._check_rest(key, view, memory)

    def check_untouched(self, key: str) -> None:
        for view, memory in self._views:
            assert same_bits(np.array(view), blank_like(np.array(view))), key
            self._check_rest(key, view, memory)

    @staticmethod
    def _check_rest(key: str, view: np.ndarray, memory: np.ndarray | None) -> None:
        if memory is not None:
            kept = view.copy()
            view[...] = blank_like(kept)
            assert same_bits(memory, blank_like(memory)), key
            view[...] = kept


def some_arrays(rng: random.Random, count: int) -> dict[str, np.ndarray]:
    """Arrays of few shapes and dtypes, many of them alike."""
    shapes, dtypes = rng.choices(SHAPES, k=4), rng.choices(sorted(DTYPES), k=3)
    return {f"k{i:02}": make_array(rng.choice(shapes), rng.choice(dtypes), i) for i in range(count)}


def saved_states(rng: random.Random, arrays: dict[str, np.ndarray], ranks: int) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for key, array in arrays.items():
        boxes, shift = cuts(array.shape, rng.choice(HOW)), rng.randrange(ranks)
        plain = rng.random() < 0.3
        for r, state in enumerate(states):
            mine = boxes[(r + shift) % ranks :: ranks]
            if plain or mine:
                how = rng.choice(LAYOUTS)
                state[key] = laid_out(array, how) if plain else sharded(array, mine, how)
    return states


@examples(30)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.sampled_from(("auto", "never", "always")))
def test_from_any_layout_to_any_other(seed: int, savers: int, loaders: int, exchange: Any) -> None:
    rng = random.Random(seed)
    arrays = some_arrays(rng, rng.choice([3, 30, 60]))
    with tempfile.TemporaryDirectory() as folder:
        save_on([s | {"text": "x" * 5000} for s in saved_states(rng, arrays, savers)], folder)
        targets: list[dict[str, Target]] = []
        for r in range(loaders):
            wanted = [key for key in arrays if rng.random() < 0.8]
            rng.shuffle(wanted)
            targets.append({})
            for key in wanted:
                array = arrays[key]
                boxes = None
                if rng.random() < 0.7:
                    boxes = cuts(array.shape, rng.choice(HOW))
                    boxes = (boxes[r::loaders] or boxes[:1]) if rng.random() < 0.8 else boxes
                targets[-1][key] = Target(array, boxes, rng.choice(LAYOUTS))
        states = [{key: target.value for key, target in mine.items()} for mine in targets]
        if rng.random() < 0.5:
            states[0]["text"] = None
        paths = [another_host(folder, r) if rng.random() < 0.3 else folder for r in range(loaders)]
        load_on(states, paths, options=LoadOptions(exchange=exchange, timeout=60))
        for mine in targets:
            for key, target in mine.items():
                target.check(key)
        assert states[0].get("text") in (None, "x" * 5000)


# Every dtype in every second layout, and every layout with every second dtype.
@pytest.mark.parametrize(("how", "dtype"), some(itertools.product(LAYOUTS, sorted(DTYPES)), 24))
def test_every_dtype_in_every_memory(tmp_path: Path, dtype: str, how: str) -> None:
    """Small ones alike, one of no dimensions, one of one element, one empty, one above a block."""
    shapes = [(6, 8)] * 5 + [(), (1,), (0, 4), (80, 90)]
    arrays = {f"k{i}": make_array(shape, dtype, i) for i, shape in enumerate(shapes)}
    save_on([{k: sharded(a, cuts(a.shape, "rows")[r::2]) for k, a in arrays.items()} for r in range(2)], tmp_path)
    targets = {
        key: Target(a, None if i % 2 else cuts(a.shape, "columns"), how) for i, (key, a) in enumerate(arrays.items())
    }
    load_alone({key: target.value for key, target in targets.items()}, tmp_path)
    for key, target in targets.items():
        target.check(key)


def test_boxes_that_are_wanted_twice_or_overlap(tmp_path: Path) -> None:
    """One entry, many items of one kind and of others."""
    arrays = {f"k{i}": make_array((6, 8), "int32", i) for i in range(20)}
    save_on([{k: sharded(a, cuts(a.shape, "grid")[r::2]) for k, a in arrays.items()} for r in range(2)], tmp_path)
    boxes = [
        whole((6, 8)),
        Box((1, 1), (4, 4)),
        Box((1, 1), (4, 4)),
        whole((6, 8)),
        Box((0, 0), (1, 8)),
        Box((5, 7), (1, 1)),
    ]
    targets = {key: Target(array, boxes, LAYOUTS[i % len(LAYOUTS)]) for i, (key, array) in enumerate(arrays.items())}
    load_alone({key: target.value for key, target in targets.items()}, tmp_path)
    for key, target in targets.items():
        target.check(key)


# -- what is read


def test_neighbours_are_read_together_and_nothing_twice(tmp_path: Path) -> None:
    arrays = {f"k{i:03}": make_array((10, 5), seed=i) for i in range(600)}
    save_alone(arrays, tmp_path)
    log: list[tuple[str, int, int]] = []
    targets = {key: blank_like(array) for key, array in arrays.items()}
    report = load_alone(dict(targets), CountingStorage(tmp_path, log))
    assert alike(targets, arrays)
    (read,) = data_reads(tmp_path, log)
    assert read[2] - read[1] == 600 * 200 == report.bytes_read


def test_what_is_far_from_what_is_wanted_is_not_read(tmp_path: Path) -> None:
    arrays = {f"k{i:03}": make_array((10, 5), seed=i) for i in range(600)}
    save_alone(arrays, tmp_path)
    log: list[tuple[str, int, int]] = []
    targets = {key: blank_like(array) for i, (key, array) in enumerate(arrays.items()) if i % 100 < 2}
    load_alone(dict(targets), CountingStorage(tmp_path, log))
    assert alike(targets, {key: arrays[key] for key in targets})
    assert [stop - start for _, start, stop in data_reads(tmp_path, log)] == [400] * 6


@pytest.mark.parametrize("chunk", [1, 1000, 4096])
@pytest.mark.parametrize("gap", [0, 100])
def test_runs_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, gap: int) -> None:
    """Runs end wherever chunks do, also amidst the items of one entry."""
    monkeypatch.setattr(runs, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(runs, "GAP_BYTES", gap)
    arrays = some_arrays(random.Random(chunk + gap), 40)
    save_on(saved_states(random.Random(3), arrays, 2), tmp_path)
    targets = {key: Target(a, cuts(a.shape, "grid") * 2, "window") for key, a in arrays.items() if key[-1] != "3"}
    load_alone({key: target.value for key, target in targets.items()}, tmp_path)
    for key, target in targets.items():
        target.check(key)


# -- damage


def test_damage_is_blamed_on_the_right_tensor_wherever_it_is(tmp_path: Path) -> None:
    """On one rank and on several; and the others can still be loaded."""
    rng = random.Random(5)
    arrays = {f"k{i:02}": make_array([(3, 5), (6, 8), (), (70, 90)][i % 4], "float32", i) for i in range(40)}
    save_on([{k: sharded(a, cuts(a.shape, "rows")[r::2]) for k, a in arrays.items()} for r in range(2)], tmp_path)
    places = [(key, path, rng.randrange(start, stop)) for key, path, start, stop in entries(tmp_path) if stop > start]
    for key, path, place in rng.sample(places, 25):
        with path.open("rb") as file:
            file.seek(place)
            value = file.read(1)[0] ^ (1 << rng.randrange(8))
        with replaced_bytes(path, {place: value}):
            targets = {k: blank_like(a) for k, a in arrays.items()}
            with pytest.raises(CheckpointCorruptedError, match=rf"^{key}: .*{path.name}"):
                load_alone(dict(targets), tmp_path)
            shares = [{k: Target(a, cuts(a.shape, "rows")[r::2], "c").value for k, a in arrays.items()} for r in (0, 1)]
            shares = [{k: v for k, v in share.items() if v.boxes} for share in shares]
            for error in try_load(shares, tmp_path):
                assert isinstance(error, CheckpointError)
                assert f"{key}: " in str(error)
                assert path.name in str(error)
            targets = {k: blank_like(a) for k, a in arrays.items() if k != key}
            load_alone(dict(targets), tmp_path)
            assert alike(targets, {k: arrays[k] for k in targets})


def test_the_first_of_two_damaged_entries_of_one_run_is_named(tmp_path: Path) -> None:
    arrays = {f"k{i:02}": make_array((6, 8), "float32", i) for i in range(20)}
    save_alone(arrays, tmp_path)
    found = {key: (path, start) for key, path, start, _ in entries(tmp_path)}
    path = found["k07"][0]
    data = path.read_bytes()
    changes = {place: data[place] ^ 0xFF for place in (found["k07"][1] + 191, found["k08"][1])}
    with replaced_bytes(path, changes), pytest.raises(CheckpointCorruptedError, match="^k07: .* 192 bytes at"):
        load_alone({key: blank_like(array) for key, array in arrays.items()}, tmp_path)


def test_entries_that_are_swapped_are_found(tmp_path: Path) -> None:
    """Each block's checksum is sought at its own place."""
    arrays = {f"k{i:02}": make_array((6, 8), "float32", i) for i in range(20)}
    save_alone(arrays, tmp_path)
    (path,) = data_files(tmp_path)
    data = path.read_bytes()
    starts = {key: start for key, _, start, _ in entries(tmp_path)}
    changes = {}
    for i in range(192):
        changes |= {starts["k04"] + i: data[starts["k05"] + i], starts["k05"] + i: data[starts["k04"] + i]}
    with replaced_bytes(path, changes), pytest.raises(CheckpointCorruptedError, match="^k04: "):
        load_alone({key: blank_like(array) for key, array in arrays.items()}, tmp_path)


# -- casts, and what does not fit


def test_casts_between_those_that_need_none(tmp_path: Path) -> None:
    """Every pair that is converted, among many of the same shape that are not."""
    pairs = {
        "float32": "float64",
        "float64": "float32",
        "float16": "bfloat16",
        "bfloat16": "float32",
        "int8": "int64",
        "uint8": "int16",
        "bool": "int32",
        "complex64": "complex128",
    }
    arrays: dict[str, np.ndarray] = {}
    wanted: dict[str, np.ndarray] = {}
    for i, (stored, target) in enumerate(pairs.items()):
        for j, shape in enumerate([(6, 8), (70, 90), ()]):
            for dtype in (stored, target, stored):
                key = f"k{i}.{j}.{len(arrays):03}"
                numbers = np.random.default_rng(len(arrays)).integers(0, 2 if stored == "bool" else 100, shape)
                arrays[key] = np.asarray(numbers).astype(make_array((1,), dtype).dtype)
                wanted[key] = np.asarray(numbers).astype(make_array((1,), target).dtype)
    save_on([{k: sharded(a, cuts(a.shape, "columns")[r::2]) for k, a in arrays.items()} for r in range(2)], tmp_path)
    for how in ("c", "inner"):
        targets = {key: guarded(array, how)[0] for key, array in wanted.items()}
        load_alone(dict(targets), tmp_path, None, LoadOptions(cast=True))
        for key, target in targets.items():
            assert same_bits(np.array(target), wanted[key]), key
    with pytest.raises(StateDictMismatchError):
        load_alone({key: blank_like(array) for key, array in wanted.items()}, tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_does_not_fit_is_named_and_everything_else_is_loaded(tmp_path: Path, ranks: int) -> None:
    arrays = {f"k{i:02}": make_array([(6, 8), (3, 5), (70, 90)][i % 3], "float32", i) for i in range(30)}
    save_on([{k: sharded(a, cuts(a.shape, "rows")[r::2]) for k, a in arrays.items()} for r in range(2)], tmp_path)
    bad: dict[str, np.ndarray] = {
        "k03": np.zeros((6, 9), np.float32),
        "k04": np.zeros((3, 5), np.int32),
        "k05": np.zeros((70, 90, 1), np.float32),
        "none": np.zeros((6, 8), np.float32),
    }
    read_only = blank_like(arrays["k06"])
    read_only.flags.writeable = False
    bad["k06"] = read_only
    uncovered = ShardedArray((6, 8), DTYPES["float32"], [Box((4, 0), (3, 8))], [np.zeros((3, 8), np.float32)])
    before = {key: array.copy() for key, array in bad.items()}
    states: list[dict[str, Any]] = []
    for r in range(ranks):
        states.append({key: blank_like(array) for key, array in arrays.items() if key not in bad})
        if r == ranks - 1:
            states[-1] |= bad | {"k09": uncovered}
    with_all = [dict(state) for state in states]
    for error in try_load(with_all, tmp_path):
        assert isinstance(error, StateDictMismatchError)
        assert all(key in str(error) for key in (*bad, "k09"))
    for state in states:
        assert all(same_bits(state[k], blank_like(arrays[k])) for k in arrays if k not in (*bad, "k09"))
    reports = load_on(states, tmp_path, options=LoadOptions(strict=False, timeout=60))
    assert sorted(problem.partition(":")[0].lstrip("/") for problem in reports[-1].skipped) == sorted([*bad, "k09"])
    for r, state in enumerate(states):
        for key, array in arrays.items():
            if r == ranks - 1 and (key in bad or key == "k09"):
                continue
            if key in state:
                assert same_bits(state[key], array), key
    assert all(same_bits(bad[key], before[key]) for key in bad)
    assert not uncovered.pieces[0].any()


def test_very_many_tiny_arrays_are_loaded_in_little_memory(tmp_path: Path) -> None:
    arrays = {f"k{i}": np.full(1, i % 251, np.uint8) for i in range(140_000)}
    save_alone(arrays, tmp_path)
    load_whole(tmp_path, keys=["k7"])  # imports what it takes
    with little_memory(69 << 20):
        assert load_whole(tmp_path) == arrays
    targets = {key: np.zeros(1, np.uint8) for key in reversed(arrays)}
    with little_memory(54 << 20):
        load_alone(targets, tmp_path)
    assert targets == arrays
