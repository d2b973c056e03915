"""Functions that test_checkpoints.py sends to ranks with a device each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.base.framework import _dygraph_place_guard as _place_guard

from benchmark import machine
from paddle_dist_ckpt import LoadOptions, SaveOptions, load_merged_state_dict, load_state_dict, save_state_dict
from paddle_dist_ckpt import load as load_one_call
from paddle_dist_ckpt.core.memory import bytes_at
from paddle_dist_ckpt.paddle_adapter import groups
from paddle_dist_ckpt.paddle_adapter.placement import local_box, mesh_coordinate
from paddle_dist_ckpt.paddle_adapter.transport import PaddleTransport
from test.device_plugin import control
from test.device_plugin.pinned import pinned_memory

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
PAIRS: dict[str, tuple[Any, list[Any]]] = {
    "pair": ([0, 1], [dist.Shard(0)]),
    "swapped": ([1, 0], [dist.Shard(0)]),
}


PAIR = ["matrix", "row", "cube"]
_ALONE = SaveOptions(no_dist=True, progress=False)
COLLECTIVES = ["broadcast", "all_to_all", "all_gather", "all_reduce", "reduce", "reduce_scatter", "send", "recv"]


def whole(name: str) -> np.ndarray:
    """Return the values of a global tensor, all different and exact in every dtype."""
    return (np.arange(np.prod(SHAPES[name])) % 251).reshape(SHAPES[name]).astype("float32")


def on_device(array: np.ndarray, dtype: str) -> paddle.Tensor:
    host = paddle.to_tensor(array, place=paddle.CPUPlace()).astype(dtype)
    return host._copy_to(paddle.framework._current_expected_place(), True)


def tensor(name: str, layout: str, fill: bool) -> paddle.Tensor | None:
    """Return a DistTensor on this rank's device: its part of `whole`, or zeros. None outside the mesh."""
    ranks, placements = (LAYOUTS | PAIRS)[layout]
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
    names = {"two": ["matrix"], "columns": ["matrix"], "pair": PAIR, "swapped": PAIR}.get(layout, list(SHAPES))
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
    return load_into(state(layout, False), path, layout, options)


def load_tensors(path: str, layout: str, options: dict[str, Any]) -> tuple[int, int]:
    """Load tensors alone, since a format may have no values."""
    what = state(layout, False)
    del what["step"]
    return load_into(what, path, layout, options)


def load_into(what: dict[str, Any], path: str, layout: str, options: dict[str, Any]) -> tuple[int, int]:
    report = load_state_dict(what, path, options=LoadOptions(progress=False, timeout=60, **options))
    check(what, layout)
    return report.bytes_read, report.bytes_received


def save_addends(path: str) -> None:
    """Save a tensor of which every rank has an addend."""
    mesh = dist.ProcessMesh([0, 1, 2, 3], dim_names=["x"])
    local = on_device(whole("matrix") * (dist.get_rank() + 1), "float32")
    save_state_dict({"sum": dist.auto_parallel.api.dtensor_from_local(local, mesh, [dist.Partial()])}, path)


def load_offloaded(path: str, own_group: bool, options: dict[str, Any]) -> tuple[int, int]:
    """Load with ``offload=True``; gives how many collectives of the device that took, and the bytes received."""
    if own_group:
        dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    what = state("swapped", False)
    control.reset()
    report = load_state_dict(what, path, offload=True, options=LoadOptions(progress=False, timeout=60, **options))
    used = sum(control.counts().get(name, control.Count(0, 0)).calls for name in COLLECTIVES)
    check(what, "swapped")
    return used, report.bytes_received


def exchange_memory(path: str, staging_bytes: int) -> tuple[int, int, int]:
    """Save 4 MiB a rank by rows; load by columns in an exchange. Gives the most memory of the device beside the state
    that was used, how often an all-to-all was made, and what was received."""
    rank = dist.get_rank()
    whole_array = np.arange(1 << 22, dtype="float32").reshape(2048, 2048)
    mesh = dist.ProcessMesh([0, 1, 2, 3], dim_names=["x"])

    def sharded(array: np.ndarray, dim: int) -> paddle.Tensor:
        local = on_device(np.ascontiguousarray(array), "float32")
        return dist.auto_parallel.api.dtensor_from_local(local, mesh, [dist.Shard(dim)])

    save_state_dict({"x": sharded(whole_array[rank * 512 : rank * 512 + 512], 0)}, path)
    target = sharded(np.zeros((2048, 512), "float32"), 1)
    paddle.device.empty_cache()
    control.reset()
    before = control.memory(rank).bytes
    options = LoadOptions(exchange="always", staging_bytes=staging_bytes, progress=False)
    report = load_state_dict({"x": target}, path, options=options)
    assert np.array_equal(target._local_value().numpy(), whole_array[:, rank * 512 : rank * 512 + 512])
    calls = control.counts().get("all_to_all", control.Count(0, 0)).calls
    return control.memory(rank).peak - before, calls, report.bytes_received


