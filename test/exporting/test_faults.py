"""Exports that fail: nothing is visible under the name that was meant, or all of it is, and every rank raises."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dist_ckpt import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointReplacedError,
    DurabilityUnknownError,
    LoadOptions,
    RankFailureError,
    UnsupportedValueError,
    export,
    verify,
)
from paddle_dist_ckpt.exporting import export as export_module
from paddle_dist_ckpt.exporting.export import export_checkpoint
from paddle_dist_ckpt.exporting.formats import ExportRequest
from paddle_dist_ckpt.folder.hidden import HiddenFolder
from paddle_dist_ckpt.storage import Folders, LocalStorage, made_folder
from paddle_dist_ckpt.storage.made_folder import MadeFolder
from paddle_dist_ckpt.testing import FaultyStorage, SimulatedRank, run_ranks
from test.interrupts import interrupted
from test.jobs import (
    Killed,
    all_of,
    all_ok,
    errors_of,
    files_in,
    load_whole,
    make_array,
    same_bits,
    save_alone,
    save_on,
    split_all,
)
from test.strategies import draws
from test.system_calls import make_stale_when_removed, replace_call
from test.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
ARRAYS = {"a": make_array((60, 50)), "b": make_array((700, 8), "bfloat16"), "c": make_array((3,), "int64")}
RANKS = 2


def saved(folder: Path) -> Path:
    save_on([{"model": model, "step": 3} for model in split_all(ARRAYS, RANKS)], folder)
    return folder


def request(out: Path, format: str) -> ExportRequest:
    return ExportRequest(str(out), format, None, None, None, None, 6000)


@dataclass
class Faults:
    """What ranks do to the folders of an export, and what happens at one of these operations.

    Attributes:
        at: The rank and the number of its operation; None to watch only.
        strike: What happens there: raises, or does something else.
        done: The operations of each rank.
    """

    at: tuple[int, int] | None = None
    strike: Callable[[SimulatedRank], None] = lambda rank: None
    done: dict[int, list[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _dead: set[int] = field(default_factory=set)

    def export(self, rank: SimulatedRank, source: Path, wanted: ExportRequest) -> Any:
        """Export on one rank of several."""

        def hook(operation: str, name: str) -> None:
            with self._lock:
                steps = self.done.setdefault(rank.rank, [])
                steps.append(operation)
                struck = self.at == (rank.rank, len(steps) - 1)
            if rank.rank in self._dead:
                raise Killed
            if struck:
                self.strike(rank)

        with rank.hub.session("export", 60) as session:
            folders = Folders(lambda folder: FaultyStorage(folder, hook))
            return export_checkpoint(session, LocalStorage(source), wanted, all_of(wanted), False, folders)

    def die(self, rank: SimulatedRank) -> None:
        """As if the rank's process were killed."""
        self._dead.add(rank.rank)
        rank.hub.close()
        raise Killed


def no_space(rank: SimulatedRank) -> None:
    raise FaultyStorage.no_space("file")


def attempts(folder: Path, format: str, strike: str | Callable[[SimulatedRank], None]) -> list[tuple[Path, list[Any]]]:
    """Export as often as there are operations, each time with a fault at another one: the places, and the results."""
    source, watched = saved(folder / "ckpt"), Faults()
    all_ok(run_ranks(RANKS, lambda rank: watched.export(rank, source, request(folder / "watched", format))))
    # A claim that cannot be touched is dated by its writing.
    places = [(rank, i) for rank, steps in watched.done.items() for i, step in enumerate(steps) if step != "touch"]
    assert len(places) >= 20
    found = []
    for number, place in enumerate(places):
        faults, out = Faults(place), folder / f"try{number}" / "out"
        faults.strike = faults.die if strike == "die" else strike  # type: ignore[assignment]
        work = functools.partial(faults.export, source=source, wanted=request(out, format))
        found.append((out, run_ranks(RANKS, work)))
    return found


def is_whole(out: Path, like: Path) -> bool:
    """Whether an export has all files of another one."""
    sizes = [sorted(len(data) for data in files_in(folder).values()) for folder in (out, like)]
    return sizes[0] == sizes[1]


