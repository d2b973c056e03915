"""Work without Python's search for garbage."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collections"]

_begun: list[None] = []
"""An item for each block that will have Python look for garbage again at its end."""


@contextmanager
def no_collections() -> Iterator[None]:
    """A block in which Python does not look for garbage in cycles.

    For blocks that make very many objects which stay, and none in cycles: to look through all of them again and again,
    and through all that a framework has, would take as long as to make them.
    """
    if not gc.isenabled():
        yield
        return
    _begun.append(None)
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
        del _begun[-1:]


def _look_again() -> None:
    """In a process that another thread has forked meanwhile, a worker that reads training data say, no block ends."""
    if _begun:
        _begun.clear()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_look_again)
