"""Interleavings: jobs save, load, delete, copy, rebuild and prune in one folder, in an order drawn call by call.

Some are frozen for longer than a claim counts, killed, or told of errors meanwhile; see :mod:`.schedule`.
"""

from __future__ import annotations

import errno
import functools
import itertools
import math
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from paddle_dist_ckpt import list_checkpoints, read_metadata, verify
from paddle_dist_ckpt.control import NoTransport, SoloHub
from paddle_dist_ckpt.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    DurabilityUnknownError,
)
from paddle_dist_ckpt.files.names import metadata_id, parse_data_file, parse_temporary
from paddle_dist_ckpt.folder import delete as delete_module
from paddle_dist_ckpt.folder.claims import EXPIRES_AFTER
from paddle_dist_ckpt.folder.copy import copy
from paddle_dist_ckpt.folder.delete import delete
from paddle_dist_ckpt.folder.ids import save_of
from paddle_dist_ckpt.folder.rebuild import rebuild
from paddle_dist_ckpt.manager import removal as removal_module
from paddle_dist_ckpt.manager.prune import carry_out, plan_prune
from paddle_dist_ckpt.manager.retention import Retention
from paddle_dist_ckpt.manager.steps import step_folder
from paddle_dist_ckpt.options import LoadOptions, SaveOptions
from paddle_dist_ckpt.storage import LocalStorage
from paddle_dist_ckpt.testing import NumpyAdapter, SimulatedRank
from paddle_dist_ckpt.wiring import save_with
from test.jobs import Killed, age, load_whole

from .calls import Call, Disks, Interposer, Perform
from .leftovers import LATER
from .schedule import Fault, Job, Kind, Moment, Schedule, without_threads
from .states import states_of, version_of
from .suites import MEMORY, prefix

NAME = "interleavings"
_FOLDER = "ckpt"
_OPTIONS = SaveOptions(block_bytes=4096, timeout=60, progress=False)
_SOURCE = {0: 50, 1: 51}
"""What is copied from another folder: the version under each id."""
_OF_PADDLE, _PICKLE = 3, b"\x80\x04}."
"""The id of a checkpoint of Paddle's, above all others, and what its `.metadata` holds."""
_MIXES = {
    False: ("save save save delete", "save delete copy copy", "save delete rebuild copy", "save next next newest",
            "save next delete load verify", "save newest delete rebuild"),
    True: ("save save prune prune", "save delete prune copy", "save save delete load"),
}  # fmt: skip
"""What jobs do in a folder of checkpoints, and in one of steps."""
_FAULTS = (
    (Kind.FREEZE, 5),
    (Kind.KILL, 3),
    (Kind.FAIL, 2),
    (Kind.FAIL_AFTER, 2),
    (Kind.FULL, 1),
    (Kind.REFRESH, 1),
    (Kind.PASS, 2),
    (Kind.STICK, 1),
)
_NUMBERS = (errno.EIO, errno.EIO, errno.ENOSPC, errno.EACCES)
_ENDINGS = (".claim", ".claim.tmp", ".metadata.tmp", ".tmp", ".safetensors", "")
"""How names end that cannot be removed, as in a folder where others' files may not be touched."""
_CALLS, _MARKED = 60, 12
"""About how many calls a deed makes, and how many of those that list the folder, or name or remove something."""
_REMOVALS = ("delete", "prune", "rebuild")
"""Which deeds have claims of the kind that a deletion has."""
_ROUNDS = 3
"""How many saves, each when all claims have expired, may be needed until nothing is left over."""


class _Event(NamedTuple):
    """A `.metadata` was given its name, or lost it: where, which save was there before, which one is now."""

    folder: Path
    unique_id: int
    before: str | None
    now: str | None


@dataclass(slots=True)
class _Deed:
    """Something that a job does.

    Attributes:
        kind: What it is.
        unique_id: The id, or step, that it is about; None for the next one, or for all.
        version: What it saves.
        events: What it has done to `.metadata`.
        meant: The saves that it set out to remove.
        error: What it raised; None if it succeeded.
        is_over: Whether it returned or raised.
        there: The saves that were there then.
    """

    kind: str
    unique_id: int | None
    version: int
    events: list[_Event] = field(default_factory=list)
    meant: set[str] = field(default_factory=set)
    error: BaseException | None = None
    is_over: bool = False
    there: set[str | None] = field(default_factory=set)