@pytest.mark.parametrize("format", ["safetensors", "native"])
def test_a_full_disk(tmp_path: Path, format: str) -> None:
    """At every operation of every rank: all ranks raise, and nothing is left."""
    found = attempts(tmp_path, format, no_space)
    for out, results in found:
        for error in errors_of(results, DurabilityUnknownError if out.exists() else RankFailureError):
            assert "No space left" in str(error)
            if isinstance(error, DurabilityUnknownError):
                assert (error.path, error.unique_id) == (str(out), 0)
        # Only if the very last step fails, that makes the name durable, the export has its name already.
        left = list(out.parent.iterdir()) if out.parent.exists() else []
        assert left == [] or (left == [out] and is_whole(out, tmp_path / "watched"))
    assert sum(out.exists() for out, _ in found) == 1


@pytest.mark.parametrize("format", ["safetensors", "native"])
def test_a_file_that_has_become_shorter_is_not_published(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = export_module._Coordinator.finish

    def cut_and_finish(self: Any, messages: Any) -> Any:
        path = self._hidden.path / self.plan.files[0].name
        os.truncate(path, path.stat().st_size - 1)
        return finish(self, messages)

    monkeypatch.setattr(export_module._Coordinator, "finish", cut_and_finish)
    saved(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="has changed while it was written"):
        export(tmp_path / "ckpt", tmp_path / "out", format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_rank_that_dies(tmp_path: Path) -> None:
    for out, results in attempts(tmp_path, "native", "die"):
        assert sum(isinstance(result, Killed) for result in results) <= 1
        errors_of([result for result in results if not isinstance(result, Killed)], CheckpointError)
        left = list(out.parent.iterdir()) if out.parent.exists() else []
        assert left == [] or (left == [out] and verify(out).ok)


def test_a_rank_that_is_interrupted(tmp_path: Path) -> None:
    def strike(rank: SimulatedRank) -> None:
        raise KeyboardInterrupt

    source, faults = saved(tmp_path / "ckpt"), Faults((1, 2), strike)
    out = tmp_path / "out"
    first, second = run_ranks(RANKS, lambda rank: faults.export(rank, source, request(out, "safetensors")))
    assert isinstance(first, RankFailureError)
    assert isinstance(second, KeyboardInterrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def meanwhile(tmp_path: Path, format: str, operation: str, what: Callable[[], None]) -> list[Any]:
    """Export on all ranks, while something happens at the first such operation of the coordinator."""
    source, watched, out = saved(tmp_path / "ckpt"), Faults(), tmp_path / "out"
    all_ok(run_ranks(RANKS, lambda rank: watched.export(rank, source, request(tmp_path / "watched", format))))
    faults = Faults((0, watched.done[0].index(operation)), lambda rank: what())
    return run_ranks(RANKS, lambda rank: faults.export(rank, source, request(out, format)))


@pytest.mark.parametrize("format", ["safetensors", "native", "pdparams"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_somebody_else_makes_it_meanwhile(tmp_path: Path, format: str, kind: str) -> None:
    def make() -> None:
        if kind == "file":
            (tmp_path / "out").write_text("theirs")
        elif kind == "folder":
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").write_text("")
        else:
            (tmp_path / "out").symlink_to("theirs")

    errors_of(meanwhile(tmp_path, format, "delete", make), ValueError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out", "watched"]
    if kind == "file":
        assert (tmp_path / "out").read_text() == "theirs"
    elif kind == "folder":
        assert list(files_in(tmp_path / "out")) == ["theirs"]
    else:
        assert (tmp_path / "out").is_symlink()


def test_an_empty_folder_made_meanwhile_is_filled(tmp_path: Path) -> None:
    all_ok(meanwhile(tmp_path, "safetensors", "delete", (tmp_path / "out").mkdir))
    assert is_whole(tmp_path / "out", tmp_path / "watched")


def test_an_empty_folder_is_filled_where_there_are_no_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "ckpt")
    (tmp_path / "out").mkdir()

    def refuse(path: Any, *_: Any) -> None:
        raise OSError(errno.ENOTSUP, "no modes here", str(path))

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "chown", refuse)
    export(source, tmp_path / "out", format="native")
    assert load_whole(tmp_path / "out")["step"] == 3


@pytest.mark.parametrize("format", ["safetensors", "native"])
def test_the_checkpoint_is_replaced_meanwhile(tmp_path: Path, format: str) -> None:
    results = meanwhile(tmp_path, format, "read", lambda: replace(tmp_path / "ckpt"))
    for error in errors_of(results, RankFailureError):
        assert "CheckpointReplacedError" in str(error)
        assert "was replaced during its export" in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "watched"]


@pytest.mark.parametrize("format", ["pdparams", "native"])
def test_another_host_replaces_the_checkpoint_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """Of a local disk what is open can be read all the same."""
    source = saved(tmp_path / "ckpt")
    make_stale_when_removed(monkeypatch)
    real, done = os.preadv, list[bool]()

    def read(descriptor: int, *args: Any) -> int:
        if not done and any(tmp_path.glob(".*.export-*")):
            done.append(True)
            replace(source)
        return real(descriptor, *args)

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(CheckpointReplacedError, match="was replaced during its export"):
        export(source, tmp_path / "out", format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("format", ["pdparams", "native"])
def test_a_checkpoint_that_is_replaced_while_it_is_planned_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    source, plans = saved(tmp_path / "ckpt"), list[str]()
    real = export_module.plan_export

    def plan(storage: Any, metadata: Any, *args: Any) -> Any:
        plans.append(metadata.save_id)
        if len(plans) == 1:
            replace(tmp_path / "ckpt")  # whose values are read, too
            raise CheckpointCorruptedError("0_0.safetensors is missing")
        return real(storage, metadata, *args)

    monkeypatch.setattr(export_module, "plan_export", plan)
    out = tmp_path / ("out.pdparams" if format == "pdparams" else "out")
    export(source, out, format=format)
    assert len(set(plans)) == 2
    assert load_whole(out)["step"] == 4
    monkeypatch.setattr(export_module, "plan_export", lambda *_: _raise())
    with pytest.raises(CheckpointCorruptedError, match="damaged"):
        export(source, tmp_path / "other", format=format)


def _raise() -> None:
    raise CheckpointCorruptedError("damaged")


def replace(folder: Path) -> None:
    save_alone({"model": {key: array[::-1].copy() for key, array in ARRAYS.items()}, "step": 4}, folder, 0)


def test_the_checkpoint_is_replaced_between_the_plans_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has written its files by then; those of rank 1 would be of another save."""
    source, faults, written = saved(tmp_path / "ckpt"), Faults(), threading.Event()
    plan, write_share = export_module._plan, export_module._write_share

    def late_plan(*args: Any) -> Any:
        assert written.wait(PATIENCE)
        replace(source)
        return plan(*args)

    def early_share(*args: Any) -> Any:
        found = write_share(*args)
        written.set()
        return found

    monkeypatch.setattr(export_module, "_plan", late_plan)
    monkeypatch.setattr(export_module, "_write_share", early_share)
    results = run_ranks(RANKS, lambda rank: faults.export(rank, source, request(tmp_path / "out", "safetensors")))
    for error in errors_of(results, RankFailureError):
        assert "was replaced during its export" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_the_checkpoint_is_replaced_when_all_of_it_was_read(tmp_path: Path) -> None:
    all_ok(meanwhile(tmp_path, "native", "size", lambda: replace(tmp_path / "ckpt")))
    found = load_whole(tmp_path / "out")
    assert all(same_bits(found["model"][key], array) for key, array in ARRAYS.items())


def test_a_rank_that_does_not_see_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, faults = saved(tmp_path / "ckpt"), Faults()
    plain = LocalStorage.read
    calls = itertools.count()

    def read(storage: LocalStorage, name: str, limit: int | None = None) -> bytes:
        if name == ".claim" and next(calls) == 0:
            raise FileNotFoundError
        return plain(storage, name, limit)

    monkeypatch.setattr(LocalStorage, "read", read)
    results = run_ranks(RANKS, lambda rank: faults.export(rank, source, request(tmp_path / "out", "native")))
    for error in errors_of(results, RankFailureError):
        assert "need one folder" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("planted", ["a FIFO", "no text"])
def test_what_somebody_puts_in_place_of_the_claim_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    plain = LocalStorage.read

    def read(storage: LocalStorage, name: str, limit: int | None = None) -> bytes:
        if name == ".claim":
            path = Path(storage.location, name)
            path.unlink()
            if planted == "a FIFO":
                os.mkfifo(path)
            else:
                path.write_bytes(b"\xff" * 99)
        return plain(storage, name, limit)

    source = saved(tmp_path / "ckpt")
    monkeypatch.setattr(LocalStorage, "read", read)
    with pytest.raises((CheckpointError, IsADirectoryError), match=r"\.out\.export-"):
        export(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("format", ["safetensors", "native", "pdparams"])
def test_a_name_that_was_given_whatever_the_answer_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    source, out = saved(tmp_path / "ckpt"), tmp_path / "out.pdparams"

    def answer_wrongly(name: str) -> Callable[..., None]:
        real = getattr(os, name)

        def call(origin: Any, target: Any, **more: Any) -> None:
            real(origin, target, **more)
            if os.fspath(target) == str(out):
                raise OSError(errno.EIO, "injected")

        return call

    for name in ("link", "rename", "replace"):
        monkeypatch.setattr(os, name, answer_wrongly(name))
    report = export(source, out, format)
    assert out.exists()
    assert report.tensors == len(ARRAYS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", out.name]


def test_what_a_killed_export_left_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path / "ckpt")
    for name in (".out.export-0123", ".out.state-xyz", ".out2.export-4567", ".other"):
        (tmp_path / name).mkdir()
    with caplog.at_level(logging.WARNING):
        export(tmp_path / "ckpt", tmp_path / "out")
    assert [record.args[0] for record in caplog.records if record.args] == [
        tmp_path / ".out.export-0123",
        tmp_path / ".out.state-xyz",
    ]
    assert len(list(tmp_path.glob(".o*"))) == 4
    caplog.clear()
    (tmp_path / "ckpt").rename(tmp_path / ".new.state-xyz")  # as an export of a job's state_dict has its folder
    export(tmp_path / ".new.state-xyz", tmp_path / "new")
    assert not caplog.records


def test_the_folder_that_is_exported_from_is_not_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where somebody saves what a killed export of a state_dict has left, by whatever path."""
    hidden = left_of(tmp_path, ".out.state-01", 330)
    (hidden / "model.safetensors").unlink()
    saved(hidden)
    before = files_in(hidden)
    (tmp_path / "link").symlink_to(tmp_path)
    export(tmp_path / "link" / hidden.name, tmp_path / "out")
    assert files_in(hidden) == before
    assert not caplog.records


def left_of(folder: Path, name: str, age: float, *, claim: str | None = None) -> Path:
    """What a killed export has left: one whose claim was refreshed so many seconds ago."""
    path = folder / name
    path.mkdir()
    for file, text in ((".claim", claim or name.removesuffix(".gone")), ("model.safetensors", "half of it")):
        (path / file).write_text(text)
        os.utime(path / file, (time.time() - age,) * 2)
    return path


@pytest.mark.parametrize("format", ["safetensors", "pdparams"])
def test_what_a_killed_export_left_is_removed_when_its_claim_has_expired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    saved(tmp_path / "ckpt")
    dead = [left_of(tmp_path, f".out.{kind}", 330) for kind in ("export-01", "state-02", "export-03.gone")]
    alive = [
        left_of(tmp_path, ".out.export-04", 270),
        left_of(tmp_path, ".out.export-05", 330, claim=".out.export-06"),  # was given the name
        left_of(tmp_path, ".out2.export-07", 330),
        left_of(tmp_path, ".out.export-old.export-08", 330),  # of one to out.export-old
    ]
    elsewhere = left_of(tmp_path, "elsewhere", 330, claim=".out.export-08")
    (tmp_path / ".out.export-08").symlink_to(elsewhere)
    before = [files_in(folder) for folder in (*alive, elsewhere)]
    with caplog.at_level(logging.INFO, "paddle_dist_ckpt"):
        export(tmp_path / "ckpt", tmp_path / "out", format=format)
    assert not any(map(os.path.lexists, dead))
    assert [files_in(folder) for folder in (*alive, elsewhere)] == before
    removed = [record.args[0] for record in caplog.records if record.levelno == logging.INFO and record.args]
    assert removed == sorted(dead)
    assert [record.args[0] for record in caplog.records if record.levelno == logging.WARNING and record.args] == [
        *alive[:2],
        tmp_path / ".out.export-08",
    ]


def test_what_is_published_while_it_is_about_to_be_removed_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an export that was silent for long goes on just after a later one has found its claim expired."""
    saved(tmp_path / "ckpt")
    hidden = left_of(tmp_path, ".out.export-01", 330)

    def rename(source: Path, target: Path) -> None:
        if source == hidden:
            (hidden / ".claim").unlink()
            plain(hidden, tmp_path / "out")
        plain(source, target)

    plain = made_folder.rename
    monkeypatch.setattr(made_folder, "rename", rename)
    with pytest.raises(ValueError, match="is there already"):
        export(tmp_path / "ckpt", tmp_path / "out")
    assert list(files_in(tmp_path / "out")) == ["model.safetensors"]


@pytest.mark.parametrize("reason", ["its name is too long", "it may not be renamed"])
def test_what_cannot_be_put_aside_of_a_dead_export_stays_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    """For its process may go on, and publish it, while its files are removed."""
    saved(tmp_path / "ckpt")
    out = tmp_path / ("x" * 230 if reason == "its name is too long" else "out")
    hidden = left_of(tmp_path, f".{out.name}.export-0123456789abcdef", 330)
    before = files_in(hidden)

    def rename(source: Path, target: Path) -> None:
        if source == hidden and len(target.name) < 255:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(source))
        plain(source, target)

    plain = made_folder.rename
    monkeypatch.setattr(made_folder, "rename", rename)
    with caplog.at_level(logging.INFO, "paddle_dist_ckpt"):
        export(tmp_path / "ckpt", out)
    assert files_in(hidden) == before
    assert [record.args[0] for record in caplog.records if record.args and "killed" in record.msg] == [hidden]


def test_many_files_of_a_dead_export_may_take_longer_to_remove_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "ckpt")
    hidden = left_of(tmp_path, ".out.export-01", 330)
    for i in range(3):
        (hidden / f"{i}.safetensors").touch()

    def unlink(file: Any, **more: Any) -> None:
        if str(file).endswith(".safetensors"):
            time.sleep(0.6)
        plain(file, **more)

    plain = os.unlink
    replace_call(monkeypatch, "unlink", unlink)
    export(tmp_path / "ckpt", tmp_path / "out", options=LoadOptions(progress_timeout=1.5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]


def test_a_hidden_name_that_is_no_text_stops_no_export(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path / "ckpt")
    left_of(tmp_path, os.fsdecode(b".out.export-\xff"), 330, claim="another")
    export(tmp_path / "ckpt", tmp_path / "out")
    assert "goes on, or was killed" in caplog.text


def test_a_living_export_keeps_its_claim_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddle_dist_ckpt.folder.own_claim.FRESH_EVERY", 0.01)
    source, wanted = saved(tmp_path / "ckpt"), request(tmp_path / "out", "safetensors")
    waited = threading.Event()

    def wait(operation: str, name: str) -> None:
        if operation != "write" or waited.is_set():
            return
        waited.set()
        (claim,) = tmp_path.glob(".out.export-*/.claim")
        os.utime(claim, (1, 1))  # as that of one that was killed
        until = time.monotonic() + PATIENCE
        while claim.stat().st_mtime == 1 and time.monotonic() < until:
            time.sleep(0.01)
        export(source, tmp_path / "out")

    def work(rank: SimulatedRank) -> Any:
        with rank.hub.session("export", 60) as session:
            folders = Folders(lambda folder: FaultyStorage(folder, wait))
            return export_checkpoint(session, LocalStorage(source), wanted, all_of(wanted), False, folders)

    (error,) = run_ranks(1, work)
    assert "is there already" in str(error)  # for the other one was faster, and not because it has removed this one's
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]


@pytest.mark.parametrize("operation", ["create", "modified"])
def test_an_export_that_was_taken_for_dead_fails(tmp_path: Path, operation: str) -> None:
    def strike() -> None:
        (hidden,) = tmp_path.glob(".out.export-*")
        os.utime(hidden / ".claim", (1, 1))
        export(tmp_path / "ckpt", tmp_path / "out", format="native")

    for error in errors_of(meanwhile(tmp_path, "native", operation, strike), RankFailureError):
        assert "somebody has removed it meanwhile" in str(error) or "No such file" in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out", "watched"]
    assert verify(tmp_path / "out").ok


@pytest.mark.parametrize("length", [220, 226, 230])
@pytest.mark.parametrize("format", ["pdparams", "native"])
def test_a_long_name_leaves_nothing_beside_it(tmp_path: Path, length: int, format: str) -> None:
    """Nor if the export fails; names of folders may have 255 bytes, the hidden one's too."""
    saved(tmp_path / "ckpt")
    out = tmp_path / "in" / ("x" * length)
    out.parent.mkdir()
    export(tmp_path / "ckpt", out, format=format)
    assert list(out.parent.iterdir()) == [out]
    for path in (tmp_path / "ckpt").glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointCorruptedError):
        export(tmp_path / "ckpt", out.with_name("y" * length), format=format)
    assert list(out.parent.iterdir()) == [out]


def test_what_cannot_be_removed_of_an_export_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "ckpt")
    monkeypatch.setattr(os, "rmdir", lambda folder: None)
    export(tmp_path / "ckpt", tmp_path / "out", format="pdparams")
    (left,) = tmp_path.glob(".out.export-*")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"{left} is left of an export, and can be removed"
    ]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("mkdir", errno.EEXIST),
        ("mkdir", errno.EINTR),
        ("link", errno.EEXIST),
        ("replace", errno.ENOENT),
        ("replace", errno.EIO),
        ("rename", errno.EIO),
        ("rmdir", errno.ENOENT),
        ("rmdir", errno.EINTR),
    ],
)
def test_an_answer_that_is_lost_on_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """What is done is asked for once more then, and is told to be there, or to be gone."""
    source, real = saved(tmp_path / "ckpt"), getattr(os, name)

    def lost(path: Any, *args: Any, **more: Any) -> None:
        done = ".export-" in str(path) and os.path.lexists(path)
        real(path, *args, **more)
        if ".export-" in str(path) and done == (name != "mkdir"):
            raise OSError(number, os.strerror(number), str(path))

    replace_call(monkeypatch, name, lost)
    export(source, tmp_path / "out", format="pdparams")
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out"]


