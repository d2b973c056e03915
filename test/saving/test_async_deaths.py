"""Two processes that save in the background die at random moments: the folder has whole checkpoints only."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paddle_dist_ckpt import list_checkpoints
from paddle_dist_ckpt.control import NoTransport, ZmqHub
from paddle_dist_ckpt.errors import CheckpointError
from paddle_dist_ckpt.files.names import parse_data_file
from paddle_dist_ckpt.testing import SimulatedRank
from test.background import options, version_in, versions
from test.control.file_store import FileStore
from test.jobs import age, save_on
from test.strategies import draws
from test.waiting import PATIENCE, until

RANKS = 2


def save_for_ever(rank: int, folder: Path, notes: Path) -> None:
    """Save one version after another in the background, and note some that are committed."""
    hub = ZmqHub(rank, range(RANKS), 0, FileStore(notes), "k", bind_host="127.0.0.1", bootstrap_timeout=PATIENCE)
    saver = SimulatedRank(rank, tuple(range(RANKS)), hub, NoTransport())
    try:
        for number in range(1, 100_000):
            how = options(snapshot_bytes=50_000 if number % 4 == 1 else None)
            pending = saver.save_in_background(versions(number, RANKS)[rank], folder, number % 3, how)
            if number % 2:
                pending.result()
                (notes / f"{rank}.tmp").write_text(str(number))
                (notes / f"{rank}.tmp").replace(notes / f"done-{rank}")
    except CheckpointError:
        (notes / f"failed-{rank}").touch()


@contextmanager
def two_ranks(folder: Path, notes: Path) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Two processes that save for ever."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test.background"])
    processes = [context.Process(target=save_for_ever, args=(rank, folder, notes)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        yield list(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("seed", range(draws(8)))
def test_ranks_that_are_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder, notes = tmp_path / "folder", tmp_path / "notes"
    folder.mkdir()
    notes.mkdir()
    with two_ranks(folder, notes) as processes:
        until((notes / "done-0").exists)
        time.sleep(rng.uniform(0, 0.06))
        first = rng.randrange(RANKS)
        processes[first].kill()
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 0.02))
        elif rng.random() < 0.5:
            until((notes / f"failed-{1 - first}").exists)
        processes[1 - first].kill()
        for process in processes:
            process.join()
        assert processes[first].exitcode == -signal.SIGKILL
    check_after_death(folder, max(int(path.read_text()) for path in notes.glob("done-*")))


def check_after_death(folder: Path, done: int) -> None:
    """What was known to be committed is; the next save works, and a later one removes what the dead have left."""
    committed = {i: version_in(folder, i) for i in list_checkpoints(folder)}
    assert all(number % 3 == i for i, number in committed.items())
    assert done <= max(committed.values()) <= done + 2
    save_on(versions(1000, RANKS), folder, 10)
    for path in folder.iterdir():
        age(path)
    save_on(versions(1001, RANKS), folder, 11)
    expected = {**committed, 10: 1000, 11: 1001}
    assert {i: version_in(folder, i) for i in list_checkpoints(folder)} == expected
    data = [path for path in folder.iterdir() if parse_data_file(path.name)]
    assert len(data) == RANKS * len(expected)
    assert len(list(folder.iterdir())) == len(data) + len(expected), "nothing else is left"
