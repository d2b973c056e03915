"""The storages of this package keep every promise of a Storage; and the suite finds the ones that do not."""

from __future__ import annotations

import inspect
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paddle_dist_ckpt.storage import LocalStorage, bounded
from paddle_dist_ckpt.storage.base import Storage, WritableFile
from paddle_dist_ckpt.testing import FaultyStorage
from paddle_dist_ckpt.testing.storage_conformance import StorageTests
from test.waiting import PATIENCE


class TestLocalStorage(StorageTests):
    """A folder that is not there yet."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "runs" / "checkpoint")


class TestLocalStorageWithoutLinks(TestLocalStorage):
    """A folder of a filesystem that has no hard links, and so no way to publish only if a name is free."""

    test_of_many_that_publish_a_name_one_wins_and_knows = None

    @pytest.fixture(autouse=True)
    def _no_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(1, "no links here")

        monkeypatch.setattr(os, "link", refuse)


class TestFaultyStorage(StorageTests):
    """One whose faults do not happen."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return FaultyStorage(tmp_path, lambda operation, name: None)


class TestBoundedStorage(StorageTests):
    """One whose operations return in time."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Iterator[Storage]:
        with bounded(lambda: LocalStorage(tmp_path), tmp_path, PATIENCE, 0) as storage:
            yield storage


def test_only_the_suite_needs_pytest() -> None:
    program = "import sys, paddle_dist_ckpt.testing; sys.exit('pytest' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True, timeout=60)


class Overwriting(LocalStorage):
    """Starts a file anew that is there."""

    def create(self, name: str) -> WritableFile:
        self.delete(name)
        return super().create(name)


class Hasty(LocalStorage):
    """Asks for the confirmation when all is done."""

    def publish(
        self, name: str, data: bytes, temporary: str, replace: bool, confirm: Callable[[], None] | None = None
    ) -> bool:
        done = super().publish(name, data, temporary, replace)
        if confirm is not None:
            confirm()
        return done


class Early(LocalStorage):
    """Asks for it before the content is there."""

    def publish(
        self, name: str, data: bytes, temporary: str, replace: bool, confirm: Callable[[], None] | None = None
    ) -> bool:
        (Path(self.location) / temporary).touch()
        try:
            if confirm is not None:
                confirm()
        finally:
            self.delete(temporary)
        return super().publish(name, data, temporary, replace)


class Careless(LocalStorage):
    """Writes in place, and looks whether the name is free some time before."""

    def publish(
        self, name: str, data: bytes, temporary: str, replace: bool, confirm: Callable[[], None] | None = None
    ) -> bool:
        if name in self.names() and not replace:
            return False
        if confirm is not None:
            confirm()
        with (Path(self.location) / name).open("wb") as file:
            for start in range(0, len(data), 1000):
                file.write(data[start : start + 1000])
                file.flush()
        return True


class Copying(LocalStorage):
    """Leaves the temporary file there."""

    def publish(
        self, name: str, data: bytes, temporary: str, replace: bool, confirm: Callable[[], None] | None = None
    ) -> bool:
        if not super().publish(name, data, temporary, replace, confirm):
            return False
        shutil.copy(Path(self.location) / name, Path(self.location) / temporary)
        return True


class Greedy(LocalStorage):
    """Reads all, whatever the limit."""

    def read(self, name: str, limit: int | None = None) -> bytes:
        return super().read(name)


class Strict(LocalStorage):
    """Refuses to delete what is not there."""

    def delete(self, name: str) -> None:
        (Path(self.location) / name).unlink()


class Timeless(LocalStorage):
    """Does not touch."""

    def touch(self, name: str) -> None:
        self.size(name)


class Making(LocalStorage):
    """Touches what is not there."""

    def touch(self, name: str) -> None:
        (Path(self.location) / name).touch()


class Paged(LocalStorage):
    """Lists a page of names."""

    def names(self) -> list[str]:
        return sorted(super().names())[:1000]


class Milliseconds(LocalStorage):
    """Tells time in other units."""

    def modified(self, name: str) -> float:
        return 1000 * super().modified(name)


class Reopening(LocalStorage):
    """Looks for a file anew whenever some of it is read."""

    def open(self, name: str) -> Any:
        def read_into(*given: Any) -> None:
            with closing(LocalStorage.open(self, name)) as file:
                file.read_into(*given)

        return Changed(super().open(name), read_into=read_into)


class Borrowing(LocalStorage):
    """Writes what there is in memory when the file is synced."""

    def create(self, name: str) -> Any:
        file, waiting = super().create(name), list[Any]()

        def sync() -> None:
            for each in waiting:
                file.write(*each)
            file.sync()

        return Changed(file, write=lambda *given: waiting.append(given), sync=sync)


class Boastful(LocalStorage):
    """Says that it makes a file longer, and does not."""

    def create(self, name: str) -> Any:
        return Changed(super().create(name), extend=lambda nbytes: True)


class Holey(LocalStorage):
    """Takes what is written for holes."""

    def open(self, name: str) -> Any:
        return Changed(super().open(name), is_hole=lambda offset, nbytes: True)


class Changed:
    """A file of which some things are others."""

    def __init__(self, file: Any, **others: Any) -> None:
        self._file = file
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Late(LocalStorage):
    """Lists what was made when the folder has been synced, before which nobody may rely on it."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self._made = set[str]()

    def create(self, name: str) -> WritableFile:
        self._made.add(name)
        return super().create(name)

    def names(self) -> list[str]:
        return [name for name in super().names() if name not in self._made]

    def sync(self) -> None:
        super().sync()
        self._made.clear()


def test_names_need_not_be_listed_before_the_folder_is_synced(tmp_path: Path) -> None:
    StorageTests().test_all_names_are_listed_however_many(Late(tmp_path))


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (Overwriting, "test_create_takes_no_name_that_is_there"),
        (Hasty, "test_confirm_is_called_when_only_the_name_is_missing"),
        (Hasty, "test_confirm_may_stop_it"),
        (Early, "test_confirm_is_called_when_only_the_name_is_missing"),
        (Early, "test_who_deletes_the_temporary_name_stops_it"),
        (Careless, "test_readers_see_whole_files_while_others_replace_them"),
        (Copying, "test_publish_replaces_only_if_it_may"),
        (Greedy, "test_read_gives_no_more_than_its_limit"),
        (Strict, "test_a_missing_name_is_an_error_but_for_delete"),
        (Timeless, "test_touch_makes_a_file_newer_by_the_clock_of_the_storage"),
        (Making, "test_a_missing_name_is_an_error_but_for_delete"),
        (Paged, "test_all_names_are_listed_however_many"),
        (Milliseconds, "test_touch_makes_a_file_newer_by_the_clock_of_the_storage"),
        (Reopening, "test_who_has_a_file_open_reads_no_two_contents_of_it"),
        (Borrowing, "test_memory_may_be_filled_anew_when_it_is_written"),
        (Boastful, "test_a_file_that_is_made_longer_ahead_is_zeros_where_nothing_is_written"),
        (Holey, "test_a_file_that_is_made_longer_ahead_is_zeros_where_nothing_is_written"),
    ],
)
def test_a_broken_promise_is_found(
    kind: type[LocalStorage], test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"data": b"new", "limit": 1, "replace": False}
    work = getattr(StorageTests, test)
    wanted = {name: value for name, value in arguments.items() if name in inspect.signature(work).parameters}
    monkeypatch.setattr("time.monotonic", itertools.count(0, 5).__next__)  # nobody waits long
    with pytest.raises((AssertionError, pytest.fail.Exception, OSError)):
        work(StorageTests(), kind(tmp_path), **wanted)
