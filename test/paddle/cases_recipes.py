"""Functions that test_recipes.py, and the test of recipes on devices, send to ranks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import LoadOptions, SaveOptions, concat, install, load_state_dict, save_state_dict, split, stored
from test.paddle.layouts import Spread
from test.paddle.outcomes import outcome_of
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


def load_where_one_rank_asks_wrongly(folder: str, ranks: int, wrong: int, how: str, aoa: bool) -> tuple[Any, ...]:
    """Load where one rank wants something that cannot be made, then where none does.

    Returns what became of the two, and of what this rank has: untouched by the first, filled by the second.
    """
    rank, group = dist.get_rank(), group_of(ranks)
    array = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    mesh = list(range(ranks))
    save_state_dict({"a": dist_tensor(array, Spread(mesh, (0,)))}, folder, group, options=SaveOptions(timeout=60))
    mine = f"t{rank}"  # each rank has one of its own, as those of a pipeline have layers
    bad = rank == wrong
    shape = (ROWS, COLUMNS) if bad and how == "shape" else (COLUMNS, ROWS)
    tensor = paddle.full(shape, 7, dtype="float64" if bad and how == "dtype" else "float32")
    state = {"b" if bad and how == "nothing makes it" else mine: tensor}
    source = "gone" if bad and how == "not stored" else "a"
    if aoa:
        # The same on all ranks; it says of each what that rank has, or has not.
        gone = how == "not stored"
        statements = [f"{'gone' if gone and r == wrong else 'a'}^T -> t{r}" for r in range(ranks)]
        options = LoadOptions(timeout=60, aoa_config={"aoa_statements": statements, "enable_traceback": False})
    else:
        options = LoadOptions(timeout=60, recipes={mine: stored(source).T})
    first = outcome_of(lambda: load_state_dict(state, folder, group, options=options) and None)
    untouched = bool((tensor == 7).all())
    good = {mine: paddle.zeros([COLUMNS, ROWS])}
    recipes = LoadOptions(timeout=60, recipes={mine: stored("a").T})
    second = outcome_of(lambda: load_state_dict(good, folder, group, options=recipes) and None)
    return first, untouched, second, bool((good[mine].numpy() == array.T).all())


def merge_with_aoa(root: str, ranks: int) -> tuple[Any, ...]:
    """Merge a checkpoint by the replaced function of Paddle, whole, and where it cannot be."""
    from paddle.distributed.flex_checkpoint.dcp import load_state_dict as home

    group = group_of(ranks)
    array = np.arange(ROWS * ROWS, dtype=np.float32).reshape(ROWS, ROWS)
    spread = Spread(list(range(ranks)), (1,))
    state = {f"w{i}": dist_tensor(array + i, spread) for i in range(5)}
    with install(save_options=SaveOptions(timeout=60), load_options=LoadOptions(timeout=60)):
        dist.save_state_dict(state, f"{root}/saved", group)
        merge: Any = home.merge_sharded_state_dict

        def outcome(name: str, *statements: str) -> Any:
            config = {"aoa_statements": list(statements), "enable_traceback": False}
            call = functools.partial(merge, f"{root}/saved", f"{root}/{name}", process_group=group, aoa_config=config)
            return outcome_of(lambda: call().tensors)

        return outcome("merged", "w0^T -> t", "w1 -> w0", "t -> w1", "w4 -> _"), outcome("gone", "gone -> w2")


def with_another_engine(folder: str, ranks: int) -> Any:
    """Load with an aoa_config where Paddle's engine on the coordinator is another than the one that is known."""
    from paddle.distributed.flex_checkpoint.aoa import aoa_engine

    group, state = group_of(ranks), {"b": paddle.zeros([3])}
    save_state_dict({"a": paddle.ones([3])}, folder, group, options=SaveOptions(timeout=60))
    options = LoadOptions(timeout=60, aoa_config={"aoa_statements": ["a -> b"]})
    known = aoa_engine.AOAEngine
    if dist.get_rank() == 0:
        aoa_engine.AOAEngine = None
    try:
        return outcome_of(lambda: load_state_dict(state, folder, group, options=options) and None)
    finally:
        aoa_engine.AOAEngine = known
