"""Corruption: files of a checkpoint are changed; a load gives what was saved, or an error that says that it cannot."""

from __future__ import annotations

import functools
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from paddle_dist_ckpt import rebuild_metadata, verify
from paddle_dist_ckpt.errors import CheckpointError
from test.jobs import errors_of, files_in, save_on, try_load

from .states import blank_states, check_states, states_of, version_in

NAME = "corruption"
CHANGES = 25
_RANKS = 2
_VERSION, _OTHER = 1, 2
_SECTOR = 512
_HEADER = 1024
"""About so many bytes of a data file's header are no padding."""
_Change = Callable[[dict[str, bytes], str, random.Random], None]


def attempt(seed: int, folder: Path) -> Counter[str]:
    """Save one checkpoint, and change it in many ways, one after the other."""
    rng, outcomes = random.Random(seed), Counter[str]()
    good, other = (_saved(folder / f"version{version}", version, rng) for version in (_VERSION, _OTHER))
    changed = folder / "changed"
    for number in range(CHANGES):
        files = dict(good)
        change = rng.choice(_KINDS)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            at_random = rng.random() < 0.7 or "0.metadata" not in files
            name = rng.choice(sorted(files)) if at_random else "0.metadata"
            if change is _mix:
                _mix(files, name, rng, other)
            else:
                change(files, name, rng)
        changed.mkdir()
        for name, data in files.items():
            (changed / name).write_bytes(data)
        try:
            # What is beside the checkpoint is no part of it.
            whole = any(all(files.get(name) == data for name, data in saved.items()) for saved in (good, other))
            outcomes[_check(changed, whole, rng)] += 1
        except Exception as error:
            kind = getattr(change, "__name__", "change").strip("_")
            raise AssertionError(f"change {number}, {kind}: {type(error).__name__}: {error}") from error
        shutil.rmtree(changed)
    return outcomes


def _saved(folder: Path, version: int, rng: random.Random) -> dict[str, bytes]:
    save_on(states_of(version, _RANKS), folder, 0)
    return files_in(folder)


def _check(folder: Path, whole: bool, rng: random.Random) -> str:
    """What has come of a load of all by one process, of one by two ranks, and of a look at all bytes.

    Args:
        folder: Where it is.
        whole: Whether each of its files is what a save has written; even if it is another save, all of it.
        rng: Draws what else is done.
    """
    sound = _is_sound(folder)
    assert sound == whole, f"verify says {'all is well' if sound else 'that something is wrong'}"
    try:
        assert version_in(folder, 0) in (_VERSION, _OTHER)  # the other one if all of its files have got here
        loaded = True
    except CheckpointError:
        loaded = False
    assert loaded or not sound, "a load finds what verify does not"
    if rng.random() < 0.1:
        states = blank_states(_RANKS)
        results = try_load(states, folder, 0)
        if any(isinstance(result, BaseException) for result in results):
            errors_of(results, CheckpointError)
            assert not sound
        else:
            assert check_states(states) in (_VERSION, _OTHER)
    if not loaded and rng.random() < 0.3:
        return _rebuilt(folder)
    return "whole" if whole else "right, but for what is not needed" if loaded else "refused"


def _is_sound(folder: Path) -> bool:
    try:
        return verify(folder, 0).ok
    except CheckpointError:
        return False


def _rebuilt(folder: Path) -> str:
    """Make `.metadata` again from the data files, which looks at all of them."""
    (folder / "0.metadata").unlink(missing_ok=True)
    try:
        rebuild_metadata(folder)
    except CheckpointError:
        return "refused, and not rebuilt"
    version = version_in(folder)
    assert version in (_VERSION, _OTHER)
    return "rebuilt"


def _flip(files: dict[str, bytes], name: str, rng: random.Random) -> None:
    """One bit, in the header as often as anywhere."""
    data = bytearray(files[name])
    if data:
        data[rng.randrange(rng.choice((len(data), min(len(data), _HEADER))))] ^= 1 << rng.randrange(8)
    files[name] = bytes(data)


def _overwrite(files: dict[str, bytes], name: str, rng: random.Random) -> None:
    """Zeros, ones, or anything, at any place; or by whole sectors."""
    data = bytearray(files[name])
    if not data:
        return
    length = rng.choice((1, 8, 100, _SECTOR, 4096))
    start = rng.randrange(len(data))
    start -= start % _SECTOR if length >= _SECTOR else 0
    new = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length), b" " * length, b"9" * length))
    data[start : start + length] = new[: len(data) - start]
    files[name] = bytes(data)


def _cut(files: dict[str, bytes], name: str, rng: random.Random) -> None:
    files[name] = files[name][: rng.randrange(len(files[name]) + 1)]


def _extend(files: dict[str, bytes], name: str, rng: random.Random) -> None:
    length = rng.choice((1, 8, 4096))
    files[name] += rng.choice((bytes(length), rng.randbytes(length), files[name][:length]))


def _swap_parts(files: dict[str, bytes], name: str, rng: random.Random) -> None:
    """Exchange two pieces of a file, or repeat one elsewhere."""
    data, length = bytearray(files[name]), rng.choice((1, 8, _SECTOR, 4096))
    if len(data) < 2 * length:
        return
    a, b = (rng.randrange(len(data) // length) * length for _ in range(2))
    first, second = data[a : a + length], data[b : b + length]
    if len(first) == len(second):
        data[b : b + length] = first
        if rng.random() < 0.5:
            data[a : a + length] = second
    files[name] = bytes(data)


def _shift(files: dict[str, bytes], name: str, rng: random.Random) -> None:
    """Insert some bytes, or take some out, sometimes with the length kept."""
    data, length = files[name], rng.choice((1, 4, _SECTOR))
    place = rng.randrange(len(data) + 1)
    new = (
        data[:place] + rng.randbytes(length) + data[place:]
        if rng.random() < 0.5
        else data[:place] + data[place + length :]
    )
    files[name] = new[: len(data)].ljust(len(data), b"\0") if rng.random() < 0.5 else new


def _swap_files(files: dict[str, bytes], name: str, rng: random.Random) -> None:
    other = rng.choice(sorted(files))
    files[name], files[other] = files[other], files[name]


def _remove(files: dict[str, bytes], name: str, rng: random.Random) -> None:
    if len(files) > 1:
        del files[name]


def _mix(files: dict[str, bytes], name: str, rng: random.Random, other: dict[str, bytes]) -> None:
    """The file of another save in the place of this one, or a part of it, or beside it."""
    theirs = next(n for n in other if n.partition(".")[0] == name.partition(".")[0])
    data = other[theirs]
    how = rng.randrange(3)
    if how == 0:
        files[name] = data
    elif how == 1:
        files[theirs] = data
    else:
        place = rng.randrange(len(data) // _SECTOR + 1) * _SECTOR
        files[name] = rng.choice((files[name][:place] + data[place:], data[:place] + files[name][place:]))


_KINDS: tuple[_Change | functools.partial[None], ...] = (
    _flip,
    _flip,
    _overwrite,
    _cut,
    _extend,
    _swap_parts,
    _shift,
    _swap_files,
    _remove,
    _mix,
)
