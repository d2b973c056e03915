"""The names of folders are made durable, up to the mount point and once."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dist_ckpt.storage import LocalStorage, local


def test_a_folder_below_very_many_others(tmp_path: Path) -> None:
    here = Path.cwd()
    try:
        os.chdir(tmp_path)  # a path of them all would be too long
        for _ in range(400):
            os.mkdir("d")
            os.chdir("d")
        LocalStorage("x").prepare()
        assert Path("x").is_dir()
    finally:
        os.chdir(here)
        shutil.rmtree(tmp_path / "d")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of all that is synced, in a process that has synced nothing yet."""
    local._durable.clear()
    found: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_the_names_of_all_folders_are_made_durable(tmp_path: Path, synced: list[str]) -> None:
    """Also those of folders that somebody else has made: once in a process."""
    (tmp_path / "theirs" / "x" / "y").mkdir(parents=True)
    (tmp_path / "far" / "x").mkdir(parents=True)
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "link").symlink_to(tmp_path / "theirs" / "x")
    (tmp_path / "to" / "far").symlink_to(tmp_path / "far" / "x")
    expected = {
        "a/b/c": ["", "a", "a/b"],
        "a/b": [],
        "theirs/x/y": ["", "theirs", "theirs/x"],
        "to/link": ["", "to"],
        "to/far/y": ["", "far", "far/x", "to"],
    }
    for name, folders in expected.items():
        synced.clear()
        LocalStorage(tmp_path / name).prepare()
        below = {path for path in synced if path.startswith(str(tmp_path))}
        assert below == {os.path.normpath(tmp_path / folder) for folder in folders}
        synced.clear()
        LocalStorage(tmp_path / name).prepare()
        assert synced == []


def test_names_are_made_durable_up_to_the_mount_point(tmp_path: Path, synced: list[str]) -> None:
    LocalStorage(tmp_path / "a").prepare()
    device = tmp_path.stat().st_dev
    above = [folder for folder in (tmp_path / "a").resolve().parents if folder.stat().st_dev == device]
    assert set(synced) == set(map(str, above))


def test_names_beyond_a_mount_point_are_not_made_durable(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lstat(path: Path) -> os.stat_result:
        mode, inode, device, *rest = real(path)
        return os.stat_result((mode, inode, device + (path == tmp_path / "disk"), *rest))

    real = Path.lstat
    monkeypatch.setattr(Path, "lstat", lstat)
    LocalStorage(tmp_path / "disk" / "a").prepare()
    assert synced == [str(tmp_path / "disk")]


@pytest.mark.parametrize("name", ["latest", "run/latest"])
def test_the_name_of_a_folder_that_is_removed_and_made_again_is_made_durable_again(
    tmp_path: Path, synced: list[str], name: str
) -> None:
    """Also where the new folder has the old one's inode, which ext4 gives again at once."""
    for _ in range(3):
        shutil.rmtree(tmp_path / name.split("/")[0], ignore_errors=True)
        (tmp_path / name).mkdir(parents=True)
        synced.clear()
        LocalStorage(tmp_path / name).prepare()
        assert {str((tmp_path / name).parent), str(tmp_path)} <= set(synced)
        synced.clear()
        LocalStorage(tmp_path / name).prepare()
        assert synced == []


def test_where_times_are_whole_seconds_a_folder_counts_as_the_same_later(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a folder that is removed and made again within a second would have neither another inode nor another time."""
    real, changed = Path.stat, float(int(time.time()))

    def coarse(path: Path, **options: Any) -> Any:
        status = real(path, **options)
        fields = {field: getattr(status, field) for field in dir(status) if field.startswith("st_")}
        return SimpleNamespace(**{**fields, "st_ctime": changed, "st_ctime_ns": int(changed) * 1_000_000_000})

    monkeypatch.setattr(Path, "stat", coarse)
    for later, expected in ((0.5, True), (2.5, True), (4.0, True), (4.5, False)):
        monkeypatch.setattr(local.time, "time", lambda later=later: changed + later)
        synced.clear()
        LocalStorage(tmp_path / "run").prepare()
        assert (str(tmp_path) in synced) == expected, later


def test_a_folder_above_that_may_not_be_opened_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, *args: Any) -> int:
        if str(path) in map(str, tmp_path.parents):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args)

    monkeypatch.setattr(os, "open", refuse)
    LocalStorage(tmp_path / "a" / "b").prepare()
    assert (tmp_path / "a" / "b").is_dir()
