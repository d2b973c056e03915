"""Many small tensors of few kinds, whose entries are read together: each of them right, and the damaged one named."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt.core.box import Box
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.errors import CheckpointCorruptedError, CheckpointError
from paddle_dist_ckpt.options import LoadOptions
from paddle_dist_ckpt.testing import shard_array
from test.jobs import blank_like, load_alone, load_on, make_array, same_bits, save_alone, save_on

CUTS = {
    "whole": [Box((0, 0), (8, 12))],
    "rows": [Box((0, 0), (4, 12)), Box((4, 0), (4, 12))],
    "columns": [Box((0, 0), (8, 7)), Box((0, 7), (8, 5))],
    "uneven": [Box((0, 0), (3, 12)), Box((3, 0), (5, 6)), Box((3, 6), (5, 6))],
}
COUNT = 40


def arrays(dtypes: Any = tuple(DTYPES)) -> dict[str, np.ndarray]:
    """Matrices of every dtype, and between them what has other shapes."""
    found = {f"m{i:03}": make_array((8, 12), dtype, i) for i, dtype in zip(range(COUNT), itertools.cycle(dtypes))}
    odd = {(): "float64", (1,): "int8", (0, 3): "float32", (30, 50): "float32", (3, 1, 2): "bfloat16"}
    for i, (shape, dtype) in enumerate(odd.items()):
        found[f"m{i * 7:03}.odd"] = make_array(shape, dtype, i)
    return found


def spread(state: dict[str, np.ndarray], cut: str, ranks: int, fill: bool = True) -> list[dict[str, Any]]:
    """Each matrix cut and dealt to ranks; everything else on every rank."""
    boxes = CUTS[cut]
    states: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for key, array in state.items():
        for r, mine in enumerate(states):
            if array.shape == (8, 12):
                mine[key] = shard_array(array, boxes[r::ranks], fill)
            else:
                mine[key] = array.copy() if fill else blank_like(array)
    return states


@pytest.mark.parametrize(("source", "target"), list(itertools.product(CUTS, CUTS)))
def test_any_cut_is_loaded_as_any_other(tmp_path: Path, source: str, target: str) -> None:
    state = arrays()
    save_on(spread(state, source, 2), tmp_path)
    targets = spread(state, target, 3, fill=False)
    load_on(targets, tmp_path)
    for key, array in state.items():
        for mine in targets:
            if array.shape == (8, 12):
                for box, piece in zip(mine[key].boxes, mine[key].pieces, strict=True):
                    assert same_bits(piece, np.ascontiguousarray(array[box.slices])), key
            else:
                assert same_bits(mine[key], array), key


def test_targets_that_are_not_contiguous(tmp_path: Path) -> None:
    state = arrays()
    save_on(spread(state, "uneven", 2), tmp_path)
    memory = {key: blank_like(np.empty((9, 24), a.dtype)) for key, a in state.items() if a.shape == (8, 12)}
    views = {key: array[:8, ::2] if i % 2 else array.T[:12, :8].T for i, (key, array) in enumerate(memory.items())}
    load_alone(dict(views), tmp_path)
    for key, view in views.items():
        assert same_bits(view.copy(), state[key]), key
        untouched = memory[key][8:]
        assert same_bits(untouched, blank_like(untouched)), key


@pytest.mark.parametrize("victim", ["m000", "m017", "m039", "m021.odd"])
def test_a_damaged_entry_is_named(tmp_path: Path, victim: str) -> None:
    state = arrays(("float32",))
    save_alone(state, tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    at = data.index(state[victim].tobytes(), 8 + int.from_bytes(data[:8], "little"))
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorruptedError, match=rf"^{victim}: .*{path.name}"):
        load_alone({key: blank_like(array) for key, array in state.items()}, tmp_path)
    rest = {key: blank_like(array) for key, array in state.items() if key != victim}
    if victim != "m021.odd":
        load_alone({"m038": rest["m038"]}, tmp_path)
        assert same_bits(rest["m038"], state["m038"])


def test_casts_among_them(tmp_path: Path) -> None:
    state = arrays(("float32", "float64", "int8"))
    save_alone(state, tmp_path)
    wide = {key: np.zeros(a.shape, "float64" if a.dtype.kind == "f" else a.dtype) for key, a in state.items()}
    wide = {key: array for key, array in wide.items() if state[key].dtype.name in ("float32", "float64", "int8")}
    with np.errstate(all="ignore"):
        load_alone(wide, tmp_path, None, LoadOptions(cast=True))
        for key, array in wide.items():
            assert same_bits(array, state[key].astype(array.dtype)), key
    save_alone({"a": np.ones(3), "b": np.full(3, 1e300)}, tmp_path / "large")
    with pytest.raises(CheckpointError, match="b: a finite float64 value is too large for float32"):
        load_alone({k: np.zeros(3, np.float32) for k in "ab"}, tmp_path / "large", None, LoadOptions(cast=True))
