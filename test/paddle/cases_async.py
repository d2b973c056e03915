"""Functions that test_async_save.py sends to ranks, or runs in processes of their own."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dist_ckpt import (
    AsyncSave,
    CheckpointError,
    LoadOptions,
    SaveOptions,
    list_checkpoints,
    load_merged_state_dict,
    load_state_dict,
    save_state_dict,
    verify,
)
from paddle_dist_ckpt.core.memory import bytes_at
from paddle_dist_ckpt.testing import FaultyStorage
from test.background import in_background
from test.hooks import raises
from test.paddle.layouts import Spread
from test.paddle.outcomes import Outcome, outcome_of
from test.paddle.tensors import dist_tensor, from_local, local_array, mesh_of, paddle_tensor
from test.paddle.versions import FLOAT8
from test.ranks.groups import group_of
from test.waiting import PATIENCE, end_of, until

ROWS, COLUMNS = 64, 1024
LONG = PATIENCE


def meet(ranks: int) -> None:
    """Wait for the other ranks, by a collective."""
    if ranks > 1:
        dist.all_reduce(paddle.ones([1]), group=group_of(ranks))


class Gate:
    """A folder whose operations of one kind wait in the background, on some ranks, until the gate is opened."""

    def __init__(
        self, path: str, operation: str = "write", ranks: tuple[int, ...] | None = None, name: str = ""
    ) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._operation, self._name = operation, name
        self._applies = ranks is None or dist.get_rank() in ranks
        self.storage = FaultyStorage(path, self._hook)

    def _hook(self, operation: str, name: str) -> None:
        if self._applies and operation == self._operation and self._name in name and in_background():
            self.reached.set()
            assert self.opened.wait(LONG)


def state_of(ranks: int, number: int) -> dict[str, Any]:
    """A state that says ``number`` everywhere, of which each rank writes a part."""
    array = np.full((ROWS, COLUMNS), number, np.float32)
    return {
        "x": dist_tensor(array, Spread(list(range(ranks)), (0,))) if ranks > 1 else paddle.to_tensor(array),
        "y": paddle.full([300], float(number)),
        "z": np.full(100, number),
        "number": number,
    }


def save(
    path: Any, ranks: int, number: int, unique_id: int | None = None, coordinator: int = 0, **options: Any
) -> AsyncSave:
    """Save in the background."""
    how, state = SaveOptions(**{"timeout": 2 * LONG, **options}), state_of(ranks, number)
    return save_state_dict(state, path, _group(ranks), coordinator, unique_id, async_save=True, options=how)


def save_now(path: Any, ranks: int, number: int, coordinator: int = 0, **options: Any) -> int:
    """Save; returns the id."""
    how = SaveOptions(**{"timeout": 2 * LONG, **options})
    return save_state_dict(state_of(ranks, number), path, _group(ranks), coordinator, options=how).unique_id


def _group(ranks: int) -> Any:
    return group_of(ranks) if ranks > 1 else None


def numbers_in(path: Any, unique_id: int | None = None) -> int:
    """What a whole checkpoint says."""
    merged = load_merged_state_dict(path, unique_id=unique_id)
    found = {merged["number"], *merged["y"].tolist(), *merged["z"].tolist(), *np.unique(merged["x"].numpy()).tolist()}
    assert len(found) == 1, found
    return int(found.pop())


# -- contents ----------------------------------------------------------------------------------------------------------


def rich_array(dtype: str) -> Any:
    """Bits of which no two elements are alike, if the dtype can."""
    import ml_dtypes

    raw = np.random.default_rng(5).integers(0, 100, (ROWS, COLUMNS))
    return raw.astype(getattr(ml_dtypes, dtype, None) or dtype)


def rich_state(ranks: int) -> dict[str, Any]:
    """Tensors of all kinds: sharded, replicated, partial, transposed, plain; arrays; values."""
    everyone = list(range(ranks))
    state: dict[str, Any] = {name: dist_tensor(rich_array(name), Spread(everyone, (0,))) for name in SHARDED}
    state["columns"] = dist_tensor(rich_array("float32"), Spread(everyone, (1,)))
    state["copy"] = dist_tensor(rich_array("float32"), Spread(everyone, (None,)))
    state["plain"] = paddle_tensor(rich_array("float32"))
    state["transposed"] = paddle_tensor(rich_array("float32")).transpose([1, 0])
    assert not state["transposed"].is_contiguous()
    share = paddle.full([ROWS, 3], float(1 + dist.get_rank()))
    for name, local in (("partial", share), ("partial transposed", share.clone().transpose([1, 0]))):
        state[name] = from_local(local, local.shape, mesh_of(Spread(everyone, (None,))), [dist.Partial()])
    state["array"] = rich_array("float64")
    state["strided"] = rich_array("float64")[::2, ::3]
    state["values"] = {"large": list(range(5000)), "small": [1, {"a": 2}], "text": "x"}
    return state


SHARDED = ("float32", "bfloat16", *(("float8_e4m3fn",) if FLOAT8 else ()), "bool", "int8")


def destroy(state: dict[str, Any]) -> None:
    """Change everything in a state where it is."""
    for value in list(state.values()):
        if isinstance(value, paddle.Tensor):
            local = value._local_value() if value.is_dist() else value
            bytes_at(local.data_ptr(), int(np.prod(local.shape)) * local.element_size())[:] = 0x5A
        elif isinstance(value, np.ndarray):
            value[...] = -1
    state["values"]["small"][1]["a"] = 3
    state["values"] |= {"large": [], "text": "y"}
    state.clear()


def save_and_destroy(path: str, ranks: int, bound: int | None) -> Outcome:
    """Save twice in the background, the second time by the plan of the first; change the state before it is written."""

    def work() -> list[int]:
        ids = []
        for _ in range(2):
            gate, state = Gate(path), rich_state(ranks)
            how = SaveOptions(timeout=60, snapshot_bytes=bound)
            pending = save_state_dict(state, gate.storage, group_of(ranks), async_save=True, options=how)
            destroy(state)
            gate.opened.set()
            ids.append(pending.result(LONG).unique_id)
        return ids

    return outcome_of(work)


def save_both_ways(path: str, ranks: int) -> Outcome:
    """Save one state synchronously and in the background, in two folders."""

    def work() -> None:
        state = rich_state(ranks)
        save_state_dict(state, f"{path}/sync", group_of(ranks))
        save_state_dict(state, f"{path}/async", group_of(ranks), async_save=True).result(LONG)

    return outcome_of(work)


# -- commits and failures ----------------------------------------------------------------------------------------------


def save_with_slow_rank(path: str, ranks: int, slow: int, operation: str) -> tuple[list[bool], Outcome]:
    """Save while the disk of one rank stands still; says whether it was done, and committed, while it did."""
    gate = Gate(path, operation, (slow,))
    pending = save(gate.storage, ranks, 1)
    if dist.get_rank() == slow:
        assert gate.reached.wait(LONG)
    seen = [pending.wait(0.3), pending.done(), Path(path, "0.metadata").exists()]
    meet(ranks)
    seen += [pending.done(), Path(path, "0.metadata").exists()]
    meet(ranks)
    gate.opened.set()
    return seen, outcome_of(lambda: pending.result(LONG).unique_id)


def save_on_full_disk(path: str, ranks: int, full: int, bound: int | None) -> list[Outcome]:
    """Save in the background while the disk of one rank is full; then save on one that is not, in both ways."""

    storage: Any = FaultyStorage(path, raises("write", "*", errno.ENOSPC)) if dist.get_rank() == full else path
    pending = save(storage, ranks, 2, snapshot_bytes=bound)
    failed = outcome_of(lambda: pending.result(LONG))
    meet(ranks)
    left = outcome_of(lambda: sorted(os.listdir(path)))
    meet(ranks)
    return [failed, left, outcome_of(lambda: save(path, ranks, 3).result(LONG).unique_id), _now(path, ranks, 4)]


def _now(path: str, ranks: int, number: int, **options: Any) -> Outcome:
    return outcome_of(lambda: save_now(path, ranks, number, **options))


def fail_unobserved(path: str, ranks: int, broken: int, coordinator: int) -> list[Outcome]:
    """Save in the background on a broken disk, and drop the handle; then save twice, with this coordinator."""

    storage: Any = FaultyStorage(path, raises("sync_file", "*", errno.EIO)) if dist.get_rank() == broken else path
    pending = save(storage, ranks, 2)
    assert pending.wait(LONG)
    del pending
    first = _now(path, ranks, 3, coordinator=coordinator)
    meet(ranks)  # a rank that is late for a call that has failed, while others are in the next one, makes that fail too
    return [first, _now(path, ranks, 4, coordinator=coordinator)]


def save_while_busy(path: str, ranks: int, coordinator: int) -> list[Outcome]:
    """Save, with this coordinator, while one is under way: not waiting, then waiting, in both ways."""
    gate = Gate(path)
    first = save(gate.storage, ranks, 1)
    refused = [outcome_of(lambda: save(path, ranks, 2, coordinator=coordinator, when_busy="raise"))]
    meet(ranks)  # or whoever is late for it, when others are in the next one, makes that fail too
    refused.append(_now(path, ranks, 3, coordinator=coordinator, when_busy="raise"))
    assert not first.done()
    meet(ranks)
    threading.Timer(0.4, gate.opened.set).start()
    second = save(path, ranks, 4, coordinator=coordinator)
    assert first.done(), "it has not waited"
    third = _now(path, ranks, 5)
    assert second.done()
    return [*refused, *(outcome_of(lambda p=p: p.result(LONG).unique_id) for p in (first, second)), third]


def load_meanwhile(path: str, ranks: int) -> list[Outcome]:
    """Load, also what does not fit, while a save is under way; returns what became of the save, too."""
    assert save_now(path, ranks, 1) == 0
    gate = Gate(path, "sync_file")
    pending = save(gate.storage, ranks, 2)
    outcomes = []
    for _ in range(2):
        target = state_of(ranks, -1)
        load_state_dict(target, path, group_of(ranks))
        assert {target["number"], *target["y"].tolist(), *np.unique(local_array(target["x"])).tolist()} == {1}
        wrong: Any = {"y": paddle.zeros([7])} if dist.get_rank() == 1 else {}
        outcomes.append(outcome_of(lambda w=wrong: load_state_dict(w, path, group_of(ranks))))
        assert numbers_in(path) == 1
        assert verify(path).ok
        assert list_checkpoints(path) == [0]
    assert not pending.done()
    meet(ranks)
    gate.opened.set()
    return [*outcomes, outcome_of(lambda: pending.result(LONG).unique_id)]


def save_differently(path: str, ranks: int, other: int) -> list[Outcome]:
    """One rank saves in the background, the others do not."""
    meet(ranks)
    if dist.get_rank() == other:
        first = outcome_of(lambda: save(path, ranks, 1))
    else:
        first = _now(path, ranks, 1)
    meet(ranks)
    return [first, outcome_of(lambda: save(path, ranks, 2).result(LONG).unique_id)]


def die_meanwhile(path: str, ranks: int, victim: int) -> tuple[Outcome, Outcome] | None:
    """Save with one rank that stops in the middle, to be killed there; then try once more."""
    save(path, ranks, 1).result(LONG)
    gate = Gate(path, "write", (victim,))
    pending = save(gate.storage, ranks, 2)
    if dist.get_rank() == victim:
        assert gate.reached.wait(LONG)
        Path(path, "stopped").touch()
        time.sleep(600)
    return outcome_of(lambda: pending.result(LONG)), outcome_of(lambda: save(path, ranks, 3))


# -- memory ------------------------------------------------------------------------------------------------------------


def kept_alive(path: str, ranks: int, partial: bool) -> list[str]:
    """The names of tensors that are still there while a save of them is under way, and nobody else has them."""
    gate = Gate(path)
    state = {name: value for name, value in rich_state(ranks).items() if partial or "partial" not in name}
    del state["values"]
    references = {name: weakref.ref(value) for name, value in state.items()}
    pending = save_state_dict(state, gate.storage, _group(ranks), async_save=True)
    state.clear()
    gc.collect()
    alive = [name for name, reference in references.items() if reference() is not None]
    assert not pending.done()
    gate.opened.set()
    pending.result(LONG)
    return alive


def resident_growth(path: str, megabytes: int, bound: int | None) -> int:
    """How many bytes of memory a process has more while it writes a state of so many megabytes."""
    gate, options = Gate(path, "sync_file"), SaveOptions(snapshot_bytes=bound, no_dist=True)
    save_state_dict({"x": paddle.ones([4])}, path, async_save=True, options=options).result()
    state = {f"x{i}": paddle.ones([1 << 18]) for i in range(megabytes)}
    before = _resident()
    pending = save_state_dict(state, gate.storage, async_save=True, options=options)
    assert gate.reached.wait(LONG)
    grown = _resident() - before
    gate.opened.set()
    pending.result()
    return grown


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def leaks(path: str, ranks: int) -> tuple[int, int]:
    """How many file descriptors and threads ten saves leave."""
    for number in range(5):
        save(path, ranks, number, 0).result(LONG)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(10):
        save(path, ranks, number, 0).result(LONG)
    until(lambda: threading.active_count() <= before[1], what="the end of all threads")
    return len(os.listdir("/proc/self/fd")) - before[0], threading.active_count() - before[1]


# -- the end of a process ----------------------------------------------------------------------------------------------


def save_and_end(path: str, ranks: int, how: str) -> None:
    """Save to a slow disk, and end without waiting."""

    def slow(operation: str, name: str) -> None:
        if operation in ("write", "publish", "sync_file") and in_background():
            time.sleep(0.1)

    save(path, ranks, 1).result()
    save(FaultyStorage(path, slow), ranks, 2)
    assert list_checkpoints(path) == [0]
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise RuntimeError("an error of the caller's own")


def save_for_ever(path: str) -> None:
    """Save in the background, one after another, until killed, and note what is committed."""
    options = SaveOptions(snapshot_bytes=100_000)
    state = {"x": paddle.zeros([64, 1024]), "y": paddle.zeros([300]), "z": np.zeros(100, int), "number": 0}
    for number in range(1, 100_000):
        state["x"].fill_(number)
        state["y"].fill_(number)
        state["z"][...] = number
        state["number"] = number
        pending = save_state_dict(state, path, unique_id=number % 3, async_save=True, options=options)
        if number % 2:
            pending.result()
            Path(path, "done.tmp").write_text(str(number))
            Path(path, "done.tmp").replace(Path(path, "done"))


def in_child(work: Callable[[], None], exits: bool = False) -> int:
    """Run a function in a forked process; returns its id. It ends at once, or as the interpreter does."""
    pid = os.fork()
    if pid:
        return pid
    gc.freeze()  # garbage of Paddle's may wait at its end for threads that have not come along
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if not exits:
            os._exit(code)
    sys.exit(code)


def end_at_random(path: str, count: int) -> None:
    """Let many processes save in the background, and end each at once at a random moment. Then look at the folders."""
    rng = random.Random(11)
    folders = [Path(path, str(i)) for i in range(count)]
    for i, folder in enumerate(folders):
        folder.mkdir()
        moment = rng.uniform(0.0, 0.08)
        if i % 2:
            pid = in_child(lambda f=folder, m=moment: _save_until(f, m))
            assert end_of(pid) == 7
        else:
            pid = in_child(lambda f=folder: save_for_ever(str(f)))
            until((folder / "done").exists)
            time.sleep(moment)
            os.kill(pid, signal.SIGKILL)
            assert end_of(pid) == -signal.SIGKILL
    for folder in folders:
        check_after_death(folder)


def _save_until(folder: Path, moment: float) -> None:
    def end() -> None:
        until((folder / "done").exists)
        time.sleep(moment)
        os._exit(7)

    threading.Thread(target=end, daemon=True).start()
    save_for_ever(str(folder))


def check_after_death(folder: Path) -> None:
    """All that is committed is whole; what was known to be committed is; the next save works and a later one cleans."""
    done = int((folder / "done").read_text())
    committed = {i: numbers_in(folder, i) for i in list_checkpoints(folder)}
    assert all(verify(folder, i).ok and number % 3 == i for i, number in committed.items())
    assert max(committed.values()) in (done, done + 1, done + 2), (done, committed)
    save(folder, 1, 1_000_000, 10).result()
    for entry in folder.iterdir():
        os.utime(entry, (0, 0))
    save(folder, 1, 1_000_001, 11).result()
    assert [numbers_in(folder, i) for i in (10, 11)] == [1_000_000, 1_000_001]
    assert all(numbers_in(folder, i) == number for i, number in committed.items())
    files = [entry.name for entry in folder.iterdir() if not entry.name.startswith("done")]
    assert sum(name.endswith(".metadata") for name in files) == len(committed) + 2
    assert len(files) == 2 * (len(committed) + 2), files


# -- forks -------------------------------------------------------------------------------------------------------------


def fork_meanwhile(path: str, ranks: int, how: str, operation: str) -> Outcome:
    """Fork while a save stands still at an operation; look what a child can do."""
    save(path, ranks, 1).result(LONG)  # so that the buffer is there already
    gate = Gate(path, operation, name="metadata" if operation == "publish" else "")
    pending = save(gate.storage, ranks, 2)
    if operation != "publish" or dist.get_rank() == 0:
        assert gate.reached.wait(LONG)
    before = sorted(os.listdir(path))

    def work() -> None:
        _check_child(pending, path, ranks)

    def check() -> int:
        try:
            run_children(how, work)
            if ranks == 1:
                assert sorted(os.listdir(path)) == before, "the child has touched the folder"
        finally:
            gate.opened.set()
        return pending.result(LONG).unique_id

    return outcome_of(check)


def fork_alone(path: str, ways: Sequence[tuple[str, str]]) -> None:
    """As :func:`fork_meanwhile` in several ways, in a process that works alone."""
    for outcome in fork_in_all_ways(path, 1, ways):
        assert outcome.error is None, outcome


def fork_in_all_ways(path: str, ranks: int, ways: Sequence[tuple[str, str]]) -> list[Outcome]:
    """As :func:`fork_meanwhile`, several times."""
    return [fork_meanwhile(path, ranks, how, operation) for how, operation in ways]


def run_children(how: str, work: Callable[[], None]) -> None:
    """Run a function in a forked process, in some way."""
    if how in ("fork", "exit"):
        assert end_of(in_child(work, exits=how == "exit")) == 0
    elif how == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join(LONG)
        assert process.exitcode == 0
    else:
        loader = paddle.io.DataLoader(_Items(work), batch_size=1, num_workers=2, shuffle=False)
        assert [int(batch[0]) for batch in loader] == list(range(8))


class _Items(paddle.io.Dataset):  # type: ignore[misc]
    """A data set whose workers do something else first."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __getitem__(self, i: int) -> Any:
        if i < 2:
            self._work()
        return np.array([i])

    def __len__(self) -> int:
        return 8


