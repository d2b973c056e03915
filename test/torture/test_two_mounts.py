"""The tool that tries a filesystem from two mounts, on a local folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from .two_mounts import STAGES, Client, main, tried


def test_a_local_folder_passes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    link = tmp_path / "link"
    (tmp_path / "folder").mkdir()
    link.symlink_to("folder")
    seen = tried((str(tmp_path / "folder"), str(link)), share=0.02)
    assert list(seen) == list(STAGES)
    assert seen["seen at once"] == Counter({"listed at once": 4, "loaded at once": 4})
    assert seen["round trips"] == {"saved and loaded": 1}
    assert seen["kills"].total() == 1
    assert not list(link.iterdir())
    assert [line[:16].strip() for line in capfd.readouterr().out.splitlines()] == list(STAGES)


def test_two_folders_that_are_not_one_do_not_pass(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    with pytest.raises(AssertionError, match="The ranks do not see one folder"):
        main([str(tmp_path / "a"), str(tmp_path / "b"), "--only", "round trips", "--seed", "1"])


def test_a_folder_in_which_something_is_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    with pytest.raises(ValueError, match="is to be a new folder, as all in it is removed at the end, and has theirs"):
        main([str(tmp_path), str(tmp_path), "--only", "round trips", "--share", "0.02"])
    assert (tmp_path / "theirs").is_dir()


def test_a_client_says_what_went_wrong(tmp_path: Path) -> None:
    client = Client(str(tmp_path), "a")
    try:
        assert client.end()["result"] == "ready"
        with pytest.raises(AssertionError, match=f"CheckpointNotFoundError: there is no folder {tmp_path}/none"):
            client.do("newest", "none", unique_id=3)
    finally:
        client.close()
