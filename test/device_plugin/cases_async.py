"""Functions that test_async_on_device.py sends to ranks with a device each: saves in the background, and streams."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_dist_ckpt import LoadOptions, SaveOptions, load_state_dict, save_state_dict
from paddle_dist_ckpt.core.memory import bytes_at
from test.device_plugin import control
from test.device_plugin.cases_conversions import place_of
from test.paddle import cases_async as host_cases
from test.paddle.cases_async import LONG, SHARDED, Gate, _resident, rich_array
from test.paddle.layouts import Array, Spread
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import dist_tensor, from_local, local_array, mesh_of, paddle_tensor

HOLD_SECONDS = 0.6
ITEMS = 50_000
SPEED = 2_000_000.0  # bytes per second


def as_on_the_host(name: str, *args: Any) -> Any:
    """Run a function for ranks without devices; its way to meet would not wait for a collective of devices."""
    with mock.patch.object(host_cases, "meet", _meet):
        return getattr(host_cases, name)(*args)


def _meet(_: int) -> None:
    ones = paddle.ones([1])
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()


# -- contents ----------------------------------------------------------------------------------------------------------


def uneven_array() -> Array:
    """An array that four ranks share unevenly; the last one has nothing of it."""
    return rich_array("float32")[:9, :5].copy()


def rich_state(ranks: int) -> dict[str, Any]:
    """Tensors of many kinds on the device: sharded, uneven, replicated, partial, plain; an array; values."""
    everyone = list(range(ranks))
    state: dict[str, Any] = {name: dist_tensor(rich_array(name), Spread(everyone, (0,))) for name in SHARDED}
    state["columns"] = dist_tensor(rich_array("float32"), Spread(everyone, (1,)))
    state["uneven"] = dist_tensor(uneven_array(), Spread(everyone, (0,)))
    state["copy"] = dist_tensor(rich_array("float32"), Spread(everyone, (None,)))
    state["plain"] = paddle_tensor(rich_array("float32"))
    share = paddle.full([64, 3], float(1 + dist.get_rank()))
    state["partial"] = from_local(share, share.shape, mesh_of(Spread(everyone, (None,))), [dist.Partial()])
    assert {place_of(value) for value in state.values() if local_of(value)._is_initialized()} == {"device"}
    state["array"] = rich_array("float64")
    state["values"] = {"large": list(range(5000)), "small": [1, {"a": 2}], "text": "x"}
    return state


def local_of(tensor: Any) -> Any:
    """The plain tensor of a rank's part."""
    return tensor._local_value() if tensor.is_dist() else tensor


def overwrite(state: dict[str, Any], later: bool) -> None:
    """Change everything in a state where it is: at once, or by copies that are queued on the current stream."""
    for value in state.values():
        if isinstance(value, paddle.Tensor) and local_of(value).shape and 0 not in local_of(value).shape:
            local = local_of(value)
            other = local.cpu()
            bytes_at(other.data_ptr(), int(np.prod(other.shape)) * other.element_size())[:] = 1
            local.copy_(other, not later)
        elif isinstance(value, np.ndarray):
            value[...] = -1
    state["values"]["small"][1]["a"] = 3
    state["values"] |= {"large": [], "text": "y"}


def save_and_overwrite(path: str, ranks: int, bound: int | None, later: bool) -> Outcome:
    """Save twice in the background, the second time by the plan of the first; change the state before it is written."""

    def work() -> list[int]:
        ids = []
        for _ in range(2):
            gate, state = Gate(path), rich_state(ranks)
            how = SaveOptions(timeout=60, snapshot_bytes=bound)
            pending = save_state_dict(state, gate.storage, async_save=True, options=how)
            overwrite(state, later)
            gate.opened.set()
            ids.append(pending.result(LONG).unique_id)
        return ids

    return outcome_of(work)


# -- memory ------------------------------------------------------------------------------------------------------------


