"""Functions that test_conversions.py sends to ranks."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import paddle.distributed as dist

from paddle_dist_ckpt import LoadOptions, SaveOptions, load_state_dict, save_state_dict
from test.paddle.layouts import LAYOUTS, Array, Layout, global_arrays, part_of
from test.paddle.tensors import dist_tensor, local_array
from test.ranks.groups import group_of

VALUES: dict[str, Any] = {
    "step": 2**70,
    "epoch": np.int32(3),
    "config": {"rate": 1e-3, "name": "säge", "flags": [True, None, (1, 2.5)], "empty": {}, 3: b"\x00\xff"},
    "history": {"best": math.inf, "text": "x" * 6000},
}


def save(layout_name: str, path: str, by_rank: bool = False) -> int:
    """Save everything on a layout; returns the bytes that this rank wrote."""
    layout = LAYOUTS[layout_name]
    state, options = _state(layout, global_arrays(), VALUES), SaveOptions(separate_folders=by_rank)
    report = save_state_dict(state, _folder(path, by_rank), group_of(layout.ranks), options=options)
    return report.bytes_written


def load(layout_name: str, path: str, exchange: str, by_rank: bool = False) -> list[str]:
    """Load everything on a layout into zeros; returns what is wrong with it afterwards."""
    layout = LAYOUTS[layout_name]
    wanted = global_arrays()
    zeros = {name: np.zeros_like(array) for name, array in wanted.items()}
    state = _state(layout, zeros, _forgotten(VALUES))
    options: Any = LoadOptions(exchange=exchange, timeout=60, separate_folders=by_rank)
    load_state_dict(state, _folder(path, by_rank), group_of(layout.ranks), options=options)
    problems = []
    for i, (name, array) in enumerate(wanted.items()):
        branch, key = _place(i, name)
        if key in state[branch]:
            problem = _difference(local_array(state[branch][key]), array, layout, i)
            problems += [f"{name}: {problem}"] if problem else []
    values = {name: state[name] for name in VALUES}
    return problems if _equal(values, VALUES) else [*problems, f"values: {values}"]


def _folder(path: str, by_rank: bool) -> Path:
    return Path(path, f"rank{dist.get_rank()}") if by_rank else Path(path)


def _place(i: int, name: str) -> tuple[str, str]:
    """The branch and key of a tensor in the state_dict."""
    return ("optimizer", f"{name}.moment") if i % 2 else ("model", name)


def _state(layout: Layout, arrays: dict[str, Array], values: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {"model": {}, "optimizer": {}, **copy.deepcopy(values)}
    for i, (name, array) in enumerate(arrays.items()):
        spread = layout.spread(i, array.shape)
        if layout.keeps_foreign or dist.get_rank() in np.array(spread.mesh):
            branch, key = _place(i, name)
            state[branch][key] = dist_tensor(array, spread)
    return state


def _forgotten(values: dict[str, Any]) -> dict[str, Any]:
    """Targets for values: a None for each, and for the nested ones a dict of other values."""
    return {name: dict.fromkeys(value, 0) if name == "history" else None for name, value in values.items()}


def _difference(found: Array, array: Array, layout: Layout, i: int) -> str | None:
    expected = part_of(array, layout.spread(i, array.shape), dist.get_rank())
    if expected is None:
        return None
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype}{found.shape} instead of {expected.dtype}{expected.shape}"
    return None if found.tobytes() == expected.tobytes() else f"{found} instead of {expected}"


def _equal(found: Any, expected: Any) -> bool:
    """Equal and of the same types, all the way down. The order of a dict's keys does not count."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    return bool(found == expected)
