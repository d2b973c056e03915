"""Calls without options, exports and a manager's own looks at folders, on a disk that never answers."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_dist_ckpt
from paddle_dist_ckpt import CheckpointTimeoutError, LoadOptions, SaveOptions, export
from paddle_dist_ckpt.control.ranks import Ranks
from paddle_dist_ckpt.exporting.export import export_checkpoint
from paddle_dist_ckpt.exporting.formats import ExportRequest
from paddle_dist_ckpt.manager.removal import Removals, remove_step
from paddle_dist_ckpt.manager.steps import Steps, step_folder
from paddle_dist_ckpt.storage import Folders, LocalStorage, bounded_folders
from paddle_dist_ckpt.storage.helpers import Helpers
from paddle_dist_ckpt.testing import FaultyStorage, SimulatedRank, Stall, run_ranks
from test.jobs import all_of, save_alone
from test.stalls import BOUND, all_at_once, check_error, helpers_end
from test.strategies import some
from test.system_calls import replace_call
from test.waiting import PATIENCE, until

STATE = {"a": np.arange(3000, dtype=np.float32), "b": np.zeros(7, np.int64)}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "list": lambda path, **bound: paddle_dist_ckpt.list_checkpoints(path, **bound),
    "read": lambda path, **bound: paddle_dist_ckpt.read_metadata(path, **bound),
    "rebuild": lambda path, **bound: paddle_dist_ckpt.rebuild_metadata(path, **bound),
    "delete": lambda path, **bound: paddle_dist_ckpt.delete_checkpoint(path, 0, **bound),
}


class _NthHangs:
    """A hook that counts what is done to a folder, and hangs at one operation, the ``at``-th."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.done, self.released = at, list[str](), threading.Event()

    def __call__(self, operation: str, name: str) -> None:
        self.done.append(operation)
        if len(self.done) == self.at + 1:
            self.released.wait()


@pytest.mark.parametrize("function", some(["list", "read", "verify", "rebuild", "delete"], 3))
def test_a_disk_that_hangs_is_no_damaged_checkpoint(tmp_path: Path, function: str) -> None:
    """Whichever operation it is at; what comes after a `.metadata` is published or deleted is left to a later save."""

    def call(name: str, hook: _NthHangs) -> None:
        for number in (0, 2):
            save_alone({**STATE, "text": "x" * 9000}, tmp_path / name, number)
        if function == "rebuild":
            (tmp_path / name / "2.metadata").unlink()
        everything(FaultyStorage(tmp_path / name, hook), progress_timeout=BOUND)

    def verify(path: Any, **bound: Any) -> None:
        report = paddle_dist_ckpt.verify(path, options=LoadOptions(**bound))
        assert report.ok, report.problems

    everything = verify if function == "verify" else FUNCTIONS[function]
    watched = _NthHangs()
    call("watched", watched)
    end = len(watched.done)
    if function == "delete":
        end = watched.done.index("sync", watched.done.index("delete")) + 1
    elif function == "rebuild":
        end -= watched.done[::-1].index("publish")
    assert end > 2
    hooks = [_NthHangs(at) for at in range(end)]

    def check(at: int) -> None:
        doing = rf"{tmp_path}/{at}\b.* has not returned for {BOUND:g} s on rank 0; see"
        with pytest.raises(CheckpointTimeoutError, match=doing) as caught:
            call(str(at), hooks[at])
        assert caught.value.missing_ranks == (0,)

    try:
        all_at_once([(at,) for at in range(end)], check)
    finally:
        for hook in hooks:
            hook.released.set()
    helpers_end()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_such_a_call_does_with_a_bound_what_it_does_without(tmp_path: Path, function: str) -> None:
    results = []
    for name, bound in (("free", {}), ("bounded", {"progress_timeout": PATIENCE})):
        save_alone(STATE, tmp_path / name)
        if function == "rebuild":
            (tmp_path / name / "0.metadata").unlink()
        found = FUNCTIONS[function](tmp_path / name, **bound)
        left = sorted(path.name.split(".")[-1] for path in (tmp_path / name).iterdir())
        results.append((found if isinstance(found, list) else found.table.paths, left))
    assert results[0] == results[1]
    helpers_end()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("bad", [0, -1, float("nan"), True, "1"])
def test_a_bound_that_is_none_is_refused(tmp_path: Path, function: str, bad: Any) -> None:
    with pytest.raises(ValueError, match="progress_timeout must be a number of seconds above 0"):
        FUNCTIONS[function](tmp_path, progress_timeout=bad)


_ENDS = """
import os, sys, threading
from paddle_dist_ckpt import CheckpointTimeoutError, LoadOptions, export, list_checkpoints

def hang(*args):
    threading.Event().wait()

def sync(descriptor):
    if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
        hang()

os.fsync = sync
try:
    export(sys.argv[1], sys.argv[2], options=LoadOptions(progress_timeout=0.5))
except CheckpointTimeoutError as error:
    print(error)
os.listdir = os.scandir = hang
try:
    list_checkpoints(sys.argv[1], progress_timeout=0.5)
except CheckpointTimeoutError as error:
    print(error)
print("the main thread ends")
"""


