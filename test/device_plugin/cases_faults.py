"""Functions that test_faults_on_device.py sends to ranks with a device each: what goes wrong, with tensors there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import LoadOptions, SaveOptions, load, load_merged_state_dict, load_state_dict, save_state_dict
from test.device_plugin import control
from test.device_plugin.build import NAME
from test.device_plugin.cases_conversions import place_of
from test.paddle import cases_failures as host_cases
from test.paddle.layouts import Spread
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import dist_tensor

MIB = 1 << 20


def die_in_copy(doing: str, path: str, ranks: int, victim: int, speed: float) -> Outcome:
    """Save a checkpoint, then save or load with one rank whose copies take very long, to be killed there."""
    first = host_cases.save_number(path, ranks, 1)
    assert first.error is None, first.message
    state = host_cases._state(ranks, 2)
    assert {place_of(state["x"]), place_of(state["y"])} == {"device"}
    paddle.device.synchronize()
    if dist.get_rank() == victim:
        control.set_speed(speed)
        Path(path, "stopped").touch()
    if doing == "save":
        return outcome_of(lambda: save_state_dict(state, path, options=SaveOptions(timeout=60)))
    return outcome_of(lambda: load_state_dict(state, path, options=LoadOptions(timeout=60)))


def die_in_collective(path: str, ranks: int, victim: int, timeout: float) -> Outcome:
    """Save a checkpoint, then load copies by collectives that take long, with a rank that is killed meanwhile."""
    first = host_cases.save_number(path, ranks, 1)
    assert first.error is None, first.message
    array = np.zeros((host_cases.ROWS, host_cases.COLUMNS), np.float32)
    state = {"x": dist_tensor(array, Spread(list(range(ranks)), (None,)))}
    assert place_of(state["x"]) == "device"
    if dist.get_rank() == victim:
        Path(path, "stopped").touch()
    options = LoadOptions(timeout=timeout, exchange="always")
    return outcome_of(lambda: load_state_dict(state, path, options=options))


def load_wrongly(path: str, ranks: int, wrong: int, how: str) -> tuple[Outcome, bool, bool]:
    """As that for the host; also returns whether no byte was copied to this rank's device meanwhile."""
    paddle.device.synchronize()
    state = host_cases._state(ranks, -1)
    if dist.get_rank() == wrong:
        wrong_value: Any = {"shape": paddle.full([4], -1.0), "dtype": paddle.full([3], -1, "int32"), "value": 3}[how]
        state["y"] = wrong_value
    paddle.device.synchronize()
    control.reset()
    outcome = outcome_of(lambda: load_state_dict(state, path, options=LoadOptions(timeout=60)))
    counts = control.counts()
    copied = sum(count.bytes for name, count in counts.items() if name.endswith("memory_copy_h2d"))
    untouched = bool((host_cases.local_array(state["x"]) == -1).all()) and state["number"] == -1
    return outcome, untouched, copied == 0


def differing_copies(path: str, ranks: int) -> Outcome:
    """Save a plain tensor that differs from rank to rank."""
    options = SaveOptions(timeout=60, check_replicas="error")
    state = {"y": paddle.full([300], float(dist.get_rank()))}
    return outcome_of(lambda: save_state_dict(state, path, options=options))


# -- a device without room ---------------------------------------------------------------------------------------------


def load_by_many_threads(path: str) -> Outcome:
    """Load all of a checkpoint to the device by eight threads."""
    paddle.set_device(f"{NAME}:0")
    return outcome_of(lambda: load(path, nthreads=8))


def merge_without_room(path: str) -> dict[str, Any]:
    """Load a checkpoint with a tensor larger than the device's memory, and then a part of it, and all to the host."""
    paddle.set_device(f"{NAME}:0")  # a rank that is alone has not chosen it
    paddle.device.empty_cache()
    before = control.memory().bytes
    whole = outcome_of(lambda: load_merged_state_dict(path))
    paddle.device.empty_cache()
    left = control.memory().bytes - before
    part = load_merged_state_dict(path, keys=["small"])
    on_host = outcome_of(lambda: _places_and_values(load_merged_state_dict(path, offload=True)))
    return {"whole": whole, "left": left, "part": _places_and_values(part), "on_host": on_host}


def _places_and_values(state: dict[str, Any]) -> tuple[list[str], list[float]]:
    values = {float(value) for tensor in state.values() for value in np.unique(tensor.numpy())}
    return sorted({place_of(tensor) for tensor in state.values()}), sorted(values)


def save_and_load_without_room(path: str, megabytes: int) -> tuple[int, int]:
    """Save and load tensors that take nearly all of the device's memory; returns the peak and what there is."""
    paddle.set_device(f"{NAME}:0")
    state = {f"x{i}": paddle.full([1 << 18], float(i)) for i in range(megabytes)}
    paddle.device.empty_cache()
    control.reset()
    save_state_dict(state, path)
    save_state_dict(state, path, async_save=True).result()
    for tensor in state.values():
        tensor.set_value(np.zeros([1 << 18], np.float32))
    load_state_dict(state, path)
    for i, tensor in enumerate(state.values()):
        assert np.unique(tensor.numpy()).tolist() == [i]
    return control.memory().peak, control.memory().capacity


