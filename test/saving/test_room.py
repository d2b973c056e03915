"""A disk that has no room for a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddle_dist_ckpt import SaveOptions
from paddle_dist_ckpt.errors import RankFailureError
from paddle_dist_ckpt.storage.base import FolderIdentity
from paddle_dist_ckpt.testing import FaultyStorage
from test.jobs import all_ok, errors_of, make_array, split_rows, try_save


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
