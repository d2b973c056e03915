"""What the coordinator sees in all ranks' requests of a save: where they write, and whether there is room."""

from __future__ import annotations

import errno
from collections.abc import Hashable, Mapping

import numpy as np

from .messages import SaveRequest
from .planned_save import PlannedSave

__all__ = ["check_room", "leaders_of"]


def leaders_of(folders: Mapping[int, Hashable], coordinator: int) -> frozenset[int]:
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
