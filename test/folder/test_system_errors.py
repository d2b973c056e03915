"""Every call of the operating system that a save makes fails once, before its work or after it: what is said is true,
names a path, and a later save cleans up."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import copy_checkpoint, list_checkpoints, verify
from paddle_dist_ckpt.errors import CheckpointError, DurabilityUnknownError, RankFailureError
from test import strategies
from test.jobs import load_whole, save_alone, save_on, try_save
from test.system_calls import Call, SystemCalls
from test.torture.leftovers import age_all, check_clean


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of saves."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def state(version: int) -> dict[str, Any]:
    return {"w": np.full(500, version), "text": f"{version} " * 3000, "n": version}


def prepared(folder: Path) -> Path:
    """Version 1 under id 0, version 2 under id 1."""
    template = folder.parent / "template"
    if not template.exists():
        save_alone(state(1), template)
        save_alone(state(2), template)
    return Path(shutil.copytree(template, folder))


def seen_in(folder: Path) -> dict[int, int]:
    """The versions under the committed ids, which must be whole."""
    found = {}
    for unique_id in list_checkpoints(folder):
        assert verify(folder, unique_id).ok
        loaded = load_whole(folder, unique_id)
        found[unique_id] = loaded["n"]
        assert (loaded["w"] == loaded["n"]).all()
    return found


def numbers(calls: Sequence[Call], shift: int) -> Sequence[int]:
    """Which calls fail: all of them with ``--long``, else those around the commit and some others."""
    if strategies.long_run:
        return range(len(calls))
    commit = next(i for i, (name, file) in enumerate(calls) if name in ("link", "replace") and "metadata" in file)
    return sorted({*range(shift, len(calls), 24), *range(commit - 1, commit + 6)})


def attempt(work: Callable[[], Any]) -> Any:
    """What some work returns or raises."""
    try:
        return work()
    except Exception as error:
        return error


def outcome(folder: Path, results: Sequence[Any], old: dict[int, int], new: dict[int, int]) -> str:
    """How a save ended, on all its ranks; fails unless what they were told is true and names a path."""
    seen = seen_in(folder)
    errors = [result for result in results if isinstance(result, BaseException)]
    if not errors:
        assert seen == new, "told of success, but not committed"
        return "saved"
    assert len(errors) == len(results), results
    for error in errors:
        assert isinstance(error, (CheckpointError, OSError)), repr(error)
        assert str(folder) in str(error), f"names no path: {error!r}"
        assert "injected" in str(error)
        assert isinstance(error, DurabilityUnknownError) == (seen == new), repr(error)
        if isinstance(error, DurabilityUnknownError):
            (unique_id,) = (i for i in new if old.get(i) != new[i])
            assert (error.unique_id, error.path) == (unique_id, str(folder))
            assert f"committed as id {unique_id}" in str(error)
        else:
            assert seen == old
    return type(errors[0]).__name__


@pytest.mark.parametrize(
    ("ranks", "unique_id", "after"),
    strategies.some([(1, None, False), (1, 1, False), (1, None, True), (2, 1, False), (2, None, True), (2, None, False),
                     (2, 1, True), (1, 1, True)], 2),
)  # fmt: skip
def test_what_is_said_of_a_save_is_true_whatever_call_fails(
    tmp_path: Path, ranks: int, unique_id: int | None, after: bool
) -> None:
    old, new = {0: 1, 1: 2}, {0: 1, 1: 2, 2: 3} if unique_id is None else {0: 1, 1: 3}
    states = [state(3), {"more": np.arange(700)}][:ranks]
    with SystemCalls(prepared(tmp_path / "dry")).watched() as dry:
        save_on(states, tmp_path / "dry", unique_id)
    outcomes: Counter[str] = Counter()
    shift = 2 * int(after) + int(unique_id is None)
    for at in numbers(dry.calls, shift):
        folder = prepared(tmp_path / str(at))
        with SystemCalls(folder, at, after).watched() as system:
            results = try_save(states, folder, unique_id)
        try:
            outcomes[outcome(folder, results, old, new)] += 1
            age_all(folder)
            save_alone(state(4), folder, 7)
            assert seen_in(folder)[7] == 4
            check_clean(folder)
        except Exception as failure:
            raise AssertionError(f"call {at}, {system.failed}: {results}") from failure
        shutil.rmtree(folder)
    assert outcomes["saved"]
    assert outcomes["DurabilityUnknownError"], "the folder cannot be opened, or synced"
    assert outcomes["RankFailureError"]


def test_a_commit_that_nobody_can_look_at_is_not_called_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails at the sync after the commit, and for good."""
    replace, dead = os.replace, list[bool]()

    def die(source: Any, target: Any) -> None:
        replace(source, target)
        if str(target).endswith(".metadata"):
            dead.append(True)

    def refuse(real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            if dead:
                raise OSError(errno.EIO, "injected")
            return real(*args, **more)

        return call

    save_alone(state(1), tmp_path, 5)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        for name in ("open", "fsync", "listdir", "unlink"):
            patch.setattr(os, name, refuse(getattr(os, name)))
        with pytest.raises(DurabilityUnknownError, match="perhaps committed .* as id 5 to") as caught:
            save_alone(state(2), tmp_path, 5)
    assert caught.value.unique_id == 5
    assert seen_in(tmp_path) == {5: 2}


def test_what_the_commit_replaced_stays_while_its_durability_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash may bring the old `.metadata` back, which then needs its files."""
    save_alone(state(1), tmp_path, 5)
    old = (tmp_path / "5.metadata").read_bytes()
    replace, fsync, given = os.replace, os.fsync, list[bool]()

    def give(source: Any, target: Any) -> None:
        replace(source, target)
        given.extend([True] * str(target).endswith(".metadata"))

    def sync(descriptor: int) -> None:
        if given:
            raise OSError(errno.EIO, "injected")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", give)
        patch.setattr(os, "fsync", sync)
        (error,) = try_save([state(2)], tmp_path, 5)
    assert isinstance(error, DurabilityUnknownError)
    assert seen_in(tmp_path) == {5: 2}
    (tmp_path / "5.metadata").write_bytes(old)
    assert seen_in(tmp_path) == {5: 1}


def test_a_copy_that_is_there_is_not_called_a_failure(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_alone(state(1), source, 3)
    with SystemCalls(tmp_path / "dry").watched() as dry:
        copy_checkpoint(source, tmp_path / "dry")
    linked = next(i for i, (name, _) in enumerate(dry.calls) if name == "link")
    said: Counter[str] = Counter()
    for at in range(linked, len(dry.calls)):
        folder = tmp_path / str(at)
        with SystemCalls(folder, at, after=True).watched() as system:
            result = attempt(lambda folder=folder: copy_checkpoint(source, folder))
        said[type(result).__name__] += 1
        assert type(result).__name__ in ("Metadata", "DurabilityUnknownError"), (system.failed, result)
        assert (getattr(result, "path", str(folder)), result.unique_id) == (str(folder), 3)
        assert seen_in(folder) == {3: 1}
        age_all(folder)
        save_alone(state(4), folder, 7)
        check_clean(folder)
    assert said["DurabilityUnknownError"]


def test_a_load_whose_call_fails_names_the_path_or_does_not_need_it(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "folder")

    def load(at: int | None) -> tuple[SystemCalls, Any]:
        with SystemCalls(folder, at).watched() as system:
            return system, attempt(lambda: load_whole(folder))

    dry, expected = load(None)
    ended: Counter[str] = Counter()
    for at in range(len(dry.calls)):
        system, result = load(at)
        if isinstance(result, dict):
            assert repr(result) == repr(expected)
            ended[dry.calls[at][0]] += 1
        else:
            assert isinstance(result, (CheckpointError, OSError)), (system.failed, result)
            assert "injected" in str(result)
            assert str(folder) in str(result), (system.failed, result)
    assert ended["close"] == Counter(name for name, _ in dry.calls)["close"] > 0


def test_a_full_disk_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, write = prepared(tmp_path / "folder"), os.pwrite
    real = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full(descriptor: int, *args: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            raise real
        return write(descriptor, *args)

    monkeypatch.setattr(os, "pwrite", full)
    results = try_save([state(3), {"more": np.arange(700)}], folder)
    for error in results:
        assert isinstance(error, RankFailureError)
        assert f"[Errno {real.errno}]" in str(error)
        assert str(folder) in str(error)