def device_memory_meanwhile(path: str, megabytes: int) -> tuple[int, int]:
    """How much more device memory is in use while a save is written whose tensors nobody else has; and at the most."""
    options = SaveOptions(no_dist=True)
    save_state_dict({"x": paddle.ones([4])}, path, async_save=True, options=options).result(LONG)
    paddle.device.empty_cache()
    before = control.memory(dist.get_rank()).bytes
    state = {f"x{i}": paddle.ones([1 << 18]) for i in range(megabytes)}
    control.reset()
    gate = Gate(path, "sync_file")
    pending = save_state_dict(state, gate.storage, async_save=True, options=options)
    peak = control.memory(dist.get_rank()).peak - before
    state.clear()
    gc.collect()
    paddle.device.empty_cache()
    after = control.memory(dist.get_rank()).bytes - before
    assert not pending.done()
    gate.opened.set()
    pending.result(LONG)
    return after, peak


def host_memory_growth(path: str, megabytes: int, bound: int | None) -> list[int]:
    """How many bytes of host memory a process has more while it writes a state of so many megabytes; twice."""
    options = SaveOptions(snapshot_bytes=bound, no_dist=True)
    save_state_dict({"x": paddle.ones([4])}, path, async_save=True, options=options).result(LONG)
    state = {f"x{i}": paddle.ones([1 << 18]) for i in range(megabytes)}
    grown = []
    for _ in range(2):
        gate, before = Gate(path, "sync_file"), _resident()
        pending = save_state_dict(state, gate.storage, async_save=True, options=options)
        assert gate.reached.wait(LONG)
        grown.append(_resident() - before)
        gate.opened.set()
        pending.result(LONG)
    return grown


# -- the order of what streams do --------------------------------------------------------------------------------------


@contextmanager
def slow_copies(bytes_per_second: float) -> Iterator[None]:
    """Let copies between host and device take their time."""
    control.set_speed(bytes_per_second)
    try:
        yield
    finally:
        control.set_speed(0)


class Values:
    """Pinned arrays of one number each, to be copied to the device later."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._other = paddle.zeros([int(SPEED * HOLD_SECONDS) // 4])

    def queue(self, state: dict[str, Any], number: float) -> None:
        """Queue copies to all tensors of a state, on the current stream, behind one that takes `HOLD_SECONDS`."""
        for tensor in (self._other, *state.values()):
            local = local_of(tensor)
            array = np.full(local.shape, number, np.float32)
            control.pin(array.ctypes.data, array.nbytes)
            self._arrays.append(array)
            local.copy_(paddle.utils.dlpack.from_dlpack(array), False)
        assert not paddle.device.current_stream().query(), "nothing is left to do"

    def done(self) -> None:
        """Wait for the copies."""
        paddle.device.synchronize()
        for array in self._arrays:
            control.unpin(array.ctypes.data)
        self._arrays.clear()


class Heart:
    """A thread that wants to run every few milliseconds. ``longest`` is the longest time in which it could not."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(0.005):
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now

    def __enter__(self) -> Heart:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def numbered(number: float) -> dict[str, Any]:
    """A state on the device that says a number everywhere; each of four ranks has an addend of that in ``sum``."""
    everyone = list(range(dist.get_world_size()))
    array = np.full((ITEMS,), number, np.float32)
    addend = paddle.full([300], number)
    return {
        "part": dist_tensor(array, Spread(everyone, (0,))),
        "copy": dist_tensor(array, Spread(everyone, (None,))),
        "plain": paddle.full([300], number),
        "sum": from_local(addend, addend.shape, mesh_of(Spread(everyone, (None,))), [dist.Partial()]),
    }


def save_what_is_queued(path: str, in_background: bool, options: dict[str, Any]) -> tuple[int, float, float]:
    """Save while copies into the tensors still wait; queue others afterwards. Returns the id, the seconds that the call
    took, and the longest time in which it let no other thread run."""
    state, values, how = numbered(1.0), Values(), SaveOptions(timeout=60, **options)
    with slow_copies(SPEED):
        values.queue(state, 2.0)
        start = time.monotonic()
        with Heart() as heart:
            saved = save_state_dict(state, path, async_save=in_background, options=how)
        seconds = time.monotonic() - start
        values.queue(state, 3.0)
        unique_id = saved.result(LONG).unique_id if in_background else saved.unique_id
    values.done()
    return unique_id, seconds, heart.longest


