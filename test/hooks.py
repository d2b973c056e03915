"""Hooks of a FaultyStorage, for tests: before one kind of operation, on files whose names match a pattern.

Patterns are those of a shell: ``5.*.claim``.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable

from test.jobs import Killed

Hook = Callable[[str, str], None]


def does(operation: str, names: str, work: Callable[[], object]) -> Hook:
    """Does something before each such operation."""

    def hook(done: str, name: str) -> None:
        if done == operation and fnmatch.fnmatchcase(name, names):
            work()

    return hook


def raises(operation: str, names: str, error: int | BaseException, armed: Callable[[], object] = lambda: True) -> Hook:
    """Has each such operation raise an error, while it is ``armed``: this one, or OSError with this number."""

    def hook(done: str, name: str) -> None:
        if done == operation and fnmatch.fnmatchcase(name, names) and armed():
            raise OSError(error, os.strerror(error), name) if isinstance(error, int) else error

    return hook


def dies(operation: str, names: str = "*") -> Hook:
    """Dies at the first such operation: from there on nothing has an effect."""
    dead: list[bool] = []

    def hook(done: str, name: str) -> None:
        if dead or (done == operation and fnmatch.fnmatchcase(name, names)):
            dead.append(True)
            raise Killed

    return hook
