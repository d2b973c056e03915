"""I/O errors: calls of one rank fail, once or from then on, or write less than they were to, in a save or a load."""

from __future__ import annotations

import errno
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dist_ckpt.errors import CheckpointError, DurabilityUnknownError, RankFailureError
from test.jobs import try_load

from .calls import CHANGES, Call, Disks, Interposer, Perform
from .groups import BEFORE, FOLDER, Case, after_a_dead_one, counts, made, threads, versions
from .leftovers import check_later_save
from .states import LEFT_ALONE, blank_states, check_states

NAME = "I/O errors"
_NAMING = ("link", "rename", "replace")
_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)  # Python itself goes on after EINTR


@dataclass(slots=True)
class _Broken:
    """A handler that lets calls fail.

    Attributes:
        rank: Whose.
        number: From which call on.
        error: How.
        stays: Whether all calls from then on fail that change the disk.
        short: Whether a write is short, instead of an error.
        late: Whether the first of these calls has done its work when it fails.
        struck: What has failed first.
        vital: Whether the save must not be reported then.
    """

    rank: int
    number: int
    error: int
    stays: bool = False
    short: bool = False
    late: bool = False
    struck: Call | None = None
    vital: bool = False
    _names_to_sync: int | None = None

    def __call__(self, call: Call, perform: Perform) -> Any:
        """Handle a call, see `Interposer`."""
        due = call.number == self.number or (self.stays and call.number > self.number and call.name in CHANGES)
        if call.rank != self.rank or not due:
            result = perform()
            self._note(call)
            return result
        if self.struck is None:
            self.struck, self.vital = call, self._is_vital(call)
        if self.short and call.name == "pwrite" and len(call.arguments[1]) > 1:
            descriptor, data, offset = call.arguments
            return perform(descriptor, memoryview(data)[: len(data) // 2], offset)
        if call.name == "close" or self.short or (self.late and call is self.struck):
            result = perform()  # a descriptor is given back in any case
        if self.short:
            return result
        raise OSError(self.error, "injected", call.path)

    def _note(self, call: Call) -> None:
        """See whether the checkpoint has got its name, and whether that is durable."""
        if call.name in _NAMING and str(call.arguments[1]).endswith(".metadata"):
            self._names_to_sync = 1
        elif call.name == "fsync" and call.path == FOLDER and self._names_to_sync:
            self._names_to_sync = 0

    def _is_vital(self, call: Call) -> bool:
        """Whether a save must not be reported if this fails: what makes its files and their names durable."""
        if call.name not in ("pwrite", "fsync") or self.short:
            return False
        if call.path == FOLDER:
            return self._names_to_sync != 0
        return call.path.endswith((".safetensors", ".metadata.tmp"))

    def __str__(self) -> str:
        how = (
            "short"
            if self.short
            else f"{errno.errorcode[self.error]}{' from then on' * self.stays}{' after its work' * self.late}"
        )
        return f"{how} at call {self.number} of rank {self.rank} ({self.struck})"


def attempt(seed: int, folder: Path) -> Counter[str]:
    """Break one call of one rank of two, or of three, in a save; or in a load."""
    rng = random.Random(seed)
    case = Case(rng.choice((1, 2, 2, 3)), rng.choice((None, 1)), rng.random() < 0.8, rng.random() < 0.3)
    rank = rng.randrange(case.ranks)
    stays, short = rng.random() < 0.3, rng.random() < 0.1
    number, late = rng.randrange(counts(case)[rank]), rng.random() < 0.2
    broken = _Broken(rank, number, rng.choice(_ERRORS), stays, short, late)
    disks = made(case, folder)
    if case.shared and rng.random() < 0.3:
        after_a_dead_one(disks, case.ranks, rng)
    run = _load if rng.random() < 0.25 else _save
    try:
        return Counter([run(case, disks, broken)])
    except Exception as error:
        raise AssertionError(f"{case}, {broken}: {type(error).__name__}: {error}") from error


def _save(case: Case, disks: Disks, broken: _Broken) -> str:
    with Interposer(disks, broken):
        results = threads(case, disks)
    folders = disks.folders(FOLDER)
    found = versions(folders)
    assert found in (BEFORE, case.after), f"{found}: neither what was there nor what was saved"
    outcome = _outcome(case, broken, results, found)
    check_later_save(folders)
    return outcome


def _outcome(case: Case, broken: _Broken, results: list[Any], found: dict[int, int]) -> str:
    failed = [result for result in results if isinstance(result, BaseException)]
    if not failed:
        assert found == case.after, "reported, and not there"
        assert not broken.vital, "reported, and yet not durable"
        return "saved" if broken.struck else "not reached"
    assert len(failed) == len(results), f"not on all ranks: {results}"
    for error in failed:
        _check_blame(case, broken, error)
    if found == BEFORE:
        assert not any(_is_committed(error) and "perhaps" not in str(error) for error in failed), failed
        return "refused"
    assert all(_is_committed(error) for error in failed), f"committed, but said to have failed: {failed}"
    return "committed, said to be uncertain"


def _check_blame(case: Case, broken: _Broken, error: BaseException) -> None:
    """An error says which rank has failed, and why."""
    if case.ranks == 1:
        assert isinstance(error, (OSError, CheckpointError)), repr(error)
    elif not _is_committed(error):
        assert isinstance(error, RankFailureError), repr(error)
        assert broken.rank in error.failures, repr(error)
    assert "injected" in str(error) or broken.short, repr(error)


def _is_committed(error: BaseException) -> bool:
    """Whether an error says that the checkpoint is committed."""
    return isinstance(error, DurabilityUnknownError)


def _load(case: Case, disks: Disks, broken: _Broken) -> str:
    """The same for a load, which makes fewer calls."""
    broken.number //= 2
    states = blank_states(case.ranks)
    with Interposer(disks, broken):
        results = try_load(states, disks.paths(FOLDER), 1)
    failed = [result for result in results if isinstance(result, BaseException)]
    if not failed:
        assert check_states(states) == BEFORE[1]
        return "loaded" if broken.struck else "not reached"
    assert len(failed) == len(results), f"not on all ranks: {results}"
    for error in failed:
        assert isinstance(error, CheckpointError if case.ranks > 1 else (CheckpointError, OSError)), repr(error)
        assert "injected" in str(error) or "is missing" in str(error), repr(error)  # one who has that disk cannot
    assert all(state["n"] in (None, LEFT_ALONE) for state in states), "some values are given"
    return "load refused"