def attempt(seed: int, folder: Path) -> Counter[str]:
    """Let two to four jobs do a few things each, in some order; then see what is left."""
    rng = random.Random(seed)
    history = _History(rng, folder)
    try:
        with without_threads():
            history.run()
            history.check()
    except BaseException as error:
        if history.is_excused:
            return Counter(["frozen before a removal"])
        raise AssertionError(f"{type(error).__name__}: {error}\n{history}") from error
    return history.outcomes


class _History:
    """What some jobs do in a folder, and what becomes of it."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng, self.outcomes = rng, Counter[str]()
        self.in_steps = rng.random() < 0.3
        kinds = rng.choice(_MIXES[self.in_steps]).split()
        count, is_hot = rng.choice((2, 2, 3, 3, 4)), rng.random() < 0.8
        versions = itertools.count(100)
        self.deeds = [
            [self._deed(rng.choice(kinds), is_hot, next(versions)) for _ in range(rng.choice((1, 1, 1, 2)))]
            for _ in range(count)
        ]
        self.disks = Disks(folder, count)
        (self.root,) = self.disks.folders(_FOLDER)
        self.version_of: dict[str, int] = {}
        self.holders: dict[tuple[Path, int], str | None] = {}
        self.lost: str | None = None  # a save without its `.metadata`
        self.busy: dict[Job, _Deed] = {}
        # How long each job had been silent when it saw that it has its claim, and whether one has removed something
        # after much more silence: no promise is made for this (docs_en/guarantees.rst).
        self.seen: dict[int, float] = {}
        self.is_excused = False
        self.claims: dict[str, int] = {}  # who has made which
        self.has_paddles = "newest" in kinds and rng.random() < 0.3
        self._set_up("rebuild" in kinds)
        self.schedule = Schedule(rng, self._faults(), functools.partial(_age, self.root))

    def __str__(self) -> str:
        deeds = "\n".join(f"  job {n}: {deed}" for n, deeds in enumerate(self.deeds) for deed in deeds)
        return f"{deeds}\n" + "\n".join(self.schedule.trace)

    # -- what is to be done

    def _deed(self, kind: str, is_hot: bool, version: int) -> _Deed:
        unique_id = 0 if is_hot else self.rng.choice((0, 0, 1))
        if kind == "load":
            return _Deed(kind, self.rng.choice((unique_id, None)), version)
        return _Deed(kind, None if kind in ("next", "newest", "rebuild", "prune") else unique_id, version)

    def _set_up(self, lose: bool) -> None:
        """Put some checkpoints there; one may have lost its `.metadata`."""
        for unique_id in self.rng.choice(((), (0,), (0,), (0, 1))):
            folder = self._place(self.root, unique_id)
            template = _template(unique_id, 10 + unique_id)
            shutil.copytree(template, folder, dirs_exist_ok=True)
            self._holds(folder, unique_id, 10 + unique_id)
        for unique_id, version in _SOURCE.items():
            self.version_of[_save_in(_source(), unique_id)] = version
        if self.has_paddles:
            self.root.mkdir(exist_ok=True)
            (self.root / f"{_OF_PADDLE}.metadata").write_bytes(_PICKLE)
        if lose and self.holders and self.rng.random() < 0.7:
            folder, unique_id = self.rng.choice([*self.holders])
            self.lost = self.holders.pop((folder, unique_id))
            (folder / f"{unique_id}.metadata").unlink()

    def _holds(self, folder: Path, unique_id: int, version: int) -> None:
        save = _save_in(folder, unique_id)
        self.version_of[save] = version
        self.holders[folder, unique_id] = save

    def _place(self, root: Path, unique_id: int | None) -> Path:
        return step_folder(root, unique_id) if self.in_steps and unique_id is not None else root

    def _faults(self) -> dict[Moment, Fault]:
        """Some faults, at some of all calls."""
        rng, deeds = self.rng, sum(map(len, self.deeds))
        kinds = [kind for kind, weight in _FAULTS for _ in range(weight)]
        drawn = [Kind.SWITCH] * rng.choice((0, 1, 2, 4, 12)) + rng.choices(kinds, k=rng.choice((2, 3, 4, 6)))
        faults = {}
        for kind in drawn:
            number = rng.choice(_NUMBERS) if kind in (Kind.FAIL, Kind.FAIL_AFTER) else 0
            lasts = rng.choice((rng.randrange(60), rng.randrange(300), 10**9)) if kind is Kind.FREEZE else 0
            if kind in (Kind.REFRESH, Kind.FULL):
                lasts = rng.randrange(1, 60)
            ending = ""
            if kind is Kind.STICK:
                lasts, ending = rng.choice((rng.randrange(300), 10**9)), rng.choice(_ENDINGS)
            is_marked = rng.random() < 0.75
            faults[Moment(rng.randrange(deeds * (_MARKED if is_marked else _CALLS)), is_marked)] = Fault(
                kind, number, lasts, ending
            )
        return faults

    # -- doing it

    def run(self) -> None:
        """Let the jobs go."""
        jobs = [Job(functools.partial(self._work, number)) for number in range(len(self.deeds))]
        self.jobs = jobs
        with self._watched(), Interposer(self.disks, self._handle):
            self.schedule.run(jobs)

    def _work(self, number: int) -> None:
        job, path = self.jobs[number], self.disks.paths(_FOLDER)[number]
        for deed in self.deeds[number]:
            self.busy[job] = deed
            try:
                _DOES[deed.kind](self, deed, path)
            except Killed as error:
                deed.error = error
                return
            except BaseException as error:
                deed.error = error
            deed.is_over = True
            deed.there |= {*self.holders.values()}
            job.claims.clear()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Take note of what is meant to be deleted."""
        real = delete_module.begin_deletion

        def begin(storage: Any, unique_id: int, save_id: str) -> Any:
            self.busy[self.schedule.current].meant.add(save_id)
            return real(storage, unique_id, save_id)

        with (
            mock.patch.object(delete_module, "begin_deletion", begin),
            mock.patch.object(removal_module, "begin_deletion", begin),
        ):
            yield

    def _handle(self, call: Call, perform: Perform) -> Any:
        """Take note of what becomes of `.metadata`."""
        place = call.arguments[1] if call.name in ("link", "rename", "replace") else call.path
        name = os.path.basename(place) if isinstance(place, (str, os.PathLike)) else ""
        unique_id = metadata_id(name)
        if call.name == "replace" and name.endswith(".claim"):
            self.claims[name] = call.rank
        elif call.name in ("stat", "unlink"):
            perform = functools.partial(self._look, call, perform)
        if unique_id is None or call.name not in ("link", "rename", "replace", "unlink", "remove"):
            return self.schedule.handle(call, perform)
        folder = (self.root.parent / os.path.dirname(call.path)).resolve()

        def watch(*given: Any) -> Any:
            before = _save_in(folder, unique_id)
            try:
                return perform(*given)
            finally:
                now = _save_in(folder, unique_id)
                if now != before:
                    self._note(call.rank, _Event(folder, unique_id, before, now))

        return self.schedule.handle(call, watch)

    def _look(self, call: Call, perform: Perform, *given: Any) -> Any:
        """Take note of looks at claims, and of removals that come too long after them."""
        name = os.path.basename(call.path)
        if call.name == "unlink" and not name.endswith(".tmp") and self.claims.get(name) != call.rank:
            self.is_excused |= self.jobs[call.rank].silent - self.seen.get(call.rank, math.inf) >= EXPIRES_AFTER
        elif call.name == "stat" and name.endswith(".claim"):
            self.seen[call.rank] = self.jobs[call.rank].silent
        return perform(*given)

    def _note(self, number: int, event: _Event) -> None:
        deed = self.busy[self.jobs[number]]
        deed.events.append(event)
        self.holders[event.folder, event.unique_id] = event.now
        if event.now is not None:
            self.version_of.setdefault(event.now, deed.version)
        if event.before is not None and event.now is None:
            assert event.before in deed.meant, f"{deed} has deleted {event}"
        elif event.before is not None:
            assert deed.kind in ("save", "newest"), f"{deed} has replaced {event}"

    def save(self, deed: _Deed, path: Path) -> None:
        """Save."""
        rank, state = SimulatedRank(0, (0,), SoloHub(), NoTransport()), states_of(deed.version, 1)[0]
        newest, place = deed.kind == "newest", self._place(path, deed.unique_id)
        find = lambda: (state, NumpyAdapter())  # noqa: E731
        save_with(rank.connection, find, place, deed.unique_id, False, _OPTIONS, replace_newest=newest)

    def load(self, deed: _Deed, path: Path) -> None:
        """Load one whole version that somebody has saved, or tried to."""
        place = self._place(path, deed.unique_id)
        found = version_of(load_whole(place, deed.unique_id, options=LoadOptions(timeout=60, progress=False)))
        assert found in self.version_of.values() or found in {deed.version for deeds in self.deeds for deed in deeds}

    def verify(self, deed: _Deed, path: Path) -> None:
        """Look at all bytes."""
        report = verify(self._place(path, deed.unique_id), deed.unique_id)
        assert all("injected" in problem for problem in report.problems), report.problems

    def delete(self, deed: _Deed, path: Path) -> None:
        """Delete."""
        assert deed.unique_id is not None
        delete(LocalStorage(self._place(path, deed.unique_id)), deed.unique_id)

    def copy(self, deed: _Deed, path: Path) -> None:
        """Copy from elsewhere."""
        copy(LocalStorage(_source()), LocalStorage(self._place(path, deed.unique_id)), deed.unique_id, False)

    def rebuild(self, deed: _Deed, path: Path) -> None:
        """Rebuild what has lost its `.metadata`."""
        rebuild(LocalStorage(path), None, False)

    def prune(self, deed: _Deed, path: Path) -> None:
        """Keep the last steps."""
        carry_out(plan_prune(path, Retention(1 + deed.version % 2, None, None)))

    # -- what became of it

    def check(self) -> None:
        """All have told the truth; what is committed is there, and after another save nothing else is."""
        for job, deeds in zip(self.jobs, self.deeds, strict=True):
            for deed in deeds:
                self.outcomes[_outcome(deed)] += 1
                if deed.is_over:
                    _check_told(deed, job.is_told)
        left = self._clean_up()
        for (folder, unique_id), save in self.holders.items():
            assert _save_in(folder, unique_id) == save, f"{unique_id} is not {save}"
            if save is not None:
                assert version_of(load_whole(folder, unique_id)) == self.version_of[save]
        for folder in {folder for folder, _ in self.holders}:
            here = [unique_id for (where, unique_id), save in self.holders.items() if where == folder and save]
            assert sorted(here) == (list_checkpoints(folder) if folder.is_dir() else [])
        assert not left, f"left over: {left}"
        if self.has_paddles:
            self._check_paddles()

    def _check_paddles(self) -> None:
        """A checkpoint of Paddle's is put aside once another stands for it, and not before."""
        stands = any(
            event.now is not None and event.before is None
            for deeds in self.deeds
            for deed in deeds
            if deed.kind == "newest"
            for event in deed.events
        )
        name = f"{_OF_PADDLE}.metadata"
        kept, there = (f"{name}.replaced", name) if stands else (name, f"{name}.replaced")
        assert (self.root / kept).read_bytes() == _PICKLE
        assert not (self.root / there).exists(), f"{there} is there"

    def _clean_up(self) -> list[str]:
        """Let others save, or prune, when all claims have expired, until nothing is left over; returns what is."""
        for number in range(_ROUNDS):
            _age(self.root, 3600.0)
            if self.in_steps:
                if self.root.is_dir():
                    carry_out(plan_prune(self.root, Retention(None, None, None)))
            else:
                deed = _Deed("next", None, LATER + number)
                self.save(deed, self.root)
                self._holds(self.root, max(list_checkpoints(self.root)), deed.version)
            left = self._left()
            if not left:
                break
        return left

    def _left(self) -> list[str]:
        """Names of what nobody needs."""
        left = []
        for folder in [self.root, *(path for path in self.root.glob("*") if path.is_dir())]:
            known = list_checkpoints(folder) if folder.is_dir() else []
            needed = {info.name for unique_id in known for info in read_metadata(folder, unique_id).files}
            needed |= {f"{unique_id}.metadata" for unique_id in known}
            needed |= {f"{_OF_PADDLE}.metadata", f"{_OF_PADDLE}.metadata.replaced"} if self.has_paddles else set()
            names = [path.name for path in folder.glob("*") if path.is_file() and path.name not in needed]
            left += [f"{folder.name}/{name}" for name in names if not self._may_be_left(name)]
            if folder != self.root and not known and not names:
                left.append(f"{folder.name}/")
        return left

    def _may_be_left(self, name: str) -> bool:
        """Whether it is a data file that may be rebuilt, or what a deletion had no room to say that it removes.

        Such a deletion on a full disk has ended badly, whether the file was what it had to remove or a dead save's.
        """
        parsed, temporary = parse_data_file(name), parse_temporary(name)
        if (parsed or temporary) is not None:
            jobs = zip(self.jobs, self.deeds, strict=True)
            if any(job.had_no_room and any(deed.kind in _REMOVALS for deed in deeds) for job, deeds in jobs):
                return True
        return parsed is not None and parsed.save_id == self.lost


