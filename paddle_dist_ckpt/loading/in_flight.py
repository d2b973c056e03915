"""Memory of tensors to which an exchange that was given up may still write.

Nobody can end a collective that hangs. When the rank that it waits for goes on after all, what that sends overwrites
whatever the tensors hold by then. So no load fills them as long as it is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..core.columns import IntArray
from ..errors import CollectiveError
from ..tree.paths import plain_key
from .wording import some_of

if TYPE_CHECKING:
    from .targets import Targets

__all__ = ["check_none_in_flight", "note_in_flight"]

_MOST_NAMES = 20
_lock = threading.Lock()


class _InFlight(NamedTuple):
    """Stretches of memory, ``[n]``, by their first addresses; the highest address behind each of them and all before
    it; and what says whether something may still be written there."""

    first: IntArray
    reach: IntArray
    under_way: Callable[[], bool]


_noted: list[_InFlight] = []


def note_in_flight(first: IntArray, last: IntArray, under_way: Callable[[], bool]) -> None:
    """Remember that something may be written to stretches of memory as long as ``under_way`` says so.

    Args:
        first: Their first addresses, ``[n]``.
        last: The addresses behind their last bytes, ``[n]``.
        under_way: Whether it may.
    """
    order = np.argsort(first)
    with _lock:
        _noted.append(_InFlight(first[order], np.maximum.accumulate(last[order]), under_way))


def check_none_in_flight(targets: Targets) -> None:
    """See that nothing else writes to what is to be filled.

    Raises:
        CollectiveError: something may.
    """
    with _lock:
        _noted[:] = [one for one in _noted if one.under_way()]
        noted = list(_noted)
    if not noted:
        return
    first, last = targets.stretches
    hit = np.zeros(len(targets), bool)
    for one in noted:
        before = np.searchsorted(one.first, last)  # stretches that begin before a target ends
        hit |= (before > 0) & (one.reach[before - 1] > first)
    rows = np.flatnonzero(hit & ~targets.on_device).tolist()
    keys = list(dict.fromkeys(plain_key(targets.path(row)) for row in rows))
    if keys:
        shown = some_of(keys, _MOST_NAMES, ", ")
        raise CollectiveError(
            f"an exchange that was given up may still write to {shown}: restart the job, or load into new tensors"
        )
