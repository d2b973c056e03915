"""What the coordinator sees in all ranks' requests of a save: whether they ask for the same, and where they write."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping

from ..storage.base import FolderIdentity
from .messages import SaveRequest
from .planned_save import PlannedSave

__all__ = ["check_arguments", "check_room", "leaders_of"]


def check_arguments(requests: Mapping[int, SaveRequest], coordinator: int) -> None:
    """All ranks must have passed the same arguments.

    Raises:
        ValueError: they did not.
    """
    if len({(one.unique_id, one.block_bytes, one.data_suffix) for one in requests.values()}) == 1:
        return  # as nearly always; of many ranks this is seen faster
    ours = requests[coordinator]
    for rank, request in sorted(requests.items()):
        if request.unique_id != ours.unique_id:
            raise ValueError(
                f"rank {rank} passed unique_id={request.unique_id}, rank {coordinator} unique_id={ours.unique_id}; "
                "all ranks must pass the same"
            )
        for name in ("block_bytes", "data_suffix"):
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
    need = Counter[tuple[str, int]]()
    for rank, nbytes in zip(planned.state.ranks, planned.rank_bytes.tolist(), strict=True):
        need[requests[rank].folder.identity[:2]] += nbytes
    for rank in planned.state.ranks:
        folder = requests[rank].folder
        wanted = need[folder.identity[:2]]  # host and device
        if folder.free_bytes is not None and wanted > folder.free_bytes:
            raise OSError(
                errno.ENOSPC,
                f"the filesystem of rank {rank}'s folder has {folder.free_bytes:,} bytes free, and {wanted:,} are to "
                "be written to it",
                requests[rank].location,
            )
