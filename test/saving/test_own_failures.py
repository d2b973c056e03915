"""What a save that has failed raises: what names the folder, or an error of the system as it was raised."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from paddle_dist_ckpt.errors import CheckpointError, RankFailureError
from paddle_dist_ckpt.files.writer import FileSave
from test.jobs import make_array, save_alone, split_rows, try_save


def fail_with(error: Exception, patch: pytest.MonkeyPatch) -> None:
    """Have every save fail where files are written."""

    def fail(*_: object) -> None:
        raise error

    patch.setattr(FileSave, "finish", fail)


@pytest.mark.parametrize("raised", [OSError("(External) copy failed"), RuntimeError("(External) copy failed")])
def test_what_a_device_raises_is_said_of_the_folder(
    tmp_path: Path, raised: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(raised, monkeypatch)
    with pytest.raises(CheckpointError) as caught:
        save_alone({"w": make_array((30, 7))}, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "copy failed" in str(caught.value)
    assert caught.value.__cause__ is raised
    assert not list(tmp_path.glob("*.metadata"))


@pytest.mark.parametrize(
    "raised",
    [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken", "x"), MemoryError("no room"), TypeError("odd")],
)
def test_what_says_more_is_raised_as_it_is(tmp_path: Path, raised: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(raised, monkeypatch)
    with pytest.raises(type(raised)) as caught:
        save_alone({"w": make_array((30, 7))}, tmp_path)
    assert caught.value is raised


@pytest.mark.parametrize("raised", [OSError("(External) copy failed"), OSError(errno.EIO, "broken"), MemoryError("no")])
def test_on_several_ranks_each_has_its_own(tmp_path: Path, raised: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(raised, monkeypatch)
    results = try_save([{"w": part} for part in split_rows(make_array((30, 7)), 2)], tmp_path)
    for rank, error in enumerate(results):
        assert isinstance(error, RankFailureError)
        own = error.failures[rank]
        if "External" in str(raised):
            assert str(tmp_path) in str(error)
            own = own.__cause__
        assert own is raised