def test_a_process_ends_though_such_a_call_hangs(tmp_path: Path) -> None:
    save_alone(STATE, tmp_path / "saved")
    command = [sys.executable, "-c", _ENDS, tmp_path / "saved", tmp_path / "out"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=PATIENCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"fsync of {tmp_path}/.out.export-"), done.stdout
    assert lines[1].startswith(f"listing {tmp_path}/saved has not returned for 0.5 s"), done.stdout
    assert lines[2] == "the main thread ends"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("operation", "victim"),
    some(
        [
            *((operation, 0) for operation in ("prepare", "create", "write", "sync_file", "size", "delete", "sync")),
            *((operation, 1) for operation in ("create", "write", "sync_file")),
        ],
        4,
    ),
)
def test_all_ranks_of_an_export_hear_of_a_disk_that_hangs(tmp_path: Path, operation: str, victim: int) -> None:
    save_alone(STATE, tmp_path / "saved")
    stall, out = Stall(operation), tmp_path / "out"
    wanted = ExportRequest(str(out), "safetensors", None, None, None, None, 100)

    def work(rank: SimulatedRank) -> Any:
        hanging = (lambda folder: FaultyStorage(folder, stall)) if rank.rank == victim else LocalStorage
        with rank.hub.session("export", 60) as session, closing(Helpers(BOUND, rank.rank)) as helpers:
            source = LocalStorage(tmp_path / "saved")
            return export_checkpoint(session, source, wanted, all_of(wanted), False, Folders(hanging, helpers))

    check_error(run_ranks(2, work), victim, "has not returned", str(tmp_path))
    assert stall.reached.is_set()
    assert not out.exists()
    stall.release()
    helpers_end()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


class _Hang:
    """Stands for a function of the operating system, and waits where this pattern is found in the path."""

    def __init__(self, function: Callable[..., Any], part: str) -> None:
        self._function, self._part = function, part
        self.released, self.reached = threading.Event(), threading.Event()

    def __call__(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        if re.search(self._part, os.fspath(path)) and not self.reached.is_set():
            self.reached.set()
            self.released.wait()
        return self._function(path, *args, **kwargs)


@pytest.mark.parametrize(
    ("function", "part", "doing"),
    [
        ("lstat", "out", "a look at"),
        ("mkdir", r"\.out\.export-", "making"),
        ("replace", r"\.out\.export-\w+/", "publishing"),  # its claim
        ("replace", r"\.out\.export-\w+$", "publishing"),
        ("fsync", r"\.safetensors", "fsync of"),
    ],
)
def test_what_an_export_does_to_folders_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, part: str, doing: str
) -> None:
    save_alone(STATE, tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "before")  # imports what it needs
    name = "stat" if function == "lstat" else function
    if function == "fsync":
        hang = _Hang(lambda path: None, part)
        monkeypatch.setattr(os, "fsync", lambda descriptor: hang(os.readlink(f"/proc/self/fd/{descriptor}")))
    else:
        hang = _Hang(getattr(os, name), f"{re.escape(str(tmp_path))}/{part}")
        replace_call(monkeypatch, name, hang)
    out = tmp_path / "out"
    message = f"{doing} {tmp_path}/.*has not returned for 0.5 s on rank 0"
    with pytest.raises(CheckpointTimeoutError, match=message) as caught:
        export(tmp_path / "saved", out, options=LoadOptions(progress_timeout=0.5))
    assert ("whether it takes effect is not known" in str(caught.value)) == (function == "replace")
    assert hang.reached.is_set()
    assert not out.exists()
    hang.released.set()
    helpers_end()
    monkeypatch.undo()
    left = {path.name for path in tmp_path.iterdir()} - {"saved", "before"}
    assert left in (set(), {"out"} if part.endswith("$") else set())
    if "out" in left:
        assert sorted(os.listdir(out)) == sorted(os.listdir(tmp_path / "before"))


def test_the_export_of_a_state_that_hangs_at_the_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden folder cannot be removed: that must not replace what was raised, nor be waited for without end."""
    from paddle_dist_ckpt import state_exports

    released, reached = threading.Event(), threading.Event()

    def hang(path: Any, *args: Any, **kwargs: Any) -> None:
        reached.set()
        released.wait()
        remove(path, *args, **kwargs)

    remove = os.rmdir
    monkeypatch.setattr(os, "rmdir", hang)
    monkeypatch.setattr(state_exports, "paddles", lambda *args: None)
    monkeypatch.setattr(
        state_exports, "save_with", lambda *args: (_ for _ in ()).throw(CheckpointTimeoutError("the save"))
    )
    wanted = ExportRequest(str(tmp_path / "out"), "safetensors", None, None, None, None, 100)
    with pytest.raises(CheckpointTimeoutError, match="the save"):
        state_exports.export_state_with(Ranks.alone(), {}, wanted, SaveOptions(progress_timeout=0.5))
    assert reached.is_set()
    released.set()
    helpers_end()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["is_symlink", "rmdir"])
def test_a_manager_does_not_wait_for_a_look_at_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder = step_folder(tmp_path, 1)
    save_alone(STATE, folder, 1)
    save = paddle_dist_ckpt.read_metadata(folder).save_id
    (folder / "1.metadata").unlink()
    released, real = threading.Event(), getattr(Path, what)
    monkeypatch.setattr(Path, what, lambda path: (released.wait(), real(path))[1])
    doing = "a look at" if what == "is_symlink" else "removing"
    uses: list[Callable[[Folders], Any]] = [lambda opened: remove_step(tmp_path, 1, [save], opened)]
    if what == "is_symlink":
        uses.append(functools.partial(Removals(Steps(tmp_path)).going, doomed=[1]))
    for use in uses:
        with (
            bounded_folders(0.5, 3) as opened,
            pytest.raises(CheckpointTimeoutError, match=f"{doing} {folder} has not returned for 0.5 s on rank 3"),
        ):
            use(opened)
    released.set()
    helpers_end()
    until(lambda: folder.exists() == (what == "is_symlink"))