_DOES: dict[str, Callable[[_History, _Deed, Path], None]] = {
    "save": _History.save,
    "next": _History.save,
    "newest": _History.save,
    "load": _History.load,
    "verify": _History.verify,
    "delete": _History.delete,
    "copy": _History.copy,
    "rebuild": _History.rebuild,
    "prune": _History.prune,
}


def _outcome(deed: _Deed) -> str:
    if not deed.is_over:
        return "killed"
    return "done" if deed.error is None else "refused"


def _check_told(deed: _Deed, is_told: bool) -> None:
    """What was said of it is true, and an error that a user can understand."""
    error, named = deed.error, [event for event in deed.events if event.now is not None]
    if deed.kind in ("save", "next", "newest", "copy", "rebuild"):
        if error is None:
            assert named, f"{deed} is not committed"
        elif not isinstance(error, DurabilityUnknownError):
            assert not any(event.now in deed.there for event in named), f"{deed} is committed"
    if error is None or isinstance(error, (CheckpointNotFoundError, CheckpointReplacedError)):
        return
    if isinstance(error, CheckpointCorruptedError):
        assert deed.kind == "rebuild" or is_told, f"{deed} has found damage"
    elif isinstance(error, ValueError) and deed.kind == "copy":
        assert "already" in str(error), f"{deed} has raised {error!r}"
    elif isinstance(error, FileNotFoundError) and error.filename is not None and not is_told:
        assert not Path(error.filename).parent.exists(), f"{deed} has raised {error!r}"  # the folder has been removed
    elif isinstance(error, OSError) and not isinstance(error, CheckpointError):
        assert is_told, f"{deed} has raised {error!r}"
    else:
        assert isinstance(error, (CheckpointError, OSError)), f"{deed} has raised {error!r}"