@pytest.mark.parametrize("format", ["pdparams", "native"])
def test_a_folder_that_was_given_the_hidden_ones_name_is_not_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    """Who may write to the folder above may rename what others have there, but not have it removed by an export."""
    source, precious = saved(tmp_path / "ckpt"), saved(tmp_path / "precious")
    before, hidden = files_in(precious), list[Path]()

    def swap(rank: SimulatedRank) -> None:
        hidden.extend(tmp_path.glob(".out.export-*"))
        hidden[0].rename(tmp_path / "elsewhere")
        precious.rename(hidden[0])
        no_space(rank)

    watched = Faults()
    run_ranks(1, lambda rank: watched.export(rank, source, request(tmp_path / "watched", format)))
    faults = Faults((0, watched.done[0].index("write")), swap)
    (error,) = run_ranks(1, lambda rank: faults.export(rank, source, request(tmp_path / "out", format)))
    assert "No space left" in str(error)
    assert files_in(hidden[0]) == before
    assert f"{hidden[0]} is another folder than the one that was made there, so it stays" in caplog.messages


def test_no_interrupt_leaves_a_hidden_folder(tmp_path: Path) -> None:
    """Whoever exports there later would be told of it for ever."""
    for number in itertools.count():
        hidden = HiddenFolder(tmp_path / "out", ".out.export-1", Folders())
        goes_on = True
        with suppress(CheckpointError):  # Python may end a thread's start with a RuntimeError then
            goes_on = interrupted(number, hidden.make)
        hidden.remove()
        assert not list(tmp_path.iterdir()), number
        if not goes_on:
            break
    assert number > 50


