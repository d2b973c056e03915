"""Saves of several ranks for the suites: as processes with a hub over TCP, or as threads; on one disk or on several."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paddle_dist_ckpt import list_checkpoints
from paddle_dist_ckpt.control import NoTransport, SoloHub, TcpHub
from paddle_dist_ckpt.core.protocols import ControlHub
from paddle_dist_ckpt.options import SaveOptions
from paddle_dist_ckpt.testing import SimulatedRank, run_ranks
from test.control.file_store import FileStore
from test.jobs import files_in, load_on, save_on
from test.waiting import PATIENCE

from .calls import Call, Disks, Interposer, Perform
from .dead import leave_dead_save
from .forked import Child
from .leftovers import age_all
from .states import blank_states, check_states, states_of, versions_in
from .suites import MEMORY, prefix

__all__ = ["BEFORE", "FOLDER", "OPTIONS", "Case", "after_a_dead_one", "counts", "made", "start", "threads", "versions"]

FOLDER = "ckpt"
BEFORE = {0: 1, 1: 2}
"""The versions in the folder before."""
_NEW = 3
"""The version that is saved."""
OPTIONS = SaveOptions(block_bytes=4096, timeout=PATIENCE)


@dataclass(frozen=True, slots=True)
class Case:
    """A save that something is done to.

    Attributes:
        ranks: How many ranks save.
        unique_id: The id, None for the next one.
        shared: Whether they have one disk.
        in_background: Whether they save in the background.
    """

    ranks: int
    unique_id: int | None
    shared: bool = True
    in_background: bool = False

    @property
    def after(self) -> dict[int, int]:
        """The versions in the folder when the save has gone well."""
        return BEFORE | {2 if self.unique_id is None else self.unique_id: _NEW}


def made(case: Case, folder: Path) -> Disks:
    """Disks with the versions `BEFORE`."""
    disks = Disks(folder, case.ranks, case.shared)
    for path, files in zip(disks.folders(FOLDER), _before(case.ranks, case.shared), strict=True):
        path.mkdir()
        for name, data in files.items():
            (path / name).write_bytes(data)
    return disks


@functools.cache
def _before(ranks: int, shared: bool) -> list[dict[str, bytes]]:
    """The files with the versions `BEFORE`, for each disk."""
    with _temporary_folder() as folder:
        disks = Disks(Path(folder), ranks, shared)
        for unique_id, version in BEFORE.items():
            save_on(states_of(version, ranks), disks.paths(FOLDER), unique_id)
        return [files_in(path) for path in disks.folders(FOLDER)]


def _temporary_folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix=prefix(os.getpid()), dir=MEMORY)


def after_a_dead_one(disks: Disks, ranks: int, rng: random.Random) -> None:
    """Leave in the folder what a save has left that died long ago."""
    (folder,) = disks.folders(FOLDER)
    leave_dead_save(folder, ranks, rng, rng.choice((None, 1)), BEFORE)
    age_all(folder)


def _one_rank(case: Case, rank: SimulatedRank, disks: Disks, version: int = _NEW) -> int:
    """One rank's part of the save; returns the id."""
    state, path = states_of(version, case.ranks)[rank.rank], disks.paths(FOLDER)[rank.rank]
    options = dataclasses.replace(OPTIONS, separate_folders=not case.shared)
    if case.in_background:
        return rank.save_in_background(state, path, case.unique_id, options).result().unique_id
    return rank.save(state, path, case.unique_id, options).unique_id


def threads(case: Case, disks: Disks) -> list[Any]:
    """Save by ranks that are threads; returns what each returned or raised."""
    return run_ranks(case.ranks, lambda rank: _one_rank(case, rank, disks))


@functools.cache
def counts(case: Case) -> dict[int, int]:
    """How many calls each rank makes in such a save."""
    with _temporary_folder() as folder:
        disks = made(case, Path(folder))
        with Interposer(disks, lambda call, perform: perform()) as interposer:
            assert threads(case, disks) == [max(case.after, key=lambda i: case.after[i] == _NEW)] * case.ranks
        return interposer.counts


def start(
    case: Case, disks: Disks, notes: Path, handler: Callable[[Call, Perform], Any], ending: ExitStack
) -> list[Child]:
    """Save by ranks that are processes, which find each other by files in a folder."""

    def work(rank: int) -> int:
        ranks = tuple(range(case.ranks))
        hub: ControlHub = SoloHub()
        if case.ranks > 1:
            hub = TcpHub(rank, ranks, 0, FileStore(notes), "k", bind_host="127.0.0.1", bootstrap_timeout=PATIENCE)
            with hub.session("meet", PATIENCE) as session:  # whoever is lost from now on is missed at once
                session.gather_scatter("meet", lambda: b"", lambda messages: messages)
        with closing(hub), Interposer(disks, handler):
            return _one_rank(case, SimulatedRank(rank, ranks, hub, NoTransport()), disks)

    return [ending.enter_context(Child(functools.partial(work, rank))) for rank in range(case.ranks)]


def versions(folders: Sequence[Path]) -> dict[int, int]:
    """The version under each id; where there are several folders, as ranks find it of which each has one."""
    if len(folders) == 1:
        return versions_in(folders[0])
    found = {}
    for unique_id in list_checkpoints(folders[0]):
        states = blank_states(len(folders))
        load_on(states, folders, unique_id)
        found[unique_id] = check_states(states)
    return found
