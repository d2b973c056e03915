"""Functions that test_conversions_on_device.py sends to ranks with a device each.

The layouts and states are those of the tests on the host: they make their tensors on Paddle's current device, by the
constructor that takes uneven shards, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_dist_ckpt import LoadOptions, SaveOptions, load_merged_state_dict, load_state_dict, save_state_dict
from paddle_dist_ckpt.loading import exchange_parts
from test.device_plugin import control
from test.device_plugin.build import NAME
from test.paddle import cases_conversions as conversions
from test.paddle.cases_conversions import VALUES
from test.paddle.layouts import LAYOUTS, Array, global_arrays
from test.paddle.tensors import local_array, to_array
from test.ranks import groups

_sets_of_groups: dict[str, dict[int, Any]] = {}


def use_groups(backend: str) -> None:
    """Let `groups.group_of` give groups of a backend: "xccl", which is the device's, or "gloo". All ranks call it."""
    if backend not in _sets_of_groups:
        sizes = range(1, dist.get_world_size())
        _sets_of_groups[backend] = {size: dist.new_group(list(range(size)), backend=backend) for size in sizes}
    groups._groups.update(_sets_of_groups[backend])


@contextmanager
def current(where: str) -> Iterator[None]:
    """Make the device Paddle's current one, or the host; ``"either"`` is the host on even ranks."""
    on_host = where == "host" or (where == "either" and dist.get_rank() % 2 == 0)
    device = paddle.get_device()
    paddle.set_device("cpu" if on_host else device)
    try:
        yield
    finally:
        paddle.set_device(device)


def place_of(tensor: Any) -> str:
    """Where a tensor's memory is: "host" or "device"."""
    place = tensor._local_value().place if tensor.is_dist() else tensor.place
    assert place.is_cpu_place() or place.custom_device_type() == NAME, place
    return "host" if place.is_cpu_place() else "device"


def state_on(where: str, layout_name: str, arrays: dict[str, Array], values: dict[str, Any]) -> dict[str, Any]:
    """The state of a layout, with its tensors on the device, on the host, or on either by rank."""
    expected = "host" if where == "host" or (where == "either" and dist.get_rank() % 2 == 0) else "device"
    with current(where):
        state = conversions._state(LAYOUTS[layout_name], arrays, values)
    tensors = [*state["model"].values(), *state["optimizer"].values()]
    assert {place_of(tensor) for tensor in tensors if tensor._is_initialized()} <= {expected}
    return state


def save(where: str, layout_name: str, path: str, by_rank: bool = False, called: str = "device") -> int:
    """Save everything on a layout, called with some device as the current one; returns the bytes that are written."""
    state = state_on(where, layout_name, global_arrays(), VALUES)
    group = groups.group_of(LAYOUTS[layout_name].ranks)
    options = SaveOptions(timeout=60, separate_folders=by_rank)
    with current(called):
        report = save_state_dict(state, conversions._folder(path, by_rank), group, options=options)
    return report.bytes_written


def load(
    where: str, layout_name: str, path: str, exchange: str, by_rank: bool = False, called: str = "device"
) -> list[str]:
    """Load everything on a layout into zeros; returns what is wrong with it afterwards."""
    layout, wanted = LAYOUTS[layout_name], global_arrays()
    zeros = {name: np.zeros_like(array) for name, array in wanted.items()}
    state = state_on(where, layout_name, zeros, conversions._forgotten(VALUES))
    options: Any = LoadOptions(exchange=exchange, timeout=60, staging_bytes=1000, separate_folders=by_rank)
    with current(called):
        load_state_dict(state, conversions._folder(path, by_rank), groups.group_of(layout.ranks), options=options)
    problems = []
    for i, (name, array) in enumerate(wanted.items()):
        branch, key = conversions._place(i, name)
        if key in state[branch]:
            problem = conversions._difference(local_array(state[branch][key]), array, layout, i)
            problems += [f"{name}: {problem}"] if problem else []
    same = all(conversions._equal(state[name], value) for name, value in VALUES.items())
    return problems if same else [*problems, "values"]


def save_slowly(layout_name: str, path: str, speed: float) -> int:
    """Save while copies between host and device take their time."""
    control.set_speed(speed)
    try:
        return save("device", layout_name, path)
    finally:
        control.set_speed(0)


def load_in_parts(layout_name: str, path: str, most: int) -> list[str]:
    """Load by an exchange whose parts have so few needs that tensors are filled by several of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_parts, "_MOST_NEEDS", most)
        patch.setattr(exchange_parts, "_LEAST_NEEDS", 1)
        return load("device", layout_name, path, "always")


def load_slowly(layout_name: str, path: str, exchange: str, speed: float) -> list[str]:
    """Load while copies between host and device take their time."""
    control.set_speed(speed)
    try:
        return load("device", layout_name, path, exchange)
    finally:
        control.set_speed(0)


def load_merged(path: str, offload: bool) -> tuple[list[str], set[str]]:
    """Load a checkpoint whole; returns what is wrong with it, and where its tensors are."""
    merged = load_merged_state_dict(path, offload=offload)
    problems, places = merged_problems(merged), set()
    for branch in ("model", "optimizer"):
        places |= {place_of(tensor) for tensor in merged[branch].values() if tensor._is_initialized()}
    return problems, places


def merged_problems(merged: dict[str, Any]) -> list[str]:
    """What is wrong with a checkpoint that was loaded whole."""
    problems = [name for name, value in VALUES.items() if not conversions._equal(merged[name], value)]
    for i, (name, array) in enumerate(global_arrays().items()):
        branch, key = conversions._place(i, name)
        found = to_array(merged[branch][key])
        if (found.dtype, found.shape, found.tobytes()) != (array.dtype, array.shape, array.tobytes()):
            problems.append(name)
    return problems
