"""What the tests of saves in the background share: jobs of ranks, folders that stand still or fail, states."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import AsyncSave, list_checkpoints, verify
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.reports import SaveReport
from paddle_dist_ckpt.testing import FaultyStorage, SimulatedRank, run_ranks
from test.hooks import raises
from test.jobs import SMALL, all_ok, load_whole, split_rows
from test.waiting import PATIENCE

RANKS = 3
LONG = PATIENCE
THREAD = "paddle_dist_ckpt save"
SHAPE = (30, 700)
BLOCK = SMALL.block_bytes


def in_background() -> bool:
    """Whether this is the thread of a background save."""
    return threading.current_thread().name == THREAD


def options(**changes: Any) -> SaveOptions:
    return SaveOptions(**{"block_bytes": BLOCK, "timeout": LONG, **changes})


@dataclass
class Gate:
    """Stops the background thread of one rank, or of all, at its first operation of a kind, until it is opened."""

    operation: str = "write"
    rank: int | None = None
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def storage(self, folder: Path, rank: SimulatedRank) -> FaultyStorage:
        """A rank's folder."""

        def hook(operation: str, name: str) -> None:
            if operation == self.operation and in_background() and self.rank in (None, rank.rank):
                self.reached.set()
                assert self.opened.wait(LONG)

        return FaultyStorage(folder, hook)


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What it returns. Fails if it takes longer, instead of waiting for what may never come."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"still going on after {seconds} s"
    return results[0]


def job(ranks: int, work: Callable[[SimulatedRank], Any]) -> list[Any]:
    """Run a function on every rank, in time; none may raise."""
    return all_ok(within(5 * LONG, lambda: run_ranks(ranks, work)))


def error_of(call: Callable[[], Any]) -> BaseException:
    """What a call raises."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def finish(done: Any) -> SaveReport:
    """The report of a save of either kind, when it has ended."""
    return done.result(LONG) if isinstance(done, AsyncSave) else done


def versions(number: int, ranks: int) -> list[dict[str, Any]]:
    """State_dicts in which everything says the number."""
    array = np.full(SHAPE, number, np.int64)
    cut = split_rows(array, ranks)
    return [{"cut": cut[r], "plain": np.full(50, number), "n": number, "text": [number] * 3000} for r in range(ranks)]


def version_in(folder: Path, unique_id: int | None = None) -> int:
    """The number that a whole checkpoint says everywhere."""
    assert verify(folder, unique_id).ok
    merged = load_whole(folder, unique_id)
    found = {merged["n"], *merged["text"], *np.unique(merged["cut"]).tolist(), *np.unique(merged["plain"]).tolist()}
    assert len(found) == 1, found
    return int(found.pop())


def versions_in(folder: Path) -> list[int]:
    """What all checkpoints say, in the order of their ids."""
    return [version_in(folder, unique_id) for unique_id in list_checkpoints(folder)]


def failing(folder: Path, operation: str, at: str, error: OSError, armed: Callable[[], bool]) -> FaultyStorage:
    """A folder in which the operations of a kind fail, on files whose names have a part."""
    return FaultyStorage(folder, raises(operation, f"*{at}*", error, armed))
