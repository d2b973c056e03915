"""Functions that test_packs_on_device.py sends to ranks with a device each."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_dist_ckpt import LoadOptions, SaveOptions, load_merged_state_dict, load_state_dict, save_state_dict
from paddle_dist_ckpt.core.memory import address_of, bytes_at
from paddle_dist_ckpt.paddle_adapter import device_copies, device_memory, device_streams
from paddle_dist_ckpt.paddle_adapter.device import at_device, name_of
from paddle_dist_ckpt.paddle_adapter.tensors import PaddleAdapter
from test.device_plugin import control
from test.device_plugin.build import NAME
from test.device_plugin.pinned import pinned_memory

SAVING, LOADING = SaveOptions(no_dist=True, progress=False), LoadOptions(no_dist=True, progress=False)
TO_HOST, TO_DEVICE = "async_memory_copy_d2h", "async_memory_copy_h2d"
DTYPES = ["float32", "bfloat16", "bool", "complex64", "int64", "float16", "uint8", "float64", "complex128"]
ALONE = "float8_e4m3fn"  # of which the device has no kernels
SHAPES: list[tuple[int, ...]] = [(7,), (3, 5), (), (0, 4), (2, 3, 2), (1,)]


def _made(name: str, shape: tuple[int, ...], seed: int) -> paddle.Tensor:
    """A tensor on the device, of random bits."""
    host = paddle.zeros(shape or [1], "uint8").cpu().astype("float32").astype(name)
    random = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 256, host.element_size() * host.size)
    if host.size:
        bytes_at(host.data_ptr(), len(random))[:] = random
    if not shape:
        host = host.reshape([])
    return host._copy_to(paddle.framework._current_expected_place(), True)


def _bits(tensor: paddle.Tensor) -> bytes:
    host = tensor.cpu()
    return bytes_at(host.data_ptr(), host.element_size() * host.size).tobytes() if host.size else b""


def _state(seed: int) -> dict[str, paddle.Tensor]:
    """Small tensors of all kinds, in an order that mixes the types, among them views of one tensor."""
    state = {
        f"{i}.{name}.{number}": _made(name, shape, seed + i + number)
        for i in range(3)
        for number, shape in enumerate(SHAPES)
        for name in [*DTYPES, ALONE]
    }
    base = _made("float32", (8, 6), seed)
    return {**state, "row": base[3], "rows": base[5:7], "large": _made("float32", (200, 200), seed)}


def _counted(work: Callable[[], Any]) -> dict[str, tuple[int, int]]:
    paddle.device.synchronize()
    control.reset()
    work()
    return {name: (count.calls, count.bytes) for name, count in control.counts().items()}


def _there_and_back(path: str) -> list[dict[str, tuple[int, int]]]:
    """Save at once and in the background, load each, and compare every bit; gives the counts of all four."""
    found = []
    for in_background in (False, True):
        state, targets = _state(100 * in_background), _state(7)
        addresses = {name: one.data_ptr() for name, one in targets.items()}
        bits = {name: _bits(one) for name, one in state.items()}
        folder = f"{path}/{in_background}"

        def save(state: Any = state, targets: Any = targets, folder: str = folder, later: bool = in_background) -> None:
            saved = save_state_dict(state, folder, async_save=later, options=SAVING)
            if later:
                for name, one in targets.items():  # what is saved may be overwritten as soon as the call returns
                    if one.size:
                        state[name].copy_(one, True)
                saved.result()

        found.append(_counted(save))
        found.append(_counted(lambda to=targets, folder=folder: load_state_dict(to, folder, options=LOADING)))
        assert {name: _bits(one) for name, one in targets.items()} == bits
        assert {name: one.data_ptr() for name, one in targets.items()} == addresses
    return found


def small_tensors(path: str) -> tuple[int, int, list[tuple[int, int]]]:
    """Gives how many tensors there are, their bytes, and the copies of a save and of two loads."""
    state = _state(0)
    counts = _there_and_back(path)
    copies = [counts[i][(TO_HOST, TO_DEVICE)[i % 2]] for i in (0, 1, 3)]
    return len(state), sum(one.element_size() * one.size for one in state.values()), copies


def calls_of_many(path: str, count: int) -> list[tuple[int, int]]:
    """Copies to the host of a save, of the call of one in the background, and to the device of a load."""
    state = {f"w{i}": paddle.full([256], i, "float32") for i in range(count)}
    found, pending = [], []
    found.append(_counted(lambda: save_state_dict(state, path, options=SAVING))[TO_HOST])
    call = _counted(lambda: pending.append(save_state_dict(state, path, options=SAVING, async_save=True)))
    pending[0].result()
    targets = {name: paddle.zeros([256], "float32") for name in state}
    found += [call[TO_HOST], _counted(lambda: load_state_dict(targets, path, options=LOADING))[TO_DEVICE]]
    assert all(float(targets[f"w{i}"][255]) == i for i in range(0, count, 97))
    return found


def reads_of_groups(path: str, count: int, staging_bytes: int) -> int:
    """How often a load of many tensors reads, which passes so little host memory that they go in many groups."""
    state = {f"w{i}": paddle.full([256], i, "float32") for i in range(count)}  # in files w10 stands before w9
    save_state_dict(state, path, options=SAVING)
    targets, reads, read = {name: paddle.zeros([256], "float32") for name in state}, list[int](), os.preadv

    def counting(*args: Any) -> int:
        reads.append(read(*args))
        return reads[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counting)
        options = LoadOptions(no_dist=True, progress=False, staging_bytes=staging_bytes)
        load_state_dict(targets, path, options=options)
    assert all(float(targets[f"w{i}"][255]) == i for i in range(count))
    assert sum(reads) >= 1024 * count
    return len(reads)


def load_from_pinned_memory(path: str, count: int, elements: int, staging_bytes: int, seconds: float) -> list[str]:
    """Load tensors in many groups, which are read sooner than they go to the device; returns those that are wrong."""
    state = {f"w{i}": paddle.full([elements], i + 1, "float32") for i in range(count)}
    save_state_dict(state, path, options=SAVING)
    targets = {name: paddle.zeros([elements], "float32") for name in state}
    paddle.device.synchronize()
    control.set_speed(4 * count * elements / seconds)
    control.reset()
    try:
        with pinned_memory() as made:
            options = LoadOptions(no_dist=True, progress=False, staging_bytes=staging_bytes)
            load_state_dict(targets, path, options=options)
            assert made
            assert f"pageable_{TO_DEVICE}" not in control.counts()
    finally:
        control.set_speed(0)
    same = (paddle.stack(list(targets.values())) == paddle.stack(list(state.values()))).numpy().all(1)
    return [name for name, is_same in zip(state, same.tolist(), strict=True) if not is_same]


def without_kernels(path: str) -> list[tuple[int, int]]:
    """The same as of :func:`small_tensors` where the device has no kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (device_copies, device_memory):
            patch.setattr(module, "has_kernels", lambda *_: False)
        counts = _there_and_back(path)
    return [counts[i][(TO_HOST, TO_DEVICE)[i % 2]] for i in (0, 1, 3)]


