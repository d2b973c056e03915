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


def check_room(planned: PlannedSave, requests: Mapping[int, SaveRequest], free_bytes: Mapping[int, int | None]) -> None:
    """See that there is room for all files.

    Args:
        planned: What is to be written.
        requests: All ranks'.
        free_bytes: What each rank has seen free in its filesystem, None if that is unknown. Nobody writes anything
            meanwhile, while some may be removing files, so the most that was seen of a filesystem counts.

    Raises:
        OSError: (ENOSPC) a filesystem has less room than the plan needs.
    """
    ranks = planned.state.ranks
    numbers: dict[tuple[str, int], int] = {}  # of filesystems: by host and device
    number = [numbers.setdefault(requests[rank].folder.identity[:2], len(numbers)) for rank in ranks]
    needs = np.bincount(number, planned.rank_bytes).tolist()  # in float64, which is exact for less than 9 PB
    room: dict[int, tuple[int, int]] = {}  # of each filesystem, and who has seen it
    for rank, n in zip(ranks, number, strict=True):
        free = free_bytes[rank]
        if free is not None and (n not in room or free > room[n][0]):
            room[n] = free, rank
    for n, (free, rank) in room.items():
        if needs[n] > free:
            raise OSError(
                errno.ENOSPC,
                f"the filesystem of rank {rank}'s folder has {free:,} bytes free, and {int(needs[n]):,} are to be "
                "written to it",
                requests[rank].location,
            )
