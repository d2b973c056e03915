"""Removes steps on every host, in a session of the ranks that have saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from ..core.protocols import ControlSession
from ..folder.delete import Deletion
from ..storage import Folders, Storage
from .steps import remove_step

__all__ = ["remove_together"]


def remove_together(
    session: ControlSession, root: Path, begin: Callable[[], dict[int, Deletion]], opened: Folders
) -> None:
    """Rounds ``retain`` and ``remove``: one rank of each folder removes the files of what the coordinator uncommits.

    The coordinator removes those of its own folder, where the claims are, when all others have removed theirs.

    Args:
        session: All ranks'.
        root: The folder of the steps' folders, on this rank.
        begin: Uncommits what is to go, on the coordinator.
        opened: Opens a folder.
    """
    removals: dict[int, Deletion] = {}

    def choose(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        removals.update(begin())
        if not removals:
            return dict.fromkeys(messages, b"")
        saves = json.dumps({step: removal.saves for step, removal in removals.items()}).encode()
        return _to_one_of_each(messages, saves, b"{}", session.coordinator)

    def remove() -> bytes:
        for step, saves in json.loads(answer).items():
            remove_step(root, int(step), saves, opened)
        return b""

    def end(messages: Mapping[int, bytes]) -> dict[int, bytes]:
        while removals:
            step = next(iter(removals))
            removals[step].finish()  # with it goes the claim, by which all this would be done after a crash
            del removals[step]
            remove_step(root, step, (), opened)
        return dict.fromkeys(messages, b"")

    try:
        answer = session.gather_scatter("retain", lambda: _identity(opened(root)), choose)
        if answer:
            session.gather_scatter("remove", remove, end)
    finally:
        for removal in list(removals.values()):  # a rank has failed
            removal.leave()


def _identity(storage: Storage) -> bytes:
    """Which folder this rank sees, as bytes to be compared; none if there is none, which is not made here."""
    try:
        return repr(storage.identity()).encode()
    except FileNotFoundError:
        return b""


def _to_one_of_each(folders: Mapping[int, bytes], message: bytes, other: bytes, coordinator: int) -> dict[int, bytes]:
    """A message to one rank of each folder but the coordinator's, and another to the rest."""
    first = {folder: rank for rank, folder in sorted(folders.items(), reverse=True)}
    for folder in (folders[coordinator], b""):
        first.pop(folder, None)
    return {rank: message if first.get(folder) == rank else other for rank, folder in folders.items()}