def with_failing_kernels(path: str, operation: str) -> list[str]:
    """Save and load where a kernel fails; gives what is said of it."""
    said: list[str] = []

    def fail(*_: Any) -> None:
        raise RuntimeError("no room for it")

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("paddle_dist_ckpt")
    logger.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paddle if operation == "concat" else paddle._legacy_C_ops, operation, fail)
            _there_and_back(path)
    finally:
        logger.removeHandler(handler)
        device_copies._without_packs.clear()
    return said


def kept_by_a_failing_pack(count: int) -> tuple[list[bool], list[bool], bool]:
    """Fill tensors by a pack whose split fails when its copy to the device is queued; gives whether what it goes to is
    still there, before the copy is made and after it, and whether the tensors are right."""
    targets, made = [paddle.zeros([5], "float32") for _ in range(count)], []
    values = np.arange(5 * count, dtype="float32")
    empty = paddle.empty

    def watched(*given: Any) -> paddle.Tensor:
        tensor = empty(*given)
        made.append(weakref.ref(tensor))
        return tensor

    def fail(*_: Any) -> None:
        raise RuntimeError("no room for it")

    memories = device_memory.memories_of(targets, [0] * count)
    requests = [(memory, 0, address_of(values) + 20 * i, 20) for i, memory in enumerate(memories)]
    copies = device_copies.DeviceCopies()
    paddle.device.synchronize()
    try:
        with pytest.MonkeyPatch.context() as patch, control.held():
            patch.setattr(paddle, "empty", watched)
            patch.setattr(paddle._legacy_C_ops, "split", fail)
            copies.write(requests, values)
            before = [reference() is not None for reference in made]
    finally:
        device_copies._without_packs.clear()
    copies.mark().wait()
    after = [reference() is not None for reference in made]
    found = np.concatenate([target.numpy() for target in targets])
    return before, after, bool((found == values).all())


