"""Functions that test_checkpoints.py sends to ranks with a device each."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import LoadOptions, SaveOptions, load_state_dict, save_state_dict
from paddle_dist_ckpt.core.memory import bytes_at
from paddle_dist_ckpt.paddle_adapter.placement import local_box, mesh_coordinate

SHAPES = {"matrix": (64, 48), "odd": (16, 7), "row": (96,), "cube": (8, 6, 10)}
DTYPES = {"matrix": "float32", "odd": "int64", "row": "bfloat16", "cube": "float64"}
LAYOUTS: dict[str, tuple[Any, list[Any]]] = {
    "rows": ([0, 1, 2, 3], [dist.Shard(0)]),
    "copies": ([0, 1, 2, 3], [dist.Replicate()]),
    "grid": ([[0, 1], [2, 3]], [dist.Shard(0), dist.Replicate()]),
    "other": ([[3, 1], [2, 0]], [dist.Replicate(), dist.Shard(0)]),
    "two": ([2, 1], [dist.Shard(0)]),
    "columns": ([0, 1, 2, 3], [dist.Shard(1)]),
}


def whole(name: str) -> np.ndarray:
    """Return the values of a global tensor, all different and exact in every dtype."""
    return (np.arange(np.prod(SHAPES[name])) % 251).reshape(SHAPES[name]).astype("float32")


def on_device(array: np.ndarray, dtype: str) -> paddle.Tensor:
    host = paddle.to_tensor(array, place=paddle.CPUPlace()).astype(dtype)
    return host._copy_to(paddle.framework._current_expected_place(), True)


def tensor(name: str, layout: str, fill: bool) -> paddle.Tensor | None:
    """Return a DistTensor on this rank's device: its part of `whole`, or zeros. None outside the mesh."""
    ranks, placements = LAYOUTS[layout]
    mesh = dist.ProcessMesh(ranks, dim_names=["x", "y"][: np.ndim(ranks)])
    shape = SHAPES[name]
    coordinate = mesh_coordinate(mesh, dist.get_rank())
    if coordinate is None:
        return None
    part = whole(name)[local_box(shape, mesh.shape, coordinate, placements, name).slices]
    local = on_device(np.ascontiguousarray(part) if fill else np.zeros_like(part), DTYPES[name])
    return dist.auto_parallel.api.dtensor_from_local(local, mesh, placements)


def state(layout: str, fill: bool) -> dict[str, Any]:
    """Return DistTensors, a plain tensor on the device, one on the host, and a value."""
    names = {"two": ["matrix"], "columns": ["matrix"]}.get(layout, list(SHAPES))
    made = {name: tensor(name, layout, fill) for name in names}
    return {
        **{name: one for name, one in made.items() if one is not None},
        "plain": on_device(whole("odd") if fill else np.zeros(SHAPES["odd"], "float32"), "float32"),
        "host": paddle.to_tensor(whole("row") if fill else whole("row") * 0, place=paddle.CPUPlace()),
        "step": 7 if fill else None,
    }


def check(found: dict[str, Any], layout: str) -> None:
    """Compare all tensors with what they should be, byte by byte."""
    expected = state(layout, True)
    for key, value in found.items():
        if key == "step":
            assert value == 7
            continue
        locals_ = [one._local_value() if one.is_dist() else one for one in (value, expected[key])]
        data = [one.cpu() for one in locals_]
        sizes = [one.element_size() * int(np.prod(one.shape)) for one in data]
        assert bytes_at(data[0].data_ptr(), sizes[0]).tobytes() == bytes_at(data[1].data_ptr(), sizes[1]).tobytes(), key


def save(path: str, layout: str, in_background: bool) -> int:
    """Save; with the values gone as soon as the call returns, if that is in the background."""
    what = state(layout, True)
    saved = save_state_dict(what, path, async_save=in_background, options=SaveOptions(progress=False))
    if in_background:
        for key in ("matrix", "plain"):
            one = what[key]._local_value() if what[key].is_dist() else what[key]
            one.set_value(np.zeros(one.shape, "float32"))
        return int(saved.result().bytes_written)
    return int(saved.bytes_written)


def load(path: str, layout: str, options: dict[str, Any]) -> tuple[int, int]:
    """Load and compare; gives the bytes that were read and that were received."""
    what = state(layout, False)
    report = load_state_dict(what, path, options=LoadOptions(progress=False, timeout=60, **options))
    check(what, layout)
    return report.bytes_read, report.bytes_received


def save_addends(path: str) -> None:
    """Save a tensor of which every rank has an addend."""
    mesh = dist.ProcessMesh([0, 1, 2, 3], dim_names=["x"])
    local = on_device(whole("matrix") * (dist.get_rank() + 1), "float32")
    save_state_dict({"sum": dist.auto_parallel.api.dtensor_from_local(local, mesh, [dist.Partial()])}, path)


def peak_of_host(path: str, nbytes: int) -> tuple[int, int]:
    """How much more host memory saving and loading that much need, in bytes."""
    import resource

    big = on_device(np.zeros(nbytes // 4, "float32"), "float32")
    alone = SaveOptions(no_dist=True)
    save_state_dict({"x": on_device(np.ones(1000), "float32")}, path + "/warm", options=alone)
    found = []
    for work in (
        lambda: save_state_dict({"x": big}, path, options=alone),
        lambda: load_state_dict({"x": big}, path, options=LoadOptions(no_dist=True, staging_bytes=32 << 20)),
    ):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        found.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    return found[0], found[1]