def _age(root: Path, seconds: float) -> None:
    """Make all files look older, and the folders."""
    for path in sorted(root.rglob("*"), reverse=True):
        age(path, seconds)
    if root.is_dir():
        age(root, seconds)


def _save_in(folder: Path, unique_id: int) -> Any:
    """The save that is under an id, if any."""
    return save_of(LocalStorage(folder), unique_id) if (folder / f"{unique_id}.metadata").exists() else None


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, which goes with it, or with its attempts' if it is killed."""
    return tempfile.TemporaryDirectory(prefix=prefix(os.getpid()), dir=MEMORY)


def _saved(folder: Path, unique_id: int, version: int) -> None:
    rank = SimulatedRank(0, (0,), SoloHub(), NoTransport())
    rank.save(states_of(version, 1)[0], folder, unique_id, _OPTIONS)


@functools.cache
def _template(unique_id: int, version: int) -> Path:
    """A folder with one checkpoint."""
    folder = Path(_scratch().name) / f"{unique_id}-{version}"
    _saved(folder, unique_id, version)
    return folder


@functools.cache
def _source() -> Path:
    """The folder that is copied from."""
    folder = Path(_scratch().name) / "source"
    for unique_id, version in _SOURCE.items():
        _saved(folder, unique_id, version)
    return folder