def copied_when_no_event_is_recorded() -> list[int]:
    """Copy a large tensor, slowly, where the event behind it cannot be recorded; gives what is on the host when that is
    raised."""
    tensor, host = paddle.full([1 << 20], 7, "uint8"), np.zeros(1 << 20, np.uint8)
    (memory,) = device_memory.memories_of([tensor], [0])
    copies, record, calls = device_copies.DeviceCopies(), paddle.device.Event.record, []
    paddle.device.synchronize()

    def fail_behind_copies(*given: Any) -> None:
        calls.append(None)
        if len(calls) == 2:  # the first is for what is computed
            raise RuntimeError("no room for it")
        record(*given)

    control.set_speed(4 << 20)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paddle.device.Event, "record", fail_behind_copies)
            with pytest.raises(RuntimeError, match="no room"):
                copies.read([(memory, 0, address_of(host), 1 << 20)], host)
    finally:
        control.set_speed(0)
    return np.unique(host).tolist()


def kept_where_earlier_events_cannot_be_asked() -> tuple[bool, list[int]]:
    """Copy a tensor, slowly, and be interrupted when earlier copies are asked whether they are done; gives whether what
    it is copied to is kept when that is raised, and what is on the host at last."""
    tensor, host, owner = paddle.full([1 << 20], 7, "uint8"), np.zeros(1 << 20, np.uint8), np.zeros(1)
    (memory,) = device_memory.memories_of([tensor], [0])
    copies, watched = device_copies.DeviceCopies(), weakref.ref(owner)
    paddle.device.synchronize()

    def interrupt(_: Any) -> bool:
        raise KeyboardInterrupt

    control.set_speed(4 << 20)
    try:
        copies.read([(memory, 0, address_of(host), 1 << 19)], host)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paddle.device.Event, "query", interrupt)
            with pytest.raises(KeyboardInterrupt):
                copies.read([(memory, 1 << 19, address_of(host) + (1 << 19), 1 << 19)], owner)
        del owner
        kept = any(used and used[0] is watched() for _, used in device_streams._pending)
    finally:
        control.set_speed(0)
    paddle.device.synchronize()
    return kept, np.unique(host).tolist()


def queued_before_a_failing_wait(path: str) -> list[float]:
    """Save what is still being copied where waiting for that fails at first; gives what the checkpoint says then."""
    targets = {str(i): paddle.zeros([5], "float32") for i in range(20)}
    twos, waits = paddle.full([5], 2.0), []
    wait_event = paddle.device.Stream.wait_event
    paddle.device.synchronize()

    def fail_at_first(*given: Any) -> None:
        waits.append(None)
        if len(waits) == 1:
            raise RuntimeError("no room for it")
        wait_event(*given)

    control.set_speed(5000)
    try:
        stream = paddle.device.current_stream()
        paddle.zeros([1000]).copy_(paddle.zeros([1000]).cpu(), False)  # takes most of a second
        for target in targets.values():
            target.copy_(twos, False)
        assert not stream.query()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paddle.device.Stream, "wait_event", fail_at_first)
            save_state_dict(targets, path, async_save=True, options=SAVING).result()
    finally:
        control.set_speed(0)
        device_copies._without_packs.clear()
    assert waits
    saved = load_merged_state_dict(path, offload=True)
    return sorted({float(value) for one in saved.values() for value in one.numpy()})


