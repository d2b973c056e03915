"""What one process says of a save that has failed: what was to be saved where."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from paddle_dist_ckpt.errors import CheckpointError
from paddle_dist_ckpt.files.writer import FileSave
from paddle_dist_ckpt.storage import LocalStorage
from test.jobs import make_array, save_alone


@pytest.mark.parametrize("raised", [OSError("(External) copy failed"), RuntimeError("(External) copy failed")])
def test_what_a_device_raises_is_said_of_the_folder(
    tmp_path: Path, raised: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr(FileSave, "finish", fail)
    with pytest.raises(CheckpointError) as caught:
        save_alone({"w": make_array((30, 7))}, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "copy failed" in str(caught.value)
    assert caught.value.__cause__ is raised
    assert not list(tmp_path.glob("*.metadata"))


def test_what_a_disk_raises_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LocalStorage, name: str, *_: object) -> None:
        raise OSError(errno.EIO, "the disk is broken", str(tmp_path / name))

    monkeypatch.setattr(LocalStorage, "create", fail)
    with pytest.raises(OSError, match="the disk is broken") as caught:
        save_alone({"w": make_array((30, 7))}, tmp_path)
    assert str(tmp_path) in str(caught.value)
