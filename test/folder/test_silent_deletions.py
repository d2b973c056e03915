"""A deletion that is silent for longer than its claim counts, and goes on beside a save to its id."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paddle_dist_ckpt.errors import CheckpointError
from paddle_dist_ckpt.folder.delete import delete
from paddle_dist_ckpt.testing import FaultyStorage
from test.folder.test_answered_for import check_after_later_saves
from test.folder.test_claims import check_holds, dead_save, state
from test.hooks import raises
from test.jobs import age, age_claims, save_alone, try_save
from test.waiting import PATIENCE


def before_content(number: int) -> Callable[[str, str], bool]:
    """When a claim is about to have this content, counted from 1."""
    published: list[str] = []

    def is_time(operation: str, name: str) -> bool:
        published.extend([name] * (operation == "publish" and name.endswith(".claim")))
        return len(published) == number

    return is_time


class _Deletion:
    """A deletion of checkpoint 0 on a thread, silent at some time until it is told.

    Args:
        folder: The folder.
        is_time: Whether it is silent before this operation, on this name. By default, before its claim says what it
            removes, when it has looked who else is there.

    Attributes:
        errors: What it has raised.
    """

    def __init__(self, folder: Path, is_time: Callable[[str, str], bool] | None = None) -> None:
        self.errors: list[CheckpointError] = []
        self._folder, self._is_time = folder, before_content(2) if is_time is None else is_time
        self._is_silent, self._goes_on = threading.Event(), threading.Event()
        self._is_about_to_remove, self._removes = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._delete, daemon=True)
        self._thread.start()
        assert self._is_silent.wait(PATIENCE)
        (self.claim,) = folder.glob("*.claim")

    def _delete(self) -> None:
        try:
            delete(FaultyStorage(self._folder, self._hook), 0)
        except CheckpointError as error:
            self.errors.append(error)
        self._is_silent.set()
        self._is_about_to_remove.set()

    def _hook(self, operation: str, name: str) -> None:
        if not self._is_silent.is_set() and self._is_time(operation, name):
            self._is_silent.set()
            assert self._goes_on.wait(PATIENCE)
        if (operation, name) == ("delete", "0.metadata"):
            self._is_about_to_remove.set()
            assert self._removes.wait(PATIENCE)

    def go_on(self) -> None:
        """Let it go on until it is about to remove the `.metadata`, or ends."""
        self._goes_on.set()
        assert self._is_about_to_remove.wait(PATIENCE)

    def end(self) -> None:
        """Let it end."""
        self._goes_on.set()
        self._removes.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def test_a_deletion_that_was_silent_removes_nothing_once_a_save_has_passed_over_it(tmp_path: Path) -> None:
    """It goes on when the save has looked for it, and before the save is committed."""
    save_alone(state(0), tmp_path, 0)
    deletion, published = _Deletion(tmp_path), list[str]()

    def hook(operation: str, name: str) -> None:
        if (operation, name) == ("publish", "0.metadata"):
            published.append(name)
            age(deletion.claim)
        elif operation == "touch" and published == ["0.metadata"]:  # its own claim, when it has looked for deletions
            published.append("touched")
        elif (operation, name) == ("read", "0.metadata") and published[1:] == ["touched"]:
            published.append("looked at")
            deletion.go_on()

    save_alone(state(1), FaultyStorage(tmp_path, hook), 0)
    assert published == ["0.metadata", "touched", "looked at"]
    deletion.end()
    check_after_later_saves(tmp_path, {0: 1})
    (error,) = deletion.errors
    assert "is gone: another save or export took this one, which was silent, for dead" in str(error)


def _save_when_found_alive(
    folder: Path, deletion: _Deletion, before_each: Callable[[str, str], None], fresh: str
) -> None:
    """Save over what is deleted, which ends once the save has found this file fresh; assert that the save is there."""
    seen: list[str] = []

    def hook(operation: str, name: str) -> None:
        before_each(operation, name)
        if (operation, name) == ("publish", "0.metadata"):
            seen.append("is about to commit")
        elif (operation, name) == ("modified", fresh) and seen and time.time() - (folder / fresh).stat().st_mtime < 300:
            seen.append("is found alive")
        elif operation == "names" and seen[-1:] == ["is found alive"]:
            seen.append("is over")
            deletion.end()

    save_alone(state(1), FaultyStorage(folder, hook), 0)
    assert "is over" in seen
    assert deletion.errors == []
    check_holds(folder, {0: 1})


def test_a_deletion_is_waited_for_that_speaks_again_just_before_its_claim_goes(tmp_path: Path) -> None:
    save_alone(state(0), tmp_path, 0)
    deletion, published = _Deletion(tmp_path), list[str]()

    def before_each(operation: str, name: str) -> None:
        if operation == "publish" and published[-1:] == [
            "0.metadata"
        ]:  # a claim: it passes on what the deletion's says
            deletion.claim.touch()
        if operation == "publish":
            published.append(name)
            if name == "0.metadata":
                age(deletion.claim)

    _save_when_found_alive(tmp_path, deletion, before_each, deletion.claim.name)


def test_a_deletion_is_waited_for_that_is_just_writing_its_claim_anew(tmp_path: Path) -> None:
    """The claim is old, its temporary is not."""
    save_alone(state(0), tmp_path, 0)
    has_new_content = before_content(2)

    def is_time(operation: str, name: str) -> bool:
        return has_new_content(operation, name) and operation == "modified"  # its claim, just before that is replaced

    deletion = _Deletion(tmp_path, is_time)
    temporary = deletion.claim.with_name(f"{deletion.claim.name}.tmp")

    def before_each(operation: str, name: str) -> None:
        if (operation, name) == ("publish", "0.metadata"):
            age(deletion.claim)
            os.utime(temporary)

    _save_when_found_alive(tmp_path, deletion, before_each, temporary.name)


@pytest.mark.parametrize("fails", ["nothing", "publish", "names", "read"])
def test_what_a_deletion_was_to_remove_that_a_save_passes_over_is_not_forgotten(tmp_path: Path, fails: str) -> None:
    """It has taken over what a dead save has left, and is killed; and something fails once when it is passed over."""
    save_alone(state(0), tmp_path, 0)
    dead_save(tmp_path, 5, last="sync")
    age_claims(tmp_path)
    deletion = _Deletion(tmp_path, before_content(4))
    assert json.loads(deletion.claim.read_text())["removes"]
    seen: list[str] = []

    def hook(operation: str, name: str) -> None:
        if (operation, name) == ("publish", "0.metadata"):
            age(deletion.claim)
            seen.append("is published")
        elif operation == "read" and name == deletion.claim.name and len(seen) == 1:  # among all claims
            seen.append("is found")
        elif operation == fails and len(seen) == 2:
            seen.append("has failed")
            raise OSError(errno.ENOSPC if fails == "publish" else errno.EIO, "injected", name)

    (outcome,) = try_save([state(1)], FaultyStorage(tmp_path, hook), 0)
    deletion.end()
    is_refused = isinstance(outcome, BaseException)
    assert not is_refused or fails in ("names", "read"), outcome  # of which the first look may be what fails
    assert ("has failed" in seen) == (fails != "nothing")
    check_after_later_saves(tmp_path, {} if is_refused else {0: 1})  # the deletion goes on if nobody has stopped it


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_dead_deletion_whose_claim_stays_stops_no_save(tmp_path: Path, number: int) -> None:
    save_alone(state(0), tmp_path, 0)
    deletion = _Deletion(tmp_path)
    refuse = raises("delete", deletion.claim.name, number)

    def hook(operation: str, name: str) -> None:
        refuse(operation, name)
        if (operation, name) == ("publish", "0.metadata"):
            age(deletion.claim)

    ((report,),) = [try_save([state(1)], FaultyStorage(tmp_path, hook), 0)]
    assert not isinstance(report, BaseException), report
    assert deletion.claim.exists()
    deletion.end()
    (error,) = deletion.errors
    assert "has been replaced or removed meanwhile; nothing was deleted" in str(error)
    check_after_later_saves(tmp_path, {0: 1})
