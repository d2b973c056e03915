"""Functions that test_recipes.py, and the test of recipes on devices, send to ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle.distributed as dist

from paddle_dist_ckpt import LoadOptions, SaveOptions, concat, load_state_dict, save_state_dict, split, stored
from test.paddle.layouts import Spread
from test.paddle.tensors import dist_tensor, local_array
from test.ranks.groups import group_of

ROWS, COLUMNS = 48, 40
STATEMENTS = ["a^T -> t", "t, b -> fused, axis=1", "c -> left, right, axis=1", "right, left -> swapped, axis=1"]
RECIPES = {
    "fused": concat(stored("a").T, stored("b"), axis=1),
    "swapped": concat(*reversed(split(stored("c"), 2, axis=1)), axis=1),
}


def load_what_is_made(folder: str, ranks: int, dimension: int, exchange: str, aoa: bool) -> list[str]:
    """Save three tensors by rows, load two that are made of them, cut along a dimension; returns those that are wrong.

    A small staging memory makes tensors on a device go there in pieces.
    """
    mesh, group = list(range(ranks)), group_of(ranks)
    count = ROWS * COLUMNS
    a = np.arange(count, dtype=np.float32).reshape(ROWS, COLUMNS)
    b, c = (a + count).T.reshape(COLUMNS, ROWS).copy(), a + 2 * count
    saved = {name: dist_tensor(array, Spread(mesh, (0,))) for name, array in (("a", a), ("b", b), ("c", c))}
    save_state_dict(saved, folder, group, options=SaveOptions(timeout=60))
    wanted = {"fused": np.hstack([a.T, b]), "swapped": np.roll(c, COLUMNS // 2, axis=1)}
    spread = Spread(mesh, (dimension,))
    targets = {name: dist_tensor(np.zeros_like(array), spread) for name, array in wanted.items()}
    how: dict[str, Any] = {"aoa_config": {"aoa_statements": STATEMENTS}} if aoa else {"recipes": RECIPES}
    options: Any = LoadOptions(timeout=60, exchange=exchange, staging_bytes=4000, **how)
    report = load_state_dict(targets, folder, group, options=options)
    assert report.unused_keys == ()
    wrong = []
    for name, array in wanted.items():
        step = -(-array.shape[dimension] // ranks)
        expected = np.split(array, range(step, array.shape[dimension], step), axis=dimension)[dist.get_rank()]
        if not np.array_equal(local_array(targets[name]), expected):
            wrong.append(name)
    return wrong