def save_and_load_strided_when_full(path: str) -> tuple[list[Outcome], bool]:
    """Save, in both ways, and load tensors of which only the device could make contiguous parts, while it is full and
    the library has not used it before; also returns whether the load gave back what was saved."""
    paddle.set_device(f"{NAME}:0")
    arrays = {"large": np.arange(600 * 500, dtype=np.float32).reshape(600, 500), "small": np.arange(12.0).reshape(3, 4)}
    bases = {key: paddle.to_tensor(array) for key, array in arrays.items()}
    state = {key: paddle.as_strided(one, one.shape[::-1], [1, one.shape[1]]) for key, one in bases.items()}
    kept: list[Any] = []
    _fill(kept)
    found = [
        outcome_of(lambda: save_state_dict(state, path).unique_id),
        outcome_of(lambda: save_state_dict(state, path, async_save=True).result().unique_id),
    ]
    for base in bases.values():
        zeros = np.zeros(base.shape, str(base.dtype).removeprefix("paddle."))
        base.copy_(paddle.utils.dlpack.from_dlpack(zeros), True)
    found.append(outcome_of(lambda: load_state_dict(state, path).unique_id))
    kept.clear()
    same = all(np.array_equal(bases[key].numpy(), array) for key, array in arrays.items())
    return found, same


def exchange_without_room(path: str, full: int) -> list[Outcome]:
    """Load copies by the job's first collectives while one rank's device is full, then by the host, and then as at
    first, when there is room again; gives what the target holds."""
    states = [{"w": dist_tensor(np.zeros([64, 256], np.float32), Spread([0, 1], (None,)))} for _ in range(3)]
    kept: list[Any] = []
    if dist.get_rank() == full:
        _fill(kept)

    def load_into(state: dict[str, Any], offload: bool) -> float:
        load_state_dict(state, path, offload=offload, options=LoadOptions(timeout=8, exchange="always"))
        return float(host_cases.local_array(state["w"]).max())

    found = [outcome_of(lambda: load_into(states[0], False)), outcome_of(lambda: load_into(states[1], True))]
    kept.clear()
    return [*found, outcome_of(lambda: load_into(states[2], False))]


def _fill(kept: list[Any]) -> None:
    """Take all of the device's memory, and keep it."""
    size = 64 * MIB
    while size:
        try:
            kept.append(paddle.empty([size], "uint8"))
        except (OSError, MemoryError, RuntimeError):
            size //= 2


# -- collectives that lie ----------------------------------------------------------------------------------------------


def load_by_liars(path: str, lies: list[str], works_first: bool) -> dict[str, Any]:
    """Load what only some ranks can read while the device's collectives move nothing but say that they do.

    Args:
        path: Holds a folder for each rank, in which its part of the checkpoint is.
        lies: Which collectives.
        works_first: Load once before they begin to.

    Returns:
        Which numbers the targets hold after a load while they work (None without), while they lie, when they work
        again, and by the host.
    """
    _use_anew()
    found: dict[str, Any] = {"before": _numbers_loaded(path) if works_first else None}
    dist.barrier()
    control.lie(*lies)
    found["lying"] = _numbers_loaded(path)
    control.lie()
    found["after"] = _numbers_loaded(path)
    found["host"] = _numbers_loaded(path, offload=True)
    return found


def _use_anew() -> None:
    """Let the group's transport be as before its first use."""
    kept = dist.get_group(0).__dict__.get("_paddle_dist_ckpt")
    if kept is not None:
        make_group, on_host = kept.transport._make_group, kept.transport._on_host
        kept.transport.__dict__.clear()
        kept.transport.__init__(make_group, on_host)


def save_numbers(path: str, number: int) -> Outcome:
    """Save a state to a folder of this rank's own, as on a host of its own."""
    options = SaveOptions(timeout=60, separate_folders=True)
    return outcome_of(
        lambda: save_state_dict(_numbers(number), _own_folder(path), unique_id=0, options=options).unique_id
    )


def _own_folder(path: str) -> Path:
    folder = Path(path, str(dist.get_rank()))
    folder.mkdir(exist_ok=True)
    return folder


def _numbers(number: int) -> dict[str, Any]:
    """Tensors that are broadcast when they are loaded, and one that is exchanged."""
    array, size = np.full((64, 4096), number, np.float32), dist.get_world_size()
    copies, rows = Spread(list(range(size)), (None,)), Spread(list(range(size)), (0,))
    return {
        "copies": dist_tensor(array, copies),
        "small": dist_tensor(array[:4, :8], copies),
        "rows": dist_tensor(array, rows if number >= 0 else Spread(list(range(size)), (1,))),
    }


def _numbers_loaded(path: str, offload: bool = False) -> Outcome:
    state = _numbers(-1)
    options = LoadOptions(timeout=60, separate_folders=True)

    def load() -> list[float]:
        load_state_dict(state, _own_folder(path), offload=offload, options=options)
        return sorted({float(x) for tensor in state.values() for x in np.unique(host_cases.local_array(tensor))})

    outcome = outcome_of(load)
    dist.barrier()
    return outcome
