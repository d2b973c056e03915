"""A disk that has no room for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paddle_dist_ckpt import SaveOptions
from paddle_dist_ckpt.errors import RankFailureError
from paddle_dist_ckpt.storage.base import FolderIdentity
from paddle_dist_ckpt.testing import FaultyStorage
from test.hooks import dies
from test.jobs import age_claims, all_ok, data_files, errors_of, make_array, split_rows, try_save

Hook = Callable[[str, str], None]


def test_running_out_of_room_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    created: list[str] = []

    def hook(operation: str, name: str) -> None:
        if operation == "create":
            created.append(name)

    storage = FaultyStorage(tmp_path, hook, free_bytes=5000)
    states = [{"a": part} for part in split_rows(make_array((30, 70)), 2)]
    for error in errors_of(try_save(states, storage), RankFailureError):
        assert "5,000 bytes free" in str(error)
    assert created == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("devices", [(1, 1), (1, 2)])
def test_folders_of_one_filesystem_share_its_room(tmp_path: Path, devices: tuple[int, int]) -> None:
    def storage(rank: int) -> FaultyStorage:
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        identity = FolderIdentity("host", devices[rank], rank)
        return FaultyStorage(folder, lambda operation, name: None, identity, free_bytes=5000)

    states: list[dict[Any, Any]] = [{"a": part} for part in split_rows(make_array((30, 70)), 2)]  # 4,200 bytes each
    results = try_save(states, [storage(0), storage(1)], options=SaveOptions(separate_folders=True))
    if devices == (1, 1):
        for error in errors_of(results, RankFailureError):
            assert "5,000 bytes free, and 8,400 are to be written to it" in str(error)
    else:
        all_ok(results)


def used(folder: Path) -> int:
    sizes = []
    for path in data_files(folder):
        with suppress(FileNotFoundError):  # another rank removes it
            sizes.append(path.stat().st_size)
    return sum(sizes)


class SmallDisk(FaultyStorage):
    """A folder on a disk of its own host's, with room for so many bytes of data files."""

    def __init__(self, folder: Path, hook: Hook, room: int, number: int = 0) -> None:
        super().__init__(folder, hook, FolderIdentity(f"host{number}", number, number))
        self._room, self._folder = room, folder

    def free_bytes(self) -> int:
        return self._room - used(self._folder)


def nothing(operation: str, name: str) -> None:
    """A hook of a storage without faults."""


@pytest.mark.parametrize("hosts", [1, 2])
def test_what_a_dead_save_has_left_goes_before_there_must_be_room(tmp_path: Path, hosts: int) -> None:
    """A disk with room for two checkpoints has it again after a save that was killed, on every host."""
    states: list[dict[Any, Any]] = [{"a": part} for part in split_rows(make_array((60, 70)), 2)]
    folders = [tmp_path / f"host{rank % hosts}" for rank in range(2)]
    for folder in folders:
        folder.mkdir(exist_ok=True)

    def disks(hook: Hook, room: int) -> list[SmallDisk]:
        return [SmallDisk(folder, hook, room, rank % hosts) for rank, folder in enumerate(folders)]

    all_ok(try_save(states, disks(nothing, 1 << 20), 0))
    room = used(folders[0]) * 5 // 2
    try_save(states, disks(dies("publish", "*.metadata"), room), 1)
    for folder in folders:
        assert len(data_files(folder)) == 4 // hosts, "both have been written"
    age_claims(folders[0])
    all_ok(try_save(states, disks(nothing, room), 1))
    for folder in folders:
        assert len(data_files(folder)) == 4 // hosts
        assert not list(folder.glob("*.claim"))


def test_a_save_that_is_refused_for_lack_of_room_has_removed_what_dead_ones_have_left(tmp_path: Path) -> None:
    states: list[dict[Any, Any]] = [{"a": make_array((60, 70))}]
    try_save(states, FaultyStorage(tmp_path, dies("publish", "*.metadata")), 1)
    assert len(data_files(tmp_path)) == 1
    age_claims(tmp_path)
    (error,) = try_save(states, SmallDisk(tmp_path, nothing, 100), 1)
    assert "100 bytes free" in str(error)
    assert list(tmp_path.iterdir()) == []
