"""What nobody needs any more: a save that comes when all leases have ended removes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paddle_dist_ckpt import list_checkpoints, read_metadata, verify
from paddle_dist_ckpt.files.names import is_ours, parse_claim, parse_data_file
from test.jobs import age, save_on

from .states import states_of

__all__ = ["LATER", "age_all", "check_clean", "check_later_save"]

LATER = 1000
"""The version of a save that comes when all is over."""


def age_all(folder: Path) -> None:
    """Make all that is in a folder look as if nobody had touched it for an hour."""
    for path in sorted(folder.rglob("*")):
        age(path)


def check_clean(*folders: Path, claims: bool = True, data: bool = True) -> None:
    """Committed checkpoints have all their files, and nothing else is left of ours.

    Args:
        folders: Where they are; each has some of the data files, the first one the rest.
        claims: Whether claims count: nobody needs to save to the folder of a step again.
        data: Whether anything but what is missing counts.
    """
    needed, names = set(), {path.name for folder in folders for path in folder.iterdir() if is_ours(path.name)}
    for unique_id in list_checkpoints(folders[0]):
        needed |= {f"{unique_id}.metadata", *(info.name for info in read_metadata(folders[0], unique_id).files)}
    left = {name for name in names - needed if data and (claims or parse_claim(name) is None)}
    assert not left, f"left behind: {sorted(left)}"
    assert not needed - names, f"gone: {sorted(needed - names)}"


def check_later_save(folders: Sequence[Path], data: bool = True, fresh: bool = False) -> None:
    """A save that comes when all leases have ended works, removes what is left, and spares what is committed.

    Args:
        folders: One for each rank that saves.
        data: See `check_clean`.
        fresh: Whether another save comes first, which must spare what might still be of use to somebody.
    """
    if fresh:
        before = {path for folder in folders for path in folder.iterdir() if parse_data_file(path.name)}
        save_on(states_of(LATER, len(folders)), folders)
        assert before <= {path for folder in folders for path in folder.iterdir()}, (
            "a save that may live has lost files"
        )
    for folder in folders:
        age_all(folder)
    known = list_checkpoints(folders[0])
    saved = save_on(states_of(LATER, len(folders)), folders)[0].unique_id
    assert list_checkpoints(folders[0]) == [*known, saved]
    assert len(folders) > 1 or verify(folders[0]).ok
    check_clean(*folders, data=data)
