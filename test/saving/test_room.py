"""A disk that has no room for a checkpoint."""

from __future__ import annotations

from pathlib import Path

from paddle_dist_ckpt.errors import RankFailureError
from paddle_dist_ckpt.testing import FaultyStorage
from test.jobs import errors_of, make_array, split_rows, try_save


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