def _check_child(pending: AsyncSave, path: str, ranks: int) -> None:
    """What a forked process may do with a save of its parent's: nothing."""
    for call in (pending.done, pending.wait, pending.result, lambda: pending.result(0.1)):
        try:
            call()
        except CheckpointError as error:
            assert "forked" in str(error)  # noqa: PT017
        else:
            raise AssertionError("it works in the child")
    if ranks > 1:
        refused = outcome_of(lambda: save(f"{path}/child", ranks, 9))
        assert refused.error == "CheckpointError"
        assert "forked" in refused.message
    own = f"{path}-child-{os.getpid()}"
    alone = SaveOptions(no_dist=True, timeout=20)
    kept = [np.full(1 << 18, i) for i in range(8)]  # may lie where the parent's buffer was
    state = {"x": paddle.full([1 << 20], 5.0)}
    assert save_state_dict(state, own, async_save=True, options=alone).result(LONG).unique_id == 0
    assert save_state_dict(state, own, options=alone).unique_id == 1
    target = {"x": paddle.zeros([1 << 20])}
    load_state_dict(target, own, options=LoadOptions(no_dist=True))
    assert float(target["x"].min()) == float(target["x"].max()) == 5.0
    gc.collect()
    assert all((array == i).all() for i, array in enumerate(kept))


def fork_afterwards(path: str) -> None:
    """Fork when a save has ended and its buffer is free; the child takes memory, saves, and looks at its memory."""

    def work() -> None:
        kept = [np.full(1 << 20, i) for i in range(8)]
        save_state_dict({"y": paddle.ones([4])}, f"{path}/child")
        assert all((array == i).all() for i, array in enumerate(kept))

    save_state_dict({"x": paddle.ones([16 << 20])}, path, async_save=True).result()
    for exits in (False, True):
        assert end_of(in_child(work, exits)) == 0
    save_state_dict({"x": paddle.ones([16 << 20])}, path, async_save=True).result()