def two_devices_by_two_threads() -> tuple[list[str], bool]:
    """Fill tensors of a device by one thread, and of another one by a thread that begins when the first has its device
    as the current one; gives which is the current one at the first's end, and whether all tensors are right."""
    places = [f"{NAME}:0", f"{NAME}:1"]
    begun, other = threading.Event(), threading.Event()
    split, to_fill = paddle._legacy_C_ops.split, device_copies._PackedCopies.to_fill
    current: list[str] = []

    def slow_split(*given: Any) -> None:
        if not begun.is_set():
            begun.set()
            other.wait(0.5)
            current.append(name_of(paddle.framework._current_expected_place()))
        split(*given)

    def slow_to_fill(pack: Any) -> Any:
        if pack.kind.device == places[1]:
            other.set()
            time.sleep(0.2)
        return to_fill(pack)

    targets: dict[str, list[paddle.Tensor]] = {}
    for place in places:
        with at_device(place):
            targets[place] = [paddle.zeros([5], "float32") for _ in range(20)]
            paddle.device.synchronize(place)
    values = np.arange(100, dtype="float32")

    def fill(place: str) -> None:
        copies = device_copies.DeviceCopies()
        memories = device_memory.memories_of(targets[place], [0] * 20)
        copies.write([(memory, 0, address_of(values) + 20 * i, 20) for i, memory in enumerate(memories)], values)
        copies.mark().wait()

    with at_device(places[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(paddle._legacy_C_ops, "split", slow_split)
        patch.setattr(device_copies._PackedCopies, "to_fill", slow_to_fill)
        thread = threading.Thread(target=fill, args=(places[0],))
        thread.start()
        begun.wait(10)
        fill(places[1])
        thread.join()
    right = all(bool((np.concatenate([one.numpy() for one in targets[place]]) == values).all()) for place in places)
    return current, right and not device_copies._without_packs


def made_beside_copies_of_another_device(path: str) -> list[str]:
    """Load a merged state_dict when another thread has its device as the current one; gives where the tensors are."""
    save_state_dict({"x": paddle.ones([3])}, path, options=SAVING)
    begun, split = threading.Event(), paddle._legacy_C_ops.split

    def slow_split(*given: Any) -> None:
        if not begun.is_set():
            begun.set()
            time.sleep(1)
        split(*given)

    with at_device(f"{NAME}:1"):
        targets = [paddle.zeros([5], "float32") for _ in range(20)]
        paddle.device.synchronize(f"{NAME}:1")
    values = np.arange(100, dtype="float32")

    def fill() -> None:
        copies = device_copies.DeviceCopies()
        memories = device_memory.memories_of(targets, [0] * 20)
        copies.write([(memory, 0, address_of(values) + 20 * i, 20) for i, memory in enumerate(memories)], values)
        copies.mark().wait()

    with at_device(f"{NAME}:0"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(paddle._legacy_C_ops, "split", slow_split)
        thread = threading.Thread(target=fill)
        thread.start()
        begun.wait(10)
        made = load_merged_state_dict(path, options=LOADING)
        thread.join()
    return [str(made["x"].place), str(made["x"].tolist())]


def with_kernels_of_the_host(path: str) -> list[str]:
    """Load types of which the device is wrongly said to have kernels, so that Paddle splits on the host; gives where
    the tensors are then."""
    state, targets = ({str(i): _made(ALONE, (5, 3), seed + i) for i in range(4)} for seed in (0, 9))
    addresses = {name: one.data_ptr() for name, one in targets.items()}
    save_state_dict(state, path, options=SAVING)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_copies, "has_kernels", lambda *_: True)
            load_state_dict(targets, path, options=LOADING)
        assert device_copies._without_packs
    finally:
        device_copies._without_packs.clear()
    assert {name: _bits(one) for name, one in targets.items()} == {name: _bits(one) for name, one in state.items()}
    assert {name: one.data_ptr() for name, one in targets.items()} == addresses
    return [str(one.place) for one in targets.values()]


def views_and_parts(path: str, shapes: list[tuple[int, ...]]) -> tuple[int, int, int]:
    """Save and load tensors of such shapes; gives how many views a save and a load make, and the most parts of a
    split."""
    made = 0
    parts: list[int] = []
    view, split = device_memory._view_shape, paddle._legacy_C_ops.split

    def count(*given: Any) -> Any:
        nonlocal made
        made += 1
        return view(*given)

    def record(packed: Any, into: Any, *given: Any) -> Any:
        parts.append(len(into))
        return split(packed, into, *given)

    state, targets = ({f"{i:04}": _made("float32", s, seed + i) for i, s in enumerate(shapes)} for seed in (0, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "_view_shape", count)
        patch.setattr(paddle._legacy_C_ops, "split", record)
        save_state_dict(state, path, options=SAVING)
        in_save = made
        load_state_dict(targets, path, options=LOADING)
    assert {name: _bits(one) for name, one in targets.items()} == {name: _bits(one) for name, one in state.items()}
    return in_save, made - in_save, max(parts)


def beside_each_other(path: str, count: int) -> tuple[int, list[str]]:
    """Save and load tensors of one shape, every other one of them on the host; gives how many were looked at one by one
    when all had been seen, and where the loaded ones are."""

    def made(seed: int) -> dict[str, paddle.Tensor]:
        tensors = [_made("float32", (7,), seed + i) for i in range(count)]
        return {f"{i:04}": one.cpu() if i % 2 else one for i, one in enumerate(tensors)}

    state, targets = made(0), made(9)
    save_state_dict(state, path, options=SAVING)
    alone = 0
    view = PaddleAdapter.view

    def counted(*given: Any) -> Any:
        nonlocal alone
        alone += 1
        return view(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PaddleAdapter, "view", counted)
        load_state_dict(targets, path, options=LOADING)
    assert {name: _bits(one) for name, one in targets.items()} == {name: _bits(one) for name, one in state.items()}
    return alone, [str(one.place) for one in targets.values()]


def transposed(path: str, rows: int, columns: int) -> tuple[int, list[int], list[int]]:
    """Save a transposed matrix, in the background too, and load into one; gives its bytes, those that were copied, and
    the most memory of the device that was used beside it."""
    values = np.arange(rows * columns, dtype="float32").reshape(rows, columns)
    base, blank = paddle.to_tensor(values), paddle.zeros([rows, columns])
    device, copied, peaks = paddle.framework._current_expected_place().get_device_id(), [], []

    def measure(work: Callable[[], Any]) -> None:
        paddle.device.empty_cache()
        before = control.memory(device).bytes
        counts = _counted(work)
        copied.append(sum(counts.get(name, (0, 0))[1] for name in (TO_HOST, TO_DEVICE)))
        peaks.append(control.memory(device).peak - before)

    measure(lambda: save_state_dict({"x": base.t()}, path, options=SAVING))
    measure(lambda: save_state_dict({"x": base.t()}, path, options=SAVING, async_save=True).result())
    measure(lambda: load_state_dict({"x": blank.t()}, path, options=LOADING))
    assert np.array_equal(blank.numpy(), values)
    return values.nbytes, copied, peaks


def compared_among_ranks(path: str, count: int) -> tuple[int, int]:
    """Save plain tensors that all ranks have; gives the copies to the host, and their bytes."""
    state = {f"w{i}": paddle.full([64], i, "float32") for i in range(count)}
    counts = _counted(lambda: save_state_dict(state, path, options=SaveOptions(progress=False)))
    dist.barrier()
    return counts[TO_HOST]
