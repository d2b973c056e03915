"""Recipes of every kind, with what numpy makes of the same arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from paddle_dist_ckpt import Recipe, concat, split, stack, stored
from test.jobs import make_array, save_on, split_all

Arrays = dict[str, np.ndarray]
SAVED: Arrays = {
    "q": make_array((8, 6), seed=1),
    "k": make_array((4, 6), seed=2),
    "v": make_array((4, 6), seed=3),
    "w": make_array((6, 16), seed=4),
    "cube": make_array((3, 4, 5), seed=5),
    "scalar": make_array((), seed=6),
    "none": make_array((0, 6), seed=7),
    "half": make_array((4, 6), "bfloat16", seed=8),
}
MADE: dict[str, tuple[Recipe, Callable[[Arrays], np.ndarray]]] = {
    "itself": (stored("q"), lambda s: s["q"]),
    "scalar": (stored("scalar"), lambda s: s["scalar"]),
    "transposed": (stored("q").T, lambda s: s["q"].T),
    "twice": (stored("q").T.T, lambda s: s["q"]),
    "permuted": (stored("cube").permute(2, 0, 1), lambda s: s["cube"].transpose(2, 0, 1)),
    "permuted twice": (
        stored("cube").permute(2, 0, 1).permute(1, 2, 0),
        lambda s: s["cube"].transpose(2, 0, 1).transpose(1, 2, 0),
    ),
    "sliced": (stored("w")[1:5, -7:], lambda s: s["w"][1:5, -7:]),
    "sliced with dots": (stored("w")[2:, ...], lambda s: s["w"][2:]),
    "sliced behind dots": (stored("cube")[..., -3:-1], lambda s: s["cube"][..., -3:-1]),
    "sliced around dots": (stored("cube")[1:, ..., :2], lambda s: s["cube"][1:, ..., :2]),
    "sliced by dots alone": (stored("q")[...], lambda s: s["q"]),
    "sliced around nothing": (stored("q")[1:, ..., :2], lambda s: s["q"][1:, :2]),
    "permuted from the last axis": (stored("cube").permute([-1, 0, -2]), lambda s: s["cube"].transpose(2, 0, 1)),
    "last axes": (
        concat(split(stored("cube"), 5, axis=-1)[2], stored("cube"), axis=-1),
        lambda s: np.concatenate([s["cube"][..., 2:3], s["cube"]], axis=-1),
    ),
    "slice of a permutation": (stored("cube").T[1:4, :, 2:], lambda s: s["cube"].T[1:4, :, 2:]),
    "permutation of a slice": (
        stored("cube")[1:, 1:3].permute(1, 2, 0),
        lambda s: s["cube"][1:, 1:3].transpose(1, 2, 0),
    ),
    "rows": (concat(stored("q"), stored("k"), stored("v")), lambda s: np.concatenate([s["q"], s["k"], s["v"]])),
    "columns": (
        concat(stored("q").T, stored("k").T, stored("v").T, axis=1),
        lambda s: np.concatenate([s["q"].T, s["k"].T, s["v"].T], axis=1),
    ),
    "one of the rows": (stored("q")[3], lambda s: s["q"][3]),
    "one of the last columns": (stored("w")[..., -2], lambda s: s["w"][..., -2]),
    "one element": (stored("cube")[1, -1, 2], lambda s: s["cube"][1, -1, 2]),
    "elements around dots": (stored("cube")[-1, ..., 3], lambda s: s["cube"][-1, ..., 3]),
    "an element and a slice": (stored("cube")[:2, 1, 2:].T, lambda s: s["cube"][:2, 1, 2:].T),
    "one more axis": (stored("q").unsqueeze(1), lambda s: s["q"][:, None]),
    "one more axis behind": (
        stored("cube").unsqueeze(-1).permute(3, 1, 0, 2),
        lambda s: s["cube"][..., None].transpose(3, 1, 0, 2),
    ),
    "an axis that comes and goes": (stored("q").unsqueeze(0).T.squeeze(2)[1:], lambda s: s["q"].T[1:]),
    "an axis that goes and comes": (stored("w")[2].unsqueeze(0).unsqueeze(-1), lambda s: s["w"][2][None, :, None]),
    "stacked": (stack(stored("k"), stored("v"), stored("k")), lambda s: np.stack([s["k"], s["v"], s["k"]])),
    "stacked in the middle": (
        stack([stored("k").T, stored("v").T], axis=1),
        lambda s: np.stack([s["k"].T, s["v"].T], axis=1),
    ),
    "stacked behind": (stack(stored("k"), stored("v"), axis=-1), lambda s: np.stack([s["k"], s["v"]], axis=-1)),
    "of a stack": (stack(stored("k"), stored("v"), axis=1)[1:3, 1].T, lambda s: s["v"][1:3].T),
    "stacked scalars": (stack(stored("scalar"), stored("scalar")), lambda s: np.stack([s["scalar"]] * 2)),
    "with nothing": (concat(stored("none"), stored("k"), stored("none")), lambda s: s["k"]),
    "nothing": (stored("none").T, lambda s: s["none"].T),
    "the same twice": (concat(stored("k"), stored("k")), lambda s: np.concatenate([s["k"], s["k"]])),
    "third": (split(stored("w"), 4, axis=1)[2], lambda s: np.split(s["w"], 4, axis=1)[2]),
    "interleaved": (
        concat(*(part for pair in zip(split(stored("k"), 4), split(stored("v"), 4), strict=True) for part in pair)),
        lambda s: np.stack([s["k"], s["v"]], axis=1).reshape(8, 6),
    ),
    "slice of a concatenation": (
        concat(stored("q"), stored("k"))[6:11, 2:4].T,
        lambda s: np.concatenate([s["q"], s["k"]])[6:11, 2:4].T,
    ),
}


def expected(name: str) -> np.ndarray:
    """What numpy makes of it."""
    return np.array(MADE[name][1](SAVED), order="C")


def save_in_rows(arrays: Arrays, path: Path) -> Path:
    """Save arrays on two ranks, each some rows of each; returns the folder."""
    save_on(split_all(arrays), path)
    return path
