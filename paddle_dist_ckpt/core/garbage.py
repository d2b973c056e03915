"""Work without Python's search for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collections"]


@contextmanager
def no_collections() -> Iterator[None]:
    """A block in which Python does not look for garbage in cycles.

    For blocks that make very many objects which stay, and none in cycles: to look through all of them again and again,
    and through all that a framework has, would take as long as to make them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
