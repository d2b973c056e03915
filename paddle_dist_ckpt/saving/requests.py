"""What the coordinator sees in all ranks' requests of a save: whether they ask for the same, and where they write."""

from __future__ import annotations

import errno
import operator
from collections.abc import Mapping

import numpy as np

from ..storage.base import FolderIdentity
from .messages import SaveRequest
from .planned_save import PlannedSave

__all__ = ["check_arguments", "check_room", "leaders_of"]

_SAME = ("block_bytes", "data_suffix", "check_replicas")


def check_arguments(requests: Mapping[int, SaveRequest], coordinator: int) -> None:
    """All ranks must have passed the same arguments.

    Raises:
        ValueError: they did not.
    """
    if len(set(map(operator.attrgetter("unique_id", *_SAME), requests.values()))) == 1:
        return  # as nearly always; of many ranks this is seen faster
    ours = requests[coordinator]
    for rank, request in sorted(requests.items()):
        if request.unique_id != ours.unique_id:
            raise ValueError(
                f"rank {rank} passed unique_id={request.unique_id}, rank {coordinator} unique_id={ours.unique_id}; "
                "all ranks must pass the same"
            )
        for name in _SAME:
            theirs, own = getattr(request, name), getattr(ours, name)
            if theirs != own:
                raise ValueError(
                    f"rank {rank} passed {name}={theirs!r}, rank {coordinator} {own!r}; all ranks must pass the same"
                )


def leaders_of(folders: Mapping[int, FolderIdentity], coordinator: int) -> frozenset[int]:
    """One rank for each folder: the coordinator for its own, the lowest rank for each other."""
    leaders = {folders[rank]: rank for rank in (*sorted(folders, reverse=True), coordinator)}
    return frozenset(leaders.values())


def check_room(planned: PlannedSave, requests: Mapping[int, SaveRequest]) -> None:
    """Raises OSError (ENOSPC): a filesystem has less room than the plan needs."""
    ranks = planned.state.ranks
    folders = [requests[rank].folder for rank in ranks]
    numbers: dict[tuple[str, int], int] = {}  # of filesystems: by host and device
    number = [numbers.setdefault(folder.identity[:2], len(numbers)) for folder in folders]
    needs = np.bincount(number, planned.rank_bytes)  # in float64, which is exact for less than 9 PB
    for rank, folder, need in zip(ranks, folders, needs[number].tolist(), strict=True):
        if folder.free_bytes is not None and need > folder.free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"the filesystem of rank {rank}'s folder has {folder.free_bytes:,} bytes free, and {int(need):,} are "
                "to be written to it",
                requests[rank].location,
            )
