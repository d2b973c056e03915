"""What is so of a storage, or a file, that does not say what else it can do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dist_ckpt.storage import LocalStorage, bounded
from paddle_dist_ckpt.storage.capabilities import extended, has_folders, hole_bytes, is_hole, is_part, what_is_on_disk


class Plain:
    """A storage of which only what every storage has is passed on, and a file likewise."""

    location = "plain"

    def open(self, name: str) -> Any:
        return SimpleNamespace(size=7, close=lambda: None)

    create = open


@pytest.fixture(params=[None, 5.0])
def plain(request: pytest.FixtureRequest) -> Iterator[Any]:
    with bounded(Plain, "plain", request.param, rank=0) as storage:  # type: ignore[arg-type]
        yield storage


def test_what_is_not_said_is_not_so(plain: Any) -> None:
    assert not is_part(plain)
    assert not has_folders(plain)
    assert not extended(plain.create("a"), 10)
    file = plain.open("a")
    assert not is_hole(file, 0, 7)
    assert not hole_bytes(file, 0, 7)


def test_all_of_a_file_is_on_the_disk_if_nothing_else_is_known(plain: Any) -> None:
    first, second = plain.open("a"), plain.open("b")
    assert [what_is_on_disk(file, name)[1] for file, name in ((first, "a"), (second, "b"))] == [7, 7]
    assert what_is_on_disk(first, "a")[0] != what_is_on_disk(second, "b")[0]


@pytest.mark.parametrize("seconds", [None, 5.0])
def test_a_local_folder_says_all_of_it(tmp_path: Path, seconds: float | None) -> None:
    with bounded(lambda: LocalStorage(tmp_path), tmp_path, seconds, rank=0) as storage:
        assert has_folders(storage)
        with closing(storage.create("a")) as written:
            assert extended(written, 1 << 20)
        with closing(storage.open("a")) as file:
            assert is_hole(file, 0, 1 << 20)
            assert hole_bytes(file, 0, 1 << 20) == 1 << 20
            assert what_is_on_disk(file, "a")[1] == 0