def exchange_few(size: int) -> tuple[bytes, int]:
    """Have rank 0 send as many bytes to rank 2 in an exchange, and nobody anything else, where nothing cannot be sent.
    Gives what came, and how many calls this took."""
    rank, calls = dist.get_rank(), 0
    all_to_all = dist.alltoall_single

    def picky(in_split_sizes: list[int], out_split_sizes: list[int], **others: Any) -> Any:
        nonlocal calls
        calls += 1
        if not all(in_split_sizes + out_split_sizes):
            raise RuntimeError("(InvalidArgument) The start row index must be less than the end row index.")
        return all_to_all(in_split_sizes=in_split_sizes, out_split_sizes=out_split_sizes, **others)

    transport = PaddleTransport(lambda: dist.get_group(0), on_host=False)
    incoming = {0: np.zeros(size, np.uint8)} if rank == 2 else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "alltoall_single", picky)
        transport.try_out()
        transport.rely_on_others({})
        calls = 0
        outgoing = {2: np.arange(size, dtype=np.uint8)} if rank == 0 else {}
        transport.exchange(outgoing, incoming, [(0, size)], 1 << 20)
    return b"".join(part.tobytes() for part in incoming.values()), calls


def host_memory_of_own_part(path: str, staging_bytes: int) -> tuple[int, int]:
    """Save 96 MiB a rank, load them in an exchange to which no other rank sends anything. Gives the bytes of host
    memory that the load takes at most, and those received."""
    rank = dist.get_rank()
    mesh = dist.ProcessMesh([0, 1, 2, 3], dim_names=["x"])

    def state() -> dict[str, paddle.Tensor]:
        locals_ = (on_device(np.full((1024, 1024), i + rank / 8, "float32"), "float32") for i in range(24))
        place = dist.auto_parallel.api.dtensor_from_local
        return {f"w{i}": place(local, mesh, [dist.Shard(0)]) for i, local in enumerate(locals_)}

    save_state_dict(state(), path)
    target = state()
    for one in target.values():
        one._local_value().fill_(-1)
    before = machine.reset_peak_memory()["VmRSS"]
    report = load_state_dict(
        target, path, options=LoadOptions(exchange="always", staging_bytes=staging_bytes, progress=False)
    )
    taken = machine.used_memory()["VmHWM"] - before
    assert all(bool((one._local_value() == int(name[1:]) + rank / 8).all()) for name, one in target.items())
    return taken, report.bytes_received


STRIDED: dict[str, Callable[[paddle.Tensor], paddle.Tensor]] = {
    "transposed": lambda x: x.t(),
    "columns": lambda x: x[:, 3:40],
    "every other": lambda x: x[1::2],
    "both": lambda x: x[::3, ::5].t(),
    "rows": lambda x: x[5:9],
}


def save_strided(path: str) -> dict[str, np.ndarray]:
    """Save views of a tensor that are not contiguous, and load them into others; returns what the views hold."""
    base = on_device(np.arange(64 * 48, dtype="float32").reshape(64, 48), "float32")
    views = {name: view(base) for name, view in STRIDED.items()}
    expected = {name: one.numpy() for name, one in views.items()}
    alone = SaveOptions(no_dist=True)
    save_state_dict(views, path, options=alone)
    save_state_dict(views, path, options=alone, async_save=True).result()
    for staging_bytes in (1 << 20, 100):
        for name, view in STRIDED.items():
            blank = on_device(np.full((64, 48), -1, "float32"), "float32")
            load_state_dict({name: view(blank)}, path, options=LoadOptions(no_dist=True, staging_bytes=staging_bytes))
            assert np.array_equal(view(blank).numpy(), expected[name]), name
            assert int((blank.numpy() != -1).sum()) == expected[name].size, "nothing beside the view is touched"
    return expected


