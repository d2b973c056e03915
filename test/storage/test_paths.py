"""What a user's path to a folder means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paddle_dist_ckpt.storage import LocalStorage, Storage, as_storage


def test_a_path_or_a_storage_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = as_storage(tmp_path)
    assert isinstance(storage, Storage)
    assert as_storage(storage) is storage
    assert as_storage(str(tmp_path)).location == storage.location == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    relative = as_storage("ckpt")
    monkeypatch.chdir("/")
    assert relative.location == str(tmp_path / "ckpt"), "a relative path means the folder of its time"
    for other in (None, 5, b"x", ["x"]):
        with pytest.raises(TypeError, match="path must be"):
            as_storage(other)
    for text in ("", "a\0b"):
        with pytest.raises(ValueError, match="path must name a local folder or file, not"):
            as_storage(text)


def test_a_storage_that_is_none_is_told_why() -> None:
    class Unfinished:
        location = "memory"
        touch = None

        def publish(self) -> None: ...

    with pytest.raises(TypeError, match="not the class LocalStorage"):
        as_storage(LocalStorage)
    with pytest.raises(TypeError, match=r"not Unfinished, which has no prepare, .*, touch, modified$"):
        as_storage(Unfinished())


def test_a_relative_path_in_a_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError, match="the current folder, to which it is relative, is gone: 'ckpt'"):
        as_storage("ckpt")
    assert as_storage(tmp_path).location == str(tmp_path)


def test_two_dots_after_a_link_are_above_what_it_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there" / "below").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there" / "below")
    monkeypatch.chdir(tmp_path / "here")
    beyond = {
        "link/../a": "there/a",
        f"{tmp_path}/here/link/..": "there",
        "../here/link/../../b/./c/": "b/c",
        "../a": "a",
        "..": ".",
        "link/d/../e": "here/link/e",  # as it is written where that makes no difference
        "none/../f": "here/f",
        "link": "here/link",
    }
    for path, expected in beyond.items():
        assert LocalStorage(path).location == os.path.normpath(tmp_path / expected), path
    assert LocalStorage("/..").location == "/"


def test_without_a_home_folder_there_is_no_place_that_a_tilde_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda text: text)
    for path in ("~", "~/ck"):
        with pytest.raises(ValueError, match=r"path is '~.*', and there is no home folder"):
            as_storage(path)
    assert as_storage("~ck").location.endswith("/~ck")  # which may be called so


def test_nothing_is_put_to_a_new_folder_for_a_user_who_is_not_there(tmp_path: Path) -> None:
    """As in a container, whose current folder may go with it."""
    with pytest.raises(ValueError, match=r"'~no-such-user/ck', and there is no user 'no-such-user' here; for a folder"):
        as_storage("~no-such-user/ck")
    assert as_storage(tmp_path / "~no-such-user" / "ck").location == f"{tmp_path}/~no-such-user/ck"
    assert as_storage("~root/ck").location == os.path.expanduser("~root/ck")


def test_a_path_of_bytes_is_refused_however_it_is_passed() -> None:
    class OfBytes:
        def __fspath__(self) -> bytes:
            return b"ckpt"

    with pytest.raises(TypeError, match="path must be a str or a PathLike of one, not bytes"):
        as_storage(OfBytes())