def load_over_what_is_queued(path: str, exchange: Any) -> tuple[list[float], float, float]:
    """Load while copies into the targets still wait. Returns what they say then, and as `save_what_is_queued`."""
    state, values = numbered(0.0), Values()
    del state["sum"]
    options = LoadOptions(timeout=60, exchange=exchange, staging_bytes=30_000)
    with slow_copies(SPEED):
        values.queue(state, 3.0)
        start = time.monotonic()
        with Heart() as heart:
            load_state_dict(state, path, options=options)
        seconds = time.monotonic() - start
    values.done()
    return _numbers(state), seconds, heart.longest


def load_and_look_at_once(path: str, exchange: Any) -> tuple[list[float], list[float]]:
    """Load over slow copies. Returns the numbers that are in the memory when the call returns, and then, after a copy
    that is queued at once, those of that copy."""
    state, values = numbered(0.0), Values()
    del state["sum"]
    options = LoadOptions(timeout=60, exchange=exchange, staging_bytes=30_000)
    with slow_copies(SPEED):
        load_state_dict(state, path, options=options)
        found = set()
        for tensor in state.values():
            local = local_of(tensor)
            array = np.empty(local.shape, np.float32)
            control.copy(array.ctypes.data, local.data_ptr(), array.nbytes, control.TO_HOST)  # waits for no stream
            found |= set(np.unique(array).tolist())
        values.queue(state, 4.0)
    values.done()
    return sorted(found), _numbers(state)


def _numbers(state: dict[str, Any]) -> list[float]:
    arrays = [local_array(one) if one.is_dist() else one.numpy() for one in state.values()]
    return sorted({number for array in arrays for number in np.unique(array).tolist()})


# -- training ----------------------------------------------------------------------------------------------------------


class Training:
    """A small model that is trained on the device, the same on every rank."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        with paddle.utils.unique_name.guard():
            self.model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 4))
            self.schedule = paddle.optimizer.lr.StepDecay(0.01, step_size=2)
            self.optimizer = paddle.optimizer.AdamW(self.schedule, parameters=self.model.parameters())
        for parameter in self.model.parameters():
            parameter.set_value(random.random(parameter.shape, dtype=np.float32))

    def step(self, number: int) -> float:
        """Train one step on data of their own; returns the loss."""
        data = np.random.default_rng(number).random((4, 8), dtype=np.float32)
        loss = ((self.model(paddle.to_tensor(data)) - 1) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad(set_to_zero=False)
        self.schedule.step()
        return float(loss)

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def content(self) -> dict[str, bytes]:
        """All bytes of it, by names without the numbers that Paddle counts up in a process."""
        tensors = {**self.model.state_dict(), **self.optimizer.state_dict()}
        return {
            re.sub(r"_\d+$", "", name): value.numpy().tobytes() if hasattr(value, "numpy") else repr(value).encode()
            for name, value in tensors.items()
        }


def train_and_save(path: str, steps: int, bound: int | None) -> tuple[list[dict[str, bytes]], list[float]]:
    """Train, save in the background after every step; returns what the state was each time, and the losses."""
    training, contents, losses = Training(1), [], []
    pending = None
    for number in range(steps):
        losses.append(training.step(number))
        contents.append(training.content())
        options = SaveOptions(timeout=60, snapshot_bytes=bound, check_replicas="error")
        pending = save_state_dict(training.state(), path, async_save=True, options=options)
    assert pending is not None
    pending.result(LONG)
    return contents, losses


def resume(path: str, unique_id: int, steps: int) -> tuple[dict[str, bytes], list[float]]:
    """Load what was saved after a step into another model, and train on; returns the loaded state and the losses."""
    training = Training(2)
    training.step(100)  # so that the optimizer has a state
    state = training.state()
    load_state_dict(state, path, unique_id=unique_id, options=LoadOptions(timeout=60))
    training.optimizer.set_state_dict(state["optimizer"])
    assert {place_of(value) for value in state["model"].values()} == {"device"}
    content = training.content()
    return content, [training.step(number) for number in range(unique_id + 1, steps)]