def test_a_folder_that_is_not_the_one_that_was_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("full", "link"):
        with pytest.raises(OSError, match=name):
            MadeFolder(tmp_path / name)


CHILD = """
import os, signal, sys
from paddle_dist_ckpt import export
from paddle_dist_ckpt.storage import Folders
from paddle_dist_ckpt.testing import FaultyStorage
source, out, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
steps = []

def hook(operation, name):
    steps.append(operation)
    if len(steps) == at:
        os.kill(os.getpid(), signal.SIGKILL)

Folders.__init__.__defaults__ = (lambda folder: FaultyStorage(folder, hook), None)
print("ready", flush=True)
export(source, out, format="native", max_shard_bytes=5_000_000)
print(len(steps), flush=True)
"""


def test_kill_9(tmp_path: Path) -> None:
    """At some operation, or at some moment: the place is empty or whole, and free for the next export."""
    array = np.arange(5_000_000, dtype=np.float32).reshape(5, -1)
    save_alone({f"layer{i}": row for i, row in enumerate(array)}, tmp_path / "ckpt")

    def start(out: Path, at: int) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path / "ckpt"), str(out), str(at)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    with start(tmp_path / "first", 0) as child:
        begun = time.monotonic()
        count = int(child.communicate()[0])
        seconds = time.monotonic() - begun
    rng = random.Random(5)
    visible = 0
    for number in range(draws(6, 100)):
        out = tmp_path / f"try{number}" / "out"
        at = rng.randint(1, count) if number % 2 else 0
        with start(out, at) as child:
            if not at:
                time.sleep(rng.uniform(0, seconds))
                child.kill()
            assert child.wait() in (0, -signal.SIGKILL)
        visible += out.exists()
        if out.exists():
            assert verify(out).ok
            assert sorted(files_in(out)) == sorted(path.name for path in out.iterdir())
        else:
            export(tmp_path / "ckpt", out, format="native")
            assert verify(out).ok
    assert visible < draws(6, 100)