def copied_bytes(path: str, pinned: bool) -> dict[str, tuple[int, int]]:
    """Save at once and in the background, and load; gives the bytes copied over those of the state, and how many copies
    were of memory that is not pinned."""
    tensors = {f"w{i}": on_device(np.full((700 + i, 1031), i, "float32"), "float32") for i in range(5)}
    nbytes = sum(4 * int(np.prod(one.shape)) for one in tensors.values())
    alone, found = SaveOptions(no_dist=True), {}

    def measure(name: str, direction: str, work: Callable[[], Any]) -> None:
        control.reset()
        work()
        counts = control.counts()
        pageable = counts.get(f"pageable_{direction}", control.Count(0, 0)).calls
        found[name] = counts[direction].bytes - nbytes, pageable

    groups._alone.cache_clear()  # and with it the buffers of earlier saves
    with pinned_memory() if pinned else nullcontext():
        to_host, to_device = "async_memory_copy_d2h", "async_memory_copy_h2d"
        measure("save", to_host, lambda: save_state_dict(tensors, path, options=alone))
        measure("async", to_host, lambda: save_state_dict(tensors, path, options=alone, async_save=True).result())
        blank = {name: on_device(np.zeros(one.shape, "float32"), "float32") for name, one in tensors.items()}
        measure("load", to_device, lambda: load_state_dict(blank, path, options=LoadOptions(no_dist=True)))
    assert all(np.array_equal(blank[name].numpy(), one.numpy()) for name, one in tensors.items())
    return found


def load_to_places(path: str) -> dict[str, bool]:
    """Load whole tensors to several places; gives whether each has its values there."""
    save_state_dict({"model": {"x": on_device(whole("matrix"), "float32")}}, path, unique_id=0, options=_ALONE)
    places: dict[str, tuple[Callable[[], Any], bool]] = {
        "current": (lambda: load_merged_state_dict(path), True),
        "offload": (lambda: load_merged_state_dict(path, offload=True), False),
        "cpu": (lambda: load_one_call(path, map_location="cpu"), False),
        "name": (lambda: load_one_call(path, map_location="test_device:0"), True),
        "place": (lambda: load_one_call(path, map_location=paddle.CustomPlace("test_device", 0)), True),
        "tensor's": (lambda: load_one_call(path, map_location=on_device(np.ones(1), "float32").place), True),
    }
    found = {}
    for name, (loaded, is_there) in places.items():
        tensor = loaded()["model"]["x"]
        found[name] = np.array_equal(tensor.numpy(), whole("matrix")) and tensor.place.is_custom_place() is is_there
    return found


def computes_beside_a_snapshot(path: str) -> tuple[bool, bool]:
    """Take a snapshot with slow copies while another thread works on the device; gives whether that work was done while
    the snapshot was still being taken, in one of three attempts (on a busy machine the thread may come too late), and
    whether all snapshots were right."""
    values = np.arange(1 << 20, dtype="float32")
    big, other = on_device(values, "float32"), on_device(np.zeros(16), "float32")
    alone = SaveOptions(no_dist=True, progress=False)
    save_state_dict({"x": on_device(np.ones(8), "float32")}, path, options=alone)
    ones = paddle.to_tensor(np.ones(16, "float32"), place=paddle.CPUPlace())
    done_meanwhile, right = [], []

    def work(returned: threading.Event) -> None:
        while not control.counts().get("async_memory_copy_d2h"):
            time.sleep(0.001)
        with _place_guard(big.place):
            other.copy_(ones, False)
            event = paddle.device.Event()
            event.record()
            while not event.query():
                time.sleep(0.001)
        done_meanwhile.append(not returned.is_set())

    while not any(done_meanwhile) and len(done_meanwhile) < 3:
        control.reset()
        control.set_speed(len(values) * 4 / 2)  # two seconds
        returned = threading.Event()
        thread = threading.Thread(target=work, args=[returned])
        thread.start()
        pending = save_state_dict({"x": big}, path, async_save=True, options=alone)
        returned.set()
        control.set_speed(0)
        thread.join()
        pending.result()
        right.append(np.array_equal(load_merged_state_dict(path, offload=True)["x"].numpy(), values))
    return any(done_meanwhile), all(right)


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


def load_resized(path: str) -> list[np.ndarray]:
    """Save a matrix on this rank alone, and load it into longer and shorter ones that hold fives."""
    folder = f"{path}/{dist.get_rank()}"
    save_state_dict({"matrix": on_device(whole("matrix"), "float32")}, folder, options=_ALONE)
    found = []
    for shape, rule in (((80, 48), 0), ((64, 60), 1), ((50, 48), (0, 50)), ((64, 20), (1, 20))):
        target = on_device(np.full(shape, 5, np.float32), "float32")
        options = LoadOptions(no_dist=True, progress=False, staging_bytes=5000, resize={"mat*": rule})
        load_state_dict({"matrix": target}, folder, options=options)
        found.append(target.numpy())
    return found
