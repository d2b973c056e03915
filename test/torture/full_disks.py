"""Full disks: a filesystem runs out of room, or of inodes, at a call of a save. Small ones are mounted for that."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from paddle_dist_ckpt.errors import CheckpointError

from .calls import Call, Interposer, Perform
from .forked import Child, Failed
from .groups import BEFORE, FOLDER, Case, counts, made, threads, versions
from .leftovers import check_later_save

NAME = "full disks"
_TMPFS, _INODES, _EXT4 = "full tmpfs", "tmpfs without inodes", "full ext4"
_KINDS = (_TMPFS, _INODES, _EXT4)
_NEW_NAMESPACE = 0x00020000  # CLONE_NEWNS: what is mounted here is nowhere else, and gone with this process
_IMAGE_BYTES = 8 << 20
_BALLAST = "ballast"


def attempt(seed: int, folder: Path) -> Counter[str]:
    """Fill one disk during a save, in a process of its own."""
    kind = _KINDS[seed % len(_KINDS)]
    with Child(lambda: _in_namespace(kind, seed, folder)) as child:
        result = child.result()
    if isinstance(result, Failed):
        raise AssertionError(f"{kind}: {result.kinds[0]}: {result.text}")
    return Counter([f"{kind}: {result}"])


def _in_namespace(kind: str, seed: int, folder: Path) -> str:
    disk = folder / "mounted"
    disk.mkdir()
    if ctypes.CDLL(None).unshare(_NEW_NAMESPACE) != 0 or not _mount(kind, disk, folder / "image"):
        return "skipped, cannot mount"
    return _fill_during_a_save(kind, disk, random.Random(seed))


def _mount(kind: str, disk: Path, image: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=64", "torture", str(disk)]
    try:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)
        if kind == _EXT4:
            with image.open("wb") as file:
                file.truncate(_IMAGE_BYTES)
            subprocess.run(["mkfs.ext4", "-q", "-F", "-N", "128", str(image)], check=True, capture_output=True)
            command = ["mount", "-t", "ext4", "-o", "loop", str(image), str(disk)]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _fill_during_a_save(kind: str, disk: Path, rng: random.Random) -> str:
    case = Case(rng.choice((1, 2)), rng.choice((None, 1)), in_background=rng.random() < 0.3)
    number, room = rng.randrange(sum(counts(case).values())), rng.choice((0, 0, 1, 5))
    disks = made(case, disk)
    made_calls: list[Call] = []

    def handle(call: Call, perform: Perform) -> Any:
        made_calls.append(call)
        if len(made_calls) == number + 1:
            _fill(disk, kind == _INODES, room)
        return perform()

    with Interposer(disks, handle):
        results = threads(case, disks)
    found = versions(disks.folders(FOLDER))
    try:
        outcome = _outcome(case, results, found)
    except AssertionError as error:
        raise AssertionError(f"{case}, call {number}, room {room}: {error}") from error
    for path in disk.glob(f"{_BALLAST}*"):
        path.unlink()
    check_later_save(disks.folders(FOLDER))
    return outcome


def _fill(disk: Path, inodes: bool, room: int) -> None:
    """Leave only some pages or inodes free."""
    with suppress(OSError):
        if inodes:
            for number in range(1000):
                (disk / f"{_BALLAST}{number}").touch()
        else:
            with (disk / _BALLAST).open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
    with suppress(OSError):
        if inodes:
            for number in range(room):
                (disk / f"{_BALLAST}{number}").unlink()
        else:
            os.truncate(disk / _BALLAST, max(0, (disk / _BALLAST).stat().st_size - room * 4096))


def _outcome(case: Case, results: list[Any], found: dict[int, int]) -> str:
    failed = [result for result in results if isinstance(result, BaseException)]
    if not failed:
        assert found == case.after, f"reported, and not there: {found}"
        return "saved"
    assert len(failed) == len(results), f"not on all ranks: {results}"
    for error in failed:
        assert isinstance(error, (OSError, CheckpointError)), repr(error)
        assert "No space left" in str(error) or "bytes free" in str(error), repr(error)
    assert found == BEFORE, f"{found}, after {failed}"
    return "refused"