@pytest.mark.parametrize("format", ["safetensors", "native", "pdparams"])
def test_a_file_that_changes_before_it_gets_its_name_is_not_published(tmp_path: Path, format: str) -> None:
    def cut() -> None:
        (hidden,) = tmp_path.glob(".out.export-*")
        file = min(path for path in hidden.iterdir() if not path.name.startswith("."))
        os.truncate(file, file.stat().st_size - 1)

    for error in errors_of(meanwhile(tmp_path, format, "size", cut), CheckpointError):
        assert "has changed while it was written" in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "watched"]


def test_a_name_that_cannot_be_given_is_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "out")

    source = saved(tmp_path / "ckpt")
    monkeypatch.setattr(export_module, "rename", refused)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        export(source, tmp_path / "out", "safetensors")
    assert caught.value.errno == errno.EROFS
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_an_empty_folder_of_somebody_elses_keeps_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, int, int]] = []
    stat, empty = Path.stat, tmp_path / "out"

    def theirs(path: Path, **options: Any) -> os.stat_result:
        found = stat(path, **options)
        return found if path != empty else os.stat_result((*found[:4], found.st_uid + 1, found.st_gid + 2, *found[6:]))

    source = saved(tmp_path / "ckpt")
    empty.mkdir(0o750)
    monkeypatch.setattr(Path, "stat", theirs)
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: given.append((Path(path).name, uid, gid)))
    export(source, empty, "safetensors")
    ((name, uid, gid),) = given
    assert name.startswith(".out.export-")
    assert (uid - os.geteuid(), gid - os.getegid()) == (1, 2)
    assert os.stat(empty).st_mode & 0o777 == 0o750


def test_a_damaged_value_is_not_exported(tmp_path: Path) -> None:
    save_alone({"w": ARRAYS["a"], "text": "v" * 6000}, tmp_path / "ckpt")
    (file,) = (tmp_path / "ckpt").glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data.replace(b"v" * 6000, b"v" * 5999 + b"u", 1))
    with pytest.raises(CheckpointCorruptedError, match="text: the checksum of .* does not match"):
        export(tmp_path / "ckpt", tmp_path / "out.pdparams", "pdparams")
    assert not (tmp_path / "out.pdparams").exists()


def test_more_names_than_a_file_can_describe_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path / "ckpt")
    monkeypatch.setattr("paddle_dist_ckpt.exporting.safetensors._MAX_HEADER_BYTES", 100)
    with pytest.raises(UnsupportedValueError, match=r"model\S* needs a header of \d+ bytes; 100 are possible"):
        export(source, tmp_path / "out", "safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
